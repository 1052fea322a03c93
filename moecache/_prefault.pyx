# distutils: depends = moecache/_prefault.h
"""The page sweep: brings pages of mappings into memory without the GIL, chunk by chunk."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

import operator
import os

cdef extern from "_prefault.h" nogil:
    size_t mc_page_size()
    int mc_populate(uintptr_t address, size_t nbytes, bint for_writing)
    int mc_willneed(uintptr_t address, size_t nbytes, size_t step)
    void mc_read_when_idle()
    int mc_huge(uintptr_t address, size_t nbytes)
    int mc_lock(uintptr_t address, size_t nbytes)
    int mc_unmap_pages(uintptr_t address, size_t nbytes)
    int mc_read(int descriptor, uint64_t offset, size_t nbytes, char *buffer, size_t room)
    bint mc_first_read_is_slow(int descriptor, uint64_t offset, size_t nbytes)
    void mc_touch(const unsigned char *first, size_t nbytes, size_t page_size)
    int mc_mincore(uintptr_t address, size_t nbytes, unsigned char *pages)
    int mc_cachestat(int descriptor, uint64_t offset, uint64_t nbytes, uint64_t *num_pages)

# Builtins, since Cython has no atomics: the counter is read while threads add to it.
cdef extern from * nogil:
    """
    #define mc_add(where, n) ((void)__atomic_add_fetch((where), (n), __ATOMIC_RELAXED))
    #define mc_load(where) __atomic_load_n((where), __ATOMIC_RELAXED)
    #define mc_store(where, n) __atomic_store_n((where), (n), __ATOMIC_RELAXED)
    """
    void mc_add(int64_t *where, int64_t n)
    int64_t mc_load(int64_t *where)
    void mc_store(int64_t *where, int64_t n)

cdef enum:
    CHUNK = 32 * 1024 * 1024
    SCRATCH = 1024 * 1024
    BITE = 8 * 1024 * 1024
    # Read ahead of the sweep, which would else wait for small pieces far apart one by one.
    AHEAD = 128 * 1024 * 1024
    # The kernel reads no more for one hint than its read-ahead or the disk's largest request.
    HINT = 1024 * 1024
    # Hinted pages come in small folios, at ten times the processor's time; populated pages come
    # in large ones, and the kernel reads ahead where a range is long enough.
    MAX_HINTED = 4 * 1024 * 1024
    # A sweep leaves a range after this many failed chunks in a row.
    MAX_FAILURES = 64
    _NO_FILE = -1
    _OWN_MEMORY = -2

CHUNK_BYTES = CHUNK
NO_FILE = _NO_FILE
OWN_MEMORY = _OWN_MEMORY
PAGE_SIZE = mc_page_size()
METHODS = ("populate", "read", "touch")

cdef struct Piece:
    uintptr_t address
    size_t nbytes
    int descriptor
    uint64_t offset
    int error
    size_t failed_at


@cython.final
cdef class Sweep:
    """Progress and stop signal of one sweep, shared by the threads that do it."""

    cdef int64_t _done_bytes
    cdef int64_t _read_back_bytes
    cdef int64_t _cancelled

    @property
    def done_bytes(self):
        """Bytes brought into memory so far; may be read while the sweep runs."""
        return mc_load(&self._done_bytes)

    @property
    def read_back_bytes(self):
        """Bytes that were read once more because the machine's host had not backed them."""
        return mc_load(&self._read_back_bytes)

    @property
    def cancelled(self):
        """Whether `cancel` was called."""
        return mc_load(&self._cancelled) != 0

    def skip(self, int64_t nbytes):
        """Count bytes as done: they were in memory already."""
        mc_add(&self._done_bytes, nbytes)

    def cancel(self):
        """Make every `run` return before its next chunk."""
        mc_store(&self._cancelled, 1)

    def run(self, pieces, str method, *, bint keep_mapped=True, bint read_back=True):
        """Bring the pieces into memory, in their order; blocks without holding the GIL.

        The caller keeps the ranges mapped meanwhile. A chunk that fails does not stop
        the others.

        Parameters
        ----------
        pieces : sequence of (address, nbytes, descriptor, offset)
            A page-aligned range, and what is behind it: the bytes of the open file
            `descriptor` from `offset`, no known file (NO_FILE), or private memory
            without a file that may be written (OWN_MEMORY). The last gets pages of its
            own by any method, and keeps its contents.
        method : {"populate", "read", "touch"}
            "populate": MADV_POPULATE_READ. "read": a pread of pieces that have a file,
            and a touch of the others. "touch": a touch of every page, which kills the
            process (SIGBUS) where the file is too short.
        keep_mapped : bool, default True
            If false, take each chunk out of the page table again: the bytes stay
            in the page cache, but do not count as this process's memory.
        read_back : bool, default True
            After a populate, read chunks of files once more if that is slow the first
            time, see `mc_first_read_is_slow`.

        Returns
        -------
        list of (index, start, nbytes, errno)
            For each piece that failed, its first chunk that did; `start` is counted from
            the beginning of the piece.

        Raises
        ------
        MemoryError
            If there is no memory for the list or the scratch buffer.
        ValueError
            If the method is not known.
        """
        if method not in METHODS:
            raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)}")
        cdef int action = METHODS.index(method)
        cdef Py_ssize_t i, count = len(pieces)
        cdef Piece *table = <Piece *>malloc((count + 1) * sizeof(Piece))
        cdef char *scratch = <char *>malloc(SCRATCH) if action != 2 else NULL
        # Small bites if nothing stays mapped: until it goes, a bite counts as process memory.
        cdef size_t chunk_bytes = CHUNK if keep_mapped else BITE
        try:
            if table == NULL or (action != 2 and scratch == NULL):
                raise MemoryError("no memory for a sweep's scratch buffer")
            for i in range(count):
                address, nbytes, descriptor, offset = pieces[i]
                table[i] = Piece(address, nbytes, descriptor, offset, 0, 0)
            with nogil:
                self._sweep(table, count, action, scratch, chunk_bytes, keep_mapped, read_back)
            return [
                (i, table[i].failed_at, min(table[i].nbytes - table[i].failed_at, chunk_bytes),
                 table[i].error)
                for i in range(count)
                if table[i].error
            ]
        finally:
            free(table)
            free(scratch)

    cdef void _sweep(
        self, Piece *table, Py_ssize_t count, int action, char *scratch, size_t chunk_bytes,
        bint keep_mapped, bint read_back
    ) noexcept nogil:
        cdef Py_ssize_t i, hinted = 1
        cdef size_t ahead = 0
        for i in range(count):
            if mc_load(&self._cancelled):
                return
            if hinted <= i:
                hinted = i + 1
            elif i > 0:
                ahead -= min(table[i].nbytes, <size_t>AHEAD)
            while hinted < count and ahead < AHEAD and (
                action == 1 or table[hinted].nbytes <= MAX_HINTED
            ):
                mc_willneed(table[hinted].address, min(table[hinted].nbytes, <size_t>AHEAD), HINT)
                ahead += min(table[hinted].nbytes, <size_t>AHEAD)
                hinted += 1
            self._sweep_piece(&table[i], action, scratch, chunk_bytes, keep_mapped, read_back)

    cdef void _sweep_piece(
        self, Piece *piece, int action, char *scratch, size_t chunk_bytes,
        bint keep_mapped, bint read_back
    ) noexcept nogil:
        cdef size_t at = 0, hinted = 0, nbytes, nbytes_ahead
        cdef int error, failures = 0
        while at < piece.nbytes and failures < MAX_FAILURES:
            if mc_load(&self._cancelled):
                return
            nbytes = piece.nbytes - at if piece.nbytes - at < chunk_bytes else chunk_bytes
            error = 0
            if piece.descriptor == _OWN_MEMORY:
                error = mc_populate(piece.address + at, nbytes, True)
                if error == EINVAL:
                    # Before Linux 5.14. A touch is safe: there is no file to be cut short.
                    mc_touch(<const unsigned char *>(piece.address + at), nbytes, mc_page_size())
                    error = 0
            elif action == 0:
                error = mc_populate(piece.address + at, nbytes, False)
                if error == 0 and read_back and piece.descriptor >= 0:
                    self._read_back(piece.descriptor, piece.offset + at, nbytes, scratch)
            elif action == 1 and piece.descriptor >= 0:
                nbytes_ahead = min(piece.nbytes, at + <size_t>AHEAD)
                mc_willneed(piece.address + hinted, nbytes_ahead - hinted, HINT)
                hinted = nbytes_ahead
                error = mc_read(piece.descriptor, piece.offset + at, nbytes, scratch, SCRATCH)
            else:
                mc_touch(<const unsigned char *>(piece.address + at), nbytes, mc_page_size())
            if error == 0:
                mc_add(&self._done_bytes, nbytes)
                failures = 0
            else:
                failures += 1
                if piece.error == 0:
                    piece.error, piece.failed_at = error, at
            # Only with a file behind it: anonymous memory would lose its contents.
            if not keep_mapped and action != 1 and piece.descriptor >= 0:
                mc_unmap_pages(piece.address + at, nbytes)
            at += nbytes

    cdef void _read_back(
        self, int descriptor, uint64_t offset, size_t nbytes, char *scratch
    ) noexcept nogil:
        if mc_first_read_is_slow(descriptor, offset, nbytes):
            # A short read is no failure here: the pages were in memory.
            mc_read(descriptor, offset, nbytes, scratch, SCRATCH)
            mc_add(&self._read_back_bytes, nbytes)


