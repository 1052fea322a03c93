"""Text in, text out: what the command line needs of transformers beside the model."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from moecache.errors import ConfigError, MoeCacheError, StoreError
from moecache.integrations.transformers import gguf
from moecache.integrations.transformers._following import (
    announced,
)
from moecache.integrations.transformers._ranks import Stopped
from moecache.stores import is_gguf, open_store

# A prompt's last tokens: the text before a token decides how the token is written.
_CONTEXT_TOKENS = 5
_REPLACEMENT = "\ufffd"


class TokenTimes(BaseStreamer):
    """Notes when each token came; a streamer of `generate`.

    Parameters
    ----------
    on_first : callable (), optional
        Called once the first token is there: the prompt has been read by then.

    Attributes
    ----------
    stamps_s : list of float
        By `time.perf_counter`, one per token.
    tokens : list of int
    stopped : bool
        Set it, in any thread, and no further token comes.
    is_spread : bool
        The model's experts are spread over ranks: all of them stop before the same forward.
    """

    def __init__(self, on_first: Callable[[], object] | None = None) -> None:
        self.stamps_s: list[float] = []
        self.tokens: list[int] = []
        self.stopped = False
        self.is_spread = False
        self._on_first = on_first
        self._begun_s: float | None = None
        self._started_s = time.perf_counter()

    @property
    def prefill_s(self) -> float:
        """Seconds from the prompt to the first token; 0.0 before it."""
        if not self.stamps_s:
            return 0.0
        return self.stamps_s[0] - (self._started_s if self._begun_s is None else self._begun_s)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.stamps_s[-1] - self.stamps_s[0] if self.stamps_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first, whose time the prompt took."""
        return (len(self.stamps_s) - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def put(self, value: Any) -> None:
        """Take the prompt, at the first call, and then each token."""
        now = time.perf_counter()
        if self._begun_s is None:
            self._begun_s = now
        else:
            self.stamps_s.append(now)
            if len(self.stamps_s) == 1 and self._on_first is not None:
                self._on_first()
            tokens = value.reshape(-1).tolist()
            self.tokens += tokens
            self.take(tokens)
        self.check()

    def take(self, tokens: list[int]) -> None:
        """Do nothing with new tokens."""

    def check(self) -> None:
        """Raise `Stopped` if no further token is wanted."""
        if self.stopped and not self.is_spread:
            raise Stopped

    def end(self) -> None:
        """Do nothing."""


class TextStream(TokenTimes):
    """Hands out text as soon as it is certain, token by token.

    Together it is what the tokenizer makes of all tokens at once: a character of several
    tokens waits for the last of them, and spaces between words stay.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    prompt : Tensor, int64 [1, tokens]
    write : callable (str)
    on_first : callable (), optional
        As that of `TokenTimes`.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: torch.Tensor,
        write: Callable[[str], None],
        on_first: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(on_first)
        self._tokenizer = tokenizer
        self._write = write
        self._ids = prompt[0, -_CONTEXT_TOKENS:].tolist()
        # Tokens before `_shown` are written; those from `_start` on are decoded with what follows.
        self._start, self._shown = 0, len(self._ids)

    def take(self, tokens: list[int]) -> None:
        """Write what new tokens make certain."""
        self._ids += tokens
        self._advance(last=False)

    def end(self) -> None:
        """Write what is left: for a broken character, its replacement."""
        self._advance(last=True)

    def _advance(self, *, last: bool) -> None:
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(text) > len(before) and (last or not text.endswith(_REPLACEMENT)):
            self._start, self._shown = self._shown, len(self._ids)
            self._write(text[len(before) :])

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


@contextlib.contextmanager
def quiet(*, verbose: bool) -> Iterator[None]:
    """Have transformers say nothing but errors, and show no bars, unless verbose.

    Downloads keep their bar on a terminal: they take minutes.
    """
    if verbose:
        yield
        return
    import huggingface_hub.utils

    hub: Any = huggingface_hub.utils
    log: Any = transformers.utils.logging
    level, bars, hub_bars = (
        log.get_verbosity(),
        log.is_progress_bar_enabled(),
        not hub.are_progress_bars_disabled(),
    )
    others = [logging.getLogger(name) for name in ("accelerate", "huggingface_hub")]
    levels = [other.level for other in others]
    log.set_verbosity_error()
    log.disable_progress_bar()
    for other in others:
        other.setLevel(logging.ERROR)
    if sys.stderr is not None and sys.stderr.isatty():
        hub.enable_progress_bars()
    try:
        yield
    finally:
        log.set_verbosity(level)
        for other, before in zip(others, levels, strict=True):
            other.setLevel(before)
        if bars:
            log.enable_progress_bar()
        (hub.enable_progress_bars if hub_bars else hub.disable_progress_bars)()


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the model in what transformers says of a directory that it cannot make sense of."""
    try:
        yield
    except MoeCacheError:
        raise
    except (OSError, ValueError, ImportError) as error:
        first = " ".join(str(error).split()) or type(error).__name__
        raise StoreError(f"{path}: {first}") from error


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a checkpoint.

    Raises
    ------
    StoreError
        If it has none that transformers can read.
    ConfigError
        If it is of a kind that is not supported.
    """
    if is_gguf(Path(path)):
        with open_store(path) as store:
            return gguf.find_tokenizer(getattr(store, "metadata", {}))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise StoreError(
            f"{path}: has no tokenizer that transformers can read: {' '.join(str(error).split())}"
        ) from error
    # Without a tokenizer's files transformers makes one that knows no words.
    if set(tokenizer("0 a")["input_ids"]) <= set(tokenizer.all_special_ids):
        raise StoreError(
            f"{path}: has no tokenizer; is tokenizer.json missing? The published model has it"
        )
    return tokenizer


def encode(tokenizer: Any, prompt: str, *, chat: bool = False) -> torch.Tensor:
    """Return a prompt's tokens, int64 [1, tokens].

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    prompt : str
    chat : bool, default False
        Whether the prompt is what a user says: then it is put into the form that the model was
        trained on, with the beginning of an answer.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template, or it fails, or the prompt is no token.
    """
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    ids = tokenizer(prompt)["input_ids"]
    # Tokenizers of encoders close the text, which is to go on here.
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return _prompt_of(ids)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> torch.Tensor:
    """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens].

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    messages : sequence of mapping
        Each with a "role" and its "content".

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template, or the template refuses these messages.
    """
    check_chat(tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise ConfigError(
            f"the model's chat template failed: {' '.join(str(error).split())}; continue the "
            "text as it is, without a chat"
        ) from error
    return _prompt_of(ids)


def check_chat(tokenizer: Any) -> None:
    """Raise a ConfigError if a tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template: it is no chat model, or its "
            "chat_template.jinja is missing; continue the text as it is, without a chat"
        )


