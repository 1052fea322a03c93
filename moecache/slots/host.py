"""HostSlots: slots in RAM, as NumPy arrays."""

import resource
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import numpy as np
import numpy.typing as npt

from moecache._prefault import PAGE_SIZE, give_back_pages, lock_pages, resident_pages
from moecache.errors import CapacityError, ConfigError, FormatError, MoeCacheError
from moecache.kernels._tiler import Tiler
from moecache.layout import ExpertLayout
from moecache.prefault.regions import Region
from moecache.slots._bounces import BounceBuffers
from moecache.slots._held import Held, hold_all, strides_of
from moecache.slots._memory import aligned_rows, check_parts
from moecache.slots.base import UploadCounts
from moecache.units import format_bytes

# An expert that is converted needs memory of its own between file and slot.
MAX_CONVERTED_BYTES = 32 * 2**20
_NO_UPLOADS = UploadCounts()


class HostSlots:
    """Slots in RAM: one 64-byte-aligned slab per role, every slot in it aligned too.

    A role with a format lies in the format's compute form, an array of bytes: weights are
    brought into it as a slot is filled, unless the file has that form.

    Pages are allocated when a slot is first filled, or by a pre-fault of `regions`.

    Parameters
    ----------
    layout : ExpertLayout
    num_slots : int
        At least 1.
    dtype : numpy dtype, optional
        Convert floating-point roles to it when a slot is filled (bfloat16 to
        float32, say, so that products need no conversion at every use). By
        default slots hold the bytes of the file.

    Raises
    ------
    ConfigError
        If `num_slots` is below 1, the layout has no experts, or `dtype` is not a
        floating-point type.
    MemoryError
        If the slabs cannot be allocated.
    """

    def __init__(
        self, layout: ExpertLayout, num_slots: int, *, dtype: npt.DTypeLike | None = None
    ) -> None:
        if num_slots < 1:
            raise ConfigError(f"need at least 1 slot, got {num_slots}")
        if layout.total_experts == 0:
            raise ConfigError("the layout has no experts; is it a mixture-of-experts model?")
        self._layout = layout
        self._num_slots = num_slots
        self._held = hold_all(layout, _float_dtype(dtype))
        self._slabs: dict[str, np.ndarray] = {}
        self._converts = _converts(self._held)
        self._fills = [_all_tiled(roles) for roles in self._held]
        # Layers alike have one number: views of a buffer, or of a slot, are made once for them.
        numbers = {id(roles): number for number, roles in enumerate(self._held)}
        self._variants = [numbers[id(roles)] for roles in self._held]
        self._targets: dict[tuple[int, int], tuple[tuple[Tiler, str, int, np.ndarray], ...]] = {}
        self._views: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}
        every = (held for roles in self._held for held in roles.values())
        self._has_checks = any(held.has_to_be_checked for held in every)
        self._num_buffers = _num_buffers(layout, num_slots) if self._converts else 0
        for name, stride in strides_of(self._held).items():
            try:
                self._slabs[name] = aligned_rows(num_slots, stride)
            except MemoryError as error:
                size = format_bytes(num_slots * stride)
                raise MemoryError(
                    f"no memory for {num_slots} slots of role {name!r} ({size}); lower the budget"
                ) from error
        self._bounces = BounceBuffers(self._held, self._variants, self._num_buffers)

    def align_to_file(self, offsets: Sequence[Mapping[str, int]], unit: int) -> None:
        """Have buffers begin where a direct read goes straight into them.

        To be called before anything is read: it does nothing while a buffer is in use, nor for a
        unit above 4096.

        Parameters
        ----------
        offsets : sequence of dict of role to int
            Of each layer, where in a file a role of an expert begins.
        unit : int
            Addresses get the same remainder as offsets, divided by it.
        """
        self._bounces.align_to_file(offsets, unit)

    @staticmethod
    def bytes_per_slot(layout: ExpertLayout, dtype: npt.DTypeLike | None = None) -> int:
        """Return the bytes that one slot takes: all roles, converted and aligned."""
        return sum(strides_of(hold_all(layout, _float_dtype(dtype))).values())

    @property
    def layout(self) -> ExpertLayout:
        """The layout of the experts in the file."""
        return self._layout

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def regions(self) -> list[Region]:
        """Return (address, nbytes) of the memory that slots take."""
        return [Region(slab.ctypes.data, slab.nbytes, slab) for slab in self._slabs.values()]

    def lock(self) -> None:
        """Keep the slots in memory until the pool is closed (mlock).

        Raises
        ------
        CapacityError
            If the system's limit is too low.
        """
        for region in self.regions():
            try:
                lock_pages(*region)
            except OSError as error:
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                allowed = "any number" if limit < 0 else format_bytes(limit)
                raise CapacityError(
                    f"slots of {format_bytes(self.nbytes)} cannot be locked: {error.strerror}; "
                    f"the limit is {allowed}: raise it with ulimit -l, or do not lock"
                ) from error

    def count_backed(self, slots: Collection[int]) -> int:
        """Return how many of some slots have memory: those that were filled, or backed ahead."""
        widest = max(self._open().values(), key=lambda slab: slab.shape[1])
        address, stride = widest.ctypes.data, widest.shape[1]
        middles = (address + slot * stride + stride // 2 for slot in slots)
        return sum(resident_pages(middle - middle % PAGE_SIZE, 1) for middle in middles)

    def discard(self, slots: Collection[int]) -> None:
        """Give the memory of slots back; they are zeros until they are filled anew."""
        for slab in self._open().values():
            address, stride = slab.ctypes.data, slab.shape[1]
            for slot in slots:
                give_back_pages(address + slot * stride, stride)

    def slab(self, role: str) -> np.ndarray:
        """Return all slots of a role, an array [num_slots, *shape].

        Raises
        ------
        ConfigError
            If there is no such role, or layers differ in its shape or dtype: use
            `expert` there.
        """
        slabs = self._open()
        held = {roles[role] for roles in self._held if role in roles}
        if len(held) != 1:
            problem = "layers differ in it" if held else "there is no such role"
            raise ConfigError(f"no slab for role {role!r}: {problem}")
        raw = slabs[role]
        shape, dtype = (one := held.pop()).shape, one.dtype
        item_strides = np.empty(shape, dtype).strides if 0 not in shape else (0,) * len(shape)
        return np.ndarray(
            (self._num_slots, *shape), dtype, raw, strides=(raw.shape[1], *item_strides)
        )

    def expert(self, slot: int, layer: int) -> dict[str, np.ndarray]:
        """Return one slot as arrays per role, in the shapes of `layer`."""
        slabs = self._open()
        self._layout.check(layer)
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} is not in [0, {self._num_slots})")
        return {name: held.view(slabs[name][slot]) for name, held in self._held[layer].items()}

    @property
    def converts(self) -> bool:
        """Whether slots have other bytes than the file."""
        return self._converts

    @property
    def max_buffers(self) -> int | None:
        """Experts that may be converted at once: two thirds of those that 32 MiB hold."""
        return self._num_buffers - self._num_buffers // 3 if self._converts else None

    @property
    def max_buffers_ahead(self) -> int | None:
        """The other third; None if none is converted."""
        return self._num_buffers // 3 if self._converts else None

    @property
    def uploads(self) -> UploadCounts:
        """All zero: `upload` itself copies."""
        return _NO_UPLOADS

    def buffers(self, slot: int, layer: int) -> Mapping[str, np.ndarray]:
        """Return the slot's own arrays; for roles that are converted, a buffer's until `upload`."""
        self._layout.check(layer)
        if not self._converts:
            key, held_views = (slot, self._variants[layer]), self._views
            own = held_views.get(key)
            if own is None:
                own = held_views[key] = MappingProxyType(self.expert(slot, layer))
            return own
        slabs = self._open()
        known = self._bounces.views(slot, layer)
        roles = self._held[layer]
        if len(known) == len(roles):
            return known
        views = {n: held.view(slabs[n][slot]) for n, held in roles.items() if n not in known}
        return {name: known[name] if name in known else views[name] for name in roles}

    @property
    def fills_all(self) -> bool:
        """Whether compiled code can fill every layer's slots, see `fills`."""
        return all(self._fills)

    def fills(self, slot: int, layer: int) -> tuple[tuple[Tiler, str, int, np.ndarray], ...]:
        """Return how compiled code fills a slot, after which `finish` stands for `upload`.

        The tiler, the role, the first byte in what was read of it, and the slot's array, of each
        role in compute form, or of each of its matrices; nothing if only `upload` fills the slot,
        or the parts that were read are the slot's own.
        """
        tilers = self._fills[layer]
        if not tilers:
            return ()
        slabs = self._open()
        key = slot, self._variants[layer]
        found = self._targets.get(key)
        if found is None:
            found = self._targets[key] = tuple(
                (tiler, name, start, slabs[name][slot, at : at + nbytes])
                for name, tiler, start, at, nbytes in tilers
            )
        return found

    def finish(
        self, slot: int, layer: int, parts: Mapping[str, np.ndarray], *, is_wrong: bool
    ) -> None:
        """Take back the buffer of a slot that was filled as `fills` says.

        Parameters
        ----------
        slot, layer : int
        parts : dict of role to ndarray
            What `buffers` returned.
        is_wrong : bool
            Whether a tiler found a scale that is wrong.

        Raises
        ------
        FormatError
            If the parts of a format cannot be, such as scales that are no numbers.
        """
        for name, held in self._held[layer].items():
            if is_wrong or held.has_to_be_checked:
                try:
                    held.check(parts[name])
                except FormatError as error:
                    raise FormatError(f"{name}: {error}") from error
        self.reclaim(slot)

    def reclaim(self, slot: int) -> None:
        """Keep the slot's buffer for another one; without conversion there is none."""
        self._bounces.give_back(slot)

    def upload(
        self,
        slot: int,
        layer: int,
        parts: Mapping[str, np.ndarray],
        *,
        behind: bool = False,  # noqa: ARG002 - there is no queue
    ) -> None:
        """Copy an expert into a slot, converting it; done when this returns.

        Raises
        ------
        ValueError
            If `parts` lacks a role or has it in another shape or dtype; the slot
            is as it was.
        FormatError
            If the parts of a format cannot be, such as scales that are no numbers.
        """
        self._layout.check(layer)
        if not self._has_checks and parts is self._views.get((slot, self._variants[layer])):
            return  # they were read in place
        target = self.expert(slot, layer)
        check_parts(self._layout, layer, parts, held=target)
        for name, held in self._held[layer].items():
            try:
                held.fill(target[name], parts[name])
            except FormatError as error:
                raise FormatError(f"{name}: {error}") from error
        self.reclaim(slot)

    def before_compute(self, slots: np.ndarray) -> None:
        """Return at once: the slots are filled already."""

    def release_after_compute(self, slots: np.ndarray) -> None:
        """Return at once: host computations are done when the caller releases."""

    def to_host(self, array: npt.ArrayLike) -> np.ndarray:
        """Return it as a NumPy array."""
        return np.asarray(array)

    def close(self) -> None:
        """Drop the slabs; a second call does nothing. Arrays handed out stay valid."""
        self._slabs = {}
        self._bounces.close()
        self._targets = {}
        self._views = {}

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _open(self) -> dict[str, np.ndarray]:
        """Return the slabs: another thread may close the pool while they are used."""
        slabs = self._slabs
        if not slabs:
            raise MoeCacheError("the slots are closed")
        return slabs


