/* Loops over several arrays at once, for kernels that treat every element alike.
 *
 * A nest is built from a shape and the arrays that fill it: array 0 is usually the destination.  An
 * array that is smaller than the shape along an axis is repeated there: tiled, as in ggml.  Axes of
 * size 1 vanish, and axes that all arrays run through without a jump become one; so contiguous
 * arrays of any shape end as one long row.
 *
 * What a kernel sees are pieces of rows, in which every source is either contiguous or one value
 * (step 0): sources with other steps have been gathered, transposed ones block by block.
 *
 * The elements are numbered 0 .. total; tasks take ranges of these numbers.  The order is that of the
 * shape unless a transposed source makes another one faster, and nobody needs that of the shape (in_order). */
#pragma once
#include "walk/kernel.h"

enum {
    NEST_DIMS = 9, /* each of four axes may fall into tiles and the place in a tile; nest_take_apart adds one */
    NEST_ARRAYS = 6,
    NEST_TILE_ROWS = 16, /* of f32: one cache line down a transposed source */
    NEST_TILE = 1024,    /* elements of a tile */
    NEST_SHORT = 512,    /* bytes that are copied here sooner than the C library is called */
};

typedef struct nest {
    int arrays, rank;
    int gathered;          /* bit k: the rows of array k are gathered */
    int size[NEST_ARRAYS]; /* bytes of an element */
    int64_t total;
    int64_t n[NEST_DIMS];                 /* innermost first: n[0] is the length of a row */
    int64_t step[NEST_DIMS][NEST_ARRAYS]; /* bytes */
    char *data[NEST_ARRAYS];
} nest;

/* A piece of a row.  at: where it begins in each array; step: bytes from element to element. */
typedef void nest_row(char *const *at, const int64_t *step, int64_t n, const void *attrs);

static inline int nest_bytes(int dtype) { return dtype == GG_F16 || dtype == GG_BF16 ? 2 : 4; }

static inline int nest_same_contiguous(const gg_tensor *t, const int64_t *ne, int64_t size) {
    int64_t step = size;
    for (int d = 3; d >= 0; d--) {
        if (t->ne[d] != ne[d] || (ne[d] != 1 && t->nb[d] != step)) return 0;
        step *= ne[d];
    }
    return 1;
}

/* One more axis, outside of those there are, unless it continues the last one. */
static inline void nest_push(nest *s, int64_t n, const int64_t *step) {
    if (n == 1) return;
    const int last = s->rank - 1;
    int continues = last >= 0;
    for (int k = 0; k < s->arrays && continues; k++) continues = step[k] == s->n[last] * s->step[last][k];
    if (continues) {
        s->n[last] *= n;
        return;
    }
    s->n[s->rank] = n;
    memcpy(s->step[s->rank], step, sizeof s->step[0]);
    s->rank++;
}

/* An array whose rows are not contiguous but whose elements are along another axis: walk rows along that one first. */
static inline void nest_bring_near(nest *s, int k) {
    for (int d = 2; d < s->rank; d++)
        if (s->step[d][k] == s->size[k]) {
            const int64_t n = s->n[d];
            int64_t step[NEST_ARRAYS];
            memcpy(step, s->step[d], sizeof step);
            for (int e = d; e > 1; e--) {
                s->n[e] = s->n[e - 1];
                memcpy(s->step[e], s->step[e - 1], sizeof step);
            }
            s->n[1] = n;
            memcpy(s->step[1], step, sizeof step);
            return;
        }
}

/* The axes of `arrays` arrays over the shape ne, in its order.  Along each axis an array has the shape's size,
 * 1, or one that divides it and is the same for all arrays smaller than the shape. */
static inline void nest_axes(nest *s, const int64_t *ne, int arrays, const gg_tensor *const *t) {
    s->arrays = arrays;
    s->rank = 0;
    s->gathered = 0;
    s->total = ne[0] * ne[1] * ne[2] * ne[3];
    int plain = 1;
    memset(s->data, 0, sizeof s->data);
    for (int k = 0; k < arrays; k++) {
        s->data[k] = t[k]->data;
        s->size[k] = nest_bytes(t[k]->dtype);
        plain = plain && nest_same_contiguous(t[k], ne, s->size[k]);
    }
    int64_t step[NEST_ARRAYS] = { 0 };
    if (!plain && s->total > 0) {
        for (int d = 3; d >= 0; d--) {
            int64_t tile = ne[d];
            for (int k = 0; k < arrays; k++)
                if (t[k]->ne[d] != 1 && t[k]->ne[d] < tile) tile = t[k]->ne[d];
            for (int k = 0; k < arrays; k++) step[k] = t[k]->ne[d] == 1 ? 0 : t[k]->nb[d];
            nest_push(s, tile, step);
            if (tile == ne[d]) continue;
            for (int k = 0; k < arrays; k++) step[k] = t[k]->ne[d] == ne[d] ? t[k]->nb[d] * tile : 0;
            nest_push(s, ne[d] / tile, step);
        }
    }
    if (s->rank == 0) {
        s->rank = 1;
        s->n[0] = s->total;
        for (int k = 0; k < arrays; k++) s->step[0][k] = s->size[k];
    }
}

