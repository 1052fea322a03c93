"""Files by number: each is read through the page cache or, where its system can, around it."""

from libc.stdlib cimport calloc
from posix.unistd cimport close

cdef extern from "_files.h" nogil:
    int mc_open_direct(int descriptor)
    size_t mc_direct_alignment(int descriptor)


cdef int open_files(Files *files, descriptors, bint direct) except -1:
    """Take descriptors, which stay the caller's; free `files.each` after `close_files`."""
    cdef int i
    files.num, files.alignment = len(descriptors), 1
    files.each = <File *>calloc(files.num + 1, sizeof(File))
    if files.each == NULL:
        raise MemoryError("no memory for a reader's files")
    for i in range(files.num):
        files.each[i] = File(-1, -1, 1)
    for i in range(files.num):
        files.each[i].cached = descriptors[i]
        if direct:
            _open_direct(&files.each[i])
            files.alignment = max(files.alignment, files.each[i].alignment)
    return 0


cdef int num_direct(const Files *files) noexcept nogil:
    """Count the files that are read around the page cache."""
    cdef int i, num = 0
    for i in range(files.num):
        num += files.each[i].alignment > 1
    return num


cdef void close_files(Files *files) noexcept nogil:
    """Close the descriptors that read around the page cache; a second call does nothing."""
    cdef int i
    if files.each == NULL:
        return
    for i in range(files.num):
        if files.each[i].direct >= 0:
            close(files.each[i].direct)
            files.each[i].direct = -1


cdef void _open_direct(File *file) noexcept nogil:
    cdef int descriptor = mc_open_direct(file.cached)
    cdef size_t alignment
    if descriptor < 0:
        return
    alignment = mc_direct_alignment(descriptor)
    if alignment == 0:
        close(descriptor)
        return
    file.direct, file.alignment = descriptor, alignment
