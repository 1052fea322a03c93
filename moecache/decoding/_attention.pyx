"""Attention of a call's rows to positions: grouped queries, and latents."""

from libc.stdint cimport int64_t
from libc.string cimport memcpy, memmove, memset

from moecache.decoding._bound cimport Layer, Linear
from moecache.decoding._context cimport Context
from moecache.decoding._recurrence cimport recur
from moecache.decoding._steps cimport (
    MC_MOST_TILE,
    mc_add,
    mc_attend_item,
    mc_clip,
    mc_heads,
    mc_held,
    mc_latent_item,
    mc_scale,
    mc_scale_parts,
    mc_store,
    mc_turn,
)
from moecache.decoding._workspace cimport (
    Workspace,
    norm_parts,
    norm_rows,
    num_parts,
    rows_at_once,
)
from moecache.kernels._jobs cimport MC_F32, mc_work
from moecache.kernels._processor cimport level_in_use, run_items


cdef extern from "<math.h>" nogil:
    float expf(float x)
    float floorf(float x)
    float log1pf(float x)


cdef void add_attention(Workspace w, Context c, int64_t at) noexcept nogil:
    """Add a layer's attention, of whatever kind, to `hidden`, and hold what later rows see."""
    cdef const Layer *layer = &w.bound.layers[at]
    cdef mc_heads heads
    if not layer.has_attention:
        return
    norm_rows(&layer.attention_norm, w.hidden, w.normed, w.num_rows, w.hidden_size)
    if layer.is_linear:
        recur(w, c, at)
    else:
        heads = _heads(w, c, at)
        if layer.is_latent:
            _latents(w, c, layer, &heads)
        else:
            _grouped(w, c, layer, &heads)
    w.multiply(&layer.out, w.mixed, w.num_rows, w.added)
    norm_parts(&layer.attention_out, w.added, w.num_rows * w.hidden_size)
    mc_add(w.hidden, w.added, w.num_rows * w.hidden_size, layer.residual)


cdef mc_heads _heads(Workspace w, Context c, int64_t at) noexcept nogil:
    """Return the fields that both kinds of attention have in common."""
    cdef const Layer *layer = &w.bound.layers[at]
    cdef int64_t size = 4 if c.types[at] == MC_F32 else 2
    cdef mc_heads heads
    memset(&heads, 0, sizeof(heads))
    heads.level, heads.held = level_in_use(), c.held + at * w.max_rows
    heads.first.key_step, heads.first.value_step = layer.held * size, layer.value_held * size
    heads.first.width, heads.first.value_width = layer.held, layer.value_held
    heads.first.type, heads.first.scale = c.types[at], layer.scale
    heads.num_heads, heads.num_kv_heads = layer.num_heads, layer.num_kv_heads
    heads.parts, heads.window = num_parts(layer), layer.window
    # Tokens of one text share keys; single tokens of several texts do not.
    heads.tile = MC_MOST_TILE if c.each > 1 else 1
    heads.sinks, heads.scores = layer.sinks, w.scores
    heads.most, heads.out = c.longest + c.each, w.mixed
    return heads


cdef void _grouped(
    Workspace w, Context c, const Layer *layer, mc_heads *heads
) noexcept nogil:
    """Write what grouped queries make of their positions to `mixed`."""
    cdef int64_t num = w.num_rows, i, j
    cdef int64_t queries = layer.num_heads * layer.width
    cdef int64_t wide = layer.num_kv_heads * layer.width
    cdef int64_t value_wide = layer.num_kv_heads * layer.value_width
    cdef const Linear *before = &layer.query
    w.multiply(&layer.query, w.normed, num, w.queries)
    if layer.gates.is_there:
        w.multiply(&layer.gates, w.normed, num, w.gates, before)
        before = &layer.gates
    elif layer.is_gated:
        _take_gates(w, layer)
    w.multiply(&layer.key, w.normed, num, w.keys, before)
    if layer.value.is_there:
        w.multiply(&layer.value, w.normed, num, w.values, &layer.key)
    else:
        memcpy(w.values, w.keys, <size_t>(num * value_wide) * sizeof(float))
    if layer.value_scale != 1:
        mc_scale(w.values, num * value_wide, layer.value_scale)
    norm_parts(&layer.value_norm, w.values, num * value_wide)
    if not layer.has_late_norms:
        norm_parts(&layer.query_norm, w.queries, num * queries)
        norm_parts(&layer.key_norm, w.keys, num * wide)
    if layer.clip > 0:
        mc_clip(w.queries, num * queries, layer.clip)
        mc_clip(w.keys, num * wide, layer.clip)
        mc_clip(w.values, num * value_wide, layer.clip)
    for i in range(num):
        for j in range(layer.num_heads):
            _turn(c, layer, i, w.queries + i * queries + j * layer.width)
        for j in range(layer.num_kv_heads):
            _turn(c, layer, i, w.keys + i * wide + j * layer.width)
    if layer.has_late_norms:
        norm_parts(&layer.query_norm, w.queries, num * queries)
        norm_parts(&layer.key_norm, w.keys, num * wide)
    if layer.floor > 0:
        for i in range(num):
            _scale_query(layer, &heads.held[i], w.queries + i * queries, queries)
    for i in range(num):
        for j in range(layer.num_kv_heads):
            _hold(
                heads, i, j, w.keys + i * wide + j * layer.width,
                w.values + i * value_wide + j * layer.value_width
            )
    heads.queries = w.queries
    _run_heads(mc_attend_item, heads, num)
    if layer.numbers_per_gate:
        heads.level.softplus(w.gates, (num * layer.gates.matrix.rows + 15) & ~15)
        mc_scale_parts(w.mixed, w.gates, num * queries, layer.numbers_per_gate)
    elif layer.is_gated:
        heads.level.gate(w.mixed, w.gates, (num * queries + 15) & ~15)


