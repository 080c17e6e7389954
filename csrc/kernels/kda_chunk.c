/* Kimi Delta Attention in chunks of C tokens, forward and backward: all that costs is products of matrices.
 *
 * In a chunk with the state S before it, G_i the sum of g from its start up to token i, G_n that of all n tokens:
 *
 *   scores_ij = scale q_i . k_j exp(G_i - G_j), j <= i      M_ij = beta_i k_i . k_j exp(G_i - G_j), j < i
 *   d = (1 + M)^-1 (beta v - kb S)        kb_i = beta_i k_i exp(G_i)
 *   o = qg S + scores d                   qg_i = scale q_i exp(G_i)
 *   S <- exp(G_n) S + kg^T d              kg_i = k_i exp(G_n - G_i)
 *
 * Backward, from the last chunk to the first, D the gradient of the state after the chunk:
 *
 *   x = (1 + M)^-T (scores^T do + kg D)   the gradient of beta v - kb S
 *   D <- exp(G_n) D + qg^T do - kb^T x
 *
 * and then, each chunk by itself, dscores = do d^T, dM = -x d^T, and from these what is left.
 *
 * No exponential of a positive number is ever taken: a score is a product of exp(G_i - G_m) and exp(G_m - G_j) for a
 * token m between the two, and both exponents are sums of g over a run that begins at m.  So nothing cancels, however
 * far G has fallen before, and no score depends on a gate after it.  Pairs are taken in halves: the second half of
 * the chunk with the first, then each half by itself in the same way, down to blocks of KDA_BLOCK tokens whose pairs
 * are taken one by one.
 *
 * dg_t is a sum over pairs j < t <= i, S counting as the first j and D as the last i, each with its whole decay.  What
 * ends before t or begins with it is never added and taken away again: under a strong decay it is larger than the result
 * by any factor.  With a middle between j and i the pairs that cross t are those of all j < t in the first half, a sum
 * from its start on, and those of all i >= t in the second, a sum from its end on; and so in each half.
 *
 * Products with masked pairs would spread a NaN to earlier tokens, and gates above 0 might overflow.  So only the tame
 * tokens with which a chunk begins go by products; from the first that holds such numbers on, and where the state
 * or a gradient does, they go one by one through the recurrence itself.  No bit of a token depends on what follows. */
#include "abi/attrs/kda.h"
#include "gemm/product.h"
#include "recurrent/kda.h"

enum {
    KDA_LONGEST = 64,       /* tokens of a chunk */
    KDA_BLOCK = 8,          /* tokens whose pairs are taken one by one */
    KDA_SEGMENTS = 32,      /* of the chunks of a sequence, at most */
    KDA_SEGMENT_TASKS = 32, /* chunks of all heads that a segment should have */
    KDA_SCANS = 8,          /* tasks up to which a head's value channels are shared out: each reads all keys again */
};
enum { KDA_OUT };                                                                  /* results of kda */
enum { KDA_DO = KDA_INPUTS, KDA_DHT, KDA_STATES, KDA_SCORES, KDA_INVERSE, KDA_D }; /* sources of kda_back */
enum { KDA_DQ, KDA_DK, KDA_DV, KDA_DG, KDA_DBETA, KDA_DH0, KDA_DA_LOG, KDA_DDT_BIAS, KDA_GRADIENTS };
enum { KDA_KEEP_STATES = 1, KDA_KEEP_ALL = 2 };

/* A chunk: tokens of a batch, and the row of what is only kept until the next segment. */
typedef struct kda_slot {
    kda_span span;
    int64_t row;
} kda_slot;

/* A call of kda or kda_back.  Chunks are numbered by slots, sequence after sequence.
 *
 * The chunks of a sequence are cut into segments that stages go through one after another, the same one of all
 * sequences at a time: what a chunk hands from stage to stage stays near then, and takes little memory.  Arrays that
 * live through one segment are [rows][HV][...], the others [slots][HV][...]. */
typedef struct kda_chunks {
    kda p;
    int64_t C, slots;
    int64_t blocks, width;    /* of the value channels, in the passes over the states */
    int64_t segments, length; /* of a segment: chunks of a sequence */
    int64_t rows;
    kda_slot *chunk;         /* [slots]; an empty span if there are fewer chunks */
    int64_t *first;          /* [N + 1]: the slot of a sequence's first chunk */
    float *carry;            /* [N][HV][K][V]: states between segments */
    int32_t *tame;           /* near: tokens with which the chunk begins that may go by products */
    float *qg, *kg, *kb;     /* near: [C][K] */
    float *decay;            /* near: [K], exp(G_n) */
    float *beta;             /* near: [C] */
    float *scores, *inverse; /* [C][C] */
    int pairs_near;          /* whether these live through one segment only */
    float *states;           /* [K][V] before the chunk, or NULL */
    float *d;                /* [C][V], or NULL */
    int kept;                /* whether these are results, in which no byte may stay unwritten */
    /* backward only */
    float *x;       /* near: [C][V] */
    float *dstates; /* near: [K][V], D after the chunk */
    float *dbias;   /* [K] */
    double *dA_log; /* [1] */
    int64_t bytes;  /* of work */
} kda_chunks;

static int64_t kda_near(const kda_chunks *x, int64_t slot, int64_t head) { return x->chunk[slot].row * x->p.HV + head; }

/* Where its scores and inverse are. */
static int64_t kda_pairs(const kda_chunks *x, int64_t slot, int64_t head) {
    return x->pairs_near ? kda_near(x, slot, head) : slot * x->p.HV + head;
}

static void *kda_take(char *base, int64_t *used, int64_t bytes) {
    char *here = base ? base + *used : NULL;
    *used += gg_round_up(bytes, 64);
    return here;
}

static float *kda_take_floats(kda_chunks *x, char *base, int64_t rows, int64_t each) {
    return kda_take(base, &x->bytes, rows * x->p.HV * each * (int64_t)sizeof(float));
}

/* What both directions hold in work.  Slots without a chunk are only visited if there is a single segment. */
static kda_chunks kda_chunks_open(const gg_call *c, const kda *p, int64_t C, int segmented) {
    kda_chunks x = { .p = *p, .C = C, .blocks = 1, .segments = 1 };
    x.slots = p->cu ? (p->T + p->N * (C - 1)) / C : p->B * gg_ceil_div(p->T, C);
    while (p->N * p->HV * x.blocks < KDA_SCANS && x.blocks * 2 * KDA_COLUMNS <= p->V) x.blocks *= 2;
    x.width = gg_round_up(gg_ceil_div(p->V, x.blocks), KDA_COLUMNS);
    x.blocks = gg_max(1, gg_ceil_div(p->V, gg_max(1, x.width)));
    const int64_t longest = gg_ceil_div(p->T, C), tasks = gg_max(1, p->N * p->HV);
    x.length = gg_max(gg_ceil_div(longest, KDA_SEGMENTS), gg_ceil_div(KDA_SEGMENT_TASKS, tasks));
    x.rows = x.slots;
    if (segmented && x.length * p->N < x.slots) {
        x.segments = gg_ceil_div(longest, x.length);
        x.rows = x.length * p->N;
    }
    char *base = c->work;
    x.chunk = kda_take(base, &x.bytes, x.slots * (int64_t)sizeof *x.chunk);
    x.first = kda_take(base, &x.bytes, (p->N + 1) * (int64_t)sizeof *x.first);
    x.tame = kda_take(base, &x.bytes, x.rows * p->HV * (int64_t)sizeof *x.tame);
    x.carry = kda_take_floats(&x, base, x.segments > 1 ? p->N : 0, p->K * p->V);
    x.qg = kda_take_floats(&x, base, x.rows, C * p->K);
    x.kg = kda_take_floats(&x, base, x.rows, C * p->K);
    x.kb = kda_take_floats(&x, base, x.rows, C * p->K);
    x.decay = kda_take_floats(&x, base, x.rows, p->K);
    x.beta = kda_take_floats(&x, base, x.rows, C);
    return x;
}

/* Tasks of a stage that takes every chunk of a segment by itself, for so many heads. */
static int64_t kda_chunk_tasks(const kda_chunks *x, int64_t segment, int64_t heads) {
    return segment < x->segments ? x->rows * heads : 0;
}

/* The slot of a segment's row, or -1 if there is none. */
static int64_t kda_slot_of(const kda_chunks *x, int64_t segment, int64_t row) {
    if (x->segments == 1) return row;
    const int64_t n = row / x->length, slot = x->first[n] + segment * x->length + row % x->length;
    return slot < x->first[n + 1] ? slot : -1;
}

