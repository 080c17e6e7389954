/* Packing for gg_micro: pieces of a strided f32, f16, bf16 or quantized matrix as f32, in the order the product reads them.
 *
 *   columns: [panel][k][GG_NR]: GG_NR lines of the matrix side by side; places after the last line hold what
 *            nobody reads
 *   rows:    [line][k], lines a little apart; where the matrix already lies so, it is used in place
 *
 * A line is what the sum runs along: K elements. */
#pragma once
#include "microkernel.h"
#include "quant.h"

/* Any strides, in bytes; elements are aligned to their own size.  Quantized lines are contiguous, and begin and end
 * with a block. */
typedef struct gg_lines {
    const char *data;
    int32_t dtype;
    int64_t line, k; /* from one line to the next, from one element (or block) of a line to the next */
} gg_lines;

/* Lines of f32 that are contiguous along k; `line` in floats. */
typedef struct gg_lines_f32 {
    const float *data;
    int64_t line;
} gg_lines_f32;

static inline gg_lines gg_lines_from(const gg_lines *x, int64_t line, int64_t k) {
    return (gg_lines){
        .data = x->data + line * x->line + k / gg_block(x->dtype) * x->k, .dtype = x->dtype, .line = x->line, .k = x->k
    };
}

/* The next `floats` of a thread's scratch; of none (base NULL) only how many there are in all: so that what a kernel
 * needs is said in one place. */
static inline float *gg_claim(float *base, int64_t *used, int64_t floats) {
    float *here = base ? base + *used : NULL;
    *used += gg_round_up(floats, 16);
    return here;
}

/* r[i][j] = r[j][i]: first 4 x 4 within every 128 bits, then the blocks of 128 bits change places. */
GG_INLINE void vf_transpose(vf r[GG_VW]) {
#define LOW(o) o, o + GG_VW, o + 1, o + GG_VW + 1
#define HIGH(o) o + 2, o + GG_VW + 2, o + 3, o + GG_VW + 3
#define LOW_PAIR(o) o, o + 1, o + GG_VW, o + GG_VW + 1
#define HIGH_PAIR(o) o + 2, o + 3, o + GG_VW + 2, o + GG_VW + 3
#if GG_VECTOR_BYTES == 16
#define SHUFFLE(x, y, F) __builtin_shufflevector(x, y, F(0))
#elif GG_VECTOR_BYTES == 32
#define SHUFFLE(x, y, F) __builtin_shufflevector(x, y, F(0), F(4))
#else
#define SHUFFLE(x, y, F) __builtin_shufflevector(x, y, F(0), F(4), F(8), F(12))
#endif
#pragma GCC unroll 4
    for (int g = 0; g < GG_VW; g += 4) {
        const vf a = SHUFFLE(r[g], r[g + 1], LOW), b = SHUFFLE(r[g], r[g + 1], HIGH);
        const vf c = SHUFFLE(r[g + 2], r[g + 3], LOW), d = SHUFFLE(r[g + 2], r[g + 3], HIGH);
        r[g] = SHUFFLE(a, c, LOW_PAIR);
        r[g + 1] = SHUFFLE(a, c, HIGH_PAIR);
        r[g + 2] = SHUFFLE(b, d, LOW_PAIR);
        r[g + 3] = SHUFFLE(b, d, HIGH_PAIR);
    }
    /* now block l of r[g + c] is column 4 l + c of lines g ... g + 3 */
#define BLOCK(i) 4 * (i), 4 * (i) + 1, 4 * (i) + 2, 4 * (i) + 3
#if GG_VECTOR_BYTES == 32
#define BLOCKS(x, y, i, j) __builtin_shufflevector(x, y, BLOCK(i), BLOCK(j))
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const vf x = r[c], y = r[4 + c];
        r[c] = BLOCKS(x, y, 0, 2);
        r[4 + c] = BLOCKS(x, y, 1, 3);
    }
