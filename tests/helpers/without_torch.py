"""Commands in a child that tells whether they imported torch, and texts to compare with theirs."""

from typing import Any

# Its last line of errors is "False False" if neither torch nor transformers was imported.
RUN = """
import sys
from moecache.cli import main
code = main(sys.argv[1:])
sys.stdout.flush()
print("torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def greedy_text(model: Any, tokenizer: Any, prompt: str, num: int) -> str:
    """Return the likeliest tokens behind a prompt, as text."""
    cache, out = model.new_cache(), list[int]()
    logits = model.read(tokenizer.encode(prompt), cache)
    for _ in range(num):
        out.append(int(logits.argmax()))
        logits = model.read(out[-1:], cache)
    text: str = tokenizer.decode(out, skip_special_tokens=True)
    return text
