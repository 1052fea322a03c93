"""What computes: a level of the processor's instructions, and threads."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uintptr_t

from moecache.kernels._jobs cimport (
    MC_X_F32,
    mc_conversion,
    mc_expansion,
    mc_experts,
    mc_level,
    mc_matrix,
    mc_product,
    mc_sum,
    mc_work,
)
from moecache.kernels._products cimport (
    MC_MAX_LEVELS,
    mc_after_fork,
    mc_combine,
    mc_compute_experts,
    mc_convert_all,
    mc_expand,
    mc_is_late,
    mc_levels,
    mc_now_ns,
    mc_products,
    mc_share,
    mc_share_from,
    mc_shared_bytes,
    mc_tiles_are_refused,
    mc_use_level,
    mc_waking_bytes,
)

from moecache.errors import ConfigError
from moecache.units import whole_number


cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)


cdef const mc_level *_levels[MC_MAX_LEVELS]
cdef int _num_levels = mc_levels(_levels)
cdef const mc_level *_level = _levels[_num_levels - 1]
mc_use_level(_level)
cdef int _num_threads = 1
pthread_atfork(NULL, NULL, mc_after_fork)


def levels():
    """Return the names of the levels that this processor has, the best one last."""
    return tuple((<bytes>_levels[i].name).decode() for i in range(_num_levels))


def level():
    """Return the name of the level in use."""
    return (<bytes>_level.name).decode()


def amx_is_refused():
    """Return whether the processor has AMX, and the operating system denies it to this process."""
    return bool(mc_tiles_are_refused)


def use_level(str name):
    """Compute with a level from now on; for tests, and to compare.

    Raises
    ------
    ConfigError
        If the processor does not have it.
    """
    global _level
    cdef int i
    for i in range(_num_levels):
        if (<bytes>_levels[i].name).decode() == name:
            _level = _levels[i]
            mc_use_level(_level)
            return
    raise ConfigError(f"level {name!r} is not one of {', '.join(levels())}")


def num_threads():
    """Return how many threads compute."""
    return _num_threads


def use_threads(number):
    """Compute with so many threads from now on, the calling one included.

    Raises
    ------
    ConfigError
        If that is no integer between 1 and 256.
    """
    global _num_threads
    _num_threads = whole_number(number, "threads", 1, 256)


def share_from(int64_t shared_bytes, int64_t waking_bytes):
    """Have threads share work from so many bytes of weights on; for tests.

    Parameters
    ----------
    shared_bytes, waking_bytes : int
        If one of them is awake, and if all sleep.

    Returns
    -------
    (int, int)
        What it was.
    """
    before = mc_shared_bytes, mc_waking_bytes
    mc_share_from(shared_bytes, waking_bytes)
    return before


def is_late(int64_t waited_ns, int64_t own_ns, int64_t own_items):
    """Return whether a wait for other threads means that they lost their processors.

    Then a job's thread works alone for 20 ms, and twice as long each time, up to 320 ms.

    Parameters
    ----------
    waited_ns : int
        From the end of the caller's own items to the end of the others'.
    own_ns, own_items : int
        What the caller did, and how long that took.
    """
    return mc_is_late(waited_ns, own_ns, own_items) != 0


def read_all(uintptr_t address, int64_t nbytes):
    """Read memory and do nothing with it, by the thread that calls; to be timed."""
    cdef uint32_t found
    with nogil:
        found = _level.read(<const uint8_t *>address, nbytes)
    return found


cdef const mc_level *level_in_use() noexcept nogil:
    return _level


cdef void convert_rows(
    const float *rows, int64_t step, int64_t num, int wanted, const mc_matrix *matrix,
    uint8_t *out, int64_t out_bytes
) noexcept nogil:
    cdef mc_conversion conversion
    conversion.level, conversion.matrix = _level, matrix
    conversion.inputs, conversion.row_bytes = <const uint8_t *>rows, step * 4
    conversion.num, conversion.given, conversion.wanted = num, MC_X_F32, wanted
    conversion.out, conversion.out_bytes = out, out_bytes
    run_conversion(&conversion)


cdef void run_conversion(mc_conversion *conversion) noexcept nogil:
    mc_convert_all(conversion, _num_threads)


cdef void run_expansion(mc_expansion *expansion) noexcept nogil:
    mc_expand(expansion, _num_threads)


cdef void run_product(mc_product *product) noexcept nogil:
    mc_products(product, _num_threads)


cdef void run_experts(mc_experts *experts) noexcept nogil:
    mc_compute_experts(experts, _num_threads)


cdef void run_sum(mc_sum *sum) noexcept nogil:
    mc_combine(sum, _num_threads)


cdef void run_items(mc_work work, void *job, int64_t num_items, int64_t num_bytes) noexcept nogil:
    mc_share(_num_threads, work, job, num_items, num_bytes)


cdef int64_t now_ns() noexcept nogil:
    return mc_now_ns()
