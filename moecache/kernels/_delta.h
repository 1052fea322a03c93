/* Linear attention by the gated delta rule: included once for each level. Yang et al., Gated Delta Networks, 2024. */

/* Registers of columns of a state that go through its rows side by side. */
#define COLUMNS (LANES == 16 ? 4 : 2)

/* The rule for `registers` times LANES columns of a head's state, or for the `rest` of them, row after row. */
INLINE void LEVEL(delta_few)(const mc_delta *d, int64_t column, int registers, int64_t rest)
{
    size_t size = (size_t)(rest ? rest : LANES) * 4;
    const float *from = d->state + column;
    float *to = d->next + column;
    for (int64_t row = 0; row < d->num; row++, from = to) {
        const float *key = d->keys + row * d->key_step, *query = d->queries + row * d->key_step;
        vf decay = LEVEL(all)(d->decays[row]), share = LEVEL(all)(d->shares[row]);
        vf held[COLUMNS] = {{0}}, sums[COLUMNS] = {{0}}, change[COLUMNS] = {{0}};
        for (int64_t k = 0; k < d->width; k++) {
            vf own = LEVEL(all)(key[k]);
            _Pragma("GCC unroll 4") for (int i = 0; i < registers; i++) {
                memcpy(&held[i], from + k * d->value_width + i * LANES, size);
                sums[i] = LEVEL(fma)(held[i], own, sums[i]);
            }
        }
        /* What is held for the key, once it has decayed, goes a part of the way to the value. */
        for (int i = 0; i < registers; i++) {
            memcpy(&change[i], d->values + row * d->value_step + column + i * LANES, size);
            change[i] = (change[i] - sums[i] * decay) * share;
            sums[i] = (vf){0};
        }
        for (int64_t k = 0; k < d->width; k++) {
            vf own = LEVEL(all)(key[k]), asked = LEVEL(all)(query[k]);
            _Pragma("GCC unroll 4") for (int i = 0; i < registers; i++) {
                memcpy(&held[i], from + k * d->value_width + i * LANES, size);
                held[i] = LEVEL(fma)(change[i], own, held[i] * decay);
                memcpy(to + k * d->value_width + i * LANES, &held[i], size);
                sums[i] = LEVEL(fma)(held[i], asked, sums[i]);
            }
        }
        for (int i = 0; i < registers; i++)
            memcpy(d->out + row * d->value_step + column + i * LANES, &sums[i], size);
    }
}

/* Rows' queries of a state that each row's key and value change first. A row's bits depend on it and on those before
 * it alone. `out` may be `values`. */
static void LEVEL(delta)(const mc_delta *d)
{
    int64_t c = 0;
    for (; c + COLUMNS * LANES <= d->value_width; c += COLUMNS * LANES)
        LEVEL(delta_few)(d, c, COLUMNS, 0);
    for (; c + LANES <= d->value_width; c += LANES)
        LEVEL(delta_few)(d, c, 1, 0);
    if (c < d->value_width)
        LEVEL(delta_few)(d, c, 1, d->value_width - c);
}
#undef COLUMNS
