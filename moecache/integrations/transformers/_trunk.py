"""Weights of a trunk that moecache reads: quantized ones, and all of a GGUF file."""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.utils import logging

from moecache.decoding.memory import CHUNK_BYTES, Memory
from moecache.errors import ConfigError
from moecache.integrations.transformers._binding import kept_dtype
from moecache.integrations.transformers._native import can_keep, form_of, keep
from moecache.integrations.transformers._slots import NUMPY_TYPES, as_tensor
from moecache.integrations.transformers._targets import Targets
from moecache.integrations.transformers.gguf import Source
from moecache.kernels import num_threads, values_in
from moecache.layout import Role
from moecache.stores import CheckpointStore

_DIGITS = re.compile(r"\d+")
_MOST_THREADS = 4
# Tensors beside a weight, or in place of one, under other names; in regular expressions.
OTHER_TENSORS = r"qweight|qzeros|scales?|g_idx|qscale_weight|\w+_scale"
_BESIDE = rf"\.(weight_\w+|{OTHER_TENSORS})$"


@dataclass(frozen=True)
class TrunkWeight:
    """A parameter or buffer that was taken from a module, to be read by moecache's own formats.

    Parameters
    ----------
    module : Module
    leaf : str
        Name of the parameter in it.
    source : Source
    dtype : torch.dtype
        Type of the parameter.
    is_buffer : bool, default False
    """

    module: nn.Module
    leaf: str
    source: Source
    dtype: torch.dtype
    is_buffer: bool = False

    def nbytes(self, store: CheckpointStore) -> int:
        """Return the bytes of its quantized matrices in the file; 0 of numbers."""
        known = (store.trunk_matrices.get(name) for name in self.source.tensors)
        return sum(one[0].format.nbytes(one[0].rows, one[0].columns) for one in known if one)

    def read(
        self, store: CheckpointStore, memory: Memory, *, is_native: bool
    ) -> Callable[[], None]:
        """Read its values, rounded once, or the file's own bytes where that can be, in any thread.

        Returns
        -------
        callable ()
            Puts them into the module.
        """
        names, rows = self.source.tensors, self.source.rows
        matrices = [store.trunk_matrices[name][0] for name in names if name in store.trunk_matrices]
        first = matrices[0] if 0 < len(matrices) == len(names) else None
        if first is not None and self.source.undo is None and len({*matrices}) == 1:
            is_kept = is_native and can_keep(self.module, first.format)
            nbytes = first.format.nbytes(first.rows, first.columns)
            # What becomes something else is read into scratch memory; see `form_of`.
            is_left = is_kept and rows is None and type(self.module) is nn.Linear
            total = len(names) * nbytes
            raw = memory.passing(total) if is_left else np.empty(total, np.uint8)
            for name, part in zip(names, raw.reshape(len(names), nbytes), strict=True):
                store.read_parts(name, part)
            num_rows = len(matrices) * first.rows
            if rows is not None:
                num_rows, raw = len(rows), raw.reshape(num_rows, -1)[rows].reshape(-1)
            shape = num_rows, first.columns
            if is_kept:
                form = form_of(self.module, raw, first.format, shape, memory.lasting)
                return partial(self._keep, form, first.format.name, shape)
            role = Role(names[0], shape, format=first.format.name)
            values = values_in(raw, role, stored=True, dtype=NUMPY_TYPES[self.dtype])
        else:
            arrays = [store.read_tensor(name).astype(np.float32) for name in names]
            values = self.source.undo(arrays) if self.source.undo else np.concatenate(arrays)
            values = values if rows is None else values[rows]
        found = as_tensor(np.ascontiguousarray(values))
        if found.dtype == self.dtype:
            return partial(self._put, found)
        # A core reads pages of 4 KiB by a tenth more slowly than huge ones.
        held = memory.lasting(found.numel() * self.dtype.itemsize)
        placed = torch.from_numpy(held).view(self.dtype).view(found.shape)
        return partial(self._put, placed.copy_(found))

    def _keep(self, form: np.ndarray, name: str, shape: tuple[int, int]) -> None:
        self.module.__dict__.pop(self.leaf, None)
        keep(self.module, form, name, shape, self.dtype)

    def _put(self, values: torch.Tensor) -> None:
        self.module.__dict__.pop(self.leaf, None)
        if self.is_buffer:
            self.module.register_buffer(self.leaf, values)
        else:
            self.module.register_parameter(self.leaf, nn.Parameter(values))


def read_trunk(weights: Sequence[TrunkWeight], store: CheckpointStore, *, is_native: bool) -> None:
    """Read weights by a few threads, with a bar as transformers shows them.

    Modules get them in the order of `weights`, in this thread: parameters have an order. The
    largest are read first, lest a head of many rows keep one thread busy when all others are done.
    """
    memory = Memory()
    store.trunk_matrices  # noqa: B018 - found once
    read = partial(TrunkWeight.read, store=store, memory=memory, is_native=is_native)
    pool = ThreadPoolExecutor(min(_MOST_THREADS, num_threads()), "moecache-trunk")
    try:
        found: Iterable[Callable[[], None]]
        try:
            # All that are smaller than a chunk in the order of the file.
            sizes = [weight.nbytes(store) // CHUNK_BYTES for weight in weights]
            order = sorted(range(len(weights)), key=lambda i: -sizes[i])
            futures = {i: pool.submit(read, weights[i]) for i in order}
            found = (futures[i].result() for i in range(len(weights)))
        except RuntimeError:  # no more threads to be had
            pool.shutdown(cancel_futures=True)
            found = map(read, weights)
        for put in logging.tqdm(found, desc="Reading the trunk", total=len(weights)):
            put()
    finally:
        pool.shutdown(cancel_futures=True)


def strip_quantized(
    model: transformers.PreTrainedModel, store: CheckpointStore
) -> list[TrunkWeight]:
    """Take the weights from a model that are quantized in a checkpoint; it reads the others.

    Raises
    ------
    ConfigError
        If one is put together from several, or has another shape in the model.
    """
    targets = Targets(model)
    taken, patterns = [], set()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, (matrix, _) in store.trunk_matrices.items():
        target = targets.parameter_of(name)
        if target is None or target in tied:
            continue  # belongs to a part that is not run, or shares another weight
        if target in tied.values():
            raise ConfigError(
                f"{store.path}: {name} is quantized, and tied to another weight; that is not "
                "supported"
            )
        path, _, leaf = target.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, leaf)
        if parameter.shape != (matrix.rows, matrix.columns):
            raise ConfigError(
                f"{store.path}: {name} is {[matrix.rows, matrix.columns]} in "
                f"{matrix.format.name}, but the model wants {list(parameter.shape)}: the "
                "checkpoint is of another model"
            )
        dtype = kept_dtype(model, target, take(module, leaf))
        taken.append(TrunkWeight(module, leaf, Source((name,)), dtype))
        patterns |= {f"^{_DIGITS.sub('[0-9]+', re.escape(key))}$" for key in (name, target)}
    if taken:
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *patterns, _BESIDE}
    return taken


def take(module: nn.Module, leaf: str) -> torch.dtype:
    """Take a parameter or buffer from a module, as if it had been read; return its dtype."""
    dtype: torch.dtype = getattr(module, leaf).dtype
    delattr(module, leaf)
    # Some models initialize every tensor that they find, also those that were read.
    taken: Any = torch.empty(0, dtype=dtype)
    taken._is_hf_initialized = True  # no row of it is padding
    module.__dict__[leaf] = taken
    if not module._non_persistent_buffers_set:
        # There is nothing to be initialized.
        module.__dict__["_is_hf_initialized"] = True
    return dtype
