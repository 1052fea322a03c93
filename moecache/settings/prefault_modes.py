"""The modes of the pre-fault, and the words that mean them."""

from moecache.errors import ConfigError
from moecache.settings.parsers import OFF, ON

PREFAULT_MODES = ("auto", "background", "off", "force")
DEFAULT_PREFAULT = "auto"
PREFAULT_WORDS = {
    **{mode: mode for mode in PREFAULT_MODES},
    **dict.fromkeys(OFF, "off"),
    **dict.fromkeys(ON, "force"),
}


def prefaults(mode: object) -> bool:
    """Return whether a pre-fault mode, known or not, asks for anything."""
    return PREFAULT_WORDS.get(str(mode).strip().lower()) != "off"


def parse_prefault(mode: object, known: tuple[str, ...] = PREFAULT_MODES) -> str:
    """Return a pre-fault mode.

    Parameters
    ----------
    mode : str, int or bool
        One of `known`, 0 and 1, or a word that switches things off or on.
    known : tuple of str

    Raises
    ------
    ConfigError
        If it is another one.
    """
    found = PREFAULT_WORDS.get(str(mode).strip().lower())
    if found not in known:
        raise ConfigError(f"prefault {mode!r} is not one of {', '.join(known)}")
    return found
