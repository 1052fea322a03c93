"""Experts found among the tensors of a checkpoint, and checkpoints that are damaged."""

import json
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.stores import SafetensorsStore
from tests.helpers.checkpoints import write_checkpoint, write_raw

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"
PIECES = ("gate_proj", "up_proj", "down_proj")


def _tensors(num_layers: int = 2, num_experts: int = 3) -> dict[str, np.ndarray]:
    return {
        EXPERT.format(layer, expert, piece): np.zeros((2, 2), np.float32)
        for layer in range(num_layers)
        for expert in range(num_experts)
        for piece in PIECES
    }


def _save(directory: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def _refuse(path: Path, error: type[StoreError] = FormatError) -> str:
    with pytest.raises(error) as caught:
        SafetensorsStore(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def _sharded(tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, str]]:
    write_checkpoint(tmp_path, num_layers=1, num_shards=2)
    document = json.loads((tmp_path / INDEX).read_text())
    document["weight_map"] |= changes
    (tmp_path / INDEX).write_text(json.dumps(document))
    return tmp_path, document["weight_map"]


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/m.safetensors",
        "..",
        ".",
        "",
        "./m",
        7,
        None,
        ["m"],
        "a\0b",
        "\ud800",
        "x" * 300,
    ],
    ids=range(13),
)
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, shard: object) -> None:
    """Names with a path in them, and names no file can have, are refused."""
    (tmp_path / "sub").mkdir()
    for file in (tmp_path / "sub/m.safetensors", tmp_path.parent / "secret.safetensors"):
        save_file(_tensors(), file)
    path, _ = _sharded(tmp_path, x=shard)

    assert INDEX in _refuse(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """The message has the index and the file."""
    path, weight_map = _sharded(tmp_path)
    shard = max(weight_map.values())
    (path / shard).unlink()

    message = _refuse(path)

    assert INDEX in message
    assert f"shard {shard!r} is missing" in message


def test_a_tensor_that_is_not_in_its_shard_is_named(tmp_path: Path) -> None:
    """As after a download of mixed versions."""
    path, weight_map = _sharded(tmp_path, lost="model-00001-of-00002.safetensors")

    assert "tensor 'lost' is not in its shard" in _refuse(path)
    name = "model.embed_tokens.weight"
    _sharded(tmp_path, **{name: max(weight_map.values())})
    assert f"tensor {name!r} is not in its shard" in _refuse(path)


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path: Path) -> None:
    """With an index, the index decides."""
    for file in ("a.safetensors", "b.safetensors"):
        save_file(_tensors(), tmp_path / file)

    message = _refuse(tmp_path)

    assert "b.safetensors" in message
    assert "is also in a.safetensors" in message
    document = {"weight_map": dict.fromkeys(_tensors(), "b.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(document))
    with SafetensorsStore(tmp_path) as store:
        assert store.layout.total_experts == 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        "{}",
        '{"weight_map": null}',
        "[" * 100_000,
        "\xff",
    ],
    ids=range(9),
)
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the index, not a shard."""
    _save(tmp_path, _tensors())
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))

    assert INDEX in _refuse(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "nope", "[" * 100_000], ids=range(4))
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    """The message names config.json."""
    (_save(tmp_path, _tensors()) / "config.json").write_text(text)

    assert "config.json" in _refuse(tmp_path)


def test_what_is_no_checkpoint_is_a_store_error(tmp_path: Path) -> None:
    """A missing path and a directory without files say what is wrong."""
    assert "no such file" in _refuse(tmp_path / "nowhere", StoreError)
    assert "no .safetensors file" in _refuse(tmp_path, StoreError)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """The message names the file, not only the directory."""
    path, weight_map = _sharded(tmp_path)
    shard = max(weight_map.values())
    os.truncate(path / shard, (path / shard).stat().st_size - 1)

    assert shard in _refuse(path)


@pytest.mark.parametrize("piece", PIECES)
def test_a_missing_expert_is_named(tmp_path: Path, piece: str) -> None:
    """One hole among the numbers of any projection makes a checkpoint incomplete."""
    tensors = _tensors()
    del tensors[EXPERT.format(1, 1, piece)]

    message = _refuse(_save(tmp_path, tensors))

    assert "'model.layers.1.mlp'" in message
    assert "none with number 1 " in message


def test_a_missing_last_expert_of_one_projection_is_refused(tmp_path: Path) -> None:
    """Projections of one layer have the same number of experts."""
    tensors = _tensors()
    del tensors[EXPERT.format(1, 2, "up_proj")]

    message = _refuse(_save(tmp_path, tensors))

    assert "one of 2 experts" in message
    assert "one of 3" in message


def test_layers_with_different_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    """The message has both numbers and a tensor of each."""
    few = {name.replace("layers.0", "layers.5"): a for name, a in _tensors(1, 2).items()}

    message = _refuse(_save(tmp_path, _tensors() | few))

    assert "model.layers.5" in message
    assert "one of 2 experts" in message
    assert "must have the same number" in message


@pytest.mark.parametrize("piece", PIECES)
def test_a_layer_that_lacks_a_projection_is_refused(tmp_path: Path, piece: str) -> None:
    """What every other layer has is missing, so the checkpoint is incomplete."""
    tensors = {
        name: array
        for name, array in _tensors(3).items()
        if not ("layers.1" in name and piece in name)
    }

    assert "model.layers.1" in _refuse(_save(tmp_path, tensors))


@pytest.mark.parametrize("flaw", [np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float16)])
def test_gate_and_up_that_do_not_fit_together_are_refused(tmp_path: Path, flaw: np.ndarray) -> None:
    """They become one matrix, so columns and dtype must agree."""
    tensors = {name: flaw if "up_proj" in name else a for name, a in _tensors().items()}

    message = _refuse(_save(tmp_path, tensors))

    assert "gate and up of layer 'model.layers.0.mlp' do not fit together" in message
    assert str(list(flaw.shape)) in message


def test_experts_of_one_layer_must_be_alike(tmp_path: Path) -> None:
    """A slot has one shape for all experts of a layer."""
    name = EXPERT.format(0, 1, "down_proj")

    message = _refuse(_save(tmp_path, _tensors() | {name: np.zeros((3, 2), np.float32)}))

    assert name in message
    assert "[3, 2]" in message


def test_layers_of_different_widths_are_accepted(tmp_path: Path) -> None:
    """Every layer has its own shapes."""
    wide = {
        name.replace("layers.0", "layers.9"): np.ones((4, 4), np.float32) for name in _tensors(1)
    }

    with SafetensorsStore(_save(tmp_path, _tensors() | wide)) as store:
        assert [store.layout.expert_bytes(layer) for layer in range(3)] == [48, 48, 192]


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.mlp.experts.00.up_proj.weight",
        "model.layers.0.mlp.experts.2.w3.weight",
        "model.layers.0.mlp.experts.up_proj",
    ],
)
def test_an_expert_under_two_names_is_refused(tmp_path: Path, extra: str) -> None:
    """Nothing says which of the two is right."""
    shape = (3, 2, 2) if extra.endswith("proj") else (2, 2)

    message = _refuse(_save(tmp_path, _tensors() | {extra: np.ones(shape, np.float32)}))

    assert "are the same experts" in message


@pytest.mark.parametrize("shape", [(), (0, 2, 2)])
def test_a_stack_without_experts_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A scalar and an empty axis are no experts."""
    tensors = {"model.layers.0.mlp.experts.down_proj": np.zeros(shape, np.float32)}

    assert "no stack of experts" in _refuse(_save(tmp_path, tensors))


