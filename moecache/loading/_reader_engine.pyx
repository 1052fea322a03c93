"""ReaderEngine: reads by a compiled reader of the store's files, many at once."""

cimport cython
from libc.errno cimport EILSEQ
from libc.stdint cimport int64_t

from functools import partial

from moecache.errors import ConfigError
from moecache.loading.load import ReadCancelledError, interrupted
from moecache.loading.store_engine import join_threads, start_threads
from moecache.stores import FileStore

cdef extern from "errno.h":
    int ECANCELED

cdef extern from *:
    """
    #include <sys/stat.h>
    /* Whether a file was last written to at another time. */
    static int mc_was_modified(int descriptor, int64_t seconds, int64_t nanoseconds)
    {
        struct stat found;
        if (fstat(descriptor, &found))
            return 0;
    #ifdef __APPLE__
        return found.st_mtimespec.tv_sec != seconds || found.st_mtimespec.tv_nsec != nanoseconds;
    #else
        return found.st_mtim.tv_sec != seconds || found.st_mtim.tv_nsec != nanoseconds;
    #endif
    }
    """
    bint mc_was_modified(int descriptor, int64_t seconds, int64_t nanoseconds) nogil

cdef double JOIN_S = 0.2


@cython.final
cdef class ReaderEngine:
    """Give all reads to a reader at once; a thread that waits takes in what has arrived.

    Parameters
    ----------
    reader : Reader
        Reader of the store's files, in their order. Closed with this.
    store : FileStore
    num_threads : int
        Threads that read, if there is no io_uring; with it, one thread or none:
        it takes part when there is more to read than twice the queue takes.
    fills : bool, default False
        Have these threads bring experts into compute form, too; else callers do that.

    Raises
    ------
    ConfigError
        If the store does not say where experts lie.
    MoeCacheError
        If the system has no thread to give.
    """

    cdef public object _reader, _store
    cdef object _files
    cdef list _modified, _threads
    cdef readonly bint reads_in_submit, fills

    def __cinit__(self, reader, store, Py_ssize_t num_threads, *, bint fills=False):
        if not isinstance(store, FileStore):
            raise ConfigError(f"a {type(store).__name__} has no files that a reader could read")
        self._reader = reader
        self._store = store
        # Open until the last read is back.
        self._files = store.files
        self._modified = [divmod(file.version.modified_ns, 10**9) for file in self._files]
        self.fills = True
        # The kernel copies what is in the page cache when it is asked to.
        self.reads_in_submit = reader.engine == "io_uring" and not reader.direct
        if reader.engine == "io_uring":
            num_threads = min(num_threads, 1)
        self._threads = []
        serve = partial(reader.serve, fills=fills)
        self._threads += start_threads(serve, num_threads, lambda: reader.close(0))

    @property
    def quantum_bytes(self):
        """Bytes that the kernel has at most: a demand goes before the rest."""
        return self._reader.depth * self._reader.piece_bytes

    @property
    def epoch(self):
        """Number of calls of `announce` so far."""
        return self._reader.epoch

    def submit(self, list reads not None, *, bint deferred=False):
        """Hand reads to the reader, all of them at once."""
        runs = self._store.runs
        cdef list loads = [
            (one, runs(one.layer, one.expert), one.parts, one.fills) for one in reads
        ]
        try:
            self._reader.submit(loads, deferred=deferred)
        finally:
            if not loads:
                reads.clear()

    def hasten(self, read):
        """Let a deferred read go with the urgent ones."""
        self._reader.hasten(read)

    def cancel(self, read):
        """Drop the part of a deferred read that has not reached the kernel."""
        self._reader.cancel(read)

    def poll(self):
        """Take in what the kernel has finished; return whether a read is over."""
        return self._reader.poll()

    def wait(self, int64_t seen):
        """Read, or wait in the kernel."""
        return self._reader.wait(seen)

    def take(self, list done not None):
        """Append (read, error) of one that is over to `done`, if there is one."""
        cdef list taken = []
        cdef bint known
        try:
            self._reader.take(taken)
        finally:
            for read, failure in taken:
                known, error = False, None
                try:
                    error = self._outcome(read, failure)
                    known = True
                finally:
                    done.append((read, error if known else interrupted(read)))

    def announce(self):
        """Make every `wait` return."""
        self._reader.announce()

    def close(self, double timeout_s):
        """Drop what has not reached the kernel, and wait for the rest."""
        drained = self._reader.close(timeout_s)
        num_stuck = 0 if drained else self._reader.num_in_flight
        join_threads(self._threads, JOIN_S)
        if drained:
            self._files = ()
        return num_stuck

    cdef _outcome(self, read, tuple failure):
        """Return the error of a read that is over, or None."""
        if failure is not None and failure[0] == EILSEQ:
            read.is_wrong, failure = True, None
        if failure is None:
            try:
                last = -1
                for run in self._store.runs(read.layer, read.expert):
                    if run[0] != last:
                        last = run[0]
                        self._check_unchanged(last)
            except Exception as error:  # a waiting step raises it
                return error.with_traceback(None)
            return None
        reason, file, offset = failure
        if reason == ECANCELED:
            return ReadCancelledError("the read was taken back")
        files = self._files
        if file >= len(files):
            return ReadCancelledError("the engine is closed")
        return files[file].failure(
            reason,
            offset,
            f"expert {read.expert} of layer {read.layer}",
            self._store.layout.expert_bytes(read.layer),
        )

    cdef int _check_unchanged(self, Py_ssize_t number) except -1:
        cdef int64_t seconds, nanoseconds
        cdef int descriptor
        cdef bint was_modified
        files = self._files  # another thread may close this
        if number >= len(files):
            raise ReadCancelledError("the engine is closed")
        file = files[number]
        seconds, nanoseconds = self._modified[number]
        descriptor = file.descriptor
        with nogil:
            was_modified = mc_was_modified(descriptor, seconds, nanoseconds)
        if was_modified:
            file.check_unchanged()
        return 0