/* A nest to walk: see nest_axes.  The first so many arrays are destinations, which are never gathered. */
static inline void nest_make_in(int in_order, nest *s, const int64_t *ne, int destinations, int arrays,
                                const gg_tensor *const *t) {
    nest_axes(s, ne, arrays, t);
    for (int k = destinations; k < arrays; k++)
        if (s->step[0][k] != s->size[k] && s->step[0][k] != 0) {
            if (s->gathered == 0 && !in_order) nest_bring_near(s, k);
            s->gathered |= 1 << k;
        }
}
static inline void nest_make(nest *s, const int64_t *ne, int destinations, int arrays, const gg_tensor *const *t) {
    nest_make_in(0, s, ne, destinations, arrays, t);
}

/* Rows of one element: where a destination is not contiguous along what would be the rows. */
static inline void nest_take_apart(nest *s) {
    for (int d = s->rank; d > 0; d--) {
        s->n[d] = s->n[d - 1];
        memcpy(s->step[d], s->step[d - 1], sizeof s->step[d]);
    }
    s->rank++;
    s->gathered = 0;
    s->n[0] = 1;
    memset(s->step[0], 0, sizeof s->step[0]);
    for (int k = 0; k < s->arrays; k++) s->step[0][k] = s->size[k];
}

/* 4-byte elements: to[r][c] = from[c][r] for a block of 4 by 4. */
GG_INLINE void nest_transpose4(char *to, int64_t pitch, const char *from, int64_t step) {
    typedef float quad __attribute__((vector_size(16)));
    typedef int32_t lanes __attribute__((vector_size(16)));
    typedef float quad_unaligned __attribute__((vector_size(16), aligned(2), may_alias));
    quad x[4];
    for (int c = 0; c < 4; c++) x[c] = *(const quad_unaligned *)(from + c * step);
#if defined(__clang__)
#define NEST_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define NEST_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (lanes){ i, j, k, l })
#endif
    const quad lo01 = NEST_SHUFFLE(x[0], x[1], 0, 4, 1, 5), hi01 = NEST_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
    const quad lo23 = NEST_SHUFFLE(x[2], x[3], 0, 4, 1, 5), hi23 = NEST_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
    *(quad_unaligned *)to = NEST_SHUFFLE(lo01, lo23, 0, 1, 4, 5);
    *(quad_unaligned *)(to + pitch) = NEST_SHUFFLE(lo01, lo23, 2, 3, 6, 7);
    *(quad_unaligned *)(to + 2 * pitch) = NEST_SHUFFLE(hi01, hi23, 0, 1, 4, 5);
    *(quad_unaligned *)(to + 3 * pitch) = NEST_SHUFFLE(hi01, hi23, 2, 3, 6, 7);
#undef NEST_SHUFFLE
    (void)sizeof(lanes);
}

GG_INLINE void nest_move(char *to, const char *from, int size) {
    if (size == 4) memcpy(to, from, 4);
    else memcpy(to, from, 2);
}

/* n elements of `size` bytes from any steps to any steps; equal addresses are left alone. */
static inline void nest_copy(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n, int size) {
    if (to_step == size && from_step == size) {
        if (to == from) return;
        if (n * size > NEST_SHORT) {
            memcpy(to, from, n * size);
            return;
        }
        int64_t i = 0, bytes = n * size;
        for (; i + GG_VECTOR_BYTES <= bytes; i += GG_VECTOR_BYTES) memcpy(to + i, from + i, GG_VECTOR_BYTES);
        for (; i < bytes; i += 2) nest_move(to + i, from + i, 2);
    } else if (size == 4) {
        for (int64_t i = 0; i < n; i++) nest_move(to + i * to_step, from + i * from_step, 4);
    } else {
        for (int64_t i = 0; i < n; i++) nest_move(to + i * to_step, from + i * from_step, 2);
    }
}

/* rows x n elements of any steps to rows that are contiguous. */
static void nest_gather(char *to, const char *from, int size, int64_t rows, int64_t row_step, int64_t n, int64_t step) {
    const int64_t pitch = n * size;
    if (row_step == size && rows > 1) {
        int64_t c = 0;
        if (size == 4)
            for (; c + 4 <= n; c += 4) { /* columns outside: each is one cache line, which is then done with */
                const char *column = from + c * step;
                int64_t r = 0;
                for (; r + 4 <= rows; r += 4) nest_transpose4(to + r * pitch + c * 4, pitch, column + r * 4, step);
                for (; r < rows; r++)
                    for (int k = 0; k < 4; k++) nest_move(to + r * pitch + (c + k) * 4, column + r * 4 + k * step, 4);
            }
        for (; c < n; c++)
            for (int64_t r = 0; r < rows; r++) nest_move(to + r * pitch + c * size, from + r * size + c * step, size);
        return;
    }
    for (int64_t r = 0; r < rows; r++, to += pitch, from += row_step)
        if (size == 4)
            for (int64_t c = 0; c < n; c++) nest_move(to + c * 4, from + c * step, 4);
        else
            for (int64_t c = 0; c < n; c++) nest_move(to + c * 2, from + c * step, 2);
}

