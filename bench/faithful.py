"""How near a quantized model's output is to what its weights say: moecache's and llama.cpp's.

    python -m bench.faithful                              # types that the gguf package writes
    pip install '.[transformers,gguf,bench-llama]'        # builds llama.cpp, ten minutes
    python -m bench.faithful --json bench/results/faithful.json     # all mixes, and llama.cpp
    python -m bench.faithful qwen3moe --mixes Q4_K_M IQ4_XS         # some of them

The values of a quantized file are exact numbers; whoever computes with them rounds activations and
sums, each in its own way. A tiny random model of each architecture is written in each mix. The
reference is transformers' model of the dequantized values, with every operation in float64.
All contestants read the same prompts, and then the reference's greedy tokens, one at a time:

    logits       largest difference of a logit; the logits are within some 5 of zero
    same experts the same, in each text only up to the first place where a layer chose other experts
    KL           mean divergence of the next token's distribution from the reference's, nats
    tokens       greedy tokens that are the reference's, up to each text's first that differs
    gap          of those first other choices, how far apart the experts' scores at most are

A choice of experts is a jump. Where the last expert chosen and the first that is not are nearly
equal, a rounding makes the other choice, and logits then differ by as much as two experts do,
however small the rounding was. So "same experts" is what the arithmetic costs, and "gap" shows how
near to each other the two were.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench import faithful_models as models
from bench.faithful_reference import NEW_TOKENS, PROMPT, Reference, Text
from bench.gguf_oracle import open_llama
from bench.runs import begin, write_figures

PROMPTS = 4
LLAMA = "llama.cpp"
# Contestant -> multiplier, and dtype of activations and of what is not quantized. Of `load`,
# "fast" in bfloat16 is the default.
OURS = {
    "fast": ("fast", "bfloat16"),
    "fast float32": ("fast", "float32"),
    "torch": ("torch", "bfloat16"),
    "torch float32": ("torch", "float32"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.faithful",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(models.ARCHITECTURES)
    parser.add_argument("architectures", nargs="*", help=f"of {names} (default: all)")
    parser.add_argument(
        "--mixes",
        nargs="+",
        choices=models.MIXES,
        metavar="MIX",
        help=f"of {', '.join(models.MIXES)} (default: all that can be written; without llama.cpp "
        f"{', '.join(models.PLAIN_TYPES)})",
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"of {PROMPT} tokens each")
    parser.add_argument(
        "--trunk",
        choices=("native", "bf16"),
        help="form of moecache's trunk, as `load` takes it (default: native with kernels, whose "
        "activations have 15 bits; bf16, values in the dtype, with torch's products)",
    )
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    arguments = begin(parser, argv, rounds=1)
    if unknown := set(arguments.architectures) - set(models.ARCHITECTURES):
        parser.error(f"no architecture {', '.join(sorted(unknown))}; there are {names}")
    with_llama = models.has_llama() and not arguments.no_llama
    mixes = arguments.mixes or (models.MIXES if with_llama else models.PLAIN_TYPES)
    if not with_llama and (missing := set(mixes) - set(models.PLAIN_TYPES)):
        parser.error(f"{', '.join(sorted(missing))} need llama.cpp: the extra bench-llama")
    import torch

    torch.set_num_threads(arguments.threads)
    # Where llama.cpp fails, it would wait for a debugger for ever.
    os.putenv("GGML_NO_BACKTRACE", "1")
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for architecture in arguments.architectures or models.ARCHITECTURES:
            files = models.write_all(architecture, mixes, Path(folder), with_llama=with_llama)
            for mix, file in files:
                found = compare(
                    file, arguments.prompts, trunk=arguments.trunk, with_llama=with_llama
                )
                figures.append({"architecture": architecture, "mix": mix, **found})
                print("\n".join(describe(figures[-1])), flush=True)
    print("\n".join(summarize(figures, arguments.prompts)))
    said = {"prompts": arguments.prompts, "trunk": arguments.trunk, "new_tokens": NEW_TOKENS}
    write_figures(arguments, versions=_versions(), **said, figures=figures)
    return 0


def compare(file: Path, num_prompts: int, *, trunk: str | None, with_llama: bool) -> dict[str, Any]:
    """Return how far each contestant is from the dequantized model in float64.

    Parameters
    ----------
    file : pathlib.Path
        A GGUF file.
    num_prompts : int
        Texts of `PROMPT` random tokens and `NEW_TOKENS` greedy ones of the reference.
    trunk : str or None
        Of moecache, as `load` takes it.
    with_llama : bool
        Whether llama.cpp is a contestant.

    Returns
    -------
    dict
        "types", the number of matrices in each type; "largest_logit" of the reference; and
        "contestants", what `distance` returns of each.
    """
    reference = Reference(file)
    texts = reference.texts(num_prompts)
    contestants = {}
    for name, (compute, dtype) in OURS.items():
        contestants[name] = distance(texts, run_ours(file, texts, compute, dtype, trunk))
    if with_llama:
        contestants[LLAMA] = distance(texts, run_llama(file, texts))
    largest = max(float(np.abs(text.logits).max()) for text in texts)
    return {"types": reference.types, "largest_logit": largest, "contestants": contestants}


def run_ours(
    file: Path, texts: list[Text], compute: str, dtype: str, trunk: str | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return moecache's logits and experts at each place of each text, as `Text` has them."""
    import torch

    from moecache.integrations.transformers import load
    from moecache.integrations.transformers.generation import quiet

    found = []
    with tempfile.TemporaryDirectory() as folder, quiet(verbose=False):
        model = load(file, "100%", compute=compute, dtype=getattr(torch, dtype), trunk=trunk)
        with model.moecache as offload, torch.inference_mode():
            for text in texts:
                cache, logits = None, []
                with offload.runtime.record_trace(Path(folder) / "trace.npz") as recording:
                    for ids in (text.tokens[:PROMPT], *text.tokens[PROMPT:-1]):
                        given = torch.tensor(ids).reshape(1, -1)
                        out = model(given, past_key_values=cache, use_cache=True)
                        cache = out.past_key_values
                        logits.append(out.logits[0].double().numpy())
                found.append((np.concatenate(logits), recording.trace.experts))
    return found


