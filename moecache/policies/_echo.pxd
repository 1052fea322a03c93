cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from moecache.policies._policy cimport MAX_SEQUENCES


cdef extern from "_echo.h" nogil:
    enum:
        ECHO_RING
        ECHO_AGES

    const float ECHO_TIME_DISCOUNT

    ctypedef struct EchoLoops:
        void (*match)(
            const uint64_t*, const uint64_t*, int, float, float, float*
        ) noexcept nogil
        void (*average)(
            int, const float*, float, float, float, int32_t, float, int32_t*, float*, float*,
            uint8_t*
        ) noexcept nogil
        void (*own)(int, const float*, const float*, float*) noexcept nogil
        void (*value)(
            int, const float*, const float*, float, float, float, float*, float*
        ) noexcept nogil
        void (*spare)(int, const float*, const float*, float, float, float*) noexcept nogil
        void (*unite)(int, const float*, const float*, int, float, float*, float*) noexcept nogil

    EchoLoops echo_loops()
    int echo_lowest_bit(uint64_t bits)
    int echo_nearest(const float* scores, int wanted, int* slots)


# One of the sequences that are told apart; `scores` has what its current token looks like.
cdef struct Sequence:
    int64_t name    # below 0: rows that no one named
    uint64_t used   # when a step last had a row of it; 0: none yet
    int32_t token   # its last one; 0: none yet
    int32_t seen    # tokens up to this one have a score


@cython.final
cdef class Echo:
    cdef readonly int num_layers
    cdef readonly int num_experts
    cdef readonly bint ring
    cdef EchoLoops loops
    cdef int num_words
    cdef int top_k        # of the first request; 0 before
    cdef int lowest       # the lowest layer seen: with it a token begins
    cdef int layer        # the last one seen
    cdef int32_t token
    cdef float scale      # num_experts / top_k
    cdef float table[192]     # probability of use by popularity and age
    cdef float samples[192]   # how often each cell was seen
    cdef float* scores        # [MAX_SEQUENCES, ECHO_RING] how much the ring's tokens look like
    cdef uint8_t before[256]  # how far back in the ring a token's sequence was last; 0: nowhere
    cdef uint8_t after[256]   # how far ahead it went on
    cdef Sequence known[MAX_SEQUENCES]
    cdef int current[MAX_SEQUENCES]  # places in `known` of the last step's sequences
    cdef int num_current
    cdef int32_t latest[MAX_SEQUENCES]  # the last token of each place in this step
    cdef int32_t named[MAX_SEQUENCES]  # of each row of the last step, if that had names
    cdef Py_ssize_t num_named
    cdef int64_t unnamed      # the name given to rows without one
    cdef bint between         # rows without a name begin a sequence
    cdef uint64_t steps
    # For each expert, [num_layers, num_experts].
    cdef float* fast      # moving averages of its use
    cdef float* slow
    cdef int32_t* last    # the token that used it last
    cdef uint8_t* cells
    cdef float* own       # probability of use, by its own history
    cdef float* next_use  # the same, with the votes of similar tokens
    cdef float* values    # discounted next use
    cdef uint32_t* versions   # [num_layers] changes with the layer's values
    cdef uint64_t* masks      # [num_layers, ECHO_RING, num_words] requests of the ring's tokens
    # For the request at hand.
    cdef uint64_t* request    # [num_words]
    cdef float* wanted        # [num_experts] 0 or 1
    cdef float* votes         # [num_experts]
    cdef float* history       # [num_experts] of the table
    cdef float* unused        # [num_experts] probability that no sequence of the step uses it
    cdef float discounts[8]

    cdef list parts(self)
    cdef void* part(self, str name) except NULL
    cdef int checked(self, Py_ssize_t layer) except -1
    cdef void observe_rows(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil
    cdef void observe_one(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k
    ) noexcept nogil
    cdef void observe_several(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil
    cdef void follow(self, const int32_t* names, Py_ssize_t rows) noexcept nogil
    cdef void join(self, int64_t name) noexcept nogil
    cdef int place_of(self, int64_t name) noexcept nogil
    cdef void leave_out(
        self, const int32_t* names, Py_ssize_t rows, int place
    ) noexcept nogil
    cdef int read_request(self, const void* ids, bint wide, Py_ssize_t k) noexcept nogil
    cdef void start(self, int top_k) noexcept nogil
    cdef void begin_token(self, int place) noexcept nogil
    cdef void enter_ring(self, int place) noexcept nogil
    cdef void unlink(self, int slot) noexcept nogil
    cdef void match(self, int layer, int place, const uint64_t* request) noexcept nogil
    cdef uint64_t* mask(self, int layer, int slot) noexcept nogil
    cdef void learn(self, int layer, int32_t token, Py_ssize_t rows) noexcept nogil
    cdef float vote_successors(self, int layer, int place) noexcept nogil
    cdef float vote_same(self, int layer, int place) noexcept nogil
    cdef void add_votes(self, int layer, int slot, float weight) noexcept nogil
    cdef void recall(self, int layer) noexcept nogil
    cdef void forget_sequences(self) noexcept nogil
    cdef void forget_all(self) noexcept nogil
    cdef void blend(self) noexcept nogil
