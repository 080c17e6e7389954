/* get_rows:      dst[i] = x[ids[i]]                          x: [R, n] any strides, dst: [.., n]
 * get_rows_back: dst[r] = sum of dout[i] where ids[i] == r   dout: [.., n] and ids: contiguous, dst: [R, n]
 * set_rows:      dst[r] = b[i] of the last i with ids[i] == r, a[r] if there is none
 * write_rows:    dst[ids[i]] = b[i], dst being the leaf a
 * set_rows_back: dst[i] = dout[ids[i]] if i is the last with this id, else 0
 *
 * Each also for a batch of matrices, with ids for each.
 * An id outside of 0 ... R-1 is reported; its row is zero, and adds to none. */
#include "abi/attrs/rows.h"
#include "vec/quant.h"
#include "walk/kernel.h"
#include "walk/nest.h"
#include "walk/rows.h"

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
    const int batched = x->ne[0] * x->ne[1] > 1;
    float *const dst = c->dst->data;
    for (int64_t i = gg_cut(count, begin, tasks), to = gg_cut(count, end, tasks); i < to; i++) {
        const int32_t id = rows_id(ids, i);
        if (id >= 0 && id < R) {
            const int64_t matrix = batched ? i / ids->ne[3] : 0;
            rows_gather(x, gg_at(x, matrix / x->ne[1], matrix % x->ne[1], id), dst + i * n, n);
        } else {
            gg_report(c, GG_INDEX, ROWS_IDS, id, R);
            memset(dst + i * n, 0, n * sizeof(float));
        }
    }
}

GG_KERNEL(get_rows, .stages = 1, .tasks = get_rows_tasks, .run = get_rows_run);

/* A task owns a range of rows, or of columns, of dst: it zeroes them and goes through all ids in order.
 *
 * A row with many ids would be a long sum in f32.  Stage 0 counts each row's ids and gives such rows a place in work,
 * where a block of terms adds up before it is added to the row.
 *
 * Ranges of rows write one run of memory each.  Few rows may not share the work evenly (most ids may be the same),
 * so there columns are shared; narrow columns cost more, for each is another page. */
enum {
    BACK_ROWS = 256,     /* rows that are enough to share the work by */
    BACK_TASKS = 32,     /* at most: each of them reads all ids */
    BACK_WORK = 1 << 15, /* elements zeroed or added in the smallest task */
    BACK_COLUMNS = 64,   /* in the smallest range */
    BACK_MANY = 256,     /* ids with which a row has a place */
};

static int back_by_rows(const gg_call *c) { return c->dst->ne[2] >= BACK_ROWS; }

static int64_t back_matrices(const gg_call *c) {
    return ((const gg_get_rows_back_attrs *)c->attrs)->batched ? gg_rows(&c->src[ROWS_IDS]) : 1;
}

static int64_t back_ids(const gg_call *c) { return gg_elements(&c->src[ROWS_IDS]) / gg_max(1, back_matrices(c)); }

/* How many rows of a matrix may need a place. */
static int64_t back_most(const gg_call *c) { return gg_min(c->dst->ne[2], back_ids(c) / BACK_MANY); }

/* The places of a matrix's rows, in work. */
typedef struct back_places {
    int32_t *count;       /* [1] */
    int32_t *of;          /* [R]: -1 - its place, or how many ids the row has */
    int32_t *row, *block; /* [count]: the row of a place, and how many terms add up there */
    float *sum;           /* [count][n] */
    int64_t bytes;
} back_places;

static back_places back_places_of(const gg_call *c, int64_t matrix) {
    const int64_t R = c->dst->ne[2], most = back_most(c), head = gg_round_up(1 + R + 2 * most, 16);
    back_places p = { .bytes =
                          most == 0 ? 0 : gg_round_up((head + most * c->dst->ne[3]) * (int64_t)sizeof(float), 64) };
    if (c->work == NULL || most == 0) return p;
    p.count = (int32_t *)((char *)c->work + matrix * p.bytes);
    p.of = p.count + 1;
    p.row = p.of + R;
    p.block = p.row + most;
    p.sum = (float *)(p.count + head);
    return p;
}

