"""Models of GGUF files beside llama.cpp: its converter writes them, and it runs them, too.

    pip install '.[transformers,gguf,bench-llama]'   # builds llama.cpp, ten minutes
    python -m bench.gguf_oracle LLAMA_CPP --json bench/results/gguf_oracle.json

LLAMA_CPP is the directory of convert_hf_to_gguf.py (vendor/llama.cpp in the sources of
llama-cpp-python: pip download --no-binary :all:). A tiny random model of each architecture is
saved by transformers, converted, float32, and built again of the file alone. Its logits must be the
original's bit for bit, and llama.cpp's within 1e-3 of them, with the same 24 greedy tokens.
A small vocabulary for each way of cutting texts is written, too, and ids of texts are compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, NEW_TOKENS, BOUND = 20, 24, 1e-3


def main(argv: list[str] | None = None) -> int:
    """Compare all architectures, or those that are named; return how many differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gguf_oracle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--tokenizers", action="store_true", help="compare these alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("CHECKPOINT", "GGUF"))
    arguments = parser.parse_args(argv)
    if arguments.convert:
        convert(arguments.llama_cpp, *arguments.convert)
        return 0
    from tests.helpers.gguf_members import MODELS

    known = [name for name, model in MODELS.items() if model.in_llama_cpp]
    # Where llama.cpp fails, it would wait for a debugger for ever.
    os.putenv("GGML_NO_BACKTRACE", "1")
    figures: list[dict[str, Any]] = []
    for name in () if arguments.tokenizers else arguments.architectures or known:
        try:
            figure = compare(arguments.llama_cpp, name)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            figure = {"architecture": name, "error": f"{type(error).__name__}: {error}"}
        figures.append(figure)
        print(json.dumps(figure), flush=True)
    tokenizers = [] if arguments.architectures else compare_tokenizers()
    for one in tokenizers:
        print(json.dumps(one), flush=True)
    if arguments.json is not None:
        versions = {name: _version(name) for name in ("transformers", "gguf", "llama-cpp-python")}
        found = {"versions": versions, "bound": BOUND, "architectures": figures}
        found["tokenizers"] = tokenizers
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return sum(not figure.get("agrees") for figure in figures)


