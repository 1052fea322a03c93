"""Experts read from checkpoint directories."""

import errno
import gc
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import ConfigError, ExpertNotFoundError, StoreError
from moecache.stores import ExpertStore, SafetensorsStore
from tests.helpers.checkpoints import (
    FAMILIES,
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    Checkpoint,
    empty_parts,
    read_expert,
    same_bits,
    same_parts,
    write_checkpoint,
    write_raw,
)

FILE = "model.safetensors"


def _same_everywhere(store: SafetensorsStore, checkpoint: Checkpoint) -> bool:
    return all(
        same_parts(read_expert(store, layer, expert), parts)
        for layer, experts in enumerate(checkpoint.experts)
        for expert, parts in enumerate(experts)
    )


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Checkpoint:
    return write_checkpoint(tmp_path / "small", num_layers=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_has_the_roles_of_the_file(tmp_path: Path, family: str) -> None:
    """Shapes and dtypes are the stored ones, dense layers are left out."""
    checkpoint = write_checkpoint(tmp_path, family)

    with SafetensorsStore(tmp_path) as store:
        layout = store.layout
        assert isinstance(store, ExpertStore)

    assert (layout.num_layers, layout.num_experts, layout.top_k) == (NUM_LAYERS, NUM_EXPERTS, TOP_K)
    for roles in layout.layers:
        assert {role.name: (role.shape, role.dtype) for role in roles} == {
            name: (array.shape, array.dtype) for name, array in checkpoint.experts[0][0].items()
        }


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_stand_in_natural_order(tmp_path: Path, family: str) -> None:
    """Layer 10 comes after layer 9, and layer 0 without experts is not there."""
    checkpoint = write_checkpoint(tmp_path, family)

    with SafetensorsStore(tmp_path) as store:
        names = list(store.layout.layer_names)

    assert names == checkpoint.layer_names


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_read_bit_for_bit(tmp_path: Path, family: str, num_shards: int) -> None:
    """Sharded or not, also where a border between files splits an expert."""
    checkpoint = write_checkpoint(tmp_path, family, num_shards=num_shards)

    with SafetensorsStore(tmp_path) as store:
        assert _same_everywhere(store, checkpoint)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_buffer_takes_the_roles_one_after_the_other(
    tmp_path: Path, family: str, num_shards: int
) -> None:
    """In the layout's order and without gaps."""
    checkpoint = write_checkpoint(tmp_path, family, num_layers=2, num_shards=num_shards)

    with SafetensorsStore(tmp_path) as store:
        for expert in range(NUM_EXPERTS):
            buffer = np.empty(store.layout.expert_bytes(1), np.uint8)
            store.read_into(1, expert, buffer)
            parts = checkpoint.experts[1][expert]
            expected = b"".join(parts[role.name].tobytes() for role in store.layout.layers[1])
            assert buffer.tobytes() == expected


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_the_bytes_of_the_file(tmp_path: Path, family: str, num_shards: int) -> None:
    """Read-only; gate and up stand alone where they do not adjoin in the file."""
    checkpoint = write_checkpoint(tmp_path, family, num_layers=2, num_shards=num_shards)

    with SafetensorsStore(tmp_path) as store:
        for layer, experts in enumerate(checkpoint.experts):
            for expert, parts in enumerate(experts):
                views = store.view(layer, expert)
                assert not any(view.flags.writeable for view in views.values())
                for end in ("", "_scale_inv"):
                    if f"gate{end}" in views:
                        pieces = [views.pop(f"gate{end}"), views.pop(f"up{end}")]
                        views[f"gate_up{end}"] = np.concatenate(pieces)
                assert same_parts(views, parts)


def test_gate_and_up_that_adjoin_are_one_view(small: Checkpoint) -> None:
    """Such as in the files that the safetensors library sorts by name."""
    with SafetensorsStore(small.path) as store:
        assert set(store.view(0, 0)) == {"gate_up", "down"}


@pytest.mark.parametrize(("family", "num_calls"), [("qwen", 1), ("mixtral", 1), ("granite", 2)])
def test_tensors_that_adjoin_are_read_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_calls: int
) -> None:
    """An expert in one place costs one system call, whatever its roles."""
    checkpoint = write_checkpoint(tmp_path, family, num_layers=2)
    calls: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return preadv(descriptor, buffers, offset)

    with SafetensorsStore(tmp_path) as store:
        monkeypatch.setattr(os, "preadv", counted)
        parts = read_expert(store, 1, 10)

    assert same_parts(parts, checkpoint.experts[1][10])
    assert len(calls) == num_calls


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_regions_cover_exactly_the_bytes_of_the_experts(
    tmp_path: Path, family: str, num_shards: int
) -> None:
    """No byte twice, none of the trunk, none missing."""
    write_checkpoint(tmp_path, family, num_layers=2, num_shards=num_shards)

    with SafetensorsStore(tmp_path) as store:
        layout, regions = store.layout, sorted(store.regions())
        views = [store.view(y, e) for y in range(2) for e in range(NUM_EXPERTS)]
        assert sum(nbytes for _, nbytes in regions) == layout.total_bytes
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(regions))
        for view in (array for parts in views for array in parts.values()):
            address = view.ctypes.data
            assert any(a <= address and address + view.nbytes <= a + n for a, n in regions)


