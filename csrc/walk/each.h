/* Kernels that compute every element alone, from the same element of each source, tiled where that is smaller.
 * Sources have any strides; the destination is contiguous and may lie exactly on a source.  They lead and follow. */
#pragma once
#include "walk/nest.h"

enum { EACH_BLOCK = 4096 }; /* elements that are made before the followers have them: 16 KiB */

static int64_t each_tasks(const gg_call *c, int stage) {
    (void)stage;
    return nest_tasks(gg_elements(c->dst), 1);
}

static nest each_nest(const gg_call *c, int in_order) {
    nest s;
    nest_make_in(in_order, &s, c->dst->ne, 1, 1 + c->n_src,
                 (const gg_tensor *const[]){ c->dst, &c->src[0], &c->src[1], &c->src[2] });
    return s;
}

static void each_run(const gg_call *c, int64_t begin, int64_t end, nest_row *row) {
    const int64_t tasks = each_tasks(c, 0);
    const nest s = each_nest(c, c->n_followers > 0);
    int64_t from = nest_cut(s.total, begin, tasks);
    const int64_t to = nest_cut(s.total, end, tasks);
    for (int64_t next; from < to; from = next) {
        next = c->n_followers > 0 ? gg_min(to, from + EACH_BLOCK) : to;
        nest_walk(&s, from, next, row, c->attrs);
        gg_lead(c, from, next - from, 1, 0);
    }
}

static void each_follow(const gg_call *c, int64_t from, int64_t n, int64_t rows, int64_t step, nest_row *row) {
    const nest s = each_nest(c, 1);
    for (int64_t r = 0; r < rows; r++, from += step) nest_walk(&s, from, from + n, row, c->attrs);
}

/* The kernel `name`, whose pieces of rows `row` computes. */
#define EACH_KERNEL(name, row) \
    static void each_##name##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        (void)stage, (void)scratch; \
        each_run(c, begin, end, row); \
    } \
    static void each_##name##_follow(const gg_call *c, int64_t from, int64_t n, int64_t rows, int64_t step) { \
        each_follow(c, from, n, rows, step, row); \
    } \
    GG_KERNEL(name, .stages = 1, .tasks = each_tasks, .run = each_##name##_run, .leads = GG_FIRST_STAGE, \
              .follow = each_##name##_follow)

GG_INLINE int32_t each_int(const char *at, int64_t step, int64_t i) { return ((const int32_t *)at)[step == 0 ? 0 : i]; }

/* A row function of i32: VALUE is an expression of x and y. */
#define EACH_INTS(name, VALUE) \
    static void each_##name(char *const *at, const int64_t *step, int64_t n, const void *attrs) { \
        (void)attrs; \
        for (int64_t i = 0; i < n; i++) { \
            const int32_t x = each_int(at[1], step[1], i), y = each_int(at[2], step[2], i); \
            ((int32_t *)at[0])[i] = VALUE; \
        } \
    }

/* The kernel `name`: its row function follows from the dtype of the first source. */
#define EACH_KERNEL_BY_DTYPE(name, floats, ints) \
    static void each_##name##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        (void)stage, (void)scratch; \
        each_run(c, begin, end, c->src->dtype == GG_I32 ? ints : floats); \
    } \
    static void each_##name##_follow(const gg_call *c, int64_t from, int64_t n, int64_t rows, int64_t step) { \
        each_follow(c, from, n, rows, step, c->src->dtype == GG_I32 ? ints : floats); \
    } \
    GG_KERNEL(name, .stages = 1, .tasks = each_tasks, .run = each_##name##_run, .leads = GG_FIRST_STAGE, \
              .follow = each_##name##_follow)
