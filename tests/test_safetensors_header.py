"""Headers of safetensors files, hostile ones among them."""

import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moecache.errors import FormatError, StoreError
from moecache.stores._header import read_header
from tests.helpers.checkpoints import write_raw
from tests.helpers.examples import num_examples

DTYPES = ("bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8")
SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def _entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def _refuse(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def _refuse_entry(tmp_path: Path, **changes: Any) -> str:
    message = _refuse(write_raw(tmp_path / "m.safetensors", {"w": _entry(**changes)}, b"\0" * 24))
    assert "'w'" in message
    return message


def test_an_entry_says_where_its_tensor_lies(tmp_path: Path) -> None:
    """Offsets count from the start of the file."""
    header = {"__metadata__": {"format": "pt"}, "w": _entry()}
    path = write_raw(tmp_path / "m.safetensors", header, b"\0" * 24)

    tensors = read_header(path)

    assert list(tensors) == ["w"]
    entry = tensors["w"]
    assert (entry.dtype_name, entry.dtype, entry.shape) == ("F32", np.dtype("f4"), (2, 3))
    assert (entry.offset, entry.nbytes) == (path.stat().st_size - 24, 24)


@pytest.mark.parametrize("num_bytes", [0, 1, 7])
def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path, num_bytes: int) -> None:
    """The message has the size."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\0" * num_bytes)

    assert f"has {num_bytes} bytes" in _refuse(path)


@pytest.mark.parametrize("claimed", [9, 1000, 2**31, 2**63 - 8, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, claimed: int) -> None:
    """Lengths that would overflow 63 or 64 bits are merely too long."""
    path = write_raw(tmp_path / "m.safetensors", b"{}      ", header_bytes=claimed)

    message = _refuse(path)

    assert f"claims {claimed} bytes" in message
    assert "the file has 16" in message


def test_a_header_beyond_the_format_s_limit_is_refused_unread(tmp_path: Path) -> None:
    """A sparse file of a terabyte costs no memory."""
    path = write_raw(tmp_path / "m.safetensors", b"{}", header_bytes=2**40)
    os.truncate(path, 2**40 + 100)

    message, peak = _peak_of(path)

    assert f"has {2**40} bytes, over 100000000" in message
    assert peak < 2**20


def test_a_truncated_file_is_refused_with_tensor_and_sizes(tmp_path: Path) -> None:
    """The reader learns which tensor is cut and what to do."""
    path = write_raw(tmp_path / "m.safetensors", {"w": _entry()}, b"\0" * 24)
    size = path.stat().st_size
    os.truncate(path, size - 1)

    message = _refuse(path)

    assert f"tensor 'w' ends at byte {size}, file has {size - 1}" in message
    assert "download it again" in message


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"not json", b'{"w": }', b"{}{}", b"\xff\xfe", b'{"\xc3": 1}', b"\xef\xbb\xbf{}"],
)
def test_what_is_not_json_is_refused(tmp_path: Path, text: bytes) -> None:
    """Text that is not UTF-8 as well."""
    assert "is not JSON" in _refuse(write_raw(tmp_path / "m.safetensors", text))


@pytest.mark.parametrize(("text", "kind"), [(b"[]", "list"), (b"1", "int"), (b"null", "NoneType")])
def test_json_that_is_no_object_is_refused(tmp_path: Path, text: bytes, kind: str) -> None:
    """The message says what it is."""
    assert f"JSON {kind}, not an object" in _refuse(write_raw(tmp_path / "m.safetensors", text))


@pytest.mark.parametrize("depth", [*range(900, 1000, 9), 5000, 100_000])
@pytest.mark.parametrize("where", ["top", "dtype", "shape"])
def test_deep_nesting_is_refused(tmp_path: Path, where: str, depth: int) -> None:
    """Neither parsing nor the message runs out of stack."""
    lists, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
    text = {
        "top": lists,
        "dtype": b'{"w":{"dtype":%s,"shape":[0],"data_offsets":[0,0]}}' % objects,
        "shape": b'{"w":{"dtype":"F32","shape":%s,"data_offsets":[0,0]}}' % lists,
    }[where]

    _refuse(write_raw(tmp_path / "m.safetensors", text))


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    """Two readers could otherwise see different tensors."""
    one = json.dumps(_entry())
    text = f'{{"w": {one}, "v": {one}, "w": {one}}}'.encode()

    assert "names 'w' twice" in _refuse(write_raw(tmp_path / "m.safetensors", text, b"\0" * 24))


def test_a_field_named_twice_is_refused(tmp_path: Path) -> None:
    """Within a tensor's entry as well."""
    text = b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "dtype": "F32"}}'

    assert "names 'dtype' twice" in _refuse(write_raw(tmp_path / "m.safetensors", text))


