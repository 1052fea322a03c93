"""Linear attention, state spaces and convolutions: rows over the states that a cache holds."""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memmove, memset

from moecache.decoding._bound cimport Layer, Linear, Norm
from moecache.decoding._context cimport Context
from moecache.decoding._linear cimport (
    mc_convolve_item,
    mc_convolve_items,
    mc_delta_item,
    mc_linear,
    mc_multiply_rows,
    mc_scan_item,
)
from moecache.decoding._workspace cimport Workspace, norm_rows
from moecache.kernels._jobs cimport MC_F32
from moecache.kernels._processor cimport level_in_use, run_items


cdef void recur(Workspace w, Context c, int64_t at) noexcept nogil:
    """Write what a layer with states makes of `normed` to `mixed`, and the next states."""
    cdef const Layer *layer = &w.bound.layers[at]
    cdef mc_linear job = _convolution(w, c, at)
    if layer.is_short:
        _short(w, c, layer, &job)
    elif layer.is_scan:
        _space(w, c, layer, &job)
    elif layer.by_channel:
        _delta(w, c, layer, &job)
    else:
        _linear(w, c, layer, &job)


cdef mc_linear _convolution(Workspace w, Context c, int64_t at) noexcept nogil:
    """Return the fields that all layers with a convolution have in common."""
    cdef const Layer *layer = &w.bound.layers[at]
    cdef mc_linear job
    memset(&job, 0, sizeof(job))
    job.level, job.stretches = level_in_use(), c.stretches + at * w.max_rows
    job.num_keys, job.num_heads = layer.num_keys, layer.num_heads
    job.width, job.value_width = layer.width, layer.value_width
    job.is_tiled, job.is_scan = layer.is_tiled, layer.is_scan
    job.by_channel, job.bound = layer.by_channel, layer.bound
    job.kernel, job.channels = layer.kernel, layer.channels
    job.conv, job.conv_bias = layer.conv, layer.conv_bias
    job.has_activation = not layer.is_short
    job.rates, job.steps, job.skips = layer.rates, layer.steps, layer.skips
    job.mixed, job.out = w.queries, w.mixed
    return job


cdef void _convolve(Workspace w, Context c, mc_linear *job) noexcept nogil:
    run_items(
        mc_convolve_item, job, c.num_sequences * mc_convolve_items(job),
        4 * w.num_rows * job.channels * job.kernel
    )


cdef void _linear(
    Workspace w, Context c, const Layer *layer, mc_linear *job
) noexcept nogil:
    """Write what linear attention makes of the rows to `mixed`."""
    cdef int64_t num = w.num_rows
    w.multiply(&layer.query, w.normed, num, w.queries)
    if layer.gates.is_there:
        w.multiply(&layer.gates, w.normed, num, w.gates, &layer.query)
    else:
        _part_mixed(w, layer)
        job.mixed = w.latents
    w.multiply(&layer.value, w.normed, num, w.values)
    if layer.key.is_there:
        w.multiply(&layer.key, w.normed, num, w.keys, &layer.value)
    else:
        _part_shares(w, layer)
    job.decays, job.shares = w.keys, w.values
    _run_delta(w, c, layer, job)


cdef void _delta(
    Workspace w, Context c, const Layer *layer, mc_linear *job
) noexcept nogil:
    """Write what linear attention with a decay for each number of a key makes to `mixed`."""
    cdef int64_t num = w.num_rows
    w.multiply(&layer.query, w.normed, num, w.queries)
    w.multiply(&layer.key, w.normed, num, w.keys, &layer.query)
    w.multiply(&layer.value, w.normed, num, w.values, &layer.key)
    _join(w, layer)
    w.multiply(&layer.share, w.normed, num, w.values, &layer.value)
    _chain(w, &layer.gate_low, &layer.gates, w.gates)
    _chain(w, &layer.decay_low, &layer.decay, w.keys)
    job.mixed, job.decays, job.shares = w.latents, w.keys, w.values
    _run_delta(w, c, layer, job)


cdef void _chain(
    Workspace w, const Linear *low, const Linear *linear, float *out
) noexcept nogil:
    """Write a product of the rows, or of what another one makes of them."""
    if low.is_there:
        w.multiply(low, w.normed, w.num_rows, w.wide)
        w.multiply(linear, w.wide, w.num_rows, out)
    else:
        w.multiply(linear, w.normed, w.num_rows, out)


