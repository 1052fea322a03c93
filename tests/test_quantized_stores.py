"""Quantized checkpoints: matrices have the values of their definitions; what does not fit is named.

Values are compared with those that `tests/helpers/quantized.py` reads on its own.
"""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import moecache
from moecache import cli, packing
from moecache.errors import ConfigError, ExpertNotFoundError, FormatError
from moecache.kernels import values_in
from moecache.stores import SafetensorsStore, open_store
from tests.helpers import quantized
from tests.helpers.quantized import SCHEMES, Tensors, save_tensors, write_experts


@pytest.fixture(name="scheme", params=SCHEMES)
def _scheme(request: pytest.FixtureRequest) -> quantized.Scheme:
    return SCHEMES[request.param]


def experts_of(store: SafetensorsStore, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return an expert's values by role, float32."""
    roles = store.layout.layers[layer]
    parts = {role.name: np.empty(role.array_shape, role.dtype) for role in roles}
    store.read_into(layer, expert, parts)
    return {
        role.name: values_in(parts[role.name], role, stored=True).astype(np.float32)
        for role in roles
    }


def expected(values: Tensors, layer: int, expert: int) -> dict[str, np.ndarray]:
    """Return what `experts_of` should be."""
    path = f"model.layers.{layer}.mlp.experts"
    if f"{path}.down_proj" in values:
        return {
            "gate_up": values[f"{path}.gate_up_proj"][expert].T,
            "down": values[f"{path}.down_proj"][expert].T,
        }
    gate, up, down = (
        values[f"{path}.{expert}.{piece}_proj.weight"] for piece in ("gate", "up", "down")
    )
    return {"gate_up": np.concatenate([gate, up]), "down": down}


def test_matrices_have_the_values_of_their_definition(
    scheme: quantized.Scheme, tmp_path: Path
) -> None:
    """Experts and trunk, bit for bit; a format has a name that finds it again."""
    _, values = write_experts(scheme, tmp_path)
    with open_store(tmp_path) as store:
        assert store.quantization == scheme.config["quant_method"]
        for layer, expert in np.ndindex(2, 4):
            found = experts_of(store, layer, expert)
            for role, array in expected(values, layer, expert).items():
                np.testing.assert_array_equal(found[role], array)
        for name in store.trunk_matrices:
            np.testing.assert_array_equal(store.read_matrix(name), values[name])
        is_for_all = re.search(scheme.chosen, "model.layers.0.self_attn.q_proj.weight")
        assert len(store.trunk_matrices) == (2 if is_for_all else 0)


def test_a_packed_expert_is_one_read_and_the_same(scheme: quantized.Scheme, tmp_path: Path) -> None:
    """With its scales; a second pack changes nothing."""
    write_experts(scheme, tmp_path / "model")
    packing.pack(tmp_path / "model", tmp_path / "packed")
    with open_store(tmp_path / "model") as store, open_store(tmp_path / "packed") as packed:
        assert packed.layout == store.layout
        for layer, expert in np.ndindex(2, 4):
            # Each role begins a block; what lies between is not read.
            assert len(packed.runs(layer, expert)) == len(store.layout.layers[layer])
            one, two = (experts_of(s, layer, expert) for s in (store, packed))
            for role in one:
                np.testing.assert_array_equal(one[role], two[role])
        for name in store.trunk_matrices:
            np.testing.assert_array_equal(packed.read_matrix(name), store.read_matrix(name))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "aqlm", "bits": 4}, "'aqlm'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "quanto"}, "'quanto'"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"group_size": 64, "bits": 4}, "as MLX does"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    said: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By everything that opens a checkpoint, before anything is planned or written."""
    write_experts(quantized.fp8(), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    key = "quantization_config" if "quant_method" in said else "quantization"
    path.write_text(json.dumps({"num_experts_per_tok": 2, key: said}))
    wanted = f"quantized .*{named}.*not supported; supported are fp8.*mxfp4.*compressed-tensors"
    for use in (open_store, moecache.plan, moecache.open):
        with pytest.raises(ConfigError, match=wanted):
            use(path.parent)
    with pytest.raises(ConfigError, match=wanted):
        packing.pack(path.parent, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert cli.main(["inspect", str(path.parent)]) == 2
    assert re.search(wanted, " ".join(capsys.readouterr().err.split()))


EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
STACK = "model.layers.1.mlp.experts.down_proj"


def without(name: str) -> Callable[[Tensors], object]:
    """Return what removes a tensor."""
    return lambda tensors: tensors.pop(name)


def instead(name: str, array: np.ndarray) -> Callable[[Tensors], object]:
    """Return what puts another array in a tensor's place, in every expert's."""

    def put(tensors: Tensors) -> None:
        ending = re.sub(r"^model\.layers\.1\.mlp\.experts\.2", "", name)
        tensors.update({key: array for key in tensors if key.endswith(ending)})

    return put


@pytest.mark.parametrize(
    ("scheme", "damage", "reason"),
    [
        ("fp8", without(f"{EXPERT}_scale_inv"), r"none with number 2 .*down_proj.weight_scale_inv"),
        ("fp8", without(EXPERT), "none with number 2"),
        (
            "fp8",
            instead(f"{EXPERT}_scale_inv", np.ones((3, 2), np.float32)),
            r"is float32 \[3, 2\]; a \[96, 64\] matrix in fp8\[16x32,f32\] needs float32 \[6",
        ),
        ("fp8", instead(f"{EXPERT}_scale_inv", np.ones((6, 2), np.int32)), "int32, no type of a"),
        ("fp8", instead(EXPERT, np.ones((96, 64), np.uint8)), r"uint8 \[96, 64\]; FP8 is a matrix"),
        ("channels", instead(f"{EXPERT}_scale", np.ones((96, 2), np.float32)), "is no scale of"),
        ("int4", without(f"{EXPERT}_packed"), "none with number 2"),
        (
            "int4",
            instead(f"{EXPERT}_shape", np.array([96, 63])),
            "does not have integers of 2 to 8",
        ),
        ("int4", instead(f"{EXPERT}_shape", np.array([0, -1])), "no shape of a matrix"),
        ("int4", instead(f"{EXPERT}_shape", np.array([96, 32])), "no int of 8 bits"),
        ("int4", instead(f"{EXPERT}_scale", np.ones((96, 1), np.float32)), "is no scale of"),
        ("mxfp4", without(f"{STACK}_scales"), "has no scales beside it"),
        (
            "mxfp4",
            instead(f"{STACK}_scales", np.ones((4, 96, 3), np.uint8)),
            r"needs uint8 \[96, 2\]",
        ),
        ("mxfp4", instead(f"{STACK}_blocks", np.ones((4, 96, 2, 8), np.uint8)), "columns / 32, 16"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    scheme: str, damage: Callable[[Tensors], object], reason: str, tmp_path: Path
) -> None:
    """Before a slot is filled: when the checkpoint is opened."""
    tensors, _ = write_experts(SCHEMES[scheme], tmp_path)
    damage(tensors)
    save_tensors(tensors, tmp_path)
    with pytest.raises(FormatError, match=reason):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "changed", "reason"),
    [
        ("fp8", {"weight_block_size": [16]}, r"weight_block_size in config.json is \[16\], not"),
        ("fp8", {"weight_block_size": [0, 32]}, r"is \[0, 32\], not \[rows, columns\]"),
        ("fp8", {"weight_block_size": [64, 32]}, r"needs float32 \[\d, \d\]"),
        ("fp8", {"quant_method": "mxfp4"}, "has no blocks beside it"),
        ("mxfp4", {"quant_method": "fp8"}, "has no weight beside it"),
        ("int4", {"config_groups": {}}, "no int of 4 bits"),
        ("int4", {"config_groups": 7}, "no int of 4 bits"),
    ],
)
def test_config_and_tensors_that_disagree_are_an_error(
    scheme: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Which says what each of them has."""
    write_experts(SCHEMES[scheme], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=reason):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "changed", "reason"),
    [
        ("gptq", {"bits": 3}, "gptq of 3 bits in config.json is not supported; 2, 4 and 8 are"),
        ("gptq", {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "settings of single modules"),
        ("awq", {"version": "gemv"}, "awq of version 'gemv'"),
        ("modelopt", {"quant_algo": "W4A16_AWQ"}, "modelopt's 'W4A16_AWQ'"),
        (
            "int4",
            {"format": "marlin-24"},
            "format 'marlin-24' is not supported; supported are pack",
        ),
        ("int4", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config in config"),
        ("channels", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_settings_that_no_tensor_shows_are_refused_by_name(
    scheme: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Values would be others than those that are there."""
    write_experts(SCHEMES[scheme], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    for top_k in (None, 2):
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path)) + f": .*{reason}"):
            open_store(tmp_path, top_k=top_k)


def test_a_tensor_beside_a_weight_that_nothing_knows_is_refused(tmp_path: Path) -> None:
    """Such as ModelOpt's pre_quant_scale, a factor of the inputs; of the trunk, too."""
    tensors, _ = write_experts(SCHEMES["modelopt"], tmp_path)
    tensors["model.layers.1.self_attn.q_proj.pre_quant_scale"] = np.ones(96, np.float32)
    tensors["model.layers.1.self_attn.k_scale"] = np.ones(1, np.float32)
    save_tensors(tensors, tmp_path)
    with (
        open_store(tmp_path) as store,
        pytest.raises(FormatError, match=r"q_proj.pre_quant_scale' has no meaning in nvfp4"),
    ):
        store.trunk_matrices  # noqa: B018 - what is looked for


def test_layers_and_experts_that_are_not_quantized_stay_as_they_are(tmp_path: Path) -> None:
    """Publishers leave some in bfloat16."""
    tensors, values = write_experts(quantized.fp8(), tmp_path)
    for name in [key for key in tensors if ".layers.0.mlp." in key]:
        array = tensors.pop(name)
        if not name.endswith("_scale_inv"):
            tensors[name] = np.ones(array.shape, ml_dtypes.bfloat16)
    save_tensors(tensors, tmp_path)
    with open_store(tmp_path) as store:
        assert {role.format for role in store.layout.layers[0]} == {""}
        assert {role.format for role in store.layout.layers[1]} == {"fp8[16x32,f32]"}
        assert (experts_of(store, 0, 3)["down"] == 1).all()
        np.testing.assert_array_equal(
            experts_of(store, 1, 3)["down"], expected(values, 1, 3)["down"]
        )


@pytest.mark.parametrize(
    ("scheme", "ending", "bad"),
    [
        ("fp8", "weight_scale_inv", np.nan),
        ("fp8_bf16", "weight_scale_inv", np.inf),
        ("mxfp8", "weight_scale_inv", 255),
        ("int4", "weight_scale", np.nan),
        ("mxfp4", "down_proj_scales", 255),
        ("nvfp4", "weight_scale", np.nan),
        ("nvfp4", "weight_global_scale", np.inf),
        ("nvfp4", "weight_global_scale", 0),
        ("awq", "scales", np.inf),
        ("gptq_ordered", "scales", np.nan),
        ("gptq_ordered", "g_idx", 77),
        ("gptq_ordered", "g_idx", -1),
    ],
)
def test_scales_that_are_no_numbers_fill_no_slot(
    scheme: str, ending: str, bad: float, tmp_path: Path
) -> None:
    """A step that needs them says so, again each time; others go on."""
    tensors, _ = write_experts(SCHEMES[scheme], tmp_path)
    of_experts = (key for key in tensors if key.startswith("model.layers.1.mlp.experts"))
    name = next(key for key in of_experts if key.endswith(ending))
    array = tensors[name]
    array[(0,) * array.ndim] = bad
    save_tensors(tensors, tmp_path)
    spoilt = int(found[1]) if (found := re.search(r"experts\.(\d+)\.", name)) else 0
    with moecache.open(tmp_path, slots=2) as runtime:
        for _ in range(2):
            with (
                pytest.raises(
                    FormatError, match=rf"expert {spoilt} of layer 1: .*(infinite|g_idx)"
                ),
                runtime.lease(1, np.array([spoilt, 3])),
            ):
                pass
        with runtime.lease(1, np.array([1, 2] if spoilt != 1 else [2, 3])):
            pass


@pytest.mark.parametrize(
    ("scheme", "ending", "good", "bad", "said"),
    [
        ("fp8", "weight_scale_inv", 7.59e35, 3e38, "448, times 3e[+]38 .*, and 7.596e[+]35 is the"),
        ("fp8_bf16", "weight_scale_inv", 7.56e35, 7.62e35, "code, 448, times"),
        ("mxfp8", "weight_scale_inv", 246, 247, "times 1.329e[+]36 .* 6.646e[+]35 is"),
        ("channels", "weight_scale", 7.56e35, -3e38, "code, 448, times"),
        ("int4", "weight_scale", 4.2e37, 3.38e38, "code, 8, times 3.376e[+]38 .* 4.237e[+]37 is"),
        ("int8", "weight_scale", 2.6e36, 2.7e36, "code, 128, times"),
        ("int3", "weight_scale", -8.4e37, -8.6e37, "code, 4, times"),
        ("mxfp4", "down_proj_scales", 252, 254, "code, 6, times 1.701e[+]38"),
        ("nvfp4", "weight_global_scale", 8e-36, 7e-36, "number of the whole matrix, 7e-36: "),
        ("modelopt", "weight_scale_2", 1.2e35, 1.3e35, "number of the whole matrix, 1.3e"),
    ],
)
def test_scales_that_make_codes_infinite_fill_no_slot(
    scheme: str, ending: str, good: float, bad: float, said: str, tmp_path: Path
) -> None:
    """As infinite ones do not, whatever the codes; the message has file, expert and scales."""
    tensors, _ = write_experts(SCHEMES[scheme], tmp_path)
    experts, trunk = (
        next((key for key in tensors if key.startswith(path) and key.endswith(ending)), "")
        for path in ("model.layers.1.mlp.experts", "model.layers.1.self_attn.q_proj")
    )
    for scale in (good, bad):
        for name in filter(None, (experts, trunk)):
            # Of NVFP4 all scales are the largest: the number of the matrix decides.
            if name + "_scale" in tensors or scheme in ("nvfp4", "modelopt"):
                tensors[re.sub("(_global_scale|_scale_2)$", "_scale", name)][0] = 448
            tensors[name][(0,) * tensors[name].ndim] = scale
        save_tensors(tensors, tmp_path)
        is_good = scale == good
        with moecache.open(tmp_path, slots=2) as runtime, open_store(tmp_path) as store:
            with (
                nullcontext()
                if is_good
                else pytest.raises(
                    FormatError, match=rf"model.safetensors: expert 0 of layer 1: .*{said}"
                ),
                runtime.lease(1, np.array([0, 3])),
            ):
                pass
            with runtime.lease(1, np.array([1, 2])):
                pass
            for matrix in store.trunk_matrices:
                is_sound = is_good or not trunk.startswith(matrix)
                with nullcontext() if is_sound else pytest.raises(FormatError, match=matrix):
                    assert np.isfinite(store.read_matrix(matrix)).all()


def test_an_fp8_code_that_is_no_number_is_a_value(tmp_path: Path) -> None:
    """The file's own: its row is NaN."""
    tensors, _ = write_experts(SCHEMES["fp8"], tmp_path)
    tensors[EXPERT].view(np.uint8)[5, 7] = 0x7F
    save_tensors(tensors, tmp_path)
    with moecache.open(tmp_path, slots=2) as runtime, runtime.lease(1, np.array([2])):
        pass
    with open_store(tmp_path) as store:
        assert np.argwhere(np.isnan(experts_of(store, 1, 2)["down"])).tolist() == [[5, 7]]


def test_inspect_says_how_a_checkpoint_is_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts, trunk, and what multiplies."""
    for scheme, wanted in (
        (
            "fp8",
            ("quantized with fp8", "trunk: 2 matrices in fp8[16x32,f32]", 'with compute="fast"'),
        ),
        ("int4", ("quantized with compressed-tensors", "trunk: not quantized", "int4[1x32,bf16]")),
        ("gptq_ordered", ("quantized with gptq", "no compute form, so that torch multiplies")),
    ):
        write_experts(SCHEMES[scheme], tmp_path / scheme)
        assert cli.main(["inspect", str(tmp_path / scheme)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for part in wanted:
            assert part in shown


@pytest.mark.parametrize("scheme", ["gptq", "gptq_ordered"])
def test_an_order_of_columns_that_cannot_be_is_found_in_any_expert(
    scheme: str, tmp_path: Path
) -> None:
    """Not in the first alone; and act-order needs one."""
    tensors, _ = write_experts(SCHEMES[scheme], tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.g_idx"
    given = tensors[name]
    tensors[name] = np.ascontiguousarray(given[::-1]) if scheme == "gptq" else given + 1000
    save_tensors(tensors, tmp_path)
    with (
        moecache.open(tmp_path, slots=4) as runtime,
        pytest.raises(FormatError, match=r"layer 1: .*g_idx"),
        runtime.lease(1, np.array([3])),
    ):
        pass
    for key in [key for key in tensors if key.endswith("g_idx")]:
        del tensors[key]
    save_tensors(tensors, tmp_path)
    if scheme == "gptq_ordered":
        with pytest.raises(FormatError, match="has no g_idx beside it"):
            open_store(tmp_path)
    else:
        open_store(tmp_path).close()


def test_what_a_store_does_not_serve_is_no_part_of_the_trunk(tmp_path: Path) -> None:
    """Layers that are left out, and what says something of experts."""
    tensors, _ = write_experts(SCHEMES["gptq"], tmp_path)
    plain = [a for key, a in tensors.items() if ".experts." not in key and ".q_proj." not in key]
    with SafetensorsStore(tmp_path, layers=["model.layers.0.mlp"]) as store:
        assert store.trunk_bytes == sum(a.nbytes for a in plain) + 2 * (2 * 64 * 96)
        assert list(store.trunk_matrices) == [
            f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
        ]
        for read in (store.read_matrix, store.read_parts):
            with pytest.raises(ExpertNotFoundError, match="no quantized matrix 'nope'"):
                read("nope")


def test_a_trunk_without_its_codes_or_scales_is_refused(tmp_path: Path) -> None:
    """By what reads or copies it."""
    tensors, _ = write_experts(SCHEMES["fp8"], tmp_path / "model")
    path = "model.layers.0.self_attn.q_proj.weight"
    for lacking, reason in ((path, "has no weight"), (f"{path}_scale_inv", "has no scale")):
        save_tensors({key: a for key, a in tensors.items() if key != lacking}, tmp_path / "model")
        with pytest.raises(FormatError, match=f"{reason} beside it"):
            packing.pack(tmp_path / "model", tmp_path / "packed")
        assert not (tmp_path / "packed").exists()