def test_regions_of_some_layers_are_theirs_alone(small: Checkpoint) -> None:
    """In the order asked for; a layer that is not there is a ValueError."""
    with SafetensorsStore(small.path) as store:
        assert store.regions([1, 0]) == store.regions([1]) + store.regions([0])
        assert sum(n for _, n in store.regions([1])) == store.layout.expert_bytes(1) * NUM_EXPERTS
        for layer in (-1, 2):
            with pytest.raises(ValueError, match=f"layer {layer}"):
                store.regions([layer])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_any_tensor_can_be_read_by_its_name(tmp_path: Path, num_shards: int) -> None:
    """The trunk's too, as a copy the caller owns."""
    checkpoint = write_checkpoint(tmp_path, num_layers=2, num_shards=num_shards)

    with SafetensorsStore(tmp_path) as store:
        assert set(store.tensor_names) == set(checkpoint.tensors)
        assert all(same_bits(store.read_tensor(n), a) for n, a in checkpoint.tensors.items())
        assert store.read_tensor("model.embed_tokens.weight").flags.writeable
        with pytest.raises(ExpertNotFoundError, match=r"no tensor 'lm_head\.weight'"):
            store.read_tensor("lm_head.weight")


def test_chosen_layers_are_served_alone(small: Checkpoint) -> None:
    """In the order they run, whatever the order of the names; what there is not is an error."""
    first, second = small.layer_names
    with SafetensorsStore(small.path, layers=[second]) as store:
        assert list(store.layout.layer_names) == [second]
        parts = {role.name: np.empty(role.shape, role.dtype) for role in store.layout.layers[0]}
        store.read_into(0, 3, parts)
        assert all(same_bits(parts[name], array) for name, array in small.experts[1][3].items())
        assert store.sources(0)["gate_up", 0].startswith(f"{second}.experts.0.")
    with SafetensorsStore(small.path, layers={second, first}) as store:
        assert list(store.layout.layer_names) == [first, second]
    with pytest.raises(ConfigError, match=r"no layer 'model\.layers\.9\.mlp' with experts"):
        SafetensorsStore(small.path, layers=["model.layers.9.mlp"])


def test_one_file_is_a_checkpoint(small: Checkpoint) -> None:
    """With the config.json beside it."""
    with SafetensorsStore(small.path / FILE) as store:
        assert store.layout.top_k == TOP_K
        assert _same_everywhere(store, small)


