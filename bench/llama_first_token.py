"""llama.cpp on a mapped file, as a process that is timed from outside: a prompt, and some tokens.

    python -m bench.llama_first_token JSON

It imports llama-cpp-python, and NumPy, which that imports itself.
"""

import json
import sys
from typing import Any

# Tokens to keep room for: what moecache leaves beside the slots by default.
CONTEXT = 4096


def main(text: str) -> int:
    """Continue a prompt greedily, each token written as it comes; return the exit code."""
    task = json.loads(text)
    import llama_cpp
    import numpy as np

    params = llama_cpp.llama_model_default_params()
    # Repacked weights would be copies beside the mapped file.
    params.use_extra_bufts = False
    library: Any = llama_cpp.llama_cpp
    library.llama_model_default_params = lambda: params
    model = llama_cpp.Llama(
        task["path"],
        n_ctx=CONTEXT,
        n_batch=512,
        n_threads=task["threads"],
        n_threads_batch=task["threads"],
        verbose=False,
    )
    prompt: list[int] = task["tokens"]
    tokens = list(prompt)
    model.eval(prompt)
    while True:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        token = int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
        if token == model.token_eos():
            break
        sys.stdout.buffer.write(model.detokenize([token], prev_tokens=tokens))
        sys.stdout.buffer.flush()
        tokens.append(token)
        if len(tokens) - len(prompt) == task["new_tokens"]:
            break
        model.eval([token])
    # As `moecache generate` says it.
    print(f"{len(tokens) - len(prompt)} tokens; prompt of {len(prompt)}", file=sys.stderr)
    model.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