cdef void _take_gates(Workspace w, const Layer *layer) noexcept nogil:
    """Part queries and gates, which lie one behind the other, head by head."""
    cdef int64_t i, width = layer.width
    cdef const float *both = w.queries
    for i in range(w.num_rows * layer.num_heads):
        memcpy(w.gates + i * width, both + width, <size_t>width * sizeof(float))
        memmove(w.queries + i * width, both, <size_t>width * sizeof(float))
        both += 2 * width


cdef void _scale_query(
    const Layer *layer, const mc_held *held, float *query, int64_t num
) noexcept nogil:
    """Multiply a row's queries by the factor of its position."""
    cdef int64_t place = held.position - held.begin if layer.counts_own else held.position + 1
    cdef float times = floorf(<float>place / layer.floor)
    mc_scale(query, num, log1pf(times) * layer.temperature + 1.0)


cdef void _latents(
    Workspace w, Context c, const Layer *layer, mc_heads *heads
) noexcept nogil:
    """Write what queries make of their positions' latents to `mixed`."""
    cdef int64_t num = w.num_rows, i, j
    cdef int64_t rank = layer.held, more = layer.value_held, head = layer.width + more
    cdef int64_t low = layer.low.matrix.rows
    cdef const Linear *before = NULL
    cdef float *row
    if layer.low.is_there:
        w.multiply(&layer.low, w.normed, num, w.wide)
        norm_rows(&layer.low_norm, w.wide, w.wide, num, low)
        w.multiply(&layer.query, w.wide, num, w.queries)
    else:
        w.multiply(&layer.query, w.normed, num, w.queries)
        before = &layer.query
    w.multiply(&layer.key, w.normed, num, w.keys, before)
    norm_rows(&layer.key_norm, w.keys, w.keys, num, rank + more)
    for i in range(num):
        row = w.keys + i * (rank + more)
        _turn(c, layer, i, row + rank)
        _hold(heads, i, 0, row, row + rank)
        for j in range(layer.num_heads):
            _turn(c, layer, i, w.queries + (i * layer.num_heads + j) * head + layer.width)
        if layer.floor > 0:
            _scale_query(
                layer, &heads.held[i], w.queries + i * layer.num_heads * head,
                layer.num_heads * head
            )
    # Latents are keys and values; what the cache holds as values is the keys' second part.
    heads.first.more_step, heads.first.more_width = heads.first.value_step, more
    heads.first.value_step, heads.first.value_width = heads.first.key_step, rank
    heads.expand, heads.expand_type = layer.expand, layer.expand_type
    heads.content, heads.out_width = layer.width, layer.value_width
    heads.given, heads.queries = w.queries, w.latents
    _run_heads(mc_latent_item, heads, num)
    if layer.gates.is_there:
        w.multiply(&layer.gates, w.normed, num, w.gates)
        for i in range(num * layer.num_heads):
            mc_scale(
                w.mixed + i * layer.value_width, layer.value_width, 1.0 / (1.0 + expf(-w.gates[i]))
            )


cdef void _turn(Context c, const Layer *layer, int64_t row, float *head) noexcept nogil:
    cdef int64_t at = row * c.bound.num_angles + layer.first_angle
    mc_turn(head, c.cos + at, c.sin + at, layer.rotary_width, layer.pairs)


cdef void _hold(
    const mc_heads *heads, int64_t row, int64_t head, const float *key, const float *value
) noexcept nogil:
    """Write a row's key and value behind those that the cache holds."""
    cdef const mc_held *held = &heads.held[row]
    cdef int64_t place = held.position - held.dropped
    mc_store(key, heads.first.width, heads.first.type,
             held.keys + head * held.key_head + place * heads.first.key_step)
    mc_store(value, heads.first.value_width, heads.first.type,
             held.values + head * held.value_head + place * heads.first.value_step)


cdef void _run_heads(mc_work work, mc_heads *heads, int64_t num_rows) noexcept nogil:
    cdef int64_t i, seen, items = heads.num_kv_heads * heads.parts, first = 0, num
    cdef int64_t query = heads.num_heads * (heads.first.width + heads.first.more_width)
    cdef int64_t given = heads.num_heads * (heads.content + heads.first.more_width)
    cdef int64_t out = heads.num_heads * (heads.out_width or heads.first.value_width)
    # So many rows at once have scores.
    while first < num_rows:
        num, seen = min(rows_at_once(heads.parts), num_rows - first), 0
        heads.num_rows = num
        for i in range(num):
            seen += heads.held[i].position + 1 - heads.held[i].dropped
        # Exponentials and two passes: some four times as long as reading it.
        run_items(
            work, heads, (num + heads.tile - 1) // heads.tile * items,
            4 * items * seen * (heads.first.key_step + heads.first.value_step)
        )
        first += num
        heads.held += num
        heads.queries += num * query
        heads.out += num * out
        if heads.given != NULL:
            heads.given += num * given
