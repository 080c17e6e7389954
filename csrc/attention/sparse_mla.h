/* What both directions of sparse latent attention share: which rows a token sees, and its products with them.
 *
 *   q: [B, S1, N1, D] or [T1, N1, D]      kv of two sides: [B, S, 1, D], [T, 1, D] or pages [blocks, size, 1, D]
 *
 * Tokens and rows are counted through all sequences: token b * S1 + i, row b * S + j, or as they lie in [T, ...].
 *
 * All heads of a token see the same rows, so a block of tokens is one matrix of `lanes` rows, lane k * N1 + h being
 * head h of token k; panels of GG_NR lanes are turned, one lane in each vector lane.  Rows that tokens see are
 * copied side by side, up to MLA_ROWS at a time: a range once for the block, a list once for its token.  Then
 *
 *   S^T = X (scale Q)^T     with a lane in each vector lane, softmax down the columns
 *   sum_k w_k x_k           for each lane: rows of the result lie as rows of q do
 *
 * A range is the union of what the tokens of a block see; at its ends some see what others do not, and a weight of
 * 0 hides it.  That is harmless where all factors are finite; where they are not, tokens go one by one. */
#pragma once
#include "abi/attrs/sparse_mla.h"
#include "vec/vector_math.h"
#include "walk/rows.h"
#include "gemm/pack.h"

enum {
    MLA_ROWS = 160,           /* rows at a time: a window of 128 and what a block adds */
    MLA_LANES = 128,          /* lanes of a block; more if one token has more heads */
    MLA_TASK_FLOPS = 1 << 19, /* the least that a task should hold, 5 to 10 us */
    MLA_ALL = 0,
    MLA_CAUSAL = 3,
    MLA_BAND = 4, /* mask modes */
};
enum { ORI, CMP, SIDES };

static const int32_t mla_lane[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };

/* Where a sequence lies, and how much of it is in use. */
typedef struct mla_sequence {
    int64_t token, L1;              /* its first token, tokens in use */
    int64_t start[SIDES], L[SIDES]; /* its first row (of pages: 0), rows in use */
    int64_t residual;
} mla_sequence;

typedef struct mla_side {
    const gg_tensor *kv, *list, *length, *table; /* NULL where there is none */
    int64_t rows;                                /* of kv, all sequences */
} mla_side;

typedef struct mla {
    const gg_tensor *q, *sinks;
    mla_side side[SIDES];
    int64_t B, tokens, N1, D;
    int64_t block; /* tokens of a block */
    int64_t lanes; /* of a whole block */
    int64_t step;  /* floats from one copied row to the next */
    int64_t wide;  /* D with the zeros after it that copied rows have */
    float scale;
    int64_t ratio, left, right; /* of the window; -1: no bound */
    int cmp_causal;
    mla_sequence *sequence; /* [B], made by mla_locate */
} mla;

/* Sources from `kv` on: the two sides' rows and lists, from `cu` on: lengths; pages at `table`, or -1. */
typedef struct mla_sources {
    int kv, table, cu;
} mla_sources;
enum { CU_Q, CU_KV, USED_Q = CU_KV + SIDES, USED_KV, RESIDUAL = USED_KV + SIDES, LENGTH, SINKS = LENGTH + SIDES };

static inline const gg_tensor *mla_given(const gg_tensor *t) { return t->data != NULL ? t : NULL; }

