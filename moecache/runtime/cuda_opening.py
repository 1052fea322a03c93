"""Slots on a GPU for `moecache.open`: how many fit, and what to do when they do not."""

import logging

from moecache.cuda import Device
from moecache.errors import CapacityError, ConfigError, MoeCacheError
from moecache.layout import ExpertLayout
from moecache.sizing.host_memory import free_host_bytes
from moecache.sizing.planning import num_staging_slots
from moecache.slots import CudaSlots
from moecache.stores.base import ExpertStore
from moecache.units import format_bytes

logger = logging.getLogger(__name__)

REGISTER_MODES = ("off", "host")


def check_register(register: str | None, device: Device | None, read: str | None) -> bool:
    """Return whether experts are to be pinned where they are mapped.

    Raises
    ------
    ConfigError
        If that is no mode, or does not go with the other arguments.
    """
    if register is None or register == "off":
        return False
    if register not in REGISTER_MODES:
        raise ConfigError(f"register {register!r} is not one of {', '.join(REGISTER_MODES)}")
    if device is None:
        raise ConfigError('register="host" is for slots on a GPU; give device="cuda"')
    if read not in {None, "mmap"}:
        raise ConfigError(f'register="host" maps the file; it does not go with read={read!r}')
    return True


def usable_bytes(device: Device, num_bytes: int) -> int:
    """Return as much of a budget as whole allocations of the device make."""
    whole = num_bytes // device.allocation_bytes * device.allocation_bytes
    return whole if whole > 0 else num_bytes


def make_slots(
    device: Device, layout: ExpertLayout, capacity: int, staging: int
) -> tuple[CudaSlots, int]:
    """Return slots and their number without those for staging: fewer, if not all of them fit.

    Somebody may have taken memory since it was asked how much there is.

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
            fewer_staging = num_staging_slots(layout.top_k, max(0, most))
            fewer = most - fewer_staging
            if fewer < 1:
                raise CapacityError(
                    f"{device.description} has {format_bytes(device.free_bytes())} free, too "
                    f"little for one expert of {format_bytes(slot_bytes)} and one for staging; "
                    "free some of it, or open before what takes it"
                ) from error
            capacity, staging = fewer, fewer_staging
            continue
        if capacity < wanted:
            logger.warning(
                "cuda.shrunk slots=%d instead of=%d: %s has too little memory",
                *(capacity, wanted, device.description),
            )
        return pool, capacity


def register_experts(pool: CudaSlots, store: ExpertStore) -> bool:
    """Pin a store's mapped experts, if there is memory for that; else say so, and return False."""
    regions = store.regions()
    wanted, free = sum(num_bytes for _, num_bytes in regions), free_host_bytes()
    if wanted > free * 4 // 5:
        logger.warning(
            "cuda.not_registered experts=%s free=%s: they go through buffers",
            *(format_bytes(wanted), format_bytes(free)),
        )
        return False
    try:
        num_bytes = pool.register(regions)
    except (MoeCacheError, MemoryError) as error:
        logger.warning("cuda.not_registered they go through buffers: %s", error)
        return False
    logger.info("cuda.registered bytes=%s", format_bytes(num_bytes))
    return True