#elif GG_VECTOR_BYTES == 64
#define BLOCKS(x, y, i, j, k, l) __builtin_shufflevector(x, y, BLOCK(i), BLOCK(j), BLOCK(k), BLOCK(l))
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const vf xy = BLOCKS(r[c], r[4 + c], 0, 1, 4, 5), zw = BLOCKS(r[8 + c], r[12 + c], 0, 1, 4, 5);
        const vf XY = BLOCKS(r[c], r[4 + c], 2, 3, 6, 7), ZW = BLOCKS(r[8 + c], r[12 + c], 2, 3, 6, 7);
        r[c] = BLOCKS(xy, zw, 0, 2, 4, 6);
        r[4 + c] = BLOCKS(xy, zw, 1, 3, 5, 7);
        r[8 + c] = BLOCKS(XY, ZW, 0, 2, 4, 6);
        r[12 + c] = BLOCKS(XY, ZW, 1, 3, 5, 7);
    }
#endif
#undef LOW
#undef HIGH
#undef LOW_PAIR
#undef HIGH_PAIR
#undef SHUFFLE
#undef BLOCK
#undef BLOCKS
}

/* y[j * y_step + i] = element j of line i of x, for GG_VW lines, contiguous along j, of which `lines` exist. */
GG_INLINE void gg_transpose(const int dtype, const char *x, int64_t x_step, int lines, int64_t n, float *y,
                            int64_t y_step) {
    const int bytes = gg_float_bytes(dtype);
    const char *at[GG_VW];
    for (int i = 0; i < GG_VW; i++)
        at[i] = x + gg_min(i, lines - 1) * x_step; /* the last line stands for those after it */
    int64_t j = 0;
    for (; j + GG_VW <= n; j += GG_VW) {
        vf r[GG_VW];
#pragma GCC unroll 16
        for (int i = 0; i < GG_VW; i++) r[i] = vf_load_as_f32(dtype, at[i] + j * bytes);
        vf_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < GG_VW; i++) vf_store(y + (j + i) * y_step, r[i]);
    }
    for (; j < n; j++)
        for (int i = 0; i < lines; i++) y[j * y_step + i] = gg_load_as_f32(dtype, at[i] + j * bytes);
}

GG_INLINE void gg_pack_columns_of(const int dtype, const gg_lines *x, int64_t lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    if (x->k == bytes) {
        for (int64_t l = 0; l < lines; l += GG_VW)
            gg_transpose(dtype, x->data + l * x->line, x->line, (int)gg_min(GG_VW, lines - l), K,
                         y + l / GG_NR * GG_NR * K + l % GG_NR, GG_NR);
    } else if (x->line == bytes) {
        for (int64_t k = 0; k < K; k++) {
            const char *const from = x->data + k * x->k;
            int64_t l = 0;
            for (; l + GG_VW <= lines; l += GG_VW)
                vf_store(y + (l / GG_NR * K + k) * GG_NR + l % GG_NR, vf_load_as_f32(dtype, from + l * bytes));
            for (; l < lines; l++) y[(l / GG_NR * K + k) * GG_NR + l % GG_NR] = gg_load_as_f32(dtype, from + l * bytes);
        }
    } else {
        for (int64_t l = 0; l < lines; l++)
            for (int64_t k = 0; k < K; k++)
                y[(l / GG_NR * K + k) * GG_NR + l % GG_NR] = gg_load_as_f32(dtype, x->data + l * x->line + k * x->k);
    }
}

enum { GG_DECODED = 2 * GG_LONGEST_BLOCK }; /* elements that are decoded at a time */

static inline void gg_pack_quantized_columns(const gg_lines *x, int64_t lines, int64_t K, float *y) {
    float decoded[GG_VW][GG_DECODED];
    for (int64_t l = 0; l < lines; l += GG_VW)
        for (int64_t k = 0; k < K; k += GG_DECODED) {
            const int64_t some = gg_min(GG_VW, lines - l), n = gg_min(GG_DECODED, K - k);
            for (int64_t i = 0; i < some; i++) gg_dequantize(x->dtype, gg_lines_from(x, l + i, k).data, decoded[i], n);
            gg_transpose(GG_F32, (const char *)decoded, sizeof decoded[0], (int)some, n,
                         y + (l / GG_NR * K + k) * GG_NR + l % GG_NR, GG_NR);
        }
}

/* The other way round: each of K quantized rows has an element of every line, from element `first` on, which is a
 * multiple of GG_NR. */
