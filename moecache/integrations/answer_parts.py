"""Parts of an answer: what a model says, what it thinks before, and the functions that it calls.

transformers' own parser takes them apart, by the description that comes with a tokenizer. Most
published tokenizers come without one: then the markers in the chat template say which format it is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moecache.errors import MissingDependencyError

_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
# Text that is in no other part.
_CONTENT: dict[str, Any] = {"content": "text"}
_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Tokens of a prompt that tell whether its end has opened a part.
_TAIL_TOKENS = 16
# Of a text, as many as a marker and what may stand behind it have.
_TAIL_CHARACTERS = 64


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes
    ----------
    kind : {"content", "reasoning", "call"}
    text : str
        Of a call the arguments, as JSON.
    name : str
        Of the function that is called.
    """

    kind: str
    text: str
    name: str = ""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes the parts of its answers.

    Attributes
    ----------
    fields : dict
        The parts, as transformers' response templates describe them.
    own : dict or None
        The tokenizer's own description, if it comes with one.
    call : tuple of str or None
        What stands before and after a call's JSON, if calls are JSON of a name and arguments.
    marks : tuple of str
        What a call that is none is shown in; the first may have a place for its "{name}".
    """

    fields: dict[str, Any]
    own: dict[str, Any] | None = None
    call: tuple[str, str] | None = None
    marks: tuple[str, str] = ("", "")

    @property
    def has_calls(self) -> bool:
        """Whether functions can be called."""
        return "tool_calls" in self.fields

    def has_special(self, tokenizer: Any) -> bool:
        """Return whether markers may be a tokenizer's special tokens, which are no text else."""
        markers = json.dumps(self.fields, ensure_ascii=False)
        return self.own is not None or any(
            token in markers for token in tokenizer.all_special_tokens
        )


def format_of(tokenizer: Any) -> AnswerFormat | None:
    """Return how a tokenizer's model writes its answers; `None` if all is content."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict) and isinstance(own.get("fields"), dict):
        return AnswerFormat(own["fields"], own)
    source = template_of(tokenizer)
    if "<|channel|>" in source and "<|message|>" in source:
        return AnswerFormat(_HARMONY, marks=("to=functions.{name}: ", ""))
    fields: dict[str, Any] = {}
    if "</think>" in source:
        fields["reasoning_content"] = _THINK
    call, marks = None, ("", "")
    if "<tool_call>" in source:
        if "<arg_key>" in source:
            fields["tool_calls"] = _ARGUMENT_TAGS
            marks = "<tool_call>{name}", "</tool_call>"
        elif "<function=" in source:
            fields["tool_calls"] = _PARAMETER_TAGS
            marks = "<tool_call>\n<function={name}>", "</function>\n</tool_call>"
        elif '"arguments"' in source:
            fields["tool_calls"] = _JSON_CALLS
            call, marks = ("<tool_call>\n", "\n</tool_call>"), ("<tool_call>", "</tool_call>")
    if not fields:
        return None
    return AnswerFormat({**fields, "content": _CONTENT}, call=call, marks=marks)


def template_of(tokenizer: Any) -> str:
    """Return the source of a tokenizer's chat templates; empty if it has none."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        return "\n".join(str(one) for one in source.values())
    return source if isinstance(source, str) else ""


# One JSON object between markers: Hermes, Qwen2, Qwen3.
_JSON_CALLS = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "content_args": {"allow_non_json": True},
    "transform": _CALL,
}
# Qwen3-Coder, Qwen3.5.
_PARAMETER_TAGS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    },
    "transform": _NAMED_CALL,
}
# GLM-4.5 and later.
_ARGUMENT_TAGS = {
    "open_pattern": r"\s*<tool_call>(?P<name>[^<\s]+)",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    },
    "transform": _NAMED_CALL,
}
# gpt-oss. What stands between messages is no part; a call ends the text.
_HARMONY = {
    "reasoning_content": {
        "open": "<|channel|>analysis<|message|>",
        "close": ["<|end|>", "<|start|>"],
        "content": "text",
    },
    "tool_calls": {
        "open_pattern": (
            r"(?:<\|channel\|>commentary )?to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>"
        ),
        "close": ["<|call|>", "<|end|>", "<|start|>"],
        "repeats": True,
        "content": "json",
        "content_args": {"allow_non_json": True},
        "transform": _NAMED_CALL,
    },
    "content": {
        "open_pattern": r"<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>",
        "close": ["<|return|>", "<|end|>", "<|start|>"],
        "content": "text",
    },
}


def check_parser(tokenizer: Any) -> None:
    """Have transformers' parser there if a tokenizer's model writes answers of several parts.

    Its import takes most of a second, and needs no torch.

    Raises
    ------
    MissingDependencyError
        If transformers is not installed.
    """
    if format_of(tokenizer) is not None:
        parser_class()


def parser_class() -> Any:
    """Return transformers' parser of answers."""
    try:
        from transformers.utils.chat_parsing.response_parser import ResponseParser
    except ImportError as error:
        raise MissingDependencyError(
            "the model's answers have thoughts or calls, which transformers' parser takes apart; "
            "install it with: pip install 'transformers>=5.8,<6'"
        ) from error
    return ResponseParser


