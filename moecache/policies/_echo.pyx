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
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

import numpy as np

from moecache.policies._echo_history cimport History
from moecache.policies._echo_loops cimport ECHO_RING
from moecache.policies._echo_outlook cimport Outlook
from moecache.policies._echo_ring cimport REBASE, Ring
from moecache.policies._echo_sequences cimport Sequence, Sequences
from moecache.policies._echo_state cimport checked_state, in_order
from moecache.policies._ids cimport as_ids, as_sequences, id_at
from moecache.policies._policy cimport MAX_KEYS

cnp.import_array()

cdef enum:
    MAX_EXPERTS = 1 << 20


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
        cdef dict arrays
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
        self.num_words = (num_experts + 63) // 64
        self.history = History(num_layers, num_experts)
        self.recent = Ring(num_layers if ring else 0, self.num_words)
        self.sequences = Sequences()
        self.outlook = Outlook(num_layers, num_experts)
        arrays = {
            "versions": np.zeros(num_layers, np.uint32),
            "request": np.zeros(self.num_words, np.uint64),
            "wanted": np.zeros(num_experts, np.float32),
            "sums": np.zeros(num_experts, np.float32),
        }
        self.versions = <uint32_t*>cnp.PyArray_DATA(<cnp.ndarray>arrays["versions"])
        self.request = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>arrays["request"])
        self.wanted = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["wanted"])
        self.sums = <float*>cnp.PyArray_DATA(<cnp.ndarray>arrays["sums"])
        self.arrays = {**arrays, **self.history.arrays, **self.outlook.arrays}
        if ring:
            self.arrays.update(self.recent.arrays)
        self.forget_all()

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
        cdef int i
        cdef Outlook outlook = self.outlook
        cdef Sequences sequences = self.sequences
        cdef const float* own
        cdef const float* scores
        self.checked(layer)
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        own = self.history.own + layer * self.num_experts
        scores = outlook.next_use + layer * self.num_experts
        # A layer that was seen once has probabilities above 0.
        n = min(n, self.num_experts) if own[0] > 0 else 0
        if n and layer > self.layer and self.ring:
            if sequences.num_current > 1:
                outlook.begin_union()
                for i in range(sequences.num_current):
                    total = self.vote_ahead(<int>layer, sequences.current[i])
                    outlook.unite(own, total, True)
                scores = outlook.ahead_of_union()
            else:
                total = self.vote_ahead(<int>layer, sequences.current[0])
                scores = outlook.ahead(own, total)
        return outlook.likeliest(scores, <int>n)

    def begin_sequence(self) -> None:
        """Say that the next tokens do not continue the last ones, as far as no sequence is named.

        The fast averages fall back to the slow ones; knowledge stays.
        """
        self.sequences.between = True

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
        found = {name: array.copy() for name, array in self.learned().items()}
        if self.sequences.between:
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
        cdef int layer
        given = checked_state(state, self.learned(), self.num_layers, self.num_experts)
        top_k, self.lowest, self.layer, self.token = given.pop("clock").tolist()
        self.history.expect(top_k)
        self.recent.forget()
        self.sequences.go_on(self.token)
        known = self.learned()
        for name, array in given.items():
            np.copyto(known[name], array)
        self.recent.link_back()
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
        return self.arrays["values"].copy()

    cdef dict learned(self):
        """Return the arrays of `state`, not copied but for the clock."""
        clock = np.array([self.history.top_k, self.lowest, self.layer, self.token], np.int64)
        return in_order({**self.arrays, "clock": clock, "scores": self.sequences.last_scores()})

    cdef int checked(self, Py_ssize_t layer) except -1:
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        return 0

    cdef void observe_rows(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil:
        """Learn from rows of a layer; `names` has the sequence of each, or is NULL."""
        if rows == 0:
            return
        self.lowest = min(self.lowest, layer)
        if self.sequences.follow(names, rows, self.token):
            self.history.blend()
        if self.sequences.num_current > 1:
            self.observe_several(layer, ids, wide, rows, k, names)
        else:
            self.observe_one(layer, ids, wide, rows, k)
        if self.history.top_k:
            self.layer = layer
            self.versions[layer] += 1

    cdef void observe_one(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k
    ) noexcept nogil:
        cdef Py_ssize_t row, base = <Py_ssize_t>layer * self.num_experts
        cdef int32_t token
        cdef int width = 8 if wide else 4
        cdef int place = self.sequences.current[0]
        for row in range(rows):
            if not self.read_row(<const char*>ids + row * k * width, wide, k):
                continue
            token = self.token_of(layer, place, rows - 1 - row)
            if self.ring:
                # Later layers score the last row alone: there is one score per token of the ring.
                if layer == self.lowest or row == rows - 1:
                    self.recent.match(layer, self.request, self.sequences.scores_of(place))
                self.recent.note(layer, token, self.request)
            self.history.learn(layer, token, 1, self.wanted)
        if self.history.top_k == 0:
            return
        self.history.recall(layer)
        self.outlook.judge(layer, self.history.own + base, self.vote_next(layer, place))

    cdef void observe_several(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t k,
        const int32_t* names,
    ) noexcept nogil:
        # Rows of one moment: the averages learn their mean at once, and each sequence looks for
        # tokens like its own last row, which others of the moment are not.
        cdef Py_ssize_t row, base = <Py_ssize_t>layer * self.num_experts
        cdef int32_t token
        cdef int width = 8 if wide else 4
        cdef int e, i, place = 0
        memset(self.sums, 0, self.num_experts * sizeof(float))
        for row in range(rows):
            if row == 0 or names[row] != names[row - 1]:
                place = self.sequences.place_of(names[row])
            if not self.read_row(<const char*>ids + row * k * width, wide, k):
                continue
            for e in range(self.num_experts):
                self.sums[e] += self.wanted[e]
            token = self.token_of(layer, place, rows - 1 - row)
            self.sequences.latest[place] = token
            if self.ring:
                self.recent.note(layer, token, self.request)
                if layer == self.lowest:
                    self.recent.match(layer, self.request, self.sequences.scores_of(place))
        if self.history.top_k == 0:
            return
        for e in range(self.num_experts):
            self.wanted[e] = self.sums[e] / rows
        self.history.learn(layer, max(1, self.token), rows, self.wanted)
        self.history.recall(layer)
        self.outlook.begin_union()
        for i in range(self.sequences.num_current):
            place = self.sequences.current[i]
            if self.ring and layer == self.lowest:
                self.sequences.leave_out(names, rows, place, self.token)
            elif self.ring:
                token = self.sequences.latest[place]
                self.recent.match(
                    layer, self.recent.mask(layer, token % ECHO_RING),
                    self.sequences.scores_of(place),
                )
            self.outlook.unite(self.history.own + base, self.vote_next(layer, place), False)
        self.outlook.judge_union(layer, self.history.own + base, self.sequences.num_current)

    cdef bint read_row(self, const void* ids, bint wide, Py_ssize_t k) noexcept nogil:
        """Read the request of a row; return False if no row has asked for an expert so far."""
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
        if self.history.top_k == 0 and count:
            self.history.start(count)
        return self.history.top_k > 0

    cdef int32_t token_of(self, int layer, int place, Py_ssize_t later) noexcept nogil:
        """Return the token that a row is of, before `later` rows: at the lowest layer a new one."""
        if layer != self.lowest:
            return <int32_t>max(1, self.token - later)
        if self.token == REBASE:
            # By a multiple of the ring and of the quarters that the table learns from.
            self.token -= REBASE - (1 << 20)
            self.history.set_back(REBASE - (1 << 20))
            self.sequences.set_back(REBASE - (1 << 20))
        self.token += 1
        if self.ring:
            self.begin_scores(&self.sequences.known[place], self.sequences.scores_of(place))
        return self.token

    cdef void begin_scores(self, Sequence* sequence, float* scores) noexcept nogil:
        self.recent.carry(self.token, self.token - sequence.seen, scores)
        self.recent.enter(self.token, sequence.token)
        sequence.seen = sequence.token = self.token

    cdef float vote_next(self, int layer, int place) noexcept nogil:
        """Have a sequence vote for its next use of a layer; return the votes' weight."""
        cdef float* votes = self.outlook.ballot()
        if not self.ring:
            return 0
        return self.recent.vote_successors(layer, self.sequences.scores_of(place), votes)

    cdef float vote_ahead(self, int layer, int place) noexcept nogil:
        """Have it vote for a layer that its current token has not reached."""
        return self.recent.vote_same(
            layer, self.sequences.scores_of(place), self.outlook.ballot()
        )

    cdef void forget_all(self) noexcept nogil:
        cdef int layer
        self.lowest = self.num_layers
        self.layer = 0
        self.token = 0
        self.history.forget()
        self.recent.forget()
        self.sequences.forget()
        self.outlook.forget()
        for layer in range(self.num_layers):
            self.versions[layer] += 1
