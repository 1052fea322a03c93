"""The gate of a pre-fault: whether there is room for what a sweep would bring in."""

from dataclasses import dataclass

from moecache.errors import ConfigError
from moecache.settings import parse_prefault
from moecache.units import format_bytes

GATES = ("fits", "fits-free", "always")


@dataclass(frozen=True)
class Verdict:
    """The gate's decision.

    Parameters
    ----------
    run : bool
        Whether to sweep.
    reason : str
        One of "empty", "off", "forced", "always", "room unknown", "too large", "fits".
    message : str
        The reason in words, with the figures.
    """

    run: bool
    reason: str
    message: str


def decide(
    num_bytes: int, room_bytes: int | None, *, mode: object = "auto", gate: str = "fits"
) -> Verdict:
    """Decide whether to sweep. Pure: reads nothing.

    The first that applies decides: nothing to sweep (no); mode "off" (no); mode
    "force" (yes); gate "always" (yes); room unknown (yes); more than 80 % of the
    room (no); else it fits (yes).

    Parameters
    ----------
    num_bytes : int
        Bytes that a sweep would bring into memory.
    room_bytes : int or None
        Memory of the kind that the gate compares with; `None` if unknown.
    mode : {"auto", "off", "force"}
        Also 0 for off and 1 for force.
    gate : {"fits", "fits-free", "always"}
        The meaning of `room_bytes`: the machine's memory, or its free part; "always" does
        not compare.

    Raises
    ------
    ConfigError
        If the gate or the mode is unknown.
    """
    if gate not in GATES:
        raise ConfigError(f"gate {gate!r} is not one of {', '.join(GATES)}")
    mode = parse_prefault(mode, known=("auto", "off", "force"))
    size = format_bytes(num_bytes)
    if num_bytes == 0:
        return Verdict(False, "empty", "there is nothing to bring into memory")
    if mode == "off":
        return Verdict(False, "off", "switched off")
    if mode == "force":
        return Verdict(True, "forced", f"{size}, forced")
    if gate == "always":
        return Verdict(True, "always", f"{size}, whatever the memory")
    if room_bytes is None:
        return Verdict(True, "room unknown", f"{size}; the size of the memory is unknown")
    share = f"{size} of {format_bytes(room_bytes)} {'free' if gate == 'fits-free' else 'memory'}"
    # Integers: exactly 80 % runs.
    if num_bytes * 5 > room_bytes * 4:
        return Verdict(
            False, "too large", f"{share} is more than 80 %; mode 'force' does it anyway"
        )
    return Verdict(True, "fits", f"{share}")
