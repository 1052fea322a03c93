"""The part that the configurations of all architectures have in common."""

from typing import Any

import numpy as np

from moecache.decoding.files.known import CORRECTION
from moecache.decoding.gguf._architecture import Source
from moecache.decoding.gguf._metadata import Metadata
from moecache.errors import ConfigError

_TOKENS = ("bos", "eos", "pad")
# Tokens after which llama.cpp stops, beside the end of the sequence.
_ENDS = ("eos", "eot", "eom")


def common_settings(said: Metadata, *, keys: int | None = None) -> dict[str, Any]:
    """Return what every architecture says in the same way.

    Parameters
    ----------
    said : Metadata
    keys : int, optional
        Heads of keys and values, if they are not those of all layers.
    """
    vocabulary, hidden = said.matrix("token_embd.weight")
    if said.size("embedding_length") != hidden:
        raise ConfigError(
            f"{said.architecture}.embedding_length is {said.size('embedding_length')}, but rows "
            f"of token_embd.weight have {hidden} values; download the file again"
        )
    heads = said.size("attention.head_count", least=1)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": said.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads(said) if keys is None else keys,
        "max_position_embeddings": int(said.real("context_length")),
        "rms_norm_eps": _epsilon(said),
        "tie_word_embeddings": "output.weight" not in said.tensors,
        **tokens(said, vocabulary),
    }


def _epsilon(said: Metadata) -> float:
    """Return what norms add; some converters call it otherwise."""
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    return said.real(next((name for name in names if name in said), names[0]))


def key_heads(said: Metadata) -> int:
    """Return the heads of keys and values, which all layers with attention have."""
    heads = said.size("attention.head_count", least=1)
    found = {count for count in said.sizes("attention.head_count_kv", heads) if count}
    if len(found) != 1:
        raise said.unsupported("attention.head_count_kv", said.get("attention.head_count_kv"))
    return found.pop()


def plain_settings(said: Metadata, *, is_partial: bool = False) -> dict[str, Any]:
    """Return the same with what heads of one width, and a choice of experts, add to it.

    Parameters
    ----------
    said : Metadata
    is_partial : bool, default False
        Whether the architecture may rotate the first values of a head only.
    """
    width = head_dim(said)
    return {
        **common_settings(said),
        "head_dim": width,
        "rope_parameters": rope(said, width, is_partial=is_partial),
        "num_experts_per_tok": said.size("expert_used_count", least=1),
    }


def tokens(said: Metadata, vocabulary: int) -> dict[str, Any]:
    """Return the ids of special tokens: `None` for those that the vocabulary does not have."""

    def find(name: str) -> int | None:
        token = said.values.get(f"tokenizer.ggml.{name}_token_id")
        if name == "pad" and token is None:
            token = said.values.get("tokenizer.ggml.padding_token_id")
        # A flag is a number, too.
        return token if type(token) is int and 0 <= token < vocabulary else None

    found: dict[str, Any] = {f"{name}_token_id": find(name) for name in _TOKENS}
    ends = list(dict.fromkeys(end for end in map(find, _ENDS) if end is not None))
    if len(ends) > 1:
        found["eos_token_id"] = ends
    return found


def head_dim(said: Metadata) -> int:
    """Return the width of a head, the same for keys and values.

    Raises
    ------
    ConfigError
        If their widths differ.
    """
    usual = said.size("embedding_length") // said.size("attention.head_count", least=1)
    keys = said.size("attention.key_length", usual, least=1)
    if not keys:
        raise said.unsupported("attention.head_count", said.size("attention.head_count"))
    values = said.size("attention.value_length", keys)
    if keys != values:
        raise said.unsupported("attention.value_length", values)
    return int(keys)


def rope(said: Metadata, width: int, *, is_partial: bool = False) -> dict[str, Any]:
    """Return the `rope_parameters`, for heads of a width.

    Parameters
    ----------
    said : Metadata
    width : int
        Values per head that may be rotated.
    is_partial : bool, default False
        Whether the architecture may rotate the first values of a head only.
    """
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": said.real("rope.freq_base", 10_000.0, least=1.0),
    }
    rotated = said.size("rope.dimension_count", width)
    if is_partial:
        if rotated > width or rotated % 2:
            raise said.unsupported("rope.dimension_count", rotated)
        found["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise said.unsupported("rope.dimension_count", rotated)
    factor = said.number("rope.scaling.factor", said.number("rope.scale_linear", 0.0))
    kind = said.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in {0, 1}):
        return found
    if kind not in ("linear", "yarn") or factor < 1:
        raise said.unsupported("rope.scaling.type", kind)
    if kind == "linear":
        return {**found, "rope_type": "linear", "factor": float(factor)}
    return {**found, "rope_type": "yarn", "factor": float(factor), **_yarn(said)}


def _yarn(said: Metadata) -> dict[str, Any]:
    if said.number("rope.scaling.yarn_ext_factor", 1) != 1:
        raise said.unsupported(
            "rope.scaling.yarn_ext_factor", said.number("rope.scaling.yarn_ext_factor")
        )
    length = said.real("rope.scaling.original_context_length", said.real("context_length"))
    found = {
        "original_max_position_embeddings": int(length),
        "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    # Others are no model's, and their logarithms no numbers.
    if not 1 <= length < 2.0**40:
        raise said.unsupported("rope.scaling.original_context_length", length)
    for key in ("beta_fast", "beta_slow"):
        if not 2.0**-20 < found[key] < 2.0**20:
            raise said.unsupported(f"rope.scaling.yarn_{key}", found[key])
    # Named as transformers' own value, which the converter copies.
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if key in said:
            found["attention_factor"] = said.real(key)
    return found


def has_bias(said: Metadata, *names: str) -> bool:
    """Return whether a linear layer of the first block that has one has a bias."""
    return any(
        f"blk.{block}.{name}.bias" in said.tensors
        for block in range(said.num_blocks)
        for name in (*names, "attn_qkv")
    )


def expert_width(said: Metadata) -> int:
    """Return the width of an expert, as its tensors have it."""
    for block in range(said.num_blocks):
        down = said.tensors.get(f"blk.{block}.ffn_down_exps.weight")
        if down is not None and len(down) == 3:
            return down[2]
    raise ConfigError(
        f"the GGUF file of architecture {said.architecture!r} has no tensor ffn_down_exps: it is "
        "of a model without experts, or was converted before llama.cpp stacked them; convert it "
        "again"
    )


def group_counts(said: Metadata) -> tuple[int, int]:
    """Return the groups of experts, and of how many a token may use experts."""
    groups = max(said.size("expert_group_count", 1), 1)
    used = max(said.size("expert_group_used_count", 1), 1)
    if said.size("expert_count", least=1) % groups:
        raise said.unsupported("expert_group_count", groups)
    if used > groups:
        raise said.unsupported("expert_group_used_count", used)
    return groups, used


def correction(leaf: str, layer: int, said: Metadata) -> Source | None:
    """Return where the scores' correction is: nowhere, and so zero, in a file that has none."""
    if not leaf.endswith(("e_score_correction_bias", "mlp.expert_bias")):
        return None
    for name in (f"blk.{layer}.{CORRECTION}", f"blk.{layer}.exp_probs_b"):
        if name in said.tensors:
            return Source((name,))
    count = said.size("expert_count", least=1)
    shape = (1, count) if "moe_statics" in leaf else (count,)
    return Source((), undo=lambda _: np.zeros(shape, np.float32))
