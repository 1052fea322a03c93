"""What a pack would write, and what it did."""

import os
from dataclasses import dataclass
from pathlib import Path

from moecache.units import format_bytes


@dataclass(frozen=True)
class PackPlan:
    """What `pack` would write, and whether there is room for it.

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
    """What `pack` did.

    Parameters
    ----------
    path : Path
        The packed directory.
    plan : PackPlan
        What is in it; `free_bytes` is from before.
    resumed_bytes : int
        Bytes that an earlier run had written.
    seconds : float
        How long this run took.
    """

    path: Path
    plan: PackPlan
    resumed_bytes: int
    seconds: float

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
