"""Tools: functions that a request offers a model, and calls in its messages."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moecache.errors import ConfigError
from moecache.integrations.answer_parts import AnswerFormat
from moecache.serving.errors import RequestError
from moecache.serving.fields import check_texts, refuse, text_of
from moecache.serving.grammars import Grammar

_MOST_TOOLS = 128
_MOST_CALLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")

# Keywords by which an object may have other properties than those that are beside them.
_MORE = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "dependentSchemas"}


@dataclass(frozen=True)
class Tools:
    """The functions that a request offers.

    Attributes
    ----------
    functions : tuple of dict
        Each as chat templates take it: {"type": "function", "function": {...}}.
    choice : str
        "auto" (as the model likes), "required", or the name of a function that has to be called.
    are_many : bool
        Whether an answer may call several.
    """

    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    are_many: bool = True

    @property
    def are_required(self) -> bool:
        """Whether the answer has to be a call."""
        return bool(self.functions) and self.choice != "auto"

    def grammar(self, format: AnswerFormat, special: Mapping[str, Any]) -> Grammar:  # noqa: A002
        """Return the texts that are calls of these functions, with arguments by their schemas.

        Parameters
        ----------
        format : AnswerFormat
        special : mapping of str
            The tokenizer's special tokens, by which markers may be written.

        Raises
        ------
        ConfigError
            If calls are not written as JSON of a name and arguments, or a schema is not supported.
        """
        if format.call is None:
            raise ConfigError(
                f"tool_choice {self.choice!r} needs a model that writes calls as JSON; this one "
                'writes them otherwise, so that "auto" and "none" are left'
            )
        before, after = (_literal(part, special) for part in format.call)
        chosen = [
            function["function"]
            for function in self.functions
            if self.choice in ("required", function["function"]["name"])
        ]
        many = ' ("\\n" call)*' if self.are_many else ""
        rules = [f"start: call{many}", f"call: {before} function {after}"]
        rules.append("function: " + " | ".join(f"function_{i}" for i in range(len(chosen))))
        for number, function in enumerate(chosen):
            head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
            schema = {"type": "object"} | _closed(function.get("parameters") or {})
            rules.append(f'function_{number}: {json.dumps(head)} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: {Grammar.schema_part(schema, is_lenient=True)}")
        return Grammar.of_lark("\n".join(rules), "tools")


def read_tools(given: Mapping[str, Any]) -> Tools:
    """Return the functions that a request of OpenAI's protocol offers.

    Raises
    ------
    RequestError
        If they are none, or the choice is not one of them.
    """
    value = given.get("tools")
    if value is not None and not isinstance(value, list):
        refuse("tools", value, "a list of functions")
    functions = tuple(_function(f"tools[{place}]", one) for place, one in enumerate(value or []))
    names = [one["function"]["name"] for one in functions]
    check_names(names)
    choice = _choice(given.get("tool_choice"), names)
    are_many = given.get("parallel_tool_calls")
    if are_many is not None and not isinstance(are_many, bool):
        refuse("parallel_tool_calls", are_many, "true or false")
    return Tools(() if choice == "none" else functions, choice, are_many is not False)


def check_names(names: list[str]) -> None:
    """Raise a RequestError if there are too many functions, or two of one name."""
    if len(names) > _MOST_TOOLS:
        raise RequestError(
            400, f"tools has {len(names)} functions, more than {_MOST_TOOLS}", param="tools"
        )
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise RequestError(400, f"tools has {min(twice)!r} twice", param="tools")


def function_of(
    name: str, called: Any, description: Any, parameters: Any, *, word: str = "parameters"
) -> dict[str, Any]:
    """Return a function as chat templates take it; `name` says where it stands in the request."""
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise RequestError(
            400,
            f"{name}.name must be 1 to 64 letters, digits, _, . and -, got {str(called)[:80]!r}",
            param=f"{name}.name",
        )
    if description is not None:
        text_of(f"{name}.description", description)
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{name}.{word}", parameters, "a schema, which is an object")
    check_texts(f"{name}.{word}", parameters)
    return {
        "type": "function",
        "function": {
            "name": called,
            "description": description or "",
            "parameters": parameters or {"type": "object", "properties": {}},
        },
    }


def _function(name: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        refuse(name, tool, "an object with type and function")
    if tool.get("type") != "function":
        raise RequestError(
            400,
            f'{name}.type must be "function": no other tools are supported',
            param=f"{name}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse(f"{name}.function", function, "an object with a name")
    return function_of(
        f"{name}.function",
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
    )


def _choice(value: Any, names: list[str]) -> str:
    if value is None:
        return "auto"
    if isinstance(value, dict):
        function = value.get("function")
        chosen = function.get("name") if isinstance(function, dict) else None
        if value.get("type") != "function" or chosen not in names:
            raise RequestError(
                400,
                f"tool_choice must name one of tools: {', '.join(names) or 'there are none'}",
                param="tool_choice",
            )
        return str(chosen)
    if value not in _CHOICES:
        raise RequestError(
            400,
            f"tool_choice must be {', '.join(_CHOICES)} or a function, got {str(value)[:80]!r}",
            param="tool_choice",
        )
    if value == "required" and not names:
        raise RequestError(400, "tool_choice is required, but there are no tools", param="tools")
    return str(value)


def read_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer as chat templates take them: arguments are objects.

    Parameters
    ----------
    name : str
        Where they stand in the request.
    value : Any

    Raises
    ------
    RequestError
        If they are none.
    """
    if not isinstance(value, list) or len(value) > _MOST_CALLS:
        refuse(name, value, f"a list of at most {_MOST_CALLS} calls")
    return [_call(f"{name}[{place}]", call) for place, call in enumerate(value)]