@pytest.mark.parametrize("num_experts", [10**7, 2**62])
def test_a_stack_that_claims_countless_empty_experts_costs_no_memory(
    tmp_path: Path, num_experts: int
) -> None:
    """Zero bytes per expert allow any number of them in a small file."""
    entry = {"dtype": "F32", "shape": [num_experts, 0], "data_offsets": [0, 0]}
    path = write_raw(tmp_path / "m.safetensors", {"l.0.experts.down_proj": entry})

    tracemalloc.start()
    try:
        _refuse(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def _write_layers(path: Path, layers: range, name: str = "l.{}.experts.0.w1.weight") -> Path:
    """Write a file of so many layers, of one expert with one byte each."""
    entry = '"{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}}'
    entries = [
        entry.format(name.format(layer), place, place + 1) for place, layer in enumerate(layers)
    ]
    return write_raw(path, f"{{{','.join(entries)}}}".encode(), bytes(len(layers)))


def test_more_layers_than_any_model_has_cost_nothing(tmp_path: Path) -> None:
    """They are counted in the text, before objects are made of it."""
    path = _write_layers(tmp_path / "m.safetensors", range(100_000))
    tracemalloc.start()
    try:
        assert "experts of more than 4096 layers" in _refuse(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        *("l.{}.experts.0.w1.weight", "l.{}.experts.w1", "l.{}.block_sparse_moe.experts.0.w1"),
        *("l.{}.block_sparse_moe.input_linear.weight", "l.{}\\u002eexperts.0.w1.weight"),
        "l.{}.moe.gate_proj.weight",
        "l" * 600 + ".{}.experts.0.w1.weight",
    ],
)
def test_layers_are_counted_in_every_form_of_names(tmp_path: Path, name: str) -> None:
    """Exactly: 4096 are read."""
    path = _write_layers(tmp_path / "most.safetensors", range(4096), name)
    with SafetensorsStore(path) as store:
        assert store.layout.num_layers == 4096
    path = _write_layers(tmp_path / "more.safetensors", range(4097), name)
    assert "experts of more than 4096 layers" in _refuse(path)


