"""headroom: the KV cache of known models, the parts of what stays free, what is refused."""

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecache.errors import CapacityError
from moecache.sizing import RESERVE_BYTES
from moecache.sizing import headroom as module
from moecache.sizing.headroom import (
    Headroom,
    check_fits,
    headroom,
    kv_bytes_per_token,
    spare_bytes,
    states_per_text,
)
from moecache.sizing.host_memory import CgroupLimit

MIB = 2**20
MIXTRAL = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
}
QWEN3_30B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
OLMOE = {
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "dtype": "bfloat16",
}
QWEN3_5 = {
    "num_hidden_layers": 40,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}
GEMMA4 = {
    "num_hidden_layers": 30,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "hidden_size": 2816,
    "dtype": "bfloat16",
}
NEMOTRON3_NANO = {
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
GRANITE4_TINY = {
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_size": 1536,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
LFM2_8B = {
    "num_hidden_layers": 24,
    "layer_types": [
        "full_attention" if layer in {2, 6, 10, 14, 18, 21} else "conv" for layer in range(24)
    ],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "conv_L_cache": 3,
    "torch_dtype": "bfloat16",
}

# Both as published: 7 layers of each have keys.
_LATENT_HEADS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "torch_dtype": "bfloat16",
}
KIMI_LINEAR = {
    **_LATENT_HEADS,
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
LING_3 = {
    **_LATENT_HEADS,
    "num_hidden_layers": 42,
    "layer_group_size": 6,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
}


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (MIXTRAL, 131_072),  # 32 layers * 8 heads * (128 + 128) * 2 bytes
        (QWEN3_30B, 98_304),  # 48 * 4 * (128 + 128) * 2, not hidden / heads
        (OLMOE, 131_072),  # 16 * 16 * (128 + 128) * 2
        (DEEPSEEK_V3, 152_192),  # (61 * (512 + 64) + 128 * (192 + 128)) * 2
        ({**DEEPSEEK_V3, "index_head_dim": 128}, 167_808),  # 61 * 128 * 2 more
        (GPT_OSS, 49_152),  # 24 * 8 * (64 + 64) * 2
        (QWEN3_5, 20_480),  # 10 * 2 * (256 + 256) * 2: the others have states
        ({**QWEN3_5, "layer_types": None, "full_attention_interval": 4}, 20_480),
        (GEMMA4, 225_280),  # (25 * 8 * (256 + 256) + 5 * 2 * (512 + 512)) * 2
        (NEMOTRON3_NANO, 6_144),  # 6 * 2 * (128 + 128) * 2
        (GRANITE4_TINY, 8_192),  # 4 * 4 * (128 + 128) * 2
        (LFM2_8B, 12_288),  # 6 * 8 * (64 + 64) * 2
        (KIMI_LINEAR, 28_544),  # (7 * (512 + 64) + 32 * (192 + 128)) * 2
        (LING_3, 28_544),
        ({**MIXTRAL, "torch_dtype": "float16"}, 131_072),
        ({**MIXTRAL, "torch_dtype": "float32"}, 262_144),
        ({**MIXTRAL, "torch_dtype": None}, 262_144),  # transformers loads those in float32
        ({**MIXTRAL, "dtype": "float32"}, 262_144),  # the newer name first
        # Without grouped queries every head has its own keys and values.
        ({k: v for k, v in MIXTRAL.items() if k != "num_key_value_heads"}, 524_288),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 1024),
    ],
)
def test_the_kv_cache_of_known_models(config: dict[str, Any], nbytes: int) -> None:
    """Worked out by hand: layers * heads * (key + value) * bytes of the dtype."""
    assert kv_bytes_per_token(config) == nbytes


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (MIXTRAL, 0),
        (GEMMA4, 0),
        # A state of each value's head, and four rows of queries, keys and values.
        (QWEN3_5, 3 * 30 * 4 * (32 * 128 * 128 + 4 * (2 * 16 + 32) * 128)),
        # A head's state, and four rows of values and of each group's two vectors.
        (NEMOTRON3_NANO, 3 * 23 * 4 * (64 * 64 * 128 + 4 * (64 * 64 + 2 * 8 * 128))),
        (GRANITE4_TINY, 3 * 36 * 4 * (48 * 64 * 128 + 4 * (48 * 64 + 2 * 128))),
        (LFM2_8B, 3 * 18 * 4 * 3 * 2048),
        (KIMI_LINEAR, 3 * 20 * 4 * (32 * 128 * 128 + 4 * 3 * 32 * 128)),
        (LING_3, 3 * 35 * 4 * (32 * 128 * 128 + 4 * 3 * 32 * 128)),
    ],
)
def test_the_states_of_known_models(config: dict[str, Any], nbytes: int) -> None:
    """In three places: what is read, what is written, and what is saved."""
    assert states_per_text(config) == nbytes
    assert headroom(1000, config).state_bytes == nbytes
    said = headroom(1000, config, token_bytes=10, state_bytes=7)
    assert (said.state_bytes, said.kv_cache_bytes) == (7, 10 * said.context_tokens)
    assert said.nbytes == 1000 + 7 + said.kv_cache_bytes + RESERVE_BYTES


