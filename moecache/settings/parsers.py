"""Parsers of variables and arguments: each raises ValueError for a text that it refuses."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from moecache.units import parse_budget, parse_bytes

OFF = ("0", "false", "no", "disabled", "off")
ON = ("1", "true", "on", "yes", "enabled")


def number(text: str) -> int:
    """Return a number of up to nine digits."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError
    return int(text)


def threads(text: str) -> int:
    """Return a number of threads, up to 999."""
    if len(text) > 3:
        raise ValueError
    return number(text)


def cores(text: str) -> int:
    """Return a number of threads that compute, from 1 to 256."""
    found = threads(text)
    if not 1 <= found <= 256:
        raise ValueError
    return found


def pins(text: str) -> int | str:
    """Return a number of experts, "auto", or 0 for a word that switches it off."""
    if text.lower() == "auto":
        return "auto"
    return 0 if text.lower() in OFF else number(text)


def switch(text: str) -> bool:
    """Return whether a word means on."""
    return word({**dict.fromkeys(OFF, False), **dict.fromkeys(ON, True)})(text)


def memory(text: str) -> str:
    """Return the text if it is a size or a share of the experts, such as "4GiB" or "25%"."""
    parse_budget(text, 0)
    return text


def size(text: str) -> str:
    """Return the text if it is a size, such as "2GiB"."""
    parse_bytes(text)
    return text


def word(words: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a parser of words, in capitals or not, which gives what a word stands for."""

    def parse(text: str) -> Any:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    return parse


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser that takes these words alone."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse
