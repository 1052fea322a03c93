"""Program: a recipe bound to memory; a token is one call while its experts hit."""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._attention cimport add_attention
from moecache.decoding._bound cimport Bound, Layer
from moecache.decoding._context cimport Context
from moecache.decoding._feed_forward cimport add_forward, choose, foresee
from moecache.decoding._routed cimport Routed
from moecache.decoding._steps cimport mc_scale
from moecache.decoding._workspace cimport ROWS, Workspace, norm_row

import numpy as np

from moecache.errors import ConfigError

cnp.import_array()

MAX_ROWS = ROWS


@cython.final
cdef class Program:
    """Computes a decoder's logits for a few tokens, as a recipe says.

    A call begins with `begin` or `begin_together`; while `run` returns a layer, its experts are to
    be computed from `given` into `rows` by the caller, as some of them are not resident. What is
    read stays as it is until the next call. Not for two threads at once.

    Hidden states, norms, sums and logits are float32; a row's bits depend neither on the other rows
    nor on threads nor on where experts are.

    Parameters
    ----------
    recipe : Recipe
    cache : ExpertCache
    max_rows : int, default 16
        Rows of a call, at most.

    Attributes
    ----------
    hidden : ndarray of float32, shape [max_rows, hidden_size]
        Embeddings of the tokens, not scaled; to be filled in before a call begins.
    normed : ndarray of float32, shape [max_rows, hidden_size]
        Input of the feed-forward, and of its router.
    given : ndarray of float32, shape [max_rows, expert_size]
        Input of the experts that are asked for: `normed`, unless it is latents.
    ids : ndarray of int32, shape [max_rows, top_k]
        The router's choice.
    rows : ndarray of float32, shape [max_rows * top_k, expert_size]
        Results of each (token, choice) pair, before their sum.
    num_resident : int
        Layers of this call whose experts were all resident.
    product_type : str
        The recipe's.

    Raises
    ------
    ConfigError
        If matrices do not fit together.
    MemoryError
    """

    cdef readonly cnp.ndarray hidden, normed, given, ids, rows
    cdef readonly int64_t num_resident
    cdef readonly str product_type
    cdef object recipe
    cdef Bound bound
    cdef Workspace workspace
    cdef Context context
    cdef Routed routed
    # The call: its layer, and what its steps are told to.
    cdef int64_t at
    cdef object observe
    cdef bint is_spread

    def __cinit__(self, recipe, ExpertCache cache not None, int64_t max_rows=ROWS):
        if not 1 <= max_rows <= 1 << 20:
            raise ConfigError(f"a program has no {max_rows} rows")
        self.recipe, self.bound = recipe, Bound(recipe, cache)
        self.product_type = recipe.product_type
        self.workspace = Workspace(self.bound, max_rows)
        self.context = Context(self.workspace)
        self.routed = Routed(cache, self.context)
        self.hidden, self.normed, self.given, self.ids, self.rows = self.workspace.arrays

    def begin(
        self, list pages not None, int64_t length, int64_t each, cnp.ndarray begins not None,
        cnp.ndarray cos not None, cnp.ndarray sin not None, observe=None, *,
        cnp.ndarray sequences=None, bint is_spread=False
    ):
        """Begin a call for tokens whose embeddings are in `hidden`, row after row of the batch.

        Parameters
        ----------
        pages : list of KeyValues or States
            One for each layer, with room for the new tokens.
        length : int
            Positions that are there, of each sequence.
        each : int
            New tokens of each sequence.
        begins : ndarray of int64, shape [batch]
            The first position that a sequence sees; those before it are padding.
        cos, sin : ndarray of float32, shape [batch * each, rotary_width / 2]
            Of the tokens' positions.
        observe : callable (layer, ids, sequences), optional
            Told of each resident step, as `StepSource`'s is.
        sequences : ndarray of int32, shape [batch * each], optional
            Which sequence a row is of, as `ExpertCache.acquire` takes it.
        is_spread : bool, default False
            Whether some experts are elsewhere, so that every layer's are the caller's to compute.

        Raises
        ------
        ConfigError
            If these do not fit.
        MemoryError
        """
        cdef cnp.ndarray lengths = np.array([length], np.int64)
        cdef cnp.ndarray counts = np.array([each], np.int64)
        self.context.begin(
            [pages], lengths, begins.size, counts, begins, cos, sin, sequences
        )
        self._begin(observe, is_spread)

    def begin_together(
        self, list caches not None, cnp.ndarray lengths not None, cnp.ndarray cos not None,
        cnp.ndarray sin not None, observe=None, *, cnp.ndarray counts=None,
        cnp.ndarray begins=None, cnp.ndarray sequences=None, bint is_spread=False
    ):
        """Begin a call for new tokens of each of some sequences with caches of their own.

        Parameters
        ----------
        caches : list of list of KeyValues or States
            Of each sequence one for each layer, of a batch of 1, with room for the new tokens.
        lengths : ndarray of int64, shape [num_sequences]
            Positions that are there, of each sequence.
        cos, sin : ndarray of float32, shape [num_tokens, rotary_width / 2]
            Of the tokens' positions, one sequence's after the other's.
        counts : ndarray of int64, shape [num_sequences], optional
            New tokens of each sequence; by default one.
        begins : ndarray of int64, shape [num_sequences], optional
            The first position that each sequence sees; by default all of them.
        observe, sequences, is_spread
            As `begin`'s.

        Raises
        ------
        ConfigError
            If these do not fit, or two sequences have one cache.
        MemoryError
        """
        if begins is None:
            begins = np.zeros(len(caches), np.int64)
        if counts is None:
            counts = np.ones(len(caches), np.int64)
        self.context.begin(caches, lengths, 1, counts, begins, cos, sin, sequences)
        self._begin(observe, is_spread)

    def run(self, on_layer=None):
        """Compute on, up to a layer whose experts are not all there, or to the end.

        Parameters
        ----------
        on_layer : callable (layer), optional
            Called with the place of each layer, before its experts are computed. What it raises
            ends the call.

        Returns
        -------
        int
            Number of the runtime's layer: compute the experts of `ids`, from `given` into `rows`,
            then call `resume`. -1 at the end: `logits` returns the result.
        """
        cdef Layer *layer
        while self.at < self.bound.num_layers:
            layer = &self.bound.layers[self.at]
            if self.workspace.num_rows > ROWS:
                # A prompt takes seconds.
                PyErr_CheckSignals()
            if on_layer is not None:
                on_layer(self.at)
            if layer.has_experts:
                if self.is_spread or not self.routed.compute_resident(self.at, self.observe):
                    return layer.number
                self.num_resident += 1
            self.resume()
        return -1

    def resume(self):
        """Take the experts' results, and go on to the next layer's choice.

        Raises
        ------
        ValueError
            If no layer waits for any.
        """
        cdef Workspace w = self.workspace
        if self.at >= w.bound.num_layers or w.num_rows == 0:
            raise ValueError("no layer waits for its experts")
        with nogil:
            add_forward(w, &w.bound.layers[self.at])
        self.at += 1
        if self.at < self.bound.num_layers:
            self._choose()

    def abandon(self):
        """Let go of the keys and values of a call that is not gone on with."""
        self.observe = None
        self.context.end()

    def compute(self, cnp.ndarray slots not None, list chosen not None):
        """Compute some of a token's experts, whose slots are leased and filled, into `rows`.

        To be called while `run` waits for a layer, of one row.

        Parameters
        ----------
        slots : ndarray of int32, shape [top_k]
            Of each id.
        chosen : list of int
            Places of the experts among the ids.

        Returns
        -------
        int
            Nanoseconds that it took.

        Raises
        ------
        ValueError
            If a place is none of the token's, or there is no such layer or row.
        """
        cdef int64_t n = len(chosen), k = self.workspace.top_k
        cdef const Layer *layer
        if self.at >= self.bound.num_layers or self.workspace.num_rows != 1 or n > k:
            raise ValueError(f"{n} experts are none of a token's that is being computed")
        if slots.dtype != np.int32 or slots.size != k or not cnp.PyArray_IS_C_CONTIGUOUS(slots):
            raise ValueError(f"slots are not {k} contiguous int32")
        layer = &self.bound.layers[self.at]
        if not layer.has_experts:
            raise ValueError(f"layer {layer.number} has no experts")
        return self.routed.compute(layer, <const int32_t *>cnp.PyArray_DATA(slots), chosen)

    def foresee(self, int number, int64_t n):
        """Return up to n experts that a layer's router would choose of what this layer's got.

        Hidden states change little from layer to layer. To be called while the experts of a step
        are looked up: by `observe`, or while `run` waits for a layer.

        Parameters
        ----------
        number : int
            The runtime's number of a layer behind this one.
        n : int

        Returns
        -------
        ndarray of int32, or None
            The likeliest first; `None` if there is no such layer.
        """
        cdef Workspace w = self.workspace
        cdef const Layer *layer = NULL
        cdef int64_t i
        cdef float[::1] sums
        cdef cnp.ndarray out
        for i in range(self.at + 1, self.bound.num_layers):
            if self.bound.layers[i].has_experts and self.bound.layers[i].number == number:
                layer = &self.bound.layers[i]
                break
        if layer == NULL or n < 1 or w.top_k > 512 or w.num_rows > ROWS:
            return None
        sums = np.zeros(layer.choice.num_experts, np.float32)
        out = np.empty(min(n, layer.choice.num_experts), np.int32)
        with nogil:
            foresee(w, layer, &sums[0], out.shape[0], <int32_t *>cnp.PyArray_DATA(out))
        return out

    def take_counts(self):
        """Return what steps whose experts were all resident have computed, and count from 0 again.

        Returns
        -------
        list of (int, int, int, int)
            Of each layer with experts: the runtime's number of it, experts that were computed,
            those of steps of a single token, and nanoseconds that the latter took.
        """
        return self.routed.take_counts()

    def logits_of(self, int64_t num):
        """Return the logits after the last `num` tokens of each sequence.

        Returns
        -------
        ndarray of float32, shape [batch, num, vocabulary]
        """
        cdef Workspace w = self.workspace
        cdef Context c = self.context
        cdef int64_t i, row, batch = c.num_sequences
        cdef cnp.ndarray out
        if not 1 <= num <= c.fewest:
            raise ConfigError(f"logits of {num} of {c.fewest} tokens")
        out = np.empty((batch, num, self.bound.head.matrix.rows), np.float32)
        with nogil:
            for i in range(batch * num):
                row = c.ends[i // num] - num + i % num
                norm_row(
                    &w.bound.norm, w.hidden + row * w.hidden_size, w.normed + i * w.hidden_size
                )
            w.multiply(&w.bound.head, w.normed, batch * num, <float *>cnp.PyArray_DATA(out))
        self.abandon()
        if self.bound.logits_scale != 1:
            out /= np.float32(self.bound.logits_scale)
        if self.recipe.cap:
            cap = np.float32(self.recipe.cap)
            np.multiply(np.tanh(np.divide(out, cap, out=out), out=out), cap, out=out)
        return out

    cdef void _begin(self, observe, bint is_spread) noexcept:
        cdef Workspace w = self.workspace
        self.num_resident, self.at = 0, 0
        self.observe, self.is_spread = observe, is_spread
        if self.bound.embedding_scale != 1:
            mc_scale(w.hidden, w.num_rows * w.hidden_size, self.bound.embedding_scale)
        self._choose()

    cdef void _choose(self) noexcept:
        """Add the layer's attention to `hidden`, and have its router choose."""
        cdef Workspace w = self.workspace
        cdef Context c = self.context
        with nogil:
            add_attention(w, c, self.at)
            choose(w, &w.bound.layers[self.at])