static inline mla mla_open(const gg_call *c, mla_sources at, const gg_sparse_flash_mla_attrs *attrs) {
    const gg_tensor *const cu = c->src + at.cu, *const q = c->src;
    const int packed = mla_given(&cu[CU_Q]) != NULL;
    mla a = {
        .q = q,
        .sinks = mla_given(&cu[SINKS]),
        .B = packed ? cu[CU_Q].ne[3] - 1 : q->ne[0],
        .tokens = q->ne[0] * q->ne[1],
        .N1 = q->ne[2],
        .D = q->ne[3],
        .step = gg_line_step(q->ne[3]),
        .wide = gg_round_up(q->ne[3], 16),
        .scale = attrs->softmax_scale,
        .ratio = attrs->cmp_ratio,
        .left = attrs->ori_mask_mode == MLA_BAND ? attrs->ori_win_left : -1,
        .right = attrs->ori_mask_mode == MLA_BAND     ? attrs->ori_win_right
                 : attrs->ori_mask_mode == MLA_CAUSAL ? 0
                                                      : -1,
        .cmp_causal = attrs->cmp_mask_mode == MLA_CAUSAL,
        .sequence = c->work,
    };
    for (int s = 0; s < SIDES; s++) {
        const gg_tensor *const kv = mla_given(&c->src[at.kv + s]);
        a.side[s] = (mla_side){
            .kv = kv,
            .list = mla_given(&c->src[at.kv + SIDES + s]),
            .length = mla_given(&cu[LENGTH + s]),
            .table = at.table < 0 ? NULL : mla_given(&c->src[at.table + s]),
            .rows = kv != NULL ? kv->ne[0] * kv->ne[1] : 0,
        };
    }
    a.block = gg_max(1, MLA_LANES / gg_max(1, a.N1));
    a.lanes = a.block * a.N1;
    return a;
}

static inline int64_t mla_blocks(const mla *a) { return gg_ceil_div(a->tokens, a->block); }

/* Rows that a token may see, about, from shapes alone. */
static inline int64_t mla_most_seen(const mla *a) {
    int64_t most = 0;
    for (int side = 0; side < SIDES; side++) {
        const mla_side *s = &a->side[side];
        const int64_t all = gg_ceil_div(s->rows, gg_max(1, a->B));
        const int64_t window = side == ORI && a->left >= 0 && a->right >= 0 ? a->left + a->right + 1 : all;
        most += s->list != NULL ? s->list->ne[3] : gg_min(window, all);
    }
    return most;
}

/* Bytes of the table of sequences. */
static inline int64_t mla_table_bytes(const mla *a) { return gg_round_up(a->B * (int64_t)sizeof(mla_sequence), 64); }

/* -- where things lie ------------------------------------------------------------------------------------- */

/* Of a tensor [B, S, ...] or [T, ...] what belongs to a token or row. */
static inline float *mla_at(const gg_tensor *t, int64_t i) { return (float *)gg_at(t, i / t->ne[1], i % t->ne[1], 0); }
/* Of an lse, [B, 1, S1, N1] or [1, T1, N1], or of lengths, [B, S1, 1] or [T1, 1]. */
static inline float *mla_lse_at(const gg_tensor *t, int64_t i) {
    return (float *)gg_at(t, i / t->ne[2], 0, i % t->ne[2]);
}
static inline int64_t mla_length_at(const gg_tensor *t, int64_t i) {
    return *(const int32_t *)gg_at(t, 0, i / t->ne[2], i % t->ne[2]);
}
static inline int64_t mla_number(const gg_tensor *t, int64_t i) {
    return *(const int32_t *)((const char *)t->data + i * t->nb[3]);
}

/* Row j of a sequence, counted through all rows. */
static inline int64_t mla_row(const mla *a, int side, int64_t b, int64_t j) {
    const mla_side *s = &a->side[side];
    if (s->table == NULL) return a->sequence[b].start[side] + j;
    const int64_t size = s->kv->ne[1];
    const int32_t page = *(const int32_t *)(gg_at(s->table, 0, 0, b) + j / size * s->table->nb[3]);
    return page * size + j % size;
}

/* -- lengths, checked before anything is written ----------------------------------------------------------- */

typedef struct mla_check {
    const gg_call *c;
    int ok;
} mla_check;

static inline int64_t mla_within(mla_check *check, int source, int64_t value, int64_t least, int64_t most) {
    if (check->ok && (value < least || value > most)) {
        gg_report_between(check->c, GG_INDEX, source, value, least, most + 1);
        check->ok = 0;
    }
    return value;
}

