"""Trace: the router's choices, token by token and layer by layer.

The file is an .npz with these arrays:

| array | dtype, shape | |
|-|-|-|
| `experts` | int16 or int32 [T, L, K] | chosen experts, the first choice first; -1 is padding |
| `phase` | uint8 [T] | 0 prefill, 1 decode; absent: all decode |
| `seq` | int32 [T] | which sequence a token belongs to; absent: all one |
| `step` | int32 [T] | rows of one number went through the cache together; absent: each alone |
| `bulk` | uint8 [T] | 1: the step kept to its layer's fair share; absent: if it has several rows |
| `layers` | int16 or int32 [L] | the model's own layer numbers; absent: 0 to L - 1 |
| `meta` | text | a JSON object: num_experts, top_k, version, and where the trace is from |
"""

import hashlib
import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.files import Kind
from moecache.traces._checks import (
    check_bulk,
    check_ids,
    check_order,
    clean_metadata,
    owned,
    parse_meta,
    several_rows,
    vector,
)
from moecache.traces.files import read_arrays, write_arrays

VERSION = 1
MAX_EXPERTS = 2**20
PREFILL, DECODE = 0, 1

_ARRAYS = ("experts", "phase", "seq", "step", "bulk", "layers", "meta")
TRACE_FILE = Kind(
    "a routing trace", lambda data: data.startswith(b"PK\x03\x04") and b"experts.npy" in data
)
# Sizes that some files repeat in `meta`.
_SIZES = ("T", "L", "K")


