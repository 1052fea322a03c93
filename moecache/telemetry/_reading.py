"""ReadingStats: how experts are read from their files."""

from dataclasses import dataclass
from typing import Final, Self

from moecache.reader._reader import Reader
from moecache.telemetry._difference import subtracted
from moecache.units import format_bytes

_COUNTERS: Final = ("num_reads", "num_retries", "bytes_read", "bytes_copied", "busy_ns")


@dataclass(frozen=True)
class ReadingStats:
    """How experts are read from their files, and how fast that went.

    Attributes
    ----------
    way : {"direct", "buffered"}
        Around the page cache, or through it.
    engine : {"io_uring", "threads"}
    depth, piece_bytes : int
        Most reads in flight, and the largest.
    staging_bytes : int
        Memory for what cannot be read straight into its slot.
    num_reads, num_retries : int
        Reads that the kernel was asked for; those asked for again.
    bytes_read, bytes_copied : int
        From the file, whole blocks; through staging.
    busy_ns : int
        While at least one read was outstanding, until a thread looked.
    disk_bytes_per_s : float or None
        The best rate of the disk, if it was measured.
    """

    way: str
    engine: str
    depth: int
    piece_bytes: int
    staging_bytes: int
    num_reads: int
    num_retries: int
    bytes_read: int
    bytes_copied: int
    busy_ns: int
    disk_bytes_per_s: float | None

    @classmethod
    def of(cls, reader: Reader, disk_bytes_per_s: float | None) -> Self:
        """Return what a reader did so far."""
        return cls(
            way="direct" if reader.direct else "buffered",
            engine=reader.engine,
            depth=reader.depth,
            piece_bytes=reader.piece_bytes,
            staging_bytes=reader.staging_bytes,
            num_reads=reader.num_reads,
            num_retries=reader.num_retries,
            bytes_read=reader.bytes_read,
            bytes_copied=reader.bytes_copied,
            busy_ns=reader.busy_ns,
            disk_bytes_per_s=disk_bytes_per_s,
        )

    @property
    def bytes_per_s(self) -> float:
        """Rate while at least one read was outstanding; 0.0 before the first."""
        return self.bytes_read / (self.busy_ns / 1e9) if self.busy_ns else 0.0

    def __sub__(self, earlier: "ReadingStats") -> "ReadingStats":
        """Return what was counted since an earlier snapshot; the rest is as it is now."""
        if not isinstance(earlier, ReadingStats):
            return NotImplemented
        return subtracted(self, earlier, _COUNTERS)

    def describe(self) -> str:
        """Return it as one line."""
        text = (
            f"reading {self.way} by {self.engine}, up to {self.depth} reads of "
            f"{format_bytes(self.piece_bytes)} at once; "
            f"{format_bytes(self.bytes_per_s)}/s while any was outstanding"
        )
        if self.disk_bytes_per_s:
            text += (
                f", {self.bytes_per_s / self.disk_bytes_per_s:.2f} of the disk's "
                f"{format_bytes(self.disk_bytes_per_s)}/s"
            )
        return f"{text}; {self.num_retries} retries" if self.num_retries else text
