"""vLLM with experts in slots: the same bits at any number of slots, and vLLM's own tokens."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import FAMILIES, write_checkpoint
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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a family's checkpoint once."""
    written: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in written:
            directory = tmp_path_factory.mktemp(name)
            family = FAMILIES[name]
            sizes = {**SIZES, **_OTHER.get(name, {})}
            family = replace(family, settings={**family.settings, **sizes})
            written[name] = write_checkpoint(family, directory, "bfloat16")
        return written[name]

    return write


def run(path: Path, tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Return what vLLM answers in a process of its own."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tests.helpers.vllm_child", str(path), json.dumps(given)]
    done = subprocess.run(
        [*command, str(out)],
        env={**os.environ, **ENVIRONMENT},  # noqa: TID251 - for a child
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def offloaded(**options: Any) -> dict[str, Any]:
    """Return the arguments of vLLM that have experts in slots."""
    return {"load_format": "moecache", "model_loader_extra_config": options}


@pytest.mark.parametrize("name", NAMES)
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
