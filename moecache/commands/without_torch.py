"""Text without torch: `moecache generate` of a GGUF file that programs alone compute.

Torch and transformers take seconds to import, and the model half of one to build, with the disk
idle; what a GGUF file says is enough for the families that have recipes of files.
"""

import argparse
import functools
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from moecache.commands.ranks import num_ranks
from moecache.decoding.gguf.chat import has_sandbox
from moecache.decoding.gguf.model import TextModel, open_text_model
from moecache.decoding.gguf.recipes import FileModel, NoTextModelError
from moecache.decoding.gguf.trunk import Trunk
from moecache.decoding.sampler import Sampler, Sampling
from moecache.decoding.streams import TokenTimes
from moecache.errors import ConfigError, MissingDependencyError
from moecache.kernels import default_compute
from moecache.stores import CheckpointStore, GgufStore
from moecache.telemetry.loading import Loading


def why_torch(arguments: argparse.Namespace, store: str | CheckpointStore) -> str:
    """Return why a command needs torch; "" if it does not.

    Raises
    ------
    MissingDependencyError
        If a small package is missing, and torch is, too.
    """
    if not isinstance(store, GgufStore):
        return "it is no GGUF file"
    options = {
        "--device": arguments.device != "cpu",
        "--dtype": arguments.dtype is not None,
        "--compute": arguments.compute == "torch",
        "--grammar": arguments.grammar is not None or arguments.json_schema is not None,
        "--prefix-cache": arguments.prefix_cache is not None,
    }
    for option, is_given in options.items():
        if is_given:
            return f"{option} is computed by torch's way"
    if num_ranks() > 1:
        return "experts are spread over ranks"
    if default_compute(store.layout) == "torch":
        return "kernels do not multiply what it has"
    try:
        FileModel(store)
    except NoTextModelError as error:
        return str(error)
    missing = [] if importlib.util.find_spec("tokenizers") else ["tokenizers"]
    if arguments.chat and not has_sandbox():
        missing.append("jinja2 of 3.1.6 or later")
    if not missing:
        return ""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            f"text of this file needs {' and '.join(missing)}; install them with: "
            "pip install 'moecache[gguf]'"
        )
    return f"{missing[0]} is not installed"


@contextmanager
def opened_model(
    arguments: argparse.Namespace, store: GgufStore, prompt: str, loading: Loading
) -> Iterator[tuple[TextModel, Any, np.ndarray]]:
    """Yield a model, its tokenizer, and a prompt's tokens, int64 [1, tokens]; close it at the end.

    The tokenizer is made while the experts are opened and the trunk is read.
    """
    # Needs tokenizers, which are no part of a base install.
    from moecache.decoding.gguf.tokenizer import read_tokenizer

    loading.enter("opening the experts")
    with ThreadPoolExecutor(1, "moecache-tokenizer") as pool:
        found = pool.submit(read_tokenizer, store.metadata)

        def on_trunk(said: FileModel, trunk: Trunk) -> None:
            # Before the trunk is waited for: the prompt may be wrong.
            loading.enter("reading the trunk", trunk.progress)
            tokens.append(_tokens_of(found.result(), prompt, said, is_chat=arguments.chat))

        tokens: list[np.ndarray] = []
        model = open_text_model(
            store,
            arguments.memory,
            policy=arguments.policy,
            scope=arguments.scope,
            prefetch=arguments.prefetch,
            read=arguments.read,
            profile=arguments.profile,
            on_trunk=on_trunk,
            progress=functools.partial(loading.note, "reading experts ahead"),
        )
    with model:
        yield model, found.result(), tokens[0]


def continue_tokens(
    model: TextModel,
    prompt: np.ndarray,
    stream: TokenTimes,
    *,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
) -> None:
    """Generate tokens until the model ends its text, `max_new_tokens` are there, or no room is.

    Parameters
    ----------
    model : TextModel
    prompt : ndarray of int64, shape [1, tokens]
    stream : TokenTimes
        Gets the prompt, each token, and the end.
    max_new_tokens : int
    temperature : float, optional
        By default the likeliest token is taken, as GGUF files say nothing of it.
    seed : int
    """
    tokens: list[int] = prompt[0].tolist()
    sampler = Sampler(_sampling(temperature, seed), tokens)
    cache = model.new_cache()
    stream.put(prompt)
    logits = model.read(tokens, cache, stream.read)
    num_left = min(max_new_tokens, model.context - len(tokens))
    while True:
        token = sampler.draw(logits)
        num_left -= 1
        stream.put(np.array([[token]]))
        if token in model.ends or num_left < 1:
            break
        logits = model.read([token], cache)
    stream.end()


def _sampling(temperature: float | None, seed: int) -> Sampling:
    # As transformers has it for a model without a generation_config.json.
    return Sampling(temperature=temperature or 0.0, top_k=50, seed=seed)


def _tokens_of(tokenizer: Any, prompt: str, said: FileModel, *, is_chat: bool) -> np.ndarray:
    """Return a prompt's tokens, int64 [1, tokens]; raise ConfigError if a model cannot go on."""
    if is_chat:
        tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    else:
        tokens = tokenizer.encode(prompt)
    if not tokens:
        raise ConfigError("the prompt is empty; the model needs at least one token to start from")
    most: int = said.settings["vocab_size"]
    if max(tokens) >= most:
        raise ConfigError(
            f"the prompt has token {max(tokens)}, but the model knows {most} tokens; "
            "its tokenizer is of another model"
        )
    if len(tokens) >= said.context:
        raise ConfigError(
            f"the prompt of {len(tokens)} tokens leaves no room for new ones; the model takes "
            f"{said.context}"
        )
    return np.array([tokens], np.int64)
