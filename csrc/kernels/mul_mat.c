/* mul_mat: dst[n][m] = sum over k of a[m][k] * b[n][k], batch by batch.
 *
 *   a:   [A0, A1, M, K]  f32, f16 or bf16, any strides, or quantized: the columns of dst
 *   b:   [B0, B1, N, K]  f32, f16 or bf16, any strides: the rows of dst
 *   dst: [B0, B1, N, M]  f32, contiguous along M; batch (i0, i1) uses a's batch (i0 / (B0/A0), i1 / (B1/A1))
 *
 * A group is all that uses one batch of a: B0/A0 x B1/A1 batches of b, folded into one list of rows where
 * strides allow.  Its product is made in one of two ways:
 *
 *   tiles  A task has a block of columns and a range of rows.  It packs the block's part of a, one piece of K
 *          at a time; then strips of rows, which stay in L2, pass the block's panels, each of which stays in L1
 *          as long as a strip takes: what gg_micro streams are the fewer bytes of the rows.  Where several tasks would
 *          pack the same columns, and all of them are not many bytes, a first stage packs them into shared memory.
 *          An a that never changes may be packed once, for all runs.
 *   dots   Few rows, or few columns, and the other operand contiguous along k: then its elements are used too
 *          seldom for packing to pay, and dot products go along k straight through memory.
 *
 * Apart from that, what a task packs is its own, and so is what it decodes of a quantized a, of which no more than a
 * block of columns is ever there as f32.
 *
 * mul_mat_onto: the same added to a matrix, on which dst may lie; always in tiles.
 *
 * mul_mat_quantized_back: dst[n][k] = sum over m of dout[n][m] * a[m][k].  The same with a transposed, which as blocks it
 * cannot be: K is what M was, and rows are decoded across the lines. */
#include "walk/kernel.h"
#include "walk/rows.h"
#include "gemm/tile.h"

enum {
    MM_K = 384,             /* elements of a block along k: a panel of columns in L1 */
    MM_COLUMNS = 512,       /* columns of a block, for which rows are packed once: with MM_K, 768 KiB of L2 and L3 */
    MM_CUT = 256,           /* columns, and */
    MM_ROWS = 512,          /* rows, beyond which a block is several tasks */
    MM_STRIP = 16,          /* panels of rows that are packed at a time, and pass a panel of columns */
    MM_TASK = 1 << 21,      /* floating-point operations in the smallest task: about 20 us */
    MM_TASKS = 16,          /* pieces of a product that could be done in one block */
    MM_SHARED_TASKS = 32,   /* pieces of one whose columns are packed beforehand: they share more */
    MM_SHARED = 3 << 19,    /* floats of columns, packed, that a call may hold at once */
    MM_FEW = 4,             /* rows for which quantized rows are added up as they are decoded */
    MM_DOT_LINES = 8,       /* rows or columns up to which the other operand is not packed */
    MM_DOT_BYTES = 1 << 19, /* of the large operand in the smallest task */
    MM_PREPARED_LEAST = 4,  /* rows from which columns that are packed already beat dot products; and */
    MM_PREPARED_MOST = 512, /* up to which packing them is more than two hundredths of the work */
};

enum mm_path { MM_TILES, MM_FEW_ROWS, MM_FEW_COLUMNS, MM_FEW_ACROSS };

/* A call, and how it is cut. */
typedef struct mm_product {
    const gg_call *call;
    const gg_tensor *a, *b, *dst;
    int64_t M, N, K;
    int64_t groups;             /* batches of a */
    int64_t repeat0, repeat1;   /* what is left of a group's batches of b after folding */
    int64_t b_nb[3], dst_nb[3]; /* bytes from one such batch, batch, row to the next */
    int64_t parts;              /* tasks of a group; with one, a task may take several groups */
    int64_t column_parts;       /* tiles: of the columns; row parts are parts / column_parts */
    const float *panels;        /* tiles: all groups' columns, packed before: [group][block of K][panel][k][GG_NR] */
    int shared;                 /* by a first stage */
    int64_t tasks;
    int across;            /* a's rows have an element for each column: mul_mat_quantized_back */
    const gg_tensor *onto; /* what the product is added to, without batches; NULL: nothing */
    enum mm_path path;
} mm_product;

static int64_t mm_column_panels(const mm_product *p) { return gg_ceil_div(p->M, GG_NR); }
static int64_t mm_row_panels(const mm_product *p) { return p->repeat0 * p->repeat1 * gg_ceil_div(p->N, GG_MR); }

/* K is cut into equal blocks, which end where quantized ones do. */
static int64_t mm_block_k(const mm_product *p) {
    const int64_t blocks = gg_max(1, gg_ceil_div(p->K, MM_K)),
                  unit = p->across ? 16 : gg_max(16, gg_block(p->a->dtype));
    return gg_max(unit, gg_round_up(gg_ceil_div(p->K, blocks), unit));
}

