"""Context: a call's rows, and what each sees of its sequence's cache."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uintptr_t

from moecache.decoding._bound cimport Layer
from moecache.decoding._held cimport KeyValues, States
from moecache.decoding._linear cimport mc_stretch
from moecache.decoding._steps cimport mc_held
from moecache.decoding._workspace cimport Workspace
from moecache.kernels._jobs cimport MC_F32

import numpy as np

from moecache.errors import ConfigError

cnp.import_array()


@cython.final
cdef class Context:
    """What the rows of a call see: earlier positions, states, angles of their own positions.

    A call that does not begin leaves the one before as it was. What a call was begun with is kept
    alive up to its end or the next one.

    Parameters
    ----------
    workspace : Workspace
        Gets room for the call's scores, and its number of rows.

    Raises
    ------
    MemoryError
    """

    def __cinit__(self, Workspace workspace not None):
        cdef int64_t num = max(1, workspace.bound.num_layers)
        self.workspace, self.bound = workspace, workspace.bound
        self.held = <mc_held *>workspace.own(num * workspace.max_rows * sizeof(mc_held))
        self.stretches = <mc_stretch *>workspace.own(
            num * workspace.max_rows * sizeof(mc_stretch)
        )
        self.types = <int *>workspace.own(num * sizeof(int))
        self.ends = <int64_t *>workspace.own(workspace.max_rows * sizeof(int64_t))

    cdef int begin(
        self, list caches, cnp.ndarray lengths, int64_t batch, cnp.ndarray counts,
        cnp.ndarray begins, cnp.ndarray cos, cnp.ndarray sin, cnp.ndarray sequences
    ) except -1:
        """Check and note a call's rows: `counts` for each of `batch` sequences of each cache."""
        cdef int64_t i, longest = 0, each = 0, fewest = self.workspace.max_rows, num, end = 0
        cdef const int64_t *num_new
        cdef const int64_t *num_there
        cdef const int64_t *first
        num = self._count_rows(caches, batch, counts, sequences)
        if not _is_list(begins, np.int64, len(caches) * batch):
            raise ConfigError(f"{begins.size} {begins.dtype} begin no {len(caches) * batch} texts")
        if cos.dtype != np.float32 or sin.dtype != np.float32:
            raise ConfigError("angles are float32")
        if not (cnp.PyArray_IS_C_CONTIGUOUS(cos) and cnp.PyArray_IS_C_CONTIGUOUS(sin)):
            raise ConfigError("angles must be contiguous")
        if not _is_list(lengths, np.int64, len(caches)):
            raise ConfigError(f"{lengths.size} {lengths.dtype} are no lengths of {len(caches)}")
        num_new = <const int64_t *>cnp.PyArray_DATA(counts)
        num_there = <const int64_t *>cnp.PyArray_DATA(lengths)
        first = <const int64_t *>cnp.PyArray_DATA(begins)
        for i in range(len(caches)):
            self._check_cache(caches[i], num_there[i], batch, num_new[i], first + i * batch)
            longest, each = max(longest, num_there[i]), max(each, num_new[i])
            fewest = min(fewest, num_new[i])
        if len(caches) > 1:
            _check_apart(caches)
        if self.bound.num_angles and (
            cos.size != num * self.bound.num_angles or sin.size != cos.size
        ):
            raise ConfigError(f"{cos.size} angles are not {num} x {self.bound.num_angles}")
        self.workspace.reserve_scores(num, longest + each)
        for i in range(self.bound.num_layers):
            self._note_rows(i, caches, num_there, batch, num_new, first)
        for i in range(len(caches) * batch):
            end += num_new[i // batch]
            self.ends[i] = end
        self.workspace.num_rows, self.num_sequences = num, len(caches) * batch
        self.fewest, self.each, self.longest = fewest, each, longest
        self._caches, self._angles, self.sequences = caches, (cos, sin), sequences
        self.cos = <const float *>cnp.PyArray_DATA(cos)
        self.sin = <const float *>cnp.PyArray_DATA(sin)
        return 0

    cdef void end(self) noexcept:
        """Let go of keys, values and states."""
        self._caches, self._angles, self.sequences, self.fewest = None, None, None, 0

    cdef const int32_t *names(self) noexcept:
        """Return which sequence each row is of; NULL if all are of one."""
        if self.sequences is None:
            return NULL
        return <const int32_t *>cnp.PyArray_DATA(self.sequences)

    cdef int64_t _count_rows(
        self, list caches, int64_t batch, cnp.ndarray counts, cnp.ndarray sequences
    ) except -1:
        cdef int64_t i, num = 0, most = self.workspace.max_rows
        cdef const int64_t *num_new = <const int64_t *>cnp.PyArray_DATA(counts)
        if not _is_list(counts, np.int64, len(caches)):
            raise ConfigError(f"{counts.size} {counts.dtype} are no tokens of {len(caches)}")
        if not 1 <= batch <= most or not 1 <= len(caches) <= most:
            raise ConfigError(f"{len(caches)} caches, {batch} rows are no call")
        for i in range(len(caches)):
            if not 1 <= num_new[i] <= most:
                raise ConfigError(f"{num_new[i]} tokens are no call")
            num += num_new[i] * batch
            if num > most:
                raise ConfigError(f"{num} rows are no call of {most} at most")
        if any([len(pages) != self.bound.num_layers for pages in caches]):
            raise ConfigError(f"{num} rows and {len(caches[0])} layers' pages are no call")
        if sequences is not None and not _is_list(sequences, np.int32, num):
            raise ConfigError(f"{sequences.size} {sequences.dtype} name no {num} rows' sequences")
        return num

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
        for i in range(self.bound.num_layers):
            layer = &self.bound.layers[i]
            if not layer.has_attention:
                continue
            if pages[i] is None:
                raise ConfigError(f"layer {i} has attention, and no page")
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
        cdef Layer *layer = &self.bound.layers[at]
        cdef mc_held *held = self.held + at * self.workspace.max_rows
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
        """Note the states that a layer holds of each sequence."""
        cdef Layer *layer = &self.bound.layers[at]
        cdef mc_stretch *s = self.stretches + at * self.workspace.max_rows
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


cdef bint _is_list(cnp.ndarray array, type, int64_t num) except -1:
    """Return whether these are so many numbers of a type, one behind the other."""
    return array.dtype == type and array.size == num and cnp.PyArray_IS_C_CONTIGUOUS(array)


cdef int _check_states(
    const Layer *layer, States page, int64_t batch, int64_t num
) except -1:
    cdef int64_t rows = layer.value_width if layer.is_scan else layer.width
    cdef int64_t columns = layer.width if layer.is_scan else layer.value_width
    cdef int64_t most = num if page.saved_seen != NULL or page.saved_states != NULL else 0
    if (
        page.batch != batch or page.rows != layer.kernel - 1 or page.heads != layer.num_heads
        or not 0 <= page.num_saved <= most
        or page.channels != layer.channels
        or page.width != rows or page.value_width != columns
    ):
        raise ConfigError(
            f"states [{page.batch}, {page.heads}, {page.width}, {page.value_width}] behind "
            f"{page.rows} rows of {page.channels} are none of this layer's"
        )
    return 0


cdef int _check_apart(list caches) except -1:
    """Look whether each sequence has a cache of its own, of the others' type."""
    cdef KeyValues page
    cdef States states
    cdef set places, types
    for pages in zip(*caches, strict=True):
        places, types = set(), set()
        for held in pages:
            if held is None:
                continue
            if isinstance(held, States):
                states = held
                # A convolution alone has no states.
                places.add(
                    <uintptr_t>states.next_states if states.width else <uintptr_t>states.next_seen
                )
            else:
                page = held
                places.update((<uintptr_t>page.keys, <uintptr_t>page.values))
                types.add(page.type)
        if len(types) > 1:
            raise ConfigError("caches of sequences that decode together are of one type")
        if len(places) < len(caches) * (1 + len(types)) * (pages[0] is not None):
            raise ConfigError("two sequences have one cache; each needs its own")
    return 0
