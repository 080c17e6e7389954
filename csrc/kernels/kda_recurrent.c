/* Kimi Delta Attention token by token, for decoding: from the initial states, or on a pool of states in place.
 *
 * A task has some value channels of one head of one sequence: its part of the state stays in the cache. */
#include "abi/attrs/kda.h"
#include "recurrent/kda.h"

enum { KDA_RECURRENT_TASKS = 16 }; /* below which the value channels are cut */
enum {
    POOL_OUT,
    POOL,
    POOL_Q,
    POOL_K,
    POOL_V,
    POOL_G,
    POOL_BETA,
    POOL_SLOTS,
    POOL_ACCEPTED,
    POOL_A_LOG,
    POOL_DT_BIAS,
    POOL_CU
};

typedef struct kda_blocks {
    int64_t blocks, width, step; /* of the value channels; floats from row to row of a state in scratch */
} kda_blocks;

static kda_blocks kda_blocks_of(const kda *p) {
    kda_blocks c = { .blocks = 1 };
    while (p->N * p->HV * c.blocks < KDA_RECURRENT_TASKS && c.blocks * 2 * KDA_COLUMNS <= p->V) c.blocks *= 2;
    c.width = gg_round_up(gg_ceil_div(p->V, c.blocks), KDA_COLUMNS);
    c.blocks = gg_max(1, gg_ceil_div(p->V, gg_max(1, c.width)));
    c.step = kda_padded(c.width);
    return c;
}

/* A task's place, and its memory. */
typedef struct kda_lane {
    kda_span tokens;
    int64_t sequence, head, v0, width, step;
    float *S;     /* [K][step] */
    float *token; /* 3 rows of p->step */
    float *beta;  /* [width] */
} kda_lane;

static int64_t kda_lane_scratch(const kda *p) {
    const kda_blocks c = kda_blocks_of(p);
    return (p->K * c.step + 3 * p->step + c.step) * (int64_t)sizeof(float);
}

static kda_lane kda_lane_open(const kda *p, int64_t task, float *scratch) {
    const kda_blocks c = kda_blocks_of(p);
    const int64_t block = task % c.blocks, rows = task / c.blocks;
    kda_lane l = { .sequence = rows / p->HV, .head = rows % p->HV, .v0 = block * c.width, .step = c.step };
    l.width = gg_min(c.width, p->V - l.v0);
    l.tokens = kda_sequence(p, l.sequence);
    l.S = scratch;
    l.token = l.S + p->K * c.step;
    l.beta = l.token + 3 * p->step;
    return l;
}

static int64_t kda_lanes(const kda *p) { return p->N * p->HV * kda_blocks_of(p).blocks; }

/* One token: S becomes the state after it. */
static void kda_lane_step(const kda *p, const kda_lane *l, const kda_gate *gate, int64_t t, const gg_tensor *out) {
    kda_token token = kda_load_token(p, gate, l->tokens.batch, t, l->head, l->token);
    token.v += l->v0;
    if (p->beta->rank == 4) {
        const float *raw = kda_row(p->beta, l->tokens.batch, t, l->head) + l->v0;
        for (int64_t v = 0; v < l->width; v++) l->beta[v] = kda_beta(p->beta_form, raw[v]);
        token.beta = l->beta;
    } else {
        token.same_beta = kda_beta(p->beta_form, kda_raw_beta(p, l->tokens.batch, t, l->head));
    }
    kda_step(p->K, l->width, &token, l->S, l->step, NULL, (float *)gg_at(out, l->tokens.batch, t, l->head) + l->v0);
}

/* -- from initial states ---------------------------------------------------------------------------------- */

static kda kda_recurrent_open(const gg_call *c) {
    const gg_tensor *in[KDA_INPUTS];
    for (int i = 0; i < KDA_INPUTS; i++) in[i] = &c->src[i];
    return kda_open(in, &((const gg_kda_recurrent_attrs *)c->attrs)->form);
}

static int64_t kda_recurrent_tasks(const gg_call *c, int stage) {
    const kda p = kda_recurrent_open(c);
    return stage == 0 ? 1 : kda_lanes(&p);
}

static void kda_recurrent_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const kda p = kda_recurrent_open(c);
    if (stage == 0) {
        kda_check_boundaries(c, &p, KDA_CU);
        return;
    }
    for (int64_t task = begin; task < end; task++) {
        const kda_lane l = kda_lane_open(&p, task, scratch);
        const kda_gate gate = kda_gate_for(&p, l.head);
        kda_load_state(p.h0, p.v_first, l.sequence, l.head, l.v0, l.width, p.K, l.S, l.step);
        for (int64_t t = l.tokens.begin; t < l.tokens.end; t++) kda_lane_step(&p, &l, &gate, t, &c->dst[0]);
        if (c->n_dst > 1) kda_store_state(&c->dst[1], p.v_first, l.sequence, l.head, l.v0, l.width, p.K, l.S, l.step);
    }
}

static int64_t kda_recurrent_scratch(const gg_call *c) {
    const kda p = kda_recurrent_open(c);
    return kda_lane_scratch(&p);
}

GG_KERNEL(kda_recurrent, .stages = 2, .tasks = kda_recurrent_tasks, .run = kda_recurrent_run,
          .scratch = kda_recurrent_scratch);

