cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, uint64_t

from moecache.policies._policy cimport Policy
from moecache.cache._profiler cimport AccessProfiler
from moecache.cache._route_log cimport RouteLog


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


@cython.final
cdef class ExpertCache:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly int capacity
    cdef readonly str policy
    cdef readonly str scope
    cdef readonly AccessProfiler profiler
    cdef public RouteLog route_log  # notes every step, unless None
    cdef list partitions        # one Policy, or one per layer
    cdef int* abandoned         # [len(partitions)] slots without an expert that are not free
    cdef readonly int num_withheld
    cdef Slot* slots            # [capacity]
    cdef int* free_slots        # stack
    cdef int num_free_slots
    cdef int32_t* table         # [num_layers, num_experts] slot of a resident expert
    cdef int32_t* in_flight     # [num_layers, num_experts] slot of an expert being filled
    cdef uint64_t* mask         # [num_layers, num_words] resident experts
    cdef int num_words
    cdef uint64_t* seen         # [num_experts] the last call that missed this expert
    cdef int* uses              # [num_experts] rows of this call that chose it
    cdef Py_ssize_t* last_row   # [num_experts] the last of them
    cdef int* first             # [num_experts] index of its first occurrence in the ids
    cdef int* missing           # [num_experts] distinct experts that are not resident
    cdef uint64_t* order        # [num_experts] for sorting
    cdef uint64_t call
    cdef uint64_t generation
    cdef int resident_count
    cdef readonly uint64_t num_evictions
    cdef readonly uint64_t num_foreseen_hits    # foreseen, and then used from its slot
    cdef readonly uint64_t num_foreseen_late    # foreseen, and asked for while being filled
    cdef readonly uint64_t num_foreseen_unused  # foreseen, and evicted unused
    cdef object table_owner
    cdef object table_view
    cdef object mask_owner
    cdef object mask_view

    cdef bint is_global
    cdef public bint evicts
    cdef readonly uint64_t num_changes  # of the slot table

    # For policies written in Python: calls come one after another, and not from the policy.
    cdef bint scripted
    cdef object turn
    cdef uint64_t thread  # the one whose turn it is, or 0

    cdef int take_policies(self) except -1
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef int heed_script(self) except -1
    cdef int share_of(self, int layer) noexcept
    cdef Policy part(self, int layer)
    cdef int local_key(self, int key) noexcept nogil
    cdef void heed_reset(self) noexcept
    cdef int room_left(self, Policy part, int partition) noexcept nogil
    cdef int take_slot(
        self, Policy part, int partition, int layer, int expert, bint accessed
    ) noexcept nogil
    cdef void evict(self, Policy part, int victim, int partition) noexcept nogil
    cdef bint withhold_slot(self, Policy part, int slot) noexcept nogil
    cdef void free_slot(self, int slot) noexcept nogil
    cdef int count_missing(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, Py_ssize_t top_k, bint drop
    ) except -1
    cdef bint is_bulk(self, int layer, Py_ssize_t rows, Py_ssize_t share) noexcept
    cdef bint any_valid(self, const void* ids, bint wide, Py_ssize_t n) noexcept
    cdef int plan_claims(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int num_missing,
        Py_ssize_t share,
    ) except -1
    cdef void lease_hits(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int32_t* out
    ) noexcept
    cdef bint lease_resident(
        self, int layer, const int32_t* ids, Py_ssize_t rows, Py_ssize_t top_k,
        const int32_t* names, int32_t* out
    ) except -1
    cdef void end_leases(self, const int32_t* slots, Py_ssize_t n) noexcept
    cdef void use_hits(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, bint leased
    ) noexcept
    cdef void lease_misses(
        self, int layer, const void* ids, bint wide, Py_ssize_t n, int num_missing,
        int admitted, const int* worths, int32_t* out, int32_t* misses,
    ) noexcept
    cdef bint is_worth_it(self, Policy part, int partition, int key) noexcept nogil
    cdef int checked(self, Py_ssize_t layer, Py_ssize_t expert) except -1
    cdef Slot* claimed(self, Py_ssize_t slot, str verb) except NULL
