"""Numbers of JSON schemas that llguidance cannot hold, and that may end the process."""

import json
import re
from collections.abc import Iterator
from typing import Any

from moecache.errors import ConfigError

# llguidance reads numbers as doubles, which are exact up to here, and clamps bounds of integers to
# 64 bits. Release 1.9.1 recurses without end (SIGSEGV) once an integer has a lower bound and an
# upper one of -2**63 or less; a `const` or `enum` of such an integer has both.
_MOST = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_VALUES = ("const", "enum")
# Keywords whose objects have schemas by names that anybody chose.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# By these llguidance makes one type of several: a number that meets an integer is one.
_MERGING = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
_PLAIN_REFERENCE = re.compile(r"#|#/(\$defs|definitions)/[^/%]+")
_SCHEMA = re.compile(r"%json\s*")


def check_numbers(text: str, name: str) -> None:
    """Raise a ConfigError if a schema in a grammar of Lark has a number that cannot be held.

    These are bounds and constants beyond 2**53; bounds of the type "number" may be any where
    nothing can make an integer of it.

    Parameters
    ----------
    text : str
        The grammar; its schemas come after ``%json``.
    name : str
        The field or option that it comes from.
    """
    # Python reads no int of more than 4300 digits, unless it is told to be a float.
    decoder = json.JSONDecoder(parse_int=lambda digits: int(digits[:400]))
    for place in _SCHEMA.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, place.end())
        except (ValueError, RecursionError):
            continue  # no JSON for llguidance either
        for _, keyword, number in _found(schema):
            raise ConfigError(
                f"{name} has {keyword} {_told(number)}, but integers are exact from -2**53 to "
                "2**53 only; leave it out; a bound may be larger for the type number, in a schema "
                f"without {', '.join(sorted(_MERGING))}"
            )


def without_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that `check_numbers` refuses; the given one stays."""
    whole = [schema]
    left: list[tuple[Any, Any]] = [(whole, 0)]
    while left:
        holder, key = left.pop()
        value = holder[key]
        if isinstance(value, dict):
            holder[key] = dict(value)
            left += [(holder[key], inner) for inner in value]
        elif isinstance(value, list):
            holder[key] = list(value)
            left += [(holder[key], place) for place in range(len(value))]
    for level, keyword, _ in list(_found(whole[0])):
        level.pop(keyword, None)
    return whole[0]


def _found(schema: Any) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield each such number of a schema, with its keyword and the object that has it."""
    levels = [level for level in _parts(schema) if isinstance(level, dict)]
    is_merged = any(not _MERGING.isdisjoint(level) for level in levels)
    # Any other may lead to schemas in places of names or values.
    is_plain = all(
        _PLAIN_REFERENCE.fullmatch(level["$ref"])
        for level in levels
        if isinstance(level.get("$ref"), str)
    )
    left: list[tuple[Any, bool]] = [(schema, False)]
    while left:
        level, are_named = left.pop()
        if isinstance(level, list):
            left += [(inner, False) for inner in level]
        if not isinstance(level, dict):
            continue
        has_any = level.get("type") == "number" and not is_merged
        for keyword, inner in level.items():
            if keyword in _VALUES and not (are_named and is_plain):
                for part in filter(_is_large, _parts(inner)):
                    yield level, keyword, part
            elif keyword not in _BOUNDS or not _is_large(inner):
                left.append((inner, not are_named and keyword in _NAMED))
            elif not has_any:
                yield level, keyword, inner


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value of JSON, and all that is within it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, dict | list):
            left += part.values() if isinstance(part, dict) else part


def _is_large(value: Any) -> bool:
    # Written so that NaN is.
    return isinstance(value, int | float) and not abs(value) <= _MOST


def _told(number: float) -> str:
    """Return a number in few characters; Python writes no int of many digits."""
    is_short = isinstance(number, float) or abs(number) < 10**30
    return str(number) if is_short else f"{'-' * (number < 0)}1e30 or beyond"
