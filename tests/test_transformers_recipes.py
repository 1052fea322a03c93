"""Recipes of families: whatever their configuration says, near transformers' own forward."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecache.decoding.families import has_kernels, has_recipe
from tests.helpers import quantized
from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.kernels import computing
from tests.helpers.more_families import MORE_FAMILIES
from tests.helpers.offloading import (
    generated,
    load_in_slots,
    load_whole,
    prompt,
    without_least_steps,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

# What a checkpoint of the family may say otherwise than the smallest one.
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 12,
}
GRANITE_WINDOWS = {
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "layer_rope_theta": [0, 1e4, 5e5],
    "shared_intermediate_size": 20,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}
# Layers with windows have more heads, which are turned whole; others' are turned by a half.
LAGUNA = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [6, 4, 6],
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.7,
}
MIMO = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "v_head_dim": 8,
}
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "whole queries": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    # The last of these is no key of this family's, nor of Ling's below.
    "no groups": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": None, "rope_interleave": False},
    ),
    "window": ("mixtral", {"sliding_window": 6}),
    "window of 2": ("mixtral", {"sliding_window": 2}),
    "scales": (
        "granitemoe",
        {
            "residual_multiplier": 0.3,
            "embedding_multiplier": 7.0,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.2,
        },
    ),
    # Layers that see all positions turn nothing.
    "windows": (
        "exaone_moe",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # Gates are a matrix of their own, and what parts of a layer give has norms.
    "gates": (
        "afmoe",
        {
            "sliding_window": 6,
            "num_dense_layers": 1,
            "mup_enabled": True,
            "route_scale": 2.5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "norms behind alone": ("flex_olmo", {}),
    "a norm of the block": ("axk1", {}),
    "gates of heads": ("laguna", LAGUNA),
    "gates of numbers": (
        "laguna",
        {"gating": "per-element", "moe_router_logit_softcapping": 0.0, "attention_bias": True},
    ),
    "narrow values": ("mimo_v2_flash", MIMO),
    "bases of layers": ("granitemoe_swa", GRANITE_WINDOWS),
    # Layers of two kinds, each with heads and angles of its own; a window is passed.
    "beside": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "rotated": ("granitemoehybrid", {"position_embedding_type": "rope", "mamba_proj_bias": True}),
    "convolutions": ("lfm2_moe", {"conv_bias": True, "use_expert_bias": False}),
    "parts alone": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "n_groups": 1},
    ),
    "latents of experts": ("nemotron_h", {"moe_latent_size": 16}),
    "no shared experts": ("ernie4_5_moe", {"moe_num_shared_experts": 0, "use_bias": True}),
    "latents of 4.7": ("glm4_moe_lite", {}),
    "temperature of latents": (
        "mistral4",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "decays of a key's numbers": ("kimi_linear", {}),
    "decays that have a bound": ("bailing_hybrid", {}),
    "decays without one": (
        "bailing_hybrid",
        {"kda_safe_gate": False, "norm_topk_prob": False, "rope_interleave": False},
    ),
    "heads without norms": ("solar_open", {}),
    "pictures": ("glm4v_moe", {}),
    "pictures and sound": ("qwen3_omni_moe", {}),
    "two rotations": (
        "mellum",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "long rope": ("phimoe", {"rope_parameters": _LONG_ROPE, "head_dim": 8}),
    "part of the head": (
        "minimax_m2",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
}

VARIANTS_OF = {"qwen2_moe", "qwen3_moe", "olmoe", *(name for name, _ in VARIANTS.values())}


def decode(model: Any, ids: Any, num: int, **named: Any) -> Any:
    """Return the logits after a prompt and after each of some tokens, a call each."""
    out = model(input_ids=ids, use_cache=True, **named)
    found = [out.logits[:, -1].float()]
    for i in range(num):
        token = torch.full((len(ids), 1), 7 + 3 * i)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits[:, -1].float())
    return torch.stack(found, 1)


def assert_near(model: Any, whole: Any, bound: float) -> list[Any]:
    """Compare logits, of one token and of several at a time; return the model's."""
    found = []
    with torch.no_grad():
        for length in (1, 3, 21):
            ids = (torch.arange(2 * length).reshape(2, length) * 7) % 90 + 3
            before = model.moecache.decoder.num_steps
            found.append(decode(model, ids, 18))
            assert model.moecache.decoder.num_steps == before + 18, model.moecache.decoder.reason
            expected = decode(whole, ids, 18)
            assert (found[-1] - expected).norm() < bound * expected.norm()
        cache = model(input_ids=prompt(), use_cache=True).past_key_values
        alone, found_alone = copy.deepcopy(cache), []
        tokens = torch.tensor([[3, 9, 27, 81]])
        for i in range(4):
            out = model(input_ids=tokens[:, i : i + 1], past_key_values=alone)
            found_alone.append(out.logits[0, -1])
        together = model(input_ids=tokens, past_key_values=cache).logits[0]
        assert torch.equal(together, torch.stack(found_alone))
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_decodes_as_its_own_forward_does(tmp_path: Path, name: str) -> None:
    """In float32; greedy tokens are equal."""
    kind, given_settings = VARIANTS[name]
    family = {**MORE_FAMILIES, **FAMILIES}[kind]
    family = replace(family, settings={**family.settings, **given_settings})
    path = write_checkpoint(family, tmp_path, "float32")
    whole = without_least_steps(load_whole(family, path))
    model = without_least_steps(load_in_slots(path, "50%", compute="fast"))
    with model.moecache:
        assert_near(model, whole, 3e-6)
        assert generated(model, num_tokens=24).tolist() == generated(whole, num_tokens=24).tolist()


