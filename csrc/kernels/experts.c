/* Products with a matrix of its own for each row: mixtures of experts.
 *
 *   a: [E, M, K]  f32, f16, bf16 or quantized, any strides     b: [T, U or 1, K], any strides     ids: [T, U]
 *
 *   mul_mat_id                 dst[t, u]  = a[ids[t, u]] b[t, u]                        [T, U, M]
 *   mul_mat_id_quantized_back  dst[t, u]  = dout[t, u] a[ids[t, u]]                     [T, U, K]
 *   mul_mat_id_back            dst[e]     = sum of dout[t, u]^T b[t, u] where ids[t, u] = e     [E, M, K]
 *
 * A first stage sorts the rows (t, u) by expert; each expert's rows are then a product like any other, whose rows are
 * gathered while they are packed.  An id outside of 0 ... E-1 is reported before anything is written. */
#include "walk/kernel.h"
#include "gemm/tile.h"

enum {
    EXPERT_ROWS = 256,    /* of an expert in one task */
    EXPERT_COLUMNS = 256, /* a multiple of GG_NR */
    EXPERT_K = 384,       /* of what is summed along; two blocks of the longest quantized ones at most */
    EXPERT_STRIP = 8,     /* panels of rows that are packed at a time */
};

/* What the first stage leaves in the shared memory: expert e has the rows order[first[e]] ... order[first[e + 1]]. */
typedef struct expert_rows {
    int64_t *first;
    int32_t *order;
} expert_rows;

static expert_rows expert_rows_of(const gg_call *c, int64_t experts) {
    return (expert_rows){ c->work, (int32_t *)((int64_t *)c->work + experts + 1) };
}
static int64_t expert_work(int64_t experts, int64_t rows) {
    return (experts + 1) * (int64_t)sizeof(int64_t) + rows * (int64_t)sizeof(int32_t);
}

static int32_t expert_id(const gg_tensor *ids, int64_t row) {
    const int64_t U = ids->ne[3];
    return *(const int32_t *)(gg_at(ids, 0, 0, row / U) + row % U * ids->nb[3]);
}

