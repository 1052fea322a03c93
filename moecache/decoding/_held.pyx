"""What a layer holds of a text's earlier tokens: keys and values of each, or states."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uintptr_t

from moecache.kernels._jobs cimport MC_BF16, MC_F32

_TYPES = {"f32": MC_F32, "bf16": MC_BF16}


@cython.final
cdef class KeyValues:
    """Keys and values of a layer, [batch, heads, capacity, width] each.

    Parameters
    ----------
    keys, values : int
        Addresses.
    type : {"f32", "bf16"}
    shape : (int, int, int, int)
        Batch, heads, capacity, width of the keys.
    value_width : int
    owner : object
        Kept alive.
    dropped : int, default 0
        Positions before those that are held: no longer seen, as a window has passed them.
    """

    def __cinit__(
        self, uintptr_t keys, uintptr_t values, str type, tuple shape, int64_t value_width, owner,
        int64_t dropped=0
    ):
        self.dropped = dropped
        self.keys, self.values, self.type = <uint8_t *>keys, <uint8_t *>values, _TYPES[type]
        self.batch, self.heads, self.capacity, self.width = shape
        self.value_width, self.owner = value_width, owner

    def of_sequence(self, int64_t sequence):
        """Return the keys and values of one sequence of the batch, in the same memory.

        Raises
        ------
        IndexError
            If there is none.
        """
        if not 0 <= sequence < self.batch:
            raise IndexError(f"sequence {sequence} is none of {self.batch}")
        cdef KeyValues found = KeyValues.__new__(
            KeyValues, 0, 0, "f32", (1, self.heads, self.capacity, self.width),
            self.value_width, self.owner, self.dropped
        )
        cdef int64_t size = 4 if self.type == MC_F32 else 2
        cdef int64_t positions = sequence * self.heads * self.capacity
        found.type = self.type
        found.keys = self.keys + positions * self.width * size
        found.values = self.values + positions * self.value_width * size
        return found


@cython.final
cdef class States:
    """What a layer holds instead of keys and values: it is as large for any number of tokens.

    What a call's tokens leave is written to places of its own, or over what was there.

    Parameters
    ----------
    seen, next_seen, saved_seen : int
        Addresses of the last rows that the convolution sees, the oldest first; the last are those
        behind the first tokens of a call, if asked for.
    type : {"f32", "bf16"}
        Of these.
    shape : (int, int, int)
        Batch, rows, channels.
    steps : (int, int, int)
        Bytes from a sequence, a row and a channel to the next.
    states, next_states, saved_states : int
        Addresses of the heads' states, float32 [batch, *state_shape].
    state_shape : (int, int, int)
        Heads, width and value width; of a state space heads, value width and width; of a
        convolution alone, which has none, (1, 0, channels).
    owner : object
        Kept alive.

    Attributes
    ----------
    num_saved : int
        The states behind so many of the next call's tokens are saved; 0: none are.
    """

    def __cinit__(
        self, uintptr_t seen, uintptr_t next_seen, uintptr_t saved_seen, str type, tuple shape,
        tuple steps, uintptr_t states, uintptr_t next_states, uintptr_t saved_states,
        tuple state_shape, owner
    ):
        self.seen, self.next_seen = <const uint8_t *>seen, <uint8_t *>next_seen
        self.saved_seen, self.saved_states = <uint8_t *>saved_seen, <float *>saved_states
        self.states, self.next_states = <const float *>states, <float *>next_states
        self.type = _TYPES[type]
        self.batch, self.rows, self.channels = shape
        self.sequence_step, self.row_step, self.channel_step = steps
        self.heads, self.width, self.value_width = state_shape
        self.owner = owner

    def of_sequence(self, int64_t sequence):
        """Return the states of one sequence of the batch, in the same memory; none are saved.

        Raises
        ------
        IndexError
            If there is none.
        """
        if not 0 <= sequence < self.batch:
            raise IndexError(f"sequence {sequence} is none of {self.batch}")
        cdef States found = States.__new__(
            States, 0, 0, 0, "f32", (1, self.rows, self.channels),
            (self.sequence_step, self.row_step, self.channel_step), 0, 0, 0,
            (self.heads, self.width, self.value_width), self.owner
        )
        cdef int64_t seen = sequence * self.sequence_step
        cdef int64_t states = sequence * self.heads * self.width * self.value_width
        found.type = self.type
        found.seen, found.next_seen = self.seen + seen, self.next_seen + seen
        if self.states != NULL:
            found.states, found.next_states = self.states + states, self.next_states + states
        return found