/* Two adjacent axes of b's and dst's rows become one where a single step serves both. */
static void mm_fold(mm_product *p, int axis, int64_t *outer, int64_t *inner) {
    if (*outer == 1 || *inner == 1) {
        if (*inner == 1) {
            p->b_nb[axis + 1] = p->b_nb[axis];
            p->dst_nb[axis + 1] = p->dst_nb[axis];
        }
    } else if (p->b_nb[axis] != *inner * p->b_nb[axis + 1] || p->dst_nb[axis] != *inner * p->dst_nb[axis + 1]) {
        return;
    }
    *inner *= *outer;
    *outer = 1;
}

static int mm_contiguous(const gg_tensor *t) { return gg_quantized(t->dtype) || t->nb[3] == gg_float_bytes(t->dtype); }

static int64_t mm_packed_floats(const mm_product *p) { return p->groups * mm_column_panels(p) * GG_NR * p->K; }

/* A task packs columns once for its rows, and may have to copy rows, which is dearer, once for its columns.  Columns
 * that several tasks would pack are packed beforehand; then it is rows that are cut, down to two panels. */
static void mm_cut_tiles(mm_product *p, double most) {
    const int64_t row_cost =
        gg_rows_in_place(&(gg_lines){ .dtype = p->b->dtype, .line = p->b_nb[2], .k = p->b->nb[3] }) ? 1 : 2;
    const int64_t columns = mm_column_panels(p), row_panels = mm_row_panels(p), rows = p->repeat0 * p->repeat1 * p->N;
    const double wanted = fmin(most, MM_TASKS);
    int64_t row_parts = gg_min(row_panels, gg_ceil_div(rows, MM_ROWS));
    p->column_parts = gg_ceil_div(columns * GG_NR, MM_CUT);
    while (p->column_parts * row_parts * 2 <= wanted) {
        const int wide = p->M * row_parts > row_cost * rows * p->column_parts;
        if (wide && p->column_parts * 2 <= columns) p->column_parts *= 2;
        else if (row_parts * 2 <= row_panels) row_parts *= 2;
        else break;
    }
    p->panels = p->call->prepared;
    p->shared = !p->panels && !gg_quantized(p->a->dtype) && p->groups == 1 && row_parts > 1 && p->K > 0 &&
                mm_packed_floats(p) <= MM_SHARED;
    if (p->shared) p->panels = p->call->work;
    if (row_parts > 1 && (p->shared || p->panels)) {
        for (row_parts = 1; row_parts * 2 <= fmin(most, MM_SHARED_TASKS) && row_parts * 4 <= row_panels;)
            row_parts *= 2;
        for (p->column_parts = 1; p->column_parts * row_parts * 2 <= wanted && p->column_parts * 2 <= columns;)
            p->column_parts *= 2;
    }
    p->parts = p->column_parts * row_parts;
}

/* Cuts follow from shapes and strides alone. */
static void mm_cut(mm_product *p) {
    const double rows = (double)p->repeat0 * p->repeat1 * p->N, flops = 2 * rows * p->M * p->K;
    double most = flops / MM_TASK; /* tasks, were all of them the smallest */
    if (p->path == MM_TILES) {
        mm_cut_tiles(p, most);
    } else if (p->path == MM_FEW_ACROSS) {
        p->parts = gg_ceil_div(p->M, GG_DECODED);
        p->tasks = p->groups * p->parts;
        return;
    } else {
        const int few_rows = p->path == MM_FEW_ROWS;
        const double bytes = (few_rows ? p->M : rows) * p->K * gg_float_bytes(few_rows ? p->a->dtype : p->b->dtype);
        most = fmax(most, bytes / MM_DOT_BYTES);
        p->parts = gg_max(1, gg_min((few_rows ? p->M : p->N) / 8, (int64_t)most));
    }
    p->tasks = p->parts > 1 ? p->groups * p->parts : (int64_t)fmin(p->groups, fmax(1, p->groups * most));
}

