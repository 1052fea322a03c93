"""Requests of OpenAI's Responses: items of input, instructions, and functions."""

from collections.abc import Mapping
from typing import Any

from moecache.serving.errors import RequestError
from moecache.serving.fields import Fields, refuse, text_of, texts_of
from moecache.serving.requests import Asked, check_model, read_object, read_seed, read_temperature
from moecache.serving.structured import read_grammar
from moecache.serving.tools import Tools, read_call, read_tools

# Fields that would change the answer and are not supported, and values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}
_TEXTS = ("input_text", "output_text", "text")


def read_response(body: bytes | bytearray, *, models: tuple[str, ...]) -> Asked:
    """Return what a request to /v1/responses asks for.

    Parameters
    ----------
    body : bytes or bytearray
        JSON.
    models : tuple of str
        Names of the model that is served.

    Raises
    ------
    RequestError
        If it is no such request, or asks for something that is not supported: nothing is stored
        here, so a conversation comes whole each time.
    """
    given = read_object(body)
    fields = Fields(given)
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise RequestError(
                400, f"{name} is not supported; leave it out", param=name, code="unsupported"
            )
    check_model(fields, models)
    told = given.get("instructions")
    system = [] if told is None else [{"role": "system", "content": text_of("instructions", told)}]
    return Asked(
        messages=(*system, *_messages(given.get("input"))),
        prompt=None,
        max_tokens=fields.whole("max_output_tokens", 1),
        temperature=read_temperature(fields),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.whole("top_k", 1),
        seed=read_seed(fields),
        stop=(),
        stream=fields.flag("stream"),
        include_usage=True,
        grammar=_grammar(fields.table("text").get("format")),
        tools=_tools(given),
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": text_of("input", value)}]
    if not isinstance(value, list) or not value:
        refuse("input", value, "a text, or a list of items")
    found: list[dict[str, Any]] = []
    for place, item in enumerate(value):
        name = f"input[{place}]"
        if not isinstance(item, dict):
            refuse(name, item, "an item, which is an object")
        kind = item.get("type", "message")
        if kind == "function_call":
            identity = item.get("call_id")
            if identity is not None:
                text_of(f"{name}.call_id", identity)
            read = read_call(name, item, identity)
            # Calls belong to the answer that made them.
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(read)
        elif kind == "function_call_output":
            found.append(
                {
                    "role": "tool",
                    "tool_call_id": text_of(f"{name}.call_id", item.get("call_id")),
                    "content": texts_of(f"{name}.output", item.get("output"), _TEXTS),
                }
            )
        elif kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                raise RequestError(
                    400, f"{name}.role must be one of {', '.join(_ROLES)}", param=f"{name}.role"
                )
            content = texts_of(f"{name}.content", item.get("content"), _TEXTS)
            found.append({"role": _ROLES[role], "content": content})
        elif kind != "reasoning":
            raise RequestError(
                400,
                f"{name}.type {str(kind)[:40]!r} is not supported; send messages, function_call "
                "and function_call_output",
                param=f"{name}.type",
            )
    return found


def _tools(given: Mapping[str, Any]) -> Tools:
    """Return tools, which lie flat here: what chats have in `function` is beside the type."""
    tools, choice = given.get("tools"), given.get("tool_choice")
    if isinstance(tools, list):
        tools = [
            {"type": tool.get("type"), "function": tool} if isinstance(tool, dict) else tool
            for tool in tools
        ]
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": choice}
    many = given.get("parallel_tool_calls")
    return read_tools({"tools": tools, "tool_choice": choice, "parallel_tool_calls": many})


def _grammar(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse("text.format", value, "an object with a type")
    if value.get("type") == "json_schema":
        value = {"type": "json_schema", "json_schema": value}
    return read_grammar({"response_format": value})
