/* Packing for gg_micro: pieces of a strided f32, f16, bf16 or quantized matrix as f32, in the order the product reads them.
 *
 *   columns: [panel][k][GG_NR]: GG_NR lines of the matrix side by side; places after the last line hold what
 *            nobody reads
 *   rows:    [panel][k][GG_MR], panels a little apart; rows that are contiguous along k are used in place
 *   lines:   [line][k], a little apart
 *
 * A line is what the sum runs along: K elements. */
#pragma once
#include "vec/quant.h"
#include "walk/kernel.h"
#include "gemm/microkernel.h"

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

enum { GG_PACK_COLUMNS = 4 * GG_NR }; /* columns packed at a time: bytes side by side, and few enough streams */

/* Some panels from lines of which each k has the elements side by side. */
GG_INLINE void gg_pack_columns_across(const int dtype, const char *x, int64_t x_k, int64_t lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    for (int64_t k = 0; k < K; k++, x += x_k, y += GG_NR) {
        int64_t l = 0;
        for (; l + GG_NR <= lines; l += GG_NR)
#pragma GCC unroll 8
            for (int v = 0; v < GG_NR; v += GG_VW) vf_store(y + l * K + v, vf_load_as_f32(dtype, x + (l + v) * bytes));
        for (int v = 0; l + v < lines; v++) y[l * K + v] = gg_load_as_f32(dtype, x + (l + v) * bytes);
    }
}

