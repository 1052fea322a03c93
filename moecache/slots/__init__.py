"""The slots in which experts are used."""

from moecache.slots.base import SlotPool, UploadCounts
from moecache.slots.cuda import CudaSlots
from moecache.slots.host import HostSlots

__all__ = ["CudaSlots", "HostSlots", "SlotPool", "UploadCounts"]
