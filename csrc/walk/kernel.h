/* What every kernel file includes: rows, shapes, and how work is cut.
 *
 * Kernel files are compiled once for each instruction set (isa.h), so every function in them
 * is static; the one thing a file exports is GG_KERNEL(name, ...), listed in kernels.h. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "abi/ggrad.h"
#include "vec/simd.h"

#define GG_CAT_(a, b) a##b
#define GG_CAT(a, b) GG_CAT_(a, b)
#define GG_PASTE3_(a, b, c) a##b##c
#define GG_PASTE3(a, b, c) GG_PASTE3_(a, b, c)

/* GG_KERNEL(add, .stages = 1, .tasks = ..., .run = ...) defines the kernel `add` of this instruction set. */
#define GG_KERNEL(op, ...) const gg_kernel GG_PASTE3(gg_##op, _, GG_ISA) = { .name = #op, __VA_ARGS__ }

enum { GG_TASK_ELEMENTS = 8192 }; /* about what one task of a cheap elementwise kernel should hold */

static inline int64_t gg_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t gg_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t gg_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t gg_round_up(int64_t a, int64_t b) { return gg_ceil_div(a, b) * b; }

static inline int64_t gg_elements(const gg_tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }
static inline int64_t gg_rows(const gg_tensor *t) { return t->ne[0] * t->ne[1] * t->ne[2]; }

static inline char *gg_at(const gg_tensor *t, int64_t i0, int64_t i1, int64_t i2) {
    return (char *)t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2];
}

/* Start of the rth row, counting rows of `shape` (whose ne[0..2] must equal t's). */
static inline char *gg_row(const gg_tensor *t, int64_t r) {
    const int64_t i2 = r % t->ne[2], i1 = r / t->ne[2] % t->ne[1], i0 = r / t->ne[2] / t->ne[1];
    return gg_at(t, i0, i1, i2);
}

/* The ith of n nearly equal pieces of 0..total. */
static inline int64_t gg_cut(int64_t total, int64_t i, int64_t n) { return (int64_t)((__int128)total * i / n); }

/* Tasks for rows of `width` elements that cost `cost` cheap operations each. */
static inline int64_t gg_row_tasks(int64_t rows, int64_t width, int64_t cost) {
    const int64_t total = rows * width * cost;
    return gg_max(1, gg_min(rows, total / GG_TASK_ELEMENTS));
}

/* A block of dst[0] is complete and still in the cache: let the followers have it. */
static inline void gg_lead(const gg_call *c, int64_t from, int64_t n, int64_t rows, int64_t step) {
    for (int i = 0; i < c->n_followers; i++) c->followers[i].kernel->follow(&c->followers[i], from, n, rows, step);
}

static inline void gg_report_between(const gg_call *c, int code, int input, int64_t value, int64_t least,
                                     int64_t limit) {
    int32_t none = GG_OK;
    gg_fault *f = c->fault;
    if (__atomic_compare_exchange_n(&f->code, &none, code, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        f->input = input;
        f->node = c->index;
        f->value = value;
        f->limit = limit;
        f->least = least;
    }
}
static inline void gg_report(const gg_call *c, int code, int input, int64_t value, int64_t limit) {
    gg_report_between(c, code, input, value, 0, limit);
}
