/* Kernels that move elements: copies and casts, windows, tiles.  Sources have any strides. */
#include "abi/attrs/copy.h"
#include "vec/quant.h"
#include "walk/kernel.h"
#include "walk/nest.h"
#include "walk/rows.h"

static void copy_row4(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    nest_copy(at[0], step[0], at[1], step[1], n, 4);
}

static void copy_row2(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    nest_copy(at[0], step[0], at[1], step[1], n, 2);
}

static int64_t copy_tasks_of(const gg_tensor *t) { return nest_tasks(gg_elements(t), 1); }

/* Tasks begin .. end of copying `from`, repeated where it is smaller, to `to`. */
static void copy_walk(const gg_tensor *to, const gg_tensor *from, int64_t begin, int64_t end, nest_row *row,
                      const void *attrs) {
    nest s;
    const int64_t tasks = copy_tasks_of(to);
    nest_make(&s, to->ne, 1, 2, (const gg_tensor *const[]){ to, from });
    nest_walk(&s, nest_cut(s.total, begin, tasks), nest_cut(s.total, end, tasks), row, attrs);
}

static void copy_same_dtype(const gg_tensor *to, const gg_tensor *from, int64_t begin, int64_t end) {
    copy_walk(to, from, begin, end, nest_bytes(to->dtype) == 4 ? copy_row4 : copy_row2, NULL);
}

static void copy_zeros(const gg_tensor *to, int64_t begin, int64_t end) {
    const int64_t n = gg_elements(to), tasks = copy_tasks_of(to), size = nest_bytes(to->dtype);
    const int64_t first = nest_cut(n, begin, tasks), last = nest_cut(n, end, tasks);
    memset((char *)to->data + first * size, 0, (last - first) * size);
}

/* -- cont, repeat --------------------------------------------------------------------------------- */

static int64_t copy_tasks(const gg_call *c, int stage) {
    (void)stage;
    return copy_tasks_of(c->dst);
}

static void copy_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    copy_same_dtype(c->dst, c->src, begin, end);
}

GG_KERNEL(cont, .stages = 1, .tasks = copy_tasks, .run = copy_run);
GG_KERNEL(repeat, .stages = 1, .tasks = copy_tasks, .run = copy_run);

/* -- cast ----------------------------------------------------------------------------------------- */

enum { COPY_CAST_BLOCK = 256 };

typedef struct copy_dtypes {
    int to, from;
} copy_dtypes;

/* Truncates; NaN and what i32 cannot hold become its least value, as on x86. */
GG_INLINE int32_t copy_f32_to_i32(float x) {
    const int holds = x >= -2147483648.0f && x < 2147483648.0f;
    return holds ? (int32_t)x : INT32_MIN;
}

/* To odd: the nearest f32 towards zero, with its last bit set if that is not exact.  Rounding this to bf16 gives what
 * rounding the integer itself would; f16's range is exact in f32 anyway. */
static float copy_i32_to_odd(int32_t i) {
    const float nearest = (float)i;
    if ((double)nearest == (double)i) return nearest;
    const uint32_t larger = fabs((double)nearest) > fabs((double)i);
    return gg_float((gg_bits(nearest) - larger) | 1);
}

static void copy_cast_block(void *to, int to_dtype, const void *from, int from_dtype, int64_t n) {
    float x[COPY_CAST_BLOCK];
    if (from_dtype == GG_I32) {
        const int32_t *i = from;
        if (to_dtype == GG_F32)
            for (int64_t k = 0; k < n; k++) ((float *)to)[k] = (float)i[k];
        else
            for (int64_t k = 0; k < n; k++) x[k] = copy_i32_to_odd(i[k]);
    } else if (to_dtype == GG_F32) {
        gg_to_f32_row(from_dtype, from, to, n);
    } else {
        gg_to_f32_row(from_dtype, from, x, n);
    }
    switch (to_dtype) {
    case GG_F16: gg_f32_to_f16_row(x, to, n); break;
    case GG_BF16: gg_f32_to_bf16_row(x, to, n); break;
    case GG_I32:
        for (int64_t k = 0; k < n; k++) ((int32_t *)to)[k] = copy_f32_to_i32(x[k]);
        break;
    }
}

