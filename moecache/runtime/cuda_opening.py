"""Slots on a GPU for `moecache.open`: how many fit, and fewer where they do not."""

import logging

from moecache.cuda import Device
from moecache.errors import CapacityError
from moecache.layout import ExpertLayout
from moecache.sizing.planning import num_staging_slots
from moecache.slots import CudaSlots
from moecache.units import format_bytes

logger = logging.getLogger(__name__)


def usable_bytes(device: Device, num_bytes: int) -> int:
    """Return the part of a budget that whole allocations of the device can use."""
    whole = num_bytes // device.allocation_bytes * device.allocation_bytes
    return whole if whole > 0 else num_bytes


def most_on_gpu(
    device: Device, layout: ExpertLayout, capacity: int, staging: int, most: int | None = None
) -> tuple[int, int]:
    """Return how many slots a GPU has room for: the cache's, and those for staging.

    Parameters
    ----------
    device : Device
    layout : ExpertLayout
    capacity, staging : int
        Slots that are wanted.
    most : int, optional
        Slots that there is room for in all; by default the device is asked.

    Raises
    ------
    CapacityError
        If not even one fits beside one for staging.
    """
    slot_bytes = CudaSlots.bytes_per_slot(layout)
    free = device.free_bytes()
    most = usable_bytes(device, free) // slot_bytes if most is None else most
    if capacity + staging <= most:
        return capacity, staging
    staging = num_staging_slots(layout.top_k, max(0, most))
    if most - staging < 1:
        raise CapacityError(
            f"{device.description} has {format_bytes(free)} free, too little for one expert of "
            f"{format_bytes(slot_bytes)} and one for staging; free some of it, or open before "
            "what takes it"
        )
    return most - staging, staging


def make_slots(
    device: Device, layout: ExpertLayout, capacity: int, staging: int
) -> tuple[CudaSlots, int]:
    """Return the slots, and the number of them for the cache: fewer than asked if need be.

    Other programs may have taken memory since the free bytes were counted.

    Raises
    ------
    CapacityError
        If not even one fits.
    """
    wanted = capacity
    slot_bytes = CudaSlots.bytes_per_slot(layout)
    while True:
        try:
            pool = CudaSlots(layout, capacity, staging, device)
        except MemoryError as error:
            most = min((capacity + staging) * 15 // 16, device.free_bytes() // slot_bytes)
            try:
                capacity, staging = most_on_gpu(device, layout, capacity, staging, most)
            except CapacityError as too_little:
                raise too_little from error
            continue
        if capacity < wanted:
            logger.warning(
                "cuda.shrunk slots=%d instead of=%d: %s has too little memory",
                capacity,
                wanted,
                device.description,
            )
        return pool, capacity
