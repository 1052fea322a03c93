"""Memory beside the slots: trunk, KV cache, staging; and whether all of it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moecache.errors import CapacityError
from moecache.sizing.host_memory import free_host_bytes, tightest_limit
from moecache.sizing.planning import RESERVE_BYTES
from moecache.units import format_bytes

DEFAULT_CONTEXT_TOKENS = 4096
# Tokens whose keys and values have memory from the first moment on.
FIRST_TOKENS = 512
# Kinds of layers, as transformers names them, that hold no keys and values; those of them that hold
# states instead; and those that have both.
_WITHOUT_KEYS = {"linear_attention", "conv", "moe", "mlp", "dummy"}
_WITH_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_MOST_LAYERS = 10_000  # more than any model has
# Nemotron's letters for them.
_PATTERN = {"M": "linear_attention", "E": "moe", "-": "mlp"}
# Release of transformers, and what is held of a position beside its latent.
_FIRST_WITH_LATENTS = (5, 15)
_BESIDE_LATENTS = ("qk_rope_head_dim", "index_head_dim")
# Places of a text's states: what is read, what is written, and what is saved for its pages.
STATE_PLACES = 3
# A sixteenth of a host's free memory stays spare, but at least 32 MiB, if these are no more than a
# quarter of it.
_SPARE_PART = 16
_LEAST_SPARE_BYTES = 32 * 2**20
_LEAST_SPARE_PART = 4


@dataclass(frozen=True)
class Headroom:
    """Bytes that a plan leaves for what is not a slot.

    Parameters
    ----------
    trunk_bytes : int
        All tensors but the experts', as stored, or what the host takes instead.
    kv_cache_bytes : int
        Keys and values of `context_tokens` tokens.
    context_tokens : int
    staging_bytes : int
        Buffers of the reads.
    spare_bytes : int
        For the interpreter, activations and other processes.
    takes : str
        The use of `trunk_bytes`, in words.
    state_bytes : int
        States of a text, of layers that hold some instead of keys and values: as many for any
        number of tokens.
    """

    trunk_bytes: int
    kv_cache_bytes: int
    context_tokens: int
    staging_bytes: int
    spare_bytes: int = RESERVE_BYTES
    takes: str = "trunk"
    state_bytes: int = 0

    @property
    def later_bytes(self) -> int:
        """The part of the KV cache that a host does not need before its first tokens' are full."""
        first = min(FIRST_TOKENS, self.context_tokens)
        return self.kv_cache_bytes - self.kv_cache_bytes * first // max(1, self.context_tokens)

    @property
    def nbytes(self) -> int:
        """Sum of the parts."""
        own = self.trunk_bytes + self.kv_cache_bytes + self.state_bytes
        return own + self.staging_bytes + self.spare_bytes

    def describe(self) -> str:
        """Return the parts as one line."""
        states = f", states {format_bytes(self.state_bytes)}" if self.state_bytes else ""
        follows = " by what is free" if self.spare_bytes < RESERVE_BYTES else ""
        return (
            f"{self.takes} {format_bytes(self.trunk_bytes)}, KV cache of {self.context_tokens} "
            f"tokens {format_bytes(self.kv_cache_bytes)}{states}, staging "
            f"{format_bytes(self.staging_bytes)}, spare {format_bytes(self.spare_bytes)}{follows}"
        )


