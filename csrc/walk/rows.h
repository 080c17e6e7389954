/* What kernels on rows share: walking the rows of a strided tensor, and sums and maxima along one.
 *
 * Sums run in f32 lanes within a block of the row and in double from block to block, always in the
 * same order; their error does not grow with the row. */
#pragma once
#include "walk/kernel.h"

enum { GG_ROW_BLOCK = 2048 }; /* elements: 8 KiB, so that a second look at a block finds it in L1 */

/* Terms that one f32 sum takes of `terms` before it is added to another: the roundings of either stay few. */
static inline int64_t gg_sum_block(int64_t terms) { return gg_max(128, (int64_t)ceil(sqrt((double)terms))); }

static inline void gg_add_row(float *restrict to, const float *restrict from, int64_t n) {
    int64_t i = 0;
    for (; i + GG_VW <= n; i += GG_VW) vf_store(to + i, vf_load(to + i) + vf_load(from + i));
    for (; i < n; i++) to[i] += from[i];
}

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

/* The sum over a row of n elements, as a double.  TERM is a vector made of the `count` elements from `at` on, zero in
 * lanes beyond; of whole vectors `count` is the constant GG_VW. */
#define GG_SUM_OVER_ROW(n, at, count, TERM) \
    ({ \
        double total_ = 0; \
        for (int64_t i_ = 0; i_ < (n);) { \
            const int64_t end_ = gg_min((n), i_ + GG_ROW_BLOCK); \
            vf s_[4] = { 0 }; \
            for (; i_ + 4 * GG_VW <= end_; i_ += 4 * GG_VW) \
                for (int k_ = 0; k_ < 4; k_++) { \
                    const int64_t at = i_ + k_ * GG_VW; \
                    enum { count = GG_VW }; \
                    s_[k_] += TERM; \
                } \
            for (; i_ + GG_VW <= end_; i_ += GG_VW) { \
                const int64_t at = i_; \
                enum { count = GG_VW }; \
                s_[0] += TERM; \
            } \
            if (i_ < end_) { \
                const int64_t at = i_; \
                const int count = (int)(end_ - i_); \
                s_[1] += TERM; \
                i_ = end_; \
            } \
            total_ += vf_sum((s_[0] + s_[1]) + (s_[2] + s_[3])); \
        } \
        total_; \
    })

static inline double gg_row_sum(const float *x, int64_t n) {
    return GG_SUM_OVER_ROW(n, i, count, gg_take(x + i, count, 0));
}

static inline double gg_row_dot(const float *a, const float *b, int64_t n) {
    return GG_SUM_OVER_ROW(n, i, count, gg_take(a + i, count, 0) * gg_take(b + i, count, 0));
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
