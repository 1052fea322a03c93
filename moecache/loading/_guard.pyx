"""Guard: a resource that is given back in every case."""

cimport cython


@cython.final
cdef class Guard:
    """Put an item into a queue when this is closed, or when the last reference to it goes.

    An interrupt may come between any two lines of Python, also in a `finally` or a
    finaliser, and the rest of that is left out then. This class has no line of Python: the
    item reaches the queue, once, however often interrupts come. Let `close` be the
    first call of a `finally`: CPython looks at signals after calls, not before.

    Parameters
    ----------
    queue : queue.SimpleQueue
        Written in C, too: its `put` neither blocks nor runs Python.
    item : object

    Attributes
    ----------
    item : object
        The item that is put; may be replaced until then.
    """

    cdef object _queue
    cdef public object item

    def __cinit__(self, queue not None, item):
        self._queue = queue
        self.item = item

    def close(self):
        """Put the item now; a second call does nothing."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(self.item)

    def __del__(self):
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(self.item)