/* Tasks of a stage that takes the chunks of a segment in order. */
static int64_t kda_pass_tasks(const kda_chunks *x, int64_t segment) {
    return segment < x->segments ? x->p.N * x->p.HV * x->blocks : 0;
}

static void kda_inputs(const gg_call *c, const gg_tensor **in) {
    for (int i = 0; i < KDA_INPUTS; i++) in[i] = &c->src[i];
}

/* Cuts the sequences into chunks; reports boundaries that are none. */
static void kda_cut(const gg_call *c, const kda_chunks *x) {
    const kda *p = &x->p;
    if (!kda_check_boundaries(c, p, KDA_CU)) return;
    int64_t slot = 0;
    for (int64_t n = 0; n < p->N; n++) {
        const kda_span s = kda_sequence(p, n);
        x->first[n] = slot;
        for (int64_t t = s.begin, i = 0; t < s.end; t += x->C, i++, slot++) {
            const int64_t row = x->segments == 1 ? slot : n * x->length + i % x->length;
            x->chunk[slot] = (kda_slot){ { s.batch, t, gg_min(t + x->C, s.end) }, row };
        }
    }
    x->first[p->N] = slot;
    for (; slot < x->slots; slot++) x->chunk[slot] = (kda_slot){ { 0, 0, 0 }, slot };
}

/* -- a chunk by itself ------------------------------------------------------------------------------------ */

/* The inputs of a chunk of one value head: rows of p->step floats, in whole vectors. */
typedef struct kda_rows {
    int64_t n;
    float *q, *k, *kb, *g, *a; /* scaled q, k, beta k, g, exp(g) */
    float *left, *left_kb;     /* [C / 2]: q and beta k of the later half of a piece, decayed from its middle */
    float *right;              /* [C / 2]: k of the earlier half, decayed up to the middle */
    float *packed;
} kda_rows;

static float *kda_scratch(float *base, int64_t *used, int64_t floats) {
    float *here = base ? base + *used : NULL;
    *used += gg_round_up(floats, 16);
    return here;
}

static kda_rows kda_rows_open(const kda_chunks *x, float *scratch, int64_t *used) {
    const int64_t all = x->C * x->p.step, half = all / 2;
    return (kda_rows){
        .q = kda_scratch(scratch, used, all),
        .k = kda_scratch(scratch, used, all),
        .kb = kda_scratch(scratch, used, all),
        .g = kda_scratch(scratch, used, all),
        .a = kda_scratch(scratch, used, all),
        .left = kda_scratch(scratch, used, half),
        .left_kb = kda_scratch(scratch, used, half),
        .right = kda_scratch(scratch, used, half),
        .packed = kda_scratch(scratch, used, KDA_LONGEST / 2 * x->p.K),
    };
}

/* Loads q and k of a chunk; norms: [2][C] of 1 / norm of k and of q, or NULL. */
static void kda_load_keys(const kda_chunks *x, kda_rows *r, const kda_span *s, int64_t h, float *norms) {
    const kda *p = &x->p;
    r->n = s->end - s->begin;
    for (int64_t i = 0; i < r->n; i++) {
        const float nq = kda_load_key(p, kda_row(p->q, s->batch, s->begin + i, h), p->scale, r->q + i * p->step);
        const float nk = kda_load_key(p, kda_row(p->k, s->batch, s->begin + i, h), 1, r->k + i * p->step);
        if (norms != NULL) norms[i] = nq, norms[x->C + i] = nk;
    }
}

/* Loads what is a value head's own; keys have been loaded, and beta is given. */
static void kda_load_gates(const kda_chunks *x, kda_rows *r, const kda_span *s, int64_t head, const float *beta) {
    const kda *p = &x->p;
    const kda_gate gate = kda_gate_for(p, head);
    for (int64_t i = 0; i < r->n; i++) {
        const float *raw = kda_row(p->g, s->batch, s->begin + i, head);
        for (int64_t j = 0; j < p->K; j += GG_VW) {
            const vf g = kda_gate_at(&gate, raw, j, (int)gg_min(GG_VW, p->K - j));
            vf_store(r->g + i * p->step + j, g);
            vf_store(r->a + i * p->step + j, vf_exp(g));
            vf_store(r->kb + i * p->step + j, vf_load(r->k + i * p->step + j) * beta[i]);
        }
    }
}

/* How many tokens come before the first that holds something not finite, or a gate so far above 0 that products
 * might overflow. */
static int32_t kda_tame_tokens(const kda_chunks *x, const kda_rows *r, const kda_span *s, int64_t head,
                               const float *beta) {
    const kda *p = &x->p;
    for (int32_t i = 0; i < r->n; i++) {
        vi wild = vi_set1(0);
        for (int64_t j = 0; j < p->K; j += GG_VW) wild |= ~(vf_load(r->g + i * p->step + j) <= KDA_LARGEST_SAFE_GATE);
        if (vi_any(wild) || !isfinite(beta[i]) || !gg_row_finite(r->q + i * p->step, p->K) ||
            !gg_row_finite(r->k + i * p->step, p->K) ||
            !gg_row_finite(kda_row(p->v, s->batch, s->begin + i, head), p->V))
            return i;
    }
    return (int32_t)r->n;
}

/* qg, kg, kb and the decay of the whole chunk. */
static void kda_decayed(const kda_chunks *x, const kda_rows *r, int64_t near) {
    const int64_t K = x->p.K, step = x->p.step;
    float *qg = x->qg + near * x->C * K, *kg = x->kg + near * x->C * K, *kb = x->kb + near * x->C * K;
    for (int64_t j = 0; j < K; j += GG_VW) {
        const int count = (int)gg_min(GG_VW, K - j);
        vf sum = vf_zero();
        for (int64_t i = 0; i < r->n; i++) {
            sum += vf_load(r->g + i * step + j);
            const vf from_start = vf_exp(sum);
            gg_give(qg + i * K + j, vf_load(r->q + i * step + j) * from_start, count);
            gg_give(kb + i * K + j, vf_load(r->kb + i * step + j) * from_start, count);
        }
        gg_give(x->decay + near * K + j, vf_exp(sum), count);
        sum = vf_zero();
        for (int64_t i = r->n - 1; i >= 0; i--) {
            gg_give(kg + i * K + j, vf_load(r->k + i * step + j) * vf_exp(sum), count);
            sum += vf_load(r->g + i * step + j);
        }
    }
}

/* The two halves of a piece of a chunk, decayed towards its middle.  L, R: the decays themselves, or NULL. */
static void kda_halves(const kda_rows *r, int64_t K, int64_t step, int64_t begin, int64_t middle, int64_t end, float *L,
                       float *R) {
    for (int64_t j = 0; j < K; j += GG_VW) {
        vf sum = vf_zero();
        for (int64_t i = middle; i < end; i++) {
            const int64_t from = i * step + j, to = (i - middle) * step + j;
            sum += vf_load(r->g + from);
            const vf decay = vf_exp(sum);
            vf_store(r->left + to, vf_load(r->q + from) * decay);
            vf_store(r->left_kb + to, vf_load(r->kb + from) * decay);
            if (L != NULL) vf_store(L + to, decay);
        }
        sum = vf_zero();
        for (int64_t i = middle - 1; i >= begin; i--) {
            const int64_t from = i * step + j, to = (i - begin) * step + j;
            const vf decay = vf_exp(sum);
            vf_store(r->right + to, vf_load(r->k + from) * decay);
            if (R != NULL) vf_store(R + to, decay);
            sum += vf_load(r->g + from);
        }
    }
}

/* Row i of a block that begins J tokens before it, and the pair of i with itself. */
GG_INLINE void kda_block_row(const int J, const kda_rows *r, int64_t K, int64_t step, int64_t i, float *scores,
                             float *M) {
    vf q_sum[KDA_BLOCK] = { 0 }, k_sum[KDA_BLOCK] = { 0 };
    for (int64_t j = 0; j < K; j += GG_VW) {
        const float *at = r->k + i * step + j, *a = r->a + i * step + j;
        const vf q = vf_load(r->q + i * step + j), kb = vf_load(r->kb + i * step + j);
        vf decay = vf_set1(1);
        q_sum[0] += q * vf_load(at);
#pragma GCC unroll 8
        for (int b = 1; b <= J; b++) {
            decay *= vf_load(a - (b - 1) * step);
            const vf k = vf_load(at - b * step) * decay;
            q_sum[b] += q * k;
            k_sum[b] += kb * k;
        }
    }
    scores[0] = vf_sum(q_sum[0]);
#pragma GCC unroll 8
    for (int b = 1; b <= J; b++) {
        scores[-b] = vf_sum(q_sum[b]);
        M[-b] = vf_sum(k_sum[b]);
    }
}