/* -- on a pool -------------------------------------------------------------------------------------------- */

static kda kda_pool_open(const gg_call *c) {
    const gg_tensor *s = c->src;
    const gg_tensor *in[KDA_INPUTS] = {
        [KDA_Q] = &s[POOL_Q],
        [KDA_K] = &s[POOL_K],
        [KDA_V] = &s[POOL_V],
        [KDA_G] = &s[POOL_G],
        [KDA_BETA] = &s[POOL_BETA],
        [KDA_A_LOG] = &s[POOL_A_LOG],
        [KDA_DT_BIAS] = &s[POOL_DT_BIAS],
        [KDA_CU] = &s[POOL_CU],
    };
    return kda_open(in, &((const gg_kda_recurrent_pool_attrs *)c->attrs)->form);
}

/* Tokens of a sequence that there are slots for. */
static int64_t kda_pool_room(const gg_call *c) {
    const gg_tensor *t = &c->src[POOL_SLOTS];
    return t->rank == 2 ? t->ne[3] : 1;
}

static int64_t kda_pool_slot(const gg_call *c, int64_t n, int64_t t) {
    const gg_tensor *s = &c->src[POOL_SLOTS];
    const int64_t at = s->rank == 2 ? n * s->nb[2] + t * s->nb[3] : n * s->nb[3];
    return *(const int32_t *)((const char *)s->data + at);
}

/* Which of a sequence's slots it begins with, counted from 1. */
static int64_t kda_pool_accepted(const gg_call *c, int64_t n) {
    const gg_tensor *a = &c->src[POOL_ACCEPTED];
    return a->data == NULL ? 1 : *(const int32_t *)((const char *)a->data + n * a->nb[3]);
}

/* Whether sequence n may use a slot; owner[slot] is 1 + the sequence that does. */
static int kda_pool_claim(const gg_call *c, int64_t n, int64_t slot, int64_t *owner) {
    const int64_t states = c->dst[1].ne[0];
    if (slot < 0 || slot >= states) {
        gg_report(c, GG_INDEX, POOL_SLOTS, slot, states);
        return 0;
    }
    if (owner[slot] != 0 && owner[slot] != n + 1) {
        gg_report(c, GG_SHARED, POOL_SLOTS, slot, states);
        return 0;
    }
    owner[slot] = n + 1;
    return 1;
}

static void kda_pool_check(const gg_call *c, const kda *p) {
    if (!kda_check_boundaries(c, p, POOL_CU)) return;
    int64_t *owner = c->work;
    memset(owner, 0, c->dst[1].ne[0] * sizeof *owner);
    const int64_t room = kda_pool_room(c);
    for (int64_t n = 0; n < p->N; n++) {
        const kda_span s = kda_sequence(p, n);
        const int64_t tokens = s.end - s.begin, first = kda_pool_accepted(c, n);
        if (tokens > room) {
            gg_report_between(c, GG_INDEX, POOL_CU, s.end, s.begin, s.begin + room + 1);
            return;
        }
        if (first < 1 || first > room) {
            gg_report_between(c, GG_INDEX, POOL_ACCEPTED, first, 1, room + 1);
            return;
        }
        if (!kda_pool_claim(c, n, kda_pool_slot(c, n, first - 1), owner)) return;
        for (int64_t t = 0; t < tokens; t++)
            if (!kda_pool_claim(c, n, kda_pool_slot(c, n, t), owner)) return;
    }
}

static int64_t kda_recurrent_pool_tasks(const gg_call *c, int stage) {
    const kda p = kda_pool_open(c);
    return stage == 0 ? 1 : kda_lanes(&p);
}

static void kda_recurrent_pool_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    const kda p = kda_pool_open(c);
    if (stage == 0) {
        kda_pool_check(c, &p);
        return;
    }
    const gg_tensor *out = &c->dst[0], *pool = &c->dst[1];
    for (int64_t task = begin; task < end; task++) {
        const kda_lane l = kda_lane_open(&p, task, scratch);
        const kda_gate gate = kda_gate_for(&p, l.head);
        const int64_t first = kda_pool_slot(c, l.sequence, kda_pool_accepted(c, l.sequence) - 1);
        kda_load_state(pool, p.v_first, first, l.head, l.v0, l.width, p.K, l.S, l.step);
        for (int64_t t = l.tokens.begin; t < l.tokens.end; t++) {
            kda_lane_step(&p, &l, &gate, t, out);
            const int64_t slot = kda_pool_slot(c, l.sequence, t - l.tokens.begin);
            kda_store_state(pool, p.v_first, slot, l.head, l.v0, l.width, p.K, l.S, l.step);
        }
    }
}

static int64_t kda_recurrent_pool_work(const gg_call *c) { return c->dst[1].ne[0] * (int64_t)sizeof(int64_t); }

static int64_t kda_recurrent_pool_scratch(const gg_call *c) {
    const kda p = kda_pool_open(c);
    return kda_lane_scratch(&p);
}

GG_KERNEL(kda_recurrent_pool, .stages = 2, .tasks = kda_recurrent_pool_tasks, .run = kda_recurrent_pool_run,
          .work = kda_recurrent_pool_work, .scratch = kda_recurrent_pool_scratch);
