"""How far a sweep has come, and its result."""

from dataclasses import dataclass
from typing import NamedTuple

from moecache.units import format_bytes


class Done(NamedTuple):
    """How far a sweep has come."""

    done_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """The share that is done, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclass(frozen=True)
class PrefaultReport:
    """The result of a sweep.

    Parameters
    ----------
    ran : bool
        Whether any page was swept.
    reason : str
        The reason of the verdict; "resident" if all was in memory already; "cancelled".
    num_bytes, num_pages : int
        Bytes asked for, in whole pages, each page once.
    already_resident_bytes : int
        Bytes that were in memory before (cachestat, mincore). 0 for files that this
        user neither owns nor may write: the kernel does not tell about those.
    done_bytes : int
        Bytes that were swept; less than `num_bytes` if cancelled.
    seconds : float
        0.0 if it did not run.
    gib_per_s : float
        `done_bytes` over `seconds`; 0.0 if it did not run.
    major_faults : int
        Page faults of the whole process, meanwhile, that waited for a disk.
    read_back_bytes : int
        Bytes that were read once more after they had arrived: in a virtual machine whose
        host takes back freed memory, the first access to a page costs
        microseconds although the page is in memory.
    num_threads : int
        The largest number of threads that swept at once.
    method : str
        "populate", "read" or "touch"; empty if the gate refused.
    message : str
        The reason in words.
    """

    ran: bool
    reason: str
    num_bytes: int
    num_pages: int
    already_resident_bytes: int = 0
    done_bytes: int = 0
    seconds: float = 0.0
    gib_per_s: float = 0.0
    major_faults: int = 0
    read_back_bytes: int = 0
    num_threads: int = 0
    method: str = ""
    message: str = ""

    def describe(self) -> str:
        """Return the report as one line."""
        if not self.ran:
            return f"not swept: {self.message}"
        text = (
            f"{format_bytes(self.done_bytes)} in {self.seconds:.2f} s, {self.gib_per_s:.2f} GiB/s"
        )
        if self.already_resident_bytes:
            text += f"; {format_bytes(self.already_resident_bytes)} were in memory before"
        if self.reason == "cancelled":
            text += f"; cancelled, of {format_bytes(self.num_bytes)}"
        return text