/* Where the B sequences of one kind begin, and the room of each: of q (kind 0) or of a side (kind 1 + side). */
static inline void mla_starts(const mla *a, mla_check *check, mla_sources at, int kind) {
    const gg_tensor *const t = kind == 0 ? a->q : a->side[kind - 1].kv;
    const gg_tensor *const cu = &check->c->src[at.cu + CU_Q + kind];
    const int paged = kind > 0 && a->side[kind - 1].table != NULL;
    int64_t before = 0;
    if (t != NULL && cu->data != NULL) mla_within(check, at.cu + CU_Q + kind, mla_number(cu, 0), 0, 0);
    for (int64_t b = 0; b < a->B && check->ok; b++) {
        int64_t start = 0, room = 0;
        if (t != NULL && cu->data != NULL) {
            start = before;
            before = mla_within(check, at.cu + CU_Q + kind, mla_number(cu, b + 1), before, t->ne[1]);
            room = before - start;
        } else if (paged) {
            room = a->side[kind - 1].table->ne[3] * t->ne[1];
        } else if (t != NULL) {
            start = b * t->ne[1];
            room = t->ne[1];
        }
        mla_sequence *s = &a->sequence[b];
        *(kind == 0 ? &s->token : &s->start[kind - 1]) = start;
        *(kind == 0 ? &s->L1 : &s->L[kind - 1]) = room;
    }
}

static inline void mla_lengths(const mla *a, mla_check *check, mla_sources at, int kind) {
    const int source = at.cu + USED_Q + kind;
    const gg_tensor *const used = &check->c->src[source];
    if (used->data == NULL) return;
    for (int64_t b = 0; b < a->B && check->ok; b++) {
        mla_sequence *s = &a->sequence[b];
        int64_t *L = kind == 0 ? &s->L1 : &s->L[kind - 1];
        *L = mla_within(check, source, mla_number(used, b), 0, *L);
    }
}

/* Fills a->sequence.  Returns whether all that a run cannot trust was right; else it is reported. */
static inline int mla_locate(const mla *a, const gg_call *c, mla_sources at) {
    mla_check check = { c, 1 };
    for (int kind = 0; kind < 1 + SIDES; kind++) mla_starts(a, &check, at, kind);
    for (int kind = 0; kind < 1 + SIDES; kind++) mla_lengths(a, &check, at, kind);
    const gg_tensor *const residual = &c->src[at.cu + RESIDUAL];
    for (int64_t b = 0; b < a->B && check.ok; b++) {
        const int64_t r = residual->data == NULL ? 0 : mla_number(residual, b);
        a->sequence[b].residual = mla_within(&check, at.cu + RESIDUAL, r, 0, a->ratio - 1);
    }
    for (int side = 0; side < SIDES; side++) {
        const gg_tensor *const table = a->side[side].table;
        for (int64_t b = 0; table != NULL && b < a->B && check.ok; b++) {
            const int64_t pages = gg_ceil_div(a->sequence[b].L[side], gg_max(1, a->side[side].kv->ne[1]));
            for (int64_t i = 0; i < pages; i++)
                mla_within(&check, at.table + side, *(const int32_t *)(gg_at(table, 0, 0, b) + i * table->nb[3]), 0,
                           a->side[side].kv->ne[0] - 1);
        }
    }
    return check.ok;
}

/* -- who sees what ----------------------------------------------------------------------------------------- */

/* Tokens of one sequence, one after another, all in use or none. */
typedef struct mla_run {
    int64_t b;        /* the sequence; -1 where tokens are not in use */
    int64_t token, i; /* the first, counted through all sequences and in its own */
    int64_t n;
} mla_run;

/* The first run of tokens `token` ... end - 1. */
static inline mla_run mla_next(const mla *a, int64_t token, int64_t end) {
    int64_t low = 0, high = a->B; /* the last sequence that begins at `token` or before */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a->sequence[middle].token <= token) low = middle + 1;
        else high = middle;
    }
    const int64_t b = low - 1;
    if (b < 0) return (mla_run){ .b = -1, .token = token, .n = end - token };
    const int64_t i = token - a->sequence[b].token, left = a->sequence[b].L1 - i;
    if (left > 0) return (mla_run){ .b = b, .token = token, .i = i, .n = gg_min(left, end - token) };
    const int64_t next = b + 1 < a->B ? a->sequence[b + 1].token : a->tokens;
    return (mla_run){ .b = -1, .token = token, .n = gg_min(next, end) - token };
}

