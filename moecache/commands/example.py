"""The example model and its NumPy host loop, for the commands that generate text."""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from moecache.commands.arguments import PLAIN_MODES, add_option
from moecache.errors import ConfigError
from moecache.files import find_examples


@dataclass(frozen=True)
class Generation:
    """The text of one run, and its speed."""

    tokens: list[int]
    logits: list[np.ndarray]
    prefill_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else 0.0

    def equals(self, other: "Generation") -> bool:
        """Return whether tokens and logits agree bit by bit."""
        return self.tokens == other.tokens and all(
            one.tobytes() == two.tobytes()
            for one, two in zip(self.logits, other.logits, strict=True)
        )


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model runs, and with how many experts in memory."""
    parser.add_argument(
        "--model", metavar="DIR", help="another OLMoE checkpoint over bytes, in safetensors"
    )
    add_option(parser, "memory", default="25%")
    add_option(parser, "policy")
    add_option(parser, "scope")
    # The demo's loop gives no hints.
    modes = {"auto": "as echo, while tokens are faster with it", **PLAIN_MODES}
    add_option(parser, "prefetch", modes=modes)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the options that say how text is drawn."""
    parser.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"tokens to generate (default: {max_new_tokens})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token (default: 0.7)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn (default: 0)")


def check_sampling(arguments: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Raise a ConfigError that names the option, if one cannot be used."""
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    if arguments.temperature != 0 and not 0.01 <= arguments.temperature <= 100:
        raise ConfigError(
            f"--temperature must be 0 or between 0.01 and 100, got {arguments.temperature}"
        )
    if arguments.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {arguments.seed}")
    if not all(prompts):
        raise ConfigError("--prompt is empty; the model needs at least one byte to start from")


def find_example(model: str | None) -> tuple[ModuleType, Path]:
    """Return the NumPy host loop and the model directory, by default the example's."""
    root = find_examples()
    spec = importlib.util.spec_from_file_location("numpy_loop", root / "numpy_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, Path(model) if model else root / "tiny_moe"


def generate(
    loop: ModuleType,
    model: Any,
    prompt: str,
    arguments: argparse.Namespace,
    show: Callable[[str], None],
) -> Generation:
    """Continue a prompt as the sampling options say, showing text as it comes.

    Raises
    ------
    ConfigError
        If the prompt leaves no room for a new token.
    """
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    times: list[float] = [time.perf_counter()]

    def drawn() -> Iterator[int]:
        for token, scores in loop.generate(
            model,
            os.fsencode(prompt),
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.seed,
        ):
            times.append(time.perf_counter())
            tokens.append(token)
            logits.append(scores)
            yield token

    for text in loop.decode(drawn()):
        show(text)
    if not tokens:
        raise ConfigError(
            f"the prompt of {len(os.fsencode(prompt))} bytes leaves no room for new "
            f"tokens; the model takes {model.max_tokens}"
        )
    return Generation(tokens, logits, times[1] - times[0], times[-1] - times[1])


def write_text(text: str) -> None:
    """Write to standard output at once, also into a pipe."""
    # Characters that the terminal's encoding lacks become escapes, never an error.
    if sys.stdout is None:  # closed by the parent process
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