static mm_product mm_describe(const gg_call *c, int across) {
    const gg_tensor *a = &c->src[0], *b = &c->src[1], *dst = &c->dst[0];
    mm_product p = {
        .call = c,
        .a = a,
        .b = b,
        .dst = dst,
        .across = across,
        .onto = c->n_src > 2 ? &c->src[2] : NULL,
        .M = a->ne[across ? 3 : 2],
        .N = b->ne[2],
        .K = a->ne[across ? 2 : 3],
        .groups = a->ne[0] * a->ne[1],
        .b_nb = { b->nb[0], b->nb[1], b->nb[2] },
        .dst_nb = { dst->nb[0], dst->nb[1], dst->nb[2] },
    };
    if (gg_elements(dst) == 0) return p;
    p.repeat0 = b->ne[0] / a->ne[0];
    p.repeat1 = b->ne[1] / a->ne[1];
    mm_fold(&p, 1, &p.repeat1, &p.N);
    if (p.repeat1 == 1) { /* the outer batches may go on where the inner ones end */
        p.b_nb[1] = p.b_nb[0];
        p.dst_nb[1] = p.dst_nb[0];
        p.repeat1 = p.repeat0;
        p.repeat0 = 1;
        mm_fold(&p, 1, &p.repeat1, &p.N);
    }
    /* a dot product ends with a sum over lanes, which has to be worth it */
    if (p.onto) p.path = MM_TILES;
    else if (across) p.path = p.N <= MM_FEW ? MM_FEW_ACROSS : MM_TILES;
    else if (!c->prepared && p.N <= MM_DOT_LINES && p.K >= 32 * p.N && mm_contiguous(a)) p.path = MM_FEW_ROWS;
    else if (p.M <= MM_DOT_LINES && p.K >= 16 * p.M && mm_contiguous(b)) p.path = MM_FEW_COLUMNS;
    mm_cut(&p);
    return p;
}

/* Where a group's data begin. */
typedef struct mm_group {
    gg_lines columns;
    const char *b;
    char *dst;
} mm_group;

static mm_group mm_group_of(const mm_product *p, int64_t group) {
    const gg_tensor *a = p->a, *b = p->b;
    const int64_t g0 = group / a->ne[1], g1 = group % a->ne[1];
    const int64_t b0 = b->ne[0] / a->ne[0] * g0, b1 = b->ne[1] / a->ne[1] * g1;
    return (mm_group){
        .columns = { .data = gg_at(a, g0, g1, 0), .dtype = a->dtype, .line = a->nb[2], .k = a->nb[3] },
        .b = gg_at(b, b0, b1, 0),
        .dst = gg_at(p->dst, b0, b1, 0),
    };
}

/* One of the group's batches of b, and of dst. */
static gg_lines mm_batch_rows(const mm_product *p, const mm_group *g, int64_t batch) {
    return (gg_lines){ .data = g->b + batch / p->repeat1 * p->b_nb[0] + batch % p->repeat1 * p->b_nb[1],
                       .dtype = p->b->dtype,
                       .line = p->b_nb[2],
                       .k = p->b->nb[3] };
}
static float *mm_batch_dst(const mm_product *p, const mm_group *g, int64_t batch) {
    return (float *)(g->dst + batch / p->repeat1 * p->dst_nb[0] + batch % p->repeat1 * p->dst_nb[1]);
}

/* Elements `at` to at + columns, and of so many rows after, are complete. */
static void mm_lead(const mm_product *p, const float *at, int64_t columns, int64_t rows) {
    gg_lead(p->call, at - (const float *)p->dst->data, columns, rows, p->dst_nb[2] / (int64_t)sizeof(float));
}

/* Where the panels of a group that are packed before have their place. */
static int64_t mm_packed_at(const mm_product *p, int64_t group, int64_t panel, int64_t k0, int64_t K) {
    return ((group * p->K + k0) * mm_column_panels(p) + panel * K) * GG_NR;
}

/* Columns m0 ... m1 of a block of K. */
static void mm_pack_columns(const mm_product *p, const mm_group *g, int64_t m0, int64_t m1, int64_t k0, int64_t K,
                            float *panels) {
    const gg_lines columns = p->across ? gg_lines_from(&g->columns, k0, 0) : gg_lines_from(&g->columns, m0, k0);
    if (p->across) gg_pack_quantized_rows(&columns, m0, m1 - m0, K, panels);
    else gg_pack_columns(&columns, m1 - m0, K, panels);
}

/* What the product is added to, where dst does not lie on it. */
static void mm_copy_onto(const mm_product *p, int64_t n0, int64_t n1, int64_t m0, int64_t m1) {
    if (p->onto->data == p->dst->data) return;
    for (int64_t n = n0; n < n1; n++) {
        float *to = (float *)gg_at(p->dst, 0, 0, n) + m0;
        const char *from = gg_at(p->onto, 0, 0, n) + m0 * p->onto->nb[3];
        for (int64_t m = m0; m < m1; m++, from += p->onto->nb[3]) *to++ = *(const float *)from;
    }
}