/* Tasks of one matrix. */
static int64_t back_ranges(const gg_call *c) {
    const int64_t R = c->dst->ne[2], n = c->dst->ne[3], count = back_ids(c);
    const int64_t wanted = gg_min((R + 2 * count) * n / BACK_WORK, back_by_rows(c) ? R : n / BACK_COLUMNS);
    return gg_max(1, gg_min(BACK_TASKS, wanted));
}

static int64_t get_rows_back_tasks(const gg_call *c, int stage) {
    if (stage == 0) return back_most(c) > 0 ? back_matrices(c) : 0;
    return back_matrices(c) * back_ranges(c);
}

static int64_t get_rows_back_work(const gg_call *c) { return back_matrices(c) * back_places_of(c, 0).bytes; }
static int64_t get_rows_back_scratch(const gg_call *c) { return back_most(c) * (int64_t)sizeof(int32_t); }

static void back_find_places(const gg_call *c, int64_t matrix) {
    const int64_t R = c->dst->ne[2], count = back_ids(c);
    const int32_t *const ids = (const int32_t *)c->src[ROWS_IDS].data + matrix * count;
    const back_places p = back_places_of(c, matrix);
    int32_t places = 0;
    memset(p.of, 0, R * sizeof *p.of);
    for (int64_t i = 0; i < count; i++)
        if (ids[i] >= 0 && ids[i] < R) p.of[ids[i]]++;
    for (int64_t i = 0; i < gg_min(R, count); i++) {
        const int32_t r = R < count ? (int32_t)i : ids[i];
        if (r < 0 || r >= R || p.of[r] < BACK_MANY) continue;
        p.row[places] = r;
        p.block[places] = (int32_t)gg_sum_block(p.of[r]);
        p.of[r] = -1 - places++;
    }
    *p.count = places;
}

/* Ranges begin .. end of a matrix. */
static void back_matrix(const gg_call *c, int64_t matrix, int64_t begin, int64_t end, int32_t *left) {
    const int64_t R = c->dst->ne[2], n = c->dst->ne[3], ranges = back_ranges(c);
    const int64_t count = back_ids(c);
    const int32_t *const ids = (const int32_t *)c->src[ROWS_IDS].data + matrix * count;
    int64_t r0 = 0, r1 = R, j0 = 0, j1 = n;
    if (back_by_rows(c)) {
        r0 = gg_cut(R, begin, ranges);
        r1 = gg_cut(R, end, ranges);
    } else {
        const int64_t blocks = gg_ceil_div(n, BACK_COLUMNS);
        j0 = gg_min(n, gg_cut(blocks, begin, ranges) * BACK_COLUMNS);
        j1 = gg_min(n, gg_cut(blocks, end, ranges) * BACK_COLUMNS);
    }
    const float *const dout = (const float *)c->src[ROWS_DOUT].data + matrix * count * n + j0;
    float *const dst = (float *)c->dst->data + matrix * R * n + j0;
    const int64_t width = j1 - j0;

    if (width == n) memset(dst + r0 * n, 0, (r1 - r0) * n * sizeof(float));
    else
        for (int64_t r = r0; r < r1; r++) memset(dst + r * n, 0, width * sizeof(float));

    const back_places p = back_places_of(c, matrix);
    const int32_t places = p.count ? *p.count : 0;
    for (int32_t i = 0; i < places; i++) {
        left[i] = p.block[i];
        if (p.row[i] >= r0 && p.row[i] < r1) memset(p.sum + i * n + j0, 0, width * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t r = ids[i];
        if (r >= r0 && r < r1) {
            const int32_t place = places > 0 ? -1 - p.of[r] : -1;
            float *const to = place < 0 ? dst + r * n : p.sum + place * n + j0;
            gg_add_row(to, dout + i * n, width);
            if (place < 0 || --left[place] > 0) continue;
            gg_add_row(dst + r * n, to, width);
            memset(to, 0, width * sizeof(float));
            left[place] = p.block[place];
        } else if (r < 0 || r >= R) {
            gg_report(c, GG_INDEX, ROWS_IDS, r, R);
        }
    }
    for (int32_t i = 0; i < places; i++)
        if (p.row[i] >= r0 && p.row[i] < r1) gg_add_row(dst + p.row[i] * n, p.sum + i * n + j0, width);
}

static void get_rows_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    if (stage == 0) {
        for (int64_t matrix = begin; matrix < end; matrix++) back_find_places(c, matrix);
        return;
    }
    const int64_t ranges = back_ranges(c);
    while (begin < end) { /* the ranges of a matrix at once: its ids are read once for all of them */
        const int64_t matrix = begin / ranges, first = matrix * ranges, stop = gg_min(end, first + ranges);
        back_matrix(c, matrix, begin - first, stop - first, scratch);
        begin = stop;
    }
}