static void kda_block_scores(const kda_rows *r, int64_t K, int64_t step, int64_t begin, int64_t end, int64_t C,
                             float *scores, float *M) {
    for (int64_t i = begin; i < end; i++) {
        float *s = scores + i * C + i, *m = M + i * C + i;
        switch (i - begin) {
        case 0: kda_block_row(0, r, K, step, i, s, m); break;
        case 1: kda_block_row(1, r, K, step, i, s, m); break;
        case 2: kda_block_row(2, r, K, step, i, s, m); break;
        case 3: kda_block_row(3, r, K, step, i, s, m); break;
        case 4: kda_block_row(4, r, K, step, i, s, m); break;
        case 5: kda_block_row(5, r, K, step, i, s, m); break;
        case 6: kda_block_row(6, r, K, step, i, s, m); break;
        default: kda_block_row(7, r, K, step, i, s, m);
        }
    }
}

/* The pairs within tokens begin ... begin + size - 1, as far as they exist; size is a power of two. */
static void kda_piece_scores(const kda_chunks *x, const kda_rows *r, int64_t begin, int64_t size, float *scores,
                             float *M) {
    const int64_t K = x->p.K, step = x->p.step, C = x->C, end = gg_min(begin + size, r->n);
    if (end <= begin) return;
    if (size == KDA_BLOCK) {
        kda_block_scores(r, K, step, begin, end, C, scores, M);
        return;
    }
    const int64_t middle = begin + size / 2;
    kda_piece_scores(x, r, begin, size / 2, scores, M);
    if (end <= middle) return;
    kda_piece_scores(x, r, middle, size / 2, scores, M);
    kda_halves(r, K, step, begin, middle, end, NULL, NULL);
    const gg_lines right = { (const char *)r->right, GG_F32, step * (int64_t)sizeof(float), sizeof(float) };
    gg_pack_columns(&right, size / 2, K, r->packed);
    const int64_t to = middle * C + begin;
    gg_product(GG_WHOLE, end - middle, size / 2, K, (gg_left){ r->left, step, 1 }, gg_packed(r->packed, K),
               gg_set(scores + to, C));
    gg_product(GG_WHOLE, end - middle, size / 2, K, (gg_left){ r->left_kb, step, 1 }, gg_packed(r->packed, K),
               gg_set(M + to, C));
}

/* inverse = (1 + M)^-1 by substitution, KDA_BLOCK rows at a time; M is strictly lower, [n][C]. */
static void kda_invert(int64_t n, int64_t C, const float *M, float *inverse) {
    memset(inverse, 0, C * C * sizeof(float));
    for (int64_t begin = 0; begin < n; begin += KDA_BLOCK) {
        const int64_t end = gg_min(n, begin + KDA_BLOCK);
        if (begin > 0)
            gg_product(GG_WHOLE, end - begin, gg_round_up(begin, GG_VW), begin, (gg_left){ M + begin * C, C, 1 },
                       gg_plain(inverse, C), gg_subtract(inverse + begin * C, C));
        for (int64_t i = begin; i < end; i++) {
            float *row = inverse + i * C;
            for (int64_t j = 0; j <= i; j += GG_VW) {
                vf sum = vf_load(row + j);
                for (int64_t l = begin; l < i; l++) sum -= vf_load(inverse + l * C + j) * M[i * C + l];
                vf_store(row + j, sum);
            }
            row[i] = 1;
        }
    }
}

/* Everything about a chunk that needs no state.  with_pairs: scores and inverse too. */
static void kda_chunk_alone(const kda_chunks *x, int64_t slot, int64_t head, float *scratch, int with_pairs) {
    const kda *p = &x->p;
    const int64_t at = slot * p->HV + head, near = kda_near(x, slot, head), pairs = kda_pairs(x, slot, head), C = x->C;
    const kda_span *s = &x->chunk[slot].span;
    int64_t used = 0;
    kda_rows r = kda_rows_open(x, scratch, &used);
    float *M = kda_scratch(scratch, &used, C * C), *beta = x->beta + near * C;
    float *scores = x->scores + pairs * C * C, *inverse = x->inverse + pairs * C * C;

    kda_load_keys(x, &r, s, head / gg_max(1, p->group), NULL);
    for (int64_t i = 0; i < r.n; i++) beta[i] = kda_beta(p->beta_form, kda_raw_beta(p, s->batch, s->begin + i, head));
    kda_load_gates(x, &r, s, head, beta);
    x->tame[near] = kda_tame_tokens(x, &r, s, head, beta);
    if (x->kept) { /* rows of d that belong to no token */
        memset(x->d + (at * C + r.n) * p->V, 0, (C - r.n) * p->V * sizeof(float));
    }
    r.n = x->tame[near];
    kda_decayed(x, &r, near);
    if (!with_pairs) return;
    memset(scores, 0, C * C * sizeof(float));
    kda_piece_scores(x, &r, 0, C, scores, M);
    kda_invert(r.n, C, M, inverse);
}

static int64_t kda_alone_scratch(const kda_chunks *x) {
    int64_t used = 0;
    kda_rows_open(x, NULL, &used);
    kda_scratch(NULL, &used, x->C * x->C);
    return used * (int64_t)sizeof(float);
}

/* -- the passes over the states --------------------------------------------------------------------------- */

/* A value head of a sequence, value channels v0 ... v0 + width. */
typedef struct kda_pass {
    int64_t sequence, head, v0, width, step;
    float *S;     /* [K][step] */
    float *X, *Y; /* [C][step] */
    float *token; /* 3 rows of p->step */
} kda_pass;

static kda_pass kda_pass_open(const kda_chunks *x, int64_t task, float *scratch, int64_t *used) {
    const kda *p = &x->p;
    const int64_t block = task % x->blocks, rows = task / x->blocks, step = kda_padded(x->width);
    kda_pass s = {
        .sequence = rows / gg_max(1, p->HV), .head = rows % gg_max(1, p->HV), .v0 = block * x->width, .step = step
    };
    s.width = gg_min(x->width, p->V - s.v0);
    s.S = kda_scratch(scratch, used, p->K * step);
    s.X = kda_scratch(scratch, used, x->C * step);
    s.Y = kda_scratch(scratch, used, x->C * step);
    s.token = kda_scratch(scratch, used, 3 * p->step);
    if (scratch != NULL) memset(scratch, 0, *used * sizeof(float)); /* panels are read to their end */
    return s;
}

static int64_t kda_pass_scratch(const kda_chunks *x) {
    int64_t used = 0;
    kda_pass_open(x, 0, NULL, &used);
    return used * (int64_t)sizeof(float);
}

static void kda_copy_rows(float *to, int64_t to_step, const float *from, int64_t from_step, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_step, from + i * from_step, n * sizeof(float));
}

/* The row of a token in a contiguous [B, T, heads, n]. */
static float *kda_dense(const gg_tensor *t, int64_t b, int64_t token, int64_t head) {
    return (float *)gg_at(t, b, token, head);
}

/* The tokens of a chunk from the ith on. */
static void kda_forward_by_token(const kda_chunks *x, const kda_pass *s, int64_t slot, int64_t i,
                                 const gg_tensor *out) {
    const kda *p = &x->p;
    const kda_gate gate = kda_gate_for(p, s->head);
    const kda_span *c = &x->chunk[slot].span;
    const int64_t at = slot * p->HV + s->head, near = kda_near(x, slot, s->head);
    for (int64_t t = c->begin + i; t < c->end; t++) {
        kda_token token = kda_load_token(p, &gate, c->batch, t, s->head, s->token);
        token.v += s->v0;
        token.same_beta = x->beta[near * x->C + t - c->begin];
        kda_step(p->K, s->width, &token, s->S, s->step, x->d ? x->d + (at * x->C + t - c->begin) * p->V + s->v0 : NULL,
                 out ? kda_dense(out, c->batch, t, s->head) + s->v0 : NULL);
    }
}

