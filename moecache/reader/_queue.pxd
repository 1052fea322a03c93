"""Declarations of what is beside this file."""

from libc.stdint cimport int64_t

from moecache.reader._pieces cimport Piece

cdef struct Pieces:
    # First in, first out.
    Piece *first
    Piece *last  # if there is a first

cdef struct Queue:
    # Pieces that are not being read: those that somebody waits for, then the deferred ones.
    Pieces urgent
    Pieces deferred
    int num
    int num_tried  # that a thread is to copy out of the page cache

cdef void append(Pieces *line, Piece *chain) noexcept nogil
cdef Piece *shift(Pieces *line) noexcept nogil
cdef void push(Queue *queue, Piece *chain, bint deferred) noexcept nogil
cdef void put_back(Queue *queue, Piece *piece) noexcept nogil
cdef Piece *head(const Queue *queue) noexcept nogil
cdef Piece *pop(Queue *queue) noexcept nogil
cdef void make_urgent(Queue *queue, int64_t token) noexcept nogil
cdef Piece *withdraw(Queue *queue, int64_t token) noexcept nogil
