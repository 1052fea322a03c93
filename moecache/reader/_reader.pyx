# distutils: depends = moecache/reader/_reader.h
# distutils: libraries = pthread
"""Many reads in flight at once, without the GIL: by io_uring, or by threads."""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport (
    EAGAIN, EBUSY, EILSEQ, EINTR, EINVAL, EIO, ENODATA, ENOMEM, EOPNOTSUPP, EPROTO,
)
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

import os

from moecache.kernels._kernels cimport Tiler, tile_matrices
from moecache.reader._pieces cimport (
    SINK, File, Fill, Request, Piece, Range, cut, free_pieces, iovec, place, rest,
)

cnp.import_array()

cdef extern from "_reader.h" nogil:
    int ECANCELED
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct mc_ring:
        int descriptor
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_cond_destroy(pthread_cond_t *condition)
    int pthread_cond_signal(pthread_cond_t *condition)
    int pthread_cond_broadcast(pthread_cond_t *condition)
    int mc_condition_init(pthread_cond_t *condition)
    void mc_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t timeout_ns)
    int64_t mc_clock_ns()
    char *mc_map_buffers(size_t nbytes)
    void mc_unmap_buffers(char *buffers, size_t nbytes)
    int mc_open_direct(int descriptor)
    size_t mc_direct_alignment(int descriptor)
    int64_t mc_preadv(
        int descriptor, const iovec *parts, int num_parts, uint64_t offset, size_t asked)
    int64_t mc_preadv_cached(
        int descriptor, const iovec *parts, int num_parts, uint64_t offset, size_t asked)
    int64_t mc_faulty(int64_t result, size_t asked)
    void mc_inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring)
    bint mc_has_faults()
    int close(int descriptor)
    int mc_ring_open(mc_ring *ring, unsigned num_entries)
    int mc_ring_try(mc_ring *ring)
    void mc_ring_close(mc_ring *ring)
    bint mc_ring_is_full(const mc_ring *ring)
    unsigned mc_ring_waiting(const mc_ring *ring)
    void mc_ring_push(
        mc_ring *ring, int descriptor, const iovec *parts, int num_parts, uint64_t offset,
        void *piece, bint elsewhere)
    void mc_ring_push_nothing(mc_ring *ring)
    int mc_ring_enter(mc_ring *ring, bint wait, int64_t timeout_ns)
    bint mc_ring_has_done(const mc_ring *ring)
    bint mc_ring_pop(mc_ring *ring, void **piece, int64_t *result)

ENGINES = ("io_uring", "threads")
HAS_FAULTS = mc_has_faults()
FAULTS = ("none", "short", "error", "zero", "long")

cdef enum:
    # From this size on the kernel's threads copy what is cached, beside the caller.
    COPIED_ELSEWHERE = 256 * 1024
    MAX_ATTEMPTS = 64
    MAX_IO_ERRORS = 2
    MAX_DEPTH = 256

cdef int64_t TICK_NS = 100_000_000
# Above the size of any file by more than a block.
cdef uint64_t MAX_OFFSET = <uint64_t>1 << 62