def spare_bytes(free_bytes: int) -> int:
    """Return what a host keeps to spare of the memory that it has free.

    A sixteenth of it, at least 32 MiB or, if that is less, a quarter, and at most 512 MiB.
    """
    least = min(_LEAST_SPARE_BYTES, free_bytes // _LEAST_SPARE_PART)
    return min(RESERVE_BYTES, max(least, free_bytes // _SPARE_PART))


def headroom(
    trunk_bytes: int,
    config: Mapping[str, Any],
    *,
    staging_bytes: int = 0,
    context_tokens: int | None = None,
    token_bytes: int | None = None,
    state_bytes: int | None = None,
    free_bytes: int | None = None,
) -> Headroom:
    """Return what a model needs beside its experts.

    Parameters
    ----------
    trunk_bytes : int
    config : mapping
        The checkpoint's config.json.
    staging_bytes : int, default 0
    context_tokens : int, optional
        Length of the KV cache; by default the model's longest context, at most 4096.
    token_bytes : int, optional
        Bytes of a token's keys and values, from a host that knows them; by default as config says.
    state_bytes : int, optional
        Bytes of a text's states, likewise.
    free_bytes : int, optional
        Free memory of the host that has the slots, which what is spare follows; by default
        that is 512 MiB.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    if context_tokens is None:
        longest = _number(config, "max_position_embeddings") or DEFAULT_CONTEXT_TOKENS
        context_tokens = min(longest, DEFAULT_CONTEXT_TOKENS)
    if token_bytes is None:
        token_bytes = kv_bytes_per_token(config)
    if state_bytes is None:
        state_bytes = states_per_text(config)
    return Headroom(
        trunk_bytes,
        token_bytes * context_tokens,
        context_tokens,
        staging_bytes,
        RESERVE_BYTES if free_bytes is None else spare_bytes(free_bytes),
        state_bytes=state_bytes,
    )


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values in all layers; 0 if config does not say.

    Every layer that has keys and values counts as full attention in the model's dtype: what
    Hugging Face transformers allocates at most. Of multi-head latent attention that is the latents
    and one layer's decompressed heads, or with releases before 5.15 the heads of all layers.
    """
    num_layers = _number(config, "num_hidden_layers")
    num_heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    kinds = _layer_kinds(config)
    if not (num_layers or kinds) or not num_heads:
        return 0
    kv_heads = _number(config, "num_key_value_heads") or num_heads
    head_size = _number(config, "head_dim") or hidden // num_heads
    key_size = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    value_size = _number(config, "v_head_dim")
    usual = kv_heads * ((key_size or head_size) + (value_size or head_size))
    # Gemma 4's layers that see all positions have heads of their own.
    wide = 2 * (_number(config, "num_global_key_value_heads") or kv_heads)
    wide *= _number(config, "global_head_dim")
    rank, once = _number(config, "kv_lora_rank"), 0
    if rank and _holds_latents():
        once, usual = usual, rank + sum(_number(config, name) for name in _BESIDE_LATENTS)
    sizes = {"full_attention": wide or usual, **dict.fromkeys(_WITHOUT_KEYS, 0)}
    numbers = sum(sizes.get(kind, usual) for kind in kinds) if kinds else num_layers * usual
    numbers += once
    dtype = config.get("dtype", config.get("torch_dtype"))
    return numbers * (4 if dtype is None or dtype == "float32" else 2)


@cache
def _holds_latents() -> bool:
    """Return whether models' caches hold latents: an older transformers expands them."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("transformers")
    except PackageNotFoundError:
        return True
    numbers = [int(part) for part in found.split(".")[:2] if part.isdecimal()]
    return tuple(numbers) >= _FIRST_WITH_LATENTS


def states_per_text(config: Mapping[str, Any]) -> int:
    """Return the bytes of a text's states in all places and layers that hold some, in float32.

    0 if config does not say. Qwen 3.5's and Qwen3-Next's gated delta rule, Kimi's delta attention,
    Mamba 2 as Nemotron and Granite have it, LFM2's convolutions.
    """
    # Heads' states, and the rows that a convolution sees.
    keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
    values = _number(config, "linear_num_value_heads") * _number(config, "linear_value_head_dim")
    held = _number(config, "linear_key_head_dim") * values
    seen = (2 * keys + values) * _number(config, "linear_conv_kernel_dim")
    num_heads, width, kernel = _delta_sizes(config)
    held += num_heads * width * width
    seen += 3 * num_heads * width * kernel
    size = _number(config, "ssm_state_size", "mamba_d_state")
    values = _number(config, "mamba_num_heads", "mamba_n_heads")
    values *= _number(config, "mamba_head_dim", "mamba_d_head")
    groups = _number(config, "n_groups", "mamba_n_groups")
    held += size * values
    seen += (values + 2 * groups * size) * _number(config, "conv_kernel", "mamba_d_conv")
    seen += _number(config, "hidden_size") * _number(config, "conv_L_cache")
    num_layers = sum(kind in _WITH_STATES for kind in _layer_kinds(config))
    return 4 * STATE_PLACES * num_layers * (held + seen)


def _delta_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return heads, their width and the rows of the convolution of Kimi's delta attention."""
    said = config.get("linear_attn_config")
    said = said if isinstance(said, Mapping) else {}
    names = ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"]
    usual = ("num_heads", "head_dim", "short_conv_kernel_size")
    sizes = [_number(said, a) or _number(config, b) for a, b in zip(usual, names, strict=True)]
    if "layer_group_size" in config:
        # Ling as it is published.
        own = ("num_attention_heads", "head_dim", "short_conv_kernel_size")
        sizes = [size or _number(config, name) for size, name in zip(sizes, own, strict=True)]
    num_heads, width, kernel = sizes
    return num_heads, width, kernel


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind, as transformers names them; nothing if config does not say."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_PATTERN.get(letter, "full_attention") for letter in pattern]
    found = config.get("layer_types") or config.get("layers_block_type")
    # As Qwen3-Next's are by default, and Ling's.
    every = _number(config, "full_attention_interval", "layer_group_size")
    layers = range(1, min(_number(config, "num_hidden_layers"), _MOST_LAYERS) + 1)
    said = config.get("linear_attn_config")
    full = said.get("full_attn_layers") if isinstance(said, Mapping) else None
    if not found and isinstance(full, list):
        return ["full_attention" if layer in full else "linear_attention" for layer in layers]
    if not found and every:
        return ["linear_attention" if layer % every else "full_attention" for layer in layers]
    is_known = isinstance(found, list) and all(isinstance(kind, str) for kind in found)
    return [_OLDER.get(kind, kind) for kind in found or ()] if is_known else []


def check_fits(slot_bytes: int, staging_bytes: int) -> None:
    """Raise CapacityError if slots and staging alone would swap or get the process killed."""
    free = free_host_bytes()
    if slot_bytes + staging_bytes <= free:
        return
    limit = tightest_limit()
    where = "this machine has" if limit is None else f"the memory cgroup {limit.path} leaves"
    raise CapacityError(
        f"slots of {format_bytes(slot_bytes)} and {format_bytes(staging_bytes)} for reads need "
        f"more than the {format_bytes(free)} that {where}: it would swap or be killed; lower "
        f"memory to at most {format_bytes(max(0, free - staging_bytes) * 0.95)}, less what trunk "
        "and KV cache still take"
    )


def _number(config: Mapping[str, Any], *names: str) -> int:
    found = (config.get(name) for name in names)
    # A number that no model has counts as absent.
    return next((value for value in found if type(value) is int and 0 < value < 2**31), 0)
