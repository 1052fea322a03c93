"""What a client asks for, read from JSON that nobody vouches for."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.serving.errors import RequestError
from moecache.serving.messages import read_message
from moecache.serving.requests import Asked, read_request
from moecache.serving.responses import read_response
from moecache.serving.stops import StopText

HELLO = [{"role": "user", "content": "hello"}]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def read(body: Any, *, chat: bool = True) -> Asked:
    """Read a request given as an object, or as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(data, chat=chat, models=("tiny", "./tiny"))


def test_what_is_asked_is_read() -> None:
    """Every field; contents in parts are joined, and a developer is the system."""
    asked = read(
        {
            "model": "./tiny",
            "messages": [
                {"role": "developer", "content": "brief"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                {"role": "assistant", "content": None},
            ],
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 3,
            "seed": -1,
            "stop": "x",
            "stream": True,
            "stream_options": {"include_usage": True},
            # As many clients send them.
            "n": 1,
            "presence_penalty": 0.0,
            "tools": [],
            "logit_bias": None,
            "user": "somebody",
        }
    )
    messages = (
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    )
    expected = Asked(messages, None, 7, 1.0, 0.5, 3, -1, ("x",), stream=True, include_usage=True)
    assert asked == expected


def test_how_tokens_are_drawn_is_read() -> None:
    """A bias of a token by its number, as JSON has only strings for names."""
    asked = read(
        {
            "messages": HELLO,
            "n": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": -1,
            "frequency_penalty": 2,
            "logit_bias": {"7": -100, "12": 0.5},
            "logprobs": True,
            "top_logprobs": 4,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert (asked.num_choices, asked.min_p, asked.repetition_penalty) == (3, 0.1, 1.1)
    assert (asked.presence_penalty, asked.frequency_penalty) == (-1.0, 2.0)
    assert asked.logit_bias == {7: -100.0, 12: 0.5}
    assert asked.num_logprobs == 4
    assert asked.template == {"enable_thinking": False}
    assert read({"messages": HELLO, "logprobs": True}).num_logprobs == 0
    assert read({"prompt": "a", "logprobs": 2}, chat=False).num_logprobs == 2


def test_what_is_left_out_is_the_models_own() -> None:
    """A completion has 16 tokens then; seeds differ."""
    chat, text = read({"messages": HELLO}), read({"prompt": "hello"}, chat=False)
    assert (chat.max_tokens, text.max_tokens) == (None, 16)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stop) == (None, None, None, ())
    assert not chat.stream
    assert len({read({"messages": HELLO}).seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"messages": 7}, 400, "messages", "got a number"),
        ({"messages": []}, 400, "messages", "at least one"),
        ({"messages": ["hello"]}, 400, "messages[0]", "an object with role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", "one of"),
        ({"messages": [{"role": [], "content": "x"}]}, 400, "messages[0].role", "one of"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "got nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
            "images",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            400,
            "messages[0].content",
            "surrogate",
        ),
        ({"model": "other"}, 404, "model", "'other' is not served here; this is 'tiny'"),
        ({"model": 1}, 400, "model", "a string"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "a whole number"),
        ({"max_tokens": True}, 400, "max_tokens", "got a boolean"),
        ({"temperature": "hot"}, 400, "temperature", "got a string"),
        ({"temperature": -1}, 400, "temperature", "between 0 and 100"),
        ({"temperature": 1e-9}, 400, "temperature", "at least 0.01"),
        ({"temperature": 10**400}, 400, "temperature", "between"),
        ({"top_p": 1.1}, 400, "top_p", "between 0 and 1"),
        ({"seed": 2**63}, 400, "seed", "from -2**63 to 2**63 - 1"),
        ({"seed": -(2**63) - 1}, 400, "seed", "from -2**63 to 2**63 - 1"),
        ({"seed": 1.5}, 400, "seed", "a whole number"),
        ({"stop": ["a"] * 17}, 400, "stop", "more than 16"),
        ({"stop": [""]}, 400, "stop", "between 1 and"),
        ({"stop": 3}, 400, "stop", "got a number"),
        ({"stream": 1}, 400, "stream", "true or false"),
        ({"stream_options": []}, 400, "stream_options", "got a list"),
        ({"n": 17}, 400, "n", "at most 16"),
        ({"n": 0}, 400, "n", "at least 1"),
        ({"best_of": 2}, 400, "best_of", "not supported"),
        ({"min_p": 1.5}, 400, "min_p", "between 0 and 1"),
        ({"presence_penalty": 3}, 400, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": "x"}, 400, "frequency_penalty", "got a string"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty", "between 0.01 and 100"),
        ({"logit_bias": [1]}, 400, "logit_bias", "got a list"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "not the number of a token"),
        ({"logit_bias": {"7": 101}}, 400, "7", "between -100 and 100"),
        ({"logprobs": 1}, 400, "logprobs", "true or false"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "at most 20"),
        ({"chat_template_kwargs": 1}, 400, "chat_template_kwargs", "an object"),
        ({"chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs", "a field of"),
        *(
            ({"chat_template_kwargs": {name: []}}, 400, "chat_template_kwargs", repr(name))
            for name in ("messages", "self", "conversations")
        ),
        (
            {"chat_template_kwargs": {"mood": ["\udc00"]}},
            400,
            "chat_template_kwargs.mood[0]",
            "surrogate, 0",
        ),
        ({"tools": [{}]}, 400, "tools[0].type", "no other tools"),
    ],
)
def test_a_wrong_field_is_named(
    change: dict[str, Any], status: int, param: str, message: str
) -> None:
    """With what it should be, and what it is."""
    with pytest.raises(RequestError) as refused:
        read({"messages": HELLO, **change})
    assert (refused.value.status, refused.value.param) == (status, param)
    assert message in str(refused.value)


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    """Return an earlier answer with a call."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function, **fields}]}


@pytest.mark.parametrize(
    ("protocol", "fields", "param"),
    [
        ("response", {"instructions": "a\ud800"}, "instructions"),
        (
            "chat",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a\ud800": {}}},
                        },
                    }
                ]
            },
            "tools[0].function.parameters.properties",
        ),
        (
            "message",
            {"tools": [{"name": "f", "input_schema": {"enum": ["a", "a\ud800"]}}]},
            "tools[0].input_schema.enum[1]",
        ),
        (
            "chat",
            {"messages": [called({"city": "a\ud800"})]},
            "messages[0].tool_calls[0].function.arguments.city",
        ),
        (
            "chat",
            {"messages": [called('{"a\\ud800": 1}')]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("chat", {"messages": [called({}, id="a\ud800")]}, "messages[0].tool_calls[0].id"),
        (
            "message",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "a\ud800"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0].input.a",
        ),
        (
            "response",
            {"input": [{"type": "function_call", "name": "f", "arguments": '["a"]'}]},
            "input[0].arguments",
        ),
        (
            "response",
            {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        (
            "response",
            {"input": [{"type": "function_call", "name": "f", "call_id": "a\ud800"}]},
            "input[0].call_id",
        ),
    ],
)
def test_what_no_tokenizer_takes_is_refused_where_it_stands(
    protocol: str, fields: dict[str, Any], param: str
) -> None:
    """A lone surrogate with its place; calls by the names that the protocol has."""
    with pytest.raises(RequestError) as refused:
        read_anywhere(**fields)[protocol]()
    assert refused.value.param == param
    message = str(refused.value)
    assert message.startswith(param)
    if "surrogate" not in message:
        assert "JSON" in message
    elif not param.endswith("arguments"):
        assert message.endswith("surrogate, 1")


def read_anywhere(**fields: Any) -> dict[str, Callable[[], Asked]]:
    """Return what reads a request with these fields, for each protocol."""
    chat = json.dumps({"messages": HELLO, "max_tokens": 3, **fields}).encode()
    response = json.dumps({"input": HELLO, **fields}).encode()
    return {
        "chat": lambda: read(chat),
        "message": lambda: read_message(chat, models=("tiny",)),
        "response": lambda: read_response(response, models=("tiny",)),
    }


@pytest.mark.parametrize("protocol", ["chat", "message", "response"])
def test_a_temperature_is_the_same_in_each_protocol(protocol: str) -> None:
    """With the same bounds."""
    for value in (0, 0.01, 100):
        assert read_anywhere(temperature=value)[protocol]().temperature == value
    for wrong, message in ((0.009, "0 or at least 0.01"), (101, "between 0 and 100")):
        with pytest.raises(RequestError, match=message) as refused:
            read_anywhere(temperature=wrong)[protocol]()
        assert refused.value.param == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"7", b'{"messages": NaN}', b"[" * 100_000),
        b'{"a": %s}' % (b"9" * 5000),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """Nor JSON at all."""
    with pytest.raises(RequestError, match="the body is") as refused:
        read(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("prompt", [None, 7, ["a", "b"], [1, 2], ["a", 2], [[1]]])
def test_a_prompt_is_one_string(prompt: Any) -> None:
    """A list of one is one, too."""
    with pytest.raises(RequestError, match="prompt must be"):
        read({"prompt": prompt}, chat=False)
    assert read({"prompt": ["a"]}, chat=False).prompt == "a"


@given(st.dictionaries(st.sampled_from([*Asked.__dataclass_fields__, "model", "n"]), json_values))
def test_no_json_is_more_than_refused(body: dict[str, Any]) -> None:
    """Whatever it holds: no other exception."""
    for chat in (True, False):
        with contextlib.suppress(RequestError):
            read(json.dumps(body).encode(), chat=chat)


@given(st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.lists(st.text("abc")))
def test_text_ends_before_the_first_stop_string_that_is_complete(
    stops: list[str], parts: list[str]
) -> None:
    """However the text comes in parts; without one, all of it is handed on."""
    shown: list[str] = []
    text = StopText(stops, shown.append)
    for part in parts:
        text.feed(part)
    text.end()

    whole, expected = "", None
    for part in parts:
        whole += part
        places = [whole.find(stop) for stop in stops if stop in whole]
        if places and expected is None:
            expected = whole[: min(places)]
    assert "".join(shown) == (whole if expected is None else expected)
    assert text.found == (expected is not None)
