"""RouteLog: the router's choices, step by step, in one growing buffer."""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

import numpy as np

from moecache.policies._ids cimport as_ids, as_sequences, id_at

from moecache.errors import ConfigError

cnp.import_array()

cdef enum:
    FIRST_BYTES = 64 * 1024


@cython.final
cdef class RouteLog:
    """Note the expert ids of every step, cheaply enough to do so while serving.

    Append-only. A step costs 12 bytes and 2 bytes per id (4 if there are more than
    32,767 experts), and 4 per row whose sequence is named. Nothing is raised while
    decoding: at `max_bytes`, or when there is no memory, the log is `full`, keeps what it
    has, and counts what it drops.

    All steps count as one stream of tokens: if several threads use a cache at once,
    their steps mix.

    Parameters
    ----------
    num_layers, num_experts : int
        Shape of the model, each at least 1.
    top_k : int, optional
        Experts per token. A single row with a multiple of `top_k` ids, as a lease of flat
        ids has, is then noted as several rows.
    max_bytes : int, default 256 MiB
        Bytes after which nothing more is noted. A trace of the log takes no more either.
    """

    def __cinit__(
        self, int num_layers, int num_experts, *, top_k=None,
        Py_ssize_t max_bytes=256 * 1024 * 1024,
    ):
        cdef int width = 1 if top_k is None else top_k
        if num_layers < 1 or num_experts < 1 or width < 1 or max_bytes < 1:
            raise ConfigError(
                "num_layers, num_experts, top_k and max_bytes must be at least 1, "
                f"got {num_layers}, {num_experts}, {top_k} and {max_bytes}"
            )
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.model_top_k = 0 if top_k is None else width
        self.max_bytes = max_bytes
        self.wide = num_experts > 32767
        self.between = True

    def __dealloc__(self):
        free(self.data)

    def record(self, Py_ssize_t layer, ids, *, bulk=None, sequences=None) -> None:
        """Note a step, as `ExpertCache.acquire` does where it has a log.

        Parameters
        ----------
        layer : int
        ids : ndarray of int32 or int64, shape [..., top_k]
            A row is a token. Ids outside [0, num_experts) are noted as -1.
        bulk : bool, optional
            Whether the step admitted no more than its layer's fair share. By default
            true if `ids` has several rows.
        sequences : array of int, shape [rows], optional
            Which sequence each row is of, see `ExpertCache.acquire`.

        Raises
        ------
        ValueError
            If there is no such layer, or `sequences` does not fit.
        TypeError
            If ids or sequences are not integers.
        """
        cdef cnp.ndarray array = as_ids(ids)
        cdef Py_ssize_t n = cnp.PyArray_SIZE(array)
        cdef int dimensions = cnp.PyArray_NDIM(array)
        cdef Py_ssize_t top_k = cnp.PyArray_DIM(array, dimensions - 1) if dimensions else 1
        cdef Py_ssize_t rows = n // top_k if top_k else 0
        cdef bint shared = rows > 1 if bulk is None else bulk
        if layer < 0 or layer >= self.num_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.num_layers})")
        cdef cnp.ndarray names = None
        if sequences is not None:
            names = as_sequences(sequences, rows)
        with cython.critical_section(self):
            self.append(
                <int>layer, cnp.PyArray_DATA(array), cnp.PyArray_ITEMSIZE(array) == 8,
                rows, top_k, shared,
                NULL if names is None else <int32_t*>cnp.PyArray_DATA(names),
            )

    def begin_sequence(self) -> None:
        """Note that the next steps do not continue the last ones."""
        with cython.critical_section(self):
            self.mark_sequence()

    @property
    def num_bytes(self) -> int:
        """Bytes that the log takes so far."""
        return self.used

    def clear(self) -> None:
        """Forget all steps and give the memory back."""
        with cython.critical_section(self):
            free(self.data)
            self.data = NULL
            self.used = self.capacity = 0
            self.num_steps = self.num_dropped = 0
            self.full = False
            self.between = True

    def trace_parts(self) -> tuple:
        """Return the steps as the arrays of a trace.

        A pass over the layers begins where the layer's number does not increase,
        the number of rows, their sequences or `bulk` change, or a sequence begins. Each of its rows
        is a row of the trace; layers that a pass leaves out are padded with -1, as
        are ids that are out of range or repeated within a row. Steps that other threads
        note meanwhile is not in it.

        If `experts` would take more than `max_bytes` (but at least 64 KiB), steps wider
        than both `top_k` and most steps are left out; if that is not enough, so are the
        last passes.

        Returns
        -------
        experts : ndarray of int16 or int32, shape [num_tokens, num_layers, top_k]
            int32 if there are more than 32,767 experts. If a row has more ids than
            there are experts, the ids that are kept stand side by side.
        phase : ndarray of uint8, shape [num_tokens]
            0 for rows of a sequence that has several beside each other in the pass (prefill),
            1 for others (decode).
        sequence, step : ndarray of int32, shape [num_tokens]
            Which sequence a token belongs to, in the order in which they began, and which pass.
        bulk : ndarray of uint8, shape [num_tokens]
            1 for passes that admitted no more than each layer's fair share.
        num_left_out : int
            Steps that were noted and are not in the arrays.

        Raises
        ------
        MemoryError
            If there is no memory for a copy of the log and the arrays.
        """
        cdef Passes passes
        cdef Py_ssize_t most = max(self.max_bytes, FIRST_BYTES)
        cdef cnp.ndarray experts, phase, sequence, name, step, bulk, seen
        cdef bytes noted
        # Making an array may let another thread run, which appends, clears, or moves the buffer.
        with cython.critical_section(self):
            noted = PyBytes_FromStringAndSize(self.data, self.used)
        passes.begin = PyBytes_AS_STRING(noted)
        passes.end = passes.begin + len(noted)
        passes.widest = passes.most_rows = 0x7FFFFFFF
        self.scan(&passes, NULL)
        if passes.num_rows > most // self.row_bytes(&passes):
            passes.widest = max(passes.usual, self.model_top_k)
            self.scan(&passes, NULL)
            passes.most_rows = most // self.row_bytes(&passes)
            self.scan(&passes, NULL)
        experts = np.full(
            (passes.num_rows, self.num_layers, max(1, passes.top_k)),
            -1,
            np.int32 if self.wide else np.int16,
        )
        phase = np.empty(passes.num_rows, np.uint8)
        sequence = np.empty(passes.num_rows, np.int32)
        name = np.empty(passes.num_rows, np.int32)
        step = np.empty(passes.num_rows, np.int32)
        bulk = np.empty(passes.num_rows, np.uint8)
        seen = np.zeros(self.num_experts, np.uint32)
        passes.phase = <unsigned char*>cnp.PyArray_DATA(phase)
        passes.sequence = <int32_t*>cnp.PyArray_DATA(sequence)
        passes.name = <int32_t*>cnp.PyArray_DATA(name)
        passes.step = <int32_t*>cnp.PyArray_DATA(step)
        passes.bulk = <unsigned char*>cnp.PyArray_DATA(bulk)
        passes.seen = <uint32_t*>cnp.PyArray_DATA(seen)
        self.scan(&passes, <char*>cnp.PyArray_DATA(experts))
        if passes.num_rows and name.max() >= 0:
            sequence = _numbered(sequence, name)
        return experts, phase, sequence, step, bulk, passes.num_left_out

    cdef void append(
        self, int layer, const void* ids, bint wide, Py_ssize_t rows, Py_ssize_t top_k,
        bint bulk, const int32_t* names,
    ) noexcept nogil:
        cdef Py_ssize_t i, n = rows * top_k, name_bytes = 0 if names == NULL else 4 * rows
        cdef int64_t expert
        cdef StepHeader* header
        cdef int16_t* narrow_out
        cdef int32_t* wide_out
        if n == 0:
            return
        # A log made for another model must not be written past its layers later.
        if self.full or n > 0x3FFFFFFF or layer >= self.num_layers:
            self.num_dropped += 1
            return
        header = <StepHeader*>self.reserve(sizeof(StepHeader) + self.id_bytes(n) + name_bytes)
        if header == NULL:
            self.num_dropped += 1
            return
        if names != NULL:
            memcpy(<char*>(header + 1) + self.id_bytes(n), names, name_bytes)
        elif rows == 1 and self.model_top_k and top_k % self.model_top_k == 0:
            rows = top_k // self.model_top_k
            top_k = self.model_top_k
        header.layer = layer
        header.rows = <int32_t>rows
        header.width = 4 * <uint32_t>top_k + 2 * (names != NULL) + bulk
        if self.wide:
            wide_out = <int32_t*>(header + 1)
            for i in range(n):
                expert = id_at(ids, wide, i)
                wide_out[i] = <int32_t>expert if 0 <= expert < self.num_experts else -1
        else:
            narrow_out = <int16_t*>(header + 1)
            for i in range(n):
                expert = id_at(ids, wide, i)
                narrow_out[i] = <int16_t>expert if 0 <= expert < self.num_experts else -1
        self.num_steps += 1
        self.between = False

    cdef Py_ssize_t id_bytes(self, Py_ssize_t n) noexcept nogil:
        # Whole words: the headers stay aligned.
        return n * 4 if self.wide else (n + 1) // 2 * 4

    cdef const int32_t* names_of(self, const StepHeader* header) noexcept nogil:
        if not header.width & 2:
            return NULL
        return <const int32_t*>(
            <const char*>(header + 1) + self.id_bytes(header.rows * (header.width >> 2))
        )

    cdef bint named_alike(
        self, const StepHeader* header, const StepHeader* other
    ) noexcept nogil:
        # For steps of as many rows.
        if (header.width ^ other.width) & 2:
            return False
        return not header.width & 2 or memcmp(
            self.names_of(header), self.names_of(other), header.rows * sizeof(int32_t)
        ) == 0

    cdef char* reserve(self, Py_ssize_t nbytes) noexcept nogil:
        cdef Py_ssize_t capacity
        cdef char* grown
        if self.used + nbytes > self.capacity:
            capacity = max(self.used + nbytes, 2 * self.capacity, FIRST_BYTES)
            capacity = min(capacity, self.max_bytes)
            grown = NULL
            if self.used + nbytes <= capacity:
                grown = <char*>realloc(self.data, capacity)
            if grown == NULL:
                self.full = True
                return NULL
            self.data = grown
            self.capacity = capacity
        grown = self.data + self.used
        self.used += nbytes
        return grown

    cdef void mark_sequence(self) noexcept nogil:
        cdef StepHeader* header
        if self.between or self.full:
            return
        header = <StepHeader*>self.reserve(sizeof(StepHeader))
        if header != NULL:
            header.layer = -1
            header.rows = 0
            header.width = 0
            self.between = True

    cdef Py_ssize_t row_bytes(self, const Passes* passes) noexcept nogil:
        cdef Py_ssize_t width = sizeof(int32_t) if self.wide else sizeof(int16_t)
        # Ids of whole passes of one width take no more bytes than the log.
        return self.num_layers * max(1, passes.top_k) * width

    cdef void scan(self, Passes* passes, char* experts) noexcept nogil:
        # Counts rows, the widest step and the usual one; then, with arrays, writes them.
        cdef const char* here = passes.begin
        cdef const StepHeader* header
        cdef const StepHeader* previous = NULL
        cdef const int32_t* names
        cdef Py_ssize_t first = 0, rows = 0, row, stride = self.num_layers * passes.top_k
        cdef Py_ssize_t width = sizeof(int32_t) if self.wide else sizeof(int16_t)
        cdef Py_ssize_t top_k, votes = 0
        cdef int32_t sequence = 0, step = -1, last = -1
        cdef uint32_t bulk = 0
        cdef bint over = False
        passes.num_left_out = 0
        passes.num_seen = 0
        if experts == NULL:
            passes.top_k = 0
            passes.usual = 0
        while here < passes.end:
            header = <const StepHeader*>here
            top_k = header.width >> 2
            here += sizeof(StepHeader) + self.id_bytes(header.rows * top_k)
            if header.width & 2:
                here += header.rows * sizeof(int32_t)
            if header.layer < 0:
                sequence += 1
                first += rows
                rows = 0
                last = -1
                continue
            if experts == NULL:
                # A majority vote: a width that more than half of the steps have wins.
                if votes == 0:
                    passes.usual = top_k
                votes += 1 if top_k == passes.usual else -1
            if top_k > passes.widest or over:
                passes.num_left_out += 1
                continue
            if (
                header.layer <= last or header.rows != rows or (header.width & 1) != bulk
                or not self.named_alike(header, previous)
            ):
                if first + rows + header.rows > passes.most_rows:
                    over = True
                    passes.num_left_out += 1
                    continue
                first += rows
                rows = header.rows
                bulk = header.width & 1
                step += 1
                names = self.names_of(header)
                if experts != NULL:
                    for row in range(first, first + rows):
                        passes.phase[row] = rows == 1
                        passes.sequence[row] = sequence
                        passes.name[row] = -1
                        passes.step[row] = step
                        passes.bulk[row] = bulk
                    if names != NULL:
                        self.name_rows(names, rows, passes.name + first, passes.phase + first)
            if experts == NULL:
                passes.top_k = max(passes.top_k, min(top_k, self.num_experts))
            else:
                self.copy_step(
                    header,
                    experts + width * (first * stride + header.layer * passes.top_k),
                    stride,
                    passes,
                )
            last = header.layer
            previous = header
        passes.num_rows = first + rows

    cdef void name_rows(
        self, const int32_t* names, Py_ssize_t rows, int32_t* name, unsigned char* phase
    ) noexcept nogil:
        # A row that is its sequence's only one of the step was decoded.
        cdef Py_ssize_t row
        for row in range(rows):
            name[row] = names[row]
            phase[row] = (row == 0 or names[row] != names[row - 1]) and (
                row == rows - 1 or names[row] != names[row + 1]
            )

    cdef void copy_step(
        self, const StepHeader* header, char* out, Py_ssize_t stride, Passes* passes
    ) noexcept nogil:
        cdef const int16_t* narrow = <const int16_t*>(header + 1)
        cdef const int32_t* wide = <const int32_t*>(header + 1)
        cdef int16_t* narrow_out = <int16_t*>out
        cdef int32_t* wide_out = <int32_t*>out
        cdef Py_ssize_t row, place, i = 0, top_k = header.width >> 2
        cdef bint packed = top_k > passes.top_k
        cdef int32_t expert
        for row in range(header.rows):
            place = row * stride
            passes.num_seen += 1
            for _ in range(top_k):
                expert = wide[i] if self.wide else narrow[i]
                i += 1
                if expert >= 0:
                    if passes.seen[expert] == passes.num_seen:
                        expert = -1
                    else:
                        passes.seen[expert] = passes.num_seen
                if expert < 0 and packed:
                    continue
                if self.wide:
                    wide_out[place] = expert
                else:
                    narrow_out[place] = <int16_t>expert
                place += 1


cdef object _numbered(sequence, name):
    """Return numbers for runs without a name and for names, in the order they came."""
    pairs = np.stack((np.where(name < 0, sequence, -1), name))
    _, first, found = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int32)
    order[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return order[found.reshape(-1)]
