/* Compute forms of codes that a file has in words of 32 bits, with zero points: GPTQ and AWQ; included
 * by `_forms.h` for each level. */

/* Words of GPTQ with 8 columns of 16 rows: even columns, then odd ones. A word with 16 columns is taken as
 * two, the lower half and the upper. */
INLINE void LEVEL(form_gptq4)(const uint8_t *words, int is_two_bits, int is_upper, uint8_t *out)
{
    for (int r = 0; r < MC_TILE; r += LANES) {
        vu all;
        memcpy(&all, words + 4 * r, sizeof all);
        if (is_two_bits) {
            all = all >> (is_upper ? 16 : 0) & 0xffff;
            all = (all | all << 8) & 0x00ff00ff;
            all = (all | all << 4) & 0x0f0f0f0f;
            all = (all | all << 2) & 0x33333333;
        }
        vu even = all & 0x0f0f0f0f, odd = all >> 4 & 0x0f0f0f0f;
        even = (even | even >> 4) & 0x00ff00ff;
        odd = (odd | odd >> 4) & 0x00ff00ff;
        all = ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
        memcpy(out + 4 * r, &all, sizeof all);
    }
}

/* Words of GPTQ with 4 columns of 16 rows: pairs of columns of each 4 rows are put side by side. */
INLINE void LEVEL(form_gptq8)(const uint8_t *words, uint8_t *out)
{
    for (int r = 0; r < MC_TILE; r += 4) {
        v4 four;
        memcpy(&four, words + 4 * r, 16);
        v8 pairs = SHUFFLE((v8)(four ^ 0x80808080), 0, 2, 4, 6, 1, 3, 5, 7);
        memcpy(out + 4 * r, &pairs, 16);
    }
}

/* Words of AWQ with 16 rows of 8 columns: for each row a word, even columns first. */
INLINE void LEVEL(form_awq)(const uint8_t *columns, int64_t step, uint8_t *out)
{
    /* By rows, the columns whose nibbles become the low ones of bytes (0, 4, 1, 5), then those whose
     * nibbles become the high ones (2, 6, 3, 7). */
    v4 words[2][2];
    for (int high = 0; high < 2; high++) {
        v16 two[2];
        for (int i = 0; i < 2; i++) {
            const uint8_t *at = columns + (2 * high + i) * step;
            uint64_t pair[2];
            memcpy(&pair[0], at, 8);
            memcpy(&pair[1], at + 4 * step, 8);
            two[i] = (v16)(v2){pair[0], pair[1]};
            two[i] = SHUFFLE(two[i], 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        }
        words[high][0] = (v4)__builtin_shufflevector(
            (v8)two[0], (v8)two[1], 0, 8, 1, 9, 2, 10, 3, 11);
        words[high][1] = (v4)__builtin_shufflevector(
            (v8)two[0], (v8)two[1], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 2; i++) {
        /* Rows 0, 4, 1, 5 of 8, and 2, 6, 3, 7. */
        v4 one = (words[0][i] & 0x0f0f0f0f) | (words[1][i] & 0x0f0f0f0f) << 4;
        v4 two = (words[0][i] >> 4 & 0x0f0f0f0f) | (words[1][i] & 0xf0f0f0f0);
        v4 low = __builtin_shufflevector(one, two, 0, 2, 4, 6);
        v4 high = __builtin_shufflevector(one, two, 1, 3, 5, 7);
        memcpy(out + 32 * i, &low, 16);
        memcpy(out + 32 * i + 16, &high, 16);
    }
}

/* 16 rows' scales of a group of columns, then their zero points; those beyond the matrix are zero.
 * Returns their end. */
INLINE uint8_t *LEVEL(form_head)(
    const mc_file *file, int64_t row, int64_t num_rows, int64_t group, uint8_t *out, v4 *wrong,
    int order)
{
    int64_t bytes = mc_scale_bytes(file->scale);
    int bits = order == MC_GPTQ8 ? 8 : order == MC_GPTQ2 ? 2 : 4;
    const uint8_t *zeros = file->zeros + group * file->zero_row_bytes + row * bits / 8;
    memset(out, 0, (size_t)(2 * MC_TILE * bytes));
    memcpy(out, file->scales + group * file->scale_row_bytes + row * bytes,
           (size_t)(num_rows * bytes));
    *wrong |= LEVEL(too_large)(out, file->scale, file->largest);
    out += MC_TILE * bytes;
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t bit = (order == MC_AWQ ? (r & 8) + (r & 1) * 4 + (r & 7) / 2 : r) * bits;
        uint32_t point = file->zero_points[zeros[bit / 8] >> bit % 8 & ((1 << bits) - 1)];
        if (bytes == 4)
            memcpy(out + r * 4, &point, 4);
        else
            memcpy(out + r * 2, &point, 2);
    }
    return out + MC_TILE * bytes;
}

/* Like `form_of`, for codes in words. */
INLINE uint8_t *LEVEL(form_words)(
    const mc_file *file, int64_t row, uint8_t *out, int *wrong, int order)
{
    v4 too_large = {0};
    int64_t num_rows = file->rows - row < MC_TILE ? file->rows - row : MC_TILE;
    int width = order == MC_GPTQ8 ? 4 : 8; /* columns that are brought into the form together */
    int lines = order == MC_AWQ ? 8 : 1;   /* they take `lines` times `bytes` bytes */
    int64_t bytes = order == MC_AWQ ? num_rows / 2 : num_rows * 4, step = file->row_bytes;
    const uint8_t *at = file->codes + (order == MC_AWQ ? row / 2 : row * 4);
    for (int64_t k = 0; k < file->columns; k += MC_BLOCK) {
        if (k % file->group == 0)
            out = LEVEL(form_head)(file, row, num_rows, k / file->group, out, &too_large, order);
        for (int64_t column = k; column < k + MC_BLOCK; column += width, out += MC_TILE * 4) {
            uint8_t copies[MC_TILE * 4];
            const uint8_t *words = at;
            int64_t between = step;
            if (num_rows < MC_TILE || column >= file->columns) {
                between = MC_TILE * 4 / lines;
                memset(copies, order == MC_GPTQ8 ? 0x80 : 0x88, sizeof copies);
                for (int i = 0; i < lines && column < file->columns; i++)
                    memcpy(copies + i * between, at + i * step, (size_t)bytes);
                words = copies;
            }
            /* The next 16 rows: their words lie beside these. */
            for (int i = 0; i < lines; i++)
                __builtin_prefetch(at + i * step + bytes);
            int is_upper = order == MC_GPTQ2 && column & 8;
            if (order != MC_GPTQ2 || is_upper)
                at += lines * step;
            if (order == MC_AWQ)
                LEVEL(form_awq)(words, between, out);
            else if (order == MC_GPTQ8)
                LEVEL(form_gptq8)(words, out);
            else
                LEVEL(form_gptq4)(words, order == MC_GPTQ2 && words != copies, is_upper, out);
        }
    }
    for (int i = 0; i < 4; i++)
        *wrong |= too_large[i] != 0;
    return out;
}
