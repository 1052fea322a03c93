"""Attention of a prompt's page, where its tensors lie, on the CPU and without the GIL."""

from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memset

from moecache.kernels._jobs cimport (
    MC_MOST_WIDTH,
    MC_X_BF16,
    MC_X_F32,
    mc_page_item,
    mc_attending,
)
from moecache.kernels._processor cimport level_in_use, run_items

# The widest query, key or value.
MOST_WIDTH = MC_MOST_WIDTH
# Queries times heads that meet keys once these are in order: of fewer, that order is what costs.
cdef int64_t ROWS = 192


def attend(
    *, queries, keys, values, out, mask, int64_t num_queries, int64_t num_keys, int64_t num_heads,
    int64_t num_kv_heads, int64_t width, int64_t value_width, str kind, float scale
):
    """Write the attention of a page's queries.

    Parameters
    ----------
    queries, keys, values : (int, int, int)
        Address, bytes from a position to the next, and from a head to the next; numbers of a head
        are side by side.
    out : (int, int)
        Address, and bytes from a position to the next, of [num_queries, num_heads, value_width].
    mask : (int, int) or None
        Address, and bytes from a query to the next, of bool [num_queries, num_keys]: what is seen.
        `None`: the last query is of the last position, and each sees those up to its own.
    num_queries, num_keys, num_heads, num_kv_heads, width, value_width : int
        `num_heads` is a multiple of `num_kv_heads`; no width is above `MOST_WIDTH`.
    kind : {"f32", "bf16"}
        The type of all numbers.
    scale : float
        The products are multiplied by it.

    Raises
    ------
    ValueError
        If the sizes do not fit together.
    MemoryError
        If there is none for keys and values in the order that they are multiplied in.
    """
    cdef mc_attending job
    if min(num_queries, num_keys, num_heads, num_kv_heads, width, value_width) < 1:
        raise ValueError("a page has one query, key, head and number of each at least")
    if num_heads % num_kv_heads or max(width, value_width) > MC_MOST_WIDTH:
        raise ValueError(
            f"{num_heads} heads of {num_kv_heads}, {width} and {value_width} wide, have no kernel"
        )
    if mask is None and num_keys < num_queries:
        raise ValueError(f"{num_queries} queries are of {num_keys} positions; give a mask")
    memset(&job, 0, sizeof(job))
    job.level = level_in_use()
    cdef uintptr_t address
    address, job.page.query_step, job.page.query_head_step = queries
    job.page.queries = <const uint8_t *>address
    address, job.page.key_step, job.page.key_head_step = keys
    job.page.keys = <const uint8_t *>address
    address, job.page.value_step, job.page.value_head_step = values
    job.page.values = <const uint8_t *>address
    address, job.page.out_step = out
    job.page.out = <uint8_t *>address
    if mask is not None:
        address, job.page.mask_step = mask
        job.page.mask = <const uint8_t *>address
    job.page.num_queries, job.page.num_keys = num_queries, num_keys
    job.page.num_heads, job.page.num_kv_heads = num_heads, num_kv_heads
    job.page.width, job.page.value_width = width, value_width
    job.page.type = MC_X_F32 if kind == "f32" else MC_X_BF16
    job.page.scale = scale
    job.per_item = max(1, ROWS // (num_heads // num_kv_heads))
    job.items_per_head = (num_queries + job.per_item - 1) // job.per_item
    cdef int64_t num_items = job.items_per_head * num_kv_heads
    # Some four times as long as weights of as many bytes take: by pairs of a query and a key.
    cdef int64_t nbytes = num_queries * num_keys * num_heads * (width + value_width) // 8
    with nogil:
        run_items(mc_page_item, &job, num_items, nbytes)
    if job.has_failed:
        raise MemoryError(f"no memory for the attention of {num_queries} queries")
