"""Tools: what a model is told of functions, and what clients get of its calls and thoughts."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

from moecache.integrations.answer_parts import (  # noqa: E402
    AnswerParser,
    Piece,
    format_of,
)
from moecache.serving import checks  # noqa: E402
from moecache.serving.tools import _closed  # noqa: E402
from tests.helpers.serving import Served, serving, write_chat_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# As Qwen's: the functions, messages with calls, and an answer that may begin with thoughts.
TEMPLATE = (
    '{% if tools %}Call as <tool_call>{"name": n, "arguments": {}}</tool_call>: '
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments.items() | list }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinks %}<think>\n{% endif %}{% endif %}"
    "{# <think></think> #}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
MESSAGES = [{"role": "user", "content": "How is it in Oslo?"}]


@pytest.fixture(name="served", scope="module")
def _served(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_chat_model(tiny_moe, tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)
    with serving(directory) as served:
        yield served


class SaysParser(AnswerParser):
    """Takes a text of the test's apart, if there is one, instead of what the model says."""

    text: str | None = None

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces of it all, once."""
        if SaysParser.text is not None:
            text, SaysParser.text = SaysParser.text, ""
        return super().feed(text)


@pytest.fixture(autouse=True)
def _says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "AnswerParser", SaysParser)
    monkeypatch.setattr(SaysParser, "text", None)


def ask(client: Any, says: str | None = None, **options: Any) -> Any:
    """Ask a question; the answer is a text of the test's if that is told, and ends by itself."""
    if says is not None:
        SaysParser.text = says
        grammar = {"structured_outputs": {"choice": ["x"]}}
        options["extra_body"] = {**options.get("extra_body", {}), **grammar}
    options = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "temperature": 0, **options}
    return client.chat.completions.create(model="tiny", max_tokens=120, **options)


def parts_of(chunks: Any) -> tuple[str, str, list[Any], str]:
    """Return content, thoughts, calls and finish of a stream."""
    content, thoughts, calls, finish = "", "", [], ""
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    return content, thoughts, calls, finish


def test_a_call_is_no_content(client: Any) -> None:
    """Whole and in parts, with thoughts and text before it."""
    says = (
        "<think>\nOslo.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    )
    (choice,) = ask(client, says).choices
    message = choice.message
    assert (message.content, message.reasoning_content) == ("I look.", "Oslo.")
    found = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert found == [("weather", {"city": "Oslo"}), ("clock", {})]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls}) == 2
    content, thoughts, calls, finish = parts_of(ask(client, says, stream=True))
    assert (content, thoughts, finish) == ("I look.", "Oslo.", "tool_calls")
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "clock")]
    # At most one, if that is asked for.
    (choice,) = ask(client, says, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    *_, calls, _ = parts_of(ask(client, says, parallel_tool_calls=False, stream=True))
    assert len(calls) == 1


def test_a_call_that_is_none_is_content(client: Any) -> None:
    """As is one that the end of the text cut off."""
    for says in ("<tool_call>\nhello\n</tool_call>", '<tool_call>\n{"name": "clock", "argu'):
        (choice,) = ask(client, says).choices
        assert (choice.message.content, choice.finish_reason) == (says, "stop")
        assert choice.message.tool_calls is None
        content, _, calls, finish = parts_of(ask(client, says, stream=True))
        assert (content, calls, finish) == (says, [], "stop")


def test_a_call_may_be_required(client: Any) -> None:
    """Of any function, or of one: then the model writes nothing else, by the schema."""
    # Without the days, of which a model without sense writes as many digits as it may, and as most
    # clients write it: nothing is said of other arguments, which the model must not make up.
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    }
    weather = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    for choice, tools in (
        ("required", [weather]),
        ({"type": "function", "function": {"name": "weather"}}, [CLOCK, weather]),
    ):
        found = ask(client, tool_choice=choice, tools=tools, parallel_tool_calls=False).choices[0]
        (call,) = found.message.tool_calls
        assert (call.function.name, found.finish_reason) == ("weather", "tool_calls")
        assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"city": "Oslo"})
        assert not found.message.content


def test_only_plain_objects_are_closed() -> None:
    """One that is put together, or that says what else may be there, stays as it is."""
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    closed = {**inner, "additionalProperties": False}
    for given, expected in (
        (inner, closed),
        ({"items": inner}, {"items": closed}),
        (
            {"properties": {"b": inner}},
            {"properties": {"b": closed}, "additionalProperties": False},
        ),
        ({**inner, "additionalProperties": True}, {**inner, "additionalProperties": True}),
        ({**inner, "allOf": [inner]}, {**inner, "allOf": [inner]}),
        ({"type": "object"}, {"type": "object"}),
    ):
        assert _closed(given) == expected