def test_bounds_of_steps_in_time_are_the_modules_to_keep(tmp_path: Path) -> None:
    """Granite's configuration may have some; tokens at once are bounded, and one alone is not."""
    family = MORE_FAMILIES["granitemoehybrid"]
    family = replace(family, settings={**family.settings, "time_step_limit": (0.2, 0.3)})
    model = load_in_slots(write_checkpoint(family, tmp_path, "float32"), compute="fast")
    with model.moecache, torch.no_grad():
        decode(model, prompt(), 2)
        assert model.moecache.decoder.num_steps == 0
        assert "steps in time are of 0.2 to 0.3" in model.moecache.decoder.reason


def test_rotations_that_change_are_the_modules_to_keep(tmp_path: Path) -> None:
    """Angles of layers with bases of their own are kept, which these are not for."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    family = MORE_FAMILIES["granitemoe_swa"]
    family = replace(family, settings={**family.settings, "rope_parameters": rope})
    model = load_in_slots(write_checkpoint(family, tmp_path, "float32"), compute="fast")
    with model.moecache, torch.no_grad():
        decode(model, prompt(), 2)
        assert model.moecache.decoder.num_steps == 0
        assert "layers of several bases turn by dynamic" in model.moecache.decoder.reason


def test_gpt_oss_decodes_as_its_own_forward_does(tmp_path: Path) -> None:
    """From MXFP4, with sinks, biases and a window; the same bits at any number of slots."""
    family = quantized.GPT_OSS
    published, plain = quantized.write_quantized(family, quantized.mxfp4(), tmp_path)
    whole = load_whole(family, plain, "float32")
    found = []
    for slots, threads in ((1, 1), (4, 2), (1000, 2)):
        with computing(threads=threads):
            model = load_in_slots(published, None, slots=slots, dtype=torch.float32)
            with model.moecache:
                found.append(assert_near(model, whole, 1e-3))
                assert generated(model).tolist() == generated(whole).tolist()
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True)
    )


def test_a_window_may_be_looked_back_from(tmp_path: Path) -> None:
    """Prompt lookup takes tokens back, beams reorder: the tokens are those of the modules."""
    published, _ = quantized.write_quantized(quantized.GPT_OSS, quantized.mxfp4(), tmp_path)
    ids = torch.tensor([[5, 17, 99, 3] * 5])
    found: list[list[Any]] = []
    for is_own in (False, True):
        model = load_in_slots(published, "50%", dtype=torch.float32)
        with model.moecache, torch.no_grad():
            if is_own:
                del model.__dict__["forward"]
            found.append(
                [
                    generated(model, ids, num_tokens=30, **options).tolist()
                    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3})
                ]
            )
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_inspect_knows_the_families(
    qwen3_moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the type of transformers' configurations, or the architecture of GGUF files."""
    from moecache.cli import main

    known = {*VARIANTS_OF, "glm4_moe", "dots1", "hunyuan_v1_moe", "gpt_oss", "qwen3_vl_moe"}
    known |= {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vl", "lfm2_moe", "nemotron_h"}
    known |= {"llama4"}
    without = {name for name, family in FAMILIES.items() if not family.has_interface} - {"llama4"}
    for name, family in FAMILIES.items():
        found = has_recipe(family.config().model_type)
        assert found == (name.removesuffix("_hub") in known), name
        assert has_kernels(family.config().model_type) == (name not in without), name
    assert not has_kernels("llama4", on_gpu=True)
    for architecture in ("qwen3moe", "gpt-oss", "deepseek2", "llama", "qwen3next", "qwen35moe"):
        assert has_recipe(architecture)
    assert all(map(has_recipe, ("hy_v3", "exaone_moe", "exaone-moe")))
    assert has_recipe("mimo2")
    assert all(map(has_recipe, ("lfm2moe", "granitehybrid", "nemotron_h_moe")))
    assert not has_recipe("jamba")
    assert main(["inspect", str(qwen3_moe), "--memory", "10MiB"]) == 0
    assert "tokens of qwen3_moe: one compiled call each" in capsys.readouterr().out
    path = write_checkpoint(FAMILIES["jamba"], tmp_path, "float32")
    assert main(["inspect", str(path), "--memory", "10MiB"]) == 0
    assert "the model's modules: no recipe" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "minimax_m2", "phimoe"])
