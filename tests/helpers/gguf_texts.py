"""GGUF files whose text is computed without torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.gguf_members import MODELS
from tests.helpers.gguf_models import Tensors, write_gguf
from tests.helpers.gguf_tokenizers import byte_level

QUANTIZED = {"_exps": "Q4_0", "attn_": "Q8_0", "output.": "Q8_0", "token_embd": "Q8_0"}


def parts_of(name: str, **settings: Any) -> tuple[Any, dict[str, Any], Tensors]:
    """Return a small model of transformers, float32, and what its file has."""
    known = MODELS[name]
    known = replace(known, settings={**known.settings, **settings})
    model = known.build()
    return model, known.metadata(model.config), known.tensors(model)


def write_quantized(path: Path, name: str, num_positions: int = 512, **settings: Any) -> Path:
    """Write a small quantized file of a model whose texts have so many positions at most."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    sizes["max_position_embeddings"] = num_positions
    _, metadata, tensors = parts_of(name, **sizes, **settings)
    write_gguf(path, metadata, tensors, QUANTIZED)
    return path


TEMPLATE = "{% for m in messages %}{{ m.content }}, {% endfor %}world"


def write_text_file(path: Path, template: str = TEMPLATE) -> Path:
    """Write a quantized file with a tokenizer, whose template puts all messages into one line."""
    said = byte_level("qwen2", num_tokens=300)
    said["tokenizer.chat_template"] = template
    num = len(said["tokenizer.ggml.tokens"])
    settings = {"hidden_size": 64, "moe_intermediate_size": 32, "max_position_embeddings": 512}
    _, metadata, tensors = parts_of("qwen3moe", vocab_size=num, **settings)
    write_gguf(path, {**metadata, **said}, tensors, QUANTIZED)
    return path
