"""Asked: a client's request, read from JSON that nobody vouches for."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moecache.errors import ConfigError
from moecache.serving.errors import RequestError
from moecache.units import check_seed

# The length of a completion without max_tokens, by OpenAI's protocol.
_COMPLETION_TOKENS = 16
_MOST_STOPS = 16
_MOST_STOP_CHARACTERS = 1000
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields that would change the answer and are not supported, and values with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
}


@dataclass(frozen=True)
class Asked:
    """A client's request.

    Attributes
    ----------
    messages : tuple of dict or None
        A conversation, each message with "role" and "content"; or:
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
    """

    messages: tuple[dict[str, str], ...] | None
    prompt: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

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
    try:
        given = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(400, f"the body is {_kind(given)}, not a JSON object")
    fields = _Fields(given)
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise RequestError(
                400, f"{name} is not supported; leave it out", param=name, code="unsupported"
            )
    model = fields.text("model")
    if model is not None and model not in models:
        raise RequestError(
            404,
            f"the model {model!r} is not served here; this is {models[0]!r}",
            param="model",
            code="model_not_found",
        )
    most = fields.whole("max_tokens", 1)
    if chat:
        most = fields.whole("max_completion_tokens", 1) or most
    options = fields.table("stream_options")
    return Asked(
        messages=_messages(given) if chat else None,
        prompt=None if chat else _prompt(given),
        max_tokens=most if chat or most is not None else _COMPLETION_TOKENS,
        temperature=_temperature(fields),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.whole("top_k", 1),
        seed=_seed(fields),
        stop=_stop(given.get("stop")),
        stream=fields.flag("stream"),
        include_usage=_Fields(options).flag("include_usage"),
    )


class _Fields:
    """Values of an object's fields, each of the type that it should be."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def text(self, name: str) -> str | None:
        value = self._given.get(name)
        if value is not None and not isinstance(value, str):
            _refuse(name, value, "a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._given.get(name)
        if value is not None and not isinstance(value, bool):
            _refuse(name, value, "true or false")
        return bool(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self._given.get(name)
        if value is not None and not isinstance(value, dict):
            _refuse(name, value, "an object")
        return value or {}

    def whole(self, name: str, least: int | None = None) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, value, "a whole number")
        if least is not None and value < least:
            raise RequestError(400, f"{name} must be at least {least}", param=name)
        return int(value)

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(name, value, "a number")
        # Compared first: an int may be too large for a float.
        if not least <= value <= most or not math.isfinite(value):
            raise RequestError(400, f"{name} must be between {least} and {most}", param=name)
        return float(value)


def _seed(fields: _Fields) -> int:
    seed = fields.whole("seed")
    if seed is None:
        return secrets.randbelow(2**31)
    try:
        return check_seed(seed, "seed")
    except ConfigError as error:
        raise RequestError(400, str(error), param="seed") from error


def _temperature(fields: _Fields) -> float | None:
    value = fields.number("temperature", 0, 100)
    if value is not None and 0 < value < 0.01:
        raise RequestError(
            400, f"temperature must be 0 or at least 0.01, got {value}", param="temperature"
        )
    return value


def _messages(given: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", messages, "a list of messages, at least one")
    return tuple(_message(number, message) for number, message in enumerate(messages))


def _message(number: int, message: Any) -> dict[str, str]:
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        _refuse(name, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            400,
            f"{name}.role must be one of {', '.join(_ROLES)}; tools are not supported",
            param=f"{name}.role",
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            _part(f"{name}.content[{place}]", part) for place, part in enumerate(content)
        )
    elif content is None and role == "assistant":
        content = ""
    return {"role": _ROLES[role], "content": _text(f"{name}.content", content)}


def _part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise RequestError(
            400, f'{name} must be of type "text": images and audio are not supported', param=name
        )
    return _text(f"{name}.text", part.get("text"))


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
    return _text("prompt", prompt)


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > _MOST_STOPS:
        raise RequestError(
            400, f"stop has {len(stops)} strings, more than {_MOST_STOPS}", param="stop"
        )
    for one in stops:
        if not 1 <= len(_text("stop", one)) <= _MOST_STOP_CHARACTERS:
            raise RequestError(
                400,
                f"a string of stop must have between 1 and {_MOST_STOP_CHARACTERS} characters",
                param="stop",
            )
    return tuple(stops)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON can write half of a character, which is no text.
        raise RequestError(400, f"{name} has a lone surrogate, {error.start}", param=name) from None
    return str(value)


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise RequestError(400, f"{name} must be {wanted}, got {_kind(value)}", param=name)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), "nothing" if value is None else "a number")