def run_llama(file: Path, texts: list[Text]) -> list[tuple[np.ndarray, None]]:
    """Return llama.cpp's logits, with a cache of float32; which experts it chose is not known."""
    found = []
    model = open_llama(file, PROMPT + NEW_TOKENS)
    for text in texts:
        model.reset()
        model.eval(text.tokens[:PROMPT])
        for token in text.tokens[PROMPT:-1]:
            model.eval([token])
        found.append((np.array(model.scores[: model.n_tokens], np.float64), None))
    model.close()
    return found


def distance(
    texts: list[Text], found: list[tuple[np.ndarray, np.ndarray]] | list[tuple[np.ndarray, None]]
) -> dict[str, Any]:
    """Return how far logits are from the reference's, over all places of all texts.

    Returns
    -------
    dict
        "logits" (largest difference), "kl" (mean, nats), "tokens" (of all texts); and where the
        experts are known, "same_experts" (largest difference before another was chosen), "gaps"
        (one for each text in which one was).
    """
    largest = same = 0.0
    divergences, gaps, kept = [], [], 0
    experts: np.ndarray | None = None
    for text, (logits, experts) in zip(texts, found, strict=True):
        differences = np.abs(logits - text.logits).max(-1)
        largest = max(largest, float(differences.max()))
        if experts is not None:
            first, gap = text.first_other_choice(experts)
            same = max(same, float(differences[:first].max(initial=0)))
            gaps += [] if gap is None else [gap]
        wanted, theirs = log_softmax(text.logits), log_softmax(logits)
        divergences.append((np.exp(wanted) * (wanted - theirs)).sum(-1))
        differ = np.flatnonzero(logits[PROMPT - 1 :].argmax(-1) != text.tokens[PROMPT:])
        kept += int(differ[0]) if len(differ) else NEW_TOKENS
    figures: dict[str, Any] = {"logits": largest, "kl": float(np.mean(divergences))}
    figures["tokens"] = kept
    return figures if experts is None else {**figures, "same_experts": same, "gaps": gaps}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return logarithms of probabilities, nats, over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def describe(figure: Mapping[str, Any]) -> Iterator[str]:
    """Return a file's figures as lines."""
    types = ", ".join(f"{number} {kind}" for kind, number in figure["types"].items())
    yield f"{figure['architecture']} {figure['mix']} ({types})"
    for name, one in figure["contestants"].items():
        line = f"  {name:14} logits {one['logits']:.1e}, KL {one['kl']:.1e}, tokens {one['tokens']}"
        if "gaps" in one:
            line += f", same experts {one['same_experts']:.1e}"
            line += f", gap {max(one['gaps']):.1e}" if one["gaps"] else ""
        yield line


def summarize(figures: list[dict[str, Any]], num_prompts: int) -> Iterator[str]:
    """Return each contestant's worst figures over all files as lines."""
    yield f"over {len(figures)} files, largest:"
    total = num_prompts * NEW_TOKENS
    for name in figures[0]["contestants"]:
        all_ = [figure["contestants"][name] for figure in figures]
        whole = sum(one["tokens"] == total for one in all_)
        line = f"  {name:14} logits {max(one['logits'] for one in all_):.1e}, "
        line += f"KL {max(one['kl'] for one in all_):.1e}, all {total} tokens in {whole} files"
        if "gaps" in all_[0]:
            gaps = [gap for one in all_ for gap in one["gaps"]]
            line += f", same experts {max(one['same_experts'] for one in all_):.1e}, "
            line += f"other experts in {len(gaps)} texts"
            line += f" whose gap is at most {max(gaps):.1e}" if gaps else ""
        yield line


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "gguf", "llama-cpp-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    raise SystemExit(main())
