/* Packing for gg_micro: pieces of a strided f32, f16 or bf16 matrix as f32, in the order the product reads them.
 *
 *   columns: panels of GG_NR lines, [panel][k][GG_NR], the last one filled up with zeros
 *   rows:    panels of GG_MR lines, [panel][k][GG_MR], the last one with places that nobody reads
 *
 * A line is what the product runs along: a row of the matrix in mul_mat's sense, K elements long. */
#pragma once
#include "convert.h"
#include "microkernel.h"

/* Any strides, in bytes; elements are aligned to their own size. */
typedef struct gg_lines {
    const char *data;
    int32_t dtype;
    int64_t line, k; /* from one line to the next, from one element of a line to the next */
} gg_lines;

GG_INLINE const char *gg_line_at(const gg_lines *x, int64_t line, int64_t k) { return x->data + line * x->line + k * x->k; }

/* r[i][j] = r[j][i]: first 4 x 4 in every 128 bits, then the 128-bit blocks change places. */
GG_INLINE void vf_transpose(vf r[GG_VW]) {
    enum { W = GG_VW };
#if GG_VECTOR_BYTES == 16
#define GG_BLOCKS(F) F(0)
#elif GG_VECTOR_BYTES == 32
#define GG_BLOCKS(F) F(0), F(4)
#else
#define GG_BLOCKS(F) F(0), F(4), F(8), F(12)
#endif
#define GG_LOW(o) o, o + W, o + 1, o + W + 1
#define GG_HIGH(o) o + 2, o + W + 2, o + 3, o + W + 3
#define GG_LOW_PAIR(o) o, o + 1, o + W, o + W + 1
#define GG_HIGH_PAIR(o) o + 2, o + 3, o + W + 2, o + W + 3
#pragma GCC unroll 4
    for (int g = 0; g < W; g += 4) {
        const vf a = __builtin_shufflevector(r[g], r[g + 1], GG_BLOCKS(GG_LOW));
        const vf b = __builtin_shufflevector(r[g], r[g + 1], GG_BLOCKS(GG_HIGH));
        const vf c = __builtin_shufflevector(r[g + 2], r[g + 3], GG_BLOCKS(GG_LOW));
        const vf d = __builtin_shufflevector(r[g + 2], r[g + 3], GG_BLOCKS(GG_HIGH));
        r[g] = __builtin_shufflevector(a, c, GG_BLOCKS(GG_LOW_PAIR));
        r[g + 1] = __builtin_shufflevector(a, c, GG_BLOCKS(GG_HIGH_PAIR));
        r[g + 2] = __builtin_shufflevector(b, d, GG_BLOCKS(GG_LOW_PAIR));
        r[g + 3] = __builtin_shufflevector(b, d, GG_BLOCKS(GG_HIGH_PAIR));
    }
    /* now block l of r[4 g + c] holds column 4 l + c of lines 4 g ... 4 g + 3 */
#if GG_VECTOR_BYTES == 32
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const vf a = r[c], b = r[4 + c];
        r[c] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        r[4 + c] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#elif GG_VECTOR_BYTES == 64
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
#define GG_TWO(x, y, o) __builtin_shufflevector(x, y, o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7, \
                                                o + 16, o + 17, o + 18, o + 19, o + 20, o + 21, o + 22, o + 23)
#define GG_EVEN(x, y, o) __builtin_shufflevector(x, y, o, o + 1, o + 2, o + 3, o + 8, o + 9, o + 10, o + 11, \
                                                 o + 16, o + 17, o + 18, o + 19, o + 24, o + 25, o + 26, o + 27)
        const vf ab = GG_TWO(r[c], r[4 + c], 0), cd = GG_TWO(r[8 + c], r[12 + c], 0);
        const vf AB = GG_TWO(r[c], r[4 + c], 8), CD = GG_TWO(r[8 + c], r[12 + c], 8);
        r[c] = GG_EVEN(ab, cd, 0);
        r[4 + c] = GG_EVEN(ab, cd, 4);
        r[8 + c] = GG_EVEN(AB, CD, 0);
        r[12 + c] = GG_EVEN(AB, CD, 4);
#undef GG_TWO
#undef GG_EVEN
    }
#endif
#undef GG_BLOCKS
#undef GG_LOW
#undef GG_HIGH
#undef GG_LOW_PAIR
#undef GG_HIGH_PAIR
}

/* GG_VW lines that are contiguous along k, of which `lines` exist, to y[k * GG_NR + line]. */
GG_INLINE void gg_transpose_lines(const int dtype, const char *x, int64_t step, int lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    int64_t k = 0;
    for (; k + GG_VW <= K; k += GG_VW) {
        vf r[GG_VW];
        if (lines == GG_VW) {
#pragma GCC unroll 16
            for (int i = 0; i < GG_VW; i++) r[i] = vf_load_as_f32(dtype, x + i * step + k * bytes);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < GG_VW; i++) r[i] = i < lines ? vf_load_as_f32(dtype, x + i * step + k * bytes) : vf_zero();
        }
        vf_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < GG_VW; i++) vf_store(y + (k + i) * GG_NR, r[i]);
    }
    for (; k < K; k++)
        for (int i = 0; i < GG_VW; i++) y[k * GG_NR + i] = i < lines ? gg_load_as_f32(dtype, x + i * step + k * bytes) : 0;
}

