/* Linear attention by the gated delta rule: included once for each level. Yang et al., Gated Delta Networks, 2024; with
 * a decay for each number of a key, Kimi Team, Kimi Linear, 2025. */

/* Registers of columns of a state that go through its rows side by side. */
#define COLUMNS (LANES == 16 ? 4 : 2)

/* The rule for `registers` times LANES columns of a head's state, or for the `rest` of them, row after row. */
INLINE void LEVEL(delta_few)(const mc_delta *d, int64_t column, int registers, int64_t rest, int by_channel)
{
    size_t size = (size_t)(rest ? rest : LANES) * 4;
    const float *from = d->state + column;
    float *to = d->next + column;
    for (int64_t row = 0; row < d->num; row++, from = to) {
        const float *key = d->keys + row * d->key_step, *query = d->queries + row * d->key_step;
        const float *decays = d->decays + row * (by_channel ? d->key_step : 1);
        const float *seen = by_channel ? d->faded + row * d->key_step : key;
        vf decay = LEVEL(all)(decays[0]), share = LEVEL(all)(d->shares[row]);
        vf held[COLUMNS] = {{0}}, sums[COLUMNS] = {{0}}, change[COLUMNS] = {{0}};
        for (int64_t k = 0; k < d->width; k++) {
            vf own = LEVEL(all)(seen[k]);
            _Pragma("GCC unroll 4") for (int i = 0; i < registers; i++) {
                memcpy(&held[i], from + k * d->value_width + i * LANES, size);
                sums[i] = LEVEL(fma)(held[i], own, sums[i]);
            }
        }
        /* What is held for the key, once it has decayed, goes a part of the way to the value. */
        for (int i = 0; i < registers; i++) {
            memcpy(&change[i], d->values + row * d->value_step + column + i * LANES, size);
            change[i] = (change[i] - (by_channel ? sums[i] : sums[i] * decay)) * share;
            sums[i] = (vf){0};
        }
        for (int64_t k = 0; k < d->width; k++) {
            vf own = LEVEL(all)(key[k]), asked = LEVEL(all)(query[k]);
            if (by_channel)
                decay = LEVEL(all)(decays[k]);
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

INLINE void LEVEL(delta_all)(const mc_delta *d, int by_channel)
{
    int64_t c = 0;
    for (; c + COLUMNS * LANES <= d->value_width; c += COLUMNS * LANES)
        LEVEL(delta_few)(d, c, COLUMNS, 0, by_channel);
    for (; c + LANES <= d->value_width; c += LANES)
        LEVEL(delta_few)(d, c, 1, 0, by_channel);
    if (c < d->value_width)
        LEVEL(delta_few)(d, c, 1, d->value_width - c, by_channel);
}

/* Rows' queries of a state that each row's key and value change first. A row's bits depend on it and on those before
 * it alone. `out` may be `values`. */
static void LEVEL(delta)(const mc_delta *d)
{
    if (d->faded)
        LEVEL(delta_all)(d, 1);
    else
        LEVEL(delta_all)(d, 0);
}

/* log(x) of finite x >= 1, within 2 units of the last place, and the same on every level: nothing is fused here.
 * Polynomial of degree 8 of what lies between sqrt(1/2) and sqrt(2) (Moshier's Cephes). */
INLINE vf LEVEL(log)(vf x)
{
    static const float terms[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                  -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    vi power = ((vi)x - 0x3f3504f3) >> 23;
    vf rest = (vf)((vi)x - (power << 23)) - 1.0f, twos = __builtin_convertvector(power, vf);
    vf value = LEVEL(all)(7.0376836292e-2f), square = rest * rest;
    for (int i = 0; i < 8; i++)
        value = value * rest + terms[i];
    value = value * rest * square + twos * -2.12194440e-4f;
    value = value + square * -0.5f;
    return (rest + value) + twos * 0.693359375f;
}

/* log(1 + exp(x)). Large values are their own, and what is no number stays none. */
INLINE vf LEVEL(soft)(vf x)
{
    vi stays = ~(vi)(x <= 20.0f);
    vf soft = LEVEL(log)(1.0f + LEVEL(exp)((vf)(~stays & (vi)x)));
    return (vf)((stays & (vi)x) | (~stays & (vi)soft));
}

/* x = log(1 + exp(x)); `num` is a multiple of 16. */
static void LEVEL(softplus)(float *x, int64_t num)
{
    for (int64_t i = 0; i < num; i += LANES) {
        vf value;
        memcpy(&value, x + i, sizeof value);
        value = LEVEL(soft)(value);
        memcpy(x + i, &value, sizeof value);
    }
}

/* x = exp(rate * softplus(x)), or, with a bound, exp(bound * sigmoid(-rate * x)); `num` is a multiple of 16. */
static void LEVEL(fade)(float *x, int64_t num, float rate, float bound)
{
    for (int64_t i = 0; i < num; i += LANES) {
        vf value;
        memcpy(&value, x + i, sizeof value);
        if (bound != 0)
            value = bound / (1.0f + LEVEL(exp)(value * rate));
        else
            value = LEVEL(soft)(value) * rate;
        value = LEVEL(exp)(value);
        memcpy(x + i, &value, sizeof value);
    }
}
#undef COLUMNS
