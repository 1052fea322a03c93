"""OpenAI's Responses: items, their events, and what is refused, by the real client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

from moecache.serving import checks  # noqa: E402
from moecache.serving.responses import read_response  # noqa: E402
from tests.helpers.serving import Served, serving, write_chat_model  # noqa: E402
from tests.test_serving_messages import (  # noqa: E402
    SAYS,
    TEMPLATE,
    TOOL,
    SaysParser,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FUNCTION = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": TOOL["input_schema"],
    "strict": True,
}


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)
    with serving(directory, compute="torch") as served:
        yield served


def test_a_response_is_a_chats_answer(client: Any) -> None:
    """Whole and as events, of a text or of items."""
    options = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    chat = client.chat.completions.create(
        model="tiny", temperature=0, max_tokens=12, messages=[{"role": "user", "content": "Hello"}]
    )
    whole = client.responses.create(input="Hello", **options)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.total_tokens == chat.usage.total_tokens
    with client.responses.stream(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}], **options
    ) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else None
    assert final is None
    assert events[-1].type == "response.incomplete"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
        whole.output_text
    )
    assert events[-1].response.output[0].content[0].text == whole.output_text


def test_thoughts_and_calls_are_items(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its beginning and its end."""
    monkeypatch.setattr(checks, "AnswerParser", SaysParser)
    assert "weather" in SAYS
    options = {"model": "tiny", "input": "Hello", "tools": [FUNCTION], "max_output_tokens": 5}
    whole = client.responses.create(**options)
    thought, message, call = whole.output
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (thought.content[0].text, message.content[0].text) == ("Oslo.", "I look.")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]
    arguments = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(arguments[0].arguments) == {"city": "Oslo"}


def test_a_schema_keeps_an_answer(client: Any) -> None:
    """In `text.format`."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    answer = client.responses.create(
        model="tiny",
        input="Hello",
        temperature=0,
        max_output_tokens=100,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.output_text)["n"] in (1, 2)
    assert answer.status == "completed"


def test_items_are_messages_of_a_chat() -> None:
    """Calls belong to the answer before them; earlier thoughts are left out."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "Rain."},
    ]
    body = {"input": items, "instructions": "Well.", "store": False}
    asked = read_response(json.dumps(body).encode(), models=("m",))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert asked.messages == (
        {"role": "system", "content": "Well."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    )


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
    ],
)
def test_what_is_no_response_is_refused(client: Any, wrong: dict[str, Any], param: str) -> None:
    """With status 400 and the place."""
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": "tiny", "input": "Hello", **wrong})
    assert error.value.param == param