/* Some rows, or a piece of one, with gathered sources, tile by tile; at: where they begin. */
static void nest_gathered_rows(const nest *s, char *const *at, int64_t rows, int64_t n, nest_row *row,
                               const void *attrs) {
    _Alignas(64) char buffer[NEST_ARRAYS][NEST_TILE * 4];
    const int64_t width = NEST_TILE / rows;
    int64_t step[NEST_ARRAYS];
    for (int k = 0; k < s->arrays; k++) step[k] = s->gathered >> k & 1 ? s->size[k] : s->step[0][k];
    for (int64_t c = 0; c < n; c += width) {
        const int64_t m = gg_min(width, n - c);
        for (int k = 0; k < s->arrays; k++)
            if (s->gathered >> k & 1)
                nest_gather(buffer[k], at[k] + c * s->step[0][k], s->size[k], rows, rows > 1 ? s->step[1][k] : 0, m,
                            s->step[0][k]);
        for (int64_t r = 0; r < rows; r++) {
            char *here[NEST_ARRAYS];
            for (int k = 0; k < s->arrays; k++)
                here[k] = s->gathered >> k & 1 ? buffer[k] + r * m * s->size[k]
                                               : at[k] + c * s->step[0][k] + (rows > 1 ? r * s->step[1][k] : 0);
            row(here, step, m, attrs);
        }
    }
}

/* Every array's place, moved by n steps; all entries, used or not, so that the loop is a vector or two. */
GG_INLINE void nest_move_on(char **at, const int64_t *step, int64_t n) {
    for (int k = 0; k < NEST_ARRAYS; k++) at[k] = (char *)((intptr_t)at[k] + n * step[k]);
}

/* Call `row` on pieces of rows until the elements from .. to are done. */
static inline void nest_walk(const nest *s, int64_t from, int64_t to, nest_row *row, const void *attrs) {
    char *at[NEST_ARRAYS];
    int64_t index[NEST_DIMS], rest = from;
    if (from >= to) return;
    memcpy(at, s->data, sizeof at);
    if (s->rank == 1) { /* `from` is the place in the row */
        for (int k = 0; k < s->arrays; k++) at[k] += from * s->step[0][k];
        if (s->gathered) nest_gathered_rows(s, at, 1, to - from, row, attrs);
        else row(at, s->step[0], to - from, attrs);
        return;
    }
    for (int d = 0; d < s->rank; d++) {
        index[d] = 0;
        if (rest == 0) continue;
        index[d] = d == s->rank - 1 ? rest : rest % s->n[d];
        rest = d == s->rank - 1 ? 0 : rest / s->n[d];
        nest_move_on(at, s->step[d], index[d]);
    }
    for (;;) {
        const int64_t n = gg_min(s->n[0] - index[0], to - from);
        int64_t rows = 1;
        if (s->gathered) {
            if (index[0] == 0)
                rows = gg_max(1, gg_min(NEST_TILE_ROWS, gg_min(s->n[1] - index[1], (to - from) / s->n[0])));
            nest_gathered_rows(s, at, rows, n, row, attrs);
        } else {
            row(at, s->step[0], n, attrs);
        }
        from += rows * n;
        if (from >= to) return;
        if (index[0] != 0) nest_move_on(at, s->step[0], -index[0]);
        index[0] = 0;
        nest_move_on(at, s->step[1], rows);
        index[1] += rows;
        for (int d = 1; index[d] == s->n[d]; d++) {
            nest_move_on(at, s->step[d], -s->n[d]);
            index[d] = 0;
            nest_move_on(at, s->step[d + 1], 1);
            index[d + 1]++;
        }
    }
}

/* A row's piece of f32, to be loaded a vector at a time: element i lies at at[i & mask], so that one value fills all. */
typedef struct nest_floats {
    const float *at;
    int64_t mask;
} nest_floats;

GG_INLINE nest_floats nest_floats_at(const char *at, int64_t step, float *lanes) {
    if (step != 0) return (nest_floats){ (const float *)at, -1 };
    vf_store(lanes, vf_set1(*(const float *)at));
    return (nest_floats){ lanes, 0 };
}
GG_INLINE vf nest_load(nest_floats x, int64_t i) { return vf_load(x.at + (i & x.mask)); }
GG_INLINE vf nest_load_n(nest_floats x, int64_t i, int64_t n) { return vf_load_n(x.at + (i & x.mask), (int)n, 0); }

/* Tasks for elements that cost `cost` cheap operations each, and where the ith begins: at a cache line. */
static inline int64_t nest_tasks(int64_t total, int64_t cost) { return total == 0 ? 0 : gg_row_tasks(total, 1, cost); }

static inline int64_t nest_cut(int64_t total, int64_t i, int64_t tasks) {
    return gg_min(total, gg_cut(gg_ceil_div(total, 16), i, tasks) * 16);
}
