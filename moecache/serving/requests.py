"""Asked: a client's request, read from JSON that nobody vouches for."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moecache.decoding.sampler import Mask
from moecache.errors import ConfigError
from moecache.integrations.answer_parts import AnswerParser
from moecache.serving.errors import RequestError
from moecache.serving.fields import (
    Fields,
    check_texts,
    kind_of,
    refuse,
    refuse_constant,
    text_of,
    texts_of,
)
from moecache.serving.grammars import Grammar
from moecache.serving.structured import read_grammar
from moecache.serving.tools import Tools, read_calls, read_tools
from moecache.serving.unsupported import UNSUPPORTED
from moecache.units import check_seed

# The length of a completion without max_tokens, by OpenAI's protocol.
_COMPLETION_TOKENS = 16
_MOST_STOPS = 16
_MOST_STOP_CHARACTERS = 1000
_MOST_CHOICES = 16
_MOST_LOGPROBS = 20
_MOST_BIASES = 4096
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Fields that would change the answer and are not supported, and values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
}
# Arguments by which transformers and jinja2 render a template; there cannot be two of a name.
_TEMPLATES_OWN = {"tools", "messages", "conversations", "self"}


@dataclass(frozen=True)
class Asked:
    """A client's request.

    Attributes
    ----------
    messages : tuple of dict or None
        A conversation, each message with "role" and "content", and what else chat templates look
        at; or:
    prompt : str or None
        A text to continue.
    max_tokens : int or None
        `None`: as many as the server gives.
    temperature, top_p : float or None
        `None`: as the model's generation_config.json says, and likewise:
    top_k : int or None
    seed : int
        Seed of the draws: the client's, or a random one.
    stop : tuple of str
        The answer ends before the first of these.
    stream, include_usage : bool
        Whether the answer comes in parts, with the usage after the last one.
    min_p, repetition_penalty : float or None
        `None`: as the model's generation_config.json says.
    presence_penalty, frequency_penalty : float
    logit_bias : dict of int to float
        Added to the logits of tokens.
    num_choices : int
        Answers to the same prompt, with seeds that follow each other.
    num_logprobs : int or None
        Likeliest tokens that are told at each place, beside the one that was drawn; `None`: no
        probabilities are told.
    template : dict
        Variables for the chat template.
    grammar : Grammar or None
        The texts that the answer may be; `None`: any.
    new_mask : callable () or None
        Returns a mask that keeps one answer within `grammar`; the engine sets it, and likewise:
    new_parser : callable ()
        Returns what takes one answer apart.
    prompt_tokens : int
        Of the prompt; the engine sets it.
    shows_special : bool
        Whether special tokens, but for those that end texts, are text for the parser.
    tools : Tools
    """

    messages: tuple[dict[str, Any], ...] | None
    prompt: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_choices: int = 1
    num_logprobs: int | None = None
    template: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    new_mask: Callable[[], Mask] | None = None
    new_parser: Callable[[], AnswerParser] = AnswerParser
    prompt_tokens: int = 0
    shows_special: bool = False
    tools: Tools = field(default_factory=Tools)

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return self.messages is not None


def read_request(body: bytes | bytearray, *, chat: bool, models: tuple[str, ...]) -> Asked:
    """Return what a request asks for.

    Parameters
    ----------
    body : bytes or bytearray
        JSON.
    chat : bool
        Whether this is a chat completion; else a completion.
    models : tuple of str
        Names of the model that is served.

    Raises
    ------
    RequestError
        If it is no such request, or asks for something that is not supported.
    """
    given = read_object(body)
    fields = Fields(given)
    for name, neutral in {**_NEUTRAL, **UNSUPPORTED}.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise RequestError(
                400, f"{name} is not supported; leave it out", param=name, code="unsupported"
            )
    check_model(fields, models)
    most = fields.whole("max_tokens", 1)
    if most is None and given.get("n_predict") != -1:
        # llama-server's word, whose -1 is no number.
        most = fields.whole("n_predict", 1)
    if chat:
        most = fields.whole("max_completion_tokens", 1) or most
    options = fields.table("stream_options")
    return Asked(
        messages=_messages(given) if chat else None,
        prompt=None if chat else _prompt(given),
        max_tokens=most if chat or most is not None else _COMPLETION_TOKENS,
        temperature=read_temperature(fields),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.whole("top_k", 1),
        seed=read_seed(fields),
        stop=_stop(given.get("stop")),
        stream=fields.flag("stream"),
        include_usage=Fields(options).flag("include_usage"),
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(fields),
        num_choices=fields.whole("n", 1, _MOST_CHOICES) or 1,
        num_logprobs=_num_logprobs(fields, chat=chat),
        template=_template(fields) if chat else {},
        grammar=read_grammar(given),
        tools=read_tools(given) if chat else Tools(),
    )


def read_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object that a body is; raise a RequestError if it is none."""
    try:
        given = json.loads(body.decode(), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(400, f"the body is {kind_of(given)}, not a JSON object")
    return given


def check_model(fields: Fields, models: tuple[str, ...]) -> None:
    """Raise a RequestError if a request is for another model."""
    model = fields.text("model")
    if model is not None and model not in models:
        raise RequestError(
            404,
            f"the model {model!r} is not served here; this is {models[0]!r}",
            param="model",
            code="model_not_found",
        )


def read_seed(fields: Fields) -> int:
    """Return the seed of a request, or a random one."""
    seed = fields.whole("seed")
    if seed is None:
        return secrets.randbelow(2**31)
    try:
        return check_seed(seed, "seed")
    except ConfigError as error:
        raise RequestError(400, str(error), param="seed") from error


def read_temperature(fields: Fields) -> float | None:
    """Return the temperature of a request, which is 0 or at least 0.01, or `None`."""
    value = fields.number("temperature", 0, 100)
    if value is not None and 0 < value < 0.01:
        raise RequestError(
            400, f"temperature must be 0 or at least 0.01, got {value}", param="temperature"
        )
    return value


def _template(fields: Fields) -> dict[str, Any]:
    given = fields.table("chat_template_kwargs")
    name = "chat_template_kwargs"
    for taken in sorted(_TEMPLATES_OWN & given.keys()):
        raise RequestError(
            400,
            f"{name} has {taken!r}, which is a field of the request or the template's own; leave "
            "it out",
            param=name,
        )
    check_texts(name, given)
    return given


def _logit_bias(fields: Fields) -> dict[int, float]:
    given = fields.table("logit_bias")
    if len(given) > _MOST_BIASES:
        raise RequestError(
            400, f"logit_bias has {len(given)} tokens, more than {_MOST_BIASES}", param="logit_bias"
        )
    biases = Fields(given)
    found = {}
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise RequestError(
                400, f"logit_bias: {name[:40]!r} is not the number of a token", param="logit_bias"
            )
        found[int(name)] = biases.number(name, -100, 100) or 0.0
    return found


def _num_logprobs(fields: Fields, *, chat: bool) -> int | None:
    if not chat:
        return fields.whole("logprobs", 0, _MOST_LOGPROBS)
    num = fields.whole("top_logprobs", 0, _MOST_LOGPROBS)
    if not fields.flag("logprobs"):
        if num:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return num or 0


def _messages(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "a list of messages, at least one")
    return tuple(_message(number, message) for number, message in enumerate(messages))


def _message(number: int, message: Any) -> dict[str, Any]:
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        refuse(name, message, "an object with role and content")
    fields = Fields(message)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            400, f"{name}.role must be one of {', '.join(_ROLES)}", param=f"{name}.role"
        )
    found: dict[str, Any] = {"role": _ROLES[role]}
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    found["content"] = texts_of(f"{name}.content", content)
    if role == "assistant":
        if message.get("tool_calls") is not None:
            found["tool_calls"] = read_calls(f"{name}.tool_calls", message["tool_calls"])
        # vLLM's and llama-server's word; templates leave it out where they like.
        reasoning = fields.text("reasoning_content")
        if reasoning is not None:
            found["reasoning_content"] = text_of(f"{name}.reasoning_content", reasoning)
    elif role == "tool":
        for word in ("tool_call_id", "name"):
            value = fields.text(word)
            if value is not None:
                found[word] = text_of(f"{name}.{word}", value)
    return found


def _prompt(given: Mapping[str, Any]) -> str:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list):
        raise RequestError(
            400,
            "prompt must be one string; send a request for each, and text instead of tokens",
            param="prompt",
        )
    return text_of("prompt", prompt)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > _MOST_STOPS:
        raise RequestError(
            400, f"stop has {len(stops)} strings, more than {_MOST_STOPS}", param="stop"
        )
    for one in stops:
        if not 1 <= len(text_of("stop", one)) <= _MOST_STOP_CHARACTERS:
            raise RequestError(
                400,
                f"a string of stop must have between 1 and {_MOST_STOP_CHARACTERS} characters",
                param="stop",
            )
    return tuple(stops)