class AnswerParser:
    """Takes an answer apart as it comes.

    Whatever a model writes, all of it is in some piece but the markers: a call that is none, that
    the end of the text cut off, or of a function that was not offered, is content. White space
    around thoughts and before calls is left out.

    Parameters
    ----------
    format : AnswerFormat, optional
        `None`: all of it is content.
    prompt : str
        The text before the answer, or its end: it may have opened a part.
    tools : sequence of dict
        The functions that the model may call, by whose schemas arguments are typed; no others can
        be called.
    are_many : bool, default True
        Whether calls beyond the first count; else they are left out.

    Attributes
    ----------
    num_calls : int
    """

    def __init__(
        self,
        format: AnswerFormat | None = None,  # noqa: A002 - the field's word
        prompt: str = "",
        tools: Sequence[dict[str, Any]] = (),
        *,
        are_many: bool = True,
    ) -> None:
        self._field = ""
        self._body = self._blanks = ""
        self._is_plain, self._has_begun, self._is_over = format is None, False, False
        # All of it, as long as it is in no part.
        self._unplaced = self._tail = ""
        self.num_calls = 0
        self._are_many = are_many
        if format is None:
            return
        make_parser = parser_class()
        self._format = format
        known: Any = list(tools)
        self._names = {tool["function"]["name"] for tool in known}
        if format.own is not None:
            self._parser = make_parser(format.own, prefix=prompt, tools=known)
            events = self._parser.initial_events
        else:
            # An anchor is for the prefix alone, of which there is none.
            description = {"start_anchor": "<think>", "fields": format.fields}
            self._parser = make_parser(description, prefix="", tools=known)
            opens = prompt.rstrip().endswith("<think>") and "reasoning_content" in format.fields
            events = self._parser.feed("<think>") if opens else []
        self._pieces(events)

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that more text makes certain."""
        if self._is_plain:
            return [Piece("content", text)] if text else []
        self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
        if not self._field:
            self._unplaced += text
        try:
            return self._pieces(self._parser.feed(text))
        except ValueError:
            return self._give_up()

    def end(self) -> list[Piece]:
        """Return what is left when the text has ended."""
        if self._is_plain:
            return []
        self._is_over = True
        try:
            found = self._pieces(self._parser.finalize()[1])
        except ValueError:
            return self._give_up()
        if self._blanks and self._field == "content":
            found.append(Piece("content", self._blanks))
        if not self._field and self._unplaced:
            found.append(Piece("content", self._unplaced))
        return found

    def _give_up(self) -> list[Piece]:
        """Take all that is left for content: a part was not what its description says."""
        self._is_plain = True
        body, self._body = self._body, ""
        return [Piece("content", body)] if body else []

    def _pieces(self, events: Sequence[dict[str, Any]]) -> list[Piece]:
        found: list[Piece] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_open":
                self._field, self._body, self._blanks = field, "", ""
            elif kind == "region_chunk" and field == "tool_calls":
                self._body += event["text"]
            elif kind == "region_chunk":
                found += self._text(field, event["text"])
            elif kind == "region_close" and field == "tool_calls":
                found += self._calls(event["value"])
                self._body = ""
        return found

    def _text(self, field: str, text: str) -> list[Piece]:
        is_reasoning = field in _REASONING
        if not is_reasoning and field != "content":
            return []
        if not self._body and (is_reasoning or self._has_begun):
            text = text.lstrip()
        self._has_begun |= is_reasoning
        text = self._blanks + text
        kept = text.rstrip()
        # Blanks at the end may be before a marker.
        self._blanks = text[len(kept) :]
        self._body += kept
        return [Piece("reasoning" if is_reasoning else "content", kept)] if kept else []

    def _calls(self, value: Any) -> list[Piece]:
        calls = value if isinstance(value, list) else [value]
        before, after = self._format.marks
        # A marker at the end of the text is certain only then.
        has_end = after.rpartition("\n")[2]
        is_open = self._is_over and not (has_end and self._tail.rstrip().endswith(has_end))
        # JSON says whether it is complete; tags do not.
        is_cut = is_open and self._format.fields["tool_calls"].get("content") != "json"
        found = []
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            arguments = {} if function is None else _arguments(function)
            if is_cut or name not in self._names or arguments is None:
                begin = before.replace("{name}", str(name or ""))
                return [Piece("content", begin + self._body + ("" if is_open else after))]
            if self.num_calls and not self._are_many:
                continue
            self.num_calls += 1
            self._has_begun = True
            found.append(Piece("call", json.dumps(arguments, ensure_ascii=False), str(name)))
        return found


def _arguments(function: Any) -> dict[str, Any] | None:
    """Return the arguments of a call; `None` if they are none."""
    if not isinstance(function, dict):
        return None
    given = function.get("arguments", function.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def tail_of(format: AnswerFormat, tokenizer: Any, tokens: Sequence[int]) -> str:  # noqa: A002
    """Return the text of a prompt's end, or of all of it, as `AnswerParser` needs it."""
    some = list(tokens) if format.own is not None else list(tokens)[-_TAIL_TOKENS:]
    return str(tokenizer.decode(some, clean_up_tokenization_spaces=False))