/* d of the first n tokens of a chunk, their results, and the state after them. */
static void kda_forward_chunk(const kda_chunks *x, const kda_pass *s, int64_t slot, int64_t n, const gg_tensor *out) {
    const kda *p = &x->p;
    const kda_span *c = &x->chunk[slot].span;
    const int64_t K = p->K, C = x->C, at = slot * p->HV + s->head;
    const int64_t near = kda_near(x, slot, s->head), pairs = kda_pairs(x, slot, s->head);
    const gg_right state = gg_plain(s->S, s->step), d = gg_plain(s->Y, s->step);
    for (int64_t i = 0; i < n; i++) {
        const float *v = kda_row(p->v, c->batch, c->begin + i, s->head) + s->v0, beta = x->beta[near * C + i];
        float *to = s->X + i * s->step;
        for (int64_t j = 0; j < s->width; j++) to[j] = beta * v[j];
    }
    gg_product(GG_WHOLE, n, s->width, K, (gg_left){ x->kb + near * C * K, K, 1 }, state, gg_subtract(s->X, s->step));
    gg_product(GG_LOWER, n, s->width, n, (gg_left){ x->inverse + pairs * C * C, C, 1 }, gg_plain(s->X, s->step),
               gg_set(s->Y, s->step));
    if (x->d != NULL) kda_copy_rows(x->d + at * C * p->V + s->v0, p->V, s->Y, s->step, n, s->width);
    if (out != NULL) {
        float *o = kda_dense(out, c->batch, c->begin, s->head) + s->v0;
        const int64_t row = out->nb[1] / (int64_t)sizeof(float);
        gg_product(GG_WHOLE, n, s->width, K, (gg_left){ x->qg + near * C * K, K, 1 }, state, gg_set(o, row));
        gg_product(GG_LOWER, n, s->width, n, (gg_left){ x->scores + pairs * C * C, C, 1 }, d, gg_add(o, row));
    }
    gg_product(GG_WHOLE, K, s->width, n, (gg_left){ x->kg + near * C * K, 1, K }, d,
               (gg_into){ .data = s->S, .row = s->step, .sign = 1, .keep = x->decay + near * K });
}

/* A sequence's chunks in a segment: slots begin ... end - 1, and whether they are its first and its last. */
typedef struct kda_stretch {
    int64_t begin, end;
    int first, last;
} kda_stretch;

/* Of a sequence without chunks segment 0 is both. */
static kda_stretch kda_stretch_of(const kda_chunks *x, int64_t segment, int64_t n) {
    const int64_t first = x->first[n], last = x->first[n + 1];
    if (x->segments == 1 || first == last) return (kda_stretch){ first, last, segment == 0, segment == 0 };
    const int64_t begin = gg_min(last, first + segment * x->length), end = gg_min(last, begin + x->length);
    return (kda_stretch){ begin, end, begin == first, begin < last && end == last };
}

static float *kda_carry(const kda_chunks *x, const kda_pass *s) {
    return x->carry + (s->sequence * x->p.HV + s->head) * x->p.K * x->p.V + s->v0;
}

/* out, ht: NULL where the results are not wanted. */
static void kda_forward_pass(const kda_chunks *x, int64_t segment, int64_t task, const gg_tensor *out,
                             const gg_tensor *ht, float *scratch) {
    const kda *p = &x->p;
    int64_t used = 0;
    const kda_pass s = kda_pass_open(x, task, scratch, &used);
    const kda_stretch part = kda_stretch_of(x, segment, s.sequence);
    if (part.first) kda_load_state(p->h0, p->v_first, s.sequence, s.head, s.v0, s.width, p->K, s.S, s.step);
    else if (part.begin < part.end) kda_copy_rows(s.S, s.step, kda_carry(x, &s), p->V, p->K, s.width);
    for (int64_t slot = part.begin; slot < part.end; slot++) {
        const int64_t at = slot * p->HV + s.head;
        if (x->states != NULL) kda_copy_rows(x->states + at * p->K * p->V + s.v0, p->V, s.S, s.step, p->K, s.width);
        const int64_t tame = gg_rows_finite(s.S, s.step, p->K, s.width) ? x->tame[kda_near(x, slot, s.head)] : 0;
        if (tame > 0) kda_forward_chunk(x, &s, slot, tame, out);
        kda_forward_by_token(x, &s, slot, tame, out);
    }
    if (!part.last) {
        if (part.begin < part.end) kda_copy_rows(kda_carry(x, &s), p->V, s.S, s.step, p->K, s.width);
    } else if (ht != NULL) {
        kda_store_state(ht, p->v_first, s.sequence, s.head, s.v0, s.width, p->K, s.S, s.step);
    }
}

/* -- forward ---------------------------------------------------------------------------------------------- */

static kda_chunks kda_forward_open(const gg_call *c) {
    const gg_kda_attrs *at = c->attrs;
    const gg_tensor *in[KDA_INPUTS];
    kda_inputs(c, in);
    const kda p = kda_open(in, &at->form);
    kda_chunks x = kda_chunks_open(c, &p, at->chunk_size, at->keep == 0);
    const gg_tensor *kept = c->dst + 1 + at->final_state;
    x.states = at->keep >= KDA_KEEP_STATES ? kept[0].data : NULL;
    x.kept = at->keep == KDA_KEEP_ALL;
    x.pairs_near = !x.kept;
    x.scores = x.kept ? kept[1].data : kda_take_floats(&x, c->work, x.rows, x.C * x.C);
    x.inverse = x.kept ? kept[2].data : kda_take_floats(&x, c->work, x.rows, x.C * x.C);
    x.d = x.kept ? kept[3].data : NULL;
    return x;
}

/* Stage 0 cuts the sequences; then for every segment one stage takes its chunks by themselves and one in order. */
enum { KDA_ALONE = 1, KDA_FORWARD, KDA_FORWARD_STAGES = 1 + 2 * KDA_SEGMENTS };

static int64_t kda_tasks(const gg_call *c, int stage) {
    if (stage == 0) return 1;
    const kda_chunks x = kda_forward_open(c);
    const int64_t segment = (stage - 1) / 2;
    return stage % 2 == KDA_ALONE ? kda_chunk_tasks(&x, segment, x.p.HV) : kda_pass_tasks(&x, segment);
}

/* Zeros in the results of a slot without a chunk. */
static void kda_clear_slot(const kda_chunks *x, int64_t at) {
    const int64_t C = x->C, K = x->p.K, V = x->p.V;
    if (x->states != NULL) memset(x->states + at * K * V, 0, K * V * sizeof(float));
    if (!x->kept) return;
    memset(x->scores + at * C * C, 0, C * C * sizeof(float));
    memset(x->inverse + at * C * C, 0, C * C * sizeof(float));
    memset(x->d + at * C * V, 0, C * V * sizeof(float));
}

static void kda_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const gg_kda_attrs *at = c->attrs;
    const kda_chunks x = kda_forward_open(c);
    const int64_t segment = (stage - 1) / 2;
    if (stage == 0) {
        kda_cut(c, &x);
        return;
    }
    for (int64_t task = begin; task < end; task++)
        if (stage % 2 == KDA_ALONE) {
            const int64_t slot = kda_slot_of(&x, segment, task / x.p.HV), head = task % x.p.HV;
            if (slot < 0) continue;
            if (x.chunk[slot].span.end > 0) kda_chunk_alone(&x, slot, head, scratch, 1);
            else kda_clear_slot(&x, slot * x.p.HV + head);
        } else {
            kda_forward_pass(&x, segment, task, &c->dst[KDA_OUT], at->final_state ? &c->dst[1] : NULL, scratch);
        }
}

static int64_t kda_work(const gg_call *c) { return kda_forward_open(c).bytes; }

static int64_t kda_scratch_bytes(const gg_call *c) {
    const kda_chunks x = kda_forward_open(c);
    return gg_max(kda_alone_scratch(&x), kda_pass_scratch(&x));
}

GG_KERNEL(kda, .stages = KDA_FORWARD_STAGES, .tasks = kda_tasks, .run = kda_run, .work = kda_work,
          .scratch = kda_scratch_bytes);

/* -- backward: the pass over the states ------------------------------------------------------------------- */

static const float *kda_do_row(const gg_tensor *t, const kda_span *c, int64_t i, int64_t head) {
    return kda_row(t, c->batch, c->begin + i, head);
}

/* Tokens begin ... end - 1 of a chunk. */
static void kda_reverse_by_token(const kda_chunks *x, const kda_pass *s, int64_t slot, int64_t begin, int64_t end,
                                 const float *dout) {
    const kda *p = &x->p;
    const kda_gate gate = kda_gate_for(p, s->head);
    const kda_span *c = &x->chunk[slot].span;
    const int64_t near = kda_near(x, slot, s->head);
    for (int64_t i = end - 1; i >= begin; i--) {
        const kda_token t = kda_load_token(p, &gate, c->batch, c->begin + i, s->head, s->token);
        const float beta = x->beta[near * x->C + i], *d = dout + i * s->step;
        float *dd = s->Y;
        memset(dd, 0, s->width * sizeof(float));
        for (int64_t k = 0; k < p->K; k++) {
            float *D = s->S + k * s->step;
            for (int64_t v = 0; v < s->width; v++) {
                D[v] += t.q[k] * d[v];
                dd[v] += D[v] * t.k[k];
            }
        }
        for (int64_t k = 0; k < p->K; k++) {
            float *D = s->S + k * s->step;
            for (int64_t v = 0; v < s->width; v++) D[v] = t.a[k] * (D[v] - t.k[k] * (beta * dd[v]));
        }
        memcpy(x->x + (near * x->C + i) * p->V + s->v0, dd, s->width * sizeof(float));
    }
}

