/* get_rows:      dst[i] = x[ids[i]]                          x: [R, n] any strides, dst: [.., n]
 * get_rows_back: dst[r] = sum of dout[i] where ids[i] == r   dout: [.., n] and ids: contiguous, dst: [R, n]
 *
 * An id outside of 0 ... R-1 is reported; its row is zero, and adds to none. */
#include "../kernel.h"
#include "../quant.h"

enum { ROWS_X = 0, ROWS_IDS = 1, ROWS_DOUT = 0 };

static int32_t rows_id(const gg_tensor *ids, int64_t i) {
    const int64_t i3 = i % ids->ne[3], r = i / ids->ne[3];
    return *(const int32_t *)(gg_row(ids, r) + i3 * ids->nb[3]);
}

static void rows_gather(const gg_tensor *x, const char *from, float *to, int64_t n) {
    if (gg_quantized(x->dtype)) {
        gg_dequantize(x->dtype, from, to, n);
        return;
    }
    if (x->nb[3] == gg_float_bytes(x->dtype)) {
        gg_to_f32_row(x->dtype, from, to, n);
        return;
    }
    for (int64_t j = 0; j < n; j++) to[j] = gg_load_as_f32(x->dtype, from + j * x->nb[3]);
}

static int64_t get_rows_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_elements(&c->src[ROWS_IDS]), c->dst->ne[3], 1);
}

static void get_rows_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_tensor *x = &c->src[ROWS_X], *ids = &c->src[ROWS_IDS];
    const int64_t R = x->ne[2], n = x->ne[3], count = gg_elements(ids), tasks = get_rows_tasks(c, 0);
    float *const dst = c->dst->data;
    for (int64_t i = gg_cut(count, begin, tasks), to = gg_cut(count, end, tasks); i < to; i++) {
        const int32_t id = rows_id(ids, i);
        if (id >= 0 && id < R) rows_gather(x, gg_at(x, 0, 0, id), dst + i * n, n);
        else {
            gg_report(c, GG_INDEX, ROWS_IDS, id, R);
            memset(dst + i * n, 0, n * sizeof(float));
        }
    }
}

GG_KERNEL(get_rows, .stages = 1, .tasks = get_rows_tasks, .run = get_rows_run);

/* A task owns a range of rows, or of columns, of dst: it zeroes them and goes through all ids in order.
 *
 * Ranges of rows write one run of memory each.  Few rows may not share the work evenly (most ids may be the same),
 * so there columns are shared; narrow columns cost more, for each is another page. */
enum {
    BACK_ROWS = 256,     /* rows that are enough to share the work by */
    BACK_TASKS = 32,     /* at most: each of them reads all ids */
    BACK_WORK = 1 << 15, /* elements zeroed or added in the smallest task */
    BACK_COLUMNS = 64,   /* in the smallest range */
};

static int back_by_rows(const gg_call *c) { return c->dst->ne[2] >= BACK_ROWS; }

static int64_t get_rows_back_tasks(const gg_call *c, int stage) {
    (void)stage;
    const int64_t R = c->dst->ne[2], n = c->dst->ne[3], count = gg_elements(&c->src[ROWS_IDS]);
    const int64_t wanted = gg_min((R + 2 * count) * n / BACK_WORK, back_by_rows(c) ? R : n / BACK_COLUMNS);
    return gg_max(1, gg_min(BACK_TASKS, wanted));
}

static void get_rows_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int64_t R = c->dst->ne[2], n = c->dst->ne[3], count = gg_elements(&c->src[ROWS_IDS]);
    const int64_t tasks = get_rows_back_tasks(c, 0);
    const int32_t *ids = c->src[ROWS_IDS].data;
    int64_t r0 = 0, r1 = R, j0 = 0, j1 = n;
    if (back_by_rows(c)) {
        r0 = gg_cut(R, begin, tasks);
        r1 = gg_cut(R, end, tasks);
    } else {
        const int64_t blocks = gg_ceil_div(n, BACK_COLUMNS);
        j0 = gg_min(n, gg_cut(blocks, begin, tasks) * BACK_COLUMNS);
        j1 = gg_min(n, gg_cut(blocks, end, tasks) * BACK_COLUMNS);
    }
    const float *const dout = (const float *)c->src[ROWS_DOUT].data + j0;
    float *const dst = (float *)c->dst->data + j0;
    const int64_t width = j1 - j0;

    if (width == n) memset(dst + r0 * n, 0, (r1 - r0) * n * sizeof(float));
    else
        for (int64_t r = r0; r < r1; r++) memset(dst + r * n, 0, width * sizeof(float));

    for (int64_t i = 0; i < count; i++) {
        const int64_t r = ids[i];
        if (r >= r0 && r < r1) {
            const float *from = dout + i * n;
            float *to = dst + r * n;
            int64_t j = 0;
            for (; j + GG_VW <= width; j += GG_VW) vf_store(to + j, vf_load(to + j) + vf_load(from + j));
            for (; j < width; j++) to[j] += from[j];
        } else if (r < 0 || r >= R) {
            gg_report(c, GG_INDEX, ROWS_IDS, r, R);
        }
    }
}

GG_KERNEL(get_rows_back, .stages = 1, .tasks = get_rows_back_tasks, .run = get_rows_back_run);