def test_a_program_foresees_what_the_routers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of one token and of two: the same experts are likeliest, the chosen ones first."""
    from moecache.integrations.transformers._lookahead import RouterLookAhead

    path = write_checkpoint(FAMILIES[name], tmp_path, "float32")
    top_k = FAMILIES[name].top_k
    predict = RouterLookAhead.predict
    foreseen: list[Any] = []

    def noting(self: Any, layer: int, n: int) -> Any:
        found = predict(self, layer, n)
        if layer > 0:
            ids = found[0].tolist()
            foreseen.append((layer, n, sorted(ids[:top_k]) if n < 3 * top_k else [], sorted(ids)))
        return found

    monkeypatch.setattr(RouterLookAhead, "predict", noting)
    seen = []
    for is_own in (False, True):
        model = load_in_slots(path, "25%", compute="fast", prefetch="router")
        with model.moecache, torch.no_grad():
            if is_own:
                del model.__dict__["forward"]
            for rows in (1, 2):
                ids = prompt().expand(rows, -1) + torch.arange(rows)[:, None]
                cache = model(input_ids=ids, use_cache=True).past_key_values
                foreseen.clear()
                for i in range(6):
                    model(input_ids=torch.full((rows, 1), 7 + i), past_key_values=cache)
                seen.append(list(foreseen))
                assert len(foreseen) >= 6
    assert seen[:2] == seen[2:]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_sliding_layer_is_transformers_own(data: st.DataObject) -> None:
    """Whatever is done to a cache, tokens of a program between: the same keys, values and masks."""
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    from moecache.integrations.transformers._pages import Pages

    window = data.draw(st.sampled_from([2, 3, 8, 300]))
    own = DynamicSlidingWindowLayer(window)
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(window)]
    pages = Pages(1)
    if data.draw(st.booleans()):
        for layer in (own, cache.layers[0]):
            layer.activate_past_recording()
    for seed in range(data.draw(st.integers(1, 12))):
        layers = own, cache.layers[0]
        what = data.draw(
            st.sampled_from(["update", "write", "write", "crop", "reorder", "repeat", "copy"])
        )
        rows = len(own.keys) if own.is_initialized else 0
        num = data.draw(st.sampled_from([1, 2, 7, 255, 300]))
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn((rows or 2, 2, num, 3), generator=generator)
        if what == "update" or not rows:
            results = [layer.update(keys, keys[..., :2] + 1) for layer in layers]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        elif what == "write":
            length = own.get_seq_length()
            found = pages.of(cache, length, num)
            assert found is not None
            ours: Any = cache.layers[0]
            for part, new in zip(ours.parts, (keys, keys[..., :2] + 1), strict=True):
                part.held[:, :, part.start + part.num : part.start + part.num + num] = new
            pages.grow(cache, num)
            own.update(keys, keys[..., :2] + 1)
        elif what == "crop" and (own.record_past or own.get_seq_length() < window):
            num = data.draw(st.integers(0, own.get_seq_length() - 1))
            if own.keys.shape[2] - num >= min(own.get_seq_length() - num, window - 1):
                for layer in layers:
                    layer.crop(-num)
        elif what == "reorder":
            chosen = st.lists(st.integers(0, rows - 1), min_size=1, max_size=3)
            order = torch.tensor(data.draw(chosen))
            for layer in layers:
                layer.reorder_cache(order)
        elif what == "repeat" and rows < 5:
            for layer in layers:
                layer.batch_repeat_interleave(2)
        elif what == "copy":
            cache = copy.deepcopy(cache)
        layers = own, cache.layers[0]
        assert own.get_seq_length() == layers[1].get_seq_length()
        assert own.get_mask_sizes(3) == layers[1].get_mask_sizes(3)
        assert torch.equal(own.keys, layers[1].keys)
        assert torch.equal(own.values, layers[1].values)
