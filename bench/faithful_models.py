"""Tiny GGUF models for `bench.faithful`: four architectures, in every type that can be written.

Without llama.cpp all matrices but the routers are of one type, by the `gguf` package, which writes
a few. With it (the extra bench-llama) files are the mixes that its quantizer makes and people
download. Weights are random, so that all of them are as important: that is what its importance
matrix says, without which the smallest types are not made.
"""

import ctypes
import dataclasses
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import Tensors, write_gguf

# Columns in multiples of 256, so that every type can be in every place where real models have it.
_WIDE: Mapping[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "head_dim": 64,
}
_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3moe": {**_WIDE, "decoder_sparse_step": 1},
    # One group of experts, as most have it: choices between groups have no gap.
    "deepseek2": {**_WIDE, **_LATENT, "head_dim": 32, "n_group": 1, "topk_group": 1},
    "gpt-oss": {**_WIDE, "intermediate_size": 256},
    "glm4moe": _WIDE,
}
_MEMBERS = {"deepseek2": "deepseek2 v3"}
ARCHITECTURES = tuple(_SETTINGS)

# Names of llama.cpp's mixes, by which files are called.
MIXES = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M")
MIXES += ("Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M")
MIXES += ("IQ1_S", "MXFP4_MOE")
# Those that llama.cpp makes only with an importance matrix, and their nearest relatives.
_IMPORTANT = ("IQ1", "IQ2", "IQ3")
# What the `gguf` package writes by itself.
PLAIN_TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def has_llama() -> bool:
    """Return whether llama.cpp is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def write_all(
    architecture: str, mixes: Iterable[str], folder: Path, *, with_llama: bool
) -> Iterator[tuple[str, Path]]:
    """Yield each mix's name and a file, which is gone when the next one comes.

    Parameters
    ----------
    architecture : str
        One of `ARCHITECTURES`.
    mixes : iterable of str
        Of `MIXES`; of `PLAIN_TYPES` without llama.cpp.
    folder : pathlib.Path
        Where to write.
    with_llama : bool
        Whether llama.cpp makes the files.
    """
    member = MODELS[_MEMBERS.get(architecture, architecture)]
    settings = {**member.settings, **_SETTINGS[architecture]}
    member = dataclasses.replace(member, settings=settings)
    model = member.build()
    metadata = {**member.metadata(model.config), **_vocabulary(model.config.vocab_size)}
    tensors = member.tensors(model)
    source = folder / "F32.gguf"
    if with_llama:
        write_gguf(source, metadata, tensors)
    for mix in mixes:
        file = folder / f"{mix}.gguf"
        if with_llama:
            quantize(source, mix, tensors, file)
        else:
            # Routers and biases stay as they are, as llama.cpp leaves them.
            write_gguf(file, metadata, tensors, {"ffn_gate_inp": "F32", ".bias": "F32", "": mix})
        yield mix, file
        file.unlink()


def quantize(source: Path, mix: str, tensors: Tensors, file: Path) -> None:
    """Write a file of float32 in a mix of llama.cpp, which is to be installed.

    Parameters
    ----------
    source : pathlib.Path
        In float32.
    mix : str
        One of `MIXES`.
    tensors : mapping of str to ndarray
        Those of `source`, which decide the importance matrix's shape.
    file : pathlib.Path
        To write.

    Raises
    ------
    RuntimeError
        If llama.cpp cannot make it.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix}")
    options.nthread = 1
    # The arrays live until the call is over.
    ones, entries = _importance(tensors)
    if mix.startswith(_IMPORTANT):
        options.imatrix = entries
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), options)
    del ones
    if code:
        raise RuntimeError(f"llama.cpp could not make {mix} of {source.name}: code {code}")


def _importance(tensors: Tensors) -> tuple[list[np.ndarray], Any]:
    """Return an importance of 1 for each column, as llama.cpp is given it."""
    import llama_cpp

    matrices = {name: values for name, values in tensors.items() if values.ndim > 1}
    entries = (llama_cpp.llama_model_imatrix_data * (len(matrices) + 1))()
    ones = []
    for entry, (name, values) in zip(entries, matrices.items(), strict=False):
        stacked = values.shape[0] if values.ndim > 2 else 1
        ones.append(np.ones(stacked * values.shape[-1], np.float32))
        entry.name = name.encode()
        entry.data = ones[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = ones[-1].size
    return ones, entries


def _vocabulary(size: int) -> dict[str, Any]:
    """Return keys of a tokenizer that llama.cpp loads; nothing is tokenized."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [f"t{token}" for token in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["t 1"],
    }