def compare(llama_cpp: Path, architecture: str) -> dict[str, Any]:
    """Return how the converter's file, built anew and run by llama.cpp, differs from the model."""
    from tests.helpers.gguf_members import MODELS
    from tests.helpers.gguf_models import build_from, read_gguf

    original = MODELS[architecture].build()
    vocabulary = original.config.vocab_size
    prompt = np.random.default_rng(0).integers(3, vocabulary, PROMPT).tolist()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, file = Path(directory) / "hf", Path(directory) / "model.gguf"
        save(original, MODELS[architecture], checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        config |= MODELS[architecture].published
        (checkpoint / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "bench.gguf_oracle", llama_cpp, "--convert"]
        ran = subprocess.run(
            [*command, checkpoint, file], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"the converter failed: {ran.stderr.strip()[-300:]}")
        found = build_from(*read_gguf(file))
        rewritten = MODELS[architecture].rewrite(file)
        theirs, their_tokens = run_llama(file, prompt)
    wanted, tokens = run_transformers(original, prompt)
    ours, _ = run_transformers(found, prompt)
    exact = bool(np.array_equal(ours, wanted))
    tabled = look_gelu_up(original)
    change = MODELS[architecture].as_llama_cpp
    changed = change(original) if change else ""
    if tabled or changed:
        wanted, tokens = run_transformers(original, prompt)
    difference = float(np.abs(theirs - wanted).max())
    same = next((i for i in range(NEW_TOKENS) if tokens[i] != their_tokens[i]), NEW_TOKENS)
    return {
        "architecture": architecture,
        "agrees": exact and difference <= BOUND and same == NEW_TOKENS,
        "equal_bit_for_bit": exact,
        "llama_cpp_largest_difference": difference,
        "largest_logit": float(np.abs(wanted).max()),
        "same_greedy_tokens": same,
        **({"gelu": "in transformers of 16 bits, too, as in ggml's table"} if tabled else {}),
        **({"changed": changed} if changed else {}),
        **({"rewritten": rewritten} if rewritten else {}),
    }


def run_transformers(model: Any, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return the logits of a prompt and the greedy tokens after it."""
    import torch

    tokens = list(prompt)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return logits, tokens[len(prompt) :]


def save(model: Any, described: Any, checkpoint: Path) -> None:
    """Write a model with the names that published checkpoints have."""
    from safetensors.numpy import load_file, save_file
    from transformers import conversion_mapping as known

    found = known.get_checkpoint_conversion_mapping(described.published_names)
    if found is not None:
        texts = [one for one in found if not one.source_patterns[0].startswith("^")]
        known.register_checkpoint_conversion_mapping(model.config.model_type, texts, overwrite=True)
    model.save_pretrained(checkpoint)
    file = checkpoint / "model.safetensors"
    save_file(described.publish(load_file(file)), file, metadata={"format": "pt"})


def look_gelu_up(model: Any) -> bool:
    """Have a model compute gelu as ggml does, which looks it up in a table of 16 bits."""
    found = [module for module in model.modules() if type(module).__name__ == "GELUTanh"]
    for module in found:
        usual = module.forward
        module.forward = lambda x, usual=usual: usual(x.half().float()).half().float()
    return bool(found)


def run_llama(file: Path, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return the same of llama.cpp, with a cache of float32."""
    model = open_llama(file, len(prompt) + NEW_TOKENS)
    model.eval(prompt)
    logits = np.array(model.scores[: len(prompt)])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        model.eval(tokens[-1:])
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
    model.close()
    return logits, tokens


def open_llama(file: Path, length: int) -> Any:
    """Return llama.cpp's model for so many tokens at most, with all logits kept."""
    import llama_cpp

    return llama_cpp.Llama(
        str(file),
        n_ctx=length,
        n_batch=length,
        n_threads=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )


def compare_tokenizers() -> list[dict[str, Any]]:
    """Return which of the texts have other ids in llama.cpp, for each kind of vocabulary."""
    from moecache.integrations.transformers.gguf import find_tokenizer
    from tests.helpers.gguf_tokenizers import TEXTS, vocabularies

    found = []
    for name, make in vocabularies().items():
        metadata = make()
        ours = find_tokenizer(metadata)
        theirs = llama_ids(metadata, TEXTS)
        pairs = zip(TEXTS, theirs, strict=True)
        differ = [text for text, ids in pairs if ours(text)["input_ids"] != ids]
        found.append({"tokenizer": name, "texts": len(TEXTS), "differ": differ})
    return found


def llama_ids(metadata: dict[str, Any], texts: Sequence[str]) -> list[list[int]]:
    """Return the ids that llama.cpp has for texts, by a file of the vocabulary alone."""
    import llama_cpp

    from tests.helpers.gguf_models import write_gguf

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "vocabulary.gguf"
        write_gguf(file, {"general.architecture": "qwen2moe", **metadata}, {})
        model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        found = [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
        model.close()
    return found


def convert(llama_cpp: Path, checkpoint: Path, file: Path) -> None:
    """Write a checkpoint as GGUF in float32, by llama.cpp's own converter."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import conversion
    import convert_hf_to_gguf as converter

    config = json.loads((checkpoint / "config.json").read_text())
    vocabulary = config["vocab_size"]

    # One architecture counts the tokens of this file, whatever the vocabulary is.
    tokens = {"model": {"vocab": {f"t{token}": token for token in range(vocabulary)}}}
    (checkpoint / "tokenizer.json").write_text(json.dumps({**tokens, "added_tokens": []}))

    def write_vocabulary(self: Any) -> None:
        # The tokens are of no importance: nothing is tokenized.
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("qwen2")
        self.gguf_writer.add_token_list([f"t{token}" for token in range(vocabulary)])
        self.gguf_writer.add_token_types([1] * vocabulary)
        self.gguf_writer.add_token_merges(["t 1"])

    kind = conversion.get_model_class(config["architectures"][0])
    # Some have another class do it.
    for own in (kind, *(inner for inner in vars(kind).values() if isinstance(inner, type))):
        own.set_vocab = write_vocabulary  # type: ignore[attr-defined]
    sys.argv = ["convert", str(checkpoint), "--outtype", "f32", "--outfile", str(file)]
    sys.argv += ["--no-mtp"] if getattr(kind, "supports_mtp_export", False) else []
    converter.main()


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    raise SystemExit(main())
