"""Profiles: findings of earlier runs about disks and models, kept in one file.

The file is a line `moecache-profile 1 SHA256`, with the checksum of all that follows; a
line of JSON that says what there is; and the bytes of the arrays, one after the other:

    {"disks": {DISK: {...}},
     "machines": {MACHINE: {...}},
     "models": [{"model": IDENTITY, "policy": "echo", "arrays": [[NAME, DTYPE, SHAPE], ...]}]}
"""

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moecache.errors import ConfigError, FormatError, StoreError
from moecache.files import whole_file
from moecache.layout import ExpertLayout

logger = logging.getLogger(__name__)

VERSION = 1
# Models that are kept; the one that was saved longest ago leaves.
MAX_MODELS = 16
MAX_BYTES = 256 * 2**20
_NAME = b"moecache-profile "
_FIRST_LINE = b"%s%d " % (_NAME, VERSION)
_DTYPES = ("<u8", "<i8", "<i4", "<f4", "|u1")
# The arrays of `Echo.state` that are not of floats.
_ECHO_DTYPES = {"clock": "i8", "last": "i4", "cells": "u1", "masks": "u8", "before": "u1"}
# Two runtimes of one process that close at once would lose what the other found out.
_writing = threading.Lock()


@dataclass(frozen=True, eq=False)
class ModelUsage:
    """How the experts of a model were used.

    Parameters
    ----------
    policy : str
        Policy of the cache.
    counts : ndarray of uint64, shape [num_layers, num_experts]
        Accesses; those of earlier runs count half as much with every run since.
    residents : ndarray of int32, shape [n]
        Keys (layer * num_experts + expert) of what was in the cache at the end.
    echo : mapping of str to ndarray
        `Echo.state`; empty with policies that have none.
    """

    policy: str
    counts: np.ndarray
    residents: np.ndarray
    echo: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Profile:
    """The content of a profile's file.

    Parameters
    ----------
    disks : dict
        Findings about each disk, as JSON has them.
    models : dict of str to ModelUsage
        By `identity`, the one that was saved last at the end.
    machines : dict
        Findings about each machine, as JSON has them.
    """

    disks: dict[str, Any] = field(default_factory=dict)
    models: dict[str, ModelUsage] = field(default_factory=dict)
    machines: dict[str, Any] = field(default_factory=dict)


