"""Trace: what it takes, what it keeps, and what it makes of a file that lies."""

import copy
import io
import json
import os
import pickle
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from moecache.cache._route_log import RouteLog
from moecache.errors import ConfigError, FormatError, StoreError
from moecache.study import Trace, concatenate, from_log, interleave, load_any
from tests.helpers.examples import num_examples
from tests.helpers.traces import random_trace, traces

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
ROOT = Path(__file__).parents[1]
META = {"num_experts": 8, "top_k": 2}


def write(path: Path, meta: Any = META, **arrays: Any) -> Path:
    """Write an .npz as the format has it, but for what is given."""
    whole: dict[str, Any] = {
        "experts": np.zeros((3, 2, 2), np.int16) + np.array([0, 1], np.int16),
        **arrays,
    }
    if meta is not None:
        whole["meta"] = np.array(meta if isinstance(meta, str) else json.dumps(meta))
    with path.open("wb") as file:
        np.savez_compressed(file, **{k: v for k, v in whole.items() if v is not None})
    return path


def member(content: bytes, shape: str, dtype: str = "'<i2'") -> bytes:
    """Return an .npy file with a header of our own."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def zipped(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write members as they are."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray) -> bytes:
    """Return an array as an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_defaults_are_one_sequence_of_decoded_tokens() -> None:
    """Every row alone; layers are numbered; narrow ids."""
    trace = Trace(np.array([[[0, 1]], [[2, -1]]]), num_experts=4, model="m")

    assert trace.experts.dtype == np.int16
    assert trace.phase.tolist() == [1, 1]
    assert trace.sequence.tolist() == [0, 0]
    assert trace.step.tolist() == [0, 1]
    assert trace.layers.tolist() == [0]
    assert (trace.num_tokens, trace.num_layers, trace.top_k, trace.num_steps) == (2, 1, 2, 2)
    assert trace.metadata == {"model": "m", "top_k": 2}
    assert len(trace.whole_tokens()) == 1


def test_a_trace_cannot_be_changed_through_its_arrays() -> None:
    """It owns what it has: neither its own arrays nor the caller's reach it."""
    given_ids = np.zeros((2, 1, 1), np.int16)
    trace = Trace(given_ids, num_experts=4)
    given_ids[:] = 3

    assert trace.experts.max() == 0
    vectors = (trace.phase, trace.sequence, trace.step, trace.bulk, trace.layers)
    for array in (trace.experts, *vectors):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        trace[1:].experts[0] = 1


def test_a_trace_cannot_be_changed_through_its_names() -> None:
    """Attributes and metadata are read-only, of the parts of a trace too."""
    trace = Trace([[[0]], [[1]]], num_experts=4, model="m")
    for part in (trace, trace[1:], pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)):
        for name in ("experts", "metadata", "num_experts", "note"):
            with pytest.raises(AttributeError, match=f"cannot be changed.*{name}"):
                setattr(part, name, None)
        with pytest.raises(AttributeError, match="cannot be changed"):
            del part.phase
        with pytest.raises(TypeError):
            part.metadata["x"] = object()  # type: ignore[index]
        with pytest.raises(ValueError, match="read-only"):
            part.bulk[0] = 1