def test_the_template_is_told_of_functions_and_earlier_calls(client: Any) -> None:
    """The prompt grows by what it writes of them; arguments reach it as objects."""
    plain = ask(client, "x", tools=[]).usage.prompt_tokens
    assert ask(client, "x", tool_choice="none").usage.prompt_tokens == plain
    assert ask(client, "x").usage.prompt_tokens > plain
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "It rains."},
    ]
    assert ask(client, "so", messages=turns).choices[0].message.content == "so"


def test_thoughts_that_the_prompt_began_are_thoughts(client: Any) -> None:
    """A text of a grammar alone is content as it is."""
    options: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
    found = ask(client, "hm</think>\n\nyes", tools=[CLOCK], **options).choices[0].message
    assert (found.reasoning_content, found.content) == ("hm", "yes")
    found = ask(client, "hm</think>yes", tools=[], **options).choices[0].message
    assert found.content == "x"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tools"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": "[1]"}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_no_tool_is_refused(client: Any, wrong: dict[str, Any], param: str) -> None:
    """With status 400 and the place."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **wrong)
    assert error.value.param == param


def test_a_grammar_and_a_required_call_are_refused(client: Any) -> None:
    """They say different things."""
    with pytest.raises(openai.BadRequestError, match="leave one out"):
        ask(client, "x", tool_choice="required")


def taken_apart(source: str, text: str, prompt: str = "") -> list[Piece]:
    """Return the parts of a text by a chat template's format, the same however it comes."""
    known = format_of(SimpleNamespace(chat_template=source))
    assert known is not None
    found = []
    for step in (1, 3, 1000):
        parser = AnswerParser(known, prompt, [WEATHER])
        parts = [text[at : at + step] for at in range(0, len(text), step)]
        pieces = [piece for part in parts for piece in parser.feed(part)] + parser.end()
        grouped = itertools.groupby(pieces, lambda piece: (piece.kind, piece.name))
        found.append(
            [
                Piece(kind, "".join(piece.text for piece in group), name)
                for (kind, name), group in grouped
            ]
        )
    assert found[0] == found[1] == found[2]
    return found[0]


HARMONY = "<|start|><|channel|><|message|>"
ASKS = '{"city": "Oslo", "days": 3}'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "<tool_call><arg_key>",
            (
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
                "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
            ),
        ),
        (
            "<tool_call><function=",
            (
                "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
                "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            HARMONY,
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ASKS}",
        ),
        (HARMONY, f"to=functions.weather<|channel|>commentary json<|message|>{ASKS}<|call|>"),
    ],
    ids=["glm", "qwen-coder", "gpt-oss", "gpt-oss-recipient-first"],
)
def test_other_formats_of_calls_are_known(source: str, text: str) -> None:
    """By the markers in the chat template; numbers are numbers where the schema says so."""
    (call,) = taken_apart(source, text)
    assert (call.kind, call.name, json.loads(call.text)) == ("call", "weather", json.loads(ASKS))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "<tool_call><function=",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</para",
        ),
        (
            "<tool_call><function=",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo</parameter>",
        ),
        ("<tool_call><arg_key>", "<tool_call>weat"),
        ("<tool_call><arg_key>", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os"),
        ('<tool_call>"arguments"', '<tool_call>\n{"name": "weather", "arguments": {"ci'),
        ('<tool_call>"arguments"', '<tool_call>\n{"name": "erase", "arguments": {}}\n</tool_call>'),
        ("<tool_call><arg_key>", "<tool_call>erase\n</tool_call>"),
    ],
)
def test_a_call_that_was_cut_or_not_offered_is_content(source: str, text: str) -> None:
    """Half of its arguments may mean something else, and nobody knows what it would do."""
    pieces = taken_apart(source, text)
    assert {piece.kind for piece in pieces} == {"content"}
    assert "".join(piece.text for piece in pieces) == text


def test_without_functions_nothing_is_called(client: Any) -> None:
    """Nor with `tool_choice` none."""
    says = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for options in ({"tools": []}, {"tool_choice": "none"}):
        SaysParser.text = says
        found = ask(client, **options).choices[0]
        assert (found.message.content, found.message.tool_calls) == (says, None)
        assert found.finish_reason != "tool_calls"


def test_no_text_is_lost() -> None:
    """Neither what looks like a marker, nor what a model writes in no part."""
    hermes = '<tool_call>"arguments"</think>'
    assert taken_apart(hermes, "a < b <tool\n") == [Piece("content", "a < b <tool\n")]
    assert taken_apart(hermes, " two\n\n lines ") == [Piece("content", " two\n\n lines ")]
    assert taken_apart(HARMONY, "plain") == [Piece("content", "plain")]
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert taken_apart(HARMONY, f"{thought}<|channel|>final<|message|>yes") == [
        Piece("reasoning", "hm"),
        Piece("content", "yes"),
    ]
    assert format_of(SimpleNamespace(chat_template="{{ messages }}")) is None