static void copy_cast_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    const copy_dtypes *dtype = attrs;
    const int64_t size = step[0];
    if (step[1] == 0 && n > 0) {
        copy_cast_block(at[0], dtype->to, at[1], dtype->from, 1);
        nest_copy(at[0] + size, size, at[0], 0, n - 1, (int)size);
        return;
    }
    for (int64_t i = 0; i < n; i += COPY_CAST_BLOCK)
        copy_cast_block(at[0] + i * size, dtype->to, at[1] + i * step[1], dtype->from, gg_min(COPY_CAST_BLOCK, n - i));
}

/* The blocks of whole rows, one by one. */
static void copy_cast_quantized(const gg_tensor *to, const gg_tensor *from, int64_t begin, int64_t end) {
    const int64_t block = gg_block(from->dtype), in_row = from->ne[3] / block, tasks = copy_tasks_of(to);
    const int64_t blocks = gg_rows(from) * in_row, size = nest_bytes(to->dtype);
    for (int64_t i = gg_cut(blocks, begin, tasks), last = gg_cut(blocks, end, tasks); i < last; i++) {
        float x[GG_LONGEST_BLOCK];
        gg_dequantize(from->dtype, gg_row(from, i / in_row) + i % in_row * from->nb[3], x, block);
        copy_cast_block((char *)to->data + i * block * size, to->dtype, x, GG_F32, block);
    }
}

static void copy_cast_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    if (gg_quantized(c->src->dtype)) {
        copy_cast_quantized(c->dst, c->src, begin, end);
        return;
    }
    const copy_dtypes dtype = { .to = c->dst->dtype, .from = c->src->dtype };
    if (dtype.to == dtype.from) copy_same_dtype(c->dst, c->src, begin, end);
    else copy_walk(c->dst, c->src, begin, end, copy_cast_row, &dtype);
}

GG_KERNEL(cast, .stages = 1, .tasks = copy_tasks, .run = copy_cast_run);

/* -- windows: slice_back, slice_add --------------------------------------------------------------- */

enum { COPY_WHOLE, COPY_WINDOW }; /* the stages: everything, then what lies in the window */

/* The elements start, start + step, ... of t along each axis, as many as `like` has. */
static gg_tensor copy_window(const gg_tensor *t, const gg_tensor *like, const int64_t *starts, const int64_t *steps) {
    gg_tensor w = *t;
    char *data = t->data;
    for (int d = 0; d < 4; d++) {
        const int axis = d - (4 - t->rank); /* as the user counts; attributes have their values there */
        w.ne[d] = like->ne[d];
        if (axis < 0) continue;
        w.nb[d] = steps[axis] * t->nb[d];
        data += starts[axis] * t->nb[d];
    }
    w.data = data;
    return w;
}

static int64_t copy_slice_back_tasks(const gg_call *c, int stage) {
    return copy_tasks_of(stage == COPY_WHOLE ? c->dst : &c->src[0]);
}

static void copy_slice_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const gg_slice_back_attrs *a = c->attrs;
    if (stage == COPY_WHOLE) {
        copy_zeros(c->dst, begin, end);
    } else {
        const gg_tensor window = copy_window(c->dst, &c->src[0], a->starts, a->steps);
        copy_same_dtype(&window, &c->src[0], begin, end);
    }
}

GG_KERNEL(slice_back, .stages = 2, .tasks = copy_slice_back_tasks, .run = copy_slice_back_run);

