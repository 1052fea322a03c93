"""Placement: which rank owns which expert of each layer."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from moecache.errors import ConfigError, FormatError
from moecache.ranks._balance import deal, level, quotas
from moecache.ranks._checks import check_ranks, check_sizes, parse_copies, parse_shares
from moecache.ranks._file import VERSION, read_fields, write_fields


class Placement:
    """Which rank owns which expert of each layer. Cannot be changed.

    Each expert has one owner. Other ranks may hold copies of it; `ranks_of` then says which of
    its holders computes it in a step, the same on every rank. An expert is never computed by two
    ranks in one step.

    Parameters
    ----------
    owners : array of integers, shape [num_layers, num_experts]
        Rank of each expert, from 0.
    num_ranks : int
        From 1 to 4,096. Each must own an expert.
    copies : iterable of (layer, expert, rank), optional
        Ranks that hold an expert beside its owner.
    shares : sequence of float, length num_ranks, optional
        What each rank can do of the whole. By default all the same. Scaled to a sum of 1.

    Attributes
    ----------
    owners : ndarray of int32, shape [num_layers, num_experts]
        Read-only.
    num_ranks : int
    copies : ndarray of int32, shape [num_copies, 3]
        Rows (layer, expert, rank), sorted. Read-only.
    shares : ndarray of float64, shape [num_ranks]
        Read-only.

    Raises
    ------
    ConfigError
        If an argument cannot be used.
    """

    owners: np.ndarray
    num_ranks: int
    copies: np.ndarray
    shares: np.ndarray

    def __init__(
        self,
        owners: npt.ArrayLike,
        num_ranks: int,
        *,
        copies: Iterable[tuple[int, int, int]] = (),
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
        self._set(ranks.astype(np.int32), num_ranks, parse_copies(copies, ranks, num_ranks), shares)

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

        Of each layer a rank owns its share of the experts, to the next whole number, and close
        to its share of the uses. With even shares, the busiest rank of a layer is above the
        ranks' mean by less than the busiest expert's uses, and has no more than with `even`.

        Parameters
        ----------
        counts : array of numbers, shape [num_layers, num_experts]
            How often each expert was used; not negative.
        num_ranks : int
        shares : sequence of float, length num_ranks, optional
            What each rank can take of the whole, such as its bytes of memory. By default all
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
        """Return the experts of a layer that a rank holds, its copies among them.

        Returns
        -------
        ndarray of int32, increasing
        """
        self._check_rank(rank)
        return np.flatnonzero(self.holders(layer)[rank]).astype(np.int32)

    def holders(self, layer: int) -> np.ndarray:
        """Return which ranks hold which experts of a layer: bool [num_ranks, num_experts]."""
        self._check_layer(layer)
        held = np.arange(self.num_ranks)[:, None] == self.owners[layer]
        _, experts, ranks = self._layer_copies(layer).T
        held[ranks, experts] = True
        return held

    def num_held(self) -> np.ndarray:
        """Return how many experts each rank holds of each layer: int64 [num_ranks, num_layers]."""
        keys = self.owners.T.astype(np.int64) * self.num_layers + np.arange(self.num_layers)
        size = self.num_ranks * self.num_layers
        held = np.bincount(keys.reshape(-1), minlength=size)
        layers, _, ranks = self.copies.T.astype(np.int64)
        held += np.bincount(ranks * self.num_layers + layers, minlength=size)
        return held.reshape(self.num_ranks, self.num_layers)

    def ranks_of(self, layer: int, experts: npt.ArrayLike) -> np.ndarray:
        """Return the rank that computes each expert of a step.

        The owner, where there are no copies. One that has copies goes to the holder with the
        least to do so far for its share, and stays with its owner if that is among them. The
        answer depends on the set of experts alone, so that every rank finds the same.

        Parameters
        ----------
        layer : int
        experts : array of integers, shape [n]
            What the step uses of the layer, each once.

        Returns
        -------
        ndarray of int32, shape [n]
        """
        self._check_layer(layer)
        used = np.asarray(experts)
        ranks = self.owners[layer, used]
        others = self._others[layer]
        if not others:
            return ranks
        places = {expert: place for place, expert in enumerate(used.tolist()) if expert in others}
        fixed = np.ones(len(used), bool)
        fixed[list(places.values())] = False
        weights = (1 / self.shares).tolist()
        work = (np.bincount(ranks[fixed], minlength=self.num_ranks) / self.shares).tolist()
        moved = ranks.copy()
        for expert in sorted(places):
            place = places[expert]
            holders = [int(ranks[place]), *others[expert]]
            chosen = min(holders, key=lambda rank: work[rank] + weights[rank])
            moved[place] = chosen
            work[chosen] += weights[chosen]
        # One after the other is not always best: never worse than without copies.
        owned = np.bincount(ranks, minlength=self.num_ranks) / self.shares
        return moved if max(work) <= owned.max() * (1 + 1e-12) else ranks

    def loads(self, counts: npt.ArrayLike) -> np.ndarray:
        """Return the uses that each rank can expect in each layer.

        The uses of an expert with copies are parted so that its holders have as much to do for
        their shares as can be.

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
        found = np.zeros((self.num_ranks, self.num_layers))
        for layer, others in enumerate(self._others):
            alone = uses[layer].copy()
            alone[list(others)] = 0.0
            found[:, layer] = np.bincount(self.owners[layer], alone, self.num_ranks)
            for expert in sorted(others, key=lambda one: (-uses[layer, one], one)):
                holders = np.array([self.owners[layer, expert], *others[expert]])
                found[holders, layer] += level(
                    uses[layer, expert], found[holders, layer], self.shares[holders]
                )
        return found

    def with_copies(self, copies: Iterable[tuple[int, int, int]]) -> Self:
        """Return the placement with other copies: rows (layer, expert, rank)."""
        return type(self)(self.owners, self.num_ranks, copies=copies, shares=self.shares)

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hex: the same on ranks that agree."""
        found = hashlib.sha256(
            f"moecache placement {VERSION} {self.num_ranks} {self.owners.shape}".encode()
        )
        for array in (self.owners.astype("<i4"), self.copies.astype("<i4")):
            found.update(array.tobytes())
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
            If it cannot be written. What was there before still is.
        """
        write_fields(
            *(path, self.num_ranks, self.shares, self.owners, self.copies, self.digest),
            force=force,
        )

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
            made = cls(
                found["owners"], found["num_ranks"], copies=found["copies"], shares=found["shares"]
            )
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(f"{path}: {error}") from error
        if made.digest != found["digest"]:
            raise FormatError(
                f"{path}: is not as it was written (its digest differs); make it anew by plan-ranks"
            )
        return made

    def __eq__(self, other: object) -> bool:
        """Return whether every expert is on the same ranks."""
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
        copies = f", {len(self.copies)} copies" if len(self.copies) else ""
        return (
            f"<Placement of {self.num_layers} x {self.num_experts} experts on "
            f"{self.num_ranks} ranks{copies}>"
        )

    def __getstate__(self) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        """Return what is pickled."""
        return self.owners, self.num_ranks, self.copies, self.shares

    def __setstate__(self, state: tuple[np.ndarray, int, np.ndarray, np.ndarray]) -> None:
        """Take what was pickled."""
        self._set(*state)

    def _set(
        self,
        owners: np.ndarray,
        num_ranks: int,
        copies: np.ndarray,
        shares: Sequence[float] | np.ndarray | None,
    ) -> None:
        parts = parse_shares(shares, num_ranks)
        for array in (owners, copies, parts):
            array.flags.writeable = False
        # Past the __setattr__ that refuses every other write.
        vars(self).update(owners=owners, num_ranks=int(num_ranks), copies=copies, shares=parts)

    @cached_property
    def _others(self) -> list[dict[int, list[int]]]:
        """Which ranks beside the owner hold an expert, by layer."""
        found: list[dict[int, list[int]]] = [{} for _ in range(self.num_layers)]
        for layer, expert, rank in self.copies.tolist():
            found[layer].setdefault(expert, []).append(rank)
        return found

    def _layer_copies(self, layer: int) -> np.ndarray:
        first, last = np.searchsorted(self.copies[:, 0], (layer, layer + 1))
        return self.copies[first:last]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer {layer} is not in [0, {self.num_layers})")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank {rank} is not in [0, {self.num_ranks})")
