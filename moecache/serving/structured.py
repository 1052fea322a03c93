"""Structured output: the field of a request that says which texts an answer may be."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from moecache.errors import ConfigError, MissingDependencyError
from moecache.serving.errors import RequestError
from moecache.serving.fields import refuse, text_of
from moecache.serving.grammars import Grammar

# Names of vLLM's, llama-server's and SGLang's for the same things.
_FIELDS = {
    "json_schema": "json",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
_FORMATS = ("text", "json_object", "json_schema")


def read_grammar(given: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that a request asks for, or `None`.

    Takes OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_...`, llama-server's
    `grammar` and `json_schema`, and SGLang's `regex` and `ebnf`.

    Parameters
    ----------
    given : mapping of str to Any
        The request.

    Raises
    ------
    RequestError
        If it is none that is supported, or the request has two.
    """
    found = [
        (name, _made(kind, given[name], name))
        for name, kind in _FIELDS.items()
        if given.get(name) is not None
    ]
    for name, read in (
        ("response_format", _of_format),
        ("structured_outputs", _of_structured),
    ):
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            refuse(name, value, "an object")
        grammar = read(value)
        if grammar is not None:
            found.append((name, grammar))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(400, f"{names} say different things; leave one out", param=found[1][0])
    return found[0][1] if found else None


def _of_format(value: dict[str, Any]) -> Grammar | None:
    kind = value.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            400,
            f"response_format.type must be one of {', '.join(_FORMATS)}, got "
            f"{json.dumps(kind)[:80]}",
            param="response_format.type",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        # llama-server's has room for a schema.
        if value.get("schema") is None:
            return _made("json_object", True, "response_format")
        return _made("json", value["schema"], "response_format.schema")
    name = "response_format.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        refuse(name, inner, "an object with name and schema")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{name}.strict", strict, "true or false")
    schema = inner.get("schema")
    if schema is None:
        return _made("json_object", True, name)
    return _made("json", schema, f"{name}.schema", is_lenient=strict is False)


def _of_structured(value: dict[str, Any]) -> Grammar | None:
    asked = [name for name, inner in value.items() if inner not in (None, False)]
    unknown = [name for name in asked if name not in ("json", "json_object", *_PLAIN)]
    if unknown:
        raise RequestError(
            400,
            f"structured_outputs.{unknown[0][:80]} is not supported; leave it out",
            param="structured_outputs",
            code="unsupported",
        )
    if len(asked) > 1:
        raise RequestError(
            400,
            f"structured_outputs has {' and '.join(asked)}; leave one out",
            param="structured_outputs",
        )
    if not asked:
        return None
    return _made(asked[0], value[asked[0]], f"structured_outputs.{asked[0]}")


def _made(kind: str, value: Any, name: str, *, is_lenient: bool = False) -> Grammar:
    try:
        if kind == "json_object":
            return Grammar.of_schema({"type": "object"}, name)
        if kind == "json":
            return Grammar.of_schema(_schema(value, name), name, is_lenient=is_lenient)
        return _PLAIN[kind](value, name)
    except (ConfigError, MissingDependencyError) as error:
        raise RequestError(400, str(error), param=name) from error


def _schema(value: Any, name: str) -> dict[str, Any] | bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"{name} is no JSON: {error}", param=name) from error
    if not isinstance(value, dict | bool):
        refuse(name, value, "a schema, which is an object")
    return value


def _choices(value: Any, name: str) -> Grammar:
    if not isinstance(value, list):
        refuse(name, value, "a list of strings")
    return Grammar.of_choices([text_of(name, choice) for choice in value], name)


def _regex(value: Any, name: str) -> Grammar:
    return Grammar.of_regex(text_of(name, value), name)


def _grammar(value: Any, name: str) -> Grammar:
    return Grammar.of_text(text_of(name, value), name)


_PLAIN: dict[str, Callable[[Any, str], Grammar]] = {
    "regex": _regex,
    "choice": _choices,
    "grammar": _grammar,
}