def touch_pages(region, *, page_size=None):
    """Read one byte of every page so that later reads find it in memory.

    Blocks until the disk has served every missing page. Other Python threads
    keep running meanwhile. If the buffer is a mapping of a file that was cut
    short, the process dies (SIGBUS); `moecache.prefault.warming.warm` does not.

    Parameters
    ----------
    region : contiguous buffer of any kind
        Bytes to read. The buffer cannot be unmapped before this returns.
    page_size : int, optional
        Bytes between two reads; by default the system's page size. The last
        byte is read too.

    Returns
    -------
    int
        Pages read, rounded up.

    Raises
    ------
    ValueError
        If `page_size` is not positive.
    TypeError, BufferError, ValueError
        If `region` is no buffer, not contiguous, or closed.
    """
    cdef size_t step = PAGE_SIZE if page_size is None else max(0, operator.index(page_size))
    cdef HeldBuffer held
    if step == 0:
        raise ValueError(f"page_size must be positive, got {page_size}")
    held = HeldBuffer(region)
    with nogil:
        mc_touch(<const unsigned char *>held.view.buf, <size_t>held.view.len, step)
    return held.nbytes // step + (held.nbytes % step != 0)


@cython.final
cdef class HeldBuffer:
    """A contiguous buffer that cannot be closed, resized or freed while this exists.

    It asks for plain bytes, so that arrays of types that no memoryview knows (bfloat16)
    can be held, too.

    Parameters
    ----------
    buffer : contiguous buffer of any kind

    Raises
    ------
    TypeError
        If `buffer` is no buffer.
    BufferError, ValueError
        If the buffer is closed or not contiguous.
    """

    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, buffer):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)
        self.held = True

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    @property
    def address(self):
        """Address of the buffer's first byte."""
        return <uintptr_t>self.view.buf

    @property
    def nbytes(self):
        """Size of the buffer in bytes."""
        return <size_t>self.view.len


