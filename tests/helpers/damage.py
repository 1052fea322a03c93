"""Damaged documents: bytes flipped, cut, doubled and replaced by what readers trip over."""

import io
import json
import random
import re
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Address space a document may cost; what traces of this size may ask for is 64 MiB.
MAX_BYTES = 512 * 2**20
Rng = random.Random
Spoil = Callable[[Rng, bytes], bytes]

# Numbers at the edges of what types hold, and what stands where a number should.
_VALUES = (
    *("0", "-1", "1", "2", "255", "65536", "2147483647", "2147483648", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "1" + "0" * 20, "1" + "0" * 400, "9" * 5000),
    *("1e999", "-1e999", "1e308", "0.5", "NaN", "Infinity", "true", "null", "None", "True"),
    *('""', "[]", "{}", "()", '"a"', '"\\u0000"', '"\\ud800"', "[[]]", "[" * 2000, '"x": ' * 2),
)
_TOKENS = (
    *(b"\0", b"\xff", b"\x80", b"\xc3", b"{", b"}", b"[", b"]", b"(", b")", b'"', b"'", b",", b":"),
    *(
        b"\n",
        b"\r\n",
        b"\\",
        b"#",
        b"-",
        b"+",
        b"e",
        b"L",
        b"_",
        b" ",
        b"\xef\xbb\xbf",
        b"PK\x03\x04",
    ),
)
_DESCRS = (
    *("'<i2'", "'>i8'", "'|u1'", "'<u8'", "'<f4'", "'|b1'", "'|O'", "'<i3'", "'|S0'", "'|S9'"),
    *("'<U0'", "'<U999999999'", "'|V8'", "'<M8[s]'", "'<c16'", "'i2,i2'", "()", "[]", "7", "None"),
    *("[('a', '<i2')]", "{}", "''", "'(2,)<i2'", "b'<i2'"),
)
_LENGTHS = (
    "0",
    "1",
    "2",
    "3",
    "-1",
    "True",
    "1.5",
    "None",
    "'2'",
    "2**40",
    "1" + "0" * 20,
    "65536",
)
# Numbers of 64 bits that are small, as those in a header are; or of 32 before another.
_FIELD = re.compile(rb"[^\0]\0{7}|[^\0].\0{6}|[^\0]..\0{5}", re.DOTALL)
_EDGES = (0, 1, 2, 7, 8, 9, 31, 32, 99, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process map so many bytes more, and no more."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def spoil(rng: Rng, document: bytes) -> bytes:
    """Return a document with one to four things done to it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        document = rng.choice(_WAYS)(rng, document)
    return document


def spoil_npy(rng: Rng, document: bytes) -> bytes:
    """Return an .npy file, spoilt as bytes or with a header made up."""
    if rng.random() < 0.3:
        return spoil(rng, document)
    version = rng.choice((1, 1, 1, 1, 2, 3, 0))
    length = struct.unpack_from("<H", document, 8)[0]
    header, content = document[10 : 10 + length], document[10 + length :]
    if rng.random() < 0.7:
        shape = ", ".join(
            rng.choice(_LENGTHS) for _ in range(rng.choice((0, 1, 2, 3, 3, 3, 3, 40)))
        )
        descr = rng.choice(_DESCRS) if rng.random() < 0.5 else "'<i2'"
        order = rng.choice(("False", "False", "True", "0", "''"))
        header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': ({shape},)}}".encode()
    if rng.random() < 0.5:
        header = spoil(rng, header)
    said = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**16 - 1))
    size = struct.pack("<I" if version == 2 else "<H", min(said, 2**16 - 1))
    return b"\x93NUMPY" + bytes((version, rng.choice((0, 0, 0, 1)))) + size + header + content


def spoil_npz(rng: Rng, document: bytes) -> bytes:
    """Return an .npz file, spoilt as bytes or in some of its members."""
    if rng.random() < 0.3:
        return spoil(rng, document)
    with zipfile.ZipFile(io.BytesIO(document)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name in rng.sample(sorted(members), min(len(members), rng.choice((0, 1, 1, 2)))):
        members[name] = spoil_npy(rng, members[name])
    # A text of NumPy's has four bytes to a letter.
    if (meta := members.get("meta.npy")) is not None and rng.random() < 0.4:
        text = spoil(rng, meta[128:][::4]).decode("latin-1")
        header = f"{{'descr': '<U{len(text)}', 'fortran_order': False, 'shape': ()}}".encode()
        head = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header
        members["meta.npy"] = head + text.encode("utf-32-le")
    if rng.random() < 0.1:
        members.pop(rng.choice(sorted(members)))
    methods = (zipfile.ZIP_STORED,) * 20 + (zipfile.ZIP_DEFLATED,) * 10
    method = rng.choice((*methods, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return spoil(rng, file.getvalue()) if rng.random() < 0.1 else file.getvalue()


def spoil_behind_length(rng: Rng, document: bytes) -> bytes:
    """Return a safetensors file; mostly, its first eight bytes still are its header's length."""
    if rng.random() < 0.2:
        return spoil(rng, document)
    length = struct.unpack_from("<Q", document)[0]
    header = spoil(rng, document[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + document[8 + length :]


def spoil_gguf(rng: Rng, document: bytes) -> bytes:
    """Return a GGUF file, spoilt as bytes or in some of the numbers of its header."""
    if rng.random() < 0.3:
        return spoil(rng, document)
    changed = bytearray(document)
    for found in rng.sample(list(_FIELD.finditer(document)), rng.choice((1, 1, 1, 2, 3))):
        said = int.from_bytes(found[0], "little")
        value = rng.choice((*_EDGES, said + 1, said - 1, said * 2, said // 2))
        changed[found.start() : found.end()] = struct.pack("<Q", value % 2**64)
    return bytes(changed[: rng.choice((len(changed), len(changed), rng.randrange(len(changed))))])


def spoil_json(rng: Rng, document: bytes) -> bytes:
    """Return a JSON document, spoilt as bytes or with one of its values replaced."""
    if rng.random() < 0.5:
        return spoil(rng, document)
    root = json.loads(document)
    places: list[tuple[dict | list, str | int]] = []
    _find(root, places)
    mark = "replaced by the value"
    holder, key = rng.choice(places)
    holder[key] = mark
    return json.dumps(root).replace(f'"{mark}"', rng.choice(_VALUES)).encode()


def _find(value: object, places: list[tuple[dict | list, str | int]]) -> None:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            _find(inner, places)


def _flip(rng: Rng, document: bytes) -> bytes:
    changed = bytearray(document or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: Rng, document: bytes) -> bytes:
    return document[: rng.randrange(len(document) + 1)]


def _take_out(rng: Rng, document: bytes) -> bytes:
    start, end = _range(rng, document)
    return document[:start] + document[end:]


def _double(rng: Rng, document: bytes) -> bytes:
    start, end = _range(rng, document)
    return document[:end] + document[start:end] * rng.choice((1, 1, 1, 50)) + document[end:]


def _insert(rng: Rng, document: bytes) -> bytes:
    place = rng.randrange(len(document) + 1)
    return document[:place] + rng.choice(_TOKENS) + document[place:]


def _overwrite(rng: Rng, document: bytes) -> bytes:
    start, end = _range(rng, document)
    end = min(end, start + 8)
    return document[:start] + rng.choice((b"\0", b"\xff", b"\x7f")) * (end - start) + document[end:]


def _renumber(rng: Rng, document: bytes) -> bytes:
    numbers = list(_NUMBER.finditer(document))
    if not numbers:
        return _flip(rng, document)
    found = rng.choice(numbers)
    return document[: found.start()] + rng.choice(_VALUES).encode() + document[found.end() :]


def _range(rng: Rng, document: bytes) -> tuple[int, int]:
    start = rng.randrange(len(document) + 1)
    return start, min(len(document), start + rng.choice((1, 2, 4, 8, 64, 1000)))


_WAYS = (_flip, _cut, _take_out, _double, _insert, _overwrite, _renumber, _renumber, _renumber)