/* x of the first n tokens of a chunk, and D before them; dout: [n][step]. */
static void kda_reverse_chunk(const kda_chunks *x, const kda_pass *s, int64_t slot, int64_t n, const float *dout,
                              float *Z) {
    const kda *p = &x->p;
    const int64_t K = p->K, C = x->C, near = kda_near(x, slot, s->head), pairs = kda_pairs(x, slot, s->head);
    const gg_right doutp = gg_plain(dout, s->step);
    gg_product(GG_UPPER, n, s->width, n, (gg_left){ x->scores + pairs * C * C, 1, C }, doutp, gg_set(Z, s->step));
    gg_product(GG_WHOLE, n, s->width, K, (gg_left){ x->kg + near * C * K, K, 1 }, gg_plain(s->S, s->step),
               gg_add(Z, s->step));
    gg_product(GG_UPPER, n, s->width, n, (gg_left){ x->inverse + pairs * C * C, 1, C }, gg_plain(Z, s->step),
               gg_set(s->Y, s->step));
    kda_copy_rows(x->x + near * C * p->V + s->v0, p->V, s->Y, s->step, n, s->width);
    gg_product(GG_WHOLE, K, s->width, n, (gg_left){ x->qg + near * C * K, 1, K }, doutp,
               (gg_into){ .data = s->S, .row = s->step, .sign = 1, .keep = x->decay + near * K });
    gg_product(GG_WHOLE, K, s->width, n, (gg_left){ x->kb + near * C * K, 1, K }, gg_plain(s->Y, s->step),
               gg_subtract(s->S, s->step));
}

/* dout, dht, dh0: NULL where there is none or it is not wanted. */
static void kda_reverse_pass(const kda_chunks *x, int64_t segment, int64_t task, const gg_tensor *dout,
                             const gg_tensor *dht, const gg_tensor *dh0, float *scratch) {
    const kda *p = &x->p;
    int64_t used = 0;
    const kda_pass s = kda_pass_open(x, task, scratch, &used);
    float *Z = kda_scratch(scratch, &used, x->C * s.step);
    memset(Z, 0, x->C * s.step * sizeof(float));
    const kda_stretch part = kda_stretch_of(x, segment, s.sequence);
    if (part.last) kda_load_state(dht, p->v_first, s.sequence, s.head, s.v0, s.width, p->K, s.S, s.step);
    else if (part.begin < part.end) kda_copy_rows(s.S, s.step, kda_carry(x, &s), p->V, p->K, s.width);
    for (int64_t slot = part.end - 1; slot >= part.begin; slot--) {
        const int64_t near = kda_near(x, slot, s.head);
        const kda_span *c = &x->chunk[slot].span;
        const int64_t n = c->end - c->begin;
        if (x->dstates != NULL) kda_copy_rows(x->dstates + near * p->K * p->V + s.v0, p->V, s.S, s.step, p->K, s.width);
        for (int64_t i = 0; i < n && dout != NULL; i++)
            memcpy(s.X + i * s.step, kda_do_row(dout, c, i, s.head) + s.v0, s.width * sizeof(float));
        int64_t tame =
            gg_rows_finite(s.S, s.step, p->K, s.width) && gg_rows_finite(s.X, s.step, n, s.width) ? x->tame[near] : 0;
        kda_reverse_by_token(x, &s, slot, tame, n, s.X);
        if (tame == n || gg_rows_finite(s.S, s.step, p->K, s.width)) {
            if (tame > 0) kda_reverse_chunk(x, &s, slot, tame, s.X, Z);
        } else {
            kda_reverse_by_token(x, &s, slot, 0, tame, s.X);
        }
    }
    if (!part.first) {
        if (part.begin < part.end) kda_copy_rows(kda_carry(x, &s), p->V, s.S, s.step, p->K, s.width);
    } else if (dh0 != NULL) {
        kda_store_state(dh0, p->v_first, s.sequence, s.head, s.v0, s.width, p->K, s.S, s.step);
    }
}

/* -- backward: a chunk by itself -------------------------------------------------------------------------- */

/* Gradients of a chunk; rows of p->step floats. */
typedef struct kda_grads {
    kda_rows r;
    float *norms;                        /* [2][C] */
    float *dq_all, *dk_all;              /* summed over the value heads of a q and k */
    float *dq, *dk, *dg;                 /* of the scaled q, of k, of the activated g */
    float *y;                            /* -x S^T: the gradient of kb */
    float *pair_q, *pair_k, *pair_right; /* sum over j of dscores k, of dM k; over i of both with q and beta k */
    float *L, *R, *T, *U;                /* [C / 2] */
    float *dscores, *dM;                 /* [C][C] */
    float *dots;                         /* [C][GG_VW]: of dbeta */
    float *dbeta;                        /* [C] */
    float *products;                     /* [K]: row sums of S D */
    float *d_t, *state_t;                /* panels of d and of a state */
    float *history;                      /* [C + 1][K][KDA_COLUMNS]: states, token by token */
    float *D;                            /* [K][KDA_COLUMNS] */
    int64_t used;
} kda_grads;

static kda_grads kda_grads_open(const kda_chunks *x, float *scratch) {
    const kda *p = &x->p;
    const int64_t rows = x->C * p->step, V = gg_max(1, p->V);
    kda_grads w = { 0 };
    w.r = kda_rows_open(x, scratch, &w.used);
    float **whole[] = { &w.dq_all, &w.dk_all, &w.dq, &w.dk, &w.dg, &w.y, &w.pair_q, &w.pair_k, &w.pair_right };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) *whole[i] = kda_scratch(scratch, &w.used, rows);
    float **half[] = { &w.L, &w.R, &w.T, &w.U };
    for (size_t i = 0; i < sizeof half / sizeof *half; i++) *half[i] = kda_scratch(scratch, &w.used, rows / 2);
    w.norms = kda_scratch(scratch, &w.used, 2 * x->C);
    w.dscores = kda_scratch(scratch, &w.used, x->C * x->C);
    w.dM = kda_scratch(scratch, &w.used, x->C * x->C);
    w.dots = kda_scratch(scratch, &w.used, x->C * GG_VW);
    w.dbeta = kda_scratch(scratch, &w.used, x->C);
    w.products = kda_scratch(scratch, &w.used, p->step);
    /* a chunk goes one of two ways */
    int64_t one = w.used, other = w.used;
    w.d_t = kda_scratch(scratch, &one, V * KDA_LONGEST);
    w.state_t = kda_scratch(scratch, &one, V * gg_round_up(gg_max(1, p->K), KDA_COLUMNS));
    w.history = kda_scratch(scratch, &other, (x->C + 1) * p->K * KDA_COLUMNS);
    w.D = kda_scratch(scratch, &other, p->K * KDA_COLUMNS);
    w.used = gg_max(one, other);
    return w;
}

/* Pairs within a block, without those of a token with itself. */
static void kda_block_back(const kda_grads *w, int64_t K, int64_t step, int64_t begin, int64_t end, int64_t C) {
    const kda_rows *r = &w->r;
    for (int64_t j = 0; j < K; j += GG_VW) {
        vf right[KDA_BLOCK] = { 0 }, across[KDA_BLOCK] = { 0 }, pair[KDA_BLOCK];
        for (int64_t i = begin; i < end; i++) {
            const int64_t at = i * step + j;
            const vf q = vf_load(r->q + at), kb = vf_load(r->kb + at);
            vf decay = vf_set1(1), dq = vf_zero(), dk = vf_zero();
            for (int64_t b = i - 1; b >= begin; b--) {
                const float score = w->dscores[i * C + b], m = w->dM[i * C + b];
                decay *= vf_load(r->a + (b + 1) * step + j);
                const vf k = vf_load(r->k + b * step + j) * decay;
                const vf both = q * score + kb * m;
                dq += k * score;
                dk += k * m;
                right[b - begin] += decay * both;
                pair[b - begin] = k * both;
            }
            vf sum = vf_zero();
            for (int64_t t = 1; t <= i - begin; t++) {
                sum += pair[t - 1];
                across[t] += sum;
            }
            vf_store(w->pair_q + at, vf_load(w->pair_q + at) + dq);
            vf_store(w->pair_k + at, vf_load(w->pair_k + at) + dk);
        }
        for (int64_t b = begin; b < end; b++) {
            const int64_t at = b * step + j;
            vf_store(w->pair_right + at, vf_load(w->pair_right + at) + right[b - begin]);
            vf_store(w->dg + at, vf_load(w->dg + at) + across[b - begin]);
        }
    }
}

