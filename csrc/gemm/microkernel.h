/* The one register-blocked product under every matrix-like kernel: a GG_MR x GG_NR tile in registers.
 *
 * c[m][j] = sum over k of A[m * a_row + k * a_col] * B[k * b_row + j]
 *
 * One FMA chain over k for each element, ascending: the same bits wherever a product is cut along m or n. */
#pragma once
#include "vec/simd.h"

enum { GG_NR = GG_NV * GG_VW }; /* columns of a tile */

/* A tile of M rows and `vectors` vectors of columns, onto what c holds; both are compile-time constants after
 * inlining, M from 1 to GG_MR, vectors from 1 to GG_NV. */
GG_INLINE void gg_micro_onto(const int M, const int vectors, int64_t K, const float *A, int64_t a_row, int64_t a_col,
                             const float *B, int64_t b_row, vf c[GG_MR][GG_NV]) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < K; k++, A += a_col, B += b_row) {
        vf b[GG_NV];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) b[j] = vf_load(B + j * GG_VW);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) c[m][j] += A[m * a_row] * b[j];
    }
}

/* The same onto zeros. */
GG_INLINE void gg_micro_part(const int M, const int vectors, int64_t K, const float *A, int64_t a_row, int64_t a_col,
                             const float *B, int64_t b_row, vf c[GG_MR][GG_NV]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) c[m][j] = vf_zero();
    gg_micro_onto(M, vectors, K, A, a_row, a_col, B, b_row, c);
}

/* All GG_NR columns. */
GG_INLINE void gg_micro(const int M, int64_t K, const float *A, int64_t a_row, int64_t a_col, const float *B,
                        int64_t b_row, vf c[GG_MR][GG_NV]) {
    gg_micro_part(M, GG_NV, K, A, a_row, a_col, B, b_row, c);
}

/* GG_EACH_M(M, F, ...) calls F(constant, ...) for the M at hand, 1 to GG_MR. */
#if GG_MR > 6
#define GG_LARGE_M(F, ...) \
    case 12: F(12, __VA_ARGS__); break; \
    case 11: F(11, __VA_ARGS__); break; \
    case 10: F(10, __VA_ARGS__); break; \
    case 9: F(9, __VA_ARGS__); break; \
    case 8: F(8, __VA_ARGS__); break; \
    case 7: F(7, __VA_ARGS__); break;
#else
#define GG_LARGE_M(F, ...)
#endif
#define GG_EACH_M(M, F, ...) \
    switch (M) { \
        GG_LARGE_M(F, __VA_ARGS__) \
    case 6: F(6, __VA_ARGS__); break; \
    case 5: F(5, __VA_ARGS__); break; \
    case 4: F(4, __VA_ARGS__); break; \
    case 3: F(3, __VA_ARGS__); break; \
    case 2: F(2, __VA_ARGS__); break; \
    case 1: F(1, __VA_ARGS__); break; \
    }
