"""Where experts are used."""

from moecache.slots.base import SlotPool
from moecache.slots.host import HostSlots

__all__ = ["HostSlots", "SlotPool"]