def address_of(buffer):
    """Return (address, nbytes) of a contiguous buffer."""
    held = HeldBuffer(buffer)
    return held.address, held.nbytes


def can_populate():
    """Return whether the kernel has MADV_POPULATE_READ (Linux 5.14 and later)."""
    return mc_populate(0, 0, False) == 0


def advise_huge(uintptr_t address, size_t nbytes):
    """Let the kernel read a mapping ahead in large folios; return whether it agreed."""
    return mc_huge(address, nbytes) == 0


def advise_willneed(uintptr_t address, size_t nbytes):
    """Ask the kernel to start reading a mapped range; return whether it agreed."""
    cdef int error
    with nogil:
        error = mc_willneed(address, nbytes, nbytes)
    return error == 0


def read_when_idle():
    """Ask the kernel to serve this thread's reads only while the disk is idle; a hint."""
    mc_read_when_idle()


def lock_pages(uintptr_t address, size_t nbytes):
    """Keep a mapped range in memory until it is unmapped (mlock).

    Raises
    ------
    OSError
        If the range is not mapped, its file is too short, or the limit
        RLIMIT_MEMLOCK is too low.
    """
    cdef int error
    with nogil:
        error = mc_lock(address, nbytes)
    if error:
        raise OSError(error, os.strerror(error))


def give_back_pages(uintptr_t address, size_t nbytes):
    """Give the memory of a mapped range back, in whole pages; return whether the system took it.

    Anonymous memory is zeros from then on, until it is written; a file's is read again.
    """
    cdef size_t page = mc_page_size()
    cdef uintptr_t first = (address + page - 1) // page * page
    cdef uintptr_t end = (address + nbytes) // page * page
    cdef int error = 0
    if end > first:
        with nogil:
            error = mc_unmap_pages(first, end - first)
    return error == 0


def resident_pages(uintptr_t address, size_t nbytes):
    """Return how many pages of a mapped range are in memory (mincore).

    For files that this user neither owns nor may write, the kernel counts every page
    as in memory.

    Raises
    ------
    OSError
        If the range is not mapped, or the system has no mincore.
    """
    cdef unsigned char *pages = <unsigned char *>malloc(CHUNK // 512)
    cdef size_t at = 0, part, i, total = 0, step = mc_page_size() * (CHUNK // 512)
    cdef int error = 0 if pages != NULL else ENOMEM
    try:
        with nogil:
            while at < nbytes and error == 0:
                part = nbytes - at if nbytes - at < step else step
                error = mc_mincore(address + at, part, pages)
                if error == 0:
                    for i in range((part + mc_page_size() - 1) // mc_page_size()):
                        total += pages[i] & 1
                at += part
    finally:
        free(pages)
    if error:
        raise OSError(error, os.strerror(error))
    return total


def cached_pages(int descriptor, uint64_t offset, uint64_t nbytes):
    """Return how many pages of a file's bytes are in the page cache (cachestat).

    Raises
    ------
    OSError
        ENOSYS before Linux 6.5; EPERM for a file that this user neither owns nor may
        write.
    """
    cdef uint64_t num_pages = 0
    cdef int error
    with nogil:
        error = mc_cachestat(descriptor, offset, nbytes, &num_pages)
    if error:
        raise OSError(error, os.strerror(error))
    return num_pages
