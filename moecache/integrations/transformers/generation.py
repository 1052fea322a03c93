"""Text in, text out: the command line's use of transformers beside the model."""

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from moecache.decoding.files.chat import no_template, template_failed
from moecache.decoding.prefixes import PrefixCache
from moecache.decoding.room import room_behind
from moecache.decoding.safetensors.tokenizer import read_directory
from moecache.decoding.safetensors.tokenizer_files import find_tokenizer_files
from moecache.decoding.sampler import Mask, Sampler, Sampling
from moecache.decoding.streams import Stopped, TokenTimes
from moecache.errors import ConfigError, StoreError
from moecache.integrations.hub import look_up
from moecache.integrations.transformers import gguf
from moecache.integrations.transformers._damage import Damage, check_sizes
from moecache.integrations.transformers._following import announced
from moecache.integrations.transformers._tokenizer import tokenizer_of
from moecache.integrations.transformers.continuing import (
    continue_text,
    sampling_of,
)
from moecache.stores import CheckpointStore, GgufStore, is_gguf, open_store
from moecache.stores._checkpoint import read_config

_TOKENIZER = "tokenizer_config.json"


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


def load_tokenizer(path: str | CheckpointStore) -> Any:
    """Return the tokenizer of a checkpoint, which may be open already.

    Raises
    ------
    StoreError
        If it has none that transformers can read; FormatError if it is damaged.
    ConfigError
        If it is of a kind that is not supported.
    """
    if isinstance(path, CheckpointStore):
        if isinstance(path, GgufStore):
            return gguf.find_tokenizer(path.metadata)
        path = str(path.path)
    elif is_gguf(Path(path)):
        with open_store(path) as store:
            return load_tokenizer(store)
    where = look_up(path)
    if os.path.isdir(path):
        check_sizes(path, read_config(Path(path) / "config.json"))
        if find_tokenizer_files(Path(path)).has_ranks():
            # transformers cuts texts as Llama 3 does, whoever published the file.
            return tokenizer_of(read_directory(Path(path)))
    with Damage(path, "read the tokenizer", "config.json", "tokenizer.json", _TOKENIZER):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **where)
        known = set(tokenizer("0 a")["input_ids"]) - set(tokenizer.all_special_ids)
    # Without a tokenizer's files transformers makes one that knows no words.
    if not known:
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


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Return a conversation's tokens with the beginning of an answer, int64 [1, tokens].

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    messages : sequence of mapping
        Each with a "role" and its "content".
    variables : mapping, optional
        What the template may look at beside: `tools`, `enable_thinking` and the like.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template, or the template refuses these messages.
    """
    found = _apply_template(tokenizer, messages, variables, tokenize=True)
    return _prompt_of(found["input_ids"])


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of which `encode_chat` makes tokens.

    Raises
    ------
    ConfigError
        As `encode_chat`.
    """
    return str(_apply_template(tokenizer, messages, variables, tokenize=False))


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    tokenize: bool,
) -> Any:
    check_chat(tokenizer)
    variables = variables or {}
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in taken and name != "tools":
            raise ConfigError(
                f"{name!r} is not for a chat template to look at; leave it out of its variables"
            )
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=True,
            **variables,
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise template_failed(error) from error


def check_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]] = ()) -> None:
    """Raise a ConfigError if a tokenizer has no chat template, or it fails with such messages."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise no_template()
    if messages:
        _apply_template(tokenizer, messages, tokenize=True)


def _prompt_of(ids: list[int]) -> torch.Tensor:
    if not ids:
        raise ConfigError("the prompt is empty; the model needs at least one token to start from")
    return torch.tensor([ids], dtype=torch.int64)


def own_context(model: Any) -> int | None:
    """Return the tokens that a model takes; `None` if there is no end."""
    own: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return own


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


def check_text(
    model: Any, prompt: torch.Tensor, max_new_tokens: int, seed: int = 0, **sampling: Any
) -> tuple[int, Sampling]:
    """Return how many tokens fit behind a prompt, up to a number, and how they are drawn.

    Parameters
    ----------
    model, prompt, max_new_tokens, seed, **sampling
        As those of `continue_tokens`.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token, or is of another model's tokens, or a number is
        out of its range.
    """
    room = room_behind(prompt.shape[1], own_context(model))
    vocabulary = model.config.get_text_config().vocab_size
    if prompt.max() >= vocabulary:
        raise ConfigError(
            f"the prompt has token {int(prompt.max())}, but the model knows {vocabulary} tokens; "
            "its tokenizer is of another model"
        )
    if room is not None:
        max_new_tokens = min(max_new_tokens, room)
    return max_new_tokens, sampling_of(model, seed, **sampling)


def blamed(model: Any) -> Damage:
    """Return what says which file is at fault where transformers fails to generate."""
    # A GGUF's model has no name of its own, and a resident one no store.
    offload = getattr(model, "moecache", None)
    store = None if offload is None else offload.runtime.store
    name = getattr(store, "path", model.name_or_path)
    return Damage(name, "generate with this model and its configuration")


def continue_tokens(
    model: Any,
    prompt: torch.Tensor,
    streamer: TokenTimes,
    *,
    max_new_tokens: int,
    seed: int = 0,
    mask: Mask | None = None,
    prefixes: PrefixCache | None = None,
    make_sampler: Callable[[Sampling, Sequence[int]], Sampler] = Sampler,
    **sampling: Any,
) -> int:
    """Generate tokens, and return how many at most: fewer if the context is full.

    Blocks. The tokens go to the streamer, which may stop it.

    Parameters
    ----------
    model : PreTrainedModel
    prompt : Tensor, int64 [1, tokens]
    streamer : TokenTimes
    max_new_tokens : int
    seed : int
    mask : Mask, optional
        Which tokens may come.
    prefixes : PrefixCache, optional
        Pages of earlier prompts, as `open_prefixes` gives it.
    make_sampler : callable (Sampling, sequence of int), optional
        Gives what draws tokens behind a prompt.
    **sampling
        Fields of `Sampling`; by default what generation_config.json says.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a token, or a number is out of its range.
    """
    max_new_tokens, drawn = check_text(model, prompt, max_new_tokens, seed, **sampling)
    tokens = prompt[0].tolist()
    # What a model draws by itself.
    torch.manual_seed(seed)
    try:
        with (
            announced(model, streamer, tokens, max_new_tokens, drawn, is_masked=mask is not None),
            blamed(model),
        ):
            continue_text(
                model,
                tokens,
                make_sampler(drawn, tokens),
                streamer,
                max_new_tokens=max_new_tokens,
                mask=mask,
                prefixes=prefixes,
            )
    except Stopped:
        streamer.end()
    return max_new_tokens