static void copy_add_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    int64_t i = 0;
    if (step[0] == 4 && step[1] == 4) {
        float *out = (float *)at[0];
        const float *b = (const float *)at[1];
        for (; i + GG_VW <= n; i += GG_VW) vf_store(out + i, vf_load(out + i) + vf_load(b + i));
    }
    for (; i < n; i++) *(float *)(at[0] + i * step[0]) += *(const float *)(at[1] + i * step[1]);
}

static int64_t copy_slice_add_tasks(const gg_call *c, int stage) {
    return copy_tasks_of(stage == COPY_WHOLE ? c->dst : &c->src[1]);
}

static void copy_slice_add_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const gg_slice_add_attrs *a = c->attrs;
    if (stage == COPY_WHOLE) {
        if (c->src[0].data != c->dst->data) copy_same_dtype(c->dst, &c->src[0], begin, end);
    } else {
        const gg_tensor window = copy_window(c->dst, &c->src[1], a->starts, a->steps);
        copy_walk(&window, &c->src[1], begin, end, copy_add_row, NULL);
    }
}

GG_KERNEL(slice_add, .stages = 2, .tasks = copy_slice_add_tasks, .run = copy_slice_add_run);

/* -- strided_back, acc, set ------------------------------------------------------- */

/* The axis of the window with the largest step, if its slices do not overlap: then tasks may take them in parallel. */
static int copy_disjoint_axis(const gg_tensor *window) {
    int largest = 0;
    for (int d = 1; d < 4; d++)
        if (llabs(window->nb[d]) * (window->ne[d] > 1) > llabs(window->nb[largest]) * (window->ne[largest] > 1))
            largest = d;
    int64_t extent = nest_bytes(window->dtype);
    for (int d = 0; d < 4; d++)
        if (d != largest) extent += (window->ne[d] - 1) * llabs(window->nb[d]);
    return llabs(window->nb[largest]) >= extent ? largest : -1;
}

/* dst as elements strides[0..3] apart from `offset` on, in the shape of `like`. */
static gg_tensor copy_strided(const gg_call *c, const gg_tensor *like, const int64_t *strides, int64_t offset) {
    const int64_t size = nest_bytes(c->dst->dtype);
    gg_tensor w = *c->dst;
    w.data = (char *)w.data + offset * size;
    for (int d = 0; d < 4; d++) {
        const int axis = d - (4 - like->rank);
        w.ne[d] = like->ne[d];
        w.nb[d] = axis < 0 ? 0 : strides[axis] * size;
    }
    return w;
}

static gg_tensor copy_strided_back_window(const gg_call *c) {
    const gg_strided_back_attrs *a = c->attrs;
    return copy_strided(c, &c->src[0], a->strides, a->offset);
}

static gg_tensor copy_strided_window(const gg_call *c) {
    const gg_acc_attrs *a = c->attrs;
    return copy_strided(c, &c->src[1], a->strides, a->offset);
}

/* Of adding to a window, which may meet elements twice. */
static int64_t copy_window_tasks(const gg_tensor *window) {
    const int64_t elements = gg_elements(window);
    if (elements == 0) return 0;
    const int axis = copy_disjoint_axis(window);
    return axis < 0 ? 1 : gg_row_tasks(window->ne[axis], elements / window->ne[axis], 1);
}

enum { COPY_OFTEN = 256 }; /* times that elements are met, from which on their sums are cut into blocks */

/* Floats from the first element of a window to the last, and the first. */
static int64_t copy_span(const gg_tensor *window, float **first) {
    int64_t bytes = 0, before = 0;
    for (int d = 0; d < 4; d++) {
        const int64_t length = (window->ne[d] - 1) * window->nb[d];
        bytes += llabs(length);
        before += length < 0 ? -length : 0;
    }
    *first = (float *)((char *)window->data - before);
    return bytes / (int64_t)sizeof(float) + 1;
}

/* How often elements of the window are met, about. */
static int64_t copy_overlap(const gg_tensor *window) {
    float *first;
    return gg_elements(window) == 0 ? 0 : gg_elements(window) / copy_span(window, &first);
}

