/* Rows of numbers, made of a matrix that is stored transposed. Vectors of 16 bytes, which every processor has: the
 * memory sets the speed. */
#ifndef MC_COLUMNS_H
#define MC_COLUMNS_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MC_LINE 64

typedef uint16_t mc_halves __attribute__((vector_size(16)));
typedef uint32_t mc_words __attribute__((vector_size(16)));

/* 16 bytes of each of 16 / size columns become as many of each of 16 / size rows. */
static inline void mc_turn_numbers(const uint8_t *from, int64_t from_step, uint8_t *to, int64_t to_step, int size)
{
    mc_words lines[8], next[8];
    int num = 16 / size;
    for (int i = 0; i < num; i++)
        memcpy(&lines[i], from + i * from_step, 16);
    /* A round puts numbers side by side that half of the columns lie between. */
    for (int round = 1; round < num; round *= 2) {
        for (int i = 0; i < num / 2; i++) {
            mc_words one = lines[i], two = lines[i + num / 2];
            if (size == 2) {
                mc_halves a = (mc_halves)one, b = (mc_halves)two;
                next[2 * i] = (mc_words)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
                next[2 * i + 1] = (mc_words)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
            } else {
                next[2 * i] = __builtin_shufflevector(one, two, 0, 4, 1, 5);
                next[2 * i + 1] = __builtin_shufflevector(one, two, 2, 6, 3, 7);
            }
        }
        memcpy(lines, next, sizeof lines);
    }
    for (int i = 0; i < num; i++)
        memcpy(to + i * to_step, &lines[i], 16);
}

/* Writes some bytes; whole lines on x86 past the caches, as what is written so is not read first. */
static inline void mc_write_past(uint8_t *to, const uint8_t *from, int64_t num)
{
#ifdef __SSE2__
    if (num == MC_LINE && (uintptr_t)to % MC_LINE == 0) {
        for (int i = 0; i < MC_LINE; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
        return;
    }
#endif
    memcpy(to, from, (size_t)num);
}

static inline void mc_turn(const uint8_t *from, int64_t rows, int64_t columns, uint8_t *out, int size)
{
    int64_t side = MC_LINE / size, step = rows * size, row_bytes = columns * size;
    /* Lines so far apart may have one place in a cache: each is read at once, and written at once. */
    _Alignas(MC_LINE) uint8_t given[MC_LINE * MC_LINE / 2] = {0}, made[MC_LINE * MC_LINE / 2];
    for (int64_t k = 0; k < columns; k += side) {
        int64_t width = columns - k < side ? columns - k : side;
        for (int64_t row = 0; row < rows; row += side) {
            const uint8_t *at = from + k * step + row * size;
            int64_t height = rows - row < side ? rows - row : side;
            for (int64_t i = 0; i < width; i++) {
                /* The processor does not foresee as many places. */
                __builtin_prefetch(at + i * step + 4 * MC_LINE, 0, 2);
                memcpy(given + i * MC_LINE, at + i * step, (size_t)(height == side ? MC_LINE : height * size));
            }
            for (int64_t i = 0; i < MC_LINE; i += 16)
                for (int64_t j = 0; j < MC_LINE; j += 16)
                    mc_turn_numbers(given + i / size * MC_LINE + j, MC_LINE, made + j / size * MC_LINE + i, MC_LINE, size);
            for (int64_t i = 0; i < height; i++)
                mc_write_past(out + (row + i) * row_bytes + k * size, made + i * MC_LINE, width * size);
        }
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* A matrix [rows, columns] of numbers of 2 or 4 bytes, of one that is stored as [columns, rows]. */
static inline void mc_transpose(const uint8_t *from, int64_t rows, int64_t columns, int64_t size, uint8_t *out)
{
    if (size == 2)
        mc_turn(from, rows, columns, out, 2);
    else
        mc_turn(from, rows, columns, out, 4);
}

#endif
