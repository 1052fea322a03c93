"""Experts of a GGUF file in compute form: tensors of bytes (I8), and what says what they are.

Four lists of the metadata have an entry for each matrix of a layer: the stack that the experts'
tensors would be in, its type, its rows and its columns. `moecache.form.version` says in what
order the bytes are.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from moecache.errors import ConfigError, FormatError
from moecache.formats import find_format
from moecache.formats.form import FORM_VERSION
from moecache.stores._header import shown
from moecache.stores.gguf._experts import stack_name
from moecache.stores.gguf._header import GgufEntry, Metadata
from moecache.stores.gguf._types import GgmlType, ggml_types

PREFIX = "moecache.form."
_VERSION = f"{PREFIX}version"
_TENSORS, *_NUMBERS = (f"{PREFIX}{key}" for key in ("tensors", "types", "rows", "columns"))
# ggml's type of the tensors, and GGUF's types of metadata.
BYTES_TYPE = 24
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10


class FormOf(NamedTuple):
    """A matrix in compute form: its type and its shape."""

    type: GgmlType
    rows: int
    columns: int


def encode_forms(forms: Mapping[str, FormOf]) -> list[tuple[str, bytes]]:
    """Return the metadata, each with its type before it, of the experts' matrices by stack."""
    if not forms:
        return []
    names = b"".join(struct.pack("<Q", len(name)) + name for name in map(str.encode, forms))
    said = [
        (_VERSION, struct.pack("<II", _UINT32, FORM_VERSION)),
        (_TENSORS, struct.pack("<IIQ", _ARRAY, _STRING, len(forms)) + names),
    ]
    rows = [(form.type.number, form.rows, form.columns) for form in forms.values()]
    for key, numbers in zip(_NUMBERS, zip(*rows, strict=True), strict=True):
        head = struct.pack("<IIQ", _ARRAY, _UINT64, len(numbers))
        said.append((key, head + struct.pack(f"<{len(numbers)}Q", *numbers)))
    return said


def with_forms(
    metadata: Metadata, tensors: dict[str, tuple[int, GgufEntry]]
) -> dict[str, tuple[int, GgufEntry]]:
    """Return the tensors; those in compute form have the type and the shape of their matrix.

    Raises
    ------
    FormatError
        If another version of the form wrote them, or they are not what the metadata say.
    """
    forms = _read_forms(metadata)
    if not forms:
        return tensors
    found, seen = dict(tensors), set()
    for name, (file, entry) in tensors.items():
        stack = stack_name(name)
        form = forms.get(stack)
        if form is None:
            continue
        seen.add(stack)
        wanted = _form_bytes(stack, form)
        if entry.type.number != BYTES_TYPE or entry.nbytes != wanted:
            raise FormatError(
                f"tensor {shown(name)} is {entry.type.name} of {entry.nbytes} bytes; the compute "
                f"form of {form.type.name} [{form.rows}, {form.columns}] is I8 of {wanted}; pack "
                "the model again"
            )
        shape = form.rows, form.columns
        entry = replace(entry, type=form.type, shape=shape, is_tiled=True)
        found[name] = file, replace(entry, dtype_name=form.type.name, dtype=None)
    lacking = forms.keys() - seen
    if lacking:
        raise FormatError(
            f"{_TENSORS} names {shown(min(lacking))}, of which no expert has a tensor"
        )
    return found


def _read_forms(metadata: Metadata) -> dict[str, FormOf]:
    version = metadata.get(_VERSION)
    if version is None:
        return {}
    if version != FORM_VERSION:
        raise FormatError(
            f"its experts are in version {shown(version)} of the compute form, this moecache reads "
            f"version {FORM_VERSION}: pack the original model again"
        )
    names: Any = metadata.get(_TENSORS)
    columns: list[Any] = [metadata.get(key) for key in _NUMBERS]
    if not _is_list(names, str) or not all(
        _is_list(column, int) and len(column) == len(names) for column in columns
    ):
        raise FormatError(f"{_TENSORS}, {', '.join(_NUMBERS)} are no lists of one length")
    forms = {}
    for name, number, *shape in zip(names, *columns, strict=True):
        known = ggml_types().get(number)
        if known is None or min(shape) < 1 or name in forms:
            raise FormatError(
                f"{_TENSORS}: {shown(name)} of type {number} and shape {shown(shape)} cannot be"
            )
        forms[name] = FormOf(known, *shape)
    return forms


def _form_bytes(name: str, form: FormOf) -> int:
    try:
        known = find_format(form.type.format)
        known.parts(form.rows, form.columns)
    except ConfigError as error:
        raise FormatError(f"compute form of {shown(name)}: {error}") from error
    if known.form is None:
        raise FormatError(f"compute form of {shown(name)}: {form.type.name} has none")
    return known.form.nbytes(form.rows, form.columns)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)