def _call(name: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        refuse(name, call, "an object with id, type and function")
    function = call.get("function")
    if not isinstance(function, dict):
        refuse(f"{name}.function", function, "an object with name and arguments")
    identity = call.get("id")
    if identity is not None:
        text_of(f"{name}.id", identity)
    return read_call(f"{name}.function", function, identity)


def read_call(name: str, function: Mapping[str, Any], identity: str | None) -> dict[str, Any]:
    """Return a call as `read_calls` does.

    Parameters
    ----------
    name : str
        Where the function stands in the request.
    function : mapping
        Its name and arguments.
    identity : str or None
        Of the call.

    Raises
    ------
    RequestError
        If it is none.
    """
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(
                400,
                f"{name}.arguments is no JSON: {error}",
                param=f"{name}.arguments",
            ) from error
    if not isinstance(given, dict):
        refuse(f"{name}.arguments", given, "a JSON object, as text")
    check_texts(f"{name}.arguments", given)
    found = {
        "type": "function",
        "function": {
            "name": text_of(f"{name}.name", function.get("name")),
            "arguments": given,
        },
    }
    return {"id": identity, **found} if identity else found


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a function's schema without arguments that it does not name.

    JSON Schema allows any where nothing is said of others; a function has no use for them, and
    clients leave it out.
    """
    found = dict(schema)
    properties = found.get("properties")
    # What else describes an object may name more.
    if isinstance(properties, dict) and not _MORE.intersection(found):
        found.setdefault("additionalProperties", False)
        found["properties"] = {
            name: _closed(one) if isinstance(one, dict) else one for name, one in properties.items()
        }
    if isinstance(found.get("items"), dict):
        found["items"] = _closed(found["items"])
    return found


def _literal(text: str, special: Mapping[str, Any]) -> str:
    """Return a marker in Lark: a special token by its name, all else as text."""
    marker = text.strip()
    if marker not in special:
        return json.dumps(text)
    before, _, after = text.partition(marker)
    parts = [json.dumps(before) if before else "", marker, json.dumps(after) if after else ""]
    return " ".join(part for part in parts if part)