/* The later half of a piece gets T, of dscores, and U, of dM, decayed from its middle. */
static void kda_later_back(const kda_grads *w, int64_t K, int64_t step, int64_t middle, int64_t rows) {
    for (int64_t j = 0; j < K; j += GG_VW) {
        vf across = vf_zero();
        for (int64_t i = rows - 1; i >= 0; i--) {
            const int64_t from = i * step + j, to = middle * step + from;
            const vf decay = vf_load(w->L + from), by_q = vf_load(w->T + from), by_k = vf_load(w->U + from);
            vf_store(w->pair_q + to, vf_load(w->pair_q + to) + decay * by_q);
            vf_store(w->pair_k + to, vf_load(w->pair_k + to) + decay * by_k);
            across += vf_load(w->r.left + from) * by_q + vf_load(w->r.left_kb + from) * by_k;
            vf_store(w->dg + to, vf_load(w->dg + to) + across);
        }
    }
}

/* The earlier half gets T, decayed up to the middle. */
static void kda_earlier_back(const kda_grads *w, int64_t K, int64_t step, int64_t begin, int64_t rows) {
    for (int64_t j = 0; j < K; j += GG_VW) {
        vf across = vf_zero();
        for (int64_t i = 0; i < rows; i++) {
            const int64_t from = i * step + j, to = begin * step + from;
            const vf by_k = vf_load(w->T + from);
            vf_store(w->dg + to, vf_load(w->dg + to) + across);
            vf_store(w->pair_right + to, vf_load(w->pair_right + to) + vf_load(w->R + from) * by_k);
            across += vf_load(w->r.right + from) * by_k;
        }
    }
}

/* The reverse of kda_piece_scores. */
static void kda_piece_back(const kda_chunks *x, const kda_grads *w, int64_t begin, int64_t size) {
    const kda_rows *r = &w->r;
    const int64_t K = x->p.K, step = x->p.step, C = x->C, end = gg_min(begin + size, r->n);
    if (end <= begin) return;
    if (size == KDA_BLOCK) {
        kda_block_back(w, K, step, begin, end, C);
        return;
    }
    const int64_t middle = begin + size / 2, later = end - middle, earlier = size / 2;
    kda_piece_back(x, w, begin, size / 2);
    if (end <= middle) return;
    kda_piece_back(x, w, middle, size / 2);
    kda_halves(r, K, step, begin, middle, end, w->L, w->R);
    const float *dscores = w->dscores + middle * C + begin, *dM = w->dM + middle * C + begin;
    const gg_right right = gg_plain(r->right, step);
    gg_product(GG_WHOLE, later, K, earlier, (gg_left){ dscores, C, 1 }, right, gg_set(w->T, step));
    gg_product(GG_WHOLE, later, K, earlier, (gg_left){ dM, C, 1 }, right, gg_set(w->U, step));
    kda_later_back(w, K, step, middle, later);
    gg_product(GG_WHOLE, earlier, K, later, (gg_left){ dscores, 1, C }, gg_plain(r->left, step), gg_set(w->T, step));
    gg_product(GG_WHOLE, earlier, K, later, (gg_left){ dM, 1, C }, gg_plain(r->left_kb, step), gg_add(w->T, step));
    kda_earlier_back(w, K, step, begin, earlier);
}

/* dq, dk, dg and the dots of dbeta, from what the products have given: dq = do S^T, y = -x S^T, dk = d D^T. */
static void kda_gather(const kda_chunks *x, const kda_grads *w, int64_t near) {
    const kda_rows *r = &w->r;
    const int64_t step = x->p.step, C = x->C, n = r->n;
    const float *beta = x->beta + near * C;
    memset(w->dots, 0, n * GG_VW * sizeof(float));
    for (int64_t j = 0; j < x->p.K; j += GG_VW) {
        vf sum = vf_zero();
        for (int64_t i = n - 1; i >= 0; i--) {
            const int64_t here = i * step + j;
            vf_store(w->dk + here, vf_load(w->dk + here) * vf_exp(sum));
            sum += vf_load(r->g + here);
        }
        /* what the decay of a token gets of pairs with D: of the state, and of all tokens before */
        vf across = vf_exp(sum) * vf_load(w->products + j);
        sum = vf_zero();
        for (int64_t i = 0; i < n; i++) {
            const int64_t here = i * step + j;
            sum += vf_load(r->g + here);
            const vf from_start = vf_exp(sum);
            vf_store(w->dq + here, vf_load(w->dq + here) * from_start);
            vf_store(w->y + here, vf_load(w->y + here) * from_start);
            vf_store(w->dg + here, vf_load(w->dg + here) + across);
            across += vf_load(r->k + here) * vf_load(w->dk + here);
        }
        across = vf_zero(); /* of pairs of the state with all tokens from it on */
        for (int64_t i = n - 1; i >= 0; i--) {
            const int64_t here = i * step + j;
            const vf q = vf_load(r->q + here), k = vf_load(r->k + here), kb = vf_load(r->kb + here);
            const vf dq = vf_load(w->dq + here), by_state = vf_load(w->y + here);
            const vf y = by_state + vf_load(w->pair_k + here);
            const float self = w->dscores[i * C + i];
            across += q * dq + kb * by_state;
            vf_store(w->dg + here, vf_load(w->dg + here) + across);
            vf_store(w->dq + here, dq + vf_load(w->pair_q + here) + k * self);
            vf_store(w->dk + here, vf_load(w->dk + here) + y * beta[i] + vf_load(w->pair_right + here) + q * self);
            float *dot = w->dots + i * GG_VW;
            vf_store(dot, vf_load(dot) + y * k);
        }
    }
}

/* Everything of the tokens of w->r, with which a chunk of a value head begins, by products. */
static void kda_back_chunk(const kda_chunks *x, const kda_grads *w, int64_t slot, int64_t head, const gg_tensor *dout) {
    const kda *p = &x->p;
    const kda_span *c = &x->chunk[slot].span;
    const int64_t at = slot * p->HV + head, near = kda_near(x, slot, head);
    const int64_t K = p->K, V = p->V, C = x->C, n = w->r.n, step = p->step;
    const float *state = x->states + at * K * V, *dstate = x->dstates + near * K * V;
    const float *d = x->d + at * C * V, *xs = x->x + near * C * V;
    const gg_left x_rows = { xs, V, 1 }, d_rows = { d, V, 1 };
    const gg_left do_rows = dout ? (gg_left){ kda_do_row(dout, c, 0, head), dout->nb[1] / (int64_t)sizeof(float), 1 }
                                 : (gg_left){ NULL, 0, 1 };

    const gg_lines d_lines = { (const char *)d, GG_F32, V * (int64_t)sizeof(float), sizeof(float) };
    gg_pack_columns(&d_lines, n, V, w->d_t);
    if (dout) gg_product(GG_LOWER_RESULT, n, n, V, do_rows, gg_packed(w->d_t, V), gg_set(w->dscores, C));
    else memset(w->dscores, 0, C * C * sizeof(float));
    gg_into dM = gg_set(w->dM, C);
    dM.sign = -1;
    gg_product(GG_LOWER_RESULT, n, n, V, x_rows, gg_packed(w->d_t, V), dM);

    gg_lines lines = { (const char *)state, GG_F32, V * (int64_t)sizeof(float), sizeof(float) };
    gg_pack_columns(&lines, K, V, w->state_t);
    if (dout) gg_product(GG_WHOLE, n, K, V, do_rows, gg_packed(w->state_t, V), gg_set(w->dq, step));
    gg_into y = gg_set(w->y, step);
    y.sign = -1;
    gg_product(GG_WHOLE, n, K, V, x_rows, gg_packed(w->state_t, V), y);
    lines.data = (const char *)dstate;
    gg_pack_columns(&lines, K, V, w->state_t);
    gg_product(GG_WHOLE, n, K, V, d_rows, gg_packed(w->state_t, V), gg_set(w->dk, step));
    for (int64_t k = 0; k < K; k++) w->products[k] = (float)gg_row_dot(state + k * V, dstate + k * V, V);
    if (!dout) memset(w->dq, 0, n * step * sizeof(float));

    memset(w->pair_q, 0, n * step * sizeof(float));
    memset(w->pair_k, 0, n * step * sizeof(float));
    memset(w->pair_right, 0, n * step * sizeof(float));
    memset(w->dg, 0, n * step * sizeof(float));
    kda_piece_back(x, w, 0, C);
    kda_gather(x, w, near);
    for (int64_t i = 0; i < n; i++)
        w->dbeta[i] = (float)(gg_row_dot(xs + i * V, kda_row(p->v, c->batch, c->begin + i, head), V) +
                              vf_sum(vf_load(w->dots + i * GG_VW)));
}