GG_KERNEL(get_rows_back, .stages = 2, .tasks = get_rows_back_tasks, .run = get_rows_back_run,
          .work = get_rows_back_work, .scratch = get_rows_back_scratch);

/* -- set_rows, set_rows_back: work holds, for each list of ids, the last i of every row, -1 if it has none -------- */

enum { SET_A, SET_B, SET_IDS, SET_BACK_DOUT = 0, SET_BACK_IDS };
enum { SET_BLOCK = 256 }; /* elements converted at a time */

static int64_t set_lists(const gg_tensor *ids) { return gg_rows(ids); }

/* The list of a matrix: lists are tiled over the batch. */
static int64_t set_list_of(const gg_tensor *ids, int64_t i0, int64_t i1) {
    return i0 % ids->ne[1] * ids->ne[2] + i1 % ids->ne[2];
}

static void set_find_last(const gg_call *c, int input, int64_t R, int64_t begin, int64_t end) {
    const gg_tensor *ids = &c->src[input];
    for (int64_t list = begin; list < end; list++) {
        int32_t *last = (int32_t *)c->work + list * R;
        for (int64_t r = 0; r < R; r++) last[r] = -1;
        for (int64_t i = 0; i < ids->ne[3]; i++) {
            const int32_t id = rows_id(ids, list * ids->ne[3] + i);
            if (id >= 0 && id < R) last[id] = (int32_t)i;
            else gg_report(c, GG_INDEX, input, id, R);
        }
    }
}

/* n floats, `step` bytes apart, to a row of any dtype. */
static void set_row(const gg_tensor *dst, char *to, const char *from, int64_t step, int64_t n) {
    float x[SET_BLOCK];
    if (dst->dtype == GG_F32) {
        nest_copy(to, 4, from, step, n, 4);
        return;
    }
    for (int64_t i = 0; i < n; i += SET_BLOCK) {
        const int64_t m = gg_min(SET_BLOCK, n - i);
        nest_copy((char *)x, 4, from + i * step, step, m, 4);
        if (dst->dtype == GG_F16) gg_f32_to_f16_row(x, (uint16_t *)to + i, m);
        else gg_f32_to_bf16_row(x, (uint16_t *)to + i, m);
    }
}

static int64_t set_rows_tasks(const gg_call *c, int stage) {
    if (stage == 0) return set_lists(&c->src[SET_IDS]);
    return gg_elements(c->dst) == 0 ? 0 : gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], 1);
}

static int64_t set_rows_work(const gg_call *c) {
    return set_lists(&c->src[SET_IDS]) * c->dst->ne[2] * (int64_t)sizeof(int32_t);
}