def test_layers_are_counted_over_all_files(tmp_path: Path) -> None:
    """And in an index."""
    _write_layers(tmp_path / "a.safetensors", range(3000))
    _write_layers(tmp_path / "b.safetensors", range(3000, 6000))
    assert "experts of more than 4096 layers" in _refuse(tmp_path)
    names = {f"l.{layer}.experts.0.w1.weight": "a.safetensors" for layer in range(4097)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert f"{index}: has experts of more than 4096 layers" in _refuse(tmp_path)


@pytest.mark.parametrize("name", ["l.{}.experts.0.w1.weight", "l.0.experts.{}.w1.weight"])
def test_names_with_thousands_of_digits_do_no_harm(tmp_path: Path, name: str) -> None:
    """They sort as numbers or are no experts, and never reach int()."""
    with SafetensorsStore(_save(tmp_path, {name.format("9" * 5000): np.zeros(2)})) as store:
        assert store.layout.total_experts in (0, 1)


def test_long_names_are_cut_in_messages(tmp_path: Path) -> None:
    """Those of layers, tensors and shards, and figures of thousands of digits."""
    long = "l" * 100_000
    _save(tmp_path, {f"{long}.experts.1.w1.weight": np.zeros(2)})
    assert len(_refuse(tmp_path)) < 1000
    (tmp_path / "config.json").write_text(f'{{"num_experts_per_tok": {"9" * 4000}}}')
    _save(tmp_path, {f"{long}.experts.0.w1.weight": np.zeros(2)})
    assert len(_refuse(tmp_path)) < 1000
    for name, shard in ((long, f'"{long}/"'), ("w", f"{'[' * 900}{']' * 900}")):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(f'{{"weight_map": {{"{name}": {shard}}}}}')
        assert len(_refuse(tmp_path)) < 1000


def test_types_below_a_byte_are_refused_for_experts_alone(tmp_path: Path) -> None:
    """A trunk may have them."""
    entry = {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}
    path = tmp_path / "m.safetensors"

    with SafetensorsStore(write_raw(path, {"trunk": entry}, b"\0\0")) as store:
        assert store.layout.total_experts == 0
    message = _refuse(write_raw(path, {"l.experts.0.w1.weight": entry}, b"\0\0"))

    assert "F4, which is not supported" in message


@pytest.mark.parametrize(
    ("config", "top_k"),
    [
        ({"num_experts_per_tok": 2}, 2),
        ({"moe_topk": 3}, 3),
        ({"moe_topk": [1, 3, 2]}, 3),
        ({"text_config": {"num_experts_per_tok": 2}}, 2),
        ({"ffn_config": {"moe_top_k": 2}}, 2),
        ({"num_experts_per_tok": 1, "text_config": {"num_experts_per_tok": 2}}, 1),
        ({"num_experts_per_tok": None, "text_config": {"num_experts_per_tok": 2}}, 2),
        ({"num_experts_per_tok": 0}, 0),
        ({"num_experts_per_tok": -1}, 0),
        ({"num_experts_per_tok": True}, 0),
        ({"num_experts_per_tok": "2"}, 0),
        ({"num_experts_per_tok": []}, 0),
        ({"num_experts_per_tok": [2, None]}, 0),
        ({"text_config": [2]}, 0),
        ({}, 0),
    ],
)
def test_top_k_comes_from_the_config(tmp_path: Path, config: dict[str, Any], top_k: int) -> None:
    """Under the names of the families, one level down too; of a list the largest."""
    (_save(tmp_path, _tensors()) / "config.json").write_text(json.dumps(config))

    with SafetensorsStore(tmp_path) as store:
        assert store.layout.top_k == top_k
        assert store.config == config


def test_the_argument_beats_the_config(tmp_path: Path) -> None:
    """And stands in for a config that is not there."""
    _save(tmp_path, _tensors())
    with SafetensorsStore(tmp_path, top_k=1) as store:
        assert store.layout.top_k == 1
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 3}')
    with SafetensorsStore(tmp_path, top_k=1) as store:
        assert store.layout.top_k == 1


def test_more_experts_per_token_than_there_are_is_refused(tmp_path: Path) -> None:
    """The message says where the figure is from."""
    (_save(tmp_path, _tensors()) / "config.json").write_text('{"num_experts_per_tok": 4}')

    assert "config.json: top-4 of layers that have 3 experts is impossible" in _refuse(tmp_path)


@pytest.mark.parametrize("top_k", [-1, 4])
def test_an_impossible_argument_is_not_blamed_on_the_config(tmp_path: Path, top_k: int) -> None:
    """It is the caller's ConfigError."""
    with pytest.raises(ConfigError, match=f"top-{top_k}"):
        SafetensorsStore(_save(tmp_path, _tensors()), top_k=top_k)