/* Some panels of rows of one batch, from r on, pass the panels of columns m0 ... m1. */
static void mm_run_strip(const mm_product *p, const mm_group *g, int64_t r, int64_t r1, int64_t m0, int64_t m1,
                         int64_t k0, int64_t K, const float *panels, float *packed_rows) {
    const int64_t batch_panels = gg_ceil_div(p->N, GG_MR), batch = r / batch_panels, n0 = r % batch_panels * GG_MR;
    const int64_t n1 = gg_min(p->N, n0 + (r1 - r) * GG_MR), dst_step = p->dst_nb[2] / (int64_t)sizeof(float);
    const gg_lines b = mm_batch_rows(p, g, batch), from = gg_lines_from(&b, n0, k0);
    float *const dst = mm_batch_dst(p, g, batch) + n0 * dst_step + m0;
    if (p->onto && k0 == 0) mm_copy_onto(p, n0, n1, m0, m1);
    gg_run_strip(&(gg_strip){
        .N = n1 - n0,
        .M = m1 - m0,
        .K = K,
        .rows = gg_pack_rows(&from, n1 - n0, K, packed_rows),
        .panels = panels,
        .dst = dst,
        .dst_step = dst_step,
        .add = k0 > 0 || p->onto,
    });
    if (k0 + K == p->K) mm_lead(p, dst, m1 - m0, n1 - n0);
}

/* The end of the strip that begins with panel r of rows. */
static int64_t mm_strip_end(const mm_product *p, int64_t r, int64_t r1) {
    const int64_t batch_panels = gg_ceil_div(p->N, GG_MR);
    return gg_min(r + MM_STRIP, gg_min(r1, (r / batch_panels + 1) * batch_panels));
}

/* Of a group's columns, panels c0 ... c1; of its rows, panels r0 ... r1. */
static void mm_run_tiles(const mm_product *p, int64_t group, int64_t c0, int64_t c1, int64_t r0, int64_t r1,
                         float *scratch) {
    const mm_group g = mm_group_of(p, group);
    const int64_t m0 = c0 * GG_NR, m1 = gg_min(p->M, c1 * GG_NR), block_k = mm_block_k(p);
    if (p->panels) {
        for (int64_t r = r0, end; r < r1; r = end) {
            end = mm_strip_end(p, r, r1);
            for (int64_t k0 = 0, K; k0 < p->K; k0 += K) {
                K = gg_min(p->K - k0, block_k);
                mm_run_strip(p, &g, r, end, m0, m1, k0, K, p->panels + mm_packed_at(p, group, c0, k0, K), scratch);
            }
        }
        return;
    }
    float *const packed_rows = scratch + (c1 - c0) * GG_NR * block_k;
    int64_t k0 = 0;
    do { /* once even if K = 0: an empty block writes the zeros */
        const int64_t K = gg_min(p->K - k0, block_k);
        mm_pack_columns(p, &g, m0, m1, k0, K, scratch);
        for (int64_t r = r0, end; r < r1; r = end) {
            end = mm_strip_end(p, r, r1);
            mm_run_strip(p, &g, r, end, m0, m1, k0, K, scratch, packed_rows);
        }
        k0 += K;
    } while (k0 < p->K);
}

/* The first stage: a task packs GG_PACK_COLUMNS columns of a block of K. */
static int64_t mm_pack_tasks(const mm_product *p) {
    return p->shared ? gg_ceil_div(p->K, mm_block_k(p)) * gg_ceil_div(p->M, GG_PACK_COLUMNS) : 0;
}

static void mm_pack_task(const mm_product *p, int64_t task) {
    const mm_group g = mm_group_of(p, 0);
    const int64_t pieces = gg_ceil_div(p->M, GG_PACK_COLUMNS), block_k = mm_block_k(p);
    const int64_t k0 = task / pieces * block_k, K = gg_min(p->K - k0, block_k), m0 = task % pieces * GG_PACK_COLUMNS;
    mm_pack_columns(p, &g, m0, gg_min(p->M, m0 + GG_PACK_COLUMNS), k0, K,
                    (float *)p->call->work + mm_packed_at(p, 0, m0 / GG_NR, k0, K));
}

static int64_t mm_prepared(const gg_call *c) {
    const mm_product p = mm_describe(c, 0);
    const int64_t rows = p.repeat0 * p.repeat1 * p.N;
    const int pays = rows >= MM_PREPARED_LEAST && rows <= MM_PREPARED_MOST && p.path != MM_FEW_COLUMNS;
    return pays && p.tasks > 0 && !gg_quantized(p.a->dtype) ? mm_packed_floats(&p) * (int64_t)sizeof(float) : 0;
}

static void mm_prepare(const gg_call *c, void *prepared) {
    const mm_product p = mm_describe(c, 0);
    const int64_t block_k = mm_block_k(&p);
    for (int64_t group = 0; group < p.groups; group++) {
        const mm_group g = mm_group_of(&p, group);
        for (int64_t k0 = 0; k0 < p.K; k0 += block_k) {
            const int64_t K = gg_min(p.K - k0, block_k);
            mm_pack_columns(&p, &g, 0, p.M, k0, K, (float *)prepared + mm_packed_at(&p, group, 0, k0, K));
        }
    }
}

