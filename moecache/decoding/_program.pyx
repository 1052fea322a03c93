"""Program: a recipe bound to memory; a token is one call while its experts hit."""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from moecache.cache._cache cimport ExpertCache
from moecache.decoding._bound cimport Bound, Layer, Linear, Norm
from moecache.decoding._held cimport KeyValues, States
from moecache.decoding._linear cimport (
    mc_convolve_item,
    mc_convolve_items,
    mc_delta_item,
    mc_linear,
    mc_multiply_rows,
    mc_scan_item,
    mc_stretch,
)
from moecache.decoding._steps cimport (
    MC_MOST_TILE,
    mc_add,
    mc_attend_item,
    mc_heads,
    mc_held,
    mc_latent_item,
    mc_layer_norm,
    mc_norm,
    mc_route,
    mc_softmax,
    mc_store,
    mc_top,
    mc_turn,
)
from moecache.kernels._jobs cimport (
    MC_F32,
    MC_X_F32,
    MC_X_PLANES,
    mc_are_alike,
    mc_experts,
    mc_input_columns,
    mc_input_row_bytes,
    mc_input_type,
    mc_matrix,
    mc_product,
    mc_sum,
    mc_work,
)
from moecache.kernels._kernels cimport (
    convert_rows,
    level_in_use,
    now_ns,
    run_experts,
    run_items,
    run_product,
    run_sum,
)

import numpy as np

from moecache.errors import ConfigError

cnp.import_array()

