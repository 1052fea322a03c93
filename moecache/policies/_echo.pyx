"""ECHO: every expert's probability of reuse.

An expert's probability of being used when its layer comes round again is taken from its
own history (moving averages, and a table of popularity by age that is learned as it
goes) and from the eight recent tokens whose routing so far looks most like the current
one's: what did their successors use at this layer? docs/echo.md has the derivation.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY, expf, powf
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

from moecache.policies._ids cimport as_ids, id_at
from moecache.policies._policy cimport MAX_KEYS

cnp.import_array()

cdef enum:
    NEIGHBOURS = 8         # tokens whose successors vote
    SUCCESSORS = 3         # how far they look ahead
    AHEAD_NEIGHBOURS = 16  # tokens that vote for a layer still to come
    CELLS = 192
    FIRST_CELL = 6 * 16 + 15
    NEVER = -100000       # the last use of what was never used
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
    with the lowest one. A step of several rows is that many consecutive tokens: Echo
    learns from all of them and predicts from the last alone. The cost of a layer and
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
        if (
            self.fast == NULL or self.slow == NULL or self.last == NULL or self.cells == NULL
            or self.own == NULL or self.next_use == NULL or self.values == NULL
            or self.versions == NULL or self.masks == NULL or self.request == NULL
            or self.wanted == NULL or self.votes == NULL or self.history == NULL
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

    def observe(self, Py_ssize_t layer, ids) -> None:
        """Learn from what the router chose.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [..., top_k]
            A row per token, the oldest first. Ids out of range are dropped.

        Raises
        ------
        ValueError
            If the layer is out of range.
        TypeError
            If ids are not integers.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef bint wide = cnp.PyArray_ITEMSIZE(array) == 8
        cdef const void* data = cnp.PyArray_DATA(array)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef int dimensions = cnp.PyArray_NDIM(array)
        cdef Py_ssize_t k = cnp.PyArray_DIM(array, dimensions - 1) if dimensions else 1
        self.checked(layer)
        if k:
            self.observe_rows(<int>layer, data, wide, n // k, k)

    def predict(self, Py_ssize_t layer, Py_ssize_t n) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts most likely to be used when a layer comes next.

        Parameters
        ----------
        layer : int
            If it comes later than the last one seen, the current token's use of it is
            predicted, best for the very next layer; else the next token's.
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
        cdef int e, m, position
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
        if layer > self.layer and self.ring:
            total = self.vote_same(<int>layer)
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
        """Say that the next tokens do not continue the last ones.

        The fast averages fall back to the slow ones; what was learned stays.
        """
        self.blend()

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
            with a ring "masks", uint64 [num_layers, 256, words].
        """
        cdef cnp.ndarray array
        cdef dict found = {
            "clock": np.array([self.top_k, self.lowest, self.layer, self.token], np.int64)
        }
        for name, dtype, shape in self.parts():
            array = np.empty(shape, dtype)
            memcpy(cnp.PyArray_DATA(array), self.part(name), cnp.PyArray_NBYTES(array))
            found[name] = array
        return found

    def restore(self, state) -> None:
        """Go on from what another Echo of this shape had learned, to the last bit.

        Parameters
        ----------
        state : mapping of str to ndarray
            What `state` returned. Copied.

        Raises
        ------
        ValueError
            If an array is missing, of another shape or dtype, or has a value that no Echo
            could have. Nothing is changed then.
        """
        cdef cnp.ndarray array
        cdef int layer
        parts = {name: (np.dtype(dtype), shape) for name, dtype, shape in self.parts()}
        parts["clock"] = (np.dtype(np.int64), (4,))
        given = {}
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
        for name, _, _ in self.parts():
            array = given[name]
            memcpy(self.part(name), cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
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
        return found

    cdef void* part(self, str name) except NULL:
        if name == "table":
            return self.table
        if name == "samples":
            return self.samples
        if name == "scores":
            return self.scores
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
        raise KeyError(name)

    cdef int checked(self, Py_ssize_t layer) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        return 0

    cdef void observe_rows(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k
    ) noexcept nogil:
        cdef Py_ssize_t row
        cdef int32_t token
        cdef float total = 0
        cdef int width = 8 if wide else 4
        cdef uint64_t* mask
        cdef int w, count
        if rows == 0:
            return
        self.lowest = min(self.lowest, layer)
        for row in range(rows):
            count = self.read_request(<const char*>ids + row * k * width, wide, k)
            if self.top_k == 0:
                if count == 0:
                    continue
                self.start(count)
            if layer == self.lowest:
                self.begin_token()
                token = self.token
            else:
                token = <int32_t>max(1, self.token - (rows - 1 - row))
            if self.ring:
                # Later layers score the last row alone: there is one score per token of the ring.
                if layer == self.lowest or row == rows - 1:
                    self.loops.match(
                        self.masks + <size_t>layer * ECHO_RING * self.num_words, self.request,
                        self.num_words, DECAY, GAIN, self.scores,
                    )
                mask = self.masks + (
                    (<size_t>layer * ECHO_RING + token % ECHO_RING) * self.num_words
                )
                for w in range(self.num_words):
                    mask[w] = self.request[w]
            self.learn(layer, token)
        if self.top_k == 0:
            return
        memset(self.votes, 0, self.num_experts * sizeof(float))
        if self.ring:
            total = self.vote_successors(layer)
        self.estimate(layer, total)
        self.layer = layer
        self.versions[layer] += 1

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

    cdef void begin_token(self) noexcept nogil:
        # If the last token resembled token u - 1, this one resembles u.
        cdef float best = -INFINITY
        cdef float before, carried
        cdef int u, slot
        cdef Py_ssize_t key
        if self.token == REBASE:
            # Set back by a multiple of the ring and of the quarters that the table learns from.
            self.token -= REBASE - (1 << 20)
            for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
                self.last[key] = max(NEVER, self.last[key] - (REBASE - (1 << 20)))
        self.token += 1
        if not self.ring:
            return
        for u in range(ECHO_RING):
            best = max(best, self.scores[u])
        if best == -INFINITY:
            best = 0
        slot = self.token % ECHO_RING
        before = self.scores[ECHO_RING - 1]
        for u in range(ECHO_RING):
            carried = CARRY * (before - best)
            before = self.scores[u]
            # A place of the ring that no earlier token has filled takes no part.
            if u == slot or ((slot - u) & (ECHO_RING - 1)) >= self.token:
                self.scores[u] = -INFINITY
            else:
                self.scores[u] = max(LOWEST_CARRY, carried)

    cdef void learn(self, int layer, int32_t token) noexcept nogil:
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef float* table = self.table
        cdef const uint8_t* cells = self.cells + base
        cdef float rate = 1 / (<float>token + 5)
        cdef int e, cell
        # A quarter of the experts each time is enough.
        for e in range(token % 4, self.num_experts, 4):
            cell = cells[e]
            table[cell] += (
                max(<float>0.002, 1 / (self.samples[cell] + <float>1.5))
                * (self.wanted[e] - table[cell])
            )
            self.samples[cell] += 1
        self.loops.average(
            self.num_experts, self.wanted, max(FAST, rate), max(SLOW, rate), self.scale, token,
            self.last + base, self.fast + base, self.slow + base, self.cells + base,
        )

    cdef float vote_successors(self, int layer) noexcept nogil:
        # Votes for what the tokens after each neighbour used here, this very request among them.
        cdef int[NEIGHBOURS] near
        cdef int count = echo_nearest(self.scores, NEIGHBOURS, near)
        cdef int i, step, ago, slot
        cdef float weight, total = 0
        for i in range(count):
            weight = expf(CARRY * (self.scores[near[i]] - self.scores[near[0]]))
            total += weight
            ago = (self.token - near[i]) & (ECHO_RING - 1)
            for step in range(1, min(SUCCESSORS, ago) + 1):
                slot = (near[i] + step) & (ECHO_RING - 1)
                self.add_votes(layer, slot, weight * self.discounts[step - 1])
        return total

    cdef float vote_same(self, int layer) noexcept nogil:
        # Votes for what similar tokens themselves used at a layer that this one has not reached.
        cdef int[AHEAD_NEIGHBOURS] near
        cdef int count = echo_nearest(self.scores, AHEAD_NEIGHBOURS, near)
        cdef int i
        cdef float weight, total = 0
        memset(self.votes, 0, self.num_experts * sizeof(float))
        for i in range(count):
            weight = expf(self.scores[near[i]] - self.scores[near[0]])
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

    cdef void estimate(self, int layer, float total) noexcept nogil:
        cdef Py_ssize_t base = <Py_ssize_t>layer * self.num_experts
        cdef const uint8_t* cells = self.cells + base
        cdef int e
        for e in range(self.num_experts):
            self.history[e] = self.table[cells[e]]
        self.loops.value(
            self.num_experts, self.history, self.fast + base, self.votes, total, PRIOR,
            ECHO_TIME_DISCOUNT, self.own + base, self.next_use + base, self.values + base,
        )

    cdef void blend(self) noexcept nogil:
        cdef Py_ssize_t key
        for key in range(<Py_ssize_t>self.num_layers * self.num_experts):
            self.fast[key] = self.slow[key]

    cdef void forget_all(self) noexcept nogil:
        cdef Py_ssize_t key, num_keys = <Py_ssize_t>self.num_layers * self.num_experts
        cdef int u, layer
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
        for u in range(ECHO_RING):
            self.scores[u] = -INFINITY
        for layer in range(self.num_layers):
            self.versions[layer] += 1
        if self.ring:
            memset(
                self.masks, 0,
                <size_t>self.num_layers * ECHO_RING * self.num_words * sizeof(uint64_t),
            )


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
    if "masks" in given and num_experts % 64:
        # A bit beyond the last expert would be counted past the end of the votes.
        beyond = given["masks"][:, :, -1] >> np.uint64(num_experts % 64)
        _require(not beyond.any(), f"masks must have no bit from {num_experts} on")


cdef object _require(condition, message):
    if not condition:
        raise ValueError(f"no state of an Echo: {message}")
