"""Fields: values of JSON that nobody vouches for, each of the type that it should be."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from moecache.serving.errors import RequestError

_SURROGATE = re.compile("[\ud800-\udfff]")


class Fields:
    """Values of an object's fields; a RequestError names the field that is wrong.

    Parameters
    ----------
    given : mapping of str to Any
        The object. A field that is `null` is as one that is left out.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def text(self, name: str) -> str | None:
        """Return a string, or `None`."""
        value = self._given.get(name)
        if value is not None and not isinstance(value, str):
            refuse(name, value, "a string")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; false if there is none."""
        value = self._given.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, value, "true or false")
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        """Return an object; empty if there is none."""
        value = self._given.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(name, value, "an object")
        return value or {}

    def whole(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        """Return a whole number within bounds, or `None`."""
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(name, value, "a whole number")
        if least is not None and value < least:
            raise RequestError(400, f"{name} must be at least {least}", param=name)
        if most is not None and value > most:
            raise RequestError(400, f"{name} must be at most {most}", param=name)
        return int(value)

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return a number within bounds, or `None`."""
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, value, "a number")
        # Compared first: an int may be too large for a float.
        if not least <= value <= most or not math.isfinite(value):
            raise RequestError(400, f"{name} must be between {least} and {most}", param=name)
        return float(value)


def text_of(name: str, value: Any) -> str:
    """Return a value that has to be a text."""
    if not isinstance(value, str):
        refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can write half of a character, which is no text.
        raise RequestError(400, f"{name} has a lone surrogate, {error.start}", param=name) from None
    return str(value)


def check_texts(name: str, value: Any) -> None:
    """Raise a RequestError if a string, or a property's name, within a value is no text."""
    # Places are links, since the names of deep ones are long.
    left: list[tuple[Any, Any]] = [(None, value)]
    while left:
        place, inner = left.pop()
        texts: list[str] = []
        parts: list[tuple[Any, Any]] = []
        if isinstance(inner, dict):
            texts, parts = list(inner), list(inner.items())
        elif isinstance(inner, list):
            parts = list(enumerate(inner))
        elif isinstance(inner, str):
            texts = [inner]
        for text in texts:
            if _SURROGATE.search(text):
                text_of(name + _path(place), text)
        left += [((place, key), one) for key, one in parts]


def texts_of(name: str, value: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a string, or the lines of a list of parts of these types."""
    if not isinstance(value, list):
        return text_of(name, value)
    lines = []
    for place, part in enumerate(value):
        where = f"{name}[{place}]"
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise RequestError(
                400,
                f'{where} must be of type "{kinds[0]}": images, audio and documents are not '
                "supported",
                param=where,
            )
        lines.append(text_of(f"{where}.text", part.get("text")))
    return "\n".join(lines)


def refuse(name: str, value: Any, wanted: str) -> NoReturn:
    """Raise a RequestError that says what a field should be, and what it is."""
    raise RequestError(400, f"{name} must be {wanted}, got {kind_of(value)}", param=name)


def refuse_constant(name: str) -> NoReturn:
    """Raise a ValueError for NaN and the like."""
    raise ValueError(f"{name} is no number of JSON")


def kind_of(value: Any) -> str:
    """Return JSON's word for the type of a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), "nothing" if value is None else "a number")


def _path(place: Any) -> str:
    """Return where a value stands, from links of its key to the place of what it is in."""
    found: list[str] = []
    while place is not None:
        place, key = place
        found.append(f"[{key}]" if isinstance(key, int) else f".{key[:80]}")
    return "".join(reversed(found))
