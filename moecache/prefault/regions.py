"""Regions: address ranges to be brought into memory, and the objects that keep them mapped."""

import operator
import os
from collections.abc import Iterable
from typing import Any, Self

from moecache._prefault import PAGE_SIZE, HeldBuffer
from moecache.errors import ConfigError

_ADDRESS_LIMIT = 2**64


class Region(tuple[int, int]):  # noqa: SLOT001 - a tuple subclass cannot have slots
    """An (address, nbytes) pair that keeps its memory mapped.

    Parameters
    ----------
    address, nbytes : int
        Beginning and length of the memory.
    owner : object
        An object that must stay alive for the address to be valid, such as an `mmap.mmap`.
    """

    owner: object

    def __new__(cls, address: int, nbytes: int, owner: object = None) -> Self:
        """Make the pair."""
        region = super().__new__(cls, (address, nbytes))
        region.owner = owner
        return region


def merge(regions: Any) -> tuple[list[tuple[int, int]], list[object]]:
    """Return page-aligned ranges, each page once, and what keeps them mapped.

    Ranges that touch or overlap become one. Ranges come in the order in which their
    first regions were given: a checkpoint's first layer stays first, wherever it is mapped.

    Parameters
    ----------
    regions : iterable of (address, nbytes) or contiguous buffers, or one buffer

    Raises
    ------
    ConfigError
        If a region is neither, is negative or goes past the end of the address space.
    """
    spans, owners = [], []
    for number, region in enumerate(listed(regions)):
        address, nbytes, owner = _parse_region(number, region)
        if owner is not None:
            owners.append(owner)
        if nbytes:
            start = address - address % PAGE_SIZE
            spans.append((start, -(-(address + nbytes) // PAGE_SIZE) * PAGE_SIZE, number))
    spans.sort()
    merged: list[list[int]] = []
    for start, stop, number in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
            merged[-1][2] = min(merged[-1][2], number)
        else:
            merged.append([start, stop, number])
    merged.sort(key=lambda span: span[2])
    return [(start, stop - start) for start, stop, _ in merged], owners


def listed(regions: Any) -> Iterable[Any]:
    """Return the regions as an iterable; a single buffer is one region.

    Raises
    ------
    ConfigError
        If it is neither a buffer nor an iterable.
    """
    if isinstance(regions, (str, os.PathLike)):
        raise ConfigError(
            f"regions are memory, and {os.fspath(regions)!r} is a path; open it, and give "
            "store.regions()"
        )
    if _hold(0, regions) is not None:
        return [regions]
    if not isinstance(regions, Iterable):
        raise ConfigError(f"regions must be a list of them or a buffer, got {regions!r}")
    return regions


def _hold(number: int, thing: Any) -> HeldBuffer | None:
    """Return a hold on the memory of `thing`, or None if `thing` is no buffer."""
    try:
        return HeldBuffer(thing)
    except TypeError:
        return None
    except (BufferError, ValueError) as error:
        raise ConfigError(f"region {number} cannot be held in place: {error}") from error


def _parse_region(number: int, region: Any) -> tuple[int, int, object]:
    held = _hold(number, region)
    if held is not None:
        return held.address, held.nbytes, held
    try:
        address, nbytes = (operator.index(value) for value in region)
    except (TypeError, ValueError):
        raise ConfigError(
            f"region {number} is neither (address, nbytes) nor a buffer: {str(region)[:100]}"
        ) from None
    if address < 0 or nbytes < 0:
        raise ConfigError(f"region {number} is negative: address {address}, {nbytes} bytes")
    # Rounded up to pages it must still end in the address space.
    if nbytes > _ADDRESS_LIMIT - PAGE_SIZE - address:
        raise ConfigError(
            f"region {number} ends beyond the address space: address {address:#x}, {nbytes} bytes"
        )
    owner = getattr(region, "owner", None)
    # Held, not only referred to: other code that has the mapping could close it.
    return address, nbytes, _hold(number, owner) or owner
