"""Trunk: the weights of a GGUF file beside its experts, in memory as kernels take them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from moecache.decoding.embedding import Embed, embed_numbers, embed_rows
from moecache.decoding.memory import CHUNK_BYTES, Memory
from moecache.decoding.recipe import Linear, Norm
from moecache.kernels import num_threads, tile
from moecache.kernels._kernels import Matrix
from moecache.stores import GgufStore

_MOST_THREADS = 4
# Types of numbers that kernels multiply as they are, by NumPy's names.
_TYPES = {"float32": "f32", "bfloat16": "bf16"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class Trunk:
    """Reads tensors by a few threads, each into its last place; a quantized matrix stays quantized.

    Methods wait for what they return, and raise what its read raised.

    Parameters
    ----------
    store : GgufStore
        Open until all is read.
    names : sequence of str
        Of tensors that are wanted, and that the file has.
    """

    def __init__(self, store: GgufStore, names: Sequence[str]) -> None:
        self._store, self._memory = store, Memory()
        self._matrices = store.trunk_matrices
        self._names = set(names)
        self._done: list[int] = []  # bytes of each tensor that is there
        # The largest first, lest a head keep one thread busy when all others are done; the others
        # in the order of the file. An embedding is multiplied by where it is the head, too, in
        # another form than its rows are.
        wanted = [name for name in names if name != EMBEDDING or HEAD not in self._names]
        order = sorted(wanted, key=lambda name: -(self._nbytes(name) // CHUNK_BYTES))
        # One more than compute forms: another reads meanwhile.
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, num_threads() + 1), "moecache-trunk")
        self._rows = self._pool.submit(self._read_rows)
        self._found: dict[str, Future[Any]] = {
            name: self._pool.submit(self._read, name) for name in order
        }

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor is one of the trunk's."""
        return name in self._names

    def progress(self) -> tuple[int, int]:
        """Return the bytes that are in memory, and of all."""
        done = sum(self._done)
        return done, max(done, self._store.trunk_bytes)

    def close(self) -> None:
        """End the threads; what was not begun is not read."""
        self._pool.shutdown(cancel_futures=True)

    def linear(self, name: str) -> Linear:
        """Return a product by its name without ".weight", with its bias if it has one."""
        bias = f"{name}.bias"
        return Linear(self.matrix(f"{name}.weight"), self.numbers(bias) if bias in self else None)

    def matrix(self, name: str) -> Matrix:
        """Return a weight [outputs, inputs]."""
        found, kind, rows, columns = self._found[name].result()
        return Matrix(found.ctypes.data, kind, rows, columns, None, found)

    def norm(self, name: str, epsilon: float) -> Norm:
        """Return a root mean square norm."""
        return Norm(self.numbers(name), epsilon)

    def numbers(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor of one dimension, float32."""
        found: np.ndarray = self._found[name].result()[0]
        return found

    def embed(self) -> Embed:
        """Return what writes tokens' embeddings."""
        embed: Embed = self._rows.result()
        return embed

    def _nbytes(self, name: str) -> int:
        if name not in self._matrices:
            return 0
        matrix = self._matrices[name][0]
        return matrix.format.nbytes(matrix.rows, matrix.columns)

    def _read(self, name: str) -> tuple[np.ndarray, str, int, int]:
        """Return an array, its type or format, and its rows and columns."""
        found = self._read_one(name)
        self._done.append(found[0].nbytes)
        return found

    def _read_one(self, name: str) -> tuple[np.ndarray, str, int, int]:
        if name not in self._matrices:
            return self._read_numbers(name)
        matrix = self._matrices[name][0]
        rows, columns, known = matrix.rows, matrix.columns, matrix.format
        assert known.form is not None  # `FileModel` has looked
        raw = self._memory.passing(known.nbytes(rows, columns))
        self._store.read_parts(name, raw)
        form = self._memory.lasting(known.form.nbytes(rows, columns))
        tile(raw, known.name, rows, columns, form)
        return form, known.name, rows, columns

    def _read_numbers(self, name: str) -> tuple[np.ndarray, str, int, int]:
        found = self._store.read_tensor(name)
        if found.dtype.name not in _TYPES or found.ndim != 2:
            # Norms, biases and what few bytes have another type.
            found = found.astype(np.float32)
        held = self._memory.lasting(found.nbytes).view(found.dtype).reshape(found.shape)
        held[...] = found
        rows, columns = found.shape if found.ndim == 2 else (1, found.size)
        return held, _TYPES[found.dtype.name], rows, columns

    def _read_rows(self) -> Embed:
        name = EMBEDDING
        if name not in self._matrices:
            return embed_numbers(self._read_numbers(name)[0])
        matrix = self._matrices[name][0]
        raw = self._memory.lasting(self._nbytes(name))
        self._store.read_parts(name, raw)
        self._done.append(raw.nbytes)
        rows = raw.reshape(matrix.rows, -1)
        embed = embed_rows(rows, matrix.format.name, matrix.columns, is_rounded=False)
        assert embed is not None
        return embed