/* The same of tokens begin ... end - 1 one by one, some value channels at a time; writes dv too, if it is not NULL.
 * Takes the gradient of the state after them from x->dstates, and leaves there that of the state before them. */
static void kda_back_by_token(const kda_chunks *x, const kda_grads *w, int64_t slot, int64_t head, int64_t begin,
                              int64_t end, const gg_tensor *dout, const gg_tensor *dv) {
    const kda *p = &x->p;
    const kda_span *c = &x->chunk[slot].span;
    const kda_rows *r = &w->r;
    const int64_t at = slot * p->HV + head, near = kda_near(x, slot, head), K = p->K, V = p->V, step = p->step;
    const float *beta = x->beta + near * x->C;
    float *const rows[] = { w->dq, w->dk, w->dg };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        memset(rows[i] + begin * step, 0, (end - begin) * step * sizeof(float));
    memset(w->dbeta + begin, 0, (end - begin) * sizeof(float));
    for (int64_t v0 = 0; v0 < V; v0 += KDA_COLUMNS) {
        const int64_t width = gg_min(KDA_COLUMNS, V - v0), size = K * KDA_COLUMNS;
        kda_copy_rows(w->history, KDA_COLUMNS, x->states + at * K * V + v0, V, K, width);
        kda_copy_rows(w->D, KDA_COLUMNS, x->dstates + near * K * V + v0, V, K, width);
        for (int64_t i = 0; i < end; i++) {
            const kda_token t = { .a = r->a + i * step,
                                  .q = r->q + i * step,
                                  .k = r->k + i * step,
                                  .v = kda_row(p->v, c->batch, c->begin + i, head) + v0,
                                  .same_beta = beta[i] };
            float *S = w->history + (i + 1) * size;
            kda_copy_rows(S, KDA_COLUMNS, S - size, KDA_COLUMNS, K, width);
            kda_step(K, width, &t, S, KDA_COLUMNS, NULL, NULL);
        }
        for (int64_t i = end - 1; i >= begin; i--) {
            const float *a = r->a + i * step, *q = r->q + i * step, *k = r->k + i * step;
            const float *v = kda_row(p->v, c->batch, c->begin + i, head) + v0;
            float go[KDA_COLUMNS] = { 0 }, dd[KDA_COLUMNS] = { 0 }, seen[KDA_COLUMNS] = { 0 }, by_v[KDA_COLUMNS];
            float written[KDA_COLUMNS];
            if (dout) memcpy(go, kda_do_row(dout, c, i, head) + v0, width * sizeof(float));
            for (int64_t l = 0; l < K; l++) {
                const float *S = w->history + (i + 1) * size + l * KDA_COLUMNS, *before = S - size;
                float *D = w->D + l * KDA_COLUMNS, sum = 0;
                for (int64_t j = 0; j < width; j++) {
                    sum += S[j] * go[j];
                    D[j] += q[l] * go[j];
                    dd[j] += D[j] * k[l];
                    seen[j] += a[l] * before[j] * k[l];
                }
                w->dq[i * step + l] += sum;
            }
            for (int64_t j = 0; j < width; j++) {
                w->dbeta[i] += dd[j] * (v[j] - seen[j]);
                written[j] = beta[i] * (v[j] - seen[j]);
                by_v[j] = beta[i] * dd[j];
            }
            for (int64_t l = 0; l < K; l++) {
                const float *before = w->history + i * size + l * KDA_COLUMNS;
                float *D = w->D + l * KDA_COLUMNS, by_k = 0, by_g = 0;
                for (int64_t j = 0; j < width; j++) {
                    const float decayed = a[l] * before[j];
                    by_k += D[j] * written[j] - decayed * by_v[j];
                    D[j] -= k[l] * by_v[j];
                    by_g += D[j] * decayed;
                    D[j] *= a[l];
                }
                w->dk[i * step + l] += by_k;
                w->dg[i * step + l] += by_g;
            }
            if (dv) memcpy(kda_dense(dv, c->batch, c->begin + i, head) + v0, by_v, width * sizeof(float));
        }
        kda_copy_rows(x->dstates + near * K * V + v0, V, w->D, KDA_COLUMNS, K, width);
    }
}

static int kda_finite_state(const kda_chunks *x, const float *states, int64_t at) {
    const int64_t size = x->p.K * x->p.V;
    return gg_row_finite(states + at * size, size);
}

static int kda_finite_do(const kda_chunks *x, const kda_span *c, int64_t head, const gg_tensor *dout) {
    for (int64_t i = 0; dout && i < c->end - c->begin; i++)
        if (!gg_row_finite(kda_do_row(dout, c, i, head), x->p.V)) return 0;
    return 1;
}

/* Gradients of a chunk of one value head: of its activated inputs in w, and dv, if it is not NULL. */
static void kda_back_head(const kda_chunks *x, const kda_grads *w, int64_t slot, int64_t head, const gg_tensor *dout,
                          const gg_tensor *dv) {
    const int64_t at = slot * x->p.HV + head, near = kda_near(x, slot, head), n = w->r.n, V = x->p.V;
    const kda_span *c = &x->chunk[slot].span;
    const int finite =
        kda_finite_state(x, x->states, at) && kda_finite_state(x, x->dstates, near) && kda_finite_do(x, c, head, dout);
    const int64_t tame = finite ? x->tame[near] : 0;
    if (tame < n) kda_back_by_token(x, w, slot, head, tame, n, dout, dv);
    if (tame == 0) return;
    if (tame < n && !kda_finite_state(x, x->dstates, near)) {
        kda_back_by_token(x, w, slot, head, 0, tame, dout, dv);
        return;
    }
    kda_grads first = *w;
    first.r.n = tame;
    kda_back_chunk(x, &first, slot, head, dout);
    for (int64_t i = 0; dv && i < tame; i++) {
        float *to = kda_dense(dv, c->batch, c->begin + i, head);
        for (int64_t j = 0; j < V; j++) to[j] = x->beta[near * x->C + i] * x->x[(near * x->C + i) * V + j];
    }
}

/* A row of dy becomes that of x, where y = x r times `times`. */
static void kda_key_back(const kda *p, const float *dy, const float *y, float times, float r, float *to) {
    if (!p->l2norm) {
        for (int64_t i = 0; i < p->K; i++) to[i] = dy[i] * times;
        return;
    }
    const float along = (float)gg_row_dot(dy, y, p->K);
    for (int64_t i = 0; i < p->K; i++) to[i] = (dy[i] - along * y[i]) * r * times;
}

/* -- backward: the kernel --------------------------------------------------------------------------------- */

typedef struct kda_back_call {
    kda_chunks x;
    const gg_tensor *dout, *dht;
    const gg_tensor *result[KDA_GRADIENTS]; /* NULL where it is not wanted */
    int given;                              /* whether the forward pass has kept what it computed */
    int inputs;                             /* whether any gradient but dh0 is wanted */
} kda_back_call;

static kda_back_call kda_back_open(const gg_call *c) {
    const gg_kda_back_attrs *at = c->attrs;
    const gg_tensor *in[KDA_INPUTS];
    kda_inputs(c, in);
    const kda p = kda_open(in, &at->form);
    kda_back_call b = { .x = kda_chunks_open(c, &p, at->chunk_size, 1),
                        .dout = kda_given(&c->src[KDA_DO]),
                        .dht = kda_given(&c->src[KDA_DHT]),
                        .given = c->src[KDA_STATES].data != NULL,
                        .inputs = (at->needs & ~(1 << KDA_DH0)) != 0 };
    for (int i = 0, next = 0; i < KDA_GRADIENTS; i++) b.result[i] = at->needs >> i & 1 ? &c->dst[next++] : NULL;
    kda_chunks *x = &b.x;
    const int64_t pairs = x->C * x->C, values = x->C * p.V, state = p.K * p.V;
    x->scores = b.given ? c->src[KDA_SCORES].data : kda_take_floats(x, c->work, x->slots, pairs);
    x->inverse = b.given ? c->src[KDA_INVERSE].data : kda_take_floats(x, c->work, x->slots, pairs);
    if (b.given) {
        x->states = c->src[KDA_STATES].data;
        x->d = c->src[KDA_D].data;
    } else if (b.inputs) {
        x->states = kda_take_floats(x, c->work, x->slots, state);
        x->d = kda_take_floats(x, c->work, x->slots, values);
    }
    x->x = kda_take_floats(x, c->work, x->rows, values);
    if (b.inputs) x->dstates = kda_take_floats(x, c->work, x->rows, state);
    if (p.gate != KDA_GATE_GIVEN) {
        x->dbias = kda_take_floats(x, c->work, x->slots, p.K);
        x->dA_log = kda_take(c->work, &x->bytes, x->slots * p.HV * (int64_t)sizeof(double));
    }
    return b;
}

