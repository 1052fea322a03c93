"""Reads that are under way: begun, judged when they come back, and settled.

Nothing here waits or takes a lock: all but `read_now` and `read_cached` is called under the mutex
of whoever has the reads.
"""

from libc.errno cimport (
    EAGAIN, EBUSY, EINTR, EINVAL, EIO, ENODATA, ENOMEM, EOPNOTSUPP, EPROTO,
)
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free

from moecache.reader._files cimport File, iovec, mc_preadv, mc_preadv_cached
from moecache.reader._locks cimport mc_clock_ns, pthread_cond_broadcast
from moecache.reader._pieces cimport Piece, rest
from moecache.reader._queue cimport append, head, pop, push, put_back, withdraw
from moecache.reader._requests cimport ECANCELED, Range, Request, complete
from moecache.reader._ring cimport (
    mc_ring_is_full, mc_ring_open, mc_ring_pop, mc_ring_push, mc_ring_try,
)
from moecache.reader._staging cimport give_back, lend

cdef extern from "_faults.h" nogil:
    bint MC_HAS_FAULTS
    int64_t mc_faulty(int64_t result, size_t asked)
    int mc_refused_ring()
    void mc_inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring)

cdef enum:
    # From this size on the kernel's threads copy what is cached, beside the caller.
    COPIED_ELSEWHERE = 256 * 1024
    MAX_ATTEMPTS = 64
    MAX_IO_ERRORS = 2


cdef bint has_faults() noexcept:
    """Whether `inject` does anything."""
    return MC_HAS_FAULTS


cdef void inject(int kind, int error, int64_t skip, int64_t times, int refuse_ring) noexcept:
    """Alter the results of reads from now on, as `inject_fault` says."""
    mc_inject(kind, error, skip, times, refuse_ring)


cdef int open_ring(Reads *reads) noexcept nogil:
    """Read by io_uring from now on; return an errno if the kernel refuses it."""
    cdef int refusal = mc_refused_ring()
    if refusal == 0:
        refusal = mc_ring_open(&reads.ring, MAX_DEPTH)
    if refusal == 0:
        refusal = mc_ring_try(&reads.ring)
    reads.uses_ring = refusal == 0
    return refusal


cdef void enqueue(
    Reads *reads, Request **loads, Py_ssize_t count, Piece *pieces, bint deferred
) noexcept nogil:
    """Queue the pieces of some requests, and push what fits into the ring."""
    cdef Py_ssize_t i
    if pieces != NULL and reads.in_flight == 0 and reads.queue.num == 0:
        reads.busy_since = mc_clock_ns()
    for i in range(count):
        reads.requests.num_to_fill += loads[i].num_fills > 0
        if loads[i].num_missing == 0:  # experts of no bytes
            complete(&reads.requests, loads[i], reads.is_closed)
    push(&reads.queue, pieces, deferred)
    issue(reads)


cdef void drop_deferred(Reads *reads, int64_t token) noexcept nogil:
    """Drop the deferred pieces of a request, which ends with ECANCELED then."""
    cdef Piece *chain = withdraw(&reads.queue, token)
    cdef Piece *piece
    if chain == NULL:
        return
    while chain != NULL:
        piece, chain = chain, chain.next
        _drop(reads, piece)
    _note_idle(reads)
    pthread_cond_broadcast(&reads.ended)


cdef void drop_all(Reads *reads) noexcept nogil:
    """Drop what was not begun."""
    cdef Piece *piece = pop(&reads.queue)
    while piece != NULL:
        _drop(reads, piece)
        piece = pop(&reads.queue)


cdef Piece *next_piece(Reads *reads) noexcept nogil:
    """Take the next piece that can be read now, or NULL."""
    cdef Piece *piece = head(&reads.queue)
    if piece == NULL or not lend(&reads.staging, piece):
        return NULL
    reads.in_flight += 1
    reads.num_reads += 1
    return pop(&reads.queue)


cdef int64_t read_now(Piece *piece) noexcept nogil:
    """Read the rest of a piece; return the number of bytes, or -errno."""
    cdef iovec *parts
    cdef int num_parts = rest(piece, &parts)
    return mc_faulty(
        mc_preadv(piece.descriptor, parts, num_parts, piece.offset + piece.num_done),
        piece.nbytes - piece.num_done)


cdef int64_t read_cached(Piece *piece) noexcept nogil:
    """Read the rest of a piece as far as the page cache has it; -EAGAIN if it has nothing."""
    cdef iovec *parts
    cdef int num_parts = rest(piece, &parts)
    cdef int64_t result = mc_preadv_cached(
        piece.descriptor, parts, num_parts, piece.offset + piece.num_done)
    return result if result == -EAGAIN else mc_faulty(result, piece.nbytes - piece.num_done)


