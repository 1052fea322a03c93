"""Sizes as people write them: parse_bytes("2GiB"), format_bytes(2**31)."""

import re
from fractions import Fraction

from moecache.errors import ConfigError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_SIZE = re.compile(r"(\d{1,24}(?:\.\d{1,24})?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE | re.ASCII)


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    size : int or str
        Bytes, or a number with a unit: "512MiB" and "512Mi" are 512 * 2**20,
        "512MB" is 512 * 10**6, "512M" is read as "512MiB", "512" is bytes.

    Raises
    ------
    ConfigError
        If the text is no size, or the size is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size cannot be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(f"{size!r} is not a size; write for example 4GiB, 512MiB or 2000000")
    number, prefix, binary, byte = match.groups()
    if binary and not prefix:
        raise ConfigError(f"{size!r} is not a size; write for example 4GiB, 512MiB or 2000000")
    # "4G" alone means 2**30 to everyone who sizes memory; "4GB" is decimal.
    factors = _DECIMAL if byte and not binary else _BINARY
    return int(Fraction(number) * factors[prefix.lower()])


def parse_budget(memory: int | str, total_bytes: int) -> int:
    """Return a memory budget in bytes: a size, or a share of `total_bytes` such as "25%".

    Raises
    ------
    ConfigError
        If the text is neither, or the share is not in (0, 100].
    """
    if not isinstance(memory, str) or not memory.strip().endswith("%"):
        return parse_bytes(memory)
    number = re.fullmatch(r"\d{1,3}(\.\d{1,24})?", memory.strip()[:-1].strip(), re.ASCII)
    share = Fraction(number[0]) if number else Fraction(0)
    if not 0 < share <= 100:
        raise ConfigError(f"{memory!r} is no share of the experts; write for example 25%")
    return int(total_bytes * share / 100)


def format_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit and at least three significant digits.

    Examples
    --------
    >>> format_bytes(2**31), format_bytes(49152), format_bytes(12)
    ('2.00 GiB', '48.0 KiB', '12 B')
    """
    if abs(num_bytes) >= 2**100:
        return "more than 2^100 B"
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        num_bytes /= 1024
        # 1023.96 would be printed as 1024.0.
        if abs(num_bytes) < 1023.95 or unit == "PiB":
            break
    return f"{num_bytes:.2f} {unit}" if abs(num_bytes) < 10 else f"{num_bytes:.1f} {unit}"
