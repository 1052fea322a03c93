"""Sequences: which sequence each row of a step is of, and which tokens it looks like."""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from moecache.policies._echo_loops cimport ECHO_RING
from moecache.policies._policy cimport MAX_SEQUENCES

cnp.import_array()


@cython.final
cdef class Sequences:
    """The sequences that are told apart, each with a place and with scores of the ring's tokens.

    The one whose last row came the longest ago gives its place to a new one.
    """

    def __cinit__(self):
        self.array = np.zeros((MAX_SEQUENCES, ECHO_RING), np.float32)
        self.scores = <float*>cnp.PyArray_DATA(<cnp.ndarray>self.array)

    cdef bint follow(
        self, const int32_t* names, Py_ssize_t rows, int32_t token
    ) noexcept nogil:
        """Find the places of a step's sequences, which at most steps are those of the last.

        Returns whether one sequence, just begun, takes the place of the only one before it.
        """
        cdef int before = self.num_current, last = self.current[max(0, before - 1)]
        cdef Py_ssize_t row
        cdef int place
        cdef bint known
        if names == NULL:
            if before == 1 and not self.num_named and not self.between:
                return False
        elif self.num_named == rows and memcmp(
            self.named, names, rows * sizeof(int32_t)
        ) == 0:
            return False
        self.steps += 1
        self.num_current = 0
        self.num_named = 0
        if names == NULL:
            self.unnamed -= self.between
            self.between = False
            known = self.place_of(self.unnamed) >= 0
            self.join(self.unnamed, token)
        else:
            # First those that are known: no newcomer may take their places.
            known = self.place_of(names[0]) >= 0
            for row in range(rows):
                if row == 0 or names[row] != names[row - 1]:
                    place = self.place_of(names[row])
                    if place >= 0:
                        self.known[place].used = self.steps
            for row in range(rows):
                if row == 0 or names[row] != names[row - 1]:
                    self.join(names[row], token)
            self.num_named = rows if rows <= MAX_SEQUENCES else -1
            if rows <= MAX_SEQUENCES:
                memcpy(self.named, names, rows * sizeof(int32_t))
        if known or before != 1 or self.num_current != 1:
            return False
        # One after another: the new one is taken to look like the last one.
        place = self.current[0]
        self.known[place].token = self.known[last].token
        self.known[place].seen = self.known[last].seen
        memcpy(self.scores_of(place), self.scores_of(last), ECHO_RING * sizeof(float))
        return True

    cdef int place_of(self, int64_t name) noexcept nogil:
        """Return the place of a sequence, or -1."""
        cdef int place
        for place in range(MAX_SEQUENCES):
            if self.known[place].used and self.known[place].name == name:
                return place
        return -1

    cdef void leave_out(
        self, const int32_t* names, Py_ssize_t rows, int place, int32_t token
    ) noexcept nogil:
        """Leave out tokens of others under way: their successors are not known yet.

        `token` is that of the step's last row.
        """
        cdef Py_ssize_t row
        cdef int64_t name = self.known[place].name
        cdef float* scores = self.scores_of(place)
        # Rows before the first expert ever are no tokens.
        for row in range(max(0, rows - min(ECHO_RING, token)), rows):
            if names[row] != name:
                scores[(token - (rows - 1 - row)) % ECHO_RING] = -INFINITY

    cdef object last_scores(self):
        """Return the scores of the step's last sequence, [ECHO_RING], not a copy."""
        return self.array[self.current[max(0, self.num_current - 1)]]

    cdef void go_on(self, int32_t token) noexcept nogil:
        """Have one sequence alone, without a name, whose last token was `token`."""
        self.forget()
        self.unnamed = -1
        self.between = False
        self.join(self.unnamed, token)
        self.known[0].token = token

    cdef void set_back(self, int32_t tokens) noexcept nogil:
        """Number tokens lower by so many."""
        cdef int place
        for place in range(MAX_SEQUENCES):
            self.known[place].token = max(0, self.known[place].token - tokens)
            self.known[place].seen = max(0, self.known[place].seen - tokens)

    cdef void forget(self) noexcept nogil:
        cdef int i
        for i in range(MAX_SEQUENCES * ECHO_RING):
            self.scores[i] = -INFINITY
        memset(self.known, 0, sizeof(self.known))
        self.current[0] = 0
        self.num_current = 0
        self.num_named = 0
        self.unnamed = 0
        self.between = True
        self.steps = 1

    cdef void join(self, int64_t name, int32_t token) noexcept nogil:
        """Count a sequence among the step's; tokens up to `token` are older than a new one."""
        cdef int i, u, place = self.place_of(name)
        if place < 0:
            place = 0
            for i in range(MAX_SEQUENCES):
                if self.known[i].used < self.known[place].used:
                    place = i
            self.known[place].name = name
            self.known[place].token = 0
            self.known[place].seen = token
            for u in range(ECHO_RING):
                self.scores_of(place)[u] = -INFINITY
        self.known[place].used = self.steps
        for i in range(self.num_current):
            if self.current[i] == place:
                return
        self.current[self.num_current] = place
        self.num_current += 1