cdef void issue(Reads *reads) noexcept nogil:
    """Push what fits into the ring; `mc_ring_enter` hands it to the kernel."""
    cdef Piece *piece
    cdef iovec *parts
    cdef int num_parts
    if not reads.uses_ring:
        return
    while reads.in_kernel < reads.depth and not mc_ring_is_full(&reads.ring):
        piece = head(&reads.queue)
        if piece == NULL or piece.is_tried:
            return
        piece = next_piece(reads)
        if piece == NULL:
            return
        reads.in_kernel += 1
        num_parts = rest(piece, &parts)
        mc_ring_push(
            &reads.ring, piece.descriptor, parts, num_parts, piece.offset + piece.num_done, piece,
            piece.nbytes >= COPIED_ELSEWHERE
            and piece.descriptor == reads.files.each[piece.file].cached)


cdef bint reap(Reads *reads) noexcept nogil:
    """Take in all that the kernel has finished; return whether there was anything."""
    cdef void *popped = NULL
    cdef Piece *piece
    cdef int64_t result = 0
    cdef bint found = False
    while mc_ring_pop(&reads.ring, &popped, &result):
        piece = <Piece *>popped
        if piece == NULL:
            continue
        found = True
        reads.in_kernel -= 1
        if not judge(reads, piece, mc_faulty(result, piece.nbytes - piece.num_done)):
            continue
        if piece.num_copies == 0:
            settle(reads, piece)
        else:
            append(&reads.arrived, piece)
    return found


cdef bint judge(Reads *reads, Piece *piece, int64_t result) noexcept nogil:
    """Whether a read is to be settled, done or failed; else it went back into the queue."""
    cdef const File *file = &reads.files.each[piece.file]
    if 0 <= result <= <int64_t>(piece.nbytes - piece.num_done):
        reads.bytes_read += result
    if _has_ended(piece, file, result):
        return True
    if reads.is_closed:
        piece.error = ECANCELED
        return True
    reads.num_retries += 1
    reads.in_flight -= 1
    put_back(&reads.queue, piece)
    return False


cdef bint _has_ended(Piece *piece, const File *file, int64_t result) noexcept nogil:
    """Note what a read gave; whether its piece is done or has failed, or is read again."""
    cdef size_t unit = file.alignment, left = piece.nbytes - piece.num_done
    piece.error = 0
    if 0 <= result <= <int64_t>left:
        if piece.num_done + <size_t>result >= piece.num_wanted:
            piece.num_done += result
            return True
        # A direct read goes on at a whole block: the last part of one comes again.
        if piece.num_done // unit * unit + <size_t>result // unit * unit > piece.num_done:
            piece.num_done += <size_t>result // unit * unit
            piece.attempts = 0
        elif result == 0 or piece.attempts >= 2:
            # The file ends here.
            piece.num_done += result
            piece.error = ENODATA
        else:
            piece.attempts += 1
    elif result > 0:
        piece.error = EPROTO
    elif -result in (EINTR, EAGAIN, EBUSY, ENOMEM, ECANCELED) and piece.attempts < MAX_ATTEMPTS:
        piece.attempts += 1
    elif -result == EIO and piece.num_io_errors < MAX_IO_ERRORS:
        # Once more: a path that fails over, a cable.
        piece.num_io_errors += 1
    elif -result in (EINVAL, EOPNOTSUPP) and piece.descriptor == file.direct:
        # The file system takes no direct reads after all, or none like this.
        piece.descriptor = file.cached
    else:
        piece.error = <int>-result
    return piece.error != 0


cdef void settle(Reads *reads, Piece *piece) noexcept nogil:
    """Count a piece as done or failed, for its requests; its bytes are where they are wanted."""
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
        reads.bytes_wanted += part.nbytes
    for i in range(piece.num_copies):
        reads.bytes_copied += piece.copies[i].nbytes
    reads.in_flight -= 1
    _end(reads, piece)
    _note_idle(reads)
    pthread_cond_broadcast(&reads.ended)


cdef void leave_to_kernel(Reads *reads, Piece *piece) noexcept nogil:
    """Put a piece back that `read_cached` found nothing of; it fails if the reads are closed."""
    if reads.is_closed:
        piece.error = ECANCELED
        settle(reads, piece)
        return
    reads.num_reads -= 1
    reads.in_flight -= 1
    put_back(&reads.queue, piece)


cdef void _drop(Reads *reads, Piece *piece) noexcept nogil:
    """Fail a piece that was not begun."""
    cdef int i
    for i in range(piece.num_ranges):
        piece.ranges[i].load.error = ECANCELED
    _end(reads, piece)


cdef void _end(Reads *reads, Piece *piece) noexcept nogil:
    """Complete the requests whose last piece this is, and free it."""
    cdef int i
    cdef Request *load
    for i in range(piece.num_ranges):
        load = piece.ranges[i].load
        load.num_missing -= 1
        if load.num_missing == 0:
            complete(&reads.requests, load, reads.is_closed)
    give_back(&reads.staging, piece)
    free(piece)


cdef void _note_idle(Reads *reads) noexcept nogil:
    if reads.in_flight == 0 and reads.queue.num == 0:
        reads.busy_ns += mc_clock_ns() - reads.busy_since