class Trace:
    """Recorded routing of a mixture-of-experts model. Cannot be changed.

    Rows are tokens in the order in which they went through the cache.

    Parameters
    ----------
    experts : array of integers, shape [num_tokens, num_layers, top_k]
        Chosen experts; -1 where there is none. No expert twice in one cell. Copied,
        unless it is an array of the right dtype that owns its data and is read-only.
    num_experts : int
        Experts per layer, up to 1,048,576.
    phase : array of integers, shape [num_tokens], optional
        0 prefill, 1 decode. By default all decode.
    sequence : array of integers, shape [num_tokens], optional
        Which request a token belongs to, from 0. By default all the same.
    step : array of integers, shape [num_tokens], optional
        Rows of the same number went through the cache together: a chunk of a
        prompt, or a batch. Never decreases. By default every row its own.
    bulk : array of integers, shape [num_tokens], optional
        1 where a token's step admitted no more to the cache than its layer's fair
        share, as steps of several rows do through `waves`; 0 where it admitted
        everything, as leases do. The same for all rows of a step. By default 1 for
        steps of several rows.
    layers : array of integers, shape [num_layers], optional
        The model's own layer numbers, increasing. By default 0 to L - 1.
    **metadata
        Anything JSON can hold: model, license, source, expert_bytes, ... `top_k` is
        the model's own, where K is larger.

    Attributes
    ----------
    experts, phase, sequence, step, bulk, layers : ndarray
        Read-only. `experts` is int16, or int32 if there are more than 32,767.
    num_experts : int
    metadata : mapping
        Read-only, as JSON has it.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    """

    experts: np.ndarray
    num_experts: int
    phase: np.ndarray
    sequence: np.ndarray
    step: np.ndarray
    bulk: np.ndarray
    layers: np.ndarray
    metadata: Mapping[str, Any]

    def __init__(
        self,
        /,
        experts: npt.ArrayLike,
        *,
        num_experts: int,
        phase: npt.ArrayLike | None = None,
        sequence: npt.ArrayLike | None = None,
        step: npt.ArrayLike | None = None,
        bulk: npt.ArrayLike | None = None,
        layers: npt.ArrayLike | None = None,
        **metadata: Any,
    ) -> None:
        if not isinstance(num_experts, (int, np.integer)) or isinstance(num_experts, bool):
            raise ConfigError(f"num_experts must be a whole number, got {num_experts!r}")
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ConfigError(f"num_experts must be in [1, {MAX_EXPERTS}], got {num_experts}")
        chosen = np.asarray(experts)
        if chosen.ndim != 3 or 0 in chosen.shape[1:]:
            raise ConfigError(
                "experts must have the shape [tokens, layers, top_k], at least one layer and one "
                f"choice, got {list(chosen.shape)}"
            )
        if chosen.dtype.kind not in "iu":
            raise ConfigError(f"experts must be integers, got {chosen.dtype}")
        num_tokens, num_layers, top_k = chosen.shape
        if top_k > num_experts:
            raise ConfigError(
                f"{top_k} experts per token are more than the {num_experts} there are"
            )
        check_ids(chosen, int(num_experts))
        steps = vector("step", step, np.arange(num_tokens, dtype=np.int32))
        self._set(
            owned(chosen, np.int16 if num_experts <= 32767 else np.int32),
            int(num_experts),
            vector("phase", phase, np.ones(num_tokens, np.uint8), 1),
            vector("sequence", sequence, np.zeros(num_tokens, np.int32)),
            steps,
            vector("bulk", bulk, several_rows(steps), 1),
            vector("layers", layers, np.arange(num_layers, dtype=np.int32)),
            clean_metadata({"top_k": top_k, **metadata}),
        )
        check_order("step", self.step, 0)
        check_bulk(self.bulk, self.step)
        check_order("layers", self.layers, 1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a trace from an .npz file.

        Raises
        ------
        FormatError
            If the file is damaged or of another form; it names what is wrong.
        StoreError
            If it cannot be read.
        """
        path = Path(path)
        arrays = read_arrays(path, _ARRAYS)
        for name in ("experts", "meta"):
            if name not in arrays:
                raise FormatError(f"{path}: has no array {name!r}; it is no trace")
        meta = parse_meta(path, arrays["meta"])
        num_experts = meta.pop("num_experts", None)
        version = meta.pop("version", VERSION)
        if version != VERSION:
            raise FormatError(
                f"{path}: is of version {version!r}, this moecache knows {VERSION}; upgrade it"
            )
        experts = arrays["experts"]
        for array in arrays.values():
            array.flags.writeable = False
        try:
            trace = cls(
                experts,
                num_experts=num_experts,
                phase=arrays.get("phase"),
                sequence=arrays.get("seq"),
                step=arrays.get("step"),
                bulk=arrays.get("bulk"),
                layers=arrays.get("layers"),
            )
            for name, size in zip(_SIZES, experts.shape, strict=True):
                if meta.pop(name, size) != size:
                    raise ConfigError(f"meta says {name} is not {size}, as experts has it")
            return trace._with_metadata(meta)
        except ConfigError as error:
            raise FormatError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the trace to a compressed .npz file, whole or not at all.

        Parameters
        ----------
        path : str or Path
            An existing trace is replaced.
        force : bool, default False
            Replace a file of any kind.

        Raises
        ------
        ConfigError
            If something else is there.
        StoreError
            If it cannot be written. The file that was there is kept.
        """
        meta = {**self.metadata, "num_experts": self.num_experts, "version": VERSION}
        arrays = {"experts": self.experts, "phase": self.phase, "seq": self.sequence}
        if not np.array_equal(self.step, np.arange(self.num_tokens)):
            arrays["step"] = self.step
        if self._bulk_is_said():
            arrays["bulk"] = self.bulk
        arrays["layers"] = self.layers
        arrays["meta"] = np.array(json.dumps(meta))
        write_arrays(path, arrays, TRACE_FILE, force=force)

    @property
    def num_tokens(self) -> int:
        """Rows of the trace."""
        return self.experts.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers of the trace."""
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        """Choices per token and layer, padding included."""
        return self.experts.shape[2]

    @property
    def num_steps(self) -> int:
        """How often rows went through the cache: each step's rows together."""
        return int(np.count_nonzero(np.diff(self.step))) + 1 if self.num_tokens else 0

    @property
    def digest(self) -> str:
        """SHA-256 of the routing, in hex: everything but `metadata`."""
        found = hashlib.sha256()
        found.update(f"moecache trace {self.num_experts} {self.experts.shape}".encode())
        arrays = [self.experts, self.phase, self.sequence, self.step, self.layers]
        if self._bulk_is_said():
            arrays.append(self.bulk)
        for array in arrays:
            found.update(array.astype("<i4").tobytes())
        return found.hexdigest()

    def whole_tokens(self) -> "Trace":
        """Return the trace without the rows that contain padding."""
        return self._take((self.experts >= 0).all((1, 2)))

    def decode(self) -> "Trace":
        """Return the rows of phase decode."""
        return self._take(self.phase == DECODE)

    def prefill(self) -> "Trace":
        """Return the rows of phase prefill."""
        return self._take(self.phase == PREFILL)

    def __getitem__(self, rows: slice) -> "Trace":
        """Return some of the rows, in their order."""
        if not isinstance(rows, slice):
            raise TypeError(f"a trace is cut by slices of its tokens, not by {rows!r}")
        if rows.step is not None and rows.step < 1:
            raise ConfigError("tokens cannot be taken backwards: steps never decrease")
        return self._take(rows)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.num_tokens

    def __eq__(self, other: object) -> bool:
        """Return whether routing and metadata are the same."""
        if not isinstance(other, Trace):
            return NotImplemented
        return (
            (self.num_experts, self.metadata) == (other.num_experts, other.metadata)
            and np.array_equal(self.experts, other.experts)
            and np.array_equal(self.phase, other.phase)
            and np.array_equal(self.sequence, other.sequence)
            and np.array_equal(self.step, other.step)
            and np.array_equal(self.bulk, other.bulk)
            and np.array_equal(self.layers, other.layers)
        )

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Raise: a trace cannot be changed."""
        raise AttributeError(f"a trace cannot be changed: make another to set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Raise: a trace cannot be changed."""
        raise AttributeError(f"a trace cannot be changed: {name!r} stays")

    def __copy__(self) -> Self:
        """Return the trace itself: it cannot be changed."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled."""
        return {**vars(self), "metadata": dict(self.metadata)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled, read-only as before."""
        self._set(**state)

    def __repr__(self) -> str:
        model = f" of {self.metadata['model']}" if "model" in self.metadata else ""
        return (
            f"<Trace{model}: {self.num_tokens} tokens x {self.num_layers} layers x "
            f"top-{self.top_k} of {self.num_experts} experts>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>Trace</caption>{rows}</table>"

    def describe(self) -> str:
        """Return what the trace is as text, a line per fact."""
        return "\n".join(f"{name:<12} {value}" for name, value in self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        num_prefill = int(np.count_nonzero(self.phase == PREFILL))
        num_decode = self.num_tokens - num_prefill
        facts = [
            ("model", str(self.metadata.get("model", "unknown"))),
            ("experts", f"{self.num_layers} layers x {self.num_experts}, top-{self.top_k}"),
            ("tokens", f"{self.num_tokens}: {num_prefill} prefill, {num_decode} decode"),
            ("sequences", str(len(np.unique(self.sequence)))),
            ("steps", str(self.num_steps)),
        ]
        padding = int(np.count_nonzero(self.experts < 0))
        if padding:
            facts.append(("padding", f"{padding} of {self.experts.size} choices"))
        facts += [
            (name, str(value))
            for name, value in self.metadata.items()
            if name not in {"model", "top_k"}
        ]
        return [*facts, ("digest", self.digest[:16])]

    def _set(
        self,
        experts: np.ndarray,
        num_experts: int,
        phase: np.ndarray,
        sequence: np.ndarray,
        step: np.ndarray,
        bulk: np.ndarray,
        layers: np.ndarray,
        metadata: dict[str, Any],
    ) -> None:
        for array in (experts, phase, sequence, step, bulk, layers):
            array.flags.writeable = False
        vectors = (("phase", phase), ("sequence", sequence), ("step", step), ("bulk", bulk))
        for name, rows in vectors:
            if len(rows) != len(experts):
                raise ConfigError(f"{name} has {len(rows)} rows, experts has {len(experts)} tokens")
        if len(layers) != experts.shape[1]:
            raise ConfigError(
                f"layers has {len(layers)} numbers, experts has {experts.shape[1]} layers"
            )
        # Past the __setattr__ that refuses every other write.
        vars(self).update(
            experts=experts,
            num_experts=num_experts,
            phase=phase,
            sequence=sequence,
            step=step,
            bulk=bulk,
            layers=layers,
            metadata=MappingProxyType(metadata),
        )

    def _with_metadata(self, metadata: Mapping[str, Any]) -> Self:
        # The arrays were checked: they are shared.
        taken = type(self).__new__(type(self))
        taken._set(  # noqa: SLF001 - of the same class
            **{**vars(self), "metadata": clean_metadata({"top_k": self.top_k, **metadata})}
        )
        return taken

    def _bulk_is_said(self) -> bool:
        # Otherwise the steps' sizes say it.
        return not np.array_equal(self.bulk, several_rows(self.step))

    def _take(self, rows: Any) -> "Trace":
        # Part of a trace needs no check.
        taken = Trace.__new__(Trace)
        taken._set(  # noqa: SLF001 - of the same class
            np.ascontiguousarray(self.experts[rows]),
            self.num_experts,
            self.phase[rows],
            self.sequence[rows],
            self.step[rows],
            self.bulk[rows],
            self.layers,
            dict(self.metadata),
        )
        return taken
