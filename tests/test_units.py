"""Sizes, rates and times as people write them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.errors import ConfigError
from moecache.units import (
    format_bytes,
    format_bytes_per_s,
    format_ns,
    parse_bytes,
    parse_bytes_per_s,
    parse_ns,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", 512),
        ("0", 0),
        ("512B", 512),
        ("1KiB", 2**10),
        ("512MiB", 512 * 2**20),
        ("512Mi", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("2TiB", 2**41),
        ("1PiB", 2**50),
        ("512MB", 512 * 10**6),
        ("4GB", 4 * 10**9),
        ("1kB", 1000),
        ("1.5GiB", 3 * 2**29),
        ("0.5MB", 500_000),
    ],
)
def test_binary_and_decimal_units_are_told_apart(text: str, expected: int) -> None:
    """KiB is 1024 bytes, kB is 1000."""
    assert parse_bytes(text) == expected


def test_a_bare_prefix_is_binary() -> None:
    """4G means 4 GiB to everyone who sizes memory."""
    assert parse_bytes("4G") == 4 * 2**30
    assert parse_bytes("512m") == 512 * 2**20


def test_case_and_spaces_do_not_matter() -> None:
    """Units are read in any case, with or without a space."""
    assert parse_bytes(" 4 gib ") == parse_bytes("4GIB") == 4 * 2**30
    assert parse_bytes("1 Mb") == 10**6


def test_an_integer_is_bytes() -> None:
    """Integers pass unchanged, zero too."""
    assert parse_bytes(0) == 0
    assert parse_bytes(2**40 + 1) == 2**40 + 1
    assert type(parse_bytes(np.int64(3))) is type(parse_ns(np.int32(3))) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "4 gigabytes",
        "-1",
        "-4GiB",
        "1e9",
        "4iB",
        "4i",
        "1.GiB",
        ".5GiB",
        "1,5GiB",
        "4GiB8",
        "0x10",
        "nan",
        "inf",
        "٤GiB",
        "4 G iB",
    ],
)
def test_what_is_no_size_is_a_config_error_that_quotes_it(text: str) -> None:
    """The message repeats the text and shows how to write a size."""
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)

    assert repr(text) in str(caught.value)
    assert "4GiB" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"4GiB"])
def test_other_types_are_config_errors(value: object) -> None:
    """A bool is not a number of bytes, and neither is a float."""
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_a_negative_integer_is_a_config_error() -> None:
    """The message names the figure."""
    with pytest.raises(ConfigError, match="cannot be negative, got -1"):
        parse_bytes(-1)


def test_a_size_error_is_a_value_error() -> None:
    """Callers that know nothing of moecache can catch it."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes("much")


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5GiB"], ids=["digits", "fraction"])
def test_absurdly_long_numbers_are_config_errors(text: str) -> None:
    """Neither the limit of int() nor that of float comes through."""
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("2.3MB", 2_300_000), ("1.001kB", 1001), ("4.35GB", 4_350_000_000)]
)
def test_decimal_fractions_are_exact(text: str, expected: int) -> None:
    """Binary floating point does not cost a byte."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (49152, "48.0 KiB"),
        (2**31, "2.00 GiB"),
        (10 * 2**30, "10.0 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1.00 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-2048, "-2.00 KiB"),
        (1536.0, "1.50 KiB"),
    ],
)
def test_sizes_are_written_with_a_binary_unit(num_bytes: float, expected: str) -> None:
    """Two decimals below ten, one above, none for bytes."""
    assert format_bytes(num_bytes) == expected


@given(st.integers(0, 2**60))
def test_what_is_written_can_be_read_back(num_bytes: int) -> None:
    """The text of a size is a size, to within its digits."""
    again = parse_bytes(format_bytes(num_bytes))

    assert again == pytest.approx(num_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("25GB/s", 25 * 10**9),
        ("25 GB", 25 * 10**9),
        ("800MiB/s", 800 * 2**20),
        (10**9, 10**9),
        (1.5e9, 1_500_000_000),
        (math.inf, math.inf),
    ],
)
def test_a_rate_is_a_size_per_second(rate: float | str, expected: float) -> None:
    """With or without the second, or as a number; infinity too."""
    assert parse_bytes_per_s(rate) == expected


@pytest.mark.parametrize("rate", ["", "fast", "25GB/h", "-1GB/s", 0, -5, 0.5, math.nan, True])
def test_what_is_no_rate_is_refused(rate: float | str) -> None:
    """Nothing would ever arrive."""
    with pytest.raises(ConfigError, match="rate"):
        parse_bytes_per_s(rate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80ns", 80),
        ("150us", 150_000),
        ("150 \N{MICRO SIGN}s", 150_000),
        ("1.5ms", 1_500_000),
        (" 2s ", 2 * 10**9),
        ("0", 0),
        (42, 42),
    ],
)
def test_times_are_nanoseconds(text: int | str, expected: int) -> None:
    """From nanoseconds to seconds; an integer is nanoseconds."""
    assert parse_ns(text) == expected


@pytest.mark.parametrize(
    "time", ["", "150", "us", "-1us", "1 minute", "1e3us", 1.5, None, True, -1]
)
def test_what_is_no_time_is_refused(time: object) -> None:
    """A number without a unit could be anything."""
    with pytest.raises(ConfigError, match="time"):
        parse_ns(time)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (80, "80 ns"),
        (999.4, "999 ns"),
        (999.6, "1 us"),
        (150_000, "150 us"),
        (2_340_000_000, "2.34 s"),
        (12_345 * 10**9, "12,345 s"),
    ],
)
def test_times_are_shown_with_three_digits(ns: float, text: str) -> None:
    """In the unit that suits them."""
    assert format_ns(ns) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12, "12 B/s"),
        (999.6, "1 kB/s"),
        (2.5e9, "2.5 GB/s"),
        (25 * 10**9, "25 GB/s"),
        (1e13, "10 TB/s"),
        (math.inf, "inf TB/s"),
    ],
)
def test_rates_are_decimal(rate: float, text: str) -> None:
    """As links and disks are sold."""
    assert format_bytes_per_s(rate) == text
