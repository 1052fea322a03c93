"""A pack's plan, and its report."""

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from moecache.units import format_bytes


@dataclass(frozen=True)
class Deviation:
    """How far quantized values are from the original ones.

    Parameters
    ----------
    error_sum, value_sum : float
        Sums of |quantized - original| and of |original|.
    error_max, value_max : float
        The largest of each.
    """

    error_sum: float = 0.0
    value_sum: float = 0.0
    error_max: float = 0.0
    value_max: float = 0.0

    @classmethod
    def between(cls, quantized: np.ndarray, original: np.ndarray) -> Self:
        """Return the deviation of some values."""
        values = original.astype(np.float32)
        error = np.abs(quantized - values)
        np.abs(values, out=values)
        return cls(
            *(float(array.sum(dtype=np.float64)) for array in (error, values)),
            *(float(array.max(initial=0)) for array in (error, values)),
        )

    @classmethod
    def of_all(cls, parts: "Iterable[Deviation]") -> Self:
        """Return the deviation of all values of which some are known each."""
        columns = list(zip(*map(astuple, parts), strict=True)) or [(0.0,)] * 4
        return cls(sum(columns[0]), sum(columns[1]), max(columns[2]), max(columns[3]))

    @property
    def mean(self) -> float:
        """Mean |error| as a share of the mean |value|."""
        return self.error_sum / self.value_sum if self.value_sum else 0.0

    @property
    def largest(self) -> float:
        """Largest |error| as a share of the largest |value|."""
        return self.error_max / self.value_max if self.value_max else 0.0


@dataclass(frozen=True)
class PackPlan:
    """The files that `pack` would write, and whether there is room for them.

    Parameters
    ----------
    num_layers, num_experts : int
        MoE layers, and experts of each.
    expert_bytes, trunk_bytes : int
        Bytes of the experts' tensors and of all others.
    padding_bytes : int
        Bytes that only align what follows.
    other_bytes : int
        Bytes of the other files that are copied along.
    total_bytes : int
        All of it, with headers.
    disk_bytes : int
        Room that all of it needs on the disk.
    free_bytes : int
        Room where it would be written; files of an unfinished run count as room.
    linked : tuple of (str, str)
        Files of the checkpoint that are links to files outside of it, and those files: their
        contents are packed as if they lay in the checkpoint.
    left_behind : tuple of (str, str)
        Links to directories and to nothing, and their targets as written: they are not copied.
    """

    num_layers: int
    num_experts: int
    expert_bytes: int
    trunk_bytes: int
    padding_bytes: int
    other_bytes: int
    total_bytes: int
    disk_bytes: int
    free_bytes: int
    linked: tuple[tuple[str, str], ...] = ()
    left_behind: tuple[tuple[str, str], ...] = ()

    @property
    def padding_share(self) -> float:
        """Share of padding in all that is written."""
        return self.padding_bytes / self.total_bytes

    def describe_links(self) -> list[str]:
        """Return which links leave the checkpoint, a line per directory, and which stay behind."""
        places: dict[str, list[str]] = {}
        for name, target in self.linked:
            places.setdefault(os.path.dirname(target), []).append(name)
        return [
            *(
                f"through links out of the checkpoint, to {place}: {', '.join(names)}"
                for place, names in places.items()
            ),
            *(f"left behind, a link to no file: {name} -> {to}" for name, to in self.left_behind),
        ]


@dataclass(frozen=True)
class PackReport:
    """The work that `pack` did.

    Parameters
    ----------
    path : Path
        The packed directory.
    plan : PackPlan
        The plan that was carried out; `free_bytes` is from before.
    resumed_bytes : int
        Bytes that an earlier run had written.
    seconds : float
        How long this run took.
    deviations : tuple of Deviation or None
        One for each layer's experts, if they were quantized; None for one that an earlier run
        packed without noting it.
    """

    path: Path
    plan: PackPlan
    resumed_bytes: int
    seconds: float
    deviations: tuple[Deviation | None, ...] = ()

    @property
    def gib_per_s(self) -> float:
        """GiB that this run wrote per second."""
        return (self.plan.total_bytes - self.resumed_bytes) / 2**30 / max(self.seconds, 1e-9)

    def describe(self) -> str:
        """Return the report in one line."""
        plan = self.plan
        resumed = (
            f", {format_bytes(self.resumed_bytes)} of it by an earlier run"
            if self.resumed_bytes
            else ""
        )
        return (
            f"packed {plan.num_layers} layers x {plan.num_experts} experts: "
            f"{format_bytes(plan.expert_bytes)} in experts, {format_bytes(plan.trunk_bytes)} in "
            f"trunk, {plan.padding_share:.2%} padding; {format_bytes(plan.total_bytes)} in all"
            f"{resumed}, in {self.seconds:.1f} s ({self.gib_per_s:.2f} GiB/s)"
        )

    def describe_deviations(self) -> list[str]:
        """Return a line for each layer that was quantized, under a line that says what it means."""
        if not self.deviations:
            return []
        lines = [
            "errors of quantized experts: mean |error| / mean |value|, and the largest of each",
        ]
        for layer, deviation in enumerate(self.deviations):
            said = "not known, packed by an earlier run"
            if deviation is not None:
                said = f"mean {deviation.mean:.3%}, largest {deviation.largest:.3%}"
            lines.append(f"layer {layer}: {said}")
        return lines