cdef void _join(Workspace w, const Layer *layer) noexcept nogil:
    """Write a row's queries, keys and values one behind the other."""
    cdef int64_t row, keys = layer.query.matrix.rows, values = layer.value.matrix.rows
    cdef float *to = w.latents
    for row in range(w.num_rows):
        memcpy(to, w.queries + row * keys, <size_t>keys * sizeof(float))
        memcpy(to + keys, w.keys + row * keys, <size_t>keys * sizeof(float))
        memcpy(to + 2 * keys, w.values + row * values, <size_t>values * sizeof(float))
        to += layer.channels


cdef void _run_delta(
    Workspace w, Context c, const Layer *layer, mc_linear *job
) noexcept nogil:
    """Have rows go through the convolution, and through the heads' states."""
    cdef int64_t num = w.num_rows, values = layer.num_heads * layer.value_width
    job.mixed_step = layer.channels
    job.keys_at, job.values_at = layer.num_keys * layer.width, layer.channels - values
    job.norm, job.norm_type = layer.query_norm.weight, layer.query_norm.type
    job.epsilon = layer.query_norm.epsilon
    job.gates, job.gate_step, job.share_step = w.gates, values, layer.num_heads
    _convolve(w, c, job)
    # A state is read twice for a row, and written.
    run_items(
        mc_delta_item, job, c.num_sequences * layer.num_keys, 3 * 4 * num * values * layer.width
    )


cdef void _part_mixed(Workspace w, const Layer *layer) noexcept nogil:
    """Part what lies key by key: queries, keys and values, and the values' gates."""
    cdef int64_t row, key, width = layer.width
    cdef int64_t values = layer.num_heads // layer.num_keys * layer.value_width
    cdef int64_t keys = layer.num_keys * width
    cdef const float *both = w.queries
    cdef float *to = w.latents
    for row in range(w.num_rows):
        for key in range(layer.num_keys):
            memcpy(to + key * width, both, <size_t>width * sizeof(float))
            both += width
            memcpy(to + keys + key * width, both, <size_t>width * sizeof(float))
            both += width
            memcpy(to + 2 * keys + key * values, both, <size_t>values * sizeof(float))
            both += values
            memcpy(
                w.gates + (row * layer.num_keys + key) * values, both,
                <size_t>values * sizeof(float)
            )
            both += values
        to += layer.channels


cdef void _part_shares(Workspace w, const Layer *layer) noexcept nogil:
    """Part shares and decays, which lie one behind the other, key by key."""
    cdef int64_t i, num = layer.num_heads // layer.num_keys
    cdef const float *both = w.values
    for i in range(w.num_rows * layer.num_keys):
        memmove(w.values + i * num, both, <size_t>num * sizeof(float))
        memcpy(w.keys + i * num, both + num, <size_t>num * sizeof(float))
        both += 2 * num


cdef void _space(Workspace w, Context c, const Layer *layer, mc_linear *job) noexcept nogil:
    """Write what a state space makes of the rows to `mixed`."""
    cdef int64_t num = w.num_rows, values = layer.num_heads * layer.value_width, i
    cdef int64_t all = layer.query.matrix.rows, width = layer.query_norm.width
    cdef int64_t size = 4 if layer.query_norm.type == MC_F32 else 2
    cdef Norm norm = layer.query_norm
    w.multiply(&layer.query, w.normed, num, w.queries)
    job.gates, job.mixed = w.queries, w.queries + values
    job.shares = w.queries + values + layer.channels
    job.gate_step, job.mixed_step, job.share_step = all, all, all
    job.keys_at = values
    job.queries_at = values + layer.num_keys * layer.width
    _convolve(w, c, job)
    run_items(
        mc_scan_item, job, c.num_sequences * layer.num_heads, 2 * 4 * num * values * layer.width
    )
    for i in range(layer.num_norms):
        norm.weight = layer.query_norm.weight + i * width * size
        norm_rows(&norm, w.mixed + i * width, w.mixed + i * width, num, values)


cdef void _short(Workspace w, Context c, const Layer *layer, mc_linear *job) noexcept nogil:
    """Write what a convolution between two gates makes of the rows to `mixed`."""
    cdef int64_t hidden = w.hidden_size, num = w.num_rows, all = 3 * hidden
    cdef float *x = w.queries + 2 * hidden
    w.multiply(&layer.query, w.normed, num, w.queries)
    mc_multiply_rows(x, w.queries, all, x, all, num, hidden)
    job.mixed, job.mixed_step = x, all
    _convolve(w, c, job)
    mc_multiply_rows(x, w.queries + hidden, all, w.mixed, hidden, num, hidden)
