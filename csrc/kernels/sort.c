/* argsort: where the elements of a row stand in order      top_k: where the k largest stand, the largest first
 *
 * An element becomes a number whose order is the wanted one, with its place below: no two are equal, so the order of
 * equal elements is that of their places.  The k first of them are kept in a heap, the last of these on top; taken
 * from it one by one they are sorted.  argsort keeps all. */
#include "abi/attrs/sort.h"
#include "vec/convert.h"
#include "walk/kernel.h"

/* Ascending with x, -0 as 0; NaN is above everything. */
static uint32_t sort_key(float x, int descending) {
    if (x != x) return UINT32_MAX;
    const uint32_t bits = gg_bits(x + 0.0f), key = bits >> 31 ? ~bits : bits | UINT32_C(1) << 31;
    return descending ? ~key : key;
}

/* The element at `at` goes down until none below it is larger. */
static void sift(uint64_t *heap, int64_t n, int64_t at) {
    const uint64_t moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (heap[child] <= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void first_k(const char *x, int64_t n, int64_t step, int descending, int64_t k, int32_t *out, uint64_t *heap) {
    if (k == 0) return;
    for (int64_t i = 0; i < n; i++) {
        float value;
        memcpy(&value, x + i * step, sizeof value);
        const uint64_t key = (uint64_t)sort_key(value, descending) << 32 | (uint32_t)i;
        if (i < k) {
            heap[i] = key;
            for (int64_t at = k / 2 - 1; i == k - 1 && at >= 0; at--) sift(heap, k, at);
        } else if (key < heap[0]) {
            heap[0] = key;
            sift(heap, k, 0);
        }
    }
    for (int64_t left = k - 1; left >= 0; left--) {
        out[left] = (int32_t)(uint32_t)heap[0];
        heap[0] = heap[left];
        sift(heap, left, 0);
    }
}

static void sort_rows(const gg_call *c, int64_t from, int64_t to, int descending, uint64_t *heap) {
    const gg_tensor *x = c->src;
    const int64_t k = c->dst->ne[3];
    for (int64_t r = from; r < to; r++)
        first_k(gg_row(x, r), x->ne[3], x->nb[3], descending, k, (int32_t *)c->dst->data + r * k, heap);
}

static int64_t sort_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_rows(c->src), c->src->ne[3], 16);
}

static int64_t sort_scratch(const gg_call *c) { return c->dst->ne[3] * (int64_t)sizeof(uint64_t); }

static void argsort_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const int64_t rows = gg_rows(c->src), tasks = sort_tasks(c, stage);
    const gg_argsort_attrs *a = c->attrs;
    sort_rows(c, gg_cut(rows, begin, tasks), gg_cut(rows, end, tasks), a->order != 0, scratch);
}

GG_KERNEL(argsort, .stages = 1, .tasks = sort_tasks, .run = argsort_run, .scratch = sort_scratch);

static void top_k_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const int64_t rows = gg_rows(c->src), tasks = sort_tasks(c, stage);
    sort_rows(c, gg_cut(rows, begin, tasks), gg_cut(rows, end, tasks), 1, scratch);
}

GG_KERNEL(top_k, .stages = 1, .tasks = sort_tasks, .run = top_k_run, .scratch = sort_scratch);