def _prompt_of(ids: list[int]) -> torch.Tensor:
    if not ids:
        raise ConfigError("the prompt is empty; the model needs at least one token to start from")
    return torch.tensor([ids], dtype=torch.int64)


def find_room(model: Any, prompt_tokens: int) -> int | None:
    """Return how many tokens fit into the context after a prompt; `None` if it has no end.

    Raises
    ------
    ConfigError
        If there is no room for one.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return None
    if context <= prompt_tokens:
        raise ConfigError(
            f"the prompt of {prompt_tokens} tokens leaves no room for new ones; the model takes "
            f"{context}"
        )
    return int(context - prompt_tokens)


def check_between_layers(model: Any, streamer: TokenTimes) -> contextlib.ExitStack:
    """Have a forward end before its next layer of experts once the streamer is stopped.

    A prompt of a model larger than memory takes long, and `put` is called at its end. Closing the
    stack takes the checks away.
    """
    stack = contextlib.ExitStack()
    for path in model.moecache.paths:
        experts = model.get_submodule(path)
        hook = experts.register_forward_pre_hook(lambda *_: streamer.check())
        stack.callback(hook.remove)
    return stack


def continue_tokens(
    model: Any,
    prompt: torch.Tensor,
    streamer: TokenTimes,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
) -> int:
    """Generate tokens, and return how many at most: fewer if the context is full.

    Blocks. The tokens go to the streamer, which may stop it.

    Parameters
    ----------
    model : PreTrainedModel
    prompt : Tensor, int64 [1, tokens]
    streamer : TokenTimes
    max_new_tokens : int
    temperature : float, optional
        0 takes the likeliest token; by default what generation_config.json says.
    top_p, top_k : float and int, optional
        Draw among the likeliest tokens that together have this probability, or so many of them;
        by default what generation_config.json says.
    seed : int

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token.
    """
    room = find_room(model, prompt.shape[1])
    if room is not None:
        max_new_tokens = min(max_new_tokens, room)
    sampling: dict[str, Any] = {}
    if top_p is not None:
        sampling["top_p"] = top_p
    if top_k is not None:
        sampling["top_k"] = top_k
    if temperature is not None:
        sampling |= {"do_sample": temperature > 0, "temperature": temperature or None}
        if not temperature:
            sampling.update(top_p=None, top_k=None)
    torch.manual_seed(seed)
    try:
        with announced(model, streamer, prompt, max_new_tokens, sampling, seed):
            # "meta": weights are elsewhere, and brought when they are used.
            if model.device.type != "meta":
                prompt = prompt.to(model.device)
            model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                **sampling,
            )
    except Stopped:
        streamer.end()
    return max_new_tokens


def has_ended(model: Any, tokens: Sequence[int]) -> bool:
    """Return whether the last token is one with which the model ends its texts."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return bool(tokens) and tokens[-1] in ends
