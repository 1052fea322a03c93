"""Placement: which rank owns which expert of each layer."""

import hashlib
import os
from collections.abc import Sequence
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.ranks._balance import deal, quotas
from moecache.ranks._checks import check_ranks, check_sizes, parse_shares
from moecache.ranks._file import VERSION, read_fields, write_fields


class Placement:
    """Which rank owns which expert of each layer. Cannot be changed.

    Each expert has one owner, which alone holds and computes it.

    Parameters
    ----------
    owners : array of integers, shape [num_layers, num_experts]
        Rank of each expert, from 0.
    num_ranks : int
        From 1 to 4,096. Each must own an expert.
    shares : sequence of float, length num_ranks, optional
        Each rank's share of the work. By default all the same. Scaled to a sum of 1.

    Attributes
    ----------
    owners : ndarray of int32, shape [num_layers, num_experts]
        Read-only.
    num_ranks : int
    shares : ndarray of float64, shape [num_ranks]
        Read-only.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    """

    owners: np.ndarray
    num_ranks: int
    shares: np.ndarray

    def __init__(
        self,
        owners: npt.ArrayLike,
        num_ranks: int,
        *,
        shares: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        ranks = np.array(owners)
        if ranks.ndim != 2 or ranks.dtype.kind not in "iu" or not ranks.size:
            raise ConfigError(
                f"owners must be integers [num_layers, num_experts], got {ranks.dtype} "
                f"{list(ranks.shape)}"
            )
        check_ranks(num_ranks, ranks.shape[1])
        if ranks.min() < 0 or ranks.max() >= num_ranks:
            raise ConfigError(
                f"owners must be ranks from 0 to {num_ranks - 1}, got {ranks.min()} to "
                f"{ranks.max()}"
            )
        idle = np.flatnonzero(np.bincount(ranks.reshape(-1), minlength=num_ranks) == 0)
        if len(idle):
            raise ConfigError(
                f"rank {idle[0]} of {num_ranks} owns no expert; use fewer ranks, or give it a "
                "larger share"
            )
        self._set(ranks.astype(np.int32), num_ranks, shares)

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_ranks: int) -> Self:
        """Return a placement in turn, so that no rank has two experts more than another.

        Expert e of layer l goes to rank (e + l) % num_ranks: where the experts of a layer do
        not go up evenly, every layer has its rest on other ranks.

        Parameters
        ----------
        num_layers, num_experts : int
            Experts are those of one layer.
        num_ranks : int

        Raises
        ------
        ConfigError
            If there are more ranks than experts of a layer, or none.
        """
        check_sizes(num_layers, num_experts)
        check_ranks(num_ranks, num_experts)
        layers, experts = np.arange(num_layers)[:, None], np.arange(num_experts)[None, :]
        return cls((layers + experts) % num_ranks, num_ranks)

    @classmethod
    def balanced(
        cls,
        counts: npt.ArrayLike,
        num_ranks: int,
        shares: Sequence[float] | np.ndarray | None = None,
    ) -> Self:
        """Return a placement in which all ranks are used alike, in every layer.

        A rank owns its share of each layer's experts, to the next whole number, and close
        to its share of the uses. With even shares, the busiest rank of a layer is above the
        ranks' mean by less than the busiest expert's uses, and has no more than with `even`.

        Parameters
        ----------
        counts : array of numbers, shape [num_layers, num_experts]
            How often each expert was used; not negative.
        num_ranks : int
        shares : sequence of float, length num_ranks, optional
            Each rank's room, such as its bytes of memory. By default all
            the same.

        Raises
        ------
        ConfigError
            If an argument cannot be used, or a share is too small for one expert.
        """
        uses = np.asarray(counts)
        if uses.ndim != 2 or uses.dtype.kind not in "iuf" or not uses.size:
            raise ConfigError(
                f"counts must be numbers [num_layers, num_experts], got {uses.dtype} "
                f"{list(uses.shape)}"
            )
        uses = uses.astype(np.float64)
        if not np.isfinite(uses).all() or uses.min() < 0:
            raise ConfigError("counts must be finite, and not negative")
        check_ranks(num_ranks, uses.shape[1])
        parts = parse_shares(shares, num_ranks)
        owners = np.empty(uses.shape, np.int32)
        for layer, quota in enumerate(quotas(parts, *uses.shape)):
            owners[layer] = deal(uses[layer], quota, parts, first=layer)
        return cls(owners, num_ranks, shares=parts)

    @property
    def num_layers(self) -> int:
        """Layers that have routed experts."""
        return self.owners.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self.owners.shape[1]

    def experts(self, rank: int, layer: int) -> np.ndarray:
        """Return the experts of a layer that a rank owns.

        Returns
        -------
        ndarray of int32, increasing
        """
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer {layer} is not in [0, {self.num_layers})")
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is not in [0, {self.num_ranks})")
        return np.flatnonzero(self.owners[layer] == rank).astype(np.int32)

    def num_held(self) -> np.ndarray:
        """Return how many experts each rank owns of each layer: int64 [num_ranks, num_layers]."""
        return np.array([(self.owners == rank).sum(1) for rank in range(self.num_ranks)])

    def loads(self, counts: npt.ArrayLike) -> np.ndarray:
        """Return the uses that each rank can expect in each layer.

        Parameters
        ----------
        counts : array of numbers, shape [num_layers, num_experts]

        Returns
        -------
        ndarray of float64, shape [num_ranks, num_layers]
        """
        uses = np.asarray(counts, np.float64)
        if uses.shape != self.owners.shape:
            raise ConfigError(
                f"counts are {list(uses.shape)}, the placement is of {list(self.owners.shape)} "
                "experts; use those of the same model"
            )
        found = [
            np.bincount(owners, row, self.num_ranks)
            for owners, row in zip(self.owners, uses, strict=True)
        ]
        return np.stack(found, axis=1)

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex: the same on ranks that agree."""
        found = hashlib.sha256(
            f"moecache placement {VERSION} {self.num_ranks} {self.owners.shape}".encode()
        )
        found.update(self.owners.astype("<i4").tobytes())
        found.update(self.shares.astype("<f8").tobytes())
        return found.hexdigest()

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write it as JSON: a file that `load` and people can read.

        Parameters
        ----------
        path : str or Path
        force : bool, default False
            Replace a file that is no placement.

        Raises
        ------
        ConfigError
            If something else is there.
        StoreError
            If it cannot be written. The file that was there is kept.
        """
        write_fields(path, self.num_ranks, self.shares, self.owners, self.digest, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        FormatError
            If it is no placement, or was changed.
        StoreError
            If it cannot be read.
        """
        found = read_fields(path)
        try:
            made = cls(found["owners"], found["num_ranks"], shares=found["shares"])
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"{path}: {error}") from error
        if made.digest != found["digest"]:
            raise FormatError(
                f"{path}: is not as it was written (its digest differs); make it anew by plan-ranks"
            )
        return made

    def __eq__(self, other: object) -> bool:
        """Return whether every expert is on the same rank."""
        if not isinstance(other, Placement):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        """Return a hash of all of it."""
        return hash(self.digest)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Raise: a placement cannot be changed."""
        raise AttributeError(f"a placement cannot be changed: make another to set {name!r}")

    def __repr__(self) -> str:
        return (
            f"<Placement of {self.num_layers} x {self.num_experts} experts on "
            f"{self.num_ranks} ranks>"
        )

    def __getstate__(self) -> tuple[np.ndarray, int, np.ndarray]:
        """Return what is pickled."""
        return self.owners, self.num_ranks, self.shares

    def __setstate__(self, state: tuple[np.ndarray, int, np.ndarray]) -> None:
        """Take what was pickled."""
        self._set(*state)

    def _set(
        self, owners: np.ndarray, num_ranks: int, shares: Sequence[float] | np.ndarray | None
    ) -> None:
        parts = parse_shares(shares, num_ranks)
        for array in (owners, parts):
            array.flags.writeable = False
        # Past the __setattr__ that refuses every other write.
        vars(self).update(owners=owners, num_ranks=int(num_ranks), shares=parts)
