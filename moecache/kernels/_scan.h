/* Mamba 2's state spaces: included once for each level, behind _attention.h. Dao and Gu, Transformers are SSMs, 2024.
 *
 * A head's state is [value_width, width]: a row for each number of a value. */

/* Up to LANES rows of a state, from row `first` on, go through some tokens, one after the other. */
INLINE void LEVEL(scan_few)(const mc_delta *d, int64_t first, int there)
{
    int64_t whole = d->width / LANES * LANES, rest = d->width - whole;
    const float *from = d->state + first * d->width;
    float *to = d->next + first * d->width;
    for (int64_t row = 0; row < d->num; row++, from = to) {
        const float *key = d->keys + row * d->key_step, *query = d->queries + row * d->key_step;
        float *out = d->out + row * d->value_step + first;
        vf decay = LEVEL(all)(d->decays[row]), sums[LANES] = {{0}};
        for (int i = 0; i < there; i++) {
            vf value = LEVEL(all)(d->values[row * d->value_step + first + i] * d->shares[row]), held;
            for (int64_t k = 0; k < whole; k += LANES) {
                memcpy(&held, from + i * d->width + k, sizeof held);
                held = LEVEL(fma)(value, LEVEL(load)((const uint8_t *)(key + k), MC_F32), held * decay);
                memcpy(to + i * d->width + k, &held, sizeof held);
                sums[i] = LEVEL(fma)(held, LEVEL(load)((const uint8_t *)(query + k), MC_F32), sums[i]);
            }
            if (rest) {
                vf own = LEVEL(load_tail)((const uint8_t *)(key + whole), rest, MC_F32);
                held = LEVEL(load_tail)((const uint8_t *)(from + i * d->width + whole), rest, MC_F32);
                held = LEVEL(fma)(value, own, held * decay);
                memcpy(to + i * d->width + whole, &held, (size_t)rest * 4);
                sums[i] = LEVEL(fma)(
                    held, LEVEL(load_tail)((const uint8_t *)(query + whole), rest, MC_F32), sums[i]);
            }
        }
        vf all = LEVEL(totals)(sums);
        memcpy(out, &all, (size_t)there * 4);
    }
}

/* Rows' queries of a state that each row changes first: what it holds decays, and the row's value times its share is
 * added for its key. A row's bits depend on it and on those before it alone. `out` may be `values`. */
static void LEVEL(scan)(const mc_delta *d)
{
    for (int64_t i = 0; i < d->value_width; i += LANES)
        LEVEL(scan_few)(d, i, d->value_width - i < LANES ? (int)(d->value_width - i) : LANES);
}
