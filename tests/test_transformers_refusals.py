"""What `load` cannot do is refused, with the reason, and leaves nothing open."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moecache.errors import CapacityError, ConfigError
from tests.helpers.families import FAMILIES
from tests.helpers.leaks import nothing_left
from tests.helpers.offloading import load_in_slots

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

FAMILY = FAMILIES["qwen3_moe"]
SIZES = {"vocab_size": 128, "hidden_size": 32}


def _dbrx() -> Any:
    return transformers.DbrxForCausalLM(
        transformers.DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            vocab_size=128,
            ffn_config={
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
            attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        )
    )


def _jetmoe() -> Any:
    return transformers.JetMoeForCausalLM(
        transformers.JetMoeConfig(
            **SIZES,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=8,
            intermediate_size=24,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def _switch_transformers() -> Any:
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            vocab_size=128,
            d_model=32,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
        )
    )


def _nllb_moe() -> Any:
    return transformers.NllbMoeForConditionalGeneration(
        transformers.NllbMoeConfig(
            vocab_size=128,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_sparse_step=1,
            decoder_sparse_step=1,
            num_experts=4,
        )
    )


def _diffusion_gemma() -> Any:
    return transformers.DiffusionGemmaForBlockDiffusion(
        transformers.DiffusionGemmaConfig(
            text_config={
                **SIZES,
                "intermediate_size": 40,
                "moe_intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_experts": 4,
                "top_k_experts": 2,
            },
            vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        )
    )


def _dense() -> Any:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SIZES,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_dbrx, "DbrxForCausalLM is not supported: DbrxExperts .* in another form"),
        (_jetmoe, "JetMoeForCausalLM is not supported: JetMoeParallelExperts .* in another form"),
        (_switch_transformers, "SwitchTransformersExperts .* in another form"),
        (_nllb_moe, "NllbMoeForConditionalGeneration is not supported: .* in another form"),
        (_diffusion_gemma, r"DiffusionGemma.* is not supported: .*encoder.* shares its experts"),
        (_dense, "Qwen3ForCausalLM has no experts module .* a mixture-of-experts model"),
    ],
    ids=lambda value: value.__name__.lstrip("_") if callable(value) else "",
)
def test_a_family_without_support_is_named_with_the_reason(
    tmp_path: Path, make: Callable[[], Any], reason: str
) -> None:
    """When it is loaded, not when it computes."""
    make().save_pretrained(tmp_path)

    with nothing_left(), pytest.raises(ConfigError, match=reason):
        load_in_slots(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config cannot be given"),
        ({"device": "gpu"}, """'gpu' is neither "cpu" nor "cuda\""""),
        ({"device_map": "balanced"}, "'balanced' .* the trunk goes where the slots are"),
        ({"device_map": {"": 0}}, "the trunk goes where the slots are"),
        ({"output_loading_info": True}, "output_loading_info cannot be given to load"),
        ({"experts_implementation": "eager"}, 'experts_implementation cannot .* it is "moecache"'),
        ({"gguf_file": "model.gguf"}, "give the path of the file itself"),
        ({"state_dict": {"weight": 1}}, "state_dict cannot be given to load"),
        ({"tp_plan": "auto"}, "tp_plan cannot be given to load"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": "25%", "slots": 4}, "give either memory or slots"),
        ({"policy": "best"}, "policy 'best' is not one of"),
        ({"prefetch": "psychic"}, "prefetch 'psychic' is not one of"),
        ({"read": "aloud"}, "read 'aloud' is not one of"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_cannot_be_used_is_named(
    qwen3_moe: Path, arguments: dict[str, Any], reason: str
) -> None:
    """And what was loaded before it was looked at is given back."""
    with nothing_left(), pytest.raises(ConfigError, match=reason):
        load_in_slots(qwen3_moe, **{"memory": "25%", **arguments})


def test_memory_for_less_than_an_expert_is_refused_with_what_is_needed(qwen3_moe: Path) -> None:
    """An expert, and a place to read another to."""
    reason = r"1\.00 KiB.*22\.5 KiB.*at least 45\.0 KiB"
    with nothing_left(), pytest.raises(CapacityError, match=reason):
        load_in_slots(qwen3_moe, "1KiB")


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto"])
def test_a_checkpoint_quantized_by_another_method_is_refused_by_its_name(
    qwen3_moe: Path, tmp_path: Path, method: str
) -> None:
    """With those that are read."""
    directory = shutil.copytree(qwen3_moe, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (directory / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=rf"model: quantized with '{method}': .*are fp8, mxfp4"):
        load_in_slots(directory)


def test_a_checkpoint_of_pickles_is_refused_with_the_remedy(
    qwen3_moe: Path, tmp_path: Path
) -> None:
    """Parts of it cannot be read."""
    shutil.copy(qwen3_moe / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="no safetensors file; save the model again"):
        load_in_slots(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"device_map": "auto"},
        {"device_map": "sequential"},
        {"attn_implementation": "eager"},
        {"low_cpu_mem_usage": True},
        {"output_loading_info": False},
        {"quantization_config": None},
        {"dtype": "auto"},
        {"dtype": np.float32},
        {"torch_dtype": "f32"},
    ],
    ids=str,
)
def test_what_changes_nothing_may_be_said(qwen3_moe: Path, options: dict[str, Any]) -> None:
    """As scripts do that were written for `from_pretrained`."""
    model = load_in_slots(qwen3_moe, **options)
    with model.moecache:
        assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"foo": 1}, "$"),
        ({"plicy": "lru"}, r"; did you mean policy\?"),
        ({"atn_implementation": "eager"}, r"; did you mean attn_implementation\?"),
    ],
    ids=str,
)
def test_an_argument_that_nothing_takes_is_named_before_anything_is_read(
    qwen3_moe: Path, options: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that look like it."""
    import transformers

    def unread(*_: Any, **__: Any) -> None:
        pytest.fail("the model is built")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", unread)
    (name,) = options
    with pytest.raises(
        TypeError, match=f"no argument '{name}', and from_pretrained has none{remedy}"
    ):
        load_in_slots(qwen3_moe, **options)
    for name in ("top_k", "layers", "token_bytes"):
        with pytest.raises(TypeError, match=f"no argument '{name}': it finds out by itself"):
            load_in_slots(qwen3_moe, **{name: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "b16"}, "dtype 'b16' is no type of weights; give for example bfloat16"),
        ({"dtype": int}, "dtype <class 'int'> is no type"),
        ({"dtype": b"bf16"}, "is no type of weights"),
        ({"attn_implementation": "bogus"}, "attn_implementation cannot be used: .*bogus"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_no_damage(
    qwen3_moe: Path, options: dict[str, Any], message: str
) -> None:
    """The checkpoint is well."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_in_slots(qwen3_moe, **options)
    assert "damaged" not in str(caught.value)


def test_types_have_the_names_that_moecache_gives_them() -> None:
    """Those of NumPy and ml_dtypes, and short ones."""
    from moecache.integrations.transformers._arguments import torch_dtype

    for given in ("bf16", "bfloat16", "torch.bfloat16", ml_dtypes.bfloat16, torch.bfloat16):
        assert torch_dtype(given) is torch.bfloat16
