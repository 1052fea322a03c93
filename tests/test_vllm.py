"""vLLM with experts in slots: the same bits at any number of slots, and vLLM's own tokens."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import FAMILIES, write_checkpoint
from tests.helpers.quantized import GPT_OSS, grouped, mxfp4, write_quantized
from tests.helpers.vllm_child import ENVIRONMENT, SIZES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see make vllm"
)
NAMES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v2")
# DeepSeek's keys are latent, and vLLM has kernels for the published width alone.
_LATENT = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_OTHER = {"deepseek_v2": _LATENT}
_WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
}
# As published; vLLM takes gpt-oss with no other.
_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 150_000.0,
    "truncate": False,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a family's checkpoint once."""
    written: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in written:
            directory = tmp_path_factory.mktemp(name)
            if name == "gpt_oss":
                settings = {**GPT_OSS.settings, **SIZES, "rope_parameters": _YARN}
                family = replace(GPT_OSS, settings=settings)
                written[name], written["gpt_oss_plain"] = write_quantized(
                    family, mxfp4(), directory
                )
                return written[name]
            family = FAMILIES[name]
            sizes = {**SIZES, **_OTHER.get(name, {})}
            family = replace(family, settings={**family.settings, **sizes})
            written[name] = write_checkpoint(family, directory, "bfloat16")
        return written[name]

    return write


def run(path: Path, tmp_path: Path, cores: str = "", **given: Any) -> dict[str, Any]:
    """Return what vLLM answers in a process of its own; `cores` binds the threads of each rank."""
    out = tmp_path / "out.json"
    variables = {**ENVIRONMENT, **({"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {})}
    command = [sys.executable, "-m", "tests.helpers.vllm_child", str(path), json.dumps(given)]
    done = subprocess.run(
        [*command, str(out)],
        env={**os.environ, **variables},  # noqa: TID251 - for a child
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # Whole: warnings at its end may be longer than the error.
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def offloaded(**options: Any) -> dict[str, Any]:
    """Return the arguments of vLLM that have experts in slots."""
    return {"load_format": "moecache", "model_loader_extra_config": options}


@pytest.mark.parametrize("name", [*NAMES, "gpt_oss"])
def test_bits_do_not_depend_on_the_slots(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """All resident, a quarter, and one layer's worth: tokens and log probabilities are equal."""
    path = checkpoints(name)
    whole = run(path, tmp_path, **offloaded(memory="100%"))
    config = json.loads((path / "config.json").read_text())
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(config[key] for key in keys if key in config)
    assert run(path, tmp_path, **offloaded(memory="25%"))["answers"] == whole["answers"]
    assert run(path, tmp_path, **offloaded(slots=num_experts))["answers"] == whole["answers"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_vllm(name: str, checkpoints: Any, tmp_path: Path) -> None:
    """Log probabilities of vLLM's own experts differ by rounding alone, up to the first tie."""
    path = checkpoints(name)
    own = run(path, tmp_path)
    ours = run(path, tmp_path, **offloaded(memory="25%"))
    assert ours["parameter_bytes"] < own["parameter_bytes"]
    assert_close(ours, own)


def test_experts_of_gpt_oss_are_the_published_ones(checkpoints: Any, tmp_path: Path) -> None:
    """On CPUs vLLM has no MXFP4; what is compared are the same values in bfloat16, its own code."""
    published, plain = checkpoints("gpt_oss"), checkpoints("gpt_oss_plain")
    own = run(plain, tmp_path)
    assert_close(run(published, tmp_path, **offloaded(memory="25%")), own)


def test_a_trunk_in_awq_is_vllms(tmp_path: Path) -> None:
    """Its experts have no kernel in vLLM on CPUs, and ours; the trunk's matrices are vLLM's."""
    settings = {**FAMILIES["qwen3_moe"].settings, **SIZES, **_WIDE}
    family = replace(FAMILIES["qwen3_moe"], settings=settings)
    published, plain = write_quantized(family, grouped("awq"), tmp_path)
    own = run(plain, tmp_path, batches=[3])
    assert_close(run(published, tmp_path, batches=[3], **offloaded(memory="25%")), own)


def test_ranks_have_experts_of_their_own(checkpoints: Any, tmp_path: Path) -> None:
    """Two ranks, each with half of the experts, give one process's tokens but for rounding."""
    path = checkpoints("qwen3_moe")
    alone = run(path, tmp_path, batches=[3], **offloaded(memory="25%"))
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "cores": "0|1"}
    assert_close(run(path, tmp_path, batches=[3], **ranks, **offloaded(memory="25%")), alone)


def test_wrong_experts_are_an_error_at_load(checkpoints: Any, tmp_path: Path) -> None:
    """A layer that computes another one's experts is found before the first request."""
    damaged = {"damage": True, "batches": [1], **offloaded(memory="25%")}
    with pytest.raises(AssertionError, match="off that of plain products"):
        run(checkpoints("qwen3_moe"), tmp_path, **damaged)


def test_a_read_that_fails_is_said(checkpoints: Any, tmp_path: Path) -> None:
    """A file that is cut while vLLM serves ends the engine with an error that names it."""
    path = shutil.copytree(checkpoints("qwen3_moe"), tmp_path / "cut")
    with pytest.raises(AssertionError, match=r"StoreError: .*model\.safetensors"):
        run(path, tmp_path, cut=True, batches=[16], **offloaded(slots=8, prefault="off"))


def assert_close(ours: dict[str, Any], own: dict[str, Any]) -> None:
    """Compare first log probabilities, and most sequences' tokens."""
    num_equal = 0
    for (tokens, chosen), (others, theirs) in zip(ours["answers"], own["answers"], strict=True):
        assert abs(chosen[0] - theirs[0]) < 0.1
        num_equal += tokens == others
    assert num_equal >= 0.8 * len(own["answers"])


def test_a_compiled_graph_calls_the_slots(checkpoints: Any, tmp_path: Path) -> None:
    """A graph that torch compiles has the same experts, by an operator."""
    path = checkpoints("qwen3_moe")
    compiled = run(path, tmp_path, batches=[3], enforce_eager=False, **offloaded(memory="25%"))
    eager = run(path, tmp_path, batches=[3], **offloaded(memory="25%"))
    for (_, chosen), (_, theirs) in zip(compiled["answers"], eager["answers"], strict=True):
        assert abs(chosen[0] - theirs[0]) < 0.1