typedef struct mla_range {
    int64_t lo, hi;
} mla_range;

static inline int64_t mla_clip(int64_t x, int64_t most) { return gg_max(0, gg_min(x, most)); }

/* The rows of a side that token i of a sequence may see.  Neither end falls from one token to the next. */
static inline mla_range mla_sees(const mla *a, int side, int64_t b, int64_t i) {
    const mla_sequence *s = &a->sequence[b];
    const int64_t L = s->L[side];
    if (side == CMP) {
        if (!a->cmp_causal) return (mla_range){ 0, L };
        return (mla_range){ 0, mla_clip((L * a->ratio + s->residual - s->L1 + i + 1) / a->ratio, L) };
    }
    const int64_t p = i + L - s->L1; /* the last query is the last token */
    return (mla_range){ a->left < 0 ? 0 : gg_max(p - a->left, 0), a->right < 0 ? L : mla_clip(p + a->right + 1, L) };
}

/* Entries of a token's list, from slot *at on, that count, up to MLA_ROWS: their rows (counted through all rows) and
 * slots.  Returns how many; *at is where to go on, the list's width at its end. */
static inline int64_t mla_listed(const mla *a, int side, const mla_run *r, int64_t k, int64_t *at, int64_t *rows,
                                 int32_t *slots) {
    const mla_side *s = &a->side[side];
    const int64_t token = r->token + k, width = s->list->ne[3];
    const mla_range sees = mla_sees(a, side, r->b, r->i + k);
    const char *const entries = (const char *)mla_at(s->list, token);
    const int64_t end = s->length == NULL ? width : mla_clip(mla_length_at(s->length, token), width);
    int64_t n = 0;
    for (; *at < end && n < MLA_ROWS; ++*at) {
        const int64_t j = *(const int32_t *)(entries + *at * s->list->nb[3]);
        if (j < 0) break;
        if (j < sees.lo || j >= sees.hi) continue;
        rows[n] = mla_row(a, side, r->b, j);
        slots[n++] = (int32_t)*at;
    }
    if (n < MLA_ROWS) *at = width;
    return n;
}

static inline int mla_rows_finite(const mla *a, int side, int64_t b, int64_t from, int64_t to) {
    int finite = 1;
    for (int64_t j = from; finite && j < to; j++)
        finite = gg_row_finite(mla_at(a->side[side].kv, mla_row(a, side, b, j)), a->D);
    return finite;
}

/* Whether the rows that some but not all tokens of a run see as a range are finite; *some: whether there are any. */
static inline int mla_ends_finite(const mla *a, const mla_run *r, int *some) {
    int finite = 1;
    for (int side = 0; side < SIDES; side++) {
        if (a->side[side].kv == NULL || a->side[side].list != NULL) continue;
        const mla_range first = mla_sees(a, side, r->b, r->i), last = mla_sees(a, side, r->b, r->i + r->n - 1);
        *some |= first.lo != last.lo || first.hi != last.hi;
        finite = finite && mla_rows_finite(a, side, r->b, first.lo, last.lo) &&
                 mla_rows_finite(a, side, r->b, gg_max(first.hi, last.lo), last.hi);
    }
    return finite;
}

/* -- pieces of work ---------------------------------------------------------------------------------------- */

/* D floats and the zeros after them. */
static inline void mla_copy_row(const mla *a, const float *from, float *to) {
    memcpy(to, from, a->D * sizeof(float));
    for (int64_t d = a->D; d < a->wide; d++) to[d] = 0;
}