def identity(layout: ExpertLayout) -> str:
    """Return what tells a model's experts from those of others: names, numbers and sizes."""
    sizes = [layout.expert_bytes(layer) for layer in range(layout.num_layers)]
    known = [layout.num_experts, list(layout.layer_names), sizes]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def check_path(path: object) -> None:
    """Raise a ConfigError if this cannot be the path of a profile."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise ConfigError(f"profile must be a path, a str or Path, got {path!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"profile {name!r} is no text that can be shown; rename it") from error


def read_profile(path: str | os.PathLike[str]) -> Profile | None:
    """Return a file's content; an unusable file is one warning that says why.

    Returns
    -------
    Profile or None
        Empty if there is no file, or a damaged profile. `None` if the file is no profile, is of
        another version, or cannot be read: nothing is to be kept there.

    Raises
    ------
    ConfigError
        If this is not a path.
    """
    data = None
    try:
        data = _read(path)
        return _decode(path, data)
    except StoreError as error:
        logger.warning("profile.ignored %s", error)
    return Profile() if data is not None and _is_ours(data) else None


def update_profile(
    path: str | os.PathLike[str],
    *,
    disks: Mapping[str, Any] | None = None,
    models: Mapping[str, ModelUsage] | None = None,
    machines: Mapping[str, Any] | None = None,
) -> None:
    """Add to what a file has, or put it in the place of what it has of the same name.

    Written whole or not at all. A damaged profile is replaced; a file that is no profile,
    or one of a later version, never is. If two processes write at once, one may lose
    its findings.

    Raises
    ------
    ConfigError
        If this is not a path.
    FormatError
        If there is a file that is no profile of this version.
    StoreError
        If it cannot be written. The file that was there is kept.
    """
    with _writing:
        data = _read(path)
        try:
            profile = _decode(path, data)
        except FormatError:
            if not _is_ours(data):
                raise
            profile = Profile()
        kept = {name: usage for name, usage in profile.models.items() if name not in (models or {})}
        kept.update(models or {})
        latest = dict(list(kept.items())[-MAX_MODELS:])
        all_machines = {**profile.machines, **(machines or {})}
        content = _encode(Profile({**profile.disks, **(disks or {})}, latest, all_machines))
        with whole_file(path, None, sync=True) as file:
            file.write(content)


def _is_ours(data: bytes) -> bool:
    """Return whether this is a profile of this version, even if damaged.

    A file that ends within the profile's name may be a user's own, of a few letters.
    """
    return data.startswith(_FIRST_LINE)


def _read(path: str | os.PathLike[str]) -> bytes:
    check_path(path)
    try:
        if not os.fspath(path):
            raise FormatError("the path is empty; name a file")
        if not Path(path).exists():
            return b""
        # Reading a pipe would block; a directory has no bytes.
        if not Path(path).is_file():
            raise FormatError(f"{path}: is no regular file; name another one")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{path}: cannot be read: {reason}") from error
    if len(data) > MAX_BYTES:
        raise FormatError(f"{path}: is no moecache profile: it has more than {MAX_BYTES} bytes")
    return data


def _encode(profile: Profile) -> bytes:
    models, chunks = [], []
    for name, usage in profile.models.items():
        arrays = {"counts": usage.counts, "residents": usage.residents}
        arrays |= {f"echo.{part}": array for part, array in usage.echo.items()}
        entries = []
        for part, array in arrays.items():
            stored = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            entries.append([part, stored.dtype.str, list(stored.shape)])
            chunks.append(stored.tobytes())
        models.append({"model": name, "policy": usage.policy, "arrays": entries})
    known = {"disks": profile.disks, "machines": profile.machines, "models": models}
    header = json.dumps(known).encode() + b"\n"
    body = header + b"".join(chunks)
    return _FIRST_LINE + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(path: str | os.PathLike[str], data: bytes) -> Profile:
    if not data:
        return Profile()
    first, _, body = data.partition(b"\n")
    if not _is_ours(data):
        if first.startswith(_NAME) and not _FIRST_LINE.startswith(data):
            raise FormatError(
                f"{path}: is a moecache profile of another version, "
                f"{first[len(_NAME) :][:20]!a}; this one writes version {VERSION}"
            )
        raise FormatError(f"{path}: is no moecache profile; name another file, or remove it")
    if first[len(_FIRST_LINE) :] != hashlib.sha256(body).hexdigest().encode():
        raise FormatError(f"{path}: is damaged: its checksum is not that of its contents")
    try:
        return _parse(body)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        # Written by something else: the checksum is right.
        raise FormatError(f"{path}: is damaged: {str(error)[:200]}") from error


def _parse(body: bytes) -> Profile:
    header, _, rest = body.partition(b"\n")
    known = json.loads(header)
    disks, models = known["disks"], {}
    # Earlier profiles know no machines.
    machines = known.get("machines", {})
    for kind, entries in (("disk", disks), ("machine", machines)):
        if not isinstance(entries, dict):
            raise TypeError(f"what it has of {kind}s is no object")
        for name, entry in entries.items():
            if not isinstance(entry, dict) or any(
                isinstance(value, (dict, list)) for value in entry.values()
            ):
                raise TypeError(f"{kind} {name!r} is no object of plain values")
    offset = 0
    for model in known["models"]:
        arrays: dict[str, np.ndarray] = {}
        for name, dtype, shape in model["arrays"]:
            if dtype not in _DTYPES or not isinstance(name, str):
                raise ValueError(f"{name!r} is of dtype {dtype!r}")
            if not all(type(length) is int and length >= 0 for length in shape):
                raise ValueError(f"{name!r} has the shape {shape!a}")
            count = math.prod(shape)
            # Compared before anything is made of that size.
            if count * np.dtype(dtype).itemsize > len(rest) - offset:
                raise ValueError(f"{name!r} goes past the end")
            array = np.frombuffer(rest, dtype, count, offset).reshape(shape)
            arrays[name] = array.astype(array.dtype.newbyteorder("="))
            offset += array.nbytes
        echo = {
            name.removeprefix("echo."): array
            for name, array in arrays.items()
            if name.startswith("echo.")
        }
        usage = ModelUsage(str(model["policy"]), arrays["counts"], arrays["residents"], echo)
        _check_usage(usage)
        models[str(model["model"])] = usage
    if offset != len(rest):
        raise ValueError(f"{len(rest) - offset} bytes belong to nothing")
    return Profile(disks, models, machines)


def _check_usage(usage: ModelUsage) -> None:
    """Raise a ValueError for what no runtime writes."""
    counts, residents = usage.counts, usage.residents
    if counts.dtype != np.uint64 or counts.ndim != 2:
        raise ValueError(f"its counts are {counts.dtype} of shape {list(counts.shape)}")
    if residents.dtype != np.int32 or residents.ndim != 1:
        raise ValueError(f"its residents are {residents.dtype} of shape {list(residents.shape)}")
    if ((residents < 0) | (residents >= counts.size)).any():
        raise ValueError(f"its residents are not all in [0, {counts.size})")
    for name, array in usage.echo.items():
        if array.dtype != _ECHO_DTYPES.get(name, "f4"):
            raise ValueError(f"its {name!r} is {array.dtype}")
        if name == "values" and array.shape != counts.shape:
            raise ValueError(f"its {name!r} has the shape {list(array.shape)}")
        # Infinity is a score that was never set.
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"its {name!r} has values that are no number")
