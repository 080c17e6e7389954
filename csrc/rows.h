/* What kernels on rows share: walking the rows of a strided tensor, and sums and maxima along one.
 *
 * Sums run in f32 lanes within a block of the row and in double from block to block, always in the
 * same order; their error does not grow with the row. */
#pragma once
#include "simd.h"

enum { GG_ROW_BLOCK = 2048 }; /* elements: 8 KiB, so that a second look at a block finds it in L1 */

/* The row at hand of a tensor whose rows are visited in order. */
typedef struct gg_walk {
    const gg_tensor *t;
    char *row;
    int64_t i0, i1, i2;
} gg_walk;

static inline gg_walk gg_walk_from(const gg_tensor *t, int64_t r) {
    gg_walk w = { .t = t };
    if (r < gg_rows(t)) {
        w.i2 = r % t->ne[2], w.i1 = r / t->ne[2] % t->ne[1], w.i0 = r / t->ne[2] / t->ne[1];
        w.row = gg_at(t, w.i0, w.i1, w.i2);
    }
    return w;
}

static inline void gg_walk_on(gg_walk *w) {
    const gg_tensor *t = w->t;
    if (++w->i2 < t->ne[2]) {
        w->row += t->nb[2];
        return;
    }
    w->i2 = 0;
    if (++w->i1 == t->ne[1]) {
        w->i1 = 0;
        if (++w->i0 == t->ne[0]) return; /* that was the last row */
    }
    w->row = gg_at(t, w->i0, w->i1, 0);
}

/* The first `count` elements of a vector, all of them where `count` is the constant GG_VW:
 * so that one body serves the whole vectors of a row and its tail. */
GG_INLINE vf gg_take(const float *p, const int count, const float fill) {
    return count == GG_VW ? vf_load(p) : vf_load_n(p, count, fill);
}
GG_INLINE void gg_give(float *p, vf x, const int count) {
    if (count == GG_VW) vf_store(p, x);
    else vf_store_n(p, x, count);
}

static inline double gg_row_sum(const float *x, int64_t n) {
    double total = 0;
    for (int64_t at = 0; at < n; at += GG_ROW_BLOCK) {
        const int64_t end = gg_min(n, at + GG_ROW_BLOCK);
        vf s[4] = { 0 };
        int64_t i = at;
        for (; i + 4 * GG_VW <= end; i += 4 * GG_VW)
            for (int k = 0; k < 4; k++) s[k] += vf_load(x + i + k * GG_VW);
        for (; i + GG_VW <= end; i += GG_VW) s[0] += vf_load(x + i);
        if (i < end) s[1] += vf_load_n(x + i, (int)(end - i), 0);
        total += vf_sum((s[0] + s[1]) + (s[2] + s[3]));
    }
    return total;
}

static inline double gg_row_dot(const float *a, const float *b, int64_t n) {
    double total = 0;
    for (int64_t at = 0; at < n; at += GG_ROW_BLOCK) {
        const int64_t end = gg_min(n, at + GG_ROW_BLOCK);
        vf s[4] = { 0 };
        int64_t i = at;
        for (; i + 4 * GG_VW <= end; i += 4 * GG_VW)
            for (int k = 0; k < 4; k++) s[k] += vf_load(a + i + k * GG_VW) * vf_load(b + i + k * GG_VW);
        for (; i + GG_VW <= end; i += GG_VW) s[0] += vf_load(a + i) * vf_load(b + i);
        if (i < end) s[1] += vf_load_n(a + i, (int)(end - i), 0) * vf_load_n(b + i, (int)(end - i), 0);
        total += vf_sum((s[0] + s[1]) + (s[2] + s[3]));
    }
    return total;
}

/* Whether all elements of rows, `step` floats apart, are finite: of others 0 * x is NaN.  (Bits are collected, not added
 * up: a sum would wait for the one before.) */
static inline int gg_rows_finite(const float *x, int64_t step, int64_t rows, int64_t n) {
    vi bits = vi_set1(0);
    for (int64_t r = 0; r < rows; r++, x += step) {
        int64_t i = 0;
        for (; i + GG_VW <= n; i += GG_VW) bits |= (vi)(vf_load(x + i) * 0.0f);
        if (i < n) bits |= (vi)(vf_load_n(x + i, (int)(n - i), 0) * 0.0f);
    }
    return !vi_any((bits & INT32_MAX) != 0);
}

static inline int gg_row_finite(const float *x, int64_t n) { return gg_rows_finite(x, 0, 1, n); }

/* The largest element, -inf of none; NaNs are passed over. */
static inline float gg_row_max(const float *x, int64_t n) {
    vf most[4];
    for (int k = 0; k < 4; k++) most[k] = vf_set1(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * GG_VW <= n; i += 4 * GG_VW)
        for (int k = 0; k < 4; k++) most[k] = vf_max(vf_load(x + i + k * GG_VW), most[k]);
    for (; i + GG_VW <= n; i += GG_VW) most[0] = vf_max(vf_load(x + i), most[0]);
    if (i < n) most[1] = vf_max(vf_load_n(x + i, (int)(n - i), -INFINITY), most[1]);
    return vf_largest(vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3])));
}