static float *kda_result_row(const gg_tensor *t, const kda_span *c, int64_t i, int64_t head) {
    return t ? kda_dense(t, c->batch, c->begin + i, head) : NULL;
}

/* A chunk of one q/k head and of all value heads that read it. */
static void kda_back_task(const kda_back_call *b, int64_t slot, int64_t h, float *scratch) {
    const kda_chunks *x = &b->x;
    const kda *p = &x->p;
    const kda_span *c = &x->chunk[slot].span;
    kda_grads w = kda_grads_open(x, scratch);
    const int64_t K = p->K, step = p->step;
    kda_load_keys(x, &w.r, c, h, w.norms);
    const int64_t n = w.r.n;
    /* products write K channels of a row; the lanes after them must hold 0 */
    float *const cleared[] = { w.dq_all, w.dk_all, w.dq, w.dk, w.y };
    for (size_t i = 0; i < sizeof cleared / sizeof *cleared; i++) memset(cleared[i], 0, n * step * sizeof(float));
    memset(w.T, 0, x->C / 2 * step * sizeof(float));
    memset(w.U, 0, x->C / 2 * step * sizeof(float));
    memset(w.products, 0, step * sizeof(float));
    for (int64_t head = h * p->group; head < (h + 1) * p->group; head++) {
        const int64_t at = slot * p->HV + head, near = kda_near(x, slot, head);
        kda_load_gates(x, &w.r, c, head, x->beta + near * x->C);
        kda_back_head(x, &w, slot, head, b->dout, b->result[KDA_DV]);
        const kda_gate gate = kda_gate_for(p, head);
        float *dbias = x->dbias ? x->dbias + at * K : NULL;
        double dA_log = 0;
        if (dbias) memset(dbias, 0, K * sizeof(float));
        for (int64_t i = 0; i < n; i++) {
            dA_log += kda_gate_row_back(&gate, w.dg + i * step, kda_row(p->g, c->batch, c->begin + i, head), K,
                                        kda_result_row(b->result[KDA_DG], c, i, head), dbias);
            const float raw = kda_raw_beta(p, c->batch, c->begin + i, head);
            if (b->result[KDA_DBETA])
                ((float *)gg_at(b->result[KDA_DBETA], 0, c->batch, c->begin + i))[head] =
                    kda_beta_back(p->beta_form, raw, w.dbeta[i]);
        }
        if (x->dA_log) x->dA_log[at] = dA_log;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = i * step; j < i * step + K; j += GG_VW) {
                vf_store(w.dq_all + j, vf_load(w.dq_all + j) + vf_load(w.dq + j));
                vf_store(w.dk_all + j, vf_load(w.dk_all + j) + vf_load(w.dk + j));
            }
    }
    for (int64_t i = 0; i < n; i++) {
        float *dq = kda_result_row(b->result[KDA_DQ], c, i, h), *dk = kda_result_row(b->result[KDA_DK], c, i, h);
        if (dq) {
            float *y = w.r.q + i * step; /* was scaled */
            if (p->l2norm) kda_load_key(p, kda_row(p->q, c->batch, c->begin + i, h), 1, y);
            kda_key_back(p, w.dq_all + i * step, y, p->scale, w.norms[i], dq);
        }
        if (dk) kda_key_back(p, w.dk_all + i * step, w.r.k + i * step, 1, w.norms[x->C + i], dk);
    }
}

/* The sums over all chunks, of one value head. */
static void kda_back_sums(const kda_back_call *b, int64_t head) {
    const kda_chunks *x = &b->x;
    const kda *p = &x->p;
    const int64_t chunks = x->first[p->N];
    if (b->result[KDA_DA_LOG]) {
        double sum = 0;
        for (int64_t slot = 0; slot < chunks; slot++) sum += x->dA_log[slot * p->HV + head];
        ((float *)b->result[KDA_DA_LOG]->data)[head] = (float)sum;
    }
    for (int64_t k = 0; b->result[KDA_DDT_BIAS] && k < p->K; k++) {
        double sum = 0;
        for (int64_t slot = 0; slot < chunks; slot++) sum += x->dbias[(slot * p->HV + head) * p->K + k];
        ((float *)b->result[KDA_DDT_BIAS]->data)[head * p->K + k] = (float)sum;
    }
}

/* Stage 0 cuts the sequences.  Then the forward pass is repeated where nothing of it was kept, in the stages that it
 * has there.  Then for every segment, from the last to the first, one stage takes the chunks by themselves, one in
 * order, and one works out their gradients.  The last stage adds up over chunks. */
enum {
    KDA_AGAIN = 1,
    KDA_BACK = KDA_AGAIN + 2 * KDA_SEGMENTS,
    KDA_SUMS = KDA_BACK + 3 * KDA_SEGMENTS,
    KDA_BACK_STAGES,
};
enum { KDA_BACK_ALONE, KDA_REVERSE, KDA_EACH };

static int64_t kda_back_segment(const kda_chunks *x, int stage) { return x->segments - 1 - (stage - KDA_BACK) / 3; }

static int64_t kda_back_tasks(const gg_call *c, int stage) {
    if (stage == 0) return 1;
    const kda_back_call b = kda_back_open(c);
    const kda_chunks *x = &b.x;
    if (stage == KDA_SUMS) return b.result[KDA_DA_LOG] || b.result[KDA_DDT_BIAS] ? x->p.HV : 0;
    if (stage < KDA_BACK) {
        const int64_t segment = (stage - KDA_AGAIN) / 2;
        if (b.given) return 0;
        if (stage % 2 == KDA_ALONE) return kda_chunk_tasks(x, segment, x->p.HV);
        return b.inputs ? kda_pass_tasks(x, segment) : 0;
    }
    const int64_t segment = kda_back_segment(x, stage);
    if (segment < 0) return 0;
    switch ((stage - KDA_BACK) % 3) {
    case KDA_BACK_ALONE: return b.given || x->segments > 1 ? kda_chunk_tasks(x, segment, x->p.HV) : 0;
    case KDA_REVERSE: return kda_pass_tasks(x, segment);
    default: return b.inputs ? kda_chunk_tasks(x, segment, x->p.H) : 0;
    }
}

static void kda_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const kda_back_call b = kda_back_open(c);
    const kda_chunks *x = &b.x;
    if (stage == 0) {
        kda_cut(c, x);
        return;
    }
    const int again = stage < KDA_BACK;
    const int64_t segment = again ? (stage - KDA_AGAIN) / 2 : kda_back_segment(x, stage);
    const int what = again ? stage % 2 == KDA_ALONE ? KDA_BACK_ALONE : KDA_REVERSE : (stage - KDA_BACK) % 3;
    for (int64_t task = begin; task < end; task++) {
        if (stage == KDA_SUMS) {
            kda_back_sums(&b, task);
        } else if (what == KDA_REVERSE) {
            if (again) kda_forward_pass(x, segment, task, NULL, NULL, scratch);
            else kda_reverse_pass(x, segment, task, b.dout, b.dht, b.result[KDA_DH0], scratch);
        } else {
            const int64_t heads = what == KDA_EACH ? x->p.H : x->p.HV;
            const int64_t slot = kda_slot_of(x, segment, task / heads);
            if (slot < 0 || x->chunk[slot].span.end == 0) continue;
            if (what == KDA_EACH) kda_back_task(&b, slot, task % heads, scratch);
            else kda_chunk_alone(x, slot, task % heads, scratch, again);
        }
    }
}

static int64_t kda_back_work(const gg_call *c) { return kda_back_open(c).x.bytes; }

static int64_t kda_back_scratch(const gg_call *c) {
    const kda_back_call b = kda_back_open(c);
    const int64_t pass = kda_pass_scratch(&b.x) + b.x.C * kda_padded(b.x.width) * (int64_t)sizeof(float);
    const int64_t each = kda_grads_open(&b.x, NULL).used * (int64_t)sizeof(float);
    return gg_max(kda_alone_scratch(&b.x), gg_max(pass, b.inputs ? each : 0));
}

GG_KERNEL(kda_back, .stages = KDA_BACK_STAGES, .tasks = kda_back_tasks, .run = kda_back_run, .work = kda_back_work,
          .scratch = kda_back_scratch);
