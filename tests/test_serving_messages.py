"""Anthropic's protocol: messages of blocks, their events, errors, and counts of tokens."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")

from moecache.integrations import answer_parts
from moecache.serving import checks
from moecache.serving.errors import RequestError
from moecache.serving.messages import read_message
from tests.helpers.serving import Served, serving, write_chat_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    '{% if tools %}<tool_call> "arguments" {% for t in tools %}{{ t.function.name }} {% endfor %}'
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.items() | list }}{% endfor %}\n{% endfor %}assistant:{# </think> #}"
)
TOOL = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO = {"max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
SAYS = (
    "<think>\nOslo.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)
    with serving(directory) as served:
        yield served


def send(served: Served, path: str = "", **body: Any) -> tuple[int, bytes]:
    """Return status and body of what is answered."""
    request = urllib.request.Request(
        f"{served.url}/v1/messages{path}", json.dumps({**HELLO, **body}).encode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def events_of(text: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; each has its type as its name."""
    found = []
    for one in text.decode().split("\n\n"):
        name, _, data = one.partition("\n")
        if name.startswith("event: "):
            found.append(json.loads(data.removeprefix("data: ")))
            assert found[-1]["type"] == name.removeprefix("event: ")
    return found


class SaysParser(answer_parts.AnswerParser):
    """Takes a text of the test's apart, instead of what the model says."""

    def feed(self, text: str) -> list[answer_parts.Piece]:
        """Return the pieces of it all, once."""
        said, self.said = getattr(self, "said", SAYS), ""
        return super().feed(said)


def test_a_message_is_answered_as_a_chat_is(served: Served) -> None:
    """Whole and as events, with the tokens of the same prompt, of which some are known."""
    status, whole = send(served, system=[{"type": "text", "text": "Be brief."}])
    message = json.loads(whole)
    (block,) = message["content"]
    assert (status, message["type"], message["role"]) == (200, "message", "assistant")
    assert (block["type"], message["stop_reason"]) == ("text", "max_tokens")
    usage = message["usage"]
    assert usage["output_tokens"] == HELLO["max_tokens"]
    _, counted = send(served, "/count_tokens", system="Be brief.")
    num = json.loads(counted)["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num

    begun, opened, *deltas, closed, ended, last = events_of(
        send(served, system="Be brief.", stream=True)[1]
    )
    assert begun["message"]["usage"]["input_tokens"] == num
    assert opened["content_block"] == {"type": "text", "text": ""}
    assert "".join(delta["delta"]["text"] for delta in deltas) == block["text"]
    assert (closed["type"], last["type"]) == ("content_block_stop", "message_stop")
    assert ended["delta"]["stop_reason"] == "max_tokens"
    assert ended["usage"] == usage


def test_thoughts_and_calls_are_blocks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its beginning, its parts and its end."""
    monkeypatch.setattr(checks, "AnswerParser", SaysParser)
    message = json.loads(send(served, tools=[TOOL])[1])
    kinds = [block["type"] for block in message["content"]]
    thought, text, call = message["content"]
    assert kinds == ["thinking", "text", "tool_use"]
    assert (thought["thinking"], text["text"]) == ("Oslo.", "I look.")
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})

    events = events_of(send(served, tools=[TOOL], stream=True)[1])
    begun = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert begun == kinds
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"city": "Oslo"}
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]


def test_a_stop_sequence_is_named(served: Served) -> None:
    """And so is the end of a text that is a call."""
    text = json.loads(send(served)[1])["content"][0]["text"]
    stop = text[3:5]
    message = json.loads(send(served, stop_sequences=["no such", stop])[1])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.find(stop)]


def test_a_call_may_be_required(served: Served) -> None:
    """By a grammar of the functions' schemas."""
    pytest.importorskip("llguidance")
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ):
        message = json.loads(send(served, tools=[TOOL], tool_choice=choice, max_tokens=200)[1])
        (block,) = message["content"]
        assert (block["type"], message["stop_reason"]) == ("tool_use", "tool_use")
        assert block["input"]["city"] in ("Rome", "Oslo")


def test_blocks_of_tools_are_messages_of_a_chat() -> None:
    """Results come before what the user says with them; thoughts stay with their answer."""
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
    body = {
        **HELLO,
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "How is it?"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And?"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "1",
                        "content": [{"type": "text", "text": "Rain."}],
                    },
                ],
            },
        ],
    }
    asked = read_message(json.dumps(body).encode(), models=("m",))
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
        {"role": "user", "content": "And?"},
    )


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server's own"),
        ({"tools": [TOOL, TOOL]}, "twice"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "one of tools"),
        ({"stop_sequences": [""]}, "1 to 1000"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ],
)
def test_what_is_no_message_is_refused(wrong: dict[str, Any], problem: str) -> None:
    """With the place and what it should be."""
    with pytest.raises(RequestError, match=problem):
        read_message(json.dumps({**HELLO, **wrong}).encode(), models=("m",))


def test_what_an_agent_sends_besides_is_no_error() -> None:
    """Claude Code has old parts dropped, marks what to keep, and says who asks."""
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    more = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "messages": [{"role": "user", "content": [block]}],
        "metadata": {"user_id": "x"},
        "system": [block],
    }
    asked = read_message(json.dumps({**HELLO, **more}).encode(), models=("m",))
    assert asked.messages == (
        {"role": "system", "content": "Hello"},
        {"role": "user", "content": "Hello"},
    )


def test_errors_have_the_protocols_shape(served: Served) -> None:
    """Of a request, and of a model that is another."""
    status, text = send(served, messages="hello")
    assert (status, json.loads(text)["type"]) == (400, "error")
    status, text = send(served, model="claude")
    assert (status, json.loads(text)["error"]["type"]) == (404, "not_found_error")