@pytest.mark.parametrize("expert", [0, 5, 9])
def test_a_tensor_at_an_odd_offset_is_read_and_viewed(tmp_path: Path, expert: int) -> None:
    """Files of other writers align nothing."""
    data = np.arange(10 * 6, dtype=np.float32)
    header = {
        f"l.0.experts.{e}.up_proj.weight": {
            "dtype": "F32",
            "shape": [2, 3],
            "data_offsets": [1 + 24 * e, 25 + 24 * e],
        }
        for e in range(10)
    }
    for pad in range(4):
        text = json.dumps(header).encode() + b" " * pad
        path = write_raw(tmp_path / f"{pad}.safetensors", text, b"\0" + data.tobytes())
        with SafetensorsStore(path) as store:
            expected = data[6 * expert : 6 * expert + 6].reshape(2, 3)
            assert same_bits(read_expert(store, 0, expert)["up"], expected)
            assert same_bits(store.view(0, expert)["up"], expected)


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (2, 0), (99, 0), (0, -1), (0, NUM_EXPERTS)])
def test_an_expert_that_is_not_there_is_a_value_error(
    small: Checkpoint, layer: int, expert: int
) -> None:
    """From every method, with the id in the message."""
    with SafetensorsStore(small.path) as store:
        out = empty_parts(store, 0)
        buffer = np.empty(store.layout.expert_bytes(0), np.uint8)
        calls: list[Callable[[], object]] = [
            lambda: store.view(layer, expert),
            lambda: store.prefetch(layer, [expert]),
            lambda: store.read_into(layer, expert, out),
            lambda: store.read_into(layer, expert, buffer),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"{layer if expert == 0 else expert} is not in"):
                call()


def _flawed_destinations(store: SafetensorsStore) -> list[tuple[Any, str]]:
    good, nbytes = empty_parts(store, 0), store.layout.expert_bytes(0)
    down = good["down"]
    frozen, frozen_buffer = down.copy(), np.empty(nbytes, np.uint8)
    frozen.flags.writeable = frozen_buffer.flags.writeable = False
    return [
        ({"gate_up": good["gate_up"]}, "lacks role 'down'"),
        (good | {"down": np.empty((8, 5), down.dtype)}, "'down' of layer 0 is 64 bytes"),
        (good | {"down": np.empty(down.shape, np.int16)}, "int16"),
        (good | {"down": np.empty((8, 8), down.dtype)[:, ::2]}, "contiguous"),
        (good | {"down": frozen}, "writable"),
        (np.empty(nbytes - 1, np.uint8), f"{nbytes} bytes"),
        (np.empty(nbytes // 2, np.uint16), "uint16"),
        (np.empty(2 * nbytes, np.uint8)[::2], "contiguous"),
        (frozen_buffer, "writable"),
    ]


@pytest.mark.parametrize("case", range(9))
def test_a_destination_that_does_not_fit_is_a_value_error(small: Checkpoint, case: int) -> None:
    """The message says what was needed and what was given."""
    with SafetensorsStore(small.path) as store:
        out, words = _flawed_destinations(store)[case]
        with pytest.raises(ValueError, match=re.escape(words)):
            store.read_into(0, 0, out)


def test_plain_bytes_may_be_given_for_a_role(small: Checkpoint) -> None:
    """Pools hand out uint8 rows for types NumPy does not know."""
    with SafetensorsStore(small.path) as store:
        out = {role.name: np.empty(role.nbytes, np.uint8) for role in store.layout.layers[0]}
        store.read_into(0, 3, out)

    assert all(out[n].tobytes() == a.tobytes() for n, a in small.experts[0][3].items())


def test_a_closed_store_refuses_everything(small: Checkpoint) -> None:
    """Closing twice is no error, and the layout stays readable."""
    store = SafetensorsStore(small.path)
    out = empty_parts(store, 0)
    store.close()
    store.close()

    calls: list[Callable[[], object]] = [
        lambda: store.read_into(0, 0, out),
        lambda: store.view(0, 0),
        store.regions,
        lambda: store.prefetch(0, [0]),
        lambda: store.read_tensor("model.embed_tokens.weight"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="closed"):
            call()
    assert store.layout.num_layers == 2


def test_views_outlive_the_store(small: Checkpoint) -> None:
    """The mapping goes with its last view."""
    store = SafetensorsStore(small.path)
    views = store.view(1, 11)
    store.close()
    del store
    gc.collect()

    assert same_parts(views, small.experts[1][11])


def test_prefetch_is_a_hint_that_never_fails(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that refuses is ignored, and a file cut short as well."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with SafetensorsStore(small.path) as store:
        store.prefetch(0, [])
        store.prefetch(0, [0, 0, 11])
        store.prefetch(1, list(np.arange(NUM_EXPERTS)))
        os.truncate(small.path / FILE, 10)
        store.prefetch(0, range(NUM_EXPERTS))
        monkeypatch.setattr(os, "posix_fadvise", refuse)
        store.prefetch(0, range(NUM_EXPERTS))