/* Tasks go through the rows of one column block, then to the next block.  Consecutive ones are done as one: parts
 * of the rows share packed columns, and whole column blocks, as far as they fit in one, share copied rows. */
static void mm_tile_tasks(const mm_product *p, int64_t begin, int64_t end, float *scratch) {
    const int64_t row_parts = p->parts / p->column_parts, columns = mm_column_panels(p), rows = mm_row_panels(p);
    for (int64_t t = begin, next; t < end; t = next) {
        const int64_t c = t % p->parts / row_parts, r = t % row_parts;
        const int64_t c0 = gg_cut(columns, c, p->column_parts);
        int64_t c1 = gg_cut(columns, c + 1, p->column_parts);
        next = gg_min(end, t - r + row_parts);
        const int64_t r0 = gg_cut(rows, r, row_parts), r1 = gg_cut(rows, r + next - t, row_parts);
        for (int64_t more = c + 2; r0 == 0 && more <= p->column_parts && next + row_parts <= end; more++) {
            const int64_t wider = gg_cut(columns, more, p->column_parts);
            if ((wider - c0) * GG_NR > MM_COLUMNS) break;
            c1 = wider;
            next += row_parts;
        }
        mm_run_tiles(p, t / p->parts, c0, c1, r0, r1, scratch);
    }
}

#if defined(__aarch64__) || defined(GG_HAS_AVX512)
enum { MM_SUMS = 16 }; /* sums that fit in the registers beside their factors */
#else
enum { MM_SUMS = 8 };
#endif

/* What a block of k adds to the sums, of which there are n. */
GG_INLINE void mm_put_sums(const int n, int64_t k0, const vf c[MM_SUMS], vf sum[MM_SUMS]) {
#pragma GCC unroll 16
    for (int i = 0; i < MM_SUMS; i++) sum[i] = i >= n ? vf_zero() : k0 > 0 ? sum[i] + c[i] : c[i];
}

enum { MM_DOT_BLOCK = 512 * GG_VW }; /* elements of k that add up in a vector, before it is added to another */

/* sum[i * n + j] (+)= sum over whole vectors of k0 ... K - 1 of x[i] * y[j]: R lines of the large operand, n of the small
 * one. */
GG_INLINE void mm_dots_of(const int dtype, const int R, const int n, int64_t k0, int64_t K, const char *x,
                          int64_t x_step, const gg_lines_f32 *y, vf sum[MM_SUMS]) {
    const int bytes = gg_float_bytes(dtype);
    vf c[MM_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < R * n; i++) c[i] = vf_zero();
    for (int64_t k = k0; k + GG_VW <= K; k += GG_VW) {
        vf v[MM_SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) v[i] = vf_load_as_f32(dtype, x + i * x_step + k * bytes);
#pragma GCC unroll 8
        for (int j = 0; j < n; j++) {
            const vf w = vf_load(y->data + j * y->line + k);
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) c[i * n + j] += v[i] * w;
        }
    }
    mm_put_sums(R * n, k0, c, sum);
}

/* out[i * out_x + j * out_y] = x[i] . y[j] for `lines` lines of the large operand and the n lines of the small one. */
typedef struct mm_dots {
    gg_lines x;
    gg_lines_f32 y;
    int64_t n, K;
    float *out;
    int64_t out_x, out_y;
} mm_dots;

/* Add up the lanes of the sums, and the elements of k that filled no vector. */
static void mm_finish_dots(const mm_dots *d, int64_t line, int64_t lines, int n, vf sum[MM_SUMS]) {
    float dot[MM_SUMS];
    for (int s = 0; s < lines * n; s += GG_VW) {
        vf_transpose(sum + s);
        for (int half = GG_VW / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) sum[s + i] += sum[s + half + i];
        vf_store(dot + s, sum[s]);
    }
    const float *next = dot;
    for (int64_t i = line; i < line + lines; i++)
        for (int j = 0; j < n; j++) {
            float value = *next++;
            for (int64_t k = d->K / GG_VW * GG_VW; k < d->K; k++)
                value +=
                    gg_load_as_f32(d->x.dtype, d->x.data + i * d->x.line + k * d->x.k) * d->y.data[j * d->y.line + k];
            if (j < d->n) d->out[i * d->out_x + j * d->out_y] = value;
        }
}