static void expert_sort(const gg_call *c, int input, int64_t experts) {
    const gg_tensor *ids = &c->src[input];
    const int64_t rows = gg_elements(ids);
    const expert_rows by = expert_rows_of(c, experts);
    memset(by.first, 0, (experts + 1) * sizeof *by.first);
    for (int64_t i = 0; i < rows; i++) {
        const int32_t e = expert_id(ids, i);
        if (e < 0 || e >= experts) {
            gg_report(c, GG_INDEX, input, e, experts);
            return;
        }
        by.first[e + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) by.first[e + 1] += by.first[e];
    for (int64_t i = 0; i < rows; i++) by.order[by.first[expert_id(ids, i)]++] = (int32_t)i;
    for (int64_t e = experts; e > 0; e--) by.first[e] = by.first[e - 1]; /* they ran up to the next one's */
    by.first[0] = 0;
}

/* Row (t, u) of b, one for all u if there is but one, from element k on. */
static gg_lines expert_row(const gg_tensor *b, const gg_tensor *ids, int64_t row, int64_t k) {
    const int64_t U = ids->ne[3], u = b->ne[2] == 1 ? 0 : row % U;
    return (gg_lines){ .data = gg_at(b, 0, row / U, u) + k * b->nb[3], .dtype = b->dtype, .line = 0, .k = b->nb[3] };
}

/* -- mul_mat_id ----------------------------------------------------------------------------------- */

typedef struct expert_product {
    const gg_tensor *a, *b, *ids;
    int64_t E, M, K, rows; /* M and K as dst and b have them */
    int across;
} expert_product;

static expert_product expert_describe(const gg_call *c, int across) {
    const gg_tensor *a = &c->src[0];
    return (expert_product){
        .a = a,
        .b = &c->src[1],
        .ids = &c->src[2],
        .E = a->ne[1],
        .M = a->ne[across ? 3 : 2],
        .K = a->ne[across ? 2 : 3],
        .rows = gg_elements(&c->src[2]),
        .across = across,
    };
}

/* Pieces that the experts' rows can fall into at most, each of one expert. */
static int64_t expert_pieces(const expert_product *p) { return gg_min(p->E, p->rows) + p->rows / EXPERT_ROWS; }
static int64_t expert_blocks(const expert_product *p) { return gg_ceil_div(p->M, EXPERT_COLUMNS); }

static int64_t expert_tasks(const expert_product *p, int stage) {
    if (p->rows * p->M == 0) return 0;
    return stage == 0 ? 1 : expert_pieces(p) * expert_blocks(p);
}

static int64_t expert_block_k(const expert_product *p) {
    const int64_t blocks = gg_max(1, gg_ceil_div(p->K, EXPERT_K)),
                  unit = p->across ? 16 : gg_max(16, gg_block(p->a->dtype));
    return gg_max(unit, gg_round_up(gg_ceil_div(p->K, blocks), unit));
}

static int64_t expert_scratch(const expert_product *p) {
    const int64_t K = expert_block_k(p), strip = EXPERT_STRIP * GG_MR;
    return (EXPERT_COLUMNS * K + strip * (gg_line_step(K) + EXPERT_COLUMNS)) * (int64_t)sizeof(float);
}

/* The expert and rows of a piece; no rows where there are fewer pieces. */
static int64_t expert_of_piece(const expert_product *p, const expert_rows *by, int64_t piece, int64_t *r0,
                               int64_t *r1) {
    int64_t e = 0, before = 0;
    *r0 = *r1 = 0;
    for (; e < p->E; e++) {
        const int64_t rows = by->first[e + 1] - by->first[e], pieces = gg_ceil_div(rows, EXPERT_ROWS);
        if (piece < before + pieces) {
            *r0 = by->first[e] + (piece - before) * EXPERT_ROWS;
            *r1 = gg_min(*r0 + EXPERT_ROWS, by->first[e + 1]);
            break;
        }
        before += pieces;
    }
    return e;
}

static void expert_run_piece(const gg_call *c, const expert_product *p, int64_t task, float *scratch) {
    const expert_rows by = expert_rows_of(c, p->E);
    const int64_t blocks = expert_blocks(p), m0 = task % blocks * EXPERT_COLUMNS, M = gg_min(EXPERT_COLUMNS, p->M - m0);
    const int64_t block_k = expert_block_k(p), strip = EXPERT_STRIP * GG_MR, step = gg_line_step(block_k);
    int64_t r0, r1;
    const int64_t e = expert_of_piece(p, &by, task / blocks, &r0, &r1);
    if (r0 == r1) return;
    float *const panels = scratch, *const packed = panels + EXPERT_COLUMNS * block_k,
                 *const out = packed + strip * step;
    const gg_lines expert = {
        .data = gg_at(p->a, 0, e, 0), .dtype = p->a->dtype, .line = p->a->nb[2], .k = p->a->nb[3]
    };
    for (int64_t k = 0; k == 0 || k < p->K; k += block_k) {
        const int64_t K = gg_min(block_k, p->K - k);
        const gg_lines from = p->across ? gg_lines_from(&expert, k, 0) : gg_lines_from(&expert, m0, k);
        if (p->across) gg_pack_quantized_rows(&from, m0, M, K, panels);
        else gg_pack_columns(&from, M, K, panels);
        for (int64_t r = r0; r < r1; r += strip) {
            const int64_t rows = gg_min(strip, r1 - r);
            for (int64_t i = 0; i < rows; i++) {
                const gg_lines b = expert_row(p->b, p->ids, by.order[r + i], k);
                gg_copy_lines(&b, 1, K, packed + i * step);
            }
            gg_run_strip(&(gg_strip){ .N = rows,
                                      .M = M,
                                      .K = K,
                                      .rows = gg_rows_of_lines((gg_lines_f32){ packed, step }),
                                      .panels = panels,
                                      .dst = out,
                                      .dst_step = EXPERT_COLUMNS });
            for (int64_t i = 0; i < rows; i++) {
                float *const dst = (float *)c->dst->data + by.order[r + i] * p->M + m0, *const sum =
                                                                                            out + i * EXPERT_COLUMNS;
                if (k == 0) memcpy(dst, sum, M * sizeof(float));
                else
                    for (int64_t m = 0; m < M; m++) dst[m] += sum[m];
            }
        }
    }
}

static void expert_run(const gg_call *c, const expert_product *p, int stage, int64_t begin, int64_t end,
                       float *scratch) {
    if (stage == 0) expert_sort(c, 2, p->E);
    else
        for (int64_t t = begin; t < end; t++) expert_run_piece(c, p, t, scratch);
}

#define EXPERT_KERNEL(op, across) \
    static int64_t op##_tasks(const gg_call *c, int stage) { \
        const expert_product p = expert_describe(c, across); \
        return expert_tasks(&p, stage); \
    } \
    static int64_t op##_work(const gg_call *c) { \
        const expert_product p = expert_describe(c, across); \
        return expert_work(p.E, p.rows); \
    } \
    static int64_t op##_scratch(const gg_call *c) { \
        const expert_product p = expert_describe(c, across); \
        return expert_scratch(&p); \
    } \
    static void op##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) { \
        const expert_product p = expert_describe(c, across); \
        expert_run(c, &p, stage, begin, end, scratch); \
    } \
    GG_KERNEL(op, .stages = 2, .tasks = op##_tasks, .run = op##_run, .work = op##_work, .scratch = op##_scratch)

EXPERT_KERNEL(mul_mat_id, 0);
EXPERT_KERNEL(mul_mat_id_quantized_back, 1);

/* -- mul_mat_id_back ------------------------------------------------------------------------------ */

enum { EXPERT_B, EXPERT_DOUT, EXPERT_IDS }; /* its sources */

static int64_t expert_back_tasks(const gg_call *c, int stage) {
    const int64_t M = c->dst->ne[2], K = c->dst->ne[3];
    if (gg_elements(c->dst) == 0) return 0;
    return stage == 0 ? 1 : c->dst->ne[1] * gg_ceil_div(M, EXPERT_ROWS) * gg_ceil_div(K, EXPERT_COLUMNS);
}

static int64_t expert_back_work(const gg_call *c) {
    return expert_work(c->dst->ne[1], gg_elements(&c->src[EXPERT_IDS]));
}

static int64_t expert_back_scratch(const gg_call *c) {
    (void)c;
    return (EXPERT_COLUMNS * (EXPERT_K + 1) + EXPERT_ROWS * gg_line_step(EXPERT_K) + GG_VW * gg_line_step(EXPERT_ROWS) +
            gg_line_step(EXPERT_COLUMNS)) *
           (int64_t)sizeof(float);
}

/* Elements m ... m + M of `rows` rows of dout as M lines, and elements k ... k + K of those of b as columns. */
static void expert_pack_across(const gg_call *c, const int32_t *order, int64_t rows, int64_t m, int64_t M, int64_t k,
                               int64_t K, float *lines, float *panels, float *some) {
    const gg_tensor *ids = &c->src[EXPERT_IDS];
    const int64_t step = gg_line_step(M);
    for (int64_t r = 0; r < rows; r += GG_VW) {
        const int64_t n = gg_min(GG_VW, rows - r);
        for (int64_t i = 0; i < n; i++) {
            const gg_lines dout = expert_row(&c->src[EXPERT_DOUT], ids, order[r + i], m);
            gg_copy_lines(&dout, 1, M, some + i * step);
        }
        gg_transpose(GG_F32, (const char *)some, step * (int64_t)sizeof(float), (int)n, M, lines + r,
                     gg_line_step(EXPERT_K));
    }
    for (int64_t r = 0; r < rows; r++) {
        const gg_lines b = expert_row(&c->src[EXPERT_B], ids, order[r], k);
        gg_copy_lines(&b, 1, K, some);
        for (int64_t j = 0; j < K; j += GG_VW)
            vf_store(panels + (j / GG_NR * rows + r) * GG_NR + j % GG_NR, vf_load(some + j));
    }
}

static void expert_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const int64_t E = c->dst->ne[1], M = c->dst->ne[2], K = c->dst->ne[3];
    if (stage == 0) {
        expert_sort(c, EXPERT_IDS, E);
        return;
    }
    const expert_rows by = expert_rows_of(c, E);
    const int64_t row_blocks = gg_ceil_div(M, EXPERT_ROWS), column_blocks = gg_ceil_div(K, EXPERT_COLUMNS);
    float *const panels = scratch, *const lines = panels + EXPERT_COLUMNS * (EXPERT_K + 1);
    float *const some = lines + EXPERT_ROWS * gg_line_step(EXPERT_K);
    for (int64_t t = begin; t < end; t++) {
        const int64_t e = t / column_blocks / row_blocks, m = t / column_blocks % row_blocks * EXPERT_ROWS;
        const int64_t k = t % column_blocks * EXPERT_COLUMNS;
        const int64_t rows = gg_min(EXPERT_ROWS, M - m), columns = gg_min(EXPERT_COLUMNS, K - k);
        float *const dst = (float *)c->dst->data + (e * M + m) * K + k;
        if (by.first[e] == by.first[e + 1])
            for (int64_t i = 0; i < rows; i++) memset(dst + i * K, 0, columns * sizeof(float));
        for (int64_t r = by.first[e]; r < by.first[e + 1]; r += EXPERT_K) {
            const int64_t n = gg_min(EXPERT_K, by.first[e + 1] - r);
            expert_pack_across(c, by.order + r, n, m, rows, k, columns, lines, panels, some);
            gg_run_strip(&(gg_strip){ .N = rows,
                                      .M = columns,
                                      .K = n,
                                      .rows = gg_rows_of_lines((gg_lines_f32){ lines, gg_line_step(EXPERT_K) }),
                                      .panels = panels,
                                      .dst = dst,
                                      .dst_step = K,
                                      .add = r > by.first[e] });
        }
    }
}

GG_KERNEL(mul_mat_id_back, .stages = 2, .tasks = expert_back_tasks, .run = expert_back_run, .work = expert_back_work,
          .scratch = expert_back_scratch);
