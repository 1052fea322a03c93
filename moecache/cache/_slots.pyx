"""Slots: what each holds, from FREE over FILLING to RESIDENT and back, and the tables of that.

Nothing here knows a policy. Callers hold the lock, and change a slot only as its state allows.
"""

from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset


cdef int open_slots(Slots* slots) noexcept nogil:
    """Allocate slots, all of them free; return -1 if there is no memory.

    The caller has set `num`, the numbers of layers, experts and words, and `table` and `mask`,
    whose memory stays the caller's.
    """
    cdef Py_ssize_t num_keys = <Py_ssize_t>slots.num_layers * slots.num_experts
    cdef int slot
    slots.each = <Slot*>calloc(slots.num, sizeof(Slot))
    slots.free = <int*>calloc(slots.num, sizeof(int))
    slots.in_flight = <int32_t*>calloc(num_keys, sizeof(int32_t))
    if slots.each == NULL or slots.free == NULL or slots.in_flight == NULL:
        return -1
    memset(slots.in_flight, 0xFF, num_keys * sizeof(int32_t))
    for slot in range(slots.num - 1, -1, -1):
        free_slot(slots, slot)
    return 0


cdef void close_slots(Slots* slots) noexcept nogil:
    free(slots.each)
    free(slots.free)
    free(slots.in_flight)


cdef bint fail_filling(Slots* slots, int slot) noexcept nogil:
    """Free the slot or, while others lease it, abandon it; return whether it is abandoned."""
    slots.in_flight[slots.each[slot].key] = -1
    if slots.each[slot].leases == 0:
        free_slot(slots, slot)
        return False
    slots.each[slot].key = -1
    slots.each[slot].state = ABANDONED
    return True


cdef void withhold_slot(Slots* slots, int slot) noexcept nogil:
    """Take a free slot out of use; the others keep their order."""
    cdef int i, at = slots.num_free - 1
    while slots.free[at] != slot:
        at -= 1
    slots.num_free -= 1
    for i in range(at, slots.num_free):
        slots.free[i] = slots.free[i + 1]
    slots.each[slot].state = WITHHELD
    slots.num_withheld += 1


cdef void restore_slot(Slots* slots, int slot) noexcept nogil:
    slots.num_withheld -= 1
    free_slot(slots, slot)


cdef int audit_slots(const Slots* slots) except -1:
    """Raise AssertionError where slots, tables and counts contradict each other."""
    cdef int slot, key, owner, num_resident = 0, num_free = 0, num_withheld = 0
    cdef const Slot* one
    for slot in range(slots.num):
        one = &slots.each[slot]
        if one.state == RESIDENT or one.state == FILLING:
            owner = (slots.table if one.state == RESIDENT else slots.in_flight)[one.key]
            if owner != slot:
                raise AssertionError(f"slot {slot} has key {one.key} in slot {owner}")
            continue
        num_free += one.state == FREE
        num_withheld += one.state == WITHHELD
        if one.key != -1:
            raise AssertionError(f"slot {slot} holds nothing but has key {one.key}")
        if (one.state == ABANDONED) != (one.leases > 0):
            raise AssertionError(f"empty slot {slot} has {one.leases} leases")
    for key in range(slots.num_layers * slots.num_experts):
        num_resident += slots.table[key] >= 0
        where = (key % slots.num_experts, key // slots.num_experts)
        if (slots.mask[word_of(slots, key)] & bit_of(slots, key) != 0) != (slots.table[key] >= 0):
            raise AssertionError("mask and table differ for expert %d of layer %d" % where)
        if slots.table[key] >= 0 and slots.in_flight[key] >= 0:
            raise AssertionError("expert %d of layer %d is resident and in flight" % where)
    for name, counted, found in (
        ("free", slots.num_free, num_free), ("withheld", slots.num_withheld, num_withheld),
        ("resident", slots.num_resident, num_resident),
    ):
        if counted != found:
            raise AssertionError(f"{found} slots {name}, counted {counted}")
    return 0
