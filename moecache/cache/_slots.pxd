"""Declarations of what is beside this file."""

from libc.stdint cimport int32_t, uint64_t


cdef enum SlotState:
    FREE
    FILLING    # claimed: the expert is on its way
    RESIDENT
    ABANDONED  # the claim failed while others lease the slot
    WITHHELD   # out of use


cdef struct Slot:
    uint64_t seen  # the last call that came across this slot
    int key
    int leases
    int partition
    bint foreseen  # read ahead, and no step has asked for its expert since
    SlotState state


cdef struct Slots:
    Slot* each              # [num]
    int num
    int* free               # stack
    int num_free
    int num_withheld
    int num_resident
    int num_layers
    int num_experts
    int num_words
    int32_t* table          # [num_layers, num_experts] slot of a resident expert, or -1
    int32_t* in_flight      # [num_layers, num_experts] slot of an expert being filled, or -1
    uint64_t* mask          # [num_layers, num_words] resident experts
    uint64_t num_changes    # of the table
    uint64_t call


cdef int open_slots(Slots* slots) noexcept nogil
cdef void close_slots(Slots* slots) noexcept nogil
cdef bint fail_filling(Slots* slots, int slot) noexcept nogil
cdef void withhold_slot(Slots* slots, int slot) noexcept nogil
cdef void restore_slot(Slots* slots, int slot) noexcept nogil
cdef int audit_slots(const Slots* slots) except -1


# Inline: every miss takes a slot through all of these.
cdef inline Py_ssize_t word_of(const Slots* slots, int key) noexcept nogil:
    return (
        <Py_ssize_t>(key // slots.num_experts) * slots.num_words + key % slots.num_experts // 64
    )


cdef inline uint64_t bit_of(const Slots* slots, int key) noexcept nogil:
    return <uint64_t>1 << (key % slots.num_experts % 64)


cdef inline void free_slot(Slots* slots, int slot) noexcept nogil:
    slots.each[slot].key = -1
    slots.each[slot].state = FREE
    slots.free[slots.num_free] = slot
    slots.num_free += 1


cdef inline int begin_filling(Slots* slots, int key, int partition) noexcept nogil:
    """Take a free slot for an expert, without a lease; there must be one. Returns it."""
    cdef int slot
    slots.num_free -= 1
    slot = slots.free[slots.num_free]
    slots.each[slot] = Slot(slots.each[slot].seen, key, 0, partition, False, FILLING)
    slots.in_flight[key] = slot
    return slot


cdef inline void end_filling(Slots* slots, int slot) noexcept nogil:
    """Make the expert resident."""
    cdef int key = slots.each[slot].key
    slots.each[slot].state = RESIDENT
    slots.in_flight[key] = -1
    slots.table[key] = slot
    slots.mask[word_of(slots, key)] |= bit_of(slots, key)
    slots.num_resident += 1
    slots.num_changes += 1


cdef inline void vacate(Slots* slots, int slot) noexcept nogil:
    """Free the slot of a resident expert."""
    cdef int key = slots.each[slot].key
    slots.table[key] = -1
    slots.mask[word_of(slots, key)] &= ~bit_of(slots, key)
    slots.num_resident -= 1
    slots.num_changes += 1
    free_slot(slots, slot)
