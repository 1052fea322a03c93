"""Headers of GGUF files: what they may say, and lies, refused in bounded time and memory."""

import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moecache.errors import FormatError, StoreError
from moecache.stores import GgufStore, open_store
from tests.helpers.gguf_files import string, u32, write_raw

F32, Q8_0 = 0, 8
STRING, ARRAY = 8, 9
# One tensor of 3 x 2 numbers: 24 bytes.
TENSOR = ("w", [2, 3], F32, 0)
DATA = np.arange(6, dtype=np.float32).tobytes()


def refuse(path: Path) -> str:
    """Return the message of the error; the file is read neither long nor with much memory."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(StoreError) as caught:
            open_store(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * path.stat().st_size + 2**21
    assert time.process_time() - begin < 2
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < 1000
    return message


def array(kind: int, count: int, content: bytes) -> bytes:
    """Return a list of a type, with a number of elements, true or not."""
    return struct.pack("<IQ", kind, count) + content


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_the_format_is_read(tmp_path: Path, version: int) -> None:
    """Holes, sizes of 1, no dimension at all, and bytes behind the last tensor are fine."""
    tensors = [TENSOR, ("scalar", [], F32, 64), ("four", [1, 2, 1, 1], 25, 96)]
    path = write_raw(
        tmp_path / "m.gguf", [], tensors, DATA.ljust(200), head=(b"GGUF", version, None, None)
    )
    with open_store(path) as store:
        assert store.read_tensor("w").tolist() == [[0, 1], [2, 3], [4, 5]]
        assert store.read_tensor("scalar").shape == ()
        assert store.read_tensor("four").shape == (1, 1, 2, 1)
        assert store.config["model_type"] == ""


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((b"GGML", 3, None, None), "begins with b'GGML', not with b'GGUF'"),
        ((b"GGUF", 1, None, None), "is of version 1; supported are 2 and 3"),
        ((b"GGUF", 4, None, None), "is of version 4; supported are 2 and 3"),
        ((b"GGUF", 3 << 24, None, None), "is big-endian, which is not supported"),
        ((b"GGUF", 3, 2, None), "file has"),
        ((b"GGUF", 3, 2**63, None), "claims 9223372036854775808 tensors, more than its"),
        ((b"GGUF", 3, None, 2**64 - 1), "claims 18446744073709551615 metadata entries, more than"),
        ((b"GGUF", 3, None, 2), "file has"),
    ],
)
def test_a_false_beginning_is_refused(
    tmp_path: Path, head: tuple[bytes, int, int | None, int | None], message: str
) -> None:
    """By what is wrong with it, and what would be right."""
    path = write_raw(tmp_path / "m.gguf", [u32("a", 1)], [TENSOR], DATA, head=head)
    assert message in refuse(path)


@pytest.mark.parametrize("count", [2**18 + 1, 2**22])
def test_more_tensors_than_any_model_has_are_refused(tmp_path: Path, count: int) -> None:
    """Even where the file is large enough for them; no object is made."""
    path = write_raw(tmp_path / "m.gguf", head=(b"GGUF", 3, count, None))
    with path.open("r+b") as file:
        file.truncate(2**28)
    assert f"has {count} tensors, over 262144; no model has so many" in refuse(path)


def test_a_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    """Anywhere: in a number, in a string, in the data."""
    path = write_raw(tmp_path / "m.gguf", [("key", STRING, "text")], [TENSOR], DATA)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match="download it again"):
            open_store(path)


@pytest.mark.parametrize("length", [100, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["key", "value", "element", "last element", "name"])
def test_a_string_that_ends_beyond_the_file_is_refused(
    tmp_path: Path, place: str, length: int
) -> None:
    """Lengths that would wrap around do not."""
    false = struct.pack("<Q", length) + b"abc"
    texts = string("a") + false + string("b") if place == "element" else string("a") * 2 + false
    metadata: Sequence[tuple[str, int, Any]] = [("key", ARRAY, array(STRING, 3, texts))]
    metadata = [("key", STRING, false)] if place == "value" else metadata
    path = write_raw(tmp_path / "m.gguf", metadata, [TENSOR], DATA)
    if place in ("key", "name"):
        whole = write_raw(path, [("key", STRING, "")], [TENSOR], DATA).read_bytes()
        true = string("key" if place == "key" else "w")
        path.write_bytes(whole.replace(true, struct.pack("<Q", length) + true[8:]))
    refuse(path)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (13, b"", "metadata 'key' is of unknown type 13"),
        (99, b"", "metadata 'key' is of unknown type 99"),
        (ARRAY, array(13, 1, b""), "metadata 'key' is of unknown type 13"),
        (ARRAY, array(ARRAY, 1, array(4, 1, bytes(4))), "metadata 'key' is a list of lists"),
        (ARRAY, array(STRING, 2**60, string("a")), "metadata 'key' ends at byte"),
        (ARRAY, array(STRING, 2**64 - 1, string("a")), "metadata 'key' ends at byte"),
        (ARRAY, array(10, 2**61, bytes(8)), "metadata 'key' ends at byte"),
        (ARRAY, array(0, 2**64 - 1, bytes(8)), "metadata 'key' ends at byte"),
    ],
)
def test_false_metadata_are_refused(tmp_path: Path, kind: int, value: bytes, message: str) -> None:
    """Types, and lists of more elements than the file has room for."""
    assert message in refuse(write_raw(tmp_path / "m.gguf", [("key", kind, value)], [TENSOR], DATA))


def test_a_list_as_large_as_the_file_costs_no_more_memory_than_it(tmp_path: Path) -> None:
    """Empty strings are passed over, and no object is made of one."""
    count = 200_000
    texts = array(STRING, count, bytes(8 * count))
    path = write_raw(tmp_path / "m.gguf", [("key", ARRAY, texts)], [TENSOR], b"")
    assert "tensor 'w' ends at byte" in refuse(path)


@pytest.mark.parametrize("key", ["general.alignment", "split.count"])
def test_names_stand_once(tmp_path: Path, key: str) -> None:
    """Keys and tensors."""
    twice = write_raw(tmp_path / "m.gguf", [u32(key, 1), u32(key, 1)], [TENSOR], DATA)
    assert f"the metadata has {key!r} twice" in refuse(twice)
    twice = write_raw(tmp_path / "m.gguf", [u32(key, 1)], [TENSOR, TENSOR], DATA)
    assert "the header names 'w' twice" in refuse(twice)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("w", [2, 3], 99, 0)], "tensor 'w': type 99 is not supported; supported are F32, F16"),
        ([("w", [2, 3], 4, 0)], "type 4 is not supported; supported are"),
        ([("w", [2, 0], F32, 0)], "'w' has an impossible shape [0, 2] for F32"),
        ([("w", [33], Q8_0, 0)], "impossible shape [33] for Q8_0, which stores whole blocks of 32"),
        ([("w", [1] * 5, F32, 0)], "'w' has 5 dimensions, over 4"),
        ([("w", [2**32 - 1] * 1, F32, 0)], "'w' ends at byte"),
        ([("w", [2**63, 2], F32, 0)], "'w' ends at byte 73786976294838206"),
        ([("w", [2**64 - 1] * 4, F32, 0)], "'w' ends at byte about 2^258, file has"),
        ([("w", [2, 3], F32, 2**63)], "'w' ends at byte 9223372036854775"),
        ([("w", [2, 3], F32, 32)], "'w' ends at byte"),
        ([("w", [2, 3], F32, 8)], "'w' begins at byte 8 of the data, no multiple of 32"),
        ([("w", [1], F32, 0), ("v", [1], F32, 0)], "'w' begins at byte"),
        ([("w", [9], F32, 0), ("v", [1], F32, 32)], "before tensor 'w' ends"),
    ],
)
def test_false_tensors_are_refused(
    tmp_path: Path, tensors: Sequence[tuple[str, Sequence[int], int, int]], message: str
) -> None:
    """Types, sizes and places; sums and products do not wrap around."""
    data = DATA if len(tensors) == 1 else bytes(64)
    assert message in refuse(write_raw(tmp_path / "m.gguf", [], tensors, data))


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1])
def test_a_false_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    """It is a power of two, and a number."""
    message = f"general.alignment is {alignment}, no power of two"
    path = write_raw(tmp_path / "m.gguf", [u32("general.alignment", alignment)], [TENSOR], DATA)
    assert message in refuse(path)
    path = write_raw(path, [("general.alignment", STRING, "32")], [TENSOR], DATA)
    assert "general.alignment is '32', no power of two" in refuse(path)


def test_data_begin_at_the_alignment(tmp_path: Path) -> None:
    """Which the file chooses."""
    path = write_raw(tmp_path / "m.gguf", [u32("general.alignment", 4096)], [TENSOR])
    path.write_bytes(path.read_bytes().ljust(4096, b"x") + DATA)
    with open_store(path) as store:
        assert store.read_tensor("w")[2, 1] == 5


def test_experts_of_too_many_layers_are_refused(tmp_path: Path) -> None:
    """As in other checkpoints."""
    tensors = [(f"blk.{n}.ffn_up_exps.weight", [1, 1, 1], F32, 32 * n) for n in range(4097)]
    path = write_raw(tmp_path / "m.gguf", [], tensors, bytes(32 * 4097))
    with pytest.raises(FormatError, match="experts of more than 4096 layers; no model has so many"):
        open_store(path)


def test_experts_of_a_layer_are_of_one_type(tmp_path: Path) -> None:
    """Though blocks of another type may have as many bytes: Q4_0 and IQ4_NL."""
    tensors = [
        (f"blk.0.ffn_up.{e}.weight", [32, 16], kind, 288 * e) for e, kind in enumerate((2, 20))
    ]
    path = write_raw(tmp_path / "m.gguf", [], tensors, bytes(576))
    assert "'blk.0.ffn_up.1.weight' is IQ4_NL, but 'blk.0.ffn_up.0.weight' is Q4_0" in refuse(path)


def test_more_experts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """A hole of a file costs nothing on the disk, but a place of an expert costs memory."""
    tensors = [("blk.0.ffn_up_exps.weight", [1, 1, 2**28], F32, 0)]
    path = write_raw(tmp_path / "m.gguf", [], tensors)
    with path.open("r+b") as file:
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(
        FormatError, match="there are 268435456 experts, over 1048576; no model has"
    ):
        open_store(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_bias_in_blocks_is_refused(tmp_path: Path) -> None:
    """Slots hold biases as numbers."""
    weight = ("blk.0.ffn_up_exps.weight", [1, 1, 32], F32, 0)
    path = tmp_path / "m.gguf"
    write_raw(path, [], [weight, ("blk.0.ffn_up_exps.bias", [32, 1], Q8_0, 128)], bytes(512))
    assert "tensor 'blk.0.ffn_up_exps.bias', Q8_0 [1, 32], has no meaning here" in refuse(path)


def test_what_scales_an_experts_output_is_the_trunks(tmp_path: Path) -> None:
    """As Gemma 4 has it: the router's weights are multiplied by it."""
    weight = ("blk.0.ffn_up_exps.weight", [1, 1, 32], F32, 0)
    path = tmp_path / "m.gguf"
    write_raw(path, [], [weight, ("blk.0.ffn_down_exps.scale", [32], F32, 128)], bytes(256))
    with open_store(path) as store:
        assert store.layout.role_names == ("up",)
        assert store.trunk_bytes == 128