@pytest.mark.parametrize(
    ("release", "nbytes"),
    [("5.14.1", 4_997_120), ("5.15.0.dev0", 152_192), ("6.0", 152_192), (None, 152_192)],
)
def test_older_releases_of_transformers_expand_latents(
    monkeypatch: pytest.MonkeyPatch, release: str | None, nbytes: int
) -> None:
    """61 * 128 * (192 + 128) * 2; without one nothing does."""

    def version(_: str) -> str:
        if release is None:
            raise PackageNotFoundError
        return release

    monkeypatch.setattr("importlib.metadata.version", version)
    found = module._holds_latents.__wrapped__  # no earlier test's
    monkeypatch.setattr(module, "_holds_latents", found)
    assert kv_bytes_per_token(DEEPSEEK_V3) == nbytes


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads"])
def test_a_config_that_does_not_say_has_no_kv_cache(missing: str) -> None:
    """Nothing is guessed."""
    assert kv_bytes_per_token({k: v for k, v in MIXTRAL.items() if k != missing}) == 0
    assert kv_bytes_per_token({}) == 0


@pytest.mark.parametrize("name", [*MIXTRAL, "head_dim", "v_head_dim", "text_config", "dtype"])
@pytest.mark.parametrize("value", [None, 0, -1, "12", 2.5, True, [], [3], {}, 10**30], ids=str)
def test_hostile_values_give_a_figure(name: str, value: object) -> None:
    """Whatever config.json says: never an error, never below zero."""
    room = headroom(1000, {**MIXTRAL, name: value}, staging_bytes=5)

    assert room.kv_cache_bytes >= 0
    assert 0 < room.context_tokens <= 4096
    assert room.nbytes == 1005 + room.kv_cache_bytes + RESERVE_BYTES
    assert "trunk" in room.describe()


def test_a_decoder_one_level_down_is_found() -> None:
    """As models of several modalities keep it; figures above it are other parts'."""
    nested = {"hidden_size": 1, "num_hidden_layers": 99, "text_config": MIXTRAL}

    assert headroom(0, nested) == headroom(0, MIXTRAL)


def test_the_parts_add_up() -> None:
    """Trunk, KV cache of 4,096 tokens, staging, and some for all other programs."""
    room = headroom(3 * 2**30, MIXTRAL, staging_bytes=2**24)

    assert room == Headroom(3 * 2**30, 4096 * 131_072, 4096, 2**24, RESERVE_BYTES)
    assert room.nbytes == 3 * 2**30 + 2**29 + 2**24 + RESERVE_BYTES
    assert room.describe() == (
        "trunk 3.00 GiB, KV cache of 4096 tokens 512.0 MiB, staging 16.0 MiB, spare 512.0 MiB"
    )


@pytest.mark.parametrize(
    ("free", "spare"),
    [
        (0, 0),
        (64 * MIB, 16 * MIB),
        (128 * MIB, 32 * MIB),
        (512 * MIB, 32 * MIB),
        (768 * MIB, 48 * MIB),
        (1024 * MIB, 64 * MIB),
        (1536 * MIB, 96 * MIB),
        (4096 * MIB, 256 * MIB),
        (8192 * MIB, 512 * MIB),
        (2**40, 512 * MIB),
    ],
)
def test_what_is_spare_follows_what_is_free(free: int, spare: int) -> None:
    """A sixteenth, from 32 MiB (of a small host a quarter) to 512 MiB; the reason says so."""
    room = headroom(0, MIXTRAL, free_bytes=free)

    assert spare_bytes(free) == room.spare_bytes == spare
    assert ("by what is free" in room.describe()) == (spare < RESERVE_BYTES)


@given(st.integers(0, 2**44), st.integers(0, 2**34))
def test_more_memory_is_never_less_for_slots(free: int, more: int) -> None:
    """What is spare never grows faster than what is free."""
    assert 0 <= spare_bytes(free + more) - spare_bytes(free) <= more
    assert spare_bytes(free) <= free


@pytest.mark.parametrize(
    ("config", "asked", "tokens"),
    [
        (MIXTRAL, None, 4096),
        ({**MIXTRAL, "max_position_embeddings": 1024}, None, 1024),
        ({**MIXTRAL, "max_position_embeddings": None}, None, 4096),
        (MIXTRAL, 100_000, 100_000),
        (MIXTRAL, 0, 0),
    ],
)
def test_the_kv_cache_is_as_long_as_the_model_takes(
    config: dict[str, Any], asked: int | None, tokens: int
) -> None:
    """At most 4,096 tokens, unless the caller says how many."""
    room = headroom(0, config, context_tokens=asked)

    assert room.context_tokens == tokens
    assert room.kv_cache_bytes == tokens * 131_072


def test_slots_that_fit_to_the_byte_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one more byte is not."""
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1000)
    monkeypatch.setattr(module, "tightest_limit", lambda: None)
    check_fits(900, 100)
    with pytest.raises(CapacityError, match="this machine has"):
        check_fits(900, 101)


def test_the_refusal_says_what_is_there_and_who_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both figures, the cgroup, and what would fit."""
    monkeypatch.setattr(module, "free_host_bytes", lambda: 2**30)
    monkeypatch.setattr(
        module, "tightest_limit", lambda: CgroupLimit(2**31, 2**30, "/sys/fs/cgroup/box")
    )
    with pytest.raises(CapacityError) as caught:
        check_fits(2**31, 2**24)

    message = str(caught.value)
    for words in ("2.00 GiB", "16.0 MiB", "1.00 GiB", "the memory cgroup /sys/fs/cgroup/box"):
        assert words in message
    assert "lower memory to at most 957.6 MiB" in message
