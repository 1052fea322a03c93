"""Pieces that wait to be read, in the order in which that begins."""

from libc.stdint cimport int64_t

from moecache.reader._pieces cimport Piece


cdef void append(Pieces *line, Piece *chain) noexcept nogil:
    """Add a chain of pieces at the end."""
    if chain == NULL:
        return
    if line.first == NULL:
        line.first = chain
    else:
        line.last.next = chain
    while chain.next != NULL:
        chain = chain.next
    line.last = chain


cdef Piece *shift(Pieces *line) noexcept nogil:
    """Remove the first piece; NULL if there is none."""
    cdef Piece *piece = line.first
    if piece != NULL:
        line.first = piece.next
        piece.next = NULL
    return piece


cdef void push(Queue *queue, Piece *chain, bint deferred) noexcept nogil:
    """Add a chain of pieces behind all others or, if it is urgent, before what is deferred."""
    cdef Piece *piece = chain
    while piece != NULL:
        queue.num += 1
        queue.num_tried += piece.is_tried
        piece = piece.next
    append(&queue.deferred if deferred else &queue.urgent, chain)


cdef void put_back(Queue *queue, Piece *piece) noexcept nogil:
    """Put a piece in front: it has its buffer already."""
    piece.next = queue.urgent.first
    if queue.urgent.first == NULL:
        queue.urgent.last = piece
    queue.urgent.first = piece
    queue.num += 1
    queue.num_tried += piece.is_tried


cdef Piece *head(const Queue *queue) noexcept nogil:
    """Return the piece that is next; NULL if there is none."""
    return queue.urgent.first if queue.urgent.first != NULL else queue.deferred.first


cdef Piece *pop(Queue *queue) noexcept nogil:
    """Remove the piece that is next; NULL if there is none."""
    cdef Piece *piece = shift(&queue.urgent)
    if piece == NULL:
        piece = shift(&queue.deferred)
    if piece != NULL:
        _count_out(queue, piece)
    return piece


cdef void make_urgent(Queue *queue, int64_t token) noexcept nogil:
    """Put the deferred pieces of one request behind the urgent ones."""
    push(queue, withdraw(queue, token), False)


cdef Piece *withdraw(Queue *queue, int64_t token) noexcept nogil:
    """Remove the deferred pieces of one request; return them as a chain."""
    cdef Pieces found = Pieces(NULL, NULL), kept = Pieces(NULL, NULL)
    cdef Piece *piece = shift(&queue.deferred)
    while piece != NULL:
        if _is_of(piece, token):
            _count_out(queue, piece)
            append(&found, piece)
        else:
            append(&kept, piece)
        piece = shift(&queue.deferred)
    queue.deferred = kept
    return found.first


cdef void _count_out(Queue *queue, const Piece *piece) noexcept nogil:
    queue.num -= 1
    queue.num_tried -= piece.is_tried


cdef bint _is_of(const Piece *piece, int64_t token) noexcept nogil:
    """Whether a read is of one request alone: those submitted together may share one."""
    cdef int i
    for i in range(piece.num_ranges):
        if piece.ranges[i].load.token != token:
            return False
    return True
