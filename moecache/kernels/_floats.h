/* The tiles of one level for inputs of fp32, and activations: included once for each, behind `_vectors.h`.
 *
 * Rows of fp32, fp16 and bf16 lie as in the file: a register's lanes are columns, and a row's sum is
 * that of its lanes, by halves. The order of every sum depends on the number of columns alone. */

/* The last `num` columns of a row; the others are zero. */
INLINE vf LEVEL(load_tail)(const uint8_t *at, int64_t num, int format)
{
    uint8_t whole[LANES * 4] = {0};
    memcpy(whole, at, (size_t)(num * (format == MC_F32 ? 4 : 2)));
    return LEVEL(load)(whole, format);
}

/* Columns whose products are summed by themselves, in chains side by side: one alone waits for each of its own
 * additions. */
#define STRETCH 256
#define CHAINS 2
/* Inputs of a row at once. */
#define MOST_INPUTS 4

/* A row with `num` inputs. Rows come one after the other, as memory is read fastest: four at once take
 * twice as long on some processors (Zen 4). */
INLINE void LEVEL(row)(
    const uint8_t *row, const uint8_t *const *inputs, int num, int64_t columns, int format,
    float *out)
{
    int64_t bytes = format == MC_F32 ? 4 : 2, k = 0;
    vf sums[MOST_INPUTS] = {{0}};
#define STEP(chain, at, LOAD, ...)                                                          \
    {                                                                                       \
        vf values = LOAD(row + (at) * bytes, ##__VA_ARGS__, format);                        \
        for (int t = 0; t < num; t++)                                                       \
            chains[t][chain] = LEVEL(fma)(                                                  \
                values, LOAD(inputs[t] + (at) * 4, ##__VA_ARGS__, MC_F32), chains[t][chain]); \
    }
#define ADD_CHAINS                                                                          \
    for (int t = 0; t < num; t++)                                                           \
        sums[t] += chains[t][0] + chains[t][1];
    for (; k + STRETCH <= columns; k += STRETCH) {
        vf chains[MOST_INPUTS][CHAINS] = {{{0}}};
        for (int64_t j = k; j < k + STRETCH; j += 64) {
            for (int64_t line = 0; line < 64 * bytes; line += 64)
                MC_FETCH(row + j * bytes + line, num);
            UNROLL(8)
            for (int i = 0; i < 64; i += CHAINS * LANES)
                for (int chain = 0; chain < CHAINS; chain++)
                    STEP(chain, j + i + chain * LANES, LEVEL(load))
        }
        ADD_CHAINS
    }
    if (k < columns) {
        vf chains[MOST_INPUTS][CHAINS] = {{{0}}};
        for (; k + CHAINS * LANES <= columns; k += CHAINS * LANES) {
            MC_FETCH(row + k * bytes, num);
            for (int chain = 0; chain < CHAINS; chain++)
                STEP(chain, k + chain * LANES, LEVEL(load))
        }
        for (; k + LANES <= columns; k += LANES)
            STEP(0, k, LEVEL(load))
        if (k < columns)
            STEP(0, k, LEVEL(load_tail), columns - k)
        ADD_CHAINS
    }
#undef ADD_CHAINS
#undef STEP
    for (int t = 0; t < num; t++)
        out[t * MC_TILE] = LEVEL(total)(sums[t]);
}

/* 16 rows with `num` inputs. */
INLINE void LEVEL(dense)(
    const mc_matrix *matrix, int64_t row, const uint8_t *const *inputs, int num, float *out,
    int format)
{
    for (int r = 0; r < MC_TILE && row + r < matrix->rows; r++)
        LEVEL(row)(matrix->data + (row + r) * matrix->row_bytes, inputs, num, matrix->columns,
                   format, out + r);
}

MC_TILE_BY(LEVEL(tile_f32), LEVEL(dense), MOST_INPUTS, 2, MC_F32)
MC_TILE_BY(LEVEL(tile_f16), LEVEL(dense), MOST_INPUTS, 2, MC_F16)
MC_TILE_BY(LEVEL(tile_bf16), LEVEL(dense), MOST_INPUTS, 2, MC_BF16)

/* e^x, within 2 units of the last place, and the same on every level: nothing is fused here.
 * Polynomial of degree 6 (Cody and Waite's reduction by ln 2 in two parts). */
INLINE vf LEVEL(exp)(vf x)
{
    vf high = LEVEL(all)(88.5f), low = LEVEL(all)(-87.0f);
    vi is_nan = x != x, above = x > high, below = x < low;
    vf y = (vf)((above & (vi)high) | (below & (vi)low) | (~(above | below | is_nan) & (vi)x));
    vf turns = y * 1.44269504f;
    /* To the nearest integer, by the sum with 1.5 * 2^23. */
    vf n = (turns + 12582912.0f) - 12582912.0f;
    vf r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
    vf value = 1.98756915e-4f - (vf){0};
    value = value * r + 1.39819995e-3f;
    value = value * r + 8.33345200e-3f;
    value = value * r + 4.16657968e-2f;
    value = value * r + 1.66666657e-1f;
    value = value * r + 5.00000012e-1f;
    value = (value * (r * r) + r) + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    value = value * (vf)power;
    vf infinite = LEVEL(all)(mc_bits_to_float(0x7f800000));
    vi is_finite = ~(above | below | is_nan);
    return (vf)((is_finite & (vi)value) | (above & (vi)infinite) | (is_nan & (vi)x));
}

INLINE vf LEVEL(act)(vf x, int activation)
{
    if (activation == MC_RELU || activation == MC_RELU2) {
        vf kept = (vf)(~(vi)(x <= 0) & (vi)x);
        return activation == MC_RELU ? kept : kept * kept;
    }
    if (activation == MC_GELU) {
        float lanes[LANES];
        memcpy(lanes, &x, sizeof x);
        for (int i = 0; i < LANES; i++)
            lanes[i] = 0.5f * lanes[i] * (1.0f + erff(lanes[i] * 0.70710678f));
        memcpy(&x, lanes, sizeof x);
        return x;
    }
    /* gelu by tanh is x * sigmoid(2 z), z the argument of tanh. */
    vf z = x;
    if (activation == MC_GELU_TANH)
        z = (x + x * x * x * 0.044715f) * 1.5957691f;
    return x / (1.0f + LEVEL(exp)(-z));
}

/* gate = act(gate) * up, or act(gate) if there is no up; `num` is a multiple of 16. */
static void LEVEL(activate)(float *gate, const float *up, int64_t num, const mc_activation *how)
{
    for (int64_t i = 0; i < num; i += LANES) {
        vf g, u = {0};
        memcpy(&g, gate + i, sizeof g);
        if (up)
            memcpy(&u, up + i, sizeof u);
        if (how->kind == MC_SWIGLU || how->kind == MC_CLAMPED_SILU) {
            /* Comparisons that a NaN passes through. */
            vf limit = LEVEL(all)(how->limit);
            vi over = g > limit, up_over = u > limit, up_below = u < -limit;
            g = (vf)((over & (vi)limit) | (~over & (vi)g));
            u = (vf)((up_over & (vi)limit) | (up_below & (vi)-limit)
                     | (~(up_over | up_below) & (vi)u));
            if (how->kind == MC_SWIGLU)
                g = (g / (1.0f + LEVEL(exp)(-(g * how->alpha)))) * (u + 1.0f);
            else
                g = LEVEL(act)(g, MC_SILU) * u;
        } else {
            g = LEVEL(act)(g, how->kind);
            if (up)
                g = g * u;
        }
        memcpy(gate + i, &g, sizeof g);
    }
}

/* x = x * sigmoid(gate); `num` is a multiple of 16. */
static void LEVEL(gate)(float *x, const float *gate, int64_t num)
{
    for (int64_t i = 0; i < num; i += LANES) {
        vf g, value;
        memcpy(&g, gate + i, sizeof g);
        memcpy(&value, x + i, sizeof value);
        value = value / (1.0f + LEVEL(exp)(-g));
        memcpy(x + i, &value, sizeof value);
    }
}

/* Reads all whole 256 bytes and does nothing else: its speed is the limit of a product's. */
static uint32_t LEVEL(read)(const uint8_t *at, int64_t num)
{
    enum { STEPS = 256 / (LANES * 4) };
    vu all[STEPS] = {{0}}, total = {0};
    for (int64_t i = 0; i + 256 <= num; i += 256)
        for (int j = 0; j < STEPS; j++) {
            vu values;
            memcpy(&values, at + i + j * LANES * 4, sizeof values);
            all[j] ^= values;
        }
    for (int j = 0; j < STEPS; j++)
        total ^= all[j];
    return total[0] ^ total[LANES - 1];
}