/* For sums of a block: as much as dst. */
static int64_t copy_window_work(const gg_call *c, const gg_tensor *window) {
    return copy_overlap(window) < COPY_OFTEN ? 0 : gg_elements(c->dst) * (int64_t)sizeof(float);
}

/* The window in blocks along its longest axis but `axis`, each of which adds up in work before it is added to dst. */
static void copy_add_blocks(const gg_call *c, gg_tensor window, gg_tensor b, int axis) {
    int cut = axis == 0;
    for (int d = 0; d < 4; d++)
        if (d != axis && window.ne[d] > window.ne[cut]) cut = d;
    float *first;
    const int64_t n = window.ne[cut], span = copy_span(&window, &first), overlap = copy_overlap(&window);
    const int64_t blocks = gg_min(n, gg_ceil_div(overlap, gg_sum_block(overlap)));
    float *const sums = (float *)c->work + (first - (float *)c->dst->data);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t from = gg_cut(n, i, blocks), to = gg_cut(n, i + 1, blocks);
        gg_tensor part = window, added = b;
        part.ne[cut] = added.ne[cut] = to - from;
        part.data = (char *)part.data + from * part.nb[cut];
        added.data = (char *)added.data + from * added.nb[cut];
        if (i > 0) {
            part.data = (char *)sums + ((char *)part.data - (char *)first);
            memset(sums, 0, span * sizeof(float));
        }
        copy_walk(&part, &added, 0, copy_tasks_of(&part), copy_add_row, NULL);
        if (i > 0) gg_add_row(first, sums, span);
    }
}

static void copy_add_window(const gg_call *c, gg_tensor window, gg_tensor b, int64_t begin, int64_t end) {
    const int axis = copy_disjoint_axis(&window);
    const int often = copy_window_work(c, &window) > 0;
    if (axis >= 0) {
        const int64_t n = window.ne[axis], tasks = copy_window_tasks(&window);
        const int64_t from = gg_cut(n, begin, tasks), to = gg_cut(n, end, tasks);
        window.data = (char *)window.data + from * window.nb[axis];
        b.data = (char *)b.data + from * b.nb[axis];
        window.ne[axis] = b.ne[axis] = to - from;
    }
    if (gg_elements(&window) == 0) return;
    if (often) copy_add_blocks(c, window, b, axis);
    else copy_walk(&window, &b, 0, copy_tasks_of(&window), copy_add_row, NULL);
}

static int64_t copy_strided_back_work(const gg_call *c) {
    const gg_tensor window = copy_strided_back_window(c);
    return copy_window_work(c, &window);
}
static int64_t copy_acc_work(const gg_call *c) {
    const gg_tensor window = copy_strided_window(c);
    return copy_window_work(c, &window);
}

static int64_t copy_strided_back_tasks(const gg_call *c, int stage) {
    const gg_tensor window = copy_strided_back_window(c);
    return stage == COPY_WHOLE ? copy_tasks_of(c->dst) : copy_window_tasks(&window);
}

static void copy_strided_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    if (stage == COPY_WHOLE) copy_zeros(c->dst, begin, end);
    else copy_add_window(c, copy_strided_back_window(c), c->src[0], begin, end);
}

static int64_t copy_acc_tasks(const gg_call *c, int stage) {
    const gg_tensor window = copy_strided_window(c);
    return stage == COPY_WHOLE ? copy_tasks_of(c->dst) : copy_window_tasks(&window);
}

static void copy_acc_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    if (stage == COPY_WINDOW) copy_add_window(c, copy_strided_window(c), c->src[1], begin, end);
    else if (c->src[0].data != c->dst->data) copy_same_dtype(c->dst, &c->src[0], begin, end);
}

static int64_t copy_set_tasks(const gg_call *c, int stage) {
    return copy_tasks_of(stage == COPY_WHOLE ? c->dst : &c->src[1]);
}

