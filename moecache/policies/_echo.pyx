"""ECHO: every expert's probability of reuse.

An expert's probability of being used when its layer comes round again is taken from its
own history (moving averages, and a table of popularity by age that is learned as it
goes) and from the eight recent tokens whose routing so far looks most like the current
one's: which experts did their successors use at this layer? docs/echo.md has the derivation.

Several sequences share all of that but the likeness: which tokens look like the current one
is a question for each of them.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY, expf, powf
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from moecache.policies._ids cimport as_ids, as_sequences, id_at
from moecache.policies._policy cimport MAX_KEYS, MAX_SEQUENCES

cnp.import_array()

cdef enum:
    NEIGHBOURS = 8         # tokens whose successors vote
    SUCCESSORS = 3         # how far they look ahead
    AHEAD_NEIGHBOURS = 16  # tokens that vote for a layer still to come
    CELLS = 192
    FIRST_CELL = 6 * 16 + 15
    NEVER = -100000       # the last use of an expert that was never used
    REBASE = 1 << 30      # tokens after which the clock is set back
    MAX_EXPERTS = 1 << 20

# All of these are flat: halving or doubling them moves the hit rate little.
cdef float DECAY = 0.8          # of a score, per layer
cdef float GAIN = 0.6           # per expert in common
cdef float CARRY = 0.5          # of a score, to the next token; and a vote's temperature
cdef float LOWEST_CARRY = -3.0
cdef float SUCCESSOR_DECAY = 0.7
cdef float PRIOR = 0.2          # weight of an expert's own history among the votes
cdef float AHEAD_PRIOR = 0.5
cdef float FAST = 0.04
cdef float SLOW = 0.001


@cython.final
cdef class Echo:
    """Learn a model's routing as it goes, and predict which experts are used next.

    It sees every request of every layer, in the order of the layers; a token begins
    with the lowest one. A step of several rows is that many consecutive tokens, unless the
    rows are said to be of several sequences: Echo learns from all of them and predicts from
    the last one of each sequence alone. Up to 64 sequences are told apart; beyond that, the
    one that came last the longest ago is forgotten. The cost of a layer and
    token is constant, without training or growth: docs/echo.md has figures. Not safe
    for use from two threads at once.

    Parameters
    ----------
    num_layers, num_experts : int
        Shape of the model, each at least 1.
    ring : bool, default True
        Whether similar tokens vote. If not, an expert's own history alone decides: the
        policy "haz2", at half the cost.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __cinit__(self, int num_layers, int num_experts, *, bint ring=True):
        cdef Py_ssize_t num_keys, i
        if num_layers < 1 or num_experts < 1 or num_experts > MAX_EXPERTS:
            raise ValueError(
                f"num_layers must be at least 1 and num_experts 1 to {MAX_EXPERTS}, "
                f"got {num_layers} and {num_experts}"
            )
        if num_layers * <int64_t>num_experts > MAX_KEYS:
            raise ValueError(
                f"{num_layers} layers of {num_experts} experts are more than {MAX_KEYS}"
            )
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.ring = ring
        self.loops = echo_loops()
        self.num_words = (num_experts + 63) // 64
        num_keys = <Py_ssize_t>num_layers * num_experts
        self.fast = <float*>calloc(num_keys, sizeof(float))
        self.slow = <float*>calloc(num_keys, sizeof(float))
        self.last = <int32_t*>calloc(num_keys, sizeof(int32_t))
        self.cells = <uint8_t*>calloc(num_keys, sizeof(uint8_t))
        self.own = <float*>calloc(num_keys, sizeof(float))
        self.next_use = <float*>calloc(num_keys, sizeof(float))
        self.values = <float*>calloc(num_keys, sizeof(float))
        self.versions = <uint32_t*>calloc(num_layers, sizeof(uint32_t))
        self.masks = <uint64_t*>calloc(
            <size_t>num_layers * ECHO_RING if ring else 1, self.num_words * sizeof(uint64_t)
        )
        self.request = <uint64_t*>calloc(self.num_words, sizeof(uint64_t))
        self.wanted = <float*>calloc(num_experts, sizeof(float))
        self.votes = <float*>calloc(num_experts, sizeof(float))
        self.history = <float*>calloc(num_experts, sizeof(float))
        self.unused = <float*>calloc(num_experts, sizeof(float))
        self.scores = <float*>calloc(MAX_SEQUENCES * ECHO_RING, sizeof(float))
        if (
            self.fast == NULL or self.slow == NULL or self.last == NULL or self.cells == NULL
            or self.own == NULL or self.next_use == NULL or self.values == NULL
            or self.versions == NULL or self.masks == NULL or self.request == NULL
            or self.wanted == NULL or self.votes == NULL or self.history == NULL
            or self.unused == NULL or self.scores == NULL
        ):
            raise MemoryError(f"no memory for ECHO over {num_layers} x {num_experts} experts")
        self.discounts[0] = 1.0 / (1.0 + SUCCESSOR_DECAY + SUCCESSOR_DECAY * SUCCESSOR_DECAY)
        for i in range(1, SUCCESSORS):
            self.discounts[i] = self.discounts[i - 1] * SUCCESSOR_DECAY
        self.forget_all()

    def __dealloc__(self):
        free(self.fast)
        free(self.slow)
        free(self.last)
        free(self.cells)
        free(self.own)
        free(self.next_use)
        free(self.values)
        free(self.versions)
        free(self.masks)
        free(self.request)
        free(self.wanted)
        free(self.votes)
        free(self.history)
        free(self.unused)
        free(self.scores)

    def observe(self, Py_ssize_t layer, ids, *, sequences=None) -> None:
        """Learn from what the router chose.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [..., top_k]
            A row per token, the oldest first. Ids out of range are dropped.
        sequences : array of int, shape [rows], optional
            A number from 0 to 2**31 - 1 for each row's sequence, the same at all layers and
            as long as it goes on; at most 64 different ones. By default all rows are of the
            sequence of the last rows without a number.

        Raises
        ------
        ValueError
            If the layer is out of range, or `sequences` does not fit.
        TypeError
            If ids or sequences are not integers.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef int dimensions = cnp.PyArray_NDIM(array)
        cdef Py_ssize_t k = cnp.PyArray_DIM(array, dimensions - 1) if dimensions else 1
        cdef cnp.ndarray names = None
        self.checked(layer)
        if sequences is not None:
            names = as_sequences(sequences, n // k if k else 0)
        if k:
            self.observe_rows(
                <int>layer, data, wide, n // k, k,
                NULL if names is None else <int32_t*>cnp.PyArray_DATA(names),
            )

    def predict(self, Py_ssize_t layer, Py_ssize_t n) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts most likely to be used when a layer comes next.

        Parameters
        ----------
        layer : int
            If it comes later than the last one seen, the current token's use of it is
            predicted, best for the very next layer; else the next token's. Of several
            sequences in the last step, the use by any of them.
        n : int
            Most experts to return.

        Returns
        -------
        ids : ndarray of int32, shape [m]
            The likeliest first, ties by id; empty if the layer was never seen.
        scores : ndarray of float32, shape [m]
            Probabilities of use.
        """
        cdef float total
        cdef int e, i, m, position
        cdef float* scores
        cdef int32_t[::1] ids
        cdef float[::1] best
        self.checked(layer)
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        # A layer that was seen once has probabilities above 0.
        m = <int>min(n, self.num_experts) if self.own[layer * self.num_experts] > 0 else 0
        ids_owner, best_owner = np.empty(m, np.int32), np.empty(m, np.float32)
        if m == 0:
            return ids_owner, best_owner
        scores = self.next_use + layer * self.num_experts
        if layer > self.layer and self.ring and self.num_current > 1:
            for e in range(self.num_experts):
                self.unused[e] = 1
            for i in range(self.num_current):
                total = self.vote_same(<int>layer, self.current[i])
                self.loops.spare(
                    self.num_experts, self.own + layer * self.num_experts, self.votes, total,
                    AHEAD_PRIOR, self.unused,
                )
            for e in range(self.num_experts):
                self.votes[e] = 1 - self.unused[e]
            scores = self.votes
        elif layer > self.layer and self.ring:
            total = self.vote_same(<int>layer, self.current[0])
            for e in range(self.num_experts):
                self.votes[e] = (
                    (self.votes[e] + AHEAD_PRIOR * self.own[layer * self.num_experts + e])
                    / (total + AHEAD_PRIOR)
                )
            scores = self.votes
        ids, best = ids_owner, best_owner
        # An insertion into a short sorted list: most experts end at its last entry.
        for e in range(self.num_experts):
            position = min(e, m)
            if position == m and scores[e] <= best[m - 1]:
                continue
            position = min(e, m - 1)
            while position > 0 and best[position - 1] < scores[e]:
                best[position] = best[position - 1]
                ids[position] = ids[position - 1]
                position -= 1
            best[position] = scores[e]
            ids[position] = e
        return ids_owner, best_owner

    def begin_sequence(self) -> None:
        """Say that the next tokens do not continue the last ones, as far as no sequence is named.

        The fast averages fall back to the slow ones; knowledge stays.
        """
        self.between = True

    def reset(self) -> None:
        """Forget everything."""
        self.forget_all()

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of all that was learned, for `restore`.

        Returns
        -------
        dict of str to ndarray
            "clock", int64 [4]: top_k of the first request (0 before it), the lowest layer
            seen, the last one, tokens; "table" and "samples", float32 [192]; "scores",
            float32 [256]; "fast", "slow", "own", "next_use" and "values", float32
            [num_layers, num_experts]; "last", int32, and "cells", uint8, of that shape;
            with a ring "masks", uint64 [num_layers, 256, words], and "before", uint8 [256].
            The last one of several sequences alone is kept.
        """
        cdef cnp.ndarray array
        cdef dict found = {
            "clock": np.array([self.top_k, self.lowest, self.layer, self.token], np.int64)
        }
        for name, dtype, shape in self.parts():
            array = np.empty(shape, dtype)
            memcpy(cnp.PyArray_DATA(array), self.part(name), cnp.PyArray_NBYTES(array))
            found[name] = array
        if self.between:
            found["fast"] = found["slow"].copy()
        return found

    def restore(self, state) -> None:
        """Go on from what another Echo of this shape had learned, to the last bit.

        Parameters
        ----------
        state : mapping of str to ndarray
            A result of `state`, perhaps without "before", as earlier versions wrote it. Copied.

        Raises
        ------
        ValueError
            If an array is missing, of another shape or dtype, or has a value that no Echo
            could have. Nothing is changed then.
        """
        cdef cnp.ndarray array
        cdef int layer, slot
        parts = {name: (np.dtype(dtype), shape) for name, dtype, shape in self.parts()}
        parts["clock"] = (np.dtype(np.int64), (4,))
        given = {}
        if self.ring and "before" not in state:
            state = {**state, "before": _one_after_another(state.get("clock"))}
        for name, (dtype, shape) in parts.items():
            found = state[name] if name in state else None
            if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (dtype, shape):
                what = "nothing" if found is None else (
                    f"{getattr(found, 'dtype', type(found).__name__)} "
                    f"{list(getattr(found, 'shape', ()))}"
                )
                raise ValueError(f"{name} must be {dtype} {list(shape)}, got {what}")
            given[name] = np.ascontiguousarray(found)
        if len(state) != len(parts):
            raise ValueError(f"unknown parts: {', '.join(sorted(set(state) - set(parts)))}")
        _check_state(given, self.num_layers, self.num_experts)
        top_k, lowest, last_layer, token = given["clock"].tolist()
        self.top_k, self.lowest, self.layer, self.token = top_k, lowest, last_layer, token
        self.scale = <float>self.num_experts / self.top_k if self.top_k else 0
        self.forget_sequences()
        # One sequence goes on, without a name.
        self.unnamed = -1
        self.between = False
        self.join(self.unnamed)
        self.known[0].token = self.known[0].seen = self.token
        for name, _, _ in self.parts():
            array = given[name]
            memcpy(self.part(name), cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
        for slot in range(ECHO_RING):
            if self.before[slot]:
                self.after[(slot - self.before[slot]) & (ECHO_RING - 1)] = self.before[slot]
        for layer in range(self.num_layers):
            self.versions[layer] += 1

    @property
    def num_tokens(self) -> int:
        """Tokens seen, less what the clock was set back by (every 2**30 tokens)."""
        return self.token

    @property
    def reuse(self) -> np.ndarray:
        """Discounted next use of each expert as of its layer's last request.

        A copy, float32 [num_layers, num_experts], each between 0 and 1. A cache evicts
        the expert whose value is the lowest of those that it holds.
        """
        cdef Py_ssize_t i
        flat = np.empty(self.num_layers * self.num_experts, np.float32)
        cdef float[::1] view = flat
        for i in range(view.shape[0]):
            view[i] = self.values[i]
        return flat.reshape(self.num_layers, self.num_experts)

    cdef list parts(self):
        # Name, dtype and shape of each array of `state`.
        experts = (self.num_layers, self.num_experts)
        cdef list found = [
            ("table", np.float32, (CELLS,)),
            ("samples", np.float32, (CELLS,)),
            ("scores", np.float32, (ECHO_RING,)),
            *[(name, np.float32, experts) for name in ("fast", "slow", "own", "next_use")],
            ("values", np.float32, experts),
            ("last", np.int32, experts),
            ("cells", np.uint8, experts),
        ]
        if self.ring:
            found.append(("masks", np.uint64, (self.num_layers, ECHO_RING, self.num_words)))
            found.append(("before", np.uint8, (ECHO_RING,)))
        return found

    cdef void* part(self, str name) except NULL:
        if name == "table":
            return self.table
        if name == "samples":
            return self.samples
        if name == "scores":
            return self.scores + self.current[max(0, self.num_current - 1)] * ECHO_RING
        if name == "fast":
            return self.fast
        if name == "slow":
            return self.slow
        if name == "own":
            return self.own
        if name == "next_use":
            return self.next_use
        if name == "values":
            return self.values
        if name == "last":
            return self.last
        if name == "cells":
            return self.cells
        if name == "masks":
            return self.masks
        if name == "before":
            return self.before
        raise KeyError(name)

    cdef int checked(self, Py_ssize_t layer) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        return 0

    cdef void observe_rows(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil:
        if rows == 0:
            return
        self.lowest = min(self.lowest, layer)
        self.follow(names, rows)
        if self.num_current > 1:
            self.observe_several(layer, ids, wide, rows, k, names)
        else:
            self.observe_one(layer, ids, wide, rows, k)
        if self.top_k:
            self.layer = layer
            self.versions[layer] += 1

    cdef void observe_one(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k
    ) noexcept nogil:
        cdef Py_ssize_t row, base = <Py_ssize_t>layer * self.num_experts
        cdef int32_t token
        cdef float total = 0
        cdef int width = 8 if wide else 4
        cdef int count, place = self.current[0]
        for row in range(rows):
            count = self.read_request(<const char*>ids + row * k * width, wide, k)
            if self.top_k == 0:
                if count == 0:
                    continue
                self.start(count)
            if layer == self.lowest:
                self.begin_token(place)
                token = self.token
            else:
                token = <int32_t>max(1, self.token - (rows - 1 - row))
            if self.ring:
                # Later layers score the last row alone: there is one score per token of the ring.
                if layer == self.lowest or row == rows - 1:
                    self.match(layer, place, self.request)
                memcpy(
                    self.mask(layer, token % ECHO_RING), self.request,
                    self.num_words * sizeof(uint64_t),
                )
            self.learn(layer, token, 1)
        if self.top_k == 0:
            return
        self.recall(layer)
        memset(self.votes, 0, self.num_experts * sizeof(float))
        if self.ring:
            total = self.vote_successors(layer, place)
        self.loops.value(
            self.num_experts, self.own + base, self.votes, total, PRIOR, ECHO_TIME_DISCOUNT,
            self.next_use + base, self.values + base,
        )

    cdef void observe_several(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil:
        # Rows of one moment: the averages learn their mean at once, and each sequence looks for
        # tokens like its own last row, which others of the moment are not.
        cdef Py_ssize_t row, base = <Py_ssize_t>layer * self.num_experts
        cdef int32_t token
        cdef float total = 0
        cdef int width = 8 if wide else 4
        cdef int e, i, count, place = 0
        memset(self.unused, 0, self.num_experts * sizeof(float))
        for row in range(rows):
            if row == 0 or names[row] != names[row - 1]:
                place = self.place_of(names[row])
            count = self.read_request(<const char*>ids + row * k * width, wide, k)
            if self.top_k == 0:
                if count == 0:
                    continue
                self.start(count)
            for e in range(self.num_experts):
                self.unused[e] += self.wanted[e]
            if layer == self.lowest:
                self.begin_token(place)
                token = self.token
            else:
                token = <int32_t>max(1, self.token - (rows - 1 - row))
            self.latest[place] = token
            if self.ring:
                memcpy(
                    self.mask(layer, token % ECHO_RING), self.request,
                    self.num_words * sizeof(uint64_t),
                )
                if layer == self.lowest:
                    self.match(layer, place, self.request)
        if self.top_k == 0:
            return
        for e in range(self.num_experts):
            self.wanted[e] = self.unused[e] / rows
            self.unused[e] = 1
        self.learn(layer, max(1, self.token), rows)
        self.recall(layer)
        for i in range(self.num_current):
            place = self.current[i]
            memset(self.votes, 0, self.num_experts * sizeof(float))
            if self.ring:
                if layer == self.lowest:
                    self.leave_out(names, rows, place)
                else:
                    self.match(layer, place, self.mask(layer, self.latest[place] % ECHO_RING))
                total = self.vote_successors(layer, place)
            self.loops.spare(
                self.num_experts, self.own + base, self.votes, total, PRIOR, self.unused
            )
        self.loops.unite(
            self.num_experts, self.own + base, self.unused, self.num_current,
            ECHO_TIME_DISCOUNT, self.next_use + base, self.values + base,
        )

    cdef void leave_out(
        self, const int32_t* names, Py_ssize_t rows, int place
    ) noexcept nogil:
        # Leaves out the tokens of other sequences under way: their successors are not known yet.
        cdef Py_ssize_t row
        cdef int64_t name = self.known[place].name
        # Rows before the first expert ever are no tokens.
        for row in range(max(0, rows - min(ECHO_RING, self.token)), rows):
            if names[row] != name:
                self.scores[
                    place * ECHO_RING + (self.token - (rows - 1 - row)) % ECHO_RING
                ] = -INFINITY

    cdef void follow(self, const int32_t* names, Py_ssize_t rows) noexcept nogil:
        # Finds the places of the step's sequences, which at most steps are those of the last.
        cdef int before = self.num_current, last = self.current[max(0, before - 1)]
        cdef Py_ssize_t row
        cdef int place
        cdef bint known
        if names == NULL:
            if before == 1 and not self.num_named and not self.between:
                return
        elif self.num_named == rows and memcmp(
            self.named, names, rows * sizeof(int32_t)
        ) == 0:
            return
        self.steps += 1
        self.num_current = 0
        self.num_named = 0
        if names == NULL:
            self.unnamed -= self.between
            self.between = False
            known = self.place_of(self.unnamed) >= 0
            self.join(self.unnamed)
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
                    self.join(names[row])
            self.num_named = rows if rows <= MAX_SEQUENCES else -1
            if rows <= MAX_SEQUENCES:
                memcpy(self.named, names, rows * sizeof(int32_t))
        if not known and before == 1 and self.num_current == 1:
            # One after another: the new one is taken to look like the last one.
            place = self.current[0]
            self.known[place].token = self.known[last].token
            self.known[place].seen = self.known[last].seen
            memcpy(
                self.scores + place * ECHO_RING, self.scores + last * ECHO_RING,
                ECHO_RING * sizeof(float),
            )
            self.blend()

    cdef void join(self, int64_t name) noexcept nogil:
        cdef int i, u, place = self.place_of(name)
        if place < 0:
            place = 0
            for i in range(MAX_SEQUENCES):
                if self.known[i].used < self.known[place].used:
                    place = i
            self.known[place].name = name
            self.known[place].token = 0
            self.known[place].seen = self.token
            for u in range(ECHO_RING):
                self.scores[place * ECHO_RING + u] = -INFINITY
        self.known[place].used = self.steps
        for i in range(self.num_current):
            if self.current[i] == place:
                return
        self.current[self.num_current] = place
        self.num_current += 1

    cdef int place_of(self, int64_t name) noexcept nogil:
        cdef int place
        for place in range(MAX_SEQUENCES):
            if self.known[place].used and self.known[place].name == name:
                return place
        return -1

    cdef void match(self, int layer, int place, const uint64_t* request) noexcept nogil:
        self.loops.match(
            self.mask(layer, 0), request, self.num_words, DECAY, GAIN,
            self.scores + place * ECHO_RING,
        )

    cdef uint64_t* mask(self, int layer, int slot) noexcept nogil:
        return self.masks + (<size_t>layer * ECHO_RING + slot) * self.num_words

    cdef int read_request(self, const void* ids, bint wide, Py_ssize_t k) noexcept nogil:
        # Returns how many distinct experts there are.
        cdef Py_ssize_t i
        cdef int64_t expert
        cdef int count = 0
        memset(self.request, 0, self.num_words * sizeof(uint64_t))
        memset(self.wanted, 0, self.num_experts * sizeof(float))
        for i in range(k):
            expert = id_at(ids, wide, i)
            if 0 <= expert < self.num_experts:
                count += self.wanted[expert] == 0
                self.wanted[expert] = 1
                self.request[expert >> 6] |= <uint64_t>1 << (expert & 63)
        return count

    cdef void start(self, int top_k) noexcept nogil:
        # The belief before anything was seen: all experts alike, popular ones used more.
        cdef Py_ssize_t key
        cdef int cell
        cdef float share = <float>top_k / self.num_experts
        self.top_k = top_k
        self.scale = <float>self.num_experts / top_k
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.fast[key] = self.slow[key] = share
        for cell in range(CELLS):
            self.table[cell] = min(
                <float>0.9, share * powf(2.0, (cell // ECHO_AGES - 6) / <float>1.5)
            )

    cdef void begin_token(self, int place) noexcept nogil:
        # If the last token of the sequence resembled token u - 1, this one resembles u.
        cdef float best = -INFINITY
        cdef float[256] old
        cdef float* scores = self.scores + place * ECHO_RING
        cdef int u, ago, slot, unseen
        cdef Py_ssize_t key
        if self.token == REBASE:
            # Set back by a multiple of the ring and of the quarters that the table learns from.
            self.token -= REBASE - (1 << 20)
            for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
                self.last[key] = max(NEVER, self.last[key] - (REBASE - (1 << 20)))
            for u in range(MAX_SEQUENCES):
                self.known[u].token = max(0, self.known[u].token - (REBASE - (1 << 20)))
                self.known[u].seen = max(0, self.known[u].seen - (REBASE - (1 << 20)))
        self.token += 1
        if not self.ring:
            return
        for u in range(ECHO_RING):
            best = max(best, scores[u])
        if best == -INFINITY:
            best = 0
        slot = self.token % ECHO_RING
        unseen = self.token - self.known[place].seen
        memcpy(old, scores, sizeof(old))
        for u in range(ECHO_RING):
            ago = (slot - u) & (ECHO_RING - 1)
            # A place of the ring that no earlier token has filled takes no part.
            if u == slot or ago >= self.token:
                scores[u] = -INFINITY
            elif self.before[u] and ago + self.before[u] >= unseen:
                scores[u] = max(
                    LOWEST_CARRY, CARRY * (old[(u - self.before[u]) & (ECHO_RING - 1)] - best)
                )
            else:
                scores[u] = LOWEST_CARRY
        self.known[place].seen = self.token
        self.enter_ring(place)

    cdef void enter_ring(self, int place) noexcept nogil:
        # Links the new token to its sequence's last one, if that is still in the ring.
        cdef int slot = self.token % ECHO_RING
        cdef int32_t ago = self.token - self.known[place].token
        cdef int last = (slot - ago) & (ECHO_RING - 1)
        self.unlink(slot)
        self.before[slot] = 0
        if self.known[place].token and ago < ECHO_RING:
            self.unlink(last)
            self.after[last] = self.before[slot] = <uint8_t>ago
        self.known[place].token = self.token

    cdef void unlink(self, int slot) noexcept nogil:
        # Parts a token from its successor.
        if self.after[slot]:
            self.before[(slot + self.after[slot]) & (ECHO_RING - 1)] = 0
            self.after[slot] = 0

    cdef void learn(self, int layer, int32_t token, Py_ssize_t rows) noexcept nogil:
        # From one row, or the mean of rows of several sequences.
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef float* table = self.table
        cdef const uint8_t* cells = self.cells + base
        cdef float rate = min(<float>1, rows / (<float>token + 5))
        cdef float fast = FAST, slow = SLOW
        cdef int e, cell
        for _ in range(rows - 1):
            fast += FAST * (1 - fast)
            slow += SLOW * (1 - slow)
        # A quarter of the experts each time is enough.
        for e in range(token // rows % 4, self.num_experts, 4):
            cell = cells[e]
            table[cell] += (
                max(<float>0.002, 1 / (self.samples[cell] + <float>1.5))
                * (self.wanted[e] - table[cell])
            )
            self.samples[cell] += 1
        self.loops.average(
            self.num_experts, self.wanted, max(fast, rate), max(slow, rate), self.scale, token,
            1 / <float>rows, self.last + base, self.fast + base, self.slow + base,
            self.cells + base,
        )

    cdef float vote_successors(self, int layer, int place) noexcept nogil:
        # Votes for the experts that the neighbours' successors used here, this request among them.
        cdef int[NEIGHBOURS] near
        cdef const float* scores = self.scores + place * ECHO_RING
        cdef int count = echo_nearest(scores, NEIGHBOURS, near)
        cdef int i, step, slot
        cdef float weight, total = 0
        for i in range(count):
            weight = expf(CARRY * (scores[near[i]] - scores[near[0]]))
            total += weight
            slot = near[i]
            for step in range(SUCCESSORS):
                if not self.after[slot]:
                    break
                slot = (slot + self.after[slot]) & (ECHO_RING - 1)
                self.add_votes(layer, slot, weight * self.discounts[step])
        return total

    cdef float vote_same(self, int layer, int place) noexcept nogil:
        # Votes for the experts that similar tokens used at a layer that this one has not reached.
        cdef int[AHEAD_NEIGHBOURS] near
        cdef const float* scores = self.scores + place * ECHO_RING
        cdef int count = echo_nearest(scores, AHEAD_NEIGHBOURS, near)
        cdef int i
        cdef float weight, total = 0
        memset(self.votes, 0, self.num_experts * sizeof(float))
        for i in range(count):
            weight = expf(scores[near[i]] - scores[near[0]])
            total += weight
            self.add_votes(layer, near[i], weight)
        return total

    cdef void add_votes(self, int layer, int slot, float weight) noexcept nogil:
        cdef const uint64_t* mask = self.masks + (
            (<size_t>layer * ECHO_RING + slot) * self.num_words
        )
        cdef uint64_t bits
        cdef int w
        for w in range(self.num_words):
            bits = mask[w]
            while bits:
                self.votes[64 * w + echo_lowest_bit(bits)] += weight
                bits &= bits - 1

    cdef void recall(self, int layer) noexcept nogil:
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef const uint8_t* cells = self.cells + base
        cdef int e
        for e in range(self.num_experts):
            self.history[e] = self.table[cells[e]]
        self.loops.own(self.num_experts, self.history, self.fast + base, self.own + base)

    cdef void blend(self) noexcept nogil:
        cdef Py_ssize_t key
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.fast[key] = self.slow[key]

    cdef void forget_all(self) noexcept nogil:
        cdef Py_ssize_t key, num_keys = <Py_ssize_t>self.num_layers * self.num_experts
        cdef int layer
        self.top_k = 0
        self.lowest = self.num_layers
        self.layer = 0
        self.token = 0
        for key in range(num_keys):
            self.last[key] = NEVER
            self.cells[key] = FIRST_CELL
        memset(self.own, 0, num_keys * sizeof(float))
        memset(self.next_use, 0, num_keys * sizeof(float))
        memset(self.values, 0, num_keys * sizeof(float))
        memset(self.samples, 0, CELLS * sizeof(float))
        self.forget_sequences()
        for layer in range(self.num_layers):
            self.versions[layer] += 1
        if self.ring:
            memset(
                self.masks, 0,
                <size_t>self.num_layers * ECHO_RING * self.num_words * sizeof(uint64_t),
            )

    cdef void forget_sequences(self) noexcept nogil:
        cdef int i
        for i in range(MAX_SEQUENCES * ECHO_RING):
            self.scores[i] = -INFINITY
        memset(self.known, 0, sizeof(self.known))
        memset(self.before, 0, sizeof(self.before))
        memset(self.after, 0, sizeof(self.after))
        self.current[0] = 0
        self.num_current = 0
        self.num_named = 0
        self.unnamed = 0
        self.between = True
        self.steps = 1


cdef object _one_after_another(clock):
    """Return `before` for a ring that one sequence has filled."""
    token = int(clock[3]) if isinstance(clock, np.ndarray) and clock.shape == (4,) else 0
    ago = (token - np.arange(ECHO_RING)) % ECHO_RING
    return ((ago < ECHO_RING - 1) & (ago < token - 1)).astype(np.uint8)


cdef object _check_state(dict given, int num_layers, int num_experts):
    """Raise ValueError if a value is one that no Echo could have."""
    top_k, lowest, layer, token = given["clock"].tolist()
    # Rounding may leave a quotient of sums a little above 1.
    most = {"samples": np.finfo(np.float32).max, "next_use": 1.001, "values": 1.001}
    for name, array in given.items():
        if array.dtype == np.float32 and name != "scores":
            # Written so that NaN is out of range, too.
            _require(
                ((array >= 0) & (array <= most.get(name, 1))).all(),
                f"{name} must be between 0 and {most.get(name, 1):.4g}",
            )
    scores = given["scores"]
    _require(((scores < INFINITY) & (scores == scores)).all(), "scores must be below infinity")
    _require(0 <= top_k <= num_experts, f"top_k {top_k} is not in [0, {num_experts}]")
    _require(
        0 <= lowest <= num_layers and (lowest < num_layers or top_k == 0),
        f"the lowest layer, {lowest}, is not in [0, {num_layers})",
    )
    _require(0 <= layer < num_layers, f"layer {layer} is not in [0, {num_layers})")
    _require(0 <= token <= REBASE, f"the number of tokens, {token}, is not in [0, {REBASE}]")
    last = given["last"]
    # Before the first valid request of the lowest layer, later layers count as of the first token.
    latest = max(token, min(top_k, 1))
    _require(((last >= NEVER) & (last <= latest)).all(), f"last must be in [{NEVER}, {latest}]")
    _require((given["cells"] < CELLS).all(), f"cells must be below {CELLS}")
    if "before" in given:
        places = np.arange(ECHO_RING)
        before = given["before"].astype(np.int64)
        ago = (token - places) % ECHO_RING + before
        linked = (places - before)[before > 0] % ECHO_RING
        _require(
            (ago[before > 0] < min(ECHO_RING, max(1, token))).all()
            and len(set(linked.tolist())) == len(linked),
            "before must lead to an earlier token of the ring, each to its own",
        )
    if "masks" in given and num_experts % 64:
        # A bit beyond the last expert would be counted past the end of the votes.
        beyond = given["masks"][:, :, -1] >> np.uint64(num_experts % 64)
        _require(not beyond.any(), f"masks must have no bit from {num_experts} on")


cdef object _require(condition, message):
    if not condition:
        raise ValueError(f"no state of an Echo: {message}")
