"""Share: the experts of one rank."""

import os
from functools import cached_property
from pathlib import Path

import numpy as np

from moecache.errors import ConfigError
from moecache.layout import ExpertLayout
from moecache.ranks._placement import Placement


class Share:
    """The experts of one rank, by a placement.

    A runtime that is opened with a share (`moecache.open(..., share=)`) has slots for these experts
    alone, and drops all other ids of a step: their rows are another rank's.

    Parameters
    ----------
    placement : Placement
    rank : int

    Attributes
    ----------
    held : ndarray of bool, shape [num_layers, num_experts]
        Read-only.

    Raises
    ------
    ConfigError
        If the placement has no such rank.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        if not 0 <= rank < placement.num_ranks:
            raise ConfigError(f"rank {rank} is not in [0, {placement.num_ranks})")
        self.placement = placement
        self.rank = rank
        self.held: np.ndarray = placement.owners == rank
        self.held.flags.writeable = False

    @cached_property
    def num_experts(self) -> int:
        """Experts of all layers that the rank holds."""
        return int(self.held.sum())

    def num_bytes(self, layout: ExpertLayout) -> int:
        """Return the bytes of the rank's experts, as stored."""
        counts = self.held.sum(1).tolist()
        return sum(count * layout.expert_bytes(layer) for layer, count in enumerate(counts))

    def check(self, layout: ExpertLayout) -> None:
        """Raise ConfigError if the placement is of another model."""
        found = layout.num_layers, layout.num_experts
        if found != self.held.shape:
            raise ConfigError(
                f"the placement is of {self.held.shape[0]} x {self.held.shape[1]} experts, and the "
                f"model has {found[0]} x {found[1]}; make one for it by moecache plan-ranks"
            )

    def ranks_of(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """Return the rank that computes each pair of a step: the same on every rank.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, any shape
            From 0 to num_experts - 1.

        Returns
        -------
        ndarray of int32, shape [ids.size]
        """
        ranks: np.ndarray = self.placement.owners[layer, ids.reshape(-1)]
        return ranks

    def of(self, layer: int, ids: np.ndarray, *, ignore_out_of_range: bool = False) -> np.ndarray:
        """Return a step's ids with -1 in the place of each that another rank computes.

        Raises
        ------
        ValueError
            If the layer or an id is out of range, unless such ids are to be ignored.
        """
        num_layers, num_experts = self.held.shape
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} is not in [0, {num_layers})")
        if not ids.size:
            return ids
        known = (ids >= 0) & (ids < num_experts)
        if not known.all():
            if not ignore_out_of_range:
                raise ValueError(f"expert {ids[~known][0]} is not in [0, {num_experts})")
            mine = np.full_like(ids, -1)
            mine[known] = self.of(layer, ids[known])
            return mine
        computed = self.ranks_of(layer, ids).reshape(ids.shape) == self.rank
        return np.where(computed, ids, np.asarray(-1, ids.dtype))

    def own_path(self, path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
        """Return what a file that each rank writes is called for this one."""
        if path is None:
            return None
        given = Path(path)
        return given.with_name(
            f"{given.stem}.rank{self.rank}-of-{self.placement.num_ranks}{given.suffix}"
        )

    def __repr__(self) -> str:
        return (
            f"<Share of rank {self.rank} of {self.placement.num_ranks}: {self.num_experts} of "
            f"{self.held.size} experts>"
        )
