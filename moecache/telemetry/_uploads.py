"""UploadStats: copies of experts into the memory of a GPU."""

from dataclasses import dataclass
from typing import Final

from moecache.slots import UploadCounts
from moecache.telemetry._difference import subtracted
from moecache.units import format_bytes

_COUNTERS: Final = ("num_uploads", "bytes_uploaded", "busy_ns")


@dataclass(frozen=True)
class UploadStats:
    """Copies of experts into slots on a GPU, and how fast they went.

    Attributes
    ----------
    device : str
        Such as "cuda:0 (NVIDIA H200)".
    num_uploads, bytes_uploaded : int
        Experts copied, and their bytes, as far as the copies are known to be done.
    busy_ns : int
        Time in which the device copied them, by its own clock.
    in_flight_bytes : int
        Bytes of copies that are not known to be done.
    pinned_bytes : int
        Memory of the host that is locked for copies.
    """

    device: str
    num_uploads: int
    bytes_uploaded: int
    busy_ns: int
    in_flight_bytes: int
    pinned_bytes: int

    @classmethod
    def of(cls, device: str, counts: UploadCounts) -> "UploadStats":
        """Return what a pool of slots counted so far."""
        return cls(
            device,
            counts.num_uploads,
            counts.num_bytes,
            counts.busy_ns,
            counts.in_flight_bytes,
            counts.pinned_bytes,
        )

    @property
    def bytes_per_s(self) -> float:
        """Rate while something was copied; 0.0 before the first."""
        return self.bytes_uploaded / (self.busy_ns / 1e9) if self.busy_ns else 0.0

    def __sub__(self, earlier: "UploadStats") -> "UploadStats":
        """Return what was counted since an earlier snapshot; the rest is as it is now."""
        if not isinstance(earlier, UploadStats):
            return NotImplemented
        return subtracted(self, earlier, _COUNTERS)

    def describe(self) -> str:
        """Return it as one line."""
        return (
            f"uploads to {self.device} {self.num_uploads}, {format_bytes(self.bytes_uploaded)} at "
            f"{format_bytes(self.bytes_per_s)}/s; {format_bytes(self.in_flight_bytes)} in flight, "
            f"{format_bytes(self.pinned_bytes)} pinned"
        )
