# distutils: libraries = pthread
"""Crew: the threads that take part in reads; who enters the kernel, who copies, who sleeps."""

cimport cython
from libc.errno cimport EAGAIN, EINTR
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from posix.unistd cimport getpid

import os

from moecache.kernels._tiler cimport tile_matrices
from moecache.reader._files cimport close_files, open_files
from moecache.reader._locks cimport (
    mc_clock_ns, mc_condition_init, mc_wait, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_cond_signal, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock,
)
from moecache.reader._pieces cimport Piece, cut
from moecache.reader._queue cimport head, make_urgent, shift
from moecache.reader._reads cimport (
    MAX_DEPTH, drop_all, drop_deferred, enqueue, issue, judge, leave_to_kernel, next_piece,
    open_ring, read_cached, read_now, reap, settle,
)
from moecache.reader._requests cimport (
    Fill, Range, Request, end_matrix, give_up, take_finished, take_matrix,
)
from moecache.reader._ring cimport (
    mc_ring_close, mc_ring_enter, mc_ring_has_done, mc_ring_is_full, mc_ring_push_nothing,
    mc_ring_waiting,
)
from moecache.reader._staging cimport close_staging, copy_out, open_staging

cdef int64_t TICK_NS = 100_000_000


@cython.final
cdef class Crew:
    """Reads of some files, and the threads that carry them out, under one mutex.

    A thread that waits for a request takes part: it hands pieces to the kernel and takes in what
    came, or reads them itself where there is no io_uring. One at a time waits in the kernel; the
    others sleep until something has ended. Nothing here refers to a Python object.

    From `begin` on, methods take the mutex and need no GIL; those that begin with an underscore run
    under it.
    """

    def __cinit__(self, descriptors, bint direct, engine):
        self.reads.ring.descriptor = -1
        self._process = getpid()
        if pthread_mutex_init(&self._mutex, NULL) or mc_condition_init(&self.reads.ended) \
                or mc_condition_init(&self._work):
            raise MemoryError("no memory for a reader's locks")
        self._is_initialised = True
        open_files(&self.reads.files, descriptors, direct)
        if engine != "threads":
            self.refusal = open_ring(&self.reads)
            if engine == "io_uring" and self.refusal:
                raise OSError(self.refusal, f"io_uring: {os.strerror(self.refusal)}")

    def __dealloc__(self):
        if not self._is_initialised or self.is_inherited():
            return
        with nogil:
            self.close(2_000_000_000)
        if not self.has_drained:
            # A read that never returns may still write: nothing it uses is given back.
            return
        free(self.reads.files.each)
        pthread_mutex_destroy(&self._mutex)
        pthread_cond_destroy(&self.reads.ended)
        pthread_cond_destroy(&self._work)

    cdef bint is_inherited(self) noexcept:
        """Whether a fork made this process: ring, locks and reads in flight are the parent's."""
        return self._process != getpid()

    cdef int num_in_flight(self) noexcept:
        return self.reads.in_flight + self.reads.queue.num

    cdef int tune(self, int depth, size_t piece_bytes, size_t staging_bytes) except -1:
        """Change how much is read at once, while there is nothing to read."""
        cdef size_t unit = max(<size_t>4096, self.reads.files.alignment)
        # A piece may begin and end in the middle of a block.
        cdef size_t buffer_bytes = (piece_bytes + 2 * unit - 1) // unit * unit
        cdef size_t num_buffers = min(
            max(<size_t>2, staging_bytes // buffer_bytes), <size_t>MAX_DEPTH)
        if open_staging(&self.reads.staging, <int>num_buffers, buffer_bytes) < 0:
            raise MemoryError(
                f"no memory for staging buffers of {num_buffers * buffer_bytes} bytes")
        self.reads.depth, self.reads.piece_bytes = depth, piece_bytes
        return 0

    cdef Piece **add_pieces(
        self, Range *ranges, Py_ssize_t count, bint is_filled, Piece **end
    ) except NULL:
        """Add the pieces of some ranges to a chain; return its new end."""
        cdef Reads *reads = &self.reads
        if cut(reads.files.each, reads.piece_bytes, reads.staging.sink, ranges, count, end) < 0:
            raise MemoryError("no memory for reads")
        while end[0] != NULL:
            # By a thread that fills, if the page cache has it.
            end[0].is_tried = (
                is_filled and self.num_fillers > 0 and reads.uses_ring and end[0].num_staged == 0
                and end[0].descriptor == reads.files.each[end[0].file].cached
            )
            end = &end[0].next
        return end

    cdef bint begin(
        self, Request **loads, Py_ssize_t count, Piece *pieces, bint deferred
    ) noexcept nogil:
        """Begin to read; requests and pieces are the crew's then. Returns False if it is closed."""
        cdef bint is_open
        pthread_mutex_lock(&self._mutex)
        is_open = not self.reads.is_closed
        if is_open:
            enqueue(&self.reads, loads, count, pieces, deferred)
            if self._needs_help():
                pthread_cond_broadcast(&self._work)
            if (
                self.reads.queue.num_tried and self._is_reaping
                and not mc_ring_is_full(&self.reads.ring)
            ):
                # The thread that would copy them may wait in the kernel.
                mc_ring_push_nothing(&self.reads.ring)
            # A thread that waits hands over the reads that the kernel does not take now.
            self._hand_over()
            # One that waits for something to come goes to the kernel.
            pthread_cond_broadcast(&self.reads.ended)
        pthread_mutex_unlock(&self._mutex)
        return is_open

    cdef void hasten(self, int64_t token) noexcept nogil:
        """Let the deferred pieces of a request go behind the urgent ones."""
        pthread_mutex_lock(&self._mutex)
        make_urgent(&self.reads.queue, token)
        pthread_mutex_unlock(&self._mutex)

    cdef void cancel(self, int64_t token) noexcept nogil:
        """Drop the deferred pieces of a request, which ends with ECANCELED then."""
        pthread_mutex_lock(&self._mutex)
        drop_deferred(&self.reads, token)
        pthread_mutex_unlock(&self._mutex)

    cdef bint wait(self, int64_t seen) noexcept nogil:
        """Take part until a request is done, `epoch` is not `seen`, or a tick has passed.

        Returns whether a request is done. Ends early after a signal.
        """
        cdef int64_t deadline
        cdef bint found
        pthread_mutex_lock(&self._mutex)
        self._num_inside += 1
        deadline = mc_clock_ns() + TICK_NS
        while (
            self.reads.requests.finished.first == NULL and self.epoch == seen
            and not self.reads.is_closed and mc_clock_ns() < deadline
        ):
            if not self._step(deadline, False):
                break
        if self.reads.uses_ring and not self.reads.is_closed:
            # The kernel goes on with reads that find a buffer now, while this thread computes.
            issue(&self.reads)
            self._hand_over()
        if self._needs_help():
            # A thread that serves goes on while this one computes.
            pthread_cond_signal(&self._work)
        self._num_inside -= 1
        found = self.reads.requests.finished.first != NULL
        pthread_mutex_unlock(&self._mutex)
        return found

    cdef bint is_done(self, bint *has_work) noexcept nogil:
        """Return whether a request is done, and whether `poll` has something to do."""
        cdef bint found
        pthread_mutex_lock(&self._mutex)
        found = self.reads.requests.finished.first != NULL
        has_work[0] = not self.reads.is_closed and (
            self.reads.arrived.first != NULL or self._has_to_fill()
            or (self.reads.uses_ring and mc_ring_has_done(&self.reads.ring)))
        pthread_mutex_unlock(&self._mutex)
        return found

    cdef bint poll(self) noexcept nogil:
        """Do what can be done without waiting; return whether a request is done."""
        cdef bint found
        pthread_mutex_lock(&self._mutex)
        if not self.reads.is_closed:
            self._num_inside += 1
            # A settled read gives its buffer back, and the next one can begin: if no thread
            # waits, a later call would find the kernel idle.
            while self._take_in() or self.reads.arrived.first != NULL or self._has_to_fill():
                if self.reads.arrived.first != NULL:
                    self._settle(shift(&self.reads.arrived))
                elif self._has_to_fill():
                    self._fill()
            self._num_inside -= 1
        found = self.reads.requests.finished.first != NULL
        pthread_mutex_unlock(&self._mutex)
        return found

    cdef Request *take(self) noexcept nogil:
        """Return a request that is done, which the caller frees, or NULL."""
        cdef Request *load
        pthread_mutex_lock(&self._mutex)
        load = take_finished(&self.reads.requests)
        pthread_mutex_unlock(&self._mutex)
        return load

    cdef void announce(self) noexcept nogil:
        """Make every `wait` return."""
        pthread_mutex_lock(&self._mutex)
        self.epoch += 1
        pthread_cond_broadcast(&self.reads.ended)
        self._wake_caller()
        pthread_mutex_unlock(&self._mutex)

    cdef void serve(self, bint fills) noexcept nogil:
        """Take part until `close`, waiting for no request."""
        pthread_mutex_lock(&self._mutex)
        self._num_inside += 1
        self.num_fillers += fills
        while not self.reads.is_closed:
            if self.reads.arrived.first != NULL:
                self._settle(shift(&self.reads.arrived))
            elif not self._needs_help():
                mc_wait(&self._work, &self._mutex, TICK_NS)
            else:
                self._step(mc_clock_ns() + TICK_NS, True)
        self.num_fillers -= fills
        self._num_inside -= 1
        pthread_mutex_unlock(&self._mutex)

    cdef void close(self, int64_t timeout_ns) noexcept nogil:
        """Drop what was not begun and wait for the rest, which has drained if all came back."""
        cdef int64_t deadline = mc_clock_ns() + timeout_ns
        cdef Request *load
        pthread_mutex_lock(&self._mutex)
        self.reads.is_closed = True
        drop_all(&self.reads)
        give_up(&self.reads.requests)
        pthread_cond_broadcast(&self._work)
        pthread_cond_broadcast(&self.reads.ended)
        # Threads inside leave at the next tick at the latest or, without timeouts (before Linux
        # 5.11), at the next completion. Another thread may close at the same time.
        while (
            not self.has_drained and self.reads.in_flight + self._num_inside > 0
            and mc_clock_ns() < deadline
        ):
            self._step(min(deadline, mc_clock_ns() + TICK_NS // 10), False)
        if not self.has_drained and self.reads.in_flight + self._num_inside == 0:
            self.has_drained = True
            load = take_finished(&self.reads.requests)
            while load != NULL:
                free(load)
                load = take_finished(&self.reads.requests)
            mc_ring_close(&self.reads.ring)
            close_staging(&self.reads.staging)
            close_files(&self.reads.files)
        pthread_mutex_unlock(&self._mutex)

    cdef bint _needs_help(self) noexcept nogil:
        """Whether a thread that serves has something to do."""
        if self.num_fillers and self.reads.requests.unfilled.first != NULL:
            return True
        if not self.reads.uses_ring:
            return self.reads.queue.num > 0
        if self.reads.arrived.first != NULL or self.reads.queue.num_tried:
            return True
        if self._is_reaping:
            return False
        if self.num_fillers and self.reads.requests.num_to_fill and self.reads.in_kernel:
            return True
        return self.reads.queue.num > self.reads.depth

    cdef bint _has_to_fill(self) noexcept nogil:
        """Whether an expert is to be filled, and no thread serves that does."""
        return self.reads.requests.unfilled.first != NULL and self.num_fillers == 0

    cdef bint _step(self, int64_t deadline, bint is_serving) noexcept nogil:
        """Read, reap or fill something, or wait a little. Returns False after a signal."""
        cdef int64_t timeout = deadline - mc_clock_ns()
        if timeout <= 0:
            return True
        if self.reads.requests.unfilled.first != NULL:
            if self.reads.uses_ring:
                # The kernel reads meanwhile.
                self._take_in()
            if self.reads.requests.unfilled.first != NULL:
                self._fill()
            return True
        if self.reads.uses_ring:
            return self._reap_or_wait(timeout, is_serving)
        return self._read(timeout)

    cdef bint _read(self, int64_t timeout) noexcept nogil:
        """Read a piece in this thread, or wait for one. Returns False after a signal."""
        cdef Piece *piece = next_piece(&self.reads)
        cdef int64_t result
        if piece == NULL:
            mc_wait(&self.reads.ended, &self._mutex, timeout)
            return True
        pthread_mutex_unlock(&self._mutex)
        result = read_now(piece)
        pthread_mutex_lock(&self._mutex)
        if judge(&self.reads, piece, result):
            self._settle(piece)
        return result != -EINTR

    cdef bint _reap_or_wait(self, int64_t timeout, bint is_serving) noexcept nogil:
        """Go on with what the kernel has read, or wait for it. Returns False after a signal."""
        cdef Piece *piece
        cdef int error
        if self._take_in():
            return True
        if self.reads.arrived.first != NULL:
            self._settle(shift(&self.reads.arrived))
            return True
        piece = head(&self.reads.queue)
        if (
            piece != NULL and piece.is_tried
            # Nobody waits for what is deferred, least of all a caller.
            and (is_serving or piece == self.reads.queue.urgent.first)
        ):
            self._try()
            return True
        if self._is_reaping or self.reads.in_kernel == 0:
            # Another thread waits in the kernel, or has the last reads in its hands.
            mc_wait(&self.reads.ended, &self._mutex, timeout)
            return True
        self._is_reaping, self._reaper_serves = True, is_serving
        pthread_mutex_unlock(&self._mutex)
        error = mc_ring_enter(&self.reads.ring, True, timeout)
        pthread_mutex_lock(&self._mutex)
        self._is_reaping = False
        # Another thread may have to take over: a thread that serves leaves at any time.
        pthread_cond_broadcast(&self.reads.ended)
        return error != EINTR

    cdef bint _take_in(self) noexcept nogil:
        """Reap what the ring has, and use at once what that frees."""
        cdef bint found = self.reads.uses_ring and reap(&self.reads)
        if (
            found and self._is_reaping
            and (not self._reaper_serves or self.reads.requests.unfilled.first != NULL)
            and not mc_ring_is_full(&self.reads.ring)
        ):
            # Another thread is about to wait in the kernel for the read that was just taken in, or
            # it could fill.
            mc_ring_push_nothing(&self.reads.ring)
        issue(&self.reads)
        self._hand_over()
        return found

    cdef void _hand_over(self) noexcept nogil:
        """Give the kernel what was pushed; gives the mutex up meanwhile."""
        if not self.reads.uses_ring or not mc_ring_waiting(&self.reads.ring):
            return
        self._num_inside += 1
        pthread_mutex_unlock(&self._mutex)
        mc_ring_enter(&self.reads.ring, False, 0)
        pthread_mutex_lock(&self._mutex)
        self._num_inside -= 1

    cdef void _wake_caller(self) noexcept nogil:
        """Have a caller that waits in the kernel look whether what it waits for has come."""
        if (
            self._is_reaping and not self._reaper_serves and not self.reads.is_closed
            and not mc_ring_is_full(&self.reads.ring)
        ):
            mc_ring_push_nothing(&self.reads.ring)
            self._hand_over()

    cdef void _settle(self, Piece *piece) noexcept nogil:
        """Copy what went through staging, without the mutex, and count the piece as done."""
        pthread_mutex_unlock(&self._mutex)
        copy_out(&self.reads.staging, piece)
        pthread_mutex_lock(&self._mutex)
        settle(&self.reads, piece)

    cdef void _try(self) noexcept nogil:
        """Copy the next piece out of the page cache; leave the rest of it to the kernel."""
        cdef Piece *piece = next_piece(&self.reads)
        cdef int64_t result
        pthread_mutex_unlock(&self._mutex)
        result = read_cached(piece)
        pthread_mutex_lock(&self._mutex)
        piece.is_tried = False
        if result == -EAGAIN:
            leave_to_kernel(&self.reads, piece)
        elif judge(&self.reads, piece, result):
            settle(&self.reads, piece)

    cdef void _fill(self) noexcept nogil:
        """Bring an expert's next matrix into compute form, without the mutex."""
        cdef Request *load = self.reads.requests.unfilled.first
        cdef Fill one = take_matrix(&self.reads.requests)
        cdef bint is_wrong
        if self._needs_help():
            pthread_cond_signal(&self._work)
        pthread_mutex_unlock(&self._mutex)
        is_wrong = tile_matrices(one.tiling, one.raw, one.form, one.num)
        pthread_mutex_lock(&self._mutex)
        if end_matrix(&self.reads.requests, load, is_wrong):
            pthread_cond_broadcast(&self.reads.ended)
            self._wake_caller()