# Rows of a call, if nobody says: more are a prompt.
cdef enum:
    ROWS = 16
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

    Raises
    ------
    ConfigError
        If matrices do not fit together.
    MemoryError
    """

    cdef Bound bound
    # Its layers, and what all of them share.
    cdef Layer *layers
    cdef int64_t num_layers, hidden_size, expert_size, top_k
    cdef int64_t max_rows
    cdef ExpertCache cache
    cdef object recipe
    cdef readonly cnp.ndarray hidden, normed, given, ids, rows
    cdef readonly int64_t num_resident
    # Of each layer since they were taken: experts of whole steps, those of single tokens, and the
    # time that the latter took.
    cdef int64_t *num_products
    cdef int64_t *num_single
    cdef int64_t *busy_ns
    cdef cnp.ndarray _work
    # Parts of `_work`, each for all rows.
    cdef float *queries
    cdef float *keys
    cdef float *values
    cdef float *mixed
    cdef float *wide
    cdef float *second
    cdef float *added
    cdef float *logits
    cdef float *scratch
    cdef float *weights
    cdef float *latents
    cdef float *gates
    cdef float *beside
    cdef float *scores
    cdef int64_t num_scores
    cdef uint8_t *converted
    cdef int64_t converted_bytes
    cdef uint8_t *expert_hidden
    # A step of several rows: slots of its pairs, and pairs by expert.
    cdef int32_t *slots
    cdef int32_t *some
    cdef int64_t *offsets
    cdef int64_t *pairs
    cdef int64_t *places
    cdef const uint8_t **inputs
    cdef const uint8_t **hidden_inputs
    # Where each row of a product is.
    cdef const uint8_t **taken
    # The call.
    cdef int64_t at, num_rows, each, longest
    # The row behind each sequence's last one, and how many the shortest of them has.
    cdef cnp.ndarray ends
    cdef int64_t fewest
    # Of each layer: what its rows see, and of which type it is.
    cdef mc_held *held
    cdef int *types
    # The same of layers of linear attention, for each sequence.
    cdef mc_stretch *stretches
    cdef int64_t num_stretches
    cdef const float *cos
    cdef const float *sin
    cdef list caches
    cdef object kept
    cdef object observe
    # Which sequence each row is of, int32 [num_rows], or None.
    cdef cnp.ndarray sequences
    cdef bint is_spread

    def __cinit__(self, recipe, ExpertCache cache not None, int64_t max_rows=ROWS):
        if not 1 <= max_rows <= 1 << 20:
            raise ConfigError(f"a program has no {max_rows} rows")
        self.max_rows = max_rows
        self.recipe, self.cache, self.bound = recipe, cache, Bound(recipe, cache)
        self.layers, self.num_layers = self.bound.layers, self.bound.num_layers
        self.hidden_size, self.top_k = self.bound.hidden_size, self.bound.top_k
        self.expert_size = self.bound.expert_size
        self.scores, self.held, self.types, self.stretches = NULL, NULL, NULL, NULL
        self.num_products, self.num_single, self.busy_ns = NULL, NULL, NULL
        self.slots, self.some, self.offsets, self.pairs, self.places = NULL, NULL, NULL, NULL, NULL
        self.inputs, self.hidden_inputs, self.taken = NULL, NULL, NULL
        self.held = <mc_held *>calloc(max(1, self.num_layers) * max_rows, sizeof(mc_held))
        self.types = <int *>calloc(max(1, self.num_layers), sizeof(int))
        self.stretches = <mc_stretch *>calloc(
            max(1, self.num_layers) * max_rows, sizeof(mc_stretch)
        )
        self.num_products = <int64_t *>calloc(3 * max(1, self.num_layers), sizeof(int64_t))
        if (
            self.held == NULL or self.types == NULL or self.stretches == NULL
            or self.num_products == NULL
        ):
            raise MemoryError("no memory for a program")
        self.num_single = self.num_products + self.num_layers
        self.busy_ns = self.num_single + self.num_layers
        self._reserve()

    def __dealloc__(self):
        free(self.scores)
        free(self.held)
        free(self.types)
        free(self.stretches)
        free(self.num_products)
        free(self.slots)
        free(self.some)
        free(self.offsets)
        free(self.pairs)
        free(self.places)
        free(self.inputs)
        free(self.hidden_inputs)
        free(self.taken)

    cdef int64_t _room(self, Linear *linear) noexcept:
        # Bytes of an input in whatever type a level multiplies it.
        if not linear.is_there:
            return 0
        return max(
            mc_input_row_bytes(MC_X_F32, mc_input_columns(&linear.matrix)),
            mc_input_row_bytes(MC_X_PLANES, (linear.matrix.columns + 31) & ~31),
        )

    cdef int _reserve(self) except -1:
        """Allocate what all rows need."""
        cdef int64_t i, total = 0, most = 0, expert_row = 0
        cdef int64_t sizes[13]
        cdef int64_t num = self.max_rows * self.top_k
        cdef int part
        cdef float *base
        cdef float **parts[13]
        cdef Layer *layer
        parts[0], parts[1], parts[2] = &self.queries, &self.keys, &self.values
        parts[3], parts[4], parts[5] = &self.mixed, &self.wide, &self.second
        parts[6], parts[7], parts[8] = &self.added, &self.logits, &self.scratch
        parts[9], parts[10], parts[11] = &self.weights, &self.latents, &self.gates
        parts[12] = &self.beside
        memset(sizes, 0, sizeof(sizes))
        for i in range(self.num_layers):
            layer = &self.layers[i]
            sizes[0] = max(sizes[0], layer.query.matrix.rows)
            sizes[1] = max(sizes[1], layer.key.matrix.rows)
            sizes[2] = max(sizes[2], layer.value.matrix.rows)
            if not layer.value.is_there:
                sizes[2] = max(sizes[2], layer.key.matrix.rows)
            if layer.is_beside:
                sizes[12] = self.hidden_size
            sizes[3] = max(sizes[3], layer.out.matrix.columns)
            sizes[4] = max(sizes[4], layer.up.matrix.rows, layer.low.matrix.rows)
            sizes[7] = max(sizes[7], layer.choice.num_experts)
            most = max(most, self._room(&layer.query), self._room(&layer.out))
            most = max(most, self._room(&layer.up), self._room(&layer.down))
            most = max(most, self._room(&layer.router))
            most = max(most, self._room(&layer.latent_down), self._room(&layer.latent_up))
            if layer.is_gated:
                sizes[11] = max(sizes[11], layer.out.matrix.columns)
            if layer.is_linear and not layer.is_scan and not layer.is_short:
                sizes[11] = max(sizes[11], layer.out.matrix.columns)
                # Decays have no matrix of their own if it is the shares', too.
                sizes[1] = max(sizes[1], layer.num_heads)
                sizes[10] = max(sizes[10], layer.channels)
            if layer.is_latent:
                sizes[10] = max(sizes[10], layer.num_heads * (layer.held + layer.value_held))
            if layer.has_experts:
                most = max(most, mc_input_row_bytes(
                    MC_X_PLANES, (layer.experts.up[0].first.columns + 31) & ~31
                ))
                for part in range(layer.experts.num_ups):
                    most = max(most, 4 * mc_input_columns(&layer.experts.up[part].first))
                expert_row = max(
                    expert_row,
                    4 * ((layer.experts.down.first.columns + 63) & ~63),
                    mc_input_row_bytes(
                        MC_X_PLANES, (layer.experts.down.first.columns + 31) & ~31
                    ),
                )
        most = max(most, self._room(&self.bound.head))
        # Activations come in multiples of 16.
        sizes[4] = (sizes[4] + 15) & ~15
        sizes[5] = sizes[4]
        sizes[6] = max(self.hidden_size, self.expert_size)
        sizes[8] = sizes[7]
        sizes[9] = self.top_k
        for i in range(13):
            sizes[i] = (sizes[i] + 15) & ~15
            total += sizes[i] * self.max_rows
        self.converted_bytes = (most + 63) & ~63
        expert_row = (expert_row + 63) & ~63
        self._reserve_pairs(num)
        shape = self.max_rows, self.hidden_size
        self.hidden, self.normed = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.given = self.normed
        if any([one.latents for one in self.recipe.layers]):
            self.given = np.zeros((self.max_rows, self.expert_size), np.float32)
        self.ids = np.zeros((self.max_rows, self.top_k), np.int32)
        self.rows = np.zeros((num, self.expert_size), np.float32)
        self._work = np.zeros(
            total * 4 + 2 * self.max_rows * self.converted_bytes + num * expert_row + 64, np.uint8
        )
        base = <float *>((<uintptr_t>cnp.PyArray_DATA(self._work) + 63) & ~<uintptr_t>63)
        for i in range(13):
            parts[i][0] = base
            base += sizes[i] * self.max_rows
        self.converted = <uint8_t *>base
        self.expert_hidden = self.converted + 2 * self.max_rows * self.converted_bytes
        return 0

    cdef int _reserve_pairs(self, int64_t num) except -1:
        cdef int64_t experts = self.cache.num_experts
        self.slots = <int32_t *>malloc(<size_t>num * sizeof(int32_t))
        self.some = <int32_t *>malloc(<size_t>num * sizeof(int32_t))
        self.offsets = <int64_t *>malloc(<size_t>(num + 1) * sizeof(int64_t))
        self.pairs = <int64_t *>malloc(<size_t>num * sizeof(int64_t))
        self.places = <int64_t *>malloc(<size_t>experts * sizeof(int64_t))
        self.inputs = <const uint8_t **>malloc(<size_t>(2 * num) * sizeof(uint8_t *))
        self.hidden_inputs = <const uint8_t **>malloc(<size_t>num * sizeof(uint8_t *))
        self.taken = <const uint8_t **>malloc(<size_t>self.max_rows * sizeof(uint8_t *))
        if (
            self.slots == NULL or self.some == NULL or self.offsets == NULL or self.pairs == NULL
            or self.places == NULL or self.inputs == NULL or self.hidden_inputs == NULL
            or self.taken == NULL
        ):
            raise MemoryError(f"no memory for {num} experts of {self.max_rows} rows")
        return 0

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
        self._begin([pages], lengths, begins.size, counts, begins, cos, sin, sequences)
        self.observe, self.is_spread = observe, is_spread
        self._attention()

    def begin_together(
        self, list caches not None, cnp.ndarray lengths not None, cnp.ndarray cos not None,
        cnp.ndarray sin not None, observe=None, *, cnp.ndarray counts=None,
        cnp.ndarray sequences=None, bint is_spread=False
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
        observe, sequences, is_spread
            As `begin`'s.

        Raises
        ------
        ConfigError
            If these do not fit, or two sequences have one cache.
        MemoryError
        """
        cdef cnp.ndarray begins = np.zeros(len(caches), np.int64)
        if counts is None:
            counts = np.ones(len(caches), np.int64)
        self._begin(caches, lengths, 1, counts, begins, cos, sin, sequences)
        self.observe, self.is_spread = observe, is_spread
        self._attention()

    cdef int _begin(
        self, list caches, cnp.ndarray lengths, int64_t batch, cnp.ndarray counts,
        cnp.ndarray begins, cnp.ndarray cos, cnp.ndarray sin, cnp.ndarray sequences
    ) except -1:
        """Check and note a call's rows: `counts` for each of `batch` sequences of each cache."""
        cdef int64_t i, j, num = 0, each = 0, longest = 0, most = 0, fewest
        cdef const int64_t *of_cache
        cdef cnp.ndarray ends
        cdef Layer *layer
        cdef float *scores
        if (
            counts.dtype != np.int64 or counts.size != len(caches)
            or not cnp.PyArray_IS_C_CONTIGUOUS(counts)
        ):
            raise ConfigError(f"{counts.size} {counts.dtype} are no tokens of {len(caches)}")
        of_cache = <const int64_t *>cnp.PyArray_DATA(counts)
        if not 1 <= batch <= self.max_rows or not 1 <= len(caches) <= self.max_rows:
            raise ConfigError(f"{len(caches)} caches, {batch} rows are no call")
        for i in range(len(caches)):
            if not 1 <= of_cache[i] <= self.max_rows:
                raise ConfigError(f"{of_cache[i]} tokens are no call")
            num += of_cache[i] * batch
            each = max(each, of_cache[i])
            if num > self.max_rows:
                raise ConfigError(f"{num} rows are no call of {self.max_rows} at most")
        if any([len(pages) != self.num_layers for pages in caches]):
            raise ConfigError(f"{num} rows and {len(caches[0])} layers' pages are no call")
        if sequences is not None and (
            sequences.dtype != np.int32 or sequences.size != num
            or not cnp.PyArray_IS_C_CONTIGUOUS(sequences)
        ):
            raise ConfigError(f"{sequences.size} {sequences.dtype} name no {num} rows' sequences")
        if begins.dtype != np.int64 or cos.dtype != np.float32 or sin.dtype != np.float32:
            raise ConfigError("begins are int64, angles float32")
        if not (
            cnp.PyArray_IS_C_CONTIGUOUS(begins) and cnp.PyArray_IS_C_CONTIGUOUS(cos)
            and cnp.PyArray_IS_C_CONTIGUOUS(sin)
        ):
            raise ConfigError("begins and angles must be contiguous")
        if (
            lengths.dtype != np.int64 or lengths.size != len(caches)
            or not cnp.PyArray_IS_C_CONTIGUOUS(lengths)
        ):
            raise ConfigError(f"{lengths.size} {lengths.dtype} are no lengths of {len(caches)}")
        for i in range(len(caches)):
            self._check_cache(
                caches[i], (<const int64_t *>cnp.PyArray_DATA(lengths))[i], batch, of_cache[i],
                <const int64_t *>cnp.PyArray_DATA(begins) + i * batch
            )
            longest = max(longest, (<const int64_t *>cnp.PyArray_DATA(lengths))[i])
            for j in range(i):
                _check_apart(caches[j], caches[i])
        if self.bound.num_angles and (
            cos.size != num * self.bound.num_angles or sin.size != cos.size
        ):
            raise ConfigError(f"{cos.size} angles are not {num} x {self.bound.num_angles}")
        for i in range(self.num_layers):
            layer = &self.layers[i]
            if layer.is_linear or not layer.has_attention:
                continue
            j = layer.num_kv_heads * _parts(layer)
            most = max(most, 4 * j * min(num + MC_MOST_TILE - 1, _rows_at_once(_parts(layer))))
        if most * (longest + each) > self.num_scores or self.scores == NULL:
            # Half as many again: a conversation goes on.
            i = most * (longest + each) * 3 // 2 + 1024
            scores = <float *>malloc(<size_t>i * sizeof(float))
            if scores == NULL:
                raise MemoryError(f"no memory for attention to {longest + each} positions")
            free(self.scores)
            self.scores, self.num_scores = scores, i
        ends, fewest = np.cumsum(np.repeat(counts, batch)), counts.min()
        for i in range(self.num_layers):
            self._note_rows(
                i, caches, <const int64_t *>cnp.PyArray_DATA(lengths), batch, of_cache,
                <const int64_t *>cnp.PyArray_DATA(begins)
            )
        self.ends, self.fewest = ends, fewest
        self.caches, self.kept, self.sequences = caches, (cos, sin), sequences
        self.cos = <const float *>cnp.PyArray_DATA(cos)
        self.sin = <const float *>cnp.PyArray_DATA(sin)
        self.num_rows, self.each, self.longest = num, each, longest
        self.num_stretches = len(caches) * batch
        self.num_resident, self.at = 0, 0
        if self.bound.embedding_scale != 1:
            _scale(
                <float *>cnp.PyArray_DATA(self.hidden), num * self.hidden_size,
                self.bound.embedding_scale
            )
        return 0

    cdef int _check_cache(
        self, list pages, int64_t length, int64_t batch, int64_t each, const int64_t *begins
    ) except -1:
        cdef int64_t i
        cdef KeyValues page
        cdef Layer *layer
        if length < 0:
            raise ConfigError(f"a cache of {length} positions")
        for i in range(batch):
            if not 0 <= begins[i] <= length:
                raise ConfigError(f"a sequence that begins at {begins[i]} of {length}")
        for i in range(self.num_layers):
            layer = &self.layers[i]
            if not layer.has_attention:
                continue
            if layer.is_linear:
                _check_states(layer, pages[i], batch, each)
                continue
            page = pages[i]
            if (
                page.batch != batch or page.heads != layer.num_kv_heads
                or page.width != layer.held or page.value_width != layer.value_held
                or page.dropped < 0 or page.capacity < length - page.dropped + each
                or page.dropped > (max(0, length - layer.window + 1) if layer.window else 0)
            ):
                raise ConfigError(
                    f"keys and values [{page.batch}, {page.heads}, {page.capacity}, {page.width}] "
                    f"have no room for {each} tokens after {length} of {batch} sequences"
                )
        return 0

    cdef int _note_rows(
        self, int64_t at, list caches, const int64_t *lengths, int64_t batch,
        const int64_t *counts, const int64_t *begins
    ) except -1:
        """Note what a layer's rows see."""
        cdef Layer *layer = &self.layers[at]
        cdef mc_held *held = self.held + at * self.max_rows
        cdef int64_t i, sequence, token, size
        cdef KeyValues page
        if not layer.has_attention:
            return 0
        if layer.is_linear:
            self._note_stretches(at, caches, batch, counts)
            return 0
        for i in range(len(caches)):
            page = (<list>caches[i])[at]
            self.types[at] = page.type
            size = 4 if page.type == MC_F32 else 2
            for sequence in range(batch):
                for token in range(counts[i]):
                    held.key_head = page.capacity * layer.held * size
                    held.value_head = page.capacity * layer.value_held * size
                    held.keys = page.keys + sequence * page.heads * held.key_head
                    held.values = page.values + sequence * page.heads * held.value_head
                    held.position = lengths[i] + token
                    held.begin = begins[i * batch + sequence]
                    if layer.is_chunked and layer.window:
                        held.begin += (
                            (held.position - held.begin) // layer.window * layer.window
                        )
                    held.dropped = page.dropped
                    held += 1
        return 0

    cdef int _note_stretches(
        self, int64_t at, list caches, int64_t batch, const int64_t *counts
    ) except -1:
        """Note what a layer of linear attention holds of each sequence."""
        cdef Layer *layer = &self.layers[at]
        cdef mc_stretch *s = self.stretches + at * self.max_rows
        cdef int64_t i, sequence, first = 0, size
        cdef States page
        size = layer.num_heads * layer.width * layer.value_width
        for i in range(len(caches)):
            page = (<list>caches[i])[at]
            for sequence in range(batch):
                s.first, s.num, s.num_saved = first, counts[i], page.num_saved
                s.saved_seen = page.saved_seen + sequence * page.sequence_step
                s.saved_states = page.saved_states + sequence * size
                s.seen = page.seen + sequence * page.sequence_step
                s.next_seen = page.next_seen + sequence * page.sequence_step
                s.row_step, s.channel_step = page.row_step, page.channel_step
                s.seen_type = page.type
                s.states = page.states + sequence * size
                s.next_states = page.next_states + sequence * size
                first += counts[i]
                s += 1
        return 0

    def run(self):
        """Compute on, up to a layer whose experts are not all there, or to the end.

        Returns
        -------
        int
            Number of the runtime's layer: compute the experts of `ids`, from `given` into `rows`,
            then call `resume`. -1 at the end: `logits` returns the result.
        """
        cdef Layer *layer
        while self.at < self.num_layers:
            layer = &self.layers[self.at]
            if self.num_rows > ROWS:
                # A prompt takes seconds.
                PyErr_CheckSignals()
            if layer.has_experts:
                if self.is_spread or not (
                    self._resident(layer) if self.num_rows == 1 else self._resident_rows(layer)
                ):
                    return layer.number
            self.resume()
        return -1

    def take_counts(self):
        """Return what steps whose experts were all resident have computed, and count from 0 again.

        Returns
        -------
        list of (int, int, int, int)
            Of each layer with experts: the runtime's number of it, experts that were computed,
            those of steps of a single token, and nanoseconds that the latter took.
        """
        cdef int64_t i
        found = [
            (self.layers[i].number, self.num_products[i], self.num_single[i], self.busy_ns[i])
            for i in range(self.num_layers) if self.layers[i].has_experts
        ]
        memset(self.num_products, 0, 3 * <size_t>self.num_layers * sizeof(int64_t))
        return found

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
        cdef Layer *layer = NULL
        cdef int64_t i, e, k = self.top_k
        cdef float *sums
        cdef cnp.ndarray out
        for i in range(self.at + 1, self.num_layers):
            if self.layers[i].has_experts and self.layers[i].number == number:
                layer = &self.layers[i]
                break
        if (
            layer == NULL or n < 1 or k > 512 or self.at >= self.num_layers
            or self.num_rows > ROWS
        ):
            return None
        e = layer.choice.num_experts
        out = np.empty(min(n, e), np.int32)
        cdef float[::1] scores = np.zeros(e, np.float32)
        sums = &scores[0]
        with nogil:
            self._foresee(layer, sums, min(n, e), <int32_t *>cnp.PyArray_DATA(out))
        return out

    cdef void _foresee(
        self, const Layer *layer, float *sums, int64_t n, int32_t *out
    ) noexcept nogil:
        cdef int64_t i, j, num = self.num_rows, k = self.top_k, e = layer.choice.num_experts
        cdef int32_t ids[ROWS * 512]
        cdef float weights[512]
        cdef float *row
        cdef const float *given = <const float *>cnp.PyArray_DATA(self.normed)
        cdef const float *x = <const float *>cnp.PyArray_DATA(self.hidden)
        cdef int64_t hidden = self.hidden_size
        if layer.is_beside:
            # What has a norm of its own is not what experts are given.
            for i in range(num):
                _norm(&layer.router_norm, x + i * hidden, self.added + i * hidden)
            given = self.added
        self._multiply(&layer.router, given, hidden, num, self.logits, e)
        for i in range(num):
            row = self.logits + i * e
            for j in range(e):
                self.scratch[j] = row[j]
            if num > 1:
                mc_softmax(self.scratch, e)
            for j in range(e):
                sums[j] += self.scratch[j]
            mc_route(&layer.choice, row, self.scratch, ids + i * k, weights)
        if num * k <= n:
            for i in range(num * k):
                if ids[i] >= 0:
                    sums[ids[i]] = INFINITY
        mc_top(sums, e, n, out)

    def resume(self):
        """Take the experts' results, and go on to the next layer's choice."""
        cdef Layer *layer = &self.layers[self.at]
        with nogil:
            self._add_forward(layer)
        self.at += 1
        if self.at < self.num_layers:
            self._attention()

    def abandon(self):
        """Let go of the keys and values of a call that is not gone on with."""
        self.caches, self.kept, self.observe, self.sequences = None, None, None, None
        self.fewest = 0

    def logits_of(self, int64_t num):
        """Return the logits after the last `num` tokens of each sequence.

        Returns
        -------
        ndarray of float32, shape [batch, num, vocabulary]
        """
        cdef int64_t i, batch, rows = self.bound.head.matrix.rows, hidden = self.hidden_size, first
        cdef const int64_t *ends
        cdef const float *source = <const float *>cnp.PyArray_DATA(self.hidden)
        cdef float *normed = <float *>cnp.PyArray_DATA(self.normed)
        cdef cnp.ndarray out
        if not 1 <= num <= self.fewest:
            raise ConfigError(f"logits of {num} of {self.fewest} tokens")
        batch, ends = self.ends.size, <const int64_t *>cnp.PyArray_DATA(self.ends)
        out = np.empty((batch, num, rows), np.float32)
        with nogil:
            for i in range(batch * num):
                first = ends[i // num] - num + i % num
                _norm(&self.bound.norm, source + first * hidden, normed + i * hidden)
            self._multiply(
                &self.bound.head, normed, hidden, batch * num, <float *>cnp.PyArray_DATA(out), rows
            )
        self.abandon()
        if self.bound.logits_scale != 1:
            out /= np.float32(self.bound.logits_scale)
        if self.recipe.cap:
            cap = np.float32(self.recipe.cap)
            np.multiply(np.tanh(np.divide(out, cap, out=out), out=out), cap, out=out)
        return out

    cdef void _multiply(
        self, const Linear *linear, const float *given, int64_t step, int64_t num, float *out,
        int64_t out_step, const Linear *before=NULL
    ) noexcept nogil:
        """Write products of `num` inputs, `step` apart.

        A product `before` had the same inputs: they are not converted again if both take the same.
        """
        cdef mc_product product
        memset(&product, 0, sizeof(product))
        product.level = level_in_use()
        product.matrix = linear.matrix
        product.out.data = <uint8_t *>out
        product.out.row_bytes = out_step * 4
        product.out.type = MC_X_F32
        product.bias = linear.bias
        product.num_inputs = num
        product.input_type = mc_input_type(product.level, MC_X_F32, &linear.matrix)
        if before == NULL or not mc_are_alike(&before.matrix, &linear.matrix):
            self._take(&linear.matrix, product.input_type, given, step, num, self.taken)
        product.inputs = self.taken
        run_product(&product)

    cdef void _take(
        self, const mc_matrix *matrix, int wanted, const float *given, int64_t step, int64_t num,
        const uint8_t **inputs, int part=0
    ) noexcept nogil:
        """Point to rows as a matrix is multiplied by them; there is room for two matrices' rows."""
        cdef int64_t i
        cdef uint8_t *to = self.converted + part * self.max_rows * self.converted_bytes
        if wanted == MC_X_F32 and mc_input_columns(matrix) == matrix.columns:
            for i in range(num):
                inputs[i] = <const uint8_t *>(given + i * step)
            return
        for i in range(num):
            inputs[i] = to + i * self.converted_bytes
        convert_rows(given, step, num, wanted, matrix, to, self.converted_bytes)

    cdef void _norms(
        self, const Norm *norm, float *rows, int64_t num, int64_t width
    ) noexcept nogil:
        """Norm rows in place, in parts of the norm's own width."""
        cdef int64_t i
        if norm.weight == NULL:
            return
        for i in range(num * width // norm.width):
            _norm(norm, rows + i * norm.width, rows + i * norm.width)

    cdef int _attention(self) except -1:
        """Add a layer's attention to `hidden`, norm it, and have its router choose."""
        cdef Layer *layer = &self.layers[self.at]
        cdef mc_heads heads
        cdef int64_t size = 4 if self.types[self.at] == MC_F32 else 2
        memset(&heads, 0, sizeof(heads))
        if layer.is_linear or not layer.has_attention:
            with nogil:
                if layer.has_attention:
                    self._attend(layer, NULL)
                self._choose(layer)
            return 0
        heads.level, heads.held = level_in_use(), self.held + self.at * self.max_rows
        heads.first.key_step, heads.first.value_step = layer.held * size, layer.value_held * size
        heads.first.width, heads.first.value_width = layer.held, layer.value_held
        heads.first.type, heads.first.scale = self.types[self.at], layer.scale
        heads.num_heads, heads.num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads.parts, heads.window = _parts(layer), layer.window
        # Tokens of one text share keys; single tokens of several texts do not.
        heads.tile = MC_MOST_TILE if self.each > 1 else 1
        heads.sinks, heads.scores = layer.sinks, self.scores
        heads.most, heads.out = self.longest + self.each, self.mixed
        with nogil:
            self._attend(layer, &heads)
            self._choose(layer)
        return 0

    cdef void _attend(self, const Layer *layer, mc_heads *heads) noexcept nogil:
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i
        cdef float *x = <float *>cnp.PyArray_DATA(self.hidden)
        cdef float *normed = <float *>cnp.PyArray_DATA(self.normed)
        for i in range(num):
            _norm(&layer.attention_norm, x + i * hidden, normed + i * hidden)
        if layer.is_latent:
            self._latents(layer, heads)
        elif layer.is_short:
            self._short(layer)
        elif layer.is_scan:
            self._space(layer)
        elif layer.is_linear:
            self._linear(layer)
        else:
            self._grouped(layer, heads)
        self._multiply(
            &layer.out, self.mixed, layer.num_heads * layer.value_width, num, self.added, hidden
        )
        self._norms(&layer.attention_out, self.added, num, hidden)
        mc_add(x, self.added, num * hidden, layer.residual)

    cdef void _grouped(self, const Layer *layer, mc_heads *heads) noexcept nogil:
        """Write what grouped queries make of their positions to `mixed`."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i, j
        cdef int64_t queries = layer.num_heads * layer.width
        cdef int64_t wide = layer.num_kv_heads * layer.width
        cdef int64_t value_wide = layer.num_kv_heads * layer.value_width
        cdef const float *normed = <const float *>cnp.PyArray_DATA(self.normed)
        self._multiply(
            &layer.query, normed, hidden, num, self.queries, layer.query.matrix.rows
        )
        if layer.is_gated:
            self._take_gates(layer)
        self._multiply(&layer.key, normed, hidden, num, self.keys, wide, &layer.query)
        if layer.value.is_there:
            self._multiply(&layer.value, normed, hidden, num, self.values, value_wide, &layer.key)
        else:
            memcpy(self.values, self.keys, <size_t>(num * value_wide) * sizeof(float))
        self._norms(&layer.value_norm, self.values, num, value_wide)
        if not layer.has_late_norms:
            self._norms(&layer.query_norm, self.queries, num, queries)
            self._norms(&layer.key_norm, self.keys, num, wide)
        if layer.clip > 0:
            _clip(self.queries, num * queries, layer.clip)
            _clip(self.keys, num * wide, layer.clip)
            _clip(self.values, num * value_wide, layer.clip)
        for i in range(num):
            for j in range(layer.num_heads):
                self._turn(layer, i, self.queries + i * queries + j * layer.width)
            for j in range(layer.num_kv_heads):
                self._turn(layer, i, self.keys + i * wide + j * layer.width)
        if layer.has_late_norms:
            self._norms(&layer.query_norm, self.queries, num, queries)
            self._norms(&layer.key_norm, self.keys, num, wide)
        if layer.floor > 0:
            for i in range(num):
                _scale_query(layer, heads.held[i].position, self.queries + i * queries, queries)
        for i in range(num):
            for j in range(layer.num_kv_heads):
                self._hold(
                    heads, i, j, self.keys + i * wide + j * layer.width,
                    self.values + i * value_wide + j * layer.value_width
                )
        heads.queries = self.queries
        self._run_heads(mc_attend_item, heads)
        if layer.is_gated:
            heads.level.gate(self.mixed, self.gates, (num * queries + 15) & ~15)

    cdef void _take_gates(self, const Layer *layer) noexcept nogil:
        """Part queries and gates, which lie one behind the other, head by head."""
        cdef int64_t i, width = layer.width
        cdef const float *both = self.queries
        for i in range(self.num_rows * layer.num_heads):
            memcpy(self.gates + i * width, both + width, <size_t>width * sizeof(float))
            memmove(self.queries + i * width, both, <size_t>width * sizeof(float))
            both += 2 * width

    cdef void _linear(self, const Layer *layer) noexcept nogil:
        """Write what linear attention makes of the rows to `mixed`."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, each = layer.num_heads
        cdef int64_t values = each * layer.value_width
        cdef const float *normed = <const float *>cnp.PyArray_DATA(self.normed)
        cdef mc_linear job = self._convolution(layer)
        self._multiply(
            &layer.query, normed, hidden, num, self.queries, layer.query.matrix.rows
        )
        if layer.gates.is_there:
            self._multiply(&layer.gates, normed, hidden, num, self.gates, values, &layer.query)
        else:
            self._part_mixed(layer)
            job.mixed = self.latents
        job.mixed_step = layer.channels
        self._multiply(
            &layer.value, normed, hidden, num, self.values, layer.value.matrix.rows
        )
        if layer.key.is_there:
            self._multiply(&layer.key, normed, hidden, num, self.keys, each, &layer.value)
        else:
            self._part_shares(layer)
        job.keys_at, job.values_at = layer.num_keys * layer.width, layer.channels - values
        job.norm, job.norm_type = layer.query_norm.weight, layer.query_norm.type
        job.epsilon = layer.query_norm.epsilon
        job.gates, job.gate_step = self.gates, values
        job.decays, job.shares, job.share_step = self.keys, self.values, each
        self._convolve(&job)
        # A state is read twice for a row, and written.
        run_items(
            mc_delta_item, &job, self.num_stretches * layer.num_keys,
            3 * 4 * num * values * layer.width
        )

    cdef mc_linear _convolution(self, const Layer *layer) noexcept nogil:
        """Return what all layers with a convolution say in the same way."""
        cdef mc_linear job
        memset(&job, 0, sizeof(job))
        job.level, job.stretches = level_in_use(), self.stretches + self.at * self.max_rows
        job.num_keys, job.num_heads = layer.num_keys, layer.num_heads
        job.width, job.value_width = layer.width, layer.value_width
        job.is_tiled, job.is_scan = layer.is_tiled, layer.is_scan
        job.kernel, job.channels = layer.kernel, layer.channels
        job.conv, job.conv_bias = layer.conv, layer.conv_bias
        job.has_activation = not layer.is_short
        job.rates, job.steps, job.skips = layer.rates, layer.steps, layer.skips
        job.mixed, job.out = self.queries, self.mixed
        return job

    cdef void _convolve(self, mc_linear *job) noexcept nogil:
        run_items(
            mc_convolve_item, job, self.num_stretches * mc_convolve_items(job),
            4 * self.num_rows * job.channels * job.kernel
        )

    cdef void _space(self, const Layer *layer) noexcept nogil:
        """Write what a state space makes of the rows to `mixed`."""
        cdef int64_t num = self.num_rows, values = layer.num_heads * layer.value_width, i, j
        cdef int64_t all = layer.query.matrix.rows, width = layer.query_norm.width, at
        cdef int64_t size = 4 if layer.query_norm.type == MC_F32 else 2
        cdef mc_linear job = self._convolution(layer)
        cdef Norm norm = layer.query_norm
        self._multiply(
            &layer.query, <const float *>cnp.PyArray_DATA(self.normed), self.hidden_size, num,
            self.queries, all
        )
        job.gates, job.mixed = self.queries, self.queries + values
        job.shares = self.queries + values + layer.channels
        job.gate_step, job.mixed_step, job.share_step = all, all, all
        job.keys_at = values
        job.queries_at = values + layer.num_keys * layer.width
        self._convolve(&job)
        run_items(
            mc_scan_item, &job, self.num_stretches * layer.num_heads,
            2 * 4 * num * values * layer.width
        )
        for j in range(layer.num_norms):
            norm.weight = layer.query_norm.weight + j * width * size
            for i in range(num):
                at = i * values + j * width
                _norm(&norm, self.mixed + at, self.mixed + at)

    cdef void _short(self, const Layer *layer) noexcept nogil:
        """Write what a convolution between two gates makes of the rows to `mixed`."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i
        cdef float *x = self.queries + 2 * hidden
        cdef mc_linear job = self._convolution(layer)
        self._multiply(
            &layer.query, <const float *>cnp.PyArray_DATA(self.normed), hidden, num,
            self.queries, 3 * hidden
        )
        mc_multiply_rows(x, 3 * hidden, self.queries, 3 * hidden, num, hidden)
        job.mixed, job.mixed_step = x, 3 * hidden
        self._convolve(&job)
        for i in range(num):
            memcpy(
                self.mixed + i * hidden, x + i * 3 * hidden, <size_t>hidden * sizeof(float)
            )
        mc_multiply_rows(self.mixed, hidden, self.queries + hidden, 3 * hidden, num, hidden)

    cdef void _latents(self, const Layer *layer, mc_heads *heads) noexcept nogil:
        """Write what queries make of their positions' latents to `mixed`."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i, j
        cdef int64_t rank = layer.held, more = layer.value_held, head = layer.width + more
        cdef int64_t queries = layer.num_heads * head, low
        cdef const Linear *before = NULL
        cdef const float *normed = <const float *>cnp.PyArray_DATA(self.normed)
        cdef float *row
        if layer.low.is_there:
            low = layer.low.matrix.rows
            self._multiply(&layer.low, normed, hidden, num, self.wide, low)
            for i in range(num):
                _norm(&layer.low_norm, self.wide + i * low, self.wide + i * low)
            self._multiply(&layer.query, self.wide, low, num, self.queries, queries)
        else:
            self._multiply(&layer.query, normed, hidden, num, self.queries, queries)
            before = &layer.query
        self._multiply(&layer.key, normed, hidden, num, self.keys, rank + more, before)
        for i in range(num):
            row = self.keys + i * (rank + more)
            _norm(&layer.key_norm, row, row)
            self._turn(layer, i, row + rank)
            self._hold(heads, i, 0, row, row + rank)
            for j in range(layer.num_heads):
                self._turn(layer, i, self.queries + i * queries + j * head + layer.width)
        # Latents are keys and values; what the cache holds as values is the keys' second part.
        heads.first.more_step, heads.first.more_width = heads.first.value_step, more
        heads.first.value_step, heads.first.value_width = heads.first.key_step, rank
        heads.expand, heads.expand_type = layer.expand, layer.expand_type
        heads.content, heads.out_width = layer.width, layer.value_width
        heads.given, heads.queries = self.queries, self.latents
        self._run_heads(mc_latent_item, heads)

    cdef void _part_mixed(self, const Layer *layer) noexcept nogil:
        """Part what lies key by key: queries, keys and values, and the values' gates."""
        cdef int64_t row, key, width = layer.width
        cdef int64_t values = layer.num_heads // layer.num_keys * layer.value_width
        cdef int64_t keys = layer.num_keys * width
        cdef const float *both = self.queries
        cdef float *to = self.latents
        for row in range(self.num_rows):
            for key in range(layer.num_keys):
                memcpy(to + key * width, both, <size_t>width * sizeof(float))
                both += width
                memcpy(to + keys + key * width, both, <size_t>width * sizeof(float))
                both += width
                memcpy(to + 2 * keys + key * values, both, <size_t>values * sizeof(float))
                both += values
                memcpy(
                    self.gates + (row * layer.num_keys + key) * values, both,
                    <size_t>values * sizeof(float)
                )
                both += values
            to += layer.channels

    cdef void _part_shares(self, const Layer *layer) noexcept nogil:
        """Part shares and decays, which lie one behind the other, key by key."""
        cdef int64_t i, num = layer.num_heads // layer.num_keys
        cdef const float *both = self.values
        for i in range(self.num_rows * layer.num_keys):
            memmove(self.values + i * num, both, <size_t>num * sizeof(float))
            memcpy(self.keys + i * num, both + num, <size_t>num * sizeof(float))
            both += 2 * num

    cdef void _turn(self, const Layer *layer, int64_t row, float *head) noexcept nogil:
        cdef int64_t at = row * self.bound.num_angles + layer.first_angle
        mc_turn(head, self.cos + at, self.sin + at, layer.rotary_width, layer.pairs)

    cdef void _hold(
        self, const mc_heads *heads, int64_t row, int64_t head, const float *key,
        const float *value
    ) noexcept nogil:
        """Write a row's key and value behind those that the cache holds."""
        cdef const mc_held *held = &heads.held[row]
        cdef int64_t place = held.position - held.dropped
        mc_store(key, heads.first.width, heads.first.type,
                 held.keys + head * held.key_head + place * heads.first.key_step)
        mc_store(value, heads.first.value_width, heads.first.type,
                 held.values + head * held.value_head + place * heads.first.value_step)

    cdef void _run_heads(self, mc_work work, mc_heads *heads) noexcept nogil:
        cdef int64_t i, seen, items = heads.num_kv_heads * heads.parts, first = 0, num
        cdef int64_t query = heads.num_heads * (heads.first.width + heads.first.more_width)
        cdef int64_t given = heads.num_heads * (heads.content + heads.first.more_width)
        cdef int64_t out = heads.num_heads * (heads.out_width or heads.first.value_width)
        # So many rows at once have scores.
        while first < self.num_rows:
            num, seen = min(_rows_at_once(heads.parts), self.num_rows - first), 0
            heads.num_rows = num
            for i in range(num):
                seen += heads.held[i].position + 1 - heads.held[i].dropped
            # Exponentials and two passes: some four times as long as reading it.
            run_items(
                work, heads, (num + heads.tile - 1) // heads.tile * items,
                4 * items * seen * (heads.first.key_step + heads.first.value_step)
            )
            first += num
            heads.held += num
            heads.queries += num * query
            heads.out += num * out
            if heads.given != NULL:
                heads.given += num * given

    cdef void _choose(self, const Layer *layer) noexcept nogil:
        """Write the norm before the feed-forward, and the router's choice.

        Where a score is on the experts' input, add the feed-forward of all tokens, and scale it.
        """
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i
        cdef int64_t experts = layer.choice.num_experts
        cdef float *x = <float *>cnp.PyArray_DATA(self.hidden)
        cdef float *normed = <float *>cnp.PyArray_DATA(self.normed)
        cdef int32_t *ids = <int32_t *>cnp.PyArray_DATA(self.ids)
        if layer.forward_norm.weight == NULL:
            return
        for i in range(num):
            _norm(&layer.forward_norm, x + i * hidden, normed + i * hidden)
        if not layer.has_experts:
            return
        if layer.is_beside:
            self._forward(layer, self.beside)
            self._norms(&layer.beside_out, self.beside, num, hidden)
            for i in range(num):
                _norm(&layer.router_norm, x + i * hidden, normed + i * hidden)
        self._multiply(&layer.router, normed, hidden, num, self.logits, experts)
        for i in range(num):
            mc_route(&layer.choice, self.logits + i * experts, self.scratch,
                     ids + i * self.top_k, self.weights + i * self.top_k)
        if layer.is_beside:
            for i in range(num):
                _norm(&layer.experts_norm, x + i * hidden, normed + i * hidden)
        if layer.latent_down.is_there:
            self._multiply(
                &layer.latent_down, normed, hidden, num,
                <float *>cnp.PyArray_DATA(self.given), self.expert_size
            )
        if layer.scales_input:
            # First, as it takes the input without the score.
            self._add_shared(layer)
            for i in range(num):
                _scale(normed + i * hidden, hidden, self.weights[i])
                self.weights[i] = 1.0

    cdef const int32_t *_names(self) noexcept:
        """Return which sequence each row is of; NULL if all are of one."""
        if self.sequences is None:
            return NULL
        return <const int32_t *>cnp.PyArray_DATA(self.sequences)

    cdef bint _resident(self, Layer *layer) except -1:
        """Compute a token's experts if they are all in their slots."""
        cdef int32_t slots[512]
        cdef int32_t *ids = <int32_t *>cnp.PyArray_DATA(self.ids)
        cdef int64_t pairs[512]
        cdef int64_t k = self.top_k, began, i
        if k > 512 or not self.cache.lease_resident(
            layer.number, ids, 1, k, self._names(), slots
        ):
            return False
        try:
            if self.observe is not None:
                self.observe(layer.number, self.ids[:1], self.sequences)
            began = now_ns()
            for i in range(k):
                pairs[i] = i
            with nogil:
                self._compute(layer, slots, pairs, k)
        finally:
            self.cache.end_leases(slots, k)
        self.busy_ns[self.at] += now_ns() - began
        self.num_single[self.at] += k
        self.num_products[self.at] += k
        self.num_resident += 1
        return True

    cdef bint _resident_rows(self, Layer *layer) except -1:
        """Compute several tokens' experts if they are all in their slots."""
        cdef int32_t *ids = <int32_t *>cnp.PyArray_DATA(self.ids)
        cdef int64_t num = self.num_rows * self.top_k, found = 0
        if not self.cache.lease_resident(
            layer.number, ids, self.num_rows, self.top_k, self._names(), self.slots
        ):
            return False
        try:
            if self.observe is not None:
                self.observe(layer.number, self.ids[:self.num_rows], self.sequences)
            with nogil:
                found = self._group(ids, layer.choice.num_experts)
                self._compute_rows(layer, self.some, self.pairs, found)
        finally:
            self.cache.end_leases(self.slots, num)
        self.num_products[self.at] += found
        self.num_resident += 1
        return True

    cdef int64_t _group(self, const int32_t *ids, int64_t num_experts) noexcept nogil:
        """Put pairs in the order of their experts; return how many experts there are."""
        cdef int64_t i, place = 0, found = 0, num = self.num_rows * self.top_k
        memset(self.places, 0, <size_t>num_experts * sizeof(int64_t))
        for i in range(num):
            self.places[ids[i]] += 1
        for i in range(num_experts):
            if self.places[i]:
                self.offsets[found] = place
                place += self.places[i]
                self.places[i] = self.offsets[found]
                found += 1
        self.offsets[found] = place
        for i in range(num):
            self.pairs[self.places[ids[i]]] = i
            self.places[ids[i]] += 1
        for i in range(found):
            self.some[i] = self.slots[self.pairs[self.offsets[i]]]
        return found

    cdef void _compute_rows(
        self, const Layer *layer, const int32_t *slots, const int64_t *pairs, int64_t num_experts
    ) noexcept nogil:
        """Write the rows of the pairs of experts; `offsets` says where each one's begin."""
        cdef mc_experts e = layer.experts
        cdef int64_t i, filled, written, num = self.offsets[num_experts]
        cdef int part
        e.level = level_in_use()
        e.slots, e.offsets, e.pairs = slots, self.offsets, pairs
        e.num_experts = num_experts
        e.out.data = <uint8_t *>cnp.PyArray_DATA(self.rows)
        e.out.row_bytes = self.expert_size * 4
        e.out.type = MC_X_F32
        e.hidden_type = mc_input_type(e.level, MC_X_F32, &e.down.first)
        e.hidden.type = MC_X_F32 if e.hidden_type == MC_X_PLANES else e.hidden_type
        for part in range(e.num_ups):
            e.input_types[part] = mc_input_type(e.level, MC_X_F32, &e.up[part].first)
            e.inputs[part] = self.inputs + part * num
            if part and mc_are_alike(&e.up[0].first, &e.up[1].first):
                e.inputs[1] = self.inputs
                break
            self._take(
                &e.up[part].first, e.input_types[part],
                <const float *>cnp.PyArray_DATA(self.given), self.expert_size, self.num_rows,
                self.taken, part
            )
            for i in range(num):
                self.inputs[part * num + i] = self.taken[pairs[i] // self.top_k]
        filled = mc_input_row_bytes(e.hidden.type, mc_input_columns(&e.down.first))
        filled = max(filled, mc_input_row_bytes(e.hidden_type, mc_input_columns(&e.down.first)))
        e.hidden.row_bytes = (filled + 63) & ~63
        written = mc_input_row_bytes(e.hidden.type, e.width)
        e.hidden.data = self.expert_hidden
        for i in range(num):
            self.hidden_inputs[i] = self.expert_hidden + i * e.hidden.row_bytes
            memset(
                <uint8_t *>self.hidden_inputs[i] + written, 0,
                <size_t>(e.hidden.row_bytes - written)
            )
        e.hidden_inputs = self.hidden_inputs
        run_experts(&e)

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
        cdef int32_t some[512]
        cdef int64_t pairs[512]
        cdef int64_t i, place, n = len(chosen), k = self.top_k, began
        cdef Layer *layer
        if self.at >= self.num_layers or self.num_rows != 1 or n > k or k > 512:
            raise ValueError(f"{n} experts are none of a token's that is being computed")
        if slots.dtype != np.int32 or slots.size != k or not cnp.PyArray_IS_C_CONTIGUOUS(slots):
            raise ValueError(f"slots are not {k} contiguous int32")
        layer = &self.layers[self.at]
        if not layer.has_experts:
            raise ValueError(f"layer {layer.number} has no experts")
        for i in range(n):
            place = chosen[i]
            if not 0 <= place < k or (<const int32_t *>cnp.PyArray_DATA(slots))[place] < 0:
                raise ValueError(f"expert {place} of {k} has no slot")
            some[i] = (<const int32_t *>cnp.PyArray_DATA(slots))[place]
            pairs[i] = place
        began = now_ns()
        with nogil:
            self._compute(layer, some, pairs, n)
        return now_ns() - began

    cdef void _compute(
        self, const Layer *layer, const int32_t *slots, const int64_t *pairs, int64_t k
    ) noexcept nogil:
        """Write the rows of k pairs, each of an expert of its own."""
        cdef int64_t i
        for i in range(k + 1):
            self.offsets[i] = i
        self._compute_rows(layer, slots, pairs, k)

    cdef void _add_forward(self, const Layer *layer) noexcept nogil:
        """Add the experts' sum and the feed-forward of all tokens to `hidden`."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows
        cdef float *x = <float *>cnp.PyArray_DATA(self.hidden)
        cdef mc_sum job
        if layer.has_experts:
            job.rows = <const float *>cnp.PyArray_DATA(self.rows)
            job.num_tokens, job.top_k, job.columns = num, self.top_k, self.expert_size
            job.weights.data, job.weights.type = <uint8_t *>self.weights, MC_X_F32
            job.weights.row_bytes = self.top_k * 4
            job.out.data, job.out.type = <uint8_t *>self.added, MC_X_F32
            job.out.row_bytes = self.expert_size * 4
            run_sum(&job)
            if layer.latent_up.is_there:
                # What they were given is not looked at again.
                memcpy(
                    cnp.PyArray_DATA(self.given), self.added,
                    <size_t>(num * self.expert_size) * sizeof(float)
                )
                self._multiply(
                    &layer.latent_up, <const float *>cnp.PyArray_DATA(self.given),
                    self.expert_size, num, self.added, hidden
                )
            if layer.is_beside:
                self._norms(&layer.experts_out, self.added, num, hidden)
                mc_add(self.added, self.beside, num * hidden, 1.0)
                self._norms(&layer.forward_out, self.added, num, hidden)
            mc_add(x, self.added, num * hidden, layer.residual)
        if not layer.scales_input and not layer.is_beside:
            self._add_shared(layer)
        if layer.factor != 1:
            _scale(x, num * hidden, layer.factor)

    cdef void _forward(self, const Layer *layer, float *out) noexcept nogil:
        """Write the feed-forward of all tokens."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows
        cdef int64_t width = layer.up.matrix.rows, whole = (num * width + 15) & ~15
        cdef const float *normed = <const float *>cnp.PyArray_DATA(self.normed)
        if layer.gate.is_there:
            self._multiply(&layer.gate, normed, hidden, num, self.wide, width)
            self._multiply(&layer.up, normed, hidden, num, self.second, width, &layer.gate)
            level_in_use().activate(self.wide, self.second, whole, &layer.activation)
        else:
            self._multiply(&layer.up, normed, hidden, num, self.wide, width)
            level_in_use().activate(self.wide, NULL, whole, &layer.activation)
        self._multiply(&layer.down, self.wide, width, num, out, hidden)

    cdef void _add_shared(self, const Layer *layer) noexcept nogil:
        """Add the feed-forward of all tokens to `hidden`, if there is one."""
        cdef int64_t hidden = self.hidden_size, num = self.num_rows, i
        cdef float *x = <float *>cnp.PyArray_DATA(self.hidden)
        cdef const float *normed = <const float *>cnp.PyArray_DATA(self.normed)
        cdef float weight
        if not layer.up.is_there:
            return
        self._forward(layer, self.added)
        if not layer.has_experts:
            self._norms(&layer.forward_out, self.added, num, hidden)
        for i in range(num):
            weight = 1.0
            if layer.weight.is_there:
                self._multiply(&layer.weight, normed + i * hidden, hidden, 1, &weight, 1)
                weight = _sigmoid(weight)
            mc_add(x + i * hidden, self.added + i * hidden, hidden, weight * layer.residual)


cdef int _check_states(
    const Layer *layer, States page, int64_t batch, int64_t num
) except -1:
    cdef int64_t rows = layer.value_width if layer.is_scan else layer.width
    cdef int64_t columns = layer.width if layer.is_scan else layer.value_width
    if (
        page.batch != batch or page.rows != layer.kernel - 1 or page.heads != layer.num_heads
        or not 0 <= page.num_saved <= (num if page.saved_seen != NULL or page.saved_states != NULL else 0)
        or page.channels != layer.channels
        or page.width != rows or page.value_width != columns
    ):
        raise ConfigError(
            f"states [{page.batch}, {page.heads}, {page.width}, {page.value_width}] behind "
            f"{page.rows} rows of {page.channels} are none of this layer's"
        )
    return 0


cdef bint _is_same(States some, States other) except -1:
    # A convolution alone has no states, and one over a single row sees nothing.
    if some.width:
        return some.next_states == other.next_states
    return some.next_seen == other.next_seen


cdef int _check_apart(list some, list others) except -1:
    cdef KeyValues page, other
    for first, second in zip(some, others, strict=True):
        if first is None:
            continue
        if isinstance(first, States):
            if _is_same(first, second):
                raise ConfigError("two sequences have one cache; each needs its own")
            continue
        page, other = first, second
        if page.keys == other.keys or page.values == other.values:
            raise ConfigError("two sequences have one cache; each needs its own")
        if page.type != other.type:
            raise ConfigError("caches of sequences that decode together are of one type")
    return 0


cdef void _norm(const Norm *norm, const float *x, float *out) noexcept nogil:
    if norm.bias == NULL:
        mc_norm(x, norm.weight, norm.type, norm.width, norm.epsilon, out)
    else:
        mc_layer_norm(x, norm.weight, norm.bias, norm.type, norm.width, norm.epsilon, out)


cdef int64_t _parts(const Layer *layer) noexcept nogil:
    """Return in how many parts the heads that share keys are computed."""
    if not layer.is_latent:
        return (layer.num_heads // layer.num_kv_heads + 3) // 4
    return layer.num_heads // 4 if layer.num_heads % 4 == 0 else layer.num_heads


cdef int64_t _rows_at_once(int64_t parts) noexcept nogil:
    """Return how many rows have scores at once, in whole tiles: the more parts, the fewer."""
    return max(<int64_t>1, ROWS // parts // MC_MOST_TILE) * MC_MOST_TILE


cdef extern from "<math.h>" nogil:
    float expf(float x)
    float floorf(float x)
    float log1pf(float x)
    float INFINITY


cdef float _sigmoid(float x) noexcept nogil:
    return 1.0 / (1.0 + expf(-x))


cdef void _scale(float *values, int64_t num, float factor) noexcept nogil:
    cdef int64_t i
    for i in range(num):
        values[i] *= factor


cdef void _scale_query(
    const Layer *layer, int64_t position, float *query, int64_t num
) noexcept nogil:
    """Multiply a row's queries by the factor of its position."""
    cdef float times = floorf((<float>position + 1.0) / layer.floor)
    _scale(query, num, log1pf(times) * layer.temperature + 1.0)


cdef void _clip(float *values, int64_t num, float bound) noexcept nogil:
    cdef int64_t i
    for i in range(num):
        if values[i] > bound:
            values[i] = bound
        elif values[i] < -bound:
            values[i] = -bound