def converts(layout: ExpertLayout, dtype: npt.DTypeLike | None = None) -> bool:
    """Return whether slots have other bytes than the file."""
    return _converts(hold_all(layout, _float_dtype(dtype)))


def _converts(layers: Sequence[Mapping[str, Held]]) -> bool:
    return any(held.is_converted for roles in layers for held in roles.values())


def _all_tiled(roles: Mapping[str, Held]) -> tuple[tuple[str, Tiler, int, int, int], ...]:
    """Return the roles' tilers, see `Held.pieces`; none if a role is converted by other means."""
    converted = [
        (name, *piece) for name, held in roles.items() if held.is_converted for piece in held.pieces
    ]
    tiled = [
        (name, tiler, start, at, nbytes)
        for name, tiler, start, at, nbytes in converted
        if isinstance(tiler, Tiler)
    ]
    return tuple(tiled) if len(tiled) == len(converted) else ()


def _float_dtype(dtype: npt.DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        converted = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"dtype {str(dtype)[:200]!a} is no dtype of NumPy; give one such as numpy.float32"
        ) from error
    # Types of ml_dtypes have kind "V", and integers are among them.
    if "float" not in converted.name or converted.subdtype is not None or converted.itemsize > 8:
        raise ConfigError(f"slots can be converted to a floating-point type, not to {converted}")
    return converted


def _num_buffers(layout: ExpertLayout, num_slots: int) -> int:
    widest = max(1, *map(layout.expert_bytes, range(layout.num_layers)))
    # A third is for reads ahead; what is left never has to be more than the slots.
    return max(3, min(MAX_CONVERTED_BYTES // widest, 2 * num_slots))