@pytest.mark.parametrize("entry", [None, 1, "F32", []])
def test_an_entry_that_is_no_object_is_refused(tmp_path: Path, entry: object) -> None:
    """The message names tensor and kind."""
    message = _refuse(write_raw(tmp_path / "m.safetensors", {"w": entry}))

    assert f"tensor 'w' is described by a JSON {type(entry).__name__}" in message


@pytest.mark.parametrize("dtype", ["F33", "f32", "", None, 32, ["F32"], "F" * 10_000])
def test_an_unknown_dtype_is_refused(tmp_path: Path, dtype: object) -> None:
    """The message repeats it, shortened."""
    message = _refuse_entry(tmp_path, dtype=dtype)

    assert f"unknown dtype {repr(dtype)[:100]}" in message


@pytest.mark.parametrize(
    ("shape", "dtype", "needed"),
    [
        ([2, 4], "F32", 32),
        ([5], "F32", 20),
        ([], "F64", 8),
        ([0, 2**40], "F32", 0),
        ([12], "BF16", 24),
    ],
)
def test_bytes_that_do_not_match_the_shape_are_refused(
    tmp_path: Path, shape: list[int], dtype: str, needed: int
) -> None:
    """The message has shape, dtype and both numbers of bytes."""
    end = 20 if needed == 24 else 24

    message = _refuse_entry(tmp_path, shape=shape, dtype=dtype, data_offsets=[0, end])

    assert f"dtype {dtype} needs {needed} bytes, has {end}" in message


BAD_NUMBERS = (-1, 1.0, 1.5, True, "6", None, [6], 2**63, 2**64, 2**64 + 6, 10**4000)


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=range(len(BAD_NUMBERS)))
@pytest.mark.parametrize("field", ["shape", "begin", "end"])
def test_impossible_numbers_are_refused(tmp_path: Path, field: str, number: object) -> None:
    """In shapes as in offsets: negative, fractional, of another type or beyond 64 bits."""
    changes: dict[str, list[Any]] = {
        "shape": {"shape": [number, 1]},
        "begin": {"data_offsets": [number, 24]},
        "end": {"data_offsets": [0, number]},
    }[field]

    _refuse_entry(tmp_path, **changes)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "1e999", "-0.0", "9" * 5000, "-" + "9" * 5000], ids=range(6)
)
@pytest.mark.parametrize("field", ["shape", "data_offsets"])
def test_numbers_that_json_should_not_have_are_refused(
    tmp_path: Path, field: str, number: str
) -> None:
    """Digits by the thousand and the constants of Python's reader."""
    text = json.dumps({"w": _entry(**{field: ["X", 24]})}).replace('"X"', number).encode()

    _refuse(write_raw(tmp_path / "m.safetensors", text, b"\0" * 24))


@pytest.mark.parametrize("shape", [None, 7, "6", {"0": 6}, [1] * 33 + [6], [1] * 100_000])
def test_an_absurd_shape_is_refused(tmp_path: Path, shape: object) -> None:
    """No list, or more dimensions than any array has."""
    assert "impossible shape" in _refuse_entry(tmp_path, shape=shape)


@pytest.mark.parametrize("shape", [[2**64, 0], [0, 2**64], [2**40, 2**40, 0], [10**4000, 0]])
def test_dimensions_no_array_can_have_are_refused_next_to_a_zero(
    tmp_path: Path, shape: list[int]
) -> None:
    """The product is zero, but no library can make the array."""
    _refuse_entry(tmp_path, shape=shape, data_offsets=[0, 0])


@pytest.mark.parametrize("offsets", [None, 24, [], [24], [0, 24, 48], {"0": 24}, "0,24"])
def test_offsets_that_are_no_pair_are_refused(tmp_path: Path, offsets: object) -> None:
    """The message names the tensor."""
    assert "impossible data_offsets" in _refuse_entry(tmp_path, data_offsets=offsets)


def test_an_end_before_the_beginning_is_refused(tmp_path: Path) -> None:
    """The message has both."""
    message = _refuse_entry(tmp_path, data_offsets=[24, 0])

    assert "ends at byte 0, before it begins at 24" in message


@pytest.mark.parametrize("end", [25, 2**32 + 24, 2**63 - 1, 2**64 - 8, 2**64 + 24])
def test_a_tensor_past_the_end_is_refused(tmp_path: Path, end: int) -> None:
    """Sums that would wrap around in 64 bits do not pass for small ones."""
    assert "download it again" in _refuse_entry(
        tmp_path, dtype="U8", shape=[end], data_offsets=[0, end]
    )


@pytest.mark.parametrize("begin", [0, 4, 20])
def test_overlapping_tensors_are_refused(tmp_path: Path, begin: int) -> None:
    """The message names both and where they meet."""
    header = {"w": _entry(), "v": _entry(data_offsets=[begin, begin + 24])}

    message = _refuse(write_raw(tmp_path / "m.safetensors", header, b"\0" * 48))

    assert "'w'" in message
    assert "'v'" in message
    assert "begins at byte" in message