GG_INLINE void mm_run_dots_of(const int n, const int dtype, const mm_dots *d, int64_t lines) {
    const int R = MM_SUMS / n > 8 ? 8 : MM_SUMS / n; /* 8 streams from memory at most */
    vf sum[MM_SUMS];
    int64_t i = 0;
    for (; i + R <= lines; i += R) {
        for (int64_t k = 0; k == 0 || k < d->K; k += MM_DOT_BLOCK)
            mm_dots_of(dtype, R, n, k, gg_min(d->K, k + MM_DOT_BLOCK), d->x.data + i * d->x.line, d->x.line, &d->y,
                       sum);
        mm_finish_dots(d, i, R, n, sum);
    }
    for (; i < lines; i++) {
        for (int64_t k = 0; k == 0 || k < d->K; k += MM_DOT_BLOCK)
            mm_dots_of(dtype, 1, n, k, gg_min(d->K, k + MM_DOT_BLOCK), d->x.data + i * d->x.line, d->x.line, &d->y,
                       sum);
        mm_finish_dots(d, i, 1, n, sum);
    }
}

#define MM_DOTS_FOR(dtype) \
    switch (d->n) { \
    case 1: mm_run_dots_of(1, dtype, d, lines); break; \
    case 2: mm_run_dots_of(2, dtype, d, lines); break; \
    case 3: mm_run_dots_of(3, dtype, d, lines); break; \
    case 4: mm_run_dots_of(4, dtype, d, lines); break; \
    case 5: mm_run_dots_of(5, dtype, d, lines); break; \
    case 6: mm_run_dots_of(6, dtype, d, lines); break; \
    case 7: mm_run_dots_of(7, dtype, d, lines); break; \
    case 8: mm_run_dots_of(8, dtype, d, lines); break; \
    }

static void mm_run_dots(const mm_dots *d, int64_t lines) {
    switch (d->x.dtype) {
    case GG_F16: MM_DOTS_FOR(GG_F16) break;
    case GG_BF16: MM_DOTS_FOR(GG_BF16) break;
    default: MM_DOTS_FOR(GG_F32)
    }
}

/* sum[i * n + j] as above, of R quantized lines, whose values go from the decoder straight into the products; the last
 * line of either stands for those after it. */
GG_INLINE void mm_quantized_dots_of(const int dtype, const int R, const int n, const mm_dots *d, int64_t line,
                                    int64_t lines, int64_t k0, int64_t K, vf sum[MM_SUMS]) {
    const int groups = (int)gg_block(dtype) / GG_GROUP;
    const int scaled_later = n < GG_GROUP_VECTORS && gg_scale_can_wait(dtype); /* the fewer multiplications */
    const uint8_t *x[MM_SUMS];
    const float *y[MM_DOT_LINES];
    for (int i = 0; i < R; i++) x[i] = (const uint8_t *)d->x.data + gg_min(line + i, lines - 1) * d->x.line;
    for (int j = 0; j < n; j++) y[j] = d->y.data + gg_min(j, d->n - 1) * d->y.line;
    vf c[MM_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < R * n; i++) c[i] = vf_zero();
    for (int64_t k = k0, at = k0 / gg_block(dtype) * gg_block_bytes(dtype); k < K; at += gg_block_bytes(dtype))
#pragma GCC unroll 1
        for (int g = 0; g < groups; g++, k += GG_GROUP)
#pragma GCC unroll 8
            for (int i = 0; i < R; i++) {
                vf v[GG_GROUP_VECTORS];
                if (scaled_later) {
                    gg_decode_integers(dtype, x[i] + at, v);
                    const float d = gg_half_at(x[i] + at);
#pragma GCC unroll 8
                    for (int j = 0; j < n; j++) {
                        vf sum_of_group = v[0] * vf_load(y[j] + k);
#pragma GCC unroll 8
                        for (int part = 1; part < GG_GROUP_VECTORS; part++)
                            sum_of_group += v[part] * vf_load(y[j] + k + part * GG_VW);
                        c[i * n + j] += d * sum_of_group;
                    }
                    continue;
                }
                gg_decode_group(dtype, x[i] + at, g, v);
#pragma GCC unroll 8
                for (int part = 0; part < GG_GROUP_VECTORS; part++)
#pragma GCC unroll 8
                    for (int j = 0; j < n; j++) c[i * n + j] += v[part] * vf_load(y[j] + k + part * GG_VW);
            }
    mm_put_sums(R * n, k0, c, sum);
}

GG_INLINE void mm_run_quantized_dots_of(const int dtype, const int n, const mm_dots *d, int64_t lines) {
    const int R = n == 1 ? 4 : n <= 4 ? 2 : 1; /* sums enough to hide how long each addition takes */
    vf sum[MM_SUMS];
    for (int64_t i = 0; i < lines; i += R) {
        for (int64_t k = 0; k == 0 || k < d->K; k += MM_DOT_BLOCK)
            mm_quantized_dots_of(dtype, R, n, d, i, lines, k, gg_min(d->K, k + MM_DOT_BLOCK), sum);
        mm_finish_dots(d, i, gg_min(R, lines - i), n, sum);
    }
}