/* n rows from j0 on of what a run's sequence has on a side, [n][step]. */
static inline void mla_copy_range(const mla *a, int side, const mla_run *r, int64_t j0, int64_t n, float *to) {
    for (int64_t j = 0; j < n; j++)
        mla_copy_row(a, mla_at(a->side[side].kv, mla_row(a, side, r->b, j0 + j)), to + j * a->step);
}

/* Adds to seen[k] how many rows token k of a run sees as a range. */
static inline void mla_count_range(const mla *a, int side, const mla_run *r, int64_t *seen) {
    for (int64_t k = 0; k < r->n; k++) {
        const mla_range sees = mla_sees(a, side, r->b, r->i + k);
        seen[k] += sees.hi - sees.lo;
    }
}

/* The rows of a run's tokens in q or what has its shape, [lanes][step]. */
static inline void mla_copy_lanes(const mla *a, const gg_tensor *t, const mla_run *r, float *to) {
    for (int64_t k = 0; k < r->n; k++) {
        const char *from = (const char *)mla_at(t, r->token + k);
        for (int64_t h = 0; h < a->N1; h++, from += t->nb[2], to += a->step) mla_copy_row(a, (const float *)from, to);
    }
}

/* Copied rows as panels: [panel][D][GG_NR], times a factor. */
static inline void mla_turn(const mla *a, const float *rows, int64_t lanes, float factor, float *to) {
    const int64_t line = a->step * (int64_t)sizeof(float);
    gg_pack_columns(&(gg_lines){ .data = (const char *)rows, .dtype = GG_F32, .line = line, .k = sizeof(float) }, lanes,
                    a->D, to);
    for (int64_t i = 0; factor != 1.0f && i < gg_ceil_div(lanes, GG_NR) * GG_NR * a->D; i += GG_VW)
        vf_store(to + i, vf_load(to + i) * factor);
}

/* n copied rows that lanes l0 ... l1 - 1 of a panel see, or of which each sees those from lo to hi. */
typedef struct mla_piece {
    int64_t panel;
    int64_t n;
    const float *x;      /* [n][step] */
    int l0, l1;          /* lanes */
    int v0, v1;          /* the vectors that hold them */
    int64_t open, close; /* rows between which no lane of these vectors is to be hidden */
    int32_t lo[GG_NR], hi[GG_NR];
} mla_piece;

/* For lanes of a token in a panel: whatever else is in their vectors is hidden. */
static inline mla_piece mla_list_piece(const mla *a, int64_t k, int64_t panel, const float *x, int64_t n) {
    const int64_t first = panel * GG_NR;
    mla_piece p = { .panel = panel, .n = n, .x = x };
    p.l0 = (int)gg_max(0, k * a->N1 - first);
    p.l1 = (int)gg_min(GG_NR, (k + 1) * a->N1 - first);
    p.v0 = p.l0 / GG_VW;
    p.v1 = (int)gg_ceil_div(p.l1, GG_VW);
    const int alone = p.l0 % GG_VW == 0 && p.l1 % GG_VW == 0;
    p.close = alone ? n : 0;
    for (int l = 0; l < GG_NR; l++) p.lo[l] = 0, p.hi[l] = l >= p.l0 && l < p.l1 ? (int32_t)n : 0;
    return p;
}

/* For all lanes of a panel, those of rows j0 ... j0 + n - 1 of a range that they see; n is 0 if there are none. */
static inline mla_piece mla_range_piece(const mla *a, int side, const mla_run *r, int64_t panel, const float *x,
                                        int64_t j0, int64_t n) {
    const int64_t lane = panel * GG_NR, lanes = gg_min(GG_NR, r->n * a->N1 - lane);
    const int64_t k0 = lane / a->N1, k1 = (lane + lanes - 1) / a->N1;
    const mla_range first = mla_sees(a, side, r->b, r->i + k0), last = mla_sees(a, side, r->b, r->i + k1);
    const int64_t from = gg_max(j0, first.lo), to = gg_min(j0 + n, last.hi);
    mla_piece p = { .panel = panel, .n = gg_max(0, to - from), .x = x + (from - j0) * a->step };
    p.l1 = (int)lanes;
    p.v1 = (int)gg_ceil_div(lanes, GG_VW);
    p.open = mla_clip(last.lo - from, p.n);
    p.close = gg_max(p.open, mla_clip(first.hi - from, p.n));
    if (p.open == 0 && p.close == p.n) return p;
    for (int64_t k = k0, l = 0; k <= k1; k++) {
        const mla_range sees = mla_sees(a, side, r->b, r->i + k);
        for (const int64_t end = gg_min(lanes, (k + 1) * a->N1 - lane); l < end; l++) {
            p.lo[l] = (int32_t)mla_clip(sees.lo - from, p.n);
            p.hi[l] = (int32_t)mla_clip(sees.hi - from, p.n);
        }
    }
    return p;
}

