"""Trunk: a model's weights beside its experts, in memory as kernels take them."""

import math
import re
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from moecache.decoding.embedding import Embed, embed_numbers, embed_rows
from moecache.decoding.files.described import TensorStore
from moecache.decoding.memory import CHUNK_BYTES, Memory
from moecache.decoding.recipe import Linear, Norm
from moecache.kernels import num_threads, tile
from moecache.kernels._matrix import Matrix

_MOST_THREADS = 4
# Types of numbers that kernels multiply as they are, by NumPy's names.
_TYPES = {"float32": "f32", "bfloat16": "bf16"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Tensors that expand latents; older files have one of both.
_EXPANDING = re.compile(r"(blk\.\d+)\.attn_(?:k|v|kv)_b\.weight")
# What is numbers even if it is stored quantized: few, or not multiplied by kernels of matrices.
_NUMBERS = re.compile(
    r"blk\.\d+\.(?:attn_kv_b|ssm_conv1d(?:_[qkv])?|ssm_norm|shortconv\.conv)\.weight|blk\.\d+\.ssm_[ad]"
)
# Types whose values bfloat16 would not hold.
_WIDE = ("F32", "F16")


def is_made_numbers(name: str) -> bool:
    """Return whether a tensor becomes numbers even if it is quantized."""
    return _NUMBERS.fullmatch(name) is not None


def held_bytes(store: TensorStore, names: Collection[str]) -> int:
    """Return the memory that a trunk of some of a store's tensors takes."""
    total = 0
    for name in names:
        shape, kind = store.tensor_shapes[name], store.tensor_types[name]
        if _EXPANDING.fullmatch(name):
            total += math.prod(shape) * (4 if kind in _WIDE else 2)
        elif name not in store.trunk_matrices or is_made_numbers(name):
            total += math.prod(shape) * (2 if kind == "BF16" and len(shape) == 2 else 4)
        else:
            matrix = store.trunk_matrices[name][0]
            rows, columns, known = matrix.rows, matrix.columns, matrix.format
            if name == EMBEDDING:
                total += known.nbytes(rows, columns)  # rows are read one by one
            if name != EMBEDDING or HEAD not in names:
                assert known.form is not None  # `FileModel` has looked
                total += known.form.nbytes(rows, columns)
    return total


class Trunk:
    """Reads tensors by a few threads, each into its last place; a quantized matrix stays quantized.

    Methods wait for what they return, and raise what its read raised.

    Parameters
    ----------
    store : TensorStore
        Open until all is read.
    names : sequence of str
        Of tensors that are wanted, and that the file has.
    """

    def __init__(self, store: TensorStore, names: Sequence[str]) -> None:
        self._store, self._memory = store, Memory()
        self._matrices, self._types = store.trunk_matrices, store.tensor_types
        self._names = set(names)
        self._done: list[int] = []  # bytes of each tensor that is there
        self._num_bytes = held_bytes(store, self._names)
        # The largest first, lest a head keep one thread busy when all others are done; the others
        # in the order of the file. An embedding is multiplied by where it is the head, too, in
        # another form than its rows are.
        wanted = [
            name
            for name in names
            if (name != EMBEDDING or HEAD not in self._names) and not _EXPANDING.fullmatch(name)
        ]
        expanding = filter(None, map(_EXPANDING.fullmatch, names))
        order = sorted(wanted, key=lambda name: -(self._nbytes(name) // CHUNK_BYTES))
        # One more than compute forms: another reads meanwhile.
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, num_threads() + 1), "moecache-trunk")
        # An embedding of numbers that is the head, too, is there once.
        is_shared = HEAD not in self._names and EMBEDDING not in self._matrices
        self._rows = None if is_shared else self._pool.submit(self._read_rows)
        self._found: dict[str, Future[Any]] = {
            name: self._pool.submit(self._read, name) for name in order
        }
        self._expansions: dict[str, Future[np.ndarray]] = {
            at: self._pool.submit(self._read_expansion, at)
            for at in dict.fromkeys(match.group(1) for match in expanding)
        }

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor is one of the trunk's."""
        return name in self._names

    def progress(self) -> tuple[int, int]:
        """Return the bytes that are in memory, and of all."""
        done = sum(self._done)
        return done, max(done, self._num_bytes)

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
        """Return a norm; one that takes the mean off if it has a bias."""
        bias = f"{name.removesuffix('.weight')}.bias"
        return Norm(self.numbers(name), epsilon, self.numbers(bias) if bias in self else None)

    def numbers(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor of one dimension, float32."""
        found: np.ndarray = self._found[name].result()[0]
        return found

    def flat(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor, row by row, float32 [size]."""
        return np.ascontiguousarray(self.numbers(name).reshape(-1), np.float32)

    def transposed(self, name: str) -> np.ndarray:
        """Return a tensor of two dimensions that is made numbers, float32 [columns, rows]."""
        return np.ascontiguousarray(self.numbers(name).T, np.float32)

    def expansion(self, at: str, num_heads: int) -> np.ndarray:
        """Return what makes a head's key and value of a latent.

        Quantized values are rounded to bfloat16, others are as they are.

        Parameters
        ----------
        at : str
            Block, such as "blk.3".
        num_heads : int

        Returns
        -------
        ndarray of float32 or bfloat16, shape [num_heads, width + value_width, rank]
        """
        found = self._expansions[at].result()
        return found.reshape(num_heads, -1, found.shape[-1])

    def embed(self) -> Embed:
        """Return what writes tokens' embeddings."""
        if self._rows is None:
            return embed_numbers(self.numbers(EMBEDDING))
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
        if name not in self._matrices or is_made_numbers(name):
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

    def _read_expansion(self, at: str) -> np.ndarray:
        names = [f"{at}.attn_{part}_b.weight" for part in ("kv", "k", "v")]
        names = [name for name in names if name in self]
        is_wide = any(self._types[name] in _WIDE for name in names)
        dtype = np.float32 if is_wide else ml_dtypes.bfloat16
        found = [self._store.read_tensor(name).astype(dtype, copy=False) for name in names]
        if len(found) == 2:
            keys, values = found  # keys transposed, for products with a query
            found = [np.concatenate([keys.swapaxes(1, 2), values], axis=1)]
        joined = found[0]
        held = self._memory.lasting(joined.nbytes).view(dtype).reshape(joined.shape)
        held[...] = joined
        self._done.append(held.nbytes)
        return held

    def _read_rows(self) -> Embed:
        name = EMBEDDING
        if name not in self._matrices:
            return embed_numbers(self._read(name)[0])
        matrix = self._matrices[name][0]
        raw = self._memory.lasting(self._nbytes(name))
        self._store.read_parts(name, raw)
        self._done.append(raw.nbytes)
        rows = raw.reshape(matrix.rows, -1)
        embed = embed_rows(rows, matrix.format.name, matrix.columns, is_rounded=False)
        assert embed is not None
        return embed