#define MM_QUANTIZED_DOTS_FOR(dtype, d, lines) \
    if ((d)->n == 1) mm_run_quantized_dots_of(dtype, 1, d, lines); \
    else if ((d)->n == 2) mm_run_quantized_dots_of(dtype, 2, d, lines); \
    else if ((d)->n <= 4) mm_run_quantized_dots_of(dtype, 4, d, lines); \
    else mm_run_quantized_dots_of(dtype, 8, d, lines)

static void mm_run_quantized_dots(const mm_dots *d, int64_t lines) {
    GG_EACH_QUANTIZED(d->x.dtype, MM_QUANTIZED_DOTS_FOR, d, lines)
}

/* A task's part of one group: a range of the large operand's lines, in every batch of the group. */
static void mm_dot_task(const mm_product *p, int64_t group, int64_t part, float *scratch) {
    const mm_group g = mm_group_of(p, group);
    const int few_rows = p->path == MM_FEW_ROWS;
    const int64_t lines = few_rows ? p->M : p->N, dst_step = p->dst_nb[2] / (int64_t)sizeof(float);
    const int64_t first = gg_cut(lines, part, p->parts), last = gg_cut(lines, part + 1, p->parts);
    const int64_t out_x = few_rows ? 1 : dst_step;
    for (int64_t batch = 0; batch < p->repeat0 * p->repeat1; batch++) {
        const gg_lines b = mm_batch_rows(p, &g, batch);
        const gg_lines *large = few_rows ? &g.columns : &b, *small = few_rows ? &b : &g.columns;
        const int64_t n = few_rows ? p->N : p->M;
        const int in_place = small->dtype == GG_F32 && small->k == sizeof(float);
        const mm_dots dots = {
            .x = gg_lines_from(large, first, 0),
            .y = in_place ? (gg_lines_f32){ (const float *)small->data, small->line / (int64_t)sizeof(float) }
                          : gg_copy_lines(small, n, p->K, scratch),
            .n = n,
            .K = p->K,
            .out = mm_batch_dst(p, &g, batch) + first * out_x,
            .out_x = out_x,
            .out_y = few_rows ? dst_step : 1,
        };
        if (gg_quantized(large->dtype)) mm_run_quantized_dots(&dots, last - first);
        else mm_run_dots(&dots, last - first);
        if (few_rows) mm_lead(p, dots.out, last - first, n);
        else mm_lead(p, dots.out, n, last - first);
    }
}

enum { MM_ACROSS = 4 };          /* quantized rows that are added up before their sum is stored */
enum { MM_ACROSS_BLOCK = 1024 }; /* and those whose sum is added to that of the others */

/* A piece of n rows of dst, which rows k ... k + R of a are added to as they are decoded; or set to them. */
GG_INLINE void mm_across_rows(const int dtype, const int R, int64_t n, const gg_lines *columns, int64_t first,
                              int64_t width, const gg_lines *b, int64_t k, int set, float *dst, int64_t dst_step) {
    const int groups = (int)gg_block(dtype) / GG_GROUP;
    const uint8_t *x = (const uint8_t *)gg_lines_from(columns, k, first).data;
    float factor[MM_FEW][MM_ACROSS];
    for (int j = 0; j < n; j++)
        for (int i = 0; i < R; i++) factor[j][i] = gg_load_as_f32(b->dtype, b->data + j * b->line + (k + i) * b->k);
    for (int64_t at = 0; at < width; x += gg_block_bytes(dtype))
#pragma GCC unroll 1
        for (int g = 0; g < groups; g++, at += GG_GROUP) {
            vf v[MM_ACROSS][GG_GROUP_VECTORS];
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) gg_decode_group(dtype, x + i * columns->line, g, v[i]);
            for (int j = 0; j < n; j++)
#pragma GCC unroll 8
                for (int part = 0; part < GG_GROUP_VECTORS; part++) {
                    float *const to = dst + j * dst_step + at + part * GG_VW;
                    vf sum = set ? vf_zero() : vf_load(to);
#pragma GCC unroll 4
                    for (int i = 0; i < R; i++) sum += factor[j][i] * v[i][part];
                    vf_store(to, sum);
                }
        }
}