static void set_rows_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const gg_tensor *a = &c->src[SET_A], *b = &c->src[SET_B], *ids = &c->src[SET_IDS], *dst = c->dst;
    const int64_t R = dst->ne[2], n = dst->ne[3], size = gg_float_bytes(dst->dtype), rows = gg_rows(dst);
    if (stage == 0) {
        set_find_last(c, SET_IDS, R, begin, end);
        return;
    }
    const int64_t tasks = set_rows_tasks(c, 1);
    for (int64_t r = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks); r < to; r++) {
        const int64_t row = r % R, i1 = r / R % dst->ne[1], i0 = r / R / dst->ne[1];
        const int32_t last = ((const int32_t *)c->work)[set_list_of(ids, i0, i1) * R + row];
        char *out = (char *)dst->data + r * n * size;
        if (last < 0) nest_copy(out, size, gg_at(a, i0, i1, row), a->nb[3], n, (int)size);
        else set_row(dst, out, gg_at(b, i0, i1, last), b->nb[3], n);
    }
}

static int64_t set_rows_back_tasks(const gg_call *c, int stage) {
    if (stage == 0) return set_lists(&c->src[SET_BACK_IDS]);
    return gg_elements(c->dst) == 0 ? 0 : gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], 1);
}

static int64_t set_rows_back_work(const gg_call *c) {
    return set_lists(&c->src[SET_BACK_IDS]) * c->src[SET_BACK_DOUT].ne[2] * (int64_t)sizeof(int32_t);
}

static void set_rows_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const gg_tensor *dout = &c->src[SET_BACK_DOUT], *ids = &c->src[SET_BACK_IDS], *dst = c->dst;
    const int64_t R = dout->ne[2], n = dst->ne[3], count = dst->ne[2], rows = gg_rows(dst);
    if (stage == 0) {
        set_find_last(c, SET_BACK_IDS, R, begin, end);
        return;
    }
    const int64_t tasks = set_rows_back_tasks(c, 1);
    for (int64_t r = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks); r < to; r++) {
        const int64_t i = r % count, i1 = r / count % dst->ne[1], i0 = r / count / dst->ne[1];
        const int64_t list = set_list_of(ids, i0, i1), id = rows_id(ids, list * count + i);
        float *out = (float *)dst->data + r * n;
        if (((const int32_t *)c->work)[list * R + id] == i)
            nest_copy((char *)out, 4, gg_at(dout, i0, i1, id), dout->nb[3], n, 4);
        else memset(out, 0, n * sizeof(float));
    }
}

GG_KERNEL(set_rows, .stages = 2, .tasks = set_rows_tasks, .run = set_rows_run, .work = set_rows_work);
GG_KERNEL(set_rows_back, .stages = 2, .tasks = set_rows_back_tasks, .run = set_rows_back_run,
          .work = set_rows_back_work);

/* A task owns a matrix of the leaf, and writes its rows in order: the last one of an id stays. */
static int64_t write_rows_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_elements(&c->src[SET_B]) == 0 && gg_elements(&c->src[SET_IDS]) == 0 ? 0 : c->dst->ne[0] * c->dst->ne[1];
}

static void write_rows_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_tensor *b = &c->src[SET_B], *ids = &c->src[SET_IDS], *dst = c->dst;
    const int64_t R = dst->ne[2], n = dst->ne[3], count = ids->ne[3], size = gg_float_bytes(dst->dtype);
    for (int64_t m = begin; m < end; m++) {
        const int64_t i0 = m / dst->ne[1], i1 = m % dst->ne[1];
        for (int64_t i = 0; i < count; i++) {
            const int32_t id = rows_id(ids, set_list_of(ids, i0, i1) * count + i);
            if (id >= 0 && id < R)
                set_row(dst, (char *)dst->data + (m * R + id) * n * size, gg_at(b, i0, i1, i), b->nb[3], n);
            else gg_report(c, GG_INDEX, SET_IDS, id, R);
        }
    }
}

GG_KERNEL(write_rows, .stages = 1, .tasks = write_rows_tasks, .run = write_rows_run);
