"""Many reads in flight at once, without the GIL: by io_uring, or by threads."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc

from moecache.reader._crew cimport Crew
from moecache.reader._files cimport num_direct
from moecache.reader._pieces cimport Piece, free_pieces
from moecache.reader._reads cimport MAX_DEPTH, has_faults, inject
from moecache.reader._requests cimport Range, Request, add_fills, add_ranges, new_request

ENGINES = ("io_uring", "threads")
HAS_FAULTS = has_faults()
FAULTS = ("none", "short", "error", "zero", "long")


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

    # Before the arrays: whoever frees a reader ends its reads first.
    cdef Crew _crew
    cdef dict _held  # owner and arrays of each load, by its token
    cdef int64_t _next_token

    def __cinit__(
        self, descriptors, *, bint direct=False, engine=None, int depth=16,
        Py_ssize_t piece_bytes=256 * 1024, Py_ssize_t staging_bytes=16 * 1024 * 1024
    ):
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
        self._held = {}
        self._crew = Crew(descriptors, direct, engine)
        self.tune(depth=depth, piece_bytes=piece_bytes, staging_bytes=staging_bytes)

    @property
    def direct(self):
        """Whether there are files that are read around the page cache."""
        return self._crew.reads.files.alignment > 1

    @property
    def alignment(self):
        """What direct reads need of offsets and addresses; 1 without."""
        return self._crew.reads.files.alignment

    @property
    def engine(self):
        """The way of reading: "io_uring" or "threads"."""
        return "io_uring" if self._crew.reads.uses_ring else "threads"

    @property
    def refusal(self):
        """Why there is no io_uring: an errno, or 0."""
        return self._crew.refusal

    @property
    def depth(self):
        """Most reads in flight."""
        return self._crew.reads.depth

    @property
    def piece_bytes(self):
        """Largest read."""
        return self._crew.reads.piece_bytes

    @property
    def staging_bytes(self):
        """Memory for what cannot be read straight into its target."""
        return self._crew.reads.staging.nbytes

    @property
    def num_direct_files(self):
        """Files that are read around the page cache."""
        return num_direct(&self._crew.reads.files)

    @property
    def num_in_flight(self):
        """Reads that the kernel has, or that wait for their turn."""
        return self._crew.num_in_flight()

    @property
    def epoch(self):
        """Number of calls of `announce`."""
        return self._crew.epoch

    @property
    def busy_ns(self):
        """Time during which something was in flight."""
        return self._crew.reads.busy_ns

    @property
    def num_reads(self):
        """Reads that were begun, also again."""
        return self._crew.reads.num_reads

    @property
    def num_retries(self):
        """Reads that were begun again."""
        return self._crew.reads.num_retries

    @property
    def bytes_wanted(self):
        """Bytes that loads asked for."""
        return self._crew.reads.bytes_wanted

    @property
    def bytes_read(self):
        """Bytes that came, with those between and around what was asked for."""
        return self._crew.reads.bytes_read

    @property
    def bytes_copied(self):
        """Bytes that went through staging."""
        return self._crew.reads.bytes_copied

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
        if self._crew.reads.is_closed:
            raise ValueError("the reader is closed")
        if self.num_in_flight:
            raise ValueError(f"{self.num_in_flight} reads are in flight")
        self._crew.tune(depth, piece_bytes, max(0, staging_bytes))

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
        cdef Py_ssize_t num_loads = len(loads), i
        cdef Request **requests
        cdef Piece *pieces = NULL
        cdef bint begun = False
        if num_loads == 0:
            return
        requests = <Request **>calloc(num_loads, sizeof(Request *))
        if requests == NULL:
            raise MemoryError("no memory for reads")
        try:
            self._prepare(loads, requests, &pieces)
            for i in range(num_loads):
                self._next_token += 1
                requests[i].token = self._next_token
                self._held[requests[i].token] = (loads[i][0], loads[i][1:])
            with nogil:
                begun = self._crew.begin(requests, num_loads, pieces, deferred)
            if not begun:
                raise ValueError("the reader is closed")
            loads.clear()
        finally:
            if not begun:
                free_pieces(&pieces)
                for i in range(num_loads):
                    if requests[i] != NULL:
                        self._held.pop(requests[i].token, None)
                    free(requests[i])
            free(requests)

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
                self._crew.hasten(token)

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
                self._crew.cancel(token)

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
            found = self._crew.wait(seen)
        PyErr_CheckSignals()
        return found

    def poll(self):
        """Take in what the kernel has finished, without waiting; return whether a load is done.

        Staged bytes are copied, and reads that found no room in the queue, or no
        buffer, are begun.
        """
        cdef bint has_work
        # With the GIL: the thread that has the mutex needs no GIL, and gives it back at once.
        cdef bint found = self._crew.is_done(&has_work)
        if has_work:
            with nogil:
                found = self._crew.poll()
        return found

    def take(self, list found not None):
        """Append (owner, error) of a load that is done to `found`, if there is one.

        `error` is None, or (errno, file number, offset): ENODATA for a file that
        ends too early, EILSEQ if all was read but a scale is wrong, as `Tiler.tile` says. A list
        rather than a return value: an interrupt cannot come between taking it and keeping it.
        """
        cdef Request *load = self._crew.take()
        if load == NULL:
            return
        held = self._held.pop(load.token)
        error = (load.error, load.file, load.offset) if load.error else None
        free(load)
        found.append((held[0], error))

    def announce(self):
        """Make every `wait` return: something happened that others wait for."""
        with nogil:
            self._crew.announce()

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
            self._crew.serve(fills)

    def close(self, double timeout_s=2.0):
        """Drop what was not begun and wait for what is in flight; a second call does nothing.

        Returns
        -------
        bool
            False if a read did not come back in time: its memory is never given back.
        """
        if self._crew.is_inherited():
            return True
        with nogil:
            self._crew.close(<int64_t>(timeout_s * 1e9))
        _stuck[:] = [held for held in _stuck if held is not self._held]
        if self._crew.has_drained:
            self._held = {}
        else:
            _stuck.append(self._held)
        return self._crew.has_drained

    cdef int64_t _token_of(self, owner) except -2:
        for number, (held, _) in self._held.items():
            if held is owner or (type(held) is tuple and held and held[0] is owner):
                return number
        return -1

    cdef int _prepare(self, list loads, Request **requests, Piece **pieces) except -1:
        """Check loads, and make requests and a chain of pieces of them."""
        cdef Py_ssize_t num_loads = len(loads), num_ranges = 0, used = 0, cut_up_to = 0, i
        cdef Range *ranges
        for load in loads:
            for _, _, spans in load[1]:
                num_ranges += len(spans)
        ranges = <Range *>malloc((num_ranges + 1) * sizeof(Range))
        if ranges == NULL:
            raise MemoryError("no memory for reads")
        try:
            for i in range(num_loads):
                load = loads[i]
                fills = load[3] if len(load) > 3 else ()
                requests[i] = new_request(len(fills))
                used = add_ranges(
                    ranges, used, requests[i], self._crew.reads.files.num, load[1], load[2])
                add_fills(requests[i], load[2], fills)
                if i + 1 < num_loads and not (requests[i].num_fills and self._crew.num_fillers):
                    continue
                # Experts that threads fill come one after the other.
                pieces = self._crew.add_pieces(
                    ranges + cut_up_to, used - cut_up_to, requests[i].num_fills > 0, pieces)
                cut_up_to = used
        finally:
            free(ranges)
        return 0


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
    inject(FAULTS.index(kind), error, skip, 0 if kind == "none" else times, refuse_ring)
