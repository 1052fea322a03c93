"""Network: how long rows take from every rank to every other one."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moecache.errors import ConfigError
from moecache.units import format_bytes_per_s, format_ns, parse_bytes_per_s, parse_ns

# TCP's share of 1538 bytes on an Ethernet cable: a frame's payload of 1500 without IP's and
# TCP's headers with timestamps (52), beside Ethernet's header, checksum, preamble and gap (38).
TCP_SHARE = 1448 / 1538
# Gbit/s of the cable, and from one program's send to the other's receive, through the kernel
# and one switch: an assumption, for which a measured figure should be given where there is one.
_KNOWN = {
    "1GbE": (1, 60_000),
    "2.5GbE": (2.5, 50_000),
    "5GbE": (5, 40_000),
    "10GbE": (10, 30_000),
    "25GbE": (25, 25_000),
    "40GbE": (40, 20_000),
    "100GbE": (100, 15_000),
    "200GbE": (200, 12_000),
    "400GbE": (400, 10_000),
}
NETWORKS = tuple(_KNOWN)
# Two calls and a wake-up of the kernel's: of the same order everywhere.
DEFAULT_MESSAGE_NS = 10_000
MAX_GBIT_PER_S = 10**6
MAX_LATENCY_NS = 10**12


@dataclass(frozen=True)
class Network:
    """A network on which every rank sends what it has to every other one, all at the same time.

    Attributes
    ----------
    name : str
    bandwidth : float
        Bytes per second of each rank's link, each way, as a program sees them. May be given as
        text, as `parse_bytes_per_s` takes it; and the times as `parse_ns` takes them.
    latency_ns : int
        From one program's send to the other's receive.
    message_ns : int
        Time of a rank's processor for each message that it sends, and receives one for.

    Notes
    -----
    A message of n bytes takes latency + n / bandwidth (Hockney 1994, Parallel Computing 20), and
    a processor's time of its own, which does not pass at the same time for several (the overhead
    o of LogP: Culler and others 1993, PPoPP). Each of R ranks sends its part to R - 1 others and
    receives theirs, over one link: latency + (R - 1) message_ns + n / bandwidth, where n is the
    most that any rank sends or receives.
    """

    name: str
    bandwidth: float
    latency_ns: int
    message_ns: int = DEFAULT_MESSAGE_NS

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", parse_bytes_per_s(self.bandwidth))
        object.__setattr__(self, "latency_ns", parse_ns(self.latency_ns))
        object.__setattr__(self, "message_ns", parse_ns(self.message_ns))

    @classmethod
    def parse(cls, given: "str | Network") -> "Network":
        """Return the network of a name, or of a rate and a latency.

        Parameters
        ----------
        given : str or Network
            A name of `NETWORKS`, such as "10GbE", whose bandwidth is TCP's share of it; or
            "40Gbit/s:5us:1us" or "1.18GB/s:500us": a program's bandwidth, its latency, and its own
            time for each message. Without a latency, that of the fastest name that is not faster;
            without the last, 10 us.

        Raises
        ------
        ConfigError
            If it is neither.
        """
        if isinstance(given, Network):
            return given
        text = given.strip() if isinstance(given, str) else ""
        for name, (gbit, latency_ns) in _KNOWN.items():
            if text.lower() == name.lower():
                return cls(name, gbit * 1e9 / 8 * TCP_SHARE, latency_ns)
        rate, *times = (part.strip() for part in text.split(":"))
        match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,9})?)\s*(?:G|Gb|Gbit)(?:/s|ps)?", rate)
        gbit = float(match[1]) if match else 0.0
        if re.fullmatch(r"[0-9]{1,7}(?:\.[0-9]{1,9})?", rate):
            raise ConfigError(
                f"network {given!r:.80}: the rate has no unit; write {rate}Gbit/s or {rate}GB/s"
            )
        # A capital B: in any other case it may be bits that are meant.
        if re.fullmatch(r"[0-9.]+\s*(?:[kKMGT]i?)?B(?:/s)?", rate):
            gbit = parse_bytes_per_s(rate) * 8 / 1e9
        if not 0 < gbit <= MAX_GBIT_PER_S or len(times) > 2:
            raise ConfigError(
                f"network {given!r:.80} is neither one of {', '.join(NETWORKS)} nor a rate "
                "with a latency, such as 40Gbit/s:5us or 1.18GB/s:500us"
            )
        found = [parse_ns(time) for time in times]
        for time_ns in found:
            if time_ns > MAX_LATENCY_NS:
                raise ConfigError(
                    f"network {given!r:.80}: a latency is at most {format_ns(MAX_LATENCY_NS)}"
                )
        defaults = (_latency_of(gbit), DEFAULT_MESSAGE_NS)
        return cls(text, gbit * 1e9 / 8, *found, *defaults[len(found) :])

    def gather_ns(self, part_bytes: Sequence[int]) -> int:
        """Return how long it takes until every rank has the parts of all.

        Parameters
        ----------
        part_bytes : sequence of int
            Bytes of each rank's message to each other one.
        """
        others = len(part_bytes) - 1
        if others < 1:
            return 0
        most = max(others * max(part_bytes), sum(part_bytes) - min(part_bytes))
        return self.latency_ns + others * self.message_ns + math.ceil(most * 1e9 / self.bandwidth)

    def describe(self) -> str:
        """Return name, bandwidth and times as text."""
        rate = format_bytes_per_s(self.bandwidth)
        each = format_ns(self.message_ns)
        return f"{self.name}: {rate}, {format_ns(self.latency_ns)}, {each} a message"


def _latency_of(gbit: float) -> int:
    slower = [latency_ns for known, latency_ns in _KNOWN.values() if known <= gbit]
    return min(slower) if slower else _KNOWN["1GbE"][1]