static inline void gg_pack_quantized_rows(const gg_lines *rows, int64_t first, int64_t lines, int64_t K, float *y) {
    float decoded[GG_DECODED];
    const int64_t block = gg_block(rows->dtype), start = first / block * block, end = first + lines;
    for (int64_t k = 0; k < K; k++)
        for (int64_t piece = start; piece < end; piece += GG_DECODED) {
            const int64_t last = gg_min(piece + GG_DECODED, end);
            gg_dequantize(rows->dtype, gg_lines_from(rows, k, piece).data, decoded, gg_round_up(last - piece, block));
            for (int64_t i = gg_max(first, piece); i < last; i += GG_VW) {
                const int64_t l = i - first;
                const float *const from = decoded + (i - piece);
                float *const to = y + (l / GG_NR * K + k) * GG_NR + l % GG_NR;
                if (i + GG_VW <= last) vf_store(to, vf_load(from));
                else memcpy(to, from, (last - i) * sizeof(float));
            }
        }
}

/* The first `lines` lines, K elements of each, as columns. */
static inline void gg_pack_columns(const gg_lines *x, int64_t lines, int64_t K, float *y) {
    if (gg_quantized(x->dtype)) {
        gg_pack_quantized_columns(x, lines, K, y);
        return;
    }
    switch (x->dtype) {
    case GG_F16: gg_pack_columns_of(GG_F16, x, lines, K, y); break;
    case GG_BF16: gg_pack_columns_of(GG_BF16, x, lines, K, y); break;
    default: gg_pack_columns_of(GG_F32, x, lines, K, y);
    }
}

/* Floats from one copied line to the next: room for whole vectors, and a gap, so that lines do not share cache sets. */
static inline int64_t gg_line_step(int64_t K) { return gg_round_up(K, 16) + 16; }

GG_INLINE void gg_copy_lines_of(const int dtype, const gg_lines *x, int64_t lines, int64_t K, float *y, int64_t step) {
    const int bytes = gg_float_bytes(dtype);
    if (x->k == bytes) {
        for (int64_t l = 0; l < lines; l++) gg_to_f32_row(dtype, x->data + l * x->line, y + l * step, K);
    } else if (x->line == bytes) {
        for (int64_t k = 0; k < K; k += GG_VW)
            gg_transpose(dtype, x->data + k * x->k, x->k, (int)gg_min(GG_VW, K - k), lines, y + k, step);
    } else {
        for (int64_t l = 0; l < lines; l++)
            for (int64_t k = 0; k < K; k++) y[l * step + k] = gg_load_as_f32(dtype, x->data + l * x->line + k * x->k);
    }
}

/* The first `lines` lines, K elements of each, copied to y, which has room for lines * gg_line_step(K) floats. */
static inline gg_lines_f32 gg_copy_lines(const gg_lines *x, int64_t lines, int64_t K, float *y) {
    const int64_t step = gg_line_step(K);
    if (gg_quantized(x->dtype)) {
        for (int64_t l = 0; l < lines; l++) gg_dequantize(x->dtype, x->data + l * x->line, y + l * step, K);
        return (gg_lines_f32){ y, step };
    }
    switch (x->dtype) {
    case GG_F16: gg_copy_lines_of(GG_F16, x, lines, K, y, step); break;
    case GG_BF16: gg_copy_lines_of(GG_BF16, x, lines, K, y, step); break;
    default: gg_copy_lines_of(GG_F32, x, lines, K, y, step);
    }
    return (gg_lines_f32){ y, step };
}

/* Rows of f32 that are contiguous along k are used in place, unless their distance puts the GG_MR rows of a
 * tile into one or two sets of the L1 cache. */
static inline int gg_rows_in_place(const gg_lines *x) {
    return x->dtype == GG_F32 && x->k == sizeof(float) && x->line % 2048 != 0;
}

/* Rows for gg_micro; y as in gg_copy_lines. */
static inline gg_lines_f32 gg_pack_rows(const gg_lines *x, int64_t lines, int64_t K, float *y) {
    if (gg_rows_in_place(x)) return (gg_lines_f32){ (const float *)x->data, x->line / (int64_t)sizeof(float) };
    return gg_copy_lines(x, lines, K, y);
}
