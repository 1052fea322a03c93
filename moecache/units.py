"""Sizes, rates, times and seeds as people write them: parse_bytes("2GiB"), format_bytes(2**31)."""

import math
import operator
import re
from fractions import Fraction
from numbers import Integral

from moecache.errors import ConfigError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_SIZE = re.compile(r"(\d{1,24}(?:\.\d{1,24})?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE | re.ASCII)
_NS = {"ns": 1, "us": 10**3, "\N{MICRO SIGN}s": 10**3, "ms": 10**6, "s": 10**9}
_TIME = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(ns|us|\N{MICRO SIGN}s|ms|s)")


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
        If the text is not a size, or the size is negative.
    """
    if isinstance(size, Integral) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size cannot be negative, got {size}")
        return int(size)
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(f"{size!r} is not a size; write for example 4GiB, 512MiB or 2000000")
    number, prefix, binary, byte = match.groups()
    if binary and not prefix:
        raise ConfigError(f"{size!r} is not a size; write for example 4GiB, 512MiB or 2000000")
    # "4G" alone means 2**30 in the sizing of memory; "4GB" is decimal.
    factors = _DECIMAL if byte and not binary else _BINARY
    return int(Fraction(number) * factors[prefix.lower()])


def parse_budget(memory: int | str, total_bytes: int) -> int:
    """Return a memory budget in bytes: a size, or a share of `total_bytes` such as "25%".

    Raises
    ------
    ConfigError
        If the text is neither, or the share is not in (0, 100].
    """
    fraction = memory if isinstance(memory, float) else 0.0
    if isinstance(memory, str) and re.fullmatch(
        r"\s*(?:0?\.\d{1,24}|1\.0{1,24})\s*", memory, re.ASCII
    ):
        fraction = float(memory)
    if 0 < fraction <= 1:
        raise ConfigError(f'{memory!r} is not a size; for a share write "{100 * fraction:.6g}%"')
    if not isinstance(memory, str) or not memory.strip().endswith("%"):
        return parse_bytes(memory)
    number = re.fullmatch(r"\d{1,3}(\.\d{1,24})?", memory.strip()[:-1].strip(), re.ASCII)
    percent = Fraction(number[0]) if number else Fraction(0)
    if not 0 < percent <= 100:
        raise ConfigError(f"{memory!r} is no share of the experts; write for example 25%")
    return int(total_bytes * percent / 100)


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


def parse_bytes_per_s(rate: float | str) -> float:
    """Return a rate in bytes per second.

    Parameters
    ----------
    rate : int, float or str
        Bytes per second, or a size as `parse_bytes` takes it, with or without "/s":
        "25GB/s" is 25 * 10**9. Infinity (a float) is a rate, too.

    Raises
    ------
    ConfigError
        If it is not a rate, or is less than one byte per second.
    """
    if isinstance(rate, float):
        if rate >= 1:
            return rate if rate == math.inf else int(rate)
        raise ConfigError(f"a rate must be at least 1 byte per second, got {rate}")
    try:
        found = parse_bytes(rate.strip().removesuffix("/s") if isinstance(rate, str) else rate)
    except ConfigError:
        found = 0
    if found < 1:
        raise ConfigError(f"{rate!r} is no rate; write for example 25GB/s or 800MiB/s")
    return found


def format_bytes_per_s(rate: float) -> str:
    """Return a rate with a decimal unit and three significant digits, as links are sold.

    Examples
    --------
    >>> format_bytes_per_s(25 * 10**9), format_bytes_per_s(1_234_567)
    ('25 GB/s', '1.23 MB/s')
    """
    for unit, factor in (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        # 999.6 would be printed as 1e+03.
        if abs(rate) < 999.5 * factor:
            return f"{rate / factor:.3g} {unit}/s"
    return f"{rate / 1e12:,.3g} TB/s"


def parse_ns(time: int | str) -> int:
    """Return a time in nanoseconds.

    Parameters
    ----------
    time : int or str
        Nanoseconds, or a number with a unit: "80ns", "150us", "1.5ms", "2s". "0" needs none.

    Raises
    ------
    ConfigError
        If the text is not a time, or the time is negative.
    """
    if isinstance(time, Integral) and not isinstance(time, bool):
        if time < 0:
            raise ConfigError(f"a time cannot be negative, got {time} ns")
        return int(time)
    match = _TIME.fullmatch(time.strip()) if isinstance(time, str) else None
    if match is not None:
        return int(Fraction(match[1]) * _NS[match[2]])
    if isinstance(time, str) and time.strip() == "0":
        return 0
    raise ConfigError(f"{time!r} is not a time; write for example 150us, 1.5ms or 2s")


def format_ns(ns: float) -> str:
    """Return a time with a unit and three significant digits.

    Examples
    --------
    >>> format_ns(150_000), format_ns(2_340_000_000), format_ns(80)
    ('150 us', '2.34 s', '80 ns')
    """
    for unit, factor in (("ns", 1), ("us", 10**3), ("ms", 10**6)):
        # 999.6 would be printed as 1e+03.
        if abs(ns) < 999.5 * factor:
            return f"{ns / factor:.3g} {unit}"
    return f"{ns / 1e9:.3g} s" if abs(ns) < 999.5e9 else f"{ns / 1e9:,.0f} s"


def check_seed(seed: int, name: str) -> int:
    """Return the seed of a model's text, which `torch.manual_seed` takes.

    The range is that of OpenAI's protocol. -1 is a number like any other: llama.cpp would draw
    a seed for it.

    Raises
    ------
    ConfigError
        If it is no signed integer of 64 bits; `name` says what it was given as.
    """
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"{name} must be from -2**63 to 2**63 - 1, got {seed}")
    return seed


def whole_number(value: object, name: str, least: int, most: int) -> int:
    """Return an argument that is an integer, of Python or NumPy; True and 2.0 are none.

    Parameters
    ----------
    value : object
    name : str
        Its name in the message.
    least, most : int

    Raises
    ------
    ConfigError
        If it is none, or not in this range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} must be a number from {least} to {most}, got {value!r}")
    return number