/* The window meets no element twice. */
static void copy_set_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const gg_tensor window = copy_strided_window(c);
    if (stage == COPY_WINDOW) copy_same_dtype(&window, &c->src[1], begin, end);
    else if (c->src[0].data != c->dst->data) copy_same_dtype(c->dst, &c->src[0], begin, end);
}

GG_KERNEL(strided_back, .stages = 2, .tasks = copy_strided_back_tasks, .run = copy_strided_back_run,
          .work = copy_strided_back_work);
GG_KERNEL(acc, .stages = 2, .tasks = copy_acc_tasks, .run = copy_acc_run, .work = copy_acc_work);
GG_KERNEL(set, .stages = 2, .tasks = copy_set_tasks, .run = copy_set_run);

/* -- triangle ------------------------------------------------------------------------------------- */

static int64_t copy_triangle_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_elements(c->dst) == 0 ? 0 : gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], 1);
}

static void copy_triangle_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_triangle_attrs *a = c->attrs;
    const int64_t rows = gg_rows(c->dst), height = c->dst->ne[2], n = c->dst->ne[3];
    const int64_t tasks = copy_triangle_tasks(c, 0), step = c->src->nb[3];
    for (int64_t r = gg_cut(rows, begin, tasks), last = gg_cut(rows, end, tasks); r < last; r++) {
        /* the diagonal's column here; an attribute of any size stays within the row */
        const int64_t i = r % height, at = i + gg_max(-height, gg_min(n, a->diagonal));
        const int64_t from = a->upper ? gg_max(0, gg_min(n, at)) : 0;
        const int64_t to = a->upper ? n : gg_max(0, gg_min(n, at + 1));
        float *out = (float *)c->dst->data + r * n;
        for (int64_t j = 0; j < from; j++) out[j] = a->fill;
        nest_copy((char *)(out + from), 4, gg_row(c->src, r) + from * step, step, to - from, 4);
        for (int64_t j = to; j < n; j++) out[j] = a->fill;
    }
}

GG_KERNEL(triangle, .stages = 1, .tasks = copy_triangle_tasks, .run = copy_triangle_run);

/* -- concat --------------------------------------------------------------------------------------- */

/* The sources' tasks, one after another. */
static int64_t copy_concat_tasks(const gg_call *c, int stage) {
    (void)stage;
    int64_t tasks = 0;
    for (int i = 0; i < c->n_src; i++) tasks += copy_tasks_of(&c->src[i]);
    return tasks;
}

static void copy_concat_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const int64_t axis = ((const gg_concat_attrs *)c->attrs)->axis;
    const int64_t d = axis < 0 ? axis + 4 : axis + 4 - c->dst->rank;
    gg_tensor window = *c->dst;
    for (int i = 0; i < c->n_src && end > 0; i++) {
        const gg_tensor *x = &c->src[i];
        const int64_t tasks = copy_tasks_of(x);
        window.ne[d] = x->ne[d];
        const int64_t first = gg_max(0, begin), last = gg_min(end, tasks);
        if (first < last) copy_same_dtype(&window, x, first, last);
        window.data = (char *)window.data + x->ne[d] * window.nb[d];
        begin -= tasks;
        end -= tasks;
    }
}

GG_KERNEL(concat, .stages = 1, .tasks = copy_concat_tasks, .run = copy_concat_run);

/* -- zero_bytes ----------------------------------------------------------------------------------- */

/* Not an op: clears all destinations, each described as so many bytes; between the parts of packed results. */
static int64_t copy_zero_tasks(const gg_call *c, int stage) {
    (void)c, (void)stage;
    return 1;
}

static void copy_zero_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)begin, (void)end, (void)scratch;
    for (int i = 0; i < c->n_dst; i++) memset(c->dst[i].data, 0, c->dst[i].ne[3]);
}

GG_KERNEL(zero_bytes, .stages = 1, .tasks = copy_zero_tasks, .run = copy_zero_run);