GG_INLINE void mm_across_piece(const int dtype, int64_t n, int64_t K, const gg_lines *columns, int64_t first,
                               int64_t width, const gg_lines *b, float *dst, int64_t dst_step) {
    _Alignas(64) float part[MM_FEW * GG_DECODED];
    for (int64_t from = 0; from < K; from += MM_ACROSS_BLOCK) {
        float *const to = from == 0 ? dst : part;
        const int64_t end = gg_min(K, from + MM_ACROSS_BLOCK), step = from == 0 ? dst_step : GG_DECODED;
        int64_t k = from;
        for (; k + MM_ACROSS <= end; k += MM_ACROSS)
            mm_across_rows(dtype, MM_ACROSS, n, columns, first, width, b, k, k == from, to, step);
        for (; k < end; k++) mm_across_rows(dtype, 1, n, columns, first, width, b, k, k == from, to, step);
        for (int64_t j = 0; j < n && from > 0; j++) gg_add_row(dst + j * dst_step, part + j * GG_DECODED, width);
    }
}

/* Few rows of dst, a piece of each: a's rows are added to them as they are decoded. */
static void mm_across_task(const mm_product *p, int64_t group, int64_t part) {
    const mm_group g = mm_group_of(p, group);
    const int64_t first = part * GG_DECODED, width = gg_min(GG_DECODED, p->M - first);
    const int64_t dst_step = p->dst_nb[2] / (int64_t)sizeof(float);
    for (int64_t batch = 0; batch < p->repeat0 * p->repeat1; batch++) {
        const gg_lines b = mm_batch_rows(p, &g, batch);
        float *const dst = mm_batch_dst(p, &g, batch) + first;
        if (p->K == 0)
            for (int64_t i = 0; i < p->N; i++) memset(dst + i * dst_step, 0, width * sizeof(float));
        GG_EACH_QUANTIZED(p->a->dtype, mm_across_piece, p->N, p->K, &g.columns, first, width, &b, dst, dst_step)
        mm_lead(p, dst, width, p->N);
    }
}

static int64_t mm_scratch_of(const mm_product *p) {
    if (p->tasks == 0 || p->path == MM_FEW_ACROSS) return 0;
    if (p->path != MM_TILES) return MM_DOT_LINES * gg_line_step(p->K) * (int64_t)sizeof(float);
    const int64_t K = mm_block_k(p),
                  columns = p->panels || p->shared ? 0 : gg_min(mm_column_panels(p) * GG_NR, MM_COLUMNS);
    const int64_t rows = gg_min(MM_STRIP * GG_MR, p->N);
    return (columns * K + gg_row_panels_floats(rows, K)) * (int64_t)sizeof(float);
}

static void mm_run_product(const mm_product *p, int64_t begin, int64_t end, float *scratch) {
    if (p->tasks == 0) return;
    if (p->parts == 1) { /* tasks are ranges of whole groups */
        begin = gg_cut(p->groups, begin, p->tasks);
        end = gg_cut(p->groups, end, p->tasks);
    }
    if (p->path == MM_TILES) mm_tile_tasks(p, begin, end, scratch);
    else if (p->path == MM_FEW_ACROSS)
        for (int64_t t = begin; t < end; t++) mm_across_task(p, t / p->parts, t % p->parts);
    else
        for (int64_t t = begin; t < end; t++) mm_dot_task(p, t / p->parts, t % p->parts, scratch);
}

static int64_t mm_stage_tasks(const mm_product *p, int stage) { return stage == 0 ? mm_pack_tasks(p) : p->tasks; }

static void mm_run_stage(const mm_product *p, int stage, int64_t begin, int64_t end, float *scratch) {
    if (stage == 1) mm_run_product(p, begin, end, scratch);
    else
        for (int64_t t = begin; t < end; t++) mm_pack_task(p, t);
}

#define MM_KERNEL(op, across, ...) \
    static int64_t op##_tasks(const gg_call *c, int stage) { \
        const mm_product p = mm_describe(c, across); \
        return mm_stage_tasks(&p, stage); \
    } \
    static int64_t op##_work(const gg_call *c) { \
        const mm_product p = mm_describe(c, across); \
        return p.shared ? mm_packed_floats(&p) * (int64_t)sizeof(float) : 0; \
    } \
    static int64_t op##_scratch(const gg_call *c) { \
        const mm_product p = mm_describe(c, across); \
        return mm_scratch_of(&p); \
    } \
    static void op##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        const mm_product p = mm_describe(c, across); \
        mm_run_stage(&p, stage, begin, end, scratch); \
    } \
    GG_KERNEL(op, .stages = 2, .tasks = op##_tasks, .run = op##_run, .work = op##_work, .scratch = op##_scratch, \
              .leads = GG_LAST_STAGE, __VA_ARGS__)

MM_KERNEL(mul_mat, 0, .prepared = mm_prepared, .prepare = mm_prepare);
MM_KERNEL(mul_mat_onto, 0, .prepared = NULL);
MM_KERNEL(mul_mat_quantized_back, 1, .prepared = NULL);