@settings(max_examples=num_examples(10))
@given(trace=traces())
def test_copies_and_pickles_are_the_same_trace(trace: Trace) -> None:
    """Also of another process."""
    for other in (copy.copy(trace), copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert other == trace
        assert other.digest == trace.digest


def test_large_models_fit() -> None:
    """Many experts and choices; ids beyond int16."""
    wide = np.arange(64)[None, None]
    assert Trace(wide, num_experts=1024).top_k == 64
    large = Trace(np.array([[[70_000]]]), num_experts=100_000)
    assert (large.experts.dtype, large.experts.item()) == (np.int32, 70_000)


@settings(max_examples=num_examples(40))
@given(trace=traces())
def test_a_saved_trace_is_the_same_when_loaded(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Routing, metadata and digest come back, also of nothing."""
    path = tmp_path_factory.mktemp("trace") / "one.npz"
    trace.save(path)
    loaded = Trace.load(path)

    assert loaded == trace
    assert loaded.digest == trace.digest
    assert [entry.name for entry in path.parent.iterdir()] == ["one.npz"]


def test_which_steps_keep_to_their_share_is_kept(tmp_path: Path) -> None:
    """By default those of several rows; what is said otherwise goes wherever the rows go."""
    ids = np.zeros((5, 1, 1), int)
    usual = Trace(ids, num_experts=2, step=[0, 0, 1, 2, 2])
    trace = Trace(ids, num_experts=2, step=[0, 0, 1, 2, 2], bulk=[0, 0, 1, 1, 1])
    usual.save(tmp_path / "usual.npz")
    trace.save(tmp_path / "said.npz")

    assert usual.bulk.tolist() == [1, 1, 0, 1, 1]
    assert (usual == trace, usual.digest == trace.digest) == (False, False)
    assert Trace(ids, num_experts=2, step=usual.step, bulk=usual.bulk).digest == usual.digest
    for name, stored in (("usual", False), ("said", True)):
        with zipfile.ZipFile(tmp_path / f"{name}.npz") as archive:
            assert ("bulk.npy" in archive.namelist()) == stored
    assert Trace.load(tmp_path / "said.npz") == load_any(tmp_path / "said.npz") == trace
    assert trace[1:].bulk.tolist() == [0, 1, 1, 1]
    assert concatenate([trace, usual]).bulk.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 1, 1]
    assert interleave([trace, trace[:2]]).bulk.tolist() == [1, 1, 1, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="the same for all rows of a step, but is 0 and 1 in st"):
        Trace(ids, num_experts=2, step=usual.step, bulk=[1, 1, 0, 0, 1])
    with pytest.raises(ConfigError, match=r"bulk must be in \[0, 1\]"):
        Trace(ids, num_experts=2, bulk=[2] * 5)


def test_the_digest_is_of_the_routing_alone() -> None:
    """Stable, whatever the metadata; another for any other array."""
    trace = Trace(np.array([[[0, 1]], [[2, 3]]]), num_experts=4)
    same = Trace(trace.experts.astype(np.int64), num_experts=4, model="x")
    others = [
        Trace(trace.experts, num_experts=5),
        Trace(trace.experts[:, :, ::-1], num_experts=4),
        Trace(trace.experts, num_experts=4, phase=[0, 1]),
        Trace(trace.experts, num_experts=4, sequence=[0, 1]),
        Trace(trace.experts, num_experts=4, step=[0, 0]),
        Trace(trace.experts, num_experts=4, layers=[3]),
    ]

    assert same.digest == trace.digest
    assert same != trace
    assert len({other.digest for other in others} | {trace.digest}) == 7
    expected = "07a0dd476a5d1597b95b95f89bea7e2eb73abd3a2f90aaef0fe3eabcb0b6a015"
    assert trace.digest == expected


def test_slices_and_phases_are_parts() -> None:
    """Rows keep their numbers; what is no slice is refused."""
    trace = random_trace(1, num_sequences=3, padding=0.1)

    assert trace[5:9].experts.tolist() == trace.experts[5:9].tolist()
    assert trace[5:9].step.tolist() == trace.step[5:9].tolist()
    assert len(trace.decode()) + len(trace.prefill()) == len(trace)
    assert set(trace.prefill().phase.tolist()) == {0}
    assert (trace.whole_tokens().experts >= 0).all()
    with pytest.raises(TypeError, match="slices"):
        trace[3]  # type: ignore[index]
    with pytest.raises(ConfigError, match="backwards"):
        trace[::-1]


def test_concatenated_traces_stay_apart() -> None:
    """Sequences and steps go on, narrow rows are padded, common metadata stays."""
    one = Trace([[[0, 1]], [[1, 2]]], num_experts=4, step=[7, 7], model="m", seed=1)
    two = Trace([[[3]], [[2]]], num_experts=4, sequence=[5, 5], model="m", seed=2)
    joined = concatenate(trace for trace in [one, two, one])

    assert joined.experts[2].tolist() == [[3, -1]]
    assert joined.sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.step.tolist() == [0, 0, 1, 2, 3, 3]
    assert joined.metadata["model"] == "m"
    assert "seed" not in joined.metadata


def test_interleaved_traces_are_a_batch() -> None:
    """A row of each in turn; a round is a step; a short one leaves."""
    long = Trace([[[0]], [[1]], [[2]]], num_experts=4)
    short = Trace([[[3]]], num_experts=4)
    batch = interleave([long, short])

    assert batch.experts.reshape(-1).tolist() == [0, 3, 1, 2]
    assert batch.sequence.tolist() == [0, 1, 0, 0]
    assert batch.step.tolist() == [0, 0, 1, 2]
    assert batch.num_steps == 3


def test_only_traces_of_one_model_are_joined() -> None:
    """Other experts, other layers, or nothing at all."""
    one = random_trace(0)
    for other in (random_trace(0, num_experts=9), random_trace(0, num_layers=2)):
        with pytest.raises(ConfigError, match="not of one model"):
            concatenate([one, other])
    with pytest.raises(ConfigError, match="no trace"):
        interleave([])


def test_what_is_shown_names_the_model_and_is_escaped() -> None:
    """Text, repr and HTML."""
    trace = Trace([[[0, -1]]], num_experts=4, model="<b>m</b>", license="MIT")

    assert repr(trace) == "<Trace of <b>m</b>: 1 tokens x 1 layers x top-2 of 4 experts>"
    assert "1 of 2 choices" in trace.describe()
    assert "license      MIT" in trace.describe()
    assert "&lt;b&gt;" in trace._repr_html_()
    assert "<b>m" not in trace._repr_html_()


def test_a_log_wider_than_the_model_has_experts_loses_none() -> None:
    """A row of many duplicates keeps its distinct ids."""
    log = RouteLog(1, 2)
    log.record(0, np.array([[0, 0, 0, 1]]))

    assert from_log(log, model="m").experts.tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": [[0, 1]]}, r"shape \[tokens, layers, top_k\]"),
        ({"experts": np.zeros((2, 0, 1), int)}, "at least one layer"),
        ({"experts": [[[0.0, 1.0]]]}, "integers, got float64"),
        ({"experts": [[[np.nan, 1.0]]]}, "integers, got float64"),
        ({"experts": [[[0, 4]]]}, r"token 0, layer 0: expert 4 is not in \[0, 4\)"),
        ({"experts": [[[0, -2]]]}, "expert -2 is not in"),
        ({"experts": np.array([[[2**63]]], np.uint64)}, "expert 9223372036854775808"),
        ({"experts": [[[0, 1]], [[3, 3]]]}, "token 1, layer 0: expert 3 is there twice"),
        ({"experts": [[[0, 1, 2, 3, -1]]]}, "5 experts per token are more than"),
        ({"num_experts": 0}, r"in \[1, 1048576\], got 0"),
        ({"num_experts": 2**40}, "got 1099511627776"),
        ({"num_experts": "4"}, "whole number"),
        ({"num_experts": True}, "whole number"),
        ({"phase": [2]}, r"phase must be in \[0, 1\]"),
        ({"phase": [1, 1]}, "phase has 2 rows, experts has 1"),
        ({"phase": [[1]]}, "phase must be one row"),
        ({"sequence": [-1]}, "sequence must be in"),
        ({"sequence": [0.0]}, "sequence must be one row of integers"),
        ({"sequence": [2**31]}, "sequence must be in"),
        ({"experts": [[[0, 1]]] * 2, "step": [1, 0]}, "never decrease, but 1 is followed by 0"),
        ({"layers": [0, 1]}, "layers has 2 numbers, experts has 1"),
        ({"experts": [[[0, 1]] * 2], "layers": [1, 1]}, "layers must increase"),
        ({"note": object()}, "what JSON can hold"),
        ({"note": float("nan")}, "what JSON can hold"),
        ({"expert_bytes": -1}, "expert_bytes must not be negative"),
        ({"top_k": -2}, "top_k must not be negative"),
    ],
)
def test_a_wrong_argument_says_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    """A ConfigError, which is a ValueError."""
    with pytest.raises(ConfigError, match=message):
        Trace(**{"experts": [[[0, 1]]], "num_experts": 4, **arguments})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"experts": None}, "has no array 'experts'"),
        ({"experts": np.zeros((3, 2), np.int16)}, "shape"),
        ({"experts": np.zeros((3, 2, 2), np.float32)}, "integers, got float32"),
        ({"experts": np.full((3, 2, 1), 8, np.int16)}, "expert 8 is not in"),
        ({"experts": np.full((3, 2, 1), -2, np.int16)}, "expert -2"),
        ({"experts": np.zeros((3, 2, 2), np.int16)}, "expert 0 is there twice"),
        ({"experts": np.array([[["a"]]])}, "integers, got <U1"),
        ({"experts": np.array([[[object()]]])}, "pickles and records are not loaded"),
        ({"experts": np.zeros((3, 2, 1), "i2,i2")}, "pickles and records"),
        ({"phase": np.zeros(2, np.uint8)}, "phase has 2 rows, experts has 3"),
        ({"phase": np.full(3, 7, np.uint8)}, "phase must be in"),
        ({"seq": np.array([0, -1, 0], np.int32)}, "sequence must be in"),
        ({"step": np.array([2, 1, 0], np.int32)}, "step must never decrease"),
        ({"layers": np.array([0], np.int16)}, "layers has 1 numbers"),
        ({"layers": np.array([0, np.nan])}, "layers must be one row of integers"),
        ({"meta": None}, "has no array 'meta'"),
        ({"meta": "{"}, "meta is not JSON"),
        ({"meta": "[" * 100_000}, "meta is not JSON"),
        ({"meta": "[1]"}, "must be a JSON object, not list"),
        ({"meta": {"top_k": 2}}, "does not say num_experts"),
        ({"meta": {"num_experts": -3}}, r"in \[1, 1048576\], got -3"),
        ({"meta": {"num_experts": 8, "version": 2}}, "version 2, this moecache knows 1; upgrade"),
        ({"meta": {"num_experts": 8, "T": 4}}, "meta says T is not 3"),
        ({"meta": {"num_experts": 8, "top_k": -1}}, "top_k must not be negative"),
        ({"meta": {"num_experts": 8, "phase": 1}}, "may not be called 'phase'"),
        ({"meta": '{"num_experts": 8, "x": NaN}'}, "what JSON can hold"),
    ],
)
def test_a_file_that_lies_is_a_format_error(
    arrays: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The message has the file and what is wrong."""
    meta = arrays.pop("meta", META)
    path = write(tmp_path / "lies.npz", META if meta is None else meta, **arrays)
    if meta is None:
        path = write(path, **arrays, meta=None)
    with pytest.raises(FormatError, match=message) as caught:
        Trace.load(path)
    assert "lies.npz" in str(caught.value)


def test_sizes_are_compared_before_anything_is_allocated(tmp_path: Path) -> None:
    """Headers that ask for terabytes, more than is there, less, or the same twice."""
    meta = ("meta.npy", npy(np.array(json.dumps(META))))
    cases = [
        ([("experts.npy", member(b"", "(4000000000, 1000, 64)"))], "which takes 465.7 TiB, more"),
        ([("experts.npy", member(b"", "(10, 2, 2)"))], "needs 80 bytes by its header"),
        ([("experts.npy", member(bytes(300), "(10, 2, 2)"))], "goes on after the 80 bytes"),
        ([("experts.npy", member(bytes(8), "(-1, -2, 2)"))], "has the shape"),
        ([("experts.npy", b"\x93NUMPY\x03\x00" + bytes(20))], "version"),
        ([("experts.npy", b"nothing of the kind")], "is no .npy file"),
        ([("experts.npy", member(bytes(8), "(2, 1, 2)", "__import__('os')"))], "header"),
    ]
    for members, message in cases:
        path = zipped(tmp_path / "size.npz", [*members, meta])
        with pytest.raises(FormatError, match=message):
            Trace.load(path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = zipped(tmp_path / "twice.npz", [meta, meta])
    with pytest.raises(FormatError, match="has 'meta' twice"):
        Trace.load(path)


def test_a_zip_bomb_is_refused(tmp_path: Path) -> None:
    """100 MB of zeros in 100 KB: more than a file of that size may have."""
    content = member(bytes(100 * 2**20), f"({50 * 2**20}, 1, 1)")
    path = zipped(tmp_path / "bomb.npz", [("experts.npy", content)])

    assert path.stat().st_size < 2**18
    with pytest.raises(FormatError, match=r"takes 900\.0 MiB, more than the 64\.0 MiB"):
        Trace.load(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2, 1",
        b"{'descr': (), 'fortran_order': False, 'shape': (3, 2, 1)}",
        b"{'descr': '<i3', 'fortran_order': False, 'shape': (3, 2, 1)}",
        b"{'descr': '<i2', 'fortran_order': 7, 'shape': (3, 2, 1)}",
        b"{'descr': '<i2', 'fortran_order': False, 'shape': (True, True, True)}",
        b"{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2.0, 1)}",
        b"{'descr': '<i2', 'fortran_order': False, 'shape': %a}" % ((1,) * 100,),
        b"{'descr': '<i2', 'fortran_order': False, 'shape': (0, 1%s, 2)}" % (b"0" * 20),
        b"{'descr': '<i2', 'fortran_order': False, 'shape': (0, 4294967296, 4294967296)}",
        b"{'descr': '|S0', 'fortran_order': False, 'shape': (1%s,)}" % (b"0" * 12),
        b"{'descr': '<U999999999', 'fortran_order': False, 'shape': ()}",
        b"{'descr': '<i2', 'fortran_order': False}",
        b"(" * 9000,
        b"\x00\xff",
        b"",
    ],
)
def test_a_damaged_array_header_is_a_format_error(header: bytes, tmp_path: Path) -> None:
    """Whatever it says; nothing that NumPy or Python raises gets out."""
    for version, layout in ((b"\x01\x00", "<H"), (b"\x02\x00", "<I")):
        content = b"\x93NUMPY" + version + struct.pack(layout, len(header)) + header + bytes(12)
        path = zipped(tmp_path / "header.npz", [("experts.npy", content)])
        with pytest.raises(FormatError, match=r"header\.npz: experts"):
            Trace.load(path)


def test_letters_that_there_are_none_for_are_a_format_error(tmp_path: Path) -> None:
    """NumPy makes a str of any number, which then is a SystemError somewhere."""
    meta = npy(np.array(json.dumps({**META, "model": "m"}))).replace(b"m\0\0\0", b"m\0\0\x08")
    members = [("experts.npy", npy(np.zeros((3, 2, 1), np.int16))), ("meta.npy", meta)]
    path = zipped(tmp_path / "letters.npz", members)
    with pytest.raises(FormatError, match=r"meta is not JSON: .*utf-32"):
        Trace.load(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_what_numpy_writes_is_decompressed(method: int, tmp_path: Path) -> None:
    """Other methods raise errors of their own when damaged, and take memory as they like."""
    path = tmp_path / "method.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("experts.npy", npy(np.zeros((3, 2, 1), np.int16)))
        place = archive.infolist()[0].header_offset + 45
    content = bytearray(path.read_bytes())
    content[place : place + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"method\.npz: experts is compressed by method"):
        Trace.load(path)


def test_metadata_may_have_any_name(tmp_path: Path) -> None:
    """Also that of the parameter which every method has."""
    trace = load_any(write(tmp_path / "self.npz", {**META, "self": 1}, model="m"))

    assert trace.metadata["self"] == 1
    assert Trace(trace.experts, num_experts=8, **trace.metadata).metadata == trace.metadata


def test_a_damaged_file_is_a_format_error_wherever_it_is_cut(tmp_path: Path) -> None:
    """Truncated anywhere, or with any byte changed: an error or, by luck, a trace."""
    path = tmp_path / "cut.npz"
    random_trace(3).save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=r"cut\.npz"):
            Trace.load(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 150):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        with suppress(FormatError):
            Trace.load(path)


def test_files_that_cannot_be_read_or_written_are_store_errors(tmp_path: Path) -> None:
    """Missing, a directory, no place; what was there stays there."""
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        Trace.load(tmp_path / "none.npz")
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        Trace.load(tmp_path)
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        random_trace(0).save(tmp_path / "no" / "such.npz")
    (tmp_path / "taken.npz").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        random_trace(0).save(tmp_path / "taken.npz")
    assert os.listdir(tmp_path) == ["taken.npz"]


def test_the_shipped_trace_is_whole() -> None:
    """Several sequences of the tiny model, prompts included."""
    trace = Trace.load(ROOT / "examples" / "traces" / "tiny_moe.npz")

    assert repr(trace) == "<Trace of tiny_moe: 568 tokens x 8 layers x top-4 of 32 experts>"
    assert len(np.unique(trace.sequence)) == 4
    assert trace.whole_tokens() == trace
    assert trace.num_steps == 4 * 120


@pytest.mark.skipif(not SHARED.is_dir(), reason="no traces of others here")
def test_the_traces_of_others_load_as_they_are() -> None:
    """Shapes as their README has them."""
    shapes = {}
    for path in SHARED.glob("*.npz"):
        trace = Trace.load(path)
        shapes[path.stem] = (*trace.experts.shape, trace.num_experts)
        assert trace.metadata["license"] in {"MIT", "Apache-2.0"}

    assert shapes["nvmoe-olmoe"] == (897, 16, 8, 64)
    assert shapes["bigmoe-gptoss"] == (149, 36, 2, 128)
    assert len(shapes) == 5