/* Which lanes of a vector see row j. */
GG_INLINE vi mla_visible(const mla_piece *p, int v, int64_t j) {
    const vi row = vi_set1((int32_t)j);
    return (vi_load(p->lo + v * GG_VW) <= row) & (row < vi_load(p->hi + v * GG_VW));
}

/* -- products ----------------------------------------------------------------------------------------------- */

GG_INLINE void mla_score_tile(const int M, const int vectors, int64_t D, const float *x, int64_t step, const float *qt,
                              float *s) {
    vf c[GG_MR][GG_NV];
    gg_micro_part(M, vectors, D, x, step, 1, qt, GG_NR, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) vf_store(s + m * GG_NR + v * GG_VW, c[m][v]);
}

/* s[n][GG_NR] = x qt, for the piece's vectors. */
static inline void mla_scores(const mla *a, const mla_piece *p, const float *qt, float *s) {
    const int64_t D = a->D, step = a->step;
    if (p->v1 - p->v0 == GG_NV) {
        int64_t j = 0;
        for (; j + GG_MR <= p->n; j += GG_MR) mla_score_tile(GG_MR, GG_NV, D, p->x + j * step, step, qt, s + j * GG_NR);
        GG_EACH_M(p->n - j, mla_score_tile, GG_NV, D, p->x + j * step, step, qt, s + j * GG_NR)
        return;
    }
    for (int v = p->v0; v < p->v1; v++) {
        const float *const q = qt + v * GG_VW;
        float *const to = s + v * GG_VW;
        int64_t j = 0;
        for (; j + GG_MR <= p->n; j += GG_MR) mla_score_tile(GG_MR, 1, D, p->x + j * step, step, q, to + j * GG_NR);
        GG_EACH_M(p->n - j, mla_score_tile, 1, D, p->x + j * step, step, q, to + j * GG_NR)
    }
}

/* sum[m] = keep[m] * sum[m] + sum over n rows of w[.][m] x. */
GG_INLINE void mla_sum_tile(const int M, const int vectors, int64_t n, const float *w, const float *x, int64_t step,
                            const float *keep, float *sum) {
    vf c[GG_MR][GG_NV];
    gg_micro_part(M, vectors, n, w, 1, GG_NR, x, step, c);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *to = sum + m * step + v * GG_VW;
            vf_store(to, vf_load(to) * keep[m] + c[m][v]);
        }
}

/* For each lane of the piece: sum = keep * sum + w^T x; w: [n][GG_NR], sum: [GG_NR][step]. */
static inline void mla_sums(const mla *a, const mla_piece *p, const float *w, const float *keep, float *sum) {
    const int64_t n = p->n, step = a->step;
    for (int64_t d = 0, vectors; d < a->wide; d += vectors * GG_VW) {
        vectors = d + GG_NR <= a->wide ? GG_NV : 1;
        for (int64_t l = p->l0; l < p->l1; l += GG_MR) {
            const int64_t M = gg_min(GG_MR, p->l1 - l);
            float *const to = sum + l * step + d;
            if (vectors == GG_NV) GG_EACH_M(M, mla_sum_tile, GG_NV, n, w + l, p->x + d, step, keep + l, to)
            else GG_EACH_M(M, mla_sum_tile, 1, n, w + l, p->x + d, step, keep + l, to)
        }
    }
}
