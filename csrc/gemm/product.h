/* Products of matrices that lie in the cache, on the tile of microkernel.h: C = keep C + sign A B.
 *
 * One FMA chain over k for each element, ascending, as in gg_micro; what a shape leaves out are zeros. */
#pragma once
#include "walk/rows.h"
#include "gemm/microkernel.h"

/* A: element (m, k) is data[m * row + k * column]. */
typedef struct gg_left {
    const float *data;
    int64_t row, column;
} gg_left;

/* B: columns of panel p, GG_NR of them, at data + p * panel; from one k to the next `row`.  Whole panels can be
 * read, whatever stands in them after the last column. */
typedef struct gg_right {
    const float *data;
    int64_t panel, row;
} gg_right;

static inline gg_right gg_packed(const float *data, int64_t K) { return (gg_right){ data, GG_NR * K, GG_NR }; }
static inline gg_right gg_plain(const float *data, int64_t step) { return (gg_right){ data, GG_NR, step }; }

/* C: keep NULL leaves what is there as it is, and `set` forgets it; else row m is first multiplied with keep[m]. */
typedef struct gg_into {
    float *data;
    int64_t row;
    float sign;
    int set;
    const float *keep;
} gg_into;

static inline gg_into gg_set(float *data, int64_t row) {
    return (gg_into){ .data = data, .row = row, .sign = 1, .set = 1 };
}
static inline gg_into gg_add(float *data, int64_t row) { return (gg_into){ .data = data, .row = row, .sign = 1 }; }
static inline gg_into gg_subtract(float *data, int64_t row) {
    return (gg_into){ .data = data, .row = row, .sign = -1 };
}

/* Which elements matter: all; A is a lower or an upper triangle; of C only the lower triangle is wanted (what lies
 * above it is undefined). */
typedef enum gg_shape { GG_WHOLE, GG_LOWER, GG_UPPER, GG_LOWER_RESULT } gg_shape;

GG_INLINE void gg_product_tile(const int M, const int vectors, int64_t K, gg_left a, const float *b, int64_t b_row,
                               gg_into c, int columns) {
    vf sum[GG_MR][GG_NV];
    gg_micro_part(M, vectors, K, a.data, a.row, a.column, b, b_row, sum);
    if (columns == vectors * GG_VW && c.set) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) vf_store(c.data + m * c.row + j * GG_VW, sum[m][j] * c.sign);
        return;
    }
    if (columns == vectors * GG_VW) {
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const float keep = c.keep ? c.keep[m] : 1;
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                float *to = c.data + m * c.row + j * GG_VW;
                vf_store(to, vf_load(to) * keep + sum[m][j] * c.sign);
            }
        }
        return;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        const float keep = c.keep ? c.keep[m] : 1;
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            float *to = c.data + m * c.row + j * GG_VW;
            const int count = (int)gg_max(0, gg_min(GG_VW, columns - j * GG_VW));
            const vf more = sum[m][j] * c.sign;
            vf_store_n(to, c.set ? more : vf_load_n(to, count, 0) * keep + more, count);
        }
    }
}

/* C[M, N] from A[M, K] and B[K, N]. */
static __attribute__((noinline, unused)) void gg_product(gg_shape shape, int64_t M, int64_t N, int64_t K, gg_left a,
                                                         gg_right b, gg_into c) {
    const int64_t blocks = gg_ceil_div(M, GG_MR);
    for (int64_t n = 0; n < N; n += GG_NR) {
        const int columns = (int)gg_min(GG_NR, N - n), half = columns <= GG_NR / 2;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t m0 = M * block / blocks, m1 = M * (block + 1) / blocks; /* small: no overflow */
            if (shape == GG_LOWER_RESULT && n >= m1) continue;
            const int64_t k0 = shape == GG_UPPER ? gg_min(m0, K) : 0, k1 = shape == GG_LOWER ? gg_min(m1, K) : K;
            const gg_left rows = { a.data + m0 * a.row + k0 * a.column, a.row, a.column };
            const float *const panel = b.data + n / GG_NR * b.panel + k0 * b.row;
            gg_into into = c;
            into.data += m0 * c.row + n;
            if (into.keep) into.keep += m0;
            if (half) GG_EACH_M(m1 - m0, gg_product_tile, GG_NV / 2, k1 - k0, rows, panel, b.row, into, columns)
            else GG_EACH_M(m1 - m0, gg_product_tile, GG_NV, k1 - k0, rows, panel, b.row, into, columns)
        }
    }
}
