"""Source: the checkpoint that a model is made of, opened once for its weights and its experts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers

from moecache.errors import ConfigError, StoreError
from moecache.integrations.transformers._binding import Binding, bind, usual_compute
from moecache.integrations.transformers._experts import is_transposed
from moecache.integrations.transformers._slots import NUMPY_TYPES
from moecache.runtime import head_start
from moecache.stores import CheckpointStore, GgufStore, is_gguf, open_store


class Source:
    """An open checkpoint on its way through `from_pretrained`: copies are the same object.

    A context manager: leaving it closes the store, unless `take` was called; an error of a file
    that has changed meanwhile says so.

    Parameters
    ----------
    path : str, Path or CheckpointStore, optional
        A path is opened when it is first needed: without one, and if it is
        a name on the hub, as soon as `from_pretrained` has found its files.

    Attributes
    ----------
    path : str or Path
    layers : list of str
        Names of the layers that the model runs; empty until it is bound.
    dtype : numpy.dtype or None
        The type that experts are converted to as they are read; `None` if they are not.
    compute : str
        The multiplier if nobody says.
    """

    def __init__(self, path: str | os.PathLike[str] | CheckpointStore = "") -> None:
        self._store = path if isinstance(path, CheckpointStore) else None
        self.path = path.path if isinstance(path, CheckpointStore) else path
        self.layers: list[str] = []
        self.dtype: np.dtype[Any] | None = None
        self.compute = ""
        # Roles that are [in, out] in the checkpoint alone, and in the model, too.
        self._transposed: set[str] = set()
        self._turnable: set[str] = set()

    @property
    def store(self) -> CheckpointStore:
        """The open checkpoint."""
        assert self._store is not None
        return self._store

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file's."""
        return isinstance(self._store, GgufStore) or is_gguf(Path(self.path))

    def open(self, path: str | os.PathLike[str] | None = None) -> CheckpointStore:
        """Return the store, opened if it is not, by the path that `from_pretrained` found."""
        if self._store is None:
            self._store = open_store(path or self.path)
        return self._store

    def bind(
        self, model: transformers.PreTrainedModel, checkpoint_files: Sequence[str] | None
    ) -> list[Binding]:
        """Return where a model's experts are in the files that `from_pretrained` reads."""
        if self._store is None or not isinstance(self._store, GgufStore):
            _check_files(self.open(_directory_of(checkpoint_files)), checkpoint_files or ())
        bindings = bind(model, self.store)
        self._transposed = {role for one in bindings for role in one.transposed}
        turned = [one.layer for one in bindings if is_transposed(one.module)]
        roles = (role for layer in turned for role in self.store.layout.layers[layer])
        self._turnable = {role.name for role in roles if len(role.shape) == 2 and not role.format}
        self.layers = [binding.name for binding in bindings]
        self.dtype = _slot_dtype(self.store, bindings)
        self.compute = _usual_compute(self.store, bindings)
        return bindings

    def transpose(self, compute: str) -> None:
        """Have slots take matrices as the model has them, and as kernels want them."""
        turned = self._transposed if compute == "torch" else self._transposed | self._turnable
        self.store.transpose_roles(turned)

    def begin(self, prefault: str) -> None:
        """Have the trunk read already, if the files are known; `take` ends it."""
        if self._store is not None:
            head_start.begin(self._store, prefault)

    def take(self) -> CheckpointStore:
        """Return the store, which is the caller's to close from now on.

        Raises
        ------
        StoreError
            If transformers may have read other files by the same names.
        """
        self.store.check_current()
        store, self._store = self.store, None
        head_start.end(store)
        return store

    def close(self) -> None:
        """Close the store, if there is one."""
        if self._store is not None:
            head_start.end(self._store)
            self._store.close()
            self._store = None

    def __enter__(self) -> Self:
        """Return the source."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the store."""
        try:
            if isinstance(error, StoreError) and self._store is not None:
                self._store.check_current()
        except StoreError as changed:
            raise changed from error
        finally:
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the source itself: transformers copies what configurations have."""
        return self


def _directory_of(checkpoint_files: Sequence[str] | None) -> Path:
    if not checkpoint_files:
        raise ConfigError("experts are read from a checkpoint's safetensors files: there are none")
    wrong = [file for file in checkpoint_files if not str(file).endswith(".safetensors")]
    if wrong:
        raise ConfigError(
            f"{wrong[0]}: is no safetensors file; save the model again with save_pretrained"
        )
    return Path(checkpoint_files[0]).parent


def _check_files(store: CheckpointStore, checkpoint_files: Sequence[str]) -> None:
    found = {file.path.name for file in store.files}
    wanted = {Path(file).name for file in checkpoint_files}
    if found != wanted:
        raise ConfigError(
            f"{store.path}: transformers reads {', '.join(sorted(wanted)[:3])}, but experts would "
            f"be read from {', '.join(sorted(found)[:3])}: variants are not supported"
        )


def _usual_compute(store: CheckpointStore, bindings: list[Binding]) -> str:
    """Return what multiplies if nobody says: kernels, if they take all that slots will hold."""
    is_mixed = any(not role.format for roles in store.layout.layers for role in roles)
    if is_mixed and {binding.dtype for binding in bindings} & {torch.float16, torch.float64}:
        return "torch"
    return usual_compute(bindings, store.layout)


def _slot_dtype(store: CheckpointStore, bindings: list[Binding]) -> np.dtype[Any] | None:
    """Return the type that experts are converted to as they are read; `None` if they are not."""
    dtypes = {binding.dtype for binding in bindings}
    if len(dtypes) != 1 or not dtypes <= NUMPY_TYPES.keys():
        raise ConfigError(f"experts of {', '.join(map(str, dtypes))} are not supported")
    wanted = NUMPY_TYPES[dtypes.pop()]
    roles = [role for binding in bindings for role in store.layout.layers[binding.layer]]
    stored = {role.dtype for role in roles if not role.format}
    # Slots that hold the file's bytes are filled without a copy.
    return None if stored <= {wanted} else wanted
