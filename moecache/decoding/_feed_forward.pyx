"""What follows attention: the router's choice, experts' sums, the feed-forward of all tokens."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache.decoding._bound cimport Layer
from moecache.decoding._steps cimport mc_add, mc_route, mc_scale, mc_softmax, mc_top
from moecache.decoding._workspace cimport ROWS, Workspace, norm_parts, norm_rows
from moecache.kernels._jobs cimport MC_X_F32, mc_sum
from moecache.kernels._processor cimport level_in_use, run_sum


cdef extern from "<math.h>" nogil:
    float expf(float x)
    float INFINITY


cdef void choose(Workspace w, const Layer *layer) noexcept nogil:
    """Write the norm before the feed-forward, and the router's choice.

    Where a score is on the experts' input, add the feed-forward of all tokens, and scale it.
    """
    cdef int64_t hidden = w.hidden_size, num = w.num_rows, experts = layer.choice.num_experts, i
    if not layer.has_forward:
        return
    norm_rows(&layer.forward_norm, w.hidden, w.normed, num, hidden)
    if not layer.has_experts:
        return
    if layer.is_beside:
        _forward(w, layer, w.beside)
        norm_parts(&layer.beside_out, w.beside, num * hidden)
        norm_rows(&layer.router_norm, w.hidden, w.normed, num, hidden)
    w.multiply(&layer.router, w.normed, num, w.logits)
    for i in range(num):
        mc_route(&layer.choice, w.logits + i * experts, w.scratch,
                 w.ids + i * w.top_k, w.weights + i * w.top_k)
    if layer.is_beside:
        norm_rows(&layer.experts_norm, w.hidden, w.normed, num, hidden)
    if layer.latent_down.is_there:
        w.multiply(&layer.latent_down, w.normed, num, w.given)
    if layer.scales_input:
        # First, as it takes the input without the score.
        _add_shared(w, layer)
        for i in range(num):
            mc_scale(w.normed + i * hidden, hidden, w.weights[i])
            w.weights[i] = 1.0


cdef void add_forward(Workspace w, const Layer *layer) noexcept nogil:
    """Add the experts' sum and the feed-forward of all tokens to `hidden`."""
    cdef int64_t num = w.num_rows, all = num * w.hidden_size
    cdef mc_sum job
    if layer.has_experts:
        job.rows = w.rows
        job.num_tokens, job.top_k, job.columns = num, w.top_k, w.expert_size
        job.weights.data, job.weights.type = <uint8_t *>w.weights, MC_X_F32
        job.weights.row_bytes = w.top_k * 4
        # What they were given is not looked at again.
        job.out.data = <uint8_t *>(w.given if layer.latent_up.is_there else w.added)
        job.out.type, job.out.row_bytes = MC_X_F32, w.expert_size * 4
        run_sum(&job)
        if layer.latent_up.is_there:
            w.multiply(&layer.latent_up, w.given, num, w.added)
        if layer.is_beside:
            norm_parts(&layer.experts_out, w.added, all)
            mc_add(w.added, w.beside, all, 1.0)
        norm_parts(&layer.forward_out, w.added, all)
        mc_add(w.hidden, w.added, all, layer.residual)
    if not layer.scales_input and not layer.is_beside:
        _add_shared(w, layer)
    if layer.factor != 1:
        mc_scale(w.hidden, all, layer.factor)


cdef void foresee(
    Workspace w, const Layer *layer, float *sums, int64_t n, int32_t *out
) noexcept nogil:
    """Write the n experts that a later layer's router finds likeliest; `sums` are zeros."""
    cdef int64_t i, j, num = w.num_rows, k = w.top_k, e = layer.choice.num_experts
    cdef int32_t ids[ROWS * 512]
    cdef float weights[512]
    cdef float *row
    cdef const float *given = w.normed
    if layer.is_beside:
        # What has a norm of its own is not what experts are given.
        norm_rows(&layer.router_norm, w.hidden, w.added, num, w.hidden_size)
        given = w.added
    w.multiply(&layer.router, given, num, w.logits)
    for i in range(num):
        row = w.logits + i * e
        for j in range(e):
            w.scratch[j] = row[j]
        if num > 1:
            mc_softmax(w.scratch, e)
        for j in range(e):
            sums[j] += w.scratch[j]
        mc_route(&layer.choice, row, w.scratch, ids + i * k, weights)
    if num * k <= n:
        for i in range(num * k):
            if ids[i] >= 0:
                sums[ids[i]] = INFINITY
    mc_top(sums, e, n, out)


cdef void _forward(Workspace w, const Layer *layer, float *out) noexcept nogil:
    """Write the feed-forward of all tokens."""
    cdef int64_t num = w.num_rows, whole = (num * layer.up.matrix.rows + 15) & ~15
    if layer.gate.is_there:
        w.multiply(&layer.gate, w.normed, num, w.wide)
        w.multiply(&layer.up, w.normed, num, w.second, &layer.gate)
        level_in_use().activate(w.wide, w.second, whole, &layer.activation)
    else:
        w.multiply(&layer.up, w.normed, num, w.wide)
        level_in_use().activate(w.wide, NULL, whole, &layer.activation)
    w.multiply(&layer.down, w.wide, num, out)


cdef void _add_shared(Workspace w, const Layer *layer) noexcept nogil:
    """Add the feed-forward of all tokens to `hidden`, if there is one."""
    cdef int64_t hidden = w.hidden_size, i
    cdef float weight
    if not layer.up.is_there:
        return
    _forward(w, layer, w.added)
    if not layer.has_experts:
        norm_parts(&layer.forward_out, w.added, w.num_rows * hidden)
    for i in range(w.num_rows):
        weight = 1.0
        if layer.weight.is_there:
            w.multiply(&layer.weight, w.normed + i * hidden, 1, &weight)
            weight = 1.0 / (1.0 + expf(-weight))
        mc_add(w.hidden + i * hidden, w.added + i * hidden, hidden, weight * layer.residual)