def test_metadata_that_are_no_text_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    """Tokens may be anything: a model whose tokens are not asked for is opened all the same."""
    wrong = array(STRING, 2, string("a") + struct.pack("<Q", 1) + b"\xff")
    path = write_raw(tmp_path / "m.gguf", [("tokens", ARRAY, wrong), u32("n", 5)], [TENSOR], DATA)
    with open_store(path) as store:
        assert isinstance(store, GgufStore)
        assert store.metadata["n"] == 5
        with pytest.raises(FormatError, match="'tokens' is not UTF-8"):
            store.metadata["tokens"]
        with pytest.raises(KeyError):
            store.metadata["token"]


def test_only_a_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of many GiB; its lists of strings stay bytes."""
    count = 50_000
    vocabulary = array(STRING, count, string("token") * count)
    tensors = [("blk.0.ffn_up_exps.weight", [2**10, 2**10, 2**12], F32, 0)]
    path = write_raw(tmp_path / "m.gguf", [("tokens", ARRAY, vocabulary)], tensors)
    header_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(header_bytes + 2**34)
    num_read, read = 0, GgufStore.__init__.__globals__["ReadOnlyFile"].read

    def count_bytes(self: Any, offset: int, buffers: list[memoryview], what: str) -> None:
        nonlocal num_read
        num_read += sum(map(len, buffers))
        read(self, offset, buffers, what)

    monkeypatch.setattr("moecache.stores._file.ReadOnlyFile.read", count_bytes)
    tracemalloc.start()
    with open_store(path) as store:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert isinstance(store, GgufStore)
        assert store.layout.total_bytes == 2**34
        assert num_read <= 2 * header_bytes
        assert peak < header_bytes + 2**22
        assert len(store.metadata["tokens"]) == count
