"""Texts of a number of tokens, for commands that take texts alone.

    python -m bench.prompt_text MODEL TOKENS SEED

Prints the text and its tokens as JSON, which a benchmark reads that would not import torch itself.
"""

import json
import os
import subprocess
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.timed_process import bytecode_variables

ROOT = Path(__file__).parents[1]
WORDS = ("a", "model", "reads", "the", "next", "expert", "from", "disk", "into", "its", "slot")


class PromptText(NamedTuple):
    """A text, and what the model's tokenizer makes of it."""

    text: str
    tokens: list[int]


def prompt_text(model: Path, num_tokens: int, seed: int) -> PromptText:
    """Return a text of so many tokens, or a few less; a process of its own finds it."""
    command = [sys.executable, "-m", "bench.prompt_text", str(model), str(num_tokens), str(seed)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | bytecode_variables(),  # noqa: TID251 - passed on
    )
    if done.returncode:
        raise SystemExit(f"{model}: no prompt can be made:\n{done.stderr[-3000:]}")
    return PromptText(**json.loads(done.stdout.splitlines()[-1]))


def main(model: str, num_tokens: str, seed: str) -> int:
    """Find a text and print it; return the exit code."""
    from moecache.integrations.transformers import generation
    from moecache.stores import open_store

    with open_store(model) as store:
        tokenizer: Any = generation.load_tokenizer(store)

    def encoded(text: str) -> list[int]:
        found: list[int] = generation.encode(tokenizer, text, chat=False)[0].tolist()
        return found

    # At least as many words as tokens: no tokenizer has one token for two of them.
    wanted = int(num_tokens)
    words = np.random.default_rng(int(seed)).choice(WORDS, wanted).tolist()
    num_words = bisect_right(
        range(1, wanted + 1), wanted, key=lambda num: len(encoded(" ".join(words[:num])))
    )
    text = " ".join(words[: max(1, num_words)])
    for _ in range(wanted):
        longer = f"{text} a" if len(encoded(f"{text} a")) <= wanted else f"{text}z"
        if len(encoded(longer)) > wanted:
            break
        text = longer
    print(json.dumps({"text": text, "tokens": encoded(text)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