GG_INLINE void gg_pack_columns_of(const int dtype, const gg_lines *x, int64_t line, int64_t lines, int64_t k0, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    const int64_t panels = gg_ceil_div(lines, GG_NR);
    const char *const start = gg_line_at(x, line, k0);
    if (x->k == bytes) {
        for (int64_t l = 0; l < panels * GG_NR; l += GG_VW)
            gg_transpose_lines(dtype, start + l * x->line, x->line, (int)gg_max(0, gg_min(GG_VW, lines - l)), K,
                               y + l / GG_NR * K * GG_NR + l % GG_NR);
    } else if (x->line == bytes) {
        for (int64_t k = 0; k < K; k++)
            for (int64_t l = 0; l < panels * GG_NR; l += GG_VW) {
                const char *from = start + k * x->k + l * bytes;
                float *to = y + (l / GG_NR * K + k) * GG_NR + l % GG_NR;
                if (l + GG_VW <= lines) vf_store(to, vf_load_as_f32(dtype, from));
                else
                    for (int i = 0; i < GG_VW; i++) to[i] = l + i < lines ? gg_load_as_f32(dtype, from + i * bytes) : 0;
            }
    } else {
        for (int64_t l = 0; l < panels * GG_NR; l++)
            for (int64_t k = 0; k < K; k++)
                y[(l / GG_NR * K + k) * GG_NR + l % GG_NR] =
                    l < lines ? gg_load_as_f32(dtype, start + l * x->line + k * x->k) : 0;
    }
}

/* Lines line ... line + lines, elements k0 ... k0 + K, as columns. */
static inline void gg_pack_columns(const gg_lines *x, int64_t line, int64_t lines, int64_t k0, int64_t K, float *y) {
    switch (x->dtype) {
    case GG_F16: gg_pack_columns_of(GG_F16, x, line, lines, k0, K, y); break;
    case GG_BF16: gg_pack_columns_of(GG_BF16, x, line, lines, k0, K, y); break;
    default: gg_pack_columns_of(GG_F32, x, line, lines, k0, K, y);
    }
}

/* Lines line ... line + lines, elements k0 ... k0 + K, one line every `step` floats. */
static inline void gg_copy_lines(const gg_lines *x, int64_t line, int64_t lines, int64_t k0, int64_t K, float *y, int64_t step) {
    for (int64_t l = 0; l < lines; l++) {
        const char *from = gg_line_at(x, line + l, k0);
        float *to = y + l * step;
        if (x->k == gg_float_bytes(x->dtype)) gg_to_f32_row(x->dtype, from, to, K);
        else
            for (int64_t k = 0; k < K; k++) to[k] = gg_load_as_f32(x->dtype, from + k * x->k);
    }
}

/* Rows as gg_micro takes them: element k of row i of panel p is data[p * panel + i * row + k * k]. */
typedef struct gg_rows_f32 {
    const float *data;
    int64_t panel, row, k;
} gg_rows_f32;

enum { GG_ROW_GAP = 16 }; /* floats between copied rows, so that they do not share cache sets */

/* Floats that gg_pack_rows may write. */
static inline int64_t gg_packed_rows_floats(int64_t lines, int64_t K) {
    return gg_round_up(lines, GG_MR) * (gg_round_up(K, 16) + GG_ROW_GAP);
}

GG_INLINE gg_rows_f32 gg_pack_rows_of(const int dtype, const gg_lines *x, int64_t line, int64_t lines, int64_t k0, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    const char *const start = gg_line_at(x, line, k0);
    if (x->line == bytes && x->k != bytes) {
        for (int64_t k = 0; k < K; k++)
            for (int64_t l = 0; l < lines; l += GG_MR) {
                const char *from = start + k * x->k + l * bytes;
                float *to = y + (l * K + k * GG_MR);
                if (dtype == GG_F32 && l + GG_MR <= lines) memcpy(to, from, GG_MR * sizeof(float));
                else
                    for (int i = 0; i < gg_min(GG_MR, lines - l); i++) to[i] = gg_load_as_f32(dtype, from + i * bytes);
            }
        return (gg_rows_f32){ .data = y, .panel = GG_MR * K, .row = 1, .k = GG_MR };
    }
    const int64_t step = gg_round_up(K, 16) + GG_ROW_GAP;
    gg_copy_lines(x, line, lines, k0, K, y, step);
    return (gg_rows_f32){ .data = y, .panel = GG_MR * step, .row = step, .k = 1 };
}

/* Rows of f32 that are contiguous along k serve where they are, unless their distance puts the GG_MR rows
 * of a panel into one or two sets of the L1 cache. */
static inline int gg_rows_in_place(const gg_lines *x) {
    return x->dtype == GG_F32 && x->k == sizeof(float) && x->line % 2048 != 0;
}

/* Lines line ... line + lines, elements k0 ... k0 + K, as rows; y is used where they cannot be taken in place. */
static inline gg_rows_f32 gg_pack_rows(const gg_lines *x, int64_t line, int64_t lines, int64_t k0, int64_t K, float *y) {
    if (gg_rows_in_place(x)) {
        const int64_t row = x->line / (int64_t)sizeof(float);
        return (gg_rows_f32){ .data = (const float *)gg_line_at(x, line, k0), .panel = GG_MR * row, .row = row, .k = 1 };
    }
    switch (x->dtype) {
    case GG_F16: return gg_pack_rows_of(GG_F16, x, line, lines, k0, K, y);
    case GG_BF16: return gg_pack_rows_of(GG_BF16, x, line, lines, k0, K, y);
    default: return gg_pack_rows_of(GG_F32, x, line, lines, k0, K, y);
    }
}