@cython.final
cdef class Reader:
    """Read ranges of files into arrays, many at once; several threads may call.

    Ranges that are submitted together and adjoin in a file are one read; long reads are
    cut into pieces. Direct reads take whole blocks of the disk: those that fit
    the target's own alignment go straight into it, the others through staging
    buffers. A thread that waits takes in what the kernel has finished; with io_uring
    there need not be any other thread.

    An expert's matrices may be brought into compute form by the same threads, as soon as all of
    its bytes are there. A thread that serves does so while the caller computes; where there is one,
    it also copies such experts out of the page cache, one after the other: what was just copied is
    in its processor's own cache.

    Parameters
    ----------
    descriptors : sequence of int
        Open files; kept open by the caller until `close`.
    direct : bool, default False
        Read around the page cache, where a file's system can.
    engine : {"io_uring", "threads"}, optional
        By default io_uring where the kernel offers it, else threads.
    depth : int, default 16
        Most reads in flight; in 1 to 256.
    piece_bytes : int, default 256 KiB
        Largest read.
    staging_bytes : int, default 16 MiB
        Memory for what cannot be read straight into its target, at least two
        pieces. Touched only when used.

    Raises
    ------
    ValueError
        If a figure is out of range.
    OSError
        If the engine was asked for and the kernel refuses it.
    MemoryError
        If there is no memory for the staging buffers.
    """

    cdef pthread_mutex_t _mutex
    cdef pthread_cond_t _done
    cdef pthread_cond_t _work
    cdef bint _initialised
    cdef mc_ring _ring
    cdef bint _uses_ring
    cdef int _refusal
    cdef File *_files
    cdef int _num_files
    cdef readonly bint direct
    cdef readonly size_t alignment
    cdef readonly int depth
    cdef readonly size_t piece_bytes
    cdef readonly size_t staging_bytes
    cdef char *_staging
    cdef size_t _buffer_bytes
    cdef char *_sink
    cdef int *_free_buffers
    cdef int _num_free_buffers
    cdef Piece *_pending
    cdef Piece **_pending_end
    cdef Piece **_urgent_end  # what comes behind it waits for everything else
    cdef int _num_pending
    cdef int _in_flight  # begun and not settled
    cdef int _in_kernel
    cdef Piece *_arrived  # read, and to be copied out of staging
    cdef Piece **_arrived_end
    cdef Request *_unfilled  # read, and to be brought into compute form
    cdef Request **_unfilled_end
    cdef int _num_to_fill  # experts with fills that are not done
    cdef int _num_tried  # pending pieces that a thread is to copy out of the page cache
    cdef int _num_fillers  # threads that serve, and fill
    cdef int _num_inside
    cdef bint _reaping  # a thread waits in the kernel, or is about to
    cdef bint _reaper_serves  # it waits for no load
    cdef bint _closed
    cdef bint _drained  # closed, and nothing is in flight
    cdef int _process
    cdef int64_t _epoch
    cdef Request *_finished
    cdef Request **_finished_end
    cdef int64_t _next_token
    cdef dict _held
    cdef int64_t _busy_since
    cdef readonly int64_t busy_ns
    cdef readonly int64_t num_reads
    cdef readonly int64_t num_retries
    cdef readonly int64_t bytes_wanted
    cdef readonly int64_t bytes_read
    cdef readonly int64_t bytes_copied

    def __cinit__(
        self, descriptors, *, bint direct=False, engine=None, int depth=16,
        Py_ssize_t piece_bytes=256 * 1024, Py_ssize_t staging_bytes=16 * 1024 * 1024
    ):
        cdef int i
        self._ring.descriptor = -1
        self._process = os.getpid()
        self._pending_end = &self._pending
        self._urgent_end = &self._pending
        self._finished_end = &self._finished
        self._arrived_end = &self._arrived
        self._unfilled_end = &self._unfilled
        self._held = {}
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
        if pthread_mutex_init(&self._mutex, NULL) or mc_condition_init(&self._done) \
                or mc_condition_init(&self._work):
            raise MemoryError("no memory for a reader's locks")
        self._initialised = True
        self._num_files = len(descriptors)
        self._files = <File *>calloc(self._num_files + 1, sizeof(File))
        if self._files == NULL:
            raise MemoryError("no memory for a reader's files")
        for i in range(self._num_files):
            self._files[i] = File(-1, -1, 1)
        self.alignment = 1
        for i in range(self._num_files):
            self._files[i].cached = descriptors[i]
            if direct:
                self._open_direct(&self._files[i])
        self.direct = self.alignment > 1
        if engine != "threads":
            self._refusal = mc_ring_open(&self._ring, MAX_DEPTH)
            if self._refusal == 0:
                self._refusal = mc_ring_try(&self._ring)
            self._uses_ring = self._refusal == 0
            if engine == "io_uring" and self._refusal:
                raise OSError(self._refusal, f"io_uring: {os.strerror(self._refusal)}")
        self.tune(depth=depth, piece_bytes=piece_bytes, staging_bytes=staging_bytes)

    def __dealloc__(self):
        if not self._initialised:
            return
        if self._process != os.getpid():
            # The ring, the locks and the reads in flight are the parent's.
            return
        with nogil:
            self._close(2_000_000_000)
        if not self._drained:
            # A read that never returns may still write: nothing it uses is given back.
            return
        free(self._files)
        pthread_mutex_destroy(&self._mutex)
        pthread_cond_destroy(&self._done)
        pthread_cond_destroy(&self._work)

    @property
    def engine(self):
        """The way of reading: "io_uring" or "threads"."""
        return "io_uring" if self._uses_ring else "threads"

    @property
    def refusal(self):
        """Why there is no io_uring: an errno, or 0."""
        return self._refusal

    @property
    def num_direct_files(self):
        """Files that are read around the page cache."""
        cdef int i
        return sum([self._files[i].alignment > 1 for i in range(self._num_files)])

    @property
    def num_in_flight(self):
        """Reads that the kernel has, or that wait for their turn."""
        return self._in_flight + self._num_pending

    @property
    def epoch(self):
        """Number of calls of `announce`."""
        return self._epoch

    def tune(self, *, int depth, Py_ssize_t piece_bytes, Py_ssize_t staging_bytes):
        """Change how much is read at once; nothing may be in flight, or be submitted meanwhile.

        Raises
        ------
        ValueError
            If a figure is out of range, something is in flight, or the reader is closed.
        MemoryError
            If there is no memory for the staging buffers; all is as it was.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be in [1, {MAX_DEPTH}], got {depth}")
        if not 4096 <= piece_bytes <= 1 << 30:
            raise ValueError(f"piece_bytes must be in [4 KiB, 1 GiB], got {piece_bytes}")
        if self._closed:
            raise ValueError("the reader is closed")
        if self.num_in_flight:
            raise ValueError(f"{self.num_in_flight} reads are in flight")
        cdef size_t unit = max(<size_t>4096, self.alignment)
        # A piece may begin and end in the middle of a block.
        cdef size_t buffer_bytes = (piece_bytes + 2 * unit - 1) // unit * unit
        cdef int i, num_buffers = <int>min(
            max(<size_t>2, <size_t>max(0, staging_bytes) // buffer_bytes), <size_t>MAX_DEPTH)
        cdef size_t nbytes = <size_t>num_buffers * buffer_bytes
        cdef int *free_buffers = <int *>malloc(num_buffers * sizeof(int))
        cdef char *staging = mc_map_buffers(nbytes + SINK)
        if free_buffers == NULL or staging == NULL:
            free(free_buffers)
            mc_unmap_buffers(staging, nbytes + SINK)
            raise MemoryError(f"no memory for staging buffers of {nbytes} bytes")
        mc_unmap_buffers(self._staging, self.staging_bytes + SINK)
        free(self._free_buffers)
        self._staging, self.staging_bytes = staging, nbytes
        self._sink = staging + nbytes
        self._buffer_bytes = buffer_bytes
        self._free_buffers, self._num_free_buffers = free_buffers, num_buffers
        for i in range(num_buffers):
            free_buffers[i] = num_buffers - 1 - i
        self.depth, self.piece_bytes = depth, piece_bytes

    def submit(self, list loads not None, *, bint deferred=False):
        """Begin to read; returns as soon as the kernel has the first of it.

        Parameters
        ----------
        loads : list of (owner, runs, parts) or (owner, runs, parts, fills)
            Emptied once all is begun, and not before. `owner` is what `take` gives
            back. `runs` are (file number, offset, ((role, start, stop), ...)): the
            file's bytes from `offset` on are those of the roles' parts, one after
            the other. `parts` maps each role to a C-contiguous writable ndarray of
            any dtype, which is kept alive and must not be touched until then. `fills` are
            (tiler, role, start, target): once all is read, the role's part from byte `start` on is
            brought into compute form, in a C-contiguous ndarray that is kept alive, too.
        deferred : bool, default False
            Let everything else go first, also what is submitted later, until `hasten`. What
            the kernel has been given is read all the same.

        Raises
        ------
        ValueError
            If a part is missing, too small, not writable or of objects, or does not fit its
            target; nothing was begun.
        MemoryError
            Nothing was begun.
        """
        cdef Py_ssize_t num_loads = len(loads), num_ranges = 0, i
        if num_loads == 0:
            return
        for load in loads:
            for _, _, spans in load[1]:
                num_ranges += len(spans)
        cdef Range *ranges = <Range *>malloc((num_ranges + 1) * sizeof(Range))
        cdef Request **heads = <Request **>calloc(num_loads + 1, sizeof(Request *))
        cdef Piece *first = NULL
        cdef Piece **end = &first
        cdef Py_ssize_t used = 0, cut_up_to = 0
        cdef bint begun = False
        try:
            if ranges == NULL or heads == NULL:
                raise MemoryError("no memory for reads")
            for i in range(num_loads):
                load = loads[i]
                fills = load[3] if len(load) > 3 else ()
                heads[i] = <Request *>calloc(1, sizeof(Request) + len(fills) * sizeof(Fill))
                if heads[i] == NULL:
                    raise MemoryError("no memory for reads")
                used = self._add_ranges(ranges, used, heads[i], load[1], load[2])
                self._add_fills(heads[i], load[2], fills)
                if i + 1 < num_loads and not (heads[i].num_fills and self._num_fillers):
                    continue
                # Experts that threads fill come one after the other.
                if cut(
                    self._files, self.piece_bytes, self._sink, ranges + cut_up_to,
                    used - cut_up_to, end
                ) < 0:
                    raise MemoryError("no memory for reads")
                cut_up_to = used
                while end[0] != NULL:
                    end[0].is_tried = heads[i].num_fills and self._is_tried(end[0])
                    end = &end[0].next
            for i in range(num_loads):
                self._next_token += 1
                heads[i].token = self._next_token
                self._held[heads[i].token] = (loads[i][0], loads[i][1:])
            with nogil:
                pthread_mutex_lock(&self._mutex)
                if not self._closed:
                    begun = True
                    self._begin(heads, num_loads, first, deferred)
                pthread_mutex_unlock(&self._mutex)
            if not begun:
                raise ValueError("the reader is closed")
            loads.clear()
        finally:
            if not begun:
                free_pieces(&first)
            if not begun and heads != NULL:
                for i in range(num_loads):
                    if heads[i] != NULL:
                        self._held.pop(heads[i].token, None)
                    free(heads[i])
            free(ranges)
            free(heads)

    def hasten(self, owner):
        """Let the deferred reads of a load wait no longer: they go behind the urgent ones.

        Parameters
        ----------
        owner : object
            Owner of the load, or the owner's first item if it is a tuple.
        """
        cdef int64_t token = self._token_of(owner)
        if token >= 0:
            with nogil:
                pthread_mutex_lock(&self._mutex)
                self._hasten(token)
                pthread_mutex_unlock(&self._mutex)

    def cancel(self, owner):
        """Drop the deferred reads of a load that have not begun; it ends with ECANCELED then.

        Parameters
        ----------
        owner : object
            Owner of the load, or the owner's first item if it is a tuple. Reads that are not
            deferred, have begun, or are shared with another load go on as they are.
        """
        cdef int64_t token = self._token_of(owner)
        if token >= 0:
            with nogil:
                pthread_mutex_lock(&self._mutex)
                self._drop_deferred(token)
                pthread_mutex_unlock(&self._mutex)

    def wait(self, int64_t seen):
        """Block until a load is done, `epoch` is not `seen` any more, or a tenth of a second.

        Takes part in the reading meanwhile. A signal's handler runs, and may raise.

        Returns
        -------
        bool
            Whether a load is done.
        """
        cdef bint found
        PyErr_CheckSignals()
        with nogil:
            pthread_mutex_lock(&self._mutex)
            self._num_inside += 1
            self._work_until(seen, mc_clock_ns() + TICK_NS)
            self._num_inside -= 1
            found = self._finished != NULL
            pthread_mutex_unlock(&self._mutex)
        PyErr_CheckSignals()
        return found

    def poll(self):
        """Take in what the kernel has finished, without waiting; return whether a load is done.

        Staged bytes are copied, and reads that found no room in the queue, or no
        buffer, are begun.
        """
        cdef bint found, ready
        # With the GIL: the thread that has the mutex needs no GIL, and gives it back at once.
        pthread_mutex_lock(&self._mutex)
        found = self._finished != NULL
        ready = not self._closed and (
            self._arrived != NULL or self._has_to_fill()
            or (self._uses_ring and mc_ring_has_done(&self._ring)))
        pthread_mutex_unlock(&self._mutex)
        if not ready:
            return found
        with nogil:
            pthread_mutex_lock(&self._mutex)
            if not self._closed:
                self._num_inside += 1
                # A settled read gives its buffer back, and the next one can begin: if no thread
                # waits, a later call would find the kernel idle.
                while self._take_in() or self._arrived != NULL or self._has_to_fill():
                    if self._arrived != NULL:
                        self._settle(self._next_arrived())
                    elif self._has_to_fill():
                        self._fill()
                self._num_inside -= 1
            found = self._finished != NULL
            pthread_mutex_unlock(&self._mutex)
        return found

    def take(self, list found not None):
        """Append (owner, error) of a load that is done to `found`, if there is one.

        `error` is None, or (errno, file number, offset): ENODATA for a file that
        ends too early, EILSEQ if all was read but a scale is wrong, as `Tiler.tile` says. A list
        rather than a return value: an interrupt cannot come between taking it and keeping it.
        """
        cdef Request *load
        pthread_mutex_lock(&self._mutex)
        load = self._finished
        if load != NULL:
            self._finished = load.next
            if self._finished == NULL:
                self._finished_end = &self._finished
        pthread_mutex_unlock(&self._mutex)
        if load == NULL:
            return
        held = self._held.pop(load.token)
        error = (load.error, load.file, load.offset) if load.error else None
        free(load)
        found.append((held[0], error))

    def announce(self):
        """Make every `wait` return: something happened that others wait for."""
        with nogil:
            pthread_mutex_lock(&self._mutex)
            self._epoch += 1
            pthread_cond_broadcast(&self._done)
            if (
                self._reaping and not self._reaper_serves and not self._closed
                and not mc_ring_is_full(&self._ring)
            ):
                # One of them waits in the kernel.
                mc_ring_push_nothing(&self._ring)
                self._hand_over()
            pthread_mutex_unlock(&self._mutex)

    def serve(self, *, bint fills=False):
        """Read until `close`, in a thread that takes part without waiting for a load.

        With io_uring it sleeps unless there is more to read than twice the queue takes (a long
        prompt): the hop to it costs more than it gains, measured, also where reads are copied.

        Parameters
        ----------
        fills : bool, default False
            Bring experts into compute form, and copy these out of the page cache.
        """
        with nogil:
            pthread_mutex_lock(&self._mutex)
            self._num_inside += 1
            self._num_fillers += fills
            while not self._closed:
                if self._arrived != NULL:
                    self._settle(self._next_arrived())
                elif not self._needs_help():
                    mc_wait(&self._work, &self._mutex, TICK_NS)
                else:
                    self._step(mc_clock_ns() + TICK_NS, True)
            self._num_fillers -= fills
            self._num_inside -= 1
            pthread_mutex_unlock(&self._mutex)

    def close(self, double timeout_s=2.0):
        """Drop what was not begun and wait for what is in flight; a second call does nothing.

        Returns
        -------
        bool
            False if a read did not come back in time: its memory is never given back.
        """
        if self._process != os.getpid():
            return True
        with nogil:
            self._close(<int64_t>(timeout_s * 1e9))
        _stuck[:] = [held for held in _stuck if held is not self._held]
        if self._drained:
            self._held = {}
        else:
            _stuck.append(self._held)
        return self._drained

    # Files and ranges, with the GIL.

    cdef int64_t _token_of(self, owner) except -2:
        for number, (held, _) in self._held.items():
            if held is owner or (type(held) is tuple and held and held[0] is owner):
                return number
        return -1

    cdef _open_direct(self, File *file):
        cdef int descriptor = mc_open_direct(file.cached)
        cdef size_t alignment
        if descriptor < 0:
            return
        alignment = mc_direct_alignment(descriptor)
        if alignment == 0:
            os.close(descriptor)
            return
        file.direct, file.alignment = descriptor, alignment
        self.alignment = max(self.alignment, alignment)

    cdef Py_ssize_t _add_ranges(
        self, Range *ranges, Py_ssize_t used, Request *load, runs, parts
    ) except -1:
        cdef cnp.ndarray array
        cdef uint64_t offset
        cdef Py_ssize_t start, stop
        cdef int file
        for number, where, spans in runs:
            file, offset = number, where
            if not 0 <= file < self._num_files:
                raise ValueError(f"file {file} is not in [0, {self._num_files})")
            for role, first, last in spans:
                start, stop = first, last
                array = parts.get(role)
                if array is None:
                    raise ValueError(f"there is no array for role {role!r}")
                if array.dtype.hasobject:
                    raise ValueError(
                        f"the array for role {role!r} holds references to objects ({array.dtype}), "
                        "which bytes of a file are not")
                if not (cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_ISWRITEABLE(array)):
                    raise ValueError(
                        f"the array for role {role!r} must be contiguous and writable")
                if not 0 <= start <= stop <= cnp.PyArray_NBYTES(array):
                    raise ValueError(
                        f"bytes {start} to {stop} of role {role!r} are not in its array of "
                        f"{cnp.PyArray_NBYTES(array)} bytes")
                if stop == start:
                    continue
                if offset > MAX_OFFSET - (stop - start):
                    raise ValueError(f"byte {offset} is in no file")
                ranges[used] = Range(
                    file, offset, stop - start, <char *>cnp.PyArray_DATA(array) + start, load)
                used += 1
                offset += stop - start
        return used

    cdef int _add_fills(self, Request *load, parts, fills) except -1:
        cdef Tiler tiler
        cdef int64_t begin
        cdef cnp.ndarray part, target
        cdef Fill *fill
        load.fills = <Fill *>(load + 1)
        for making, role, start, form in fills:
            tiler, begin, target, part = making, start, form, parts.get(role)
            if part is None:
                raise ValueError(f"there is no array for role {role!r}")
            fill = &load.fills[load.num_fills]
            fill.num = tiler.check(part, begin, target)
            fill.tiling = &tiler.tiling
            fill.raw = <const uint8_t *>cnp.PyArray_DATA(part) + begin
            fill.form = <uint8_t *>cnp.PyArray_DATA(target)
            load.num_fills += 1
            load.num_to_fill += fill.num
        return 0

    # The queue. Everything below runs under the mutex and without the GIL.

    cdef bint _is_tried(self, const Piece *piece) noexcept nogil:
        """Whether a thread that fills is to copy a piece, if the page cache has it."""
        return (
            self._num_fillers > 0 and self._uses_ring and piece.num_staged == 0
            and piece.descriptor == self._files[piece.file].cached
        )

    cdef void _begin(
        self, Request **loads, Py_ssize_t count, Piece *pieces, bint deferred
    ) noexcept nogil:
        cdef Py_ssize_t i
        if pieces != NULL and self._in_flight == 0 and self._num_pending == 0:
            self._busy_since = mc_clock_ns()
        for i in range(count):
            self._num_to_fill += loads[i].num_fills > 0
            if loads[i].num_missing == 0:  # experts of no bytes
                self._complete(loads[i])
        self._append(pieces, deferred)
        self._issue()
        if self._needs_help():
            pthread_cond_broadcast(&self._work)
        if self._num_tried and self._reaping and not mc_ring_is_full(&self._ring):
            # The thread that would copy them may wait in the kernel.
            mc_ring_push_nothing(&self._ring)
        # A thread that waits hands over the reads that the kernel does not take now.
        self._hand_over()
        # One that waits for something to come goes to the kernel.
        pthread_cond_broadcast(&self._done)

    cdef bint _needs_help(self) noexcept nogil:
        """Whether a thread that serves has something to do."""
        if self._num_fillers and self._unfilled != NULL:
            return True
        if not self._uses_ring:
            return self._num_pending > 0
        if self._arrived != NULL or self._num_tried:
            return True
        if self._num_fillers and self._num_to_fill and self._in_kernel and not self._reaping:
            return True
        return self._num_pending > self.depth and not self._reaping

    cdef void _append(self, Piece *chain, bint deferred) noexcept nogil:
        cdef Piece **end = self._pending_end if deferred else self._urgent_end
        cdef Piece *behind = end[0]
        cdef bint last = end == self._pending_end
        end[0] = chain
        while end[0] != NULL:
            self._num_pending += 1
            self._num_tried += end[0].is_tried
            end = &end[0].next
        end[0] = behind
        if last:
            self._pending_end = end
        if not deferred:
            self._urgent_end = end

    cdef void _put_back(self, Piece *piece) noexcept nogil:
        """Put a piece in front: it has its buffer already."""
        piece.next = self._pending
        if self._pending_end == &self._pending:
            self._pending_end = &piece.next
        if self._urgent_end == &self._pending:
            self._urgent_end = &piece.next
        self._pending = piece
        self._num_pending += 1
        self._num_tried += piece.is_tried

    cdef void _hasten(self, int64_t token) noexcept nogil:
        cdef Piece **link = self._urgent_end
        cdef Piece *piece
        while link[0] != NULL:
            piece = link[0]
            if not self._is_of(piece, token):
                link = &piece.next
                continue
            if link == self._urgent_end:
                link = &piece.next
            else:
                link[0] = piece.next
                if self._pending_end == &piece.next:
                    self._pending_end = link
                piece.next = self._urgent_end[0]
                self._urgent_end[0] = piece
            self._urgent_end = &piece.next

    cdef void _drop_deferred(self, int64_t token) noexcept nogil:
        cdef Piece **link = self._urgent_end
        cdef bint dropped = False
        cdef Piece *piece
        while link[0] != NULL:
            piece = link[0]
            if not self._is_of(piece, token):
                link = &piece.next
                continue
            link[0] = piece.next
            if self._pending_end == &piece.next:
                self._pending_end = link
            self._num_pending -= 1
            self._num_tried -= piece.is_tried
            self._drop(piece)
            dropped = True
        if dropped:
            if self._in_flight == 0 and self._num_pending == 0:
                self.busy_ns += mc_clock_ns() - self._busy_since
            pthread_cond_broadcast(&self._done)

    cdef bint _is_of(self, Piece *piece, int64_t token) noexcept nogil:
        """Whether a read is of one load alone: those submitted together may share one."""
        cdef int i
        for i in range(piece.num_ranges):
            if piece.ranges[i].load.token != token:
                return False
        return True

    cdef void _drop(self, Piece *piece) noexcept nogil:
        """End a read that was not begun."""
        cdef int i
        cdef Request *load
        for i in range(piece.num_ranges):
            load = piece.ranges[i].load
            load.error = ECANCELED
            load.num_missing -= 1
            if load.num_missing == 0:
                self._complete(load)
        if piece.buffer >= 0:
            self._free_buffers[self._num_free_buffers] = piece.buffer
            self._num_free_buffers += 1
        free(piece)

    cdef Piece *_next_piece(self) noexcept nogil:
        """Take the next piece that can be read now, or NULL."""
        cdef Piece *piece = self._pending
        if piece == NULL:
            return NULL
        if piece.num_staged and piece.buffer < 0:
            if self._num_free_buffers == 0:
                return NULL
            self._num_free_buffers -= 1
            piece.buffer = self._free_buffers[self._num_free_buffers]
            place(piece, self._buffer(piece))
        self._pending = piece.next
        if self._pending_end == &piece.next:
            self._pending_end = &self._pending
        if self._urgent_end == &piece.next:
            self._urgent_end = &self._pending
        self._num_pending -= 1
        self._num_tried -= piece.is_tried
        self._in_flight += 1
        self.num_reads += 1
        return piece

    cdef char *_buffer(self, Piece *piece) noexcept nogil:
        return self._staging + <size_t>piece.buffer * self._buffer_bytes

    cdef void _issue(self) noexcept nogil:
        """Push what fits into the ring; `mc_ring_enter` hands it to the kernel."""
        cdef Piece *piece
        cdef iovec *parts
        cdef int num_parts
        if not self._uses_ring:
            return
        while self._in_kernel < self.depth and not mc_ring_is_full(&self._ring):
            if self._pending != NULL and self._pending.is_tried:
                return
            piece = self._next_piece()
            if piece == NULL:
                return
            self._in_kernel += 1
            num_parts = rest(piece, &parts)
            mc_ring_push(
                &self._ring, piece.descriptor, parts, num_parts, piece.offset + piece.num_done,
                piece,
                piece.nbytes >= COPIED_ELSEWHERE
                and piece.descriptor == self._files[piece.file].cached)

    cdef bint _reap(self) noexcept nogil:
        """Take in everything the kernel has finished; staged reads are still to be settled."""
        cdef void *popped = NULL
        cdef Piece *piece
        cdef int64_t result = 0
        cdef bint found = False
        while mc_ring_pop(&self._ring, &popped, &result):
            piece = <Piece *>popped
            if piece == NULL:
                continue
            found = True
            self._in_kernel -= 1
            piece.next = NULL
            if not self._judge(piece, mc_faulty(result, piece.nbytes - piece.num_done)):
                continue
            if piece.num_copies == 0:
                self._account(piece)
            else:
                self._arrived_end[0] = piece
                self._arrived_end = &piece.next
        if (
            found and self._reaping and (not self._reaper_serves or self._unfilled != NULL)
            and not mc_ring_is_full(&self._ring)
        ):
            # Another thread is about to wait in the kernel for the read that was just taken in, or
            # it could fill.
            mc_ring_push_nothing(&self._ring)
        return found

    cdef Piece *_next_arrived(self) noexcept nogil:
        cdef Piece *piece = self._arrived
        self._arrived = piece.next
        if self._arrived == NULL:
            self._arrived_end = &self._arrived
        return piece

    cdef bint _judge(self, Piece *piece, int64_t result) noexcept nogil:
        """Whether a read is to be settled, done or failed; else it went back into the queue."""
        cdef size_t left = piece.nbytes - piece.num_done, unit
        piece.error = 0
        if 0 <= result <= <int64_t>left:
            self.bytes_read += result
            if piece.num_done + <size_t>result >= piece.num_wanted:
                piece.num_done += result
                return True
            unit = self._files[piece.file].alignment
            # A direct read goes on at a whole block: the last part of one comes again.
            if piece.num_done // unit * unit + <size_t>result // unit * unit > piece.num_done:
                piece.num_done += <size_t>result // unit * unit
                piece.attempts = 0
            elif result == 0 or piece.attempts >= 2:
                # The file ends here.
                piece.num_done += result
                piece.error = ENODATA
                return True
            else:
                piece.attempts += 1
        elif result > 0:
            piece.error = EPROTO
            return True
        elif -result in (EINTR, EAGAIN, EBUSY, ENOMEM, ECANCELED) \
                and piece.attempts < MAX_ATTEMPTS:
            piece.attempts += 1
        elif -result == EIO and piece.num_io_errors < MAX_IO_ERRORS:
            # Once more: a path that fails over, a cable.
            piece.num_io_errors += 1
        elif -result in (EINVAL, EOPNOTSUPP) and piece.descriptor == self._files[piece.file].direct:
            # The file system takes no direct reads after all, or none like this.
            piece.descriptor = self._files[piece.file].cached
        else:
            piece.error = <int>-result
            return True
        if self._closed:
            piece.error = ECANCELED
            return True
        self.num_retries += 1
        self._in_flight -= 1
        self._put_back(piece)
        return False

    cdef void _settle(self, Piece *piece) noexcept nogil:
        """Copy what went through staging, without the mutex, and count the piece as done."""
        cdef int i
        pthread_mutex_unlock(&self._mutex)
        for i in range(piece.num_copies):
            memcpy(
                piece.copies[i].target, self._buffer(piece) + piece.copies[i].source,
                piece.copies[i].nbytes)
        pthread_mutex_lock(&self._mutex)
        self._account(piece)

    cdef void _account(self, Piece *piece) noexcept nogil:
        cdef int i
        cdef uint64_t stop = piece.offset + piece.num_done
        cdef Range *part
        cdef Request *load
        for i in range(piece.num_ranges):
            part = &piece.ranges[i]
            load = part.load
            # The bytes that a failed read brought before its error are good.
            if piece.error and part.offset + part.nbytes > stop and load.error == 0:
                load.error, load.file, load.offset = piece.error, piece.file, stop
            self.bytes_wanted += part.nbytes
            load.num_missing -= 1
            if load.num_missing == 0:
                self._complete(load)
        for i in range(piece.num_copies):
            self.bytes_copied += piece.copies[i].nbytes
        if piece.buffer >= 0:
            self._free_buffers[self._num_free_buffers] = piece.buffer
            self._num_free_buffers += 1
        self._in_flight -= 1
        free(piece)
        if self._in_flight == 0 and self._num_pending == 0:
            self.busy_ns += mc_clock_ns() - self._busy_since
        pthread_cond_broadcast(&self._done)

    cdef void _complete(self, Request *load) noexcept nogil:
        """Note that all of an expert's bytes are there, or that some failed."""
        if load.num_fills == 0:
            self._finish(load)
            return
        self._skip_empty(load)
        if load.num_to_fill == 0:
            self._num_to_fill -= 1
            self._finish(load)
            return
        if self._closed and load.error == 0:
            load.error = ECANCELED
        if load.error:
            self._num_to_fill -= 1
            self._finish(load)
            return
        load.next = NULL
        self._unfilled_end[0] = load
        self._unfilled_end = &load.next
        if load.num_to_fill > 1 and self._num_fillers:
            # Others fill some of its matrices: a caller that waits, or a thread that serves.
            pthread_cond_broadcast(&self._done)

    cdef void _skip_empty(self, Request *load) noexcept nogil:
        while load.next_fill < load.num_fills and (
            load.next_matrix >= load.fills[load.next_fill].num
        ):
            load.next_fill += 1
            load.next_matrix = 0

    cdef bint _has_to_fill(self) noexcept nogil:
        """Whether an expert is to be filled, and no thread serves that does."""
        return self._unfilled != NULL and self._num_fillers == 0

    cdef Request *_next_unfilled(self) noexcept nogil:
        cdef Request *load = self._unfilled
        self._unfilled = load.next
        if self._unfilled == NULL:
            self._unfilled_end = &self._unfilled
        return load

    cdef void _fill(self) noexcept nogil:
        """Bring an expert's next matrix into compute form, without the mutex."""
        cdef Request *load = self._unfilled
        cdef const Fill *fill = &load.fills[load.next_fill]
        cdef int64_t matrix = load.next_matrix
        cdef bint is_wrong
        load.next_matrix += 1
        self._skip_empty(load)
        if load.next_fill == load.num_fills:
            self._next_unfilled()
        if self._needs_help():
            pthread_cond_signal(&self._work)
        pthread_mutex_unlock(&self._mutex)
        is_wrong = tile_matrices(
            fill.tiling, fill.raw + matrix * fill.tiling.raw_bytes,
            fill.form + matrix * fill.tiling.form_bytes, 1
        )
        pthread_mutex_lock(&self._mutex)
        load.is_wrong = load.is_wrong or is_wrong
        load.num_to_fill -= 1
        if load.num_to_fill:
            return
        if load.is_wrong and load.error == 0:
            load.error = EILSEQ
        self._num_to_fill -= 1
        self._finish(load)
        pthread_cond_broadcast(&self._done)
        if (
            self._reaping and not self._reaper_serves and not self._closed
            and not mc_ring_is_full(&self._ring)
        ):
            # A thread that waits in the kernel may wait for this expert.
            mc_ring_push_nothing(&self._ring)
            self._hand_over()

    cdef void _give_up(self, Request *load) noexcept nogil:
        """End a load whose other matrices nobody fills; threads may be filling some of it."""
        cdef int64_t num_begun = load.next_matrix
        cdef int i
        for i in range(load.next_fill):
            num_begun += load.fills[i].num
        for i in range(load.num_fills):
            load.num_to_fill -= load.fills[i].num
        # What is left counts the matrices that are being filled.
        load.num_to_fill += num_begun
        load.error = ECANCELED
        if load.num_to_fill == 0:
            self._num_to_fill -= 1
            self._finish(load)

    cdef void _try(self) noexcept nogil:
        """Copy the next piece out of the page cache; leave the rest of it to the kernel."""
        cdef Piece *piece = self._next_piece()
        cdef iovec *parts
        cdef int num_parts = rest(piece, &parts)
        cdef size_t left = piece.nbytes - piece.num_done
        cdef int64_t result
        pthread_mutex_unlock(&self._mutex)
        result = mc_preadv_cached(
            piece.descriptor, parts, num_parts, piece.offset + piece.num_done, left)
        pthread_mutex_lock(&self._mutex)
        piece.next = NULL
        piece.is_tried = False
        if result != -EAGAIN:
            if self._judge(piece, result):
                self._account(piece)
        elif self._closed:
            piece.error = ECANCELED
            self._account(piece)
        else:
            self._in_flight -= 1
            self.num_reads -= 1
            self._put_back(piece)

    cdef void _finish(self, Request *load) noexcept nogil:
        load.next = NULL
        self._finished_end[0] = load
        self._finished_end = &load.next

    cdef void _work_until(self, int64_t seen, int64_t deadline) noexcept nogil:
        """Take part until a load is done, something was announced, or the deadline has come."""
        while (
            self._finished == NULL and self._epoch == seen and not self._closed
            and mc_clock_ns() < deadline
        ):
            if not self._step(deadline, False):
                break
        if self._uses_ring and not self._closed:
            # The kernel goes on with reads that find a buffer now, while this thread computes.
            self._issue()
            self._hand_over()
        if self._needs_help():
            # A thread that serves goes on while this one computes.
            pthread_cond_signal(&self._work)

    cdef bint _step(self, int64_t deadline, bint is_serving) noexcept nogil:
        """Read, reap or fill something, or wait a little. Returns False after a signal."""
        cdef Piece *piece
        cdef iovec *parts
        cdef int num_parts, error = 0
        cdef int64_t result, timeout = deadline - mc_clock_ns()
        if timeout <= 0:
            return True
        if self._unfilled != NULL:
            if self._uses_ring:
                # The kernel reads meanwhile.
                self._take_in()
            if self._unfilled != NULL:
                self._fill()
            return True
        if not self._uses_ring:
            piece = self._next_piece()
            if piece == NULL:
                mc_wait(&self._done, &self._mutex, timeout)
                return True
            num_parts = rest(piece, &parts)
            pthread_mutex_unlock(&self._mutex)
            result = mc_preadv(
                piece.descriptor, parts, num_parts, piece.offset + piece.num_done,
                piece.nbytes - piece.num_done)
            pthread_mutex_lock(&self._mutex)
            piece.next = NULL
            if self._judge(piece, result):
                self._settle(piece)
            return result != -EINTR
        if self._take_in():
            return True
        if self._arrived != NULL:
            self._settle(self._next_arrived())
            return True
        if (
            self._pending != NULL and self._pending.is_tried
            # Nobody waits for what is deferred, least of all a caller.
            and (is_serving or self._urgent_end != &self._pending)
        ):
            self._try()
            return True
        if self._reaping or self._in_kernel == 0:
            # Another thread waits in the kernel, or has the last reads in its hands.
            mc_wait(&self._done, &self._mutex, timeout)
            return True
        self._reaping, self._reaper_serves = True, is_serving
        pthread_mutex_unlock(&self._mutex)
        error = mc_ring_enter(&self._ring, True, timeout)
        pthread_mutex_lock(&self._mutex)
        self._reaping = False
        # Another thread may have to take over: a thread that serves leaves at any time.
        pthread_cond_broadcast(&self._done)
        return error != EINTR

    cdef bint _take_in(self) noexcept nogil:
        """Reap what the ring has, and use at once what that frees."""
        cdef bint found = self._uses_ring and self._reap()
        self._issue()
        self._hand_over()
        return found

    cdef void _hand_over(self) noexcept nogil:
        """Give the kernel what was pushed; gives the mutex up meanwhile."""
        if not self._uses_ring or not mc_ring_waiting(&self._ring):
            return
        self._num_inside += 1
        pthread_mutex_unlock(&self._mutex)
        mc_ring_enter(&self._ring, False, 0)
        pthread_mutex_lock(&self._mutex)
        self._num_inside -= 1

    cdef void _close(self, int64_t timeout_ns) noexcept nogil:
        cdef int64_t deadline = mc_clock_ns() + timeout_ns
        cdef Piece *piece
        cdef int i
        cdef Request *load
        pthread_mutex_lock(&self._mutex)
        self._closed = True
        while self._pending != NULL:
            piece = self._pending
            self._pending = piece.next
            self._drop(piece)
        self._pending_end = &self._pending
        self._urgent_end = &self._pending
        self._num_pending = self._num_tried = 0
        while self._unfilled != NULL:
            self._give_up(self._next_unfilled())
        pthread_cond_broadcast(&self._work)
        pthread_cond_broadcast(&self._done)
        # Threads inside leave at the next tick at the latest or, without timeouts (before Linux
        # 5.11), at the next completion. Another thread may close at the same time.
        while (
            not self._drained and self._in_flight + self._num_inside > 0
            and mc_clock_ns() < deadline
        ):
            self._step(min(deadline, mc_clock_ns() + TICK_NS // 10), False)
        if not self._drained and self._in_flight + self._num_inside == 0:
            self._drained = True
            while self._finished != NULL:
                load = self._finished
                self._finished = load.next
                free(load)
            self._finished_end = &self._finished
            mc_ring_close(&self._ring)
            mc_unmap_buffers(self._staging, self.staging_bytes + SINK)
            self._staging = NULL
            free(self._free_buffers)
            self._free_buffers = NULL
            for i in range(self._num_files):
                if self._files != NULL and self._files[i].direct >= 0:
                    close(self._files[i].direct)
                    self._files[i].direct = -1
        pthread_mutex_unlock(&self._mutex)


# Memory that lost reads may still write to.
_stuck = []


def inject_fault(str kind, *, int error=0, int64_t skip=0, int64_t times=1, int refuse_ring=0):
    """Alter the results of reads from now on; in debug and sanitizer builds, for tests.

    Parameters
    ----------
    kind : {"none", "short", "error", "zero", "long"}
        A third of the bytes, -`error`, none, or more than was asked for.
    error : int
        An errno.
    skip, times : int
        Reads left alone before, and reads altered.
    refuse_ring : int
        An errno with which io_uring is refused from now on, or 0.

    Raises
    ------
    ValueError
        If the kind is not known, or this build has no faults.
    """
    if kind not in FAULTS:
        raise ValueError(f"fault {kind!r} is not one of {', '.join(FAULTS)}")
    if not HAS_FAULTS:
        raise ValueError("this build has no faults; build with MOECACHE_BUILD=debug")
    mc_inject(FAULTS.index(kind), error, skip, 0 if kind == "none" else times, refuse_ring)