GG_INLINE void gg_pack_columns_of(const int dtype, const gg_lines *x, int64_t lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    if (x->k == bytes) {
        for (int64_t l = 0; l < lines; l += GG_VW)
            gg_transpose(dtype, x->data + l * x->line, x->line, (int)gg_min(GG_VW, lines - l), K,
                         y + l / GG_NR * GG_NR * K + l % GG_NR, GG_NR);
    } else if (x->line == bytes) {
        for (int64_t l = 0; l < lines; l += GG_PACK_COLUMNS)
            gg_pack_columns_across(dtype, x->data + l * bytes, x->k, gg_min(GG_PACK_COLUMNS, lines - l), K, y + l * K);
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

/* Rows as gg_micro takes them, GG_MR to a panel: packed, with element k of a panel's row m at [k * GG_MR + m], or in
 * place, at [m * line + k]. */
typedef struct gg_row_panels {
    const float *data;
    int64_t panel; /* from one panel to the next */
    int64_t line;  /* in place: from one row to the next; 0 says packed */
} gg_row_panels;

static inline gg_row_panels gg_rows_of_lines(gg_lines_f32 x) {
    return (gg_row_panels){ x.data, GG_MR * x.line, x.line };
}

enum { GG_ROW_VECTORS = (GG_MR + GG_VW - 1) / GG_VW }; /* that hold a panel's rows, at one k */

/* Floats from one packed panel to the next: as whole vectors are written, the last ones reach beyond its end. */
static inline int64_t gg_row_panel_step(int64_t K) { return gg_round_up(GG_MR * K + GG_ROW_VECTORS * GG_VW, 16); }

static inline int64_t gg_row_panels_floats(int64_t lines, int64_t K) {
    return gg_ceil_div(lines, GG_MR) * gg_row_panel_step(K);
}

/* One panel from lines that are contiguous along k, of which `lines` exist: what a vector has beyond the panel's rows
 * is overwritten at the next k. */
GG_INLINE void gg_pack_row_panel(const int dtype, const gg_lines *x, int64_t lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    const char *at[GG_ROW_VECTORS * GG_VW];
    for (int i = 0; i < GG_ROW_VECTORS * GG_VW; i++)
        at[i] = x->data + gg_min(i, gg_min(lines, GG_MR) - 1) * x->line; /* the last line stands for those after it */
    int64_t k = 0;
    for (; k + GG_VW <= K; k += GG_VW) {
#pragma GCC unroll 16
        for (int i = 0; i < GG_MR; i++) __builtin_prefetch(at[i] + GG_MR * x->line + k * bytes); /* the next panel's */
        vf r[GG_ROW_VECTORS][GG_VW];
#pragma GCC unroll 4
        for (int v = 0; v < GG_ROW_VECTORS; v++) {
#pragma GCC unroll 16
            for (int i = 0; i < GG_VW; i++)
                r[v][i] = vf_load_as_f32(dtype, at[gg_min(v * GG_VW + i, GG_MR - 1)] + k * bytes);
            vf_transpose(r[v]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < GG_VW; i++)
#pragma GCC unroll 4
            for (int v = 0; v < GG_ROW_VECTORS; v++) vf_store(y + (k + i) * GG_MR + v * GG_VW, r[v][i]);
    }
    for (; k < K; k++)
        for (int i = 0; i < GG_MR; i++) y[k * GG_MR + i] = gg_load_as_f32(dtype, at[i] + k * bytes);
}

/* The first n elements of a vector, zero in the others. */
GG_INLINE vf gg_load_some_as_f32(const int dtype, const char *p, int n) {
    if (dtype == GG_F32) return vf_load_n((const float *)p, n, 0);
    char some[GG_VW * sizeof(float)] = { 0 };
    memcpy(some, p, n * gg_float_bytes(dtype));
    return vf_load_as_f32(dtype, some);
}

/* One panel from `lines` lines, GG_MR at most, of which each k has the elements side by side. */
GG_INLINE void gg_pack_row_panel_across(const int dtype, const char *x, int64_t x_k, const int lines, int64_t K,
                                        float *y) {
    const int bytes = gg_float_bytes(dtype);
    for (int64_t k = 0; k < K; k++, x += x_k, y += GG_MR)
#pragma GCC unroll 4
        for (int v = 0; v < GG_ROW_VECTORS; v++) {
            const int n = (int)gg_max(0, gg_min(GG_VW, lines - v * GG_VW));
            vf_store(y + v * GG_VW, n == GG_VW ? vf_load_as_f32(dtype, x + v * GG_VW * bytes)
                                               : gg_load_some_as_f32(dtype, x + v * GG_VW * bytes, n));
        }
}

enum { GG_PACK_K = 8 }; /* elements of k whose cache lines serve panel after panel */

GG_INLINE void gg_pack_rows_of(const int dtype, const gg_lines *x, int64_t lines, int64_t K, float *y) {
    const int bytes = gg_float_bytes(dtype);
    const int64_t panel = gg_row_panel_step(K);
    if (x->k == bytes) {
        for (int64_t l = 0; l < lines; l += GG_MR) {
            const gg_lines from = gg_lines_from(x, l, 0);
            gg_pack_row_panel(dtype, &from, lines - l, K, y + l / GG_MR * panel);
        }
    } else if (x->line == bytes) {
        for (int64_t k = 0; k < K; k += GG_PACK_K) {
            const int64_t some = gg_min(GG_PACK_K, K - k);
            const char *from = x->data + k * x->k;
            float *to = y + k * GG_MR;
            for (int64_t next = GG_PACK_K; next < 2 * GG_PACK_K; next++)
                for (int64_t l = 0; l < lines; l += 64 / bytes) __builtin_prefetch(from + next * x->k + l * bytes);
            int64_t l = 0;
            for (; l + GG_MR <= lines; l += GG_MR, from += GG_MR * bytes, to += panel)
                gg_pack_row_panel_across(dtype, from, x->k, GG_MR, some, to);
            if (l < lines) gg_pack_row_panel_across(dtype, from, x->k, (int)(lines - l), some, to);
        }
    } else {
        for (int64_t l = 0; l < lines; l++)
            for (int64_t k = 0; k < K; k++)
                y[l / GG_MR * panel + k * GG_MR + l % GG_MR] = gg_load_as_f32(dtype, x->data + l * x->line + k * x->k);
    }
}

/* Rows of f32 that are contiguous along k are used in place, unless their distance puts the GG_MR rows of a tile into
 * one or two sets of the L1 cache, or rows on more pages than the first table of translations has room for. */
static inline int gg_rows_in_place(const gg_lines *x) {
    return x->dtype == GG_F32 && x->k == sizeof(float) && x->line % 2048 != 0 && x->line < 3072;
}

/* The first `lines` lines, K elements of each, as rows; y has room for gg_row_panels_floats(lines, K). */
static inline gg_row_panels gg_pack_rows(const gg_lines *x, int64_t lines, int64_t K, float *y) {
    if (gg_rows_in_place(x))
        return gg_rows_of_lines((gg_lines_f32){ (const float *)x->data, x->line / (int64_t)sizeof(float) });
    switch (x->dtype) {
    case GG_F16: gg_pack_rows_of(GG_F16, x, lines, K, y); break;
    case GG_BF16: gg_pack_rows_of(GG_BF16, x, lines, K, y); break;
    default: gg_pack_rows_of(GG_F32, x, lines, K, y);
    }
    return (gg_row_panels){ y, gg_row_panel_step(K), 0 };
}