def test_a_missing_field_is_refused(tmp_path: Path) -> None:
    """Every entry has dtype, shape and offsets."""
    for field in _entry():
        entry = {key: value for key, value in _entry().items() if key != field}
        assert "'w'" in _refuse(write_raw(tmp_path / "m.safetensors", {"w": entry}, b"\0" * 24))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]},
        {"shape": [2**31] * 32},
        {"shape": [10**4000] * 32},
        {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 24]},
    ],
)
def test_a_big_claimed_size_costs_neither_memory_nor_time(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """What a header claims is compared, never allocated."""
    path = write_raw(tmp_path / "m.safetensors", {"w": _entry(**changes)}, b"\0" * 24)
    begin = time.process_time()

    _, peak = _peak_of(path)

    assert peak < path.stat().st_size * 20 + 2**20
    assert time.process_time() - begin < 2


def test_tensors_without_elements_are_accepted(tmp_path: Path) -> None:
    """Several may lie at one place, that of another tensor included."""
    empty = {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}
    header = {"a": empty, "b": empty | {"data_offsets": [24, 24]}, "w": _entry()}

    tensors = read_header(write_raw(tmp_path / "m.safetensors", header, b"\0" * 24))

    assert (tensors["a"].shape, tensors["a"].nbytes) == ((0, 3), 0)


def test_holes_are_accepted(tmp_path: Path) -> None:
    """Bytes between tensors and after the last belong to no tensor."""
    header = {"w": _entry(data_offsets=[8, 32]), "v": _entry(data_offsets=[40, 64])}

    assert len(read_header(write_raw(tmp_path / "m.safetensors", header, b"\0" * 99))) == 2


@pytest.mark.parametrize("text", [b"{}", b'{"__metadata__": {"w": "x"}}', b"{}      "])
def test_a_file_without_tensors_is_accepted(tmp_path: Path, text: bytes) -> None:
    """Metadata is no tensor, and padding is not refused."""
    assert read_header(write_raw(tmp_path / "m.safetensors", text)) == {}


@pytest.mark.parametrize(("dtype", "bits"), SUB_BYTE.items())
def test_types_below_a_byte_are_listed_without_a_numpy_type(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    """Their bytes can be read; their elements have no type here."""
    header = {"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}

    entry = read_header(write_raw(tmp_path / "m.safetensors", header, b"\0" * bits))["w"]

    assert (entry.dtype_name, entry.dtype, entry.nbytes) == (dtype, None, bits)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_every_float8_of_the_format_is_known(tmp_path: Path, dtype: str) -> None:
    """One unknown type would make a whole checkpoint unreadable."""
    header = {"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}

    entry = read_header(write_raw(tmp_path / "m.safetensors", header, b"\0" * 8))["w"]

    assert entry.dtype is not None
    assert entry.dtype.itemsize == 1


def test_what_cannot_be_read_is_a_store_error(tmp_path: Path) -> None:
    """A missing file and a directory are not damaged."""
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(StoreError, match=r"cannot be opened|not a regular") as caught:
            read_header(path)
        assert not isinstance(caught.value, FormatError)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
FORMS = st.tuples(st.sampled_from(DTYPES), SHAPES)
ARRAYS = st.dictionaries(st.text(min_size=1, max_size=8), FORMS)
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ARRAYS)
def test_files_of_the_safetensors_library_are_read_as_written(
    tmp_path: Path, forms: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Names, dtypes, shapes and every byte agree."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in forms.items()
    }
    arrays.pop("__metadata__", None)
    path = tmp_path / "m.safetensors"
    save_file(arrays, path)

    tensors = read_header(path)

    content = path.read_bytes()
    assert set(tensors) == set(arrays)
    for name, entry in tensors.items():
        assert (entry.dtype, entry.shape) == (arrays[name].dtype, arrays[name].shape)
        assert content[entry.offset : entry.offset + entry.nbytes] == arrays[name].tobytes()


@settings(
    max_examples=num_examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(CHANGES, st.integers(0, 400))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    """No byte of a file can cause another exception or a tensor outside the file."""
    path = write_raw(
        tmp_path / "m.safetensors",
        {"w": _entry(), "v": _entry(shape=[3], dtype="BF16", data_offsets=[24, 30])},
        b"\0" * 30,
    )
    content = bytearray(path.read_bytes())
    for position, byte in changes:
        content[position % len(content)] = byte
    path.write_bytes(content[: len(content) - max(0, cut - 300)])

    try:
        tensors = read_header(path)
    except StoreError:
        return

    for entry in tensors.values():
        assert 8 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


def _peak_of(path: Path) -> tuple[str, int]:
    tracemalloc.start()
    try:
        return _refuse(path), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
