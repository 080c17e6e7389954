/* The gate of Kimi Delta Attention by itself, and its gradients.
 *
 * Backward: stage 0 takes chunks of rows, each of which sums dA_log and ddt_bias for itself; stage 1 adds them up. */
#include "abi/attrs/kda.h"
#include "recurrent/kda.h"

enum { GATE_G, GATE_A_LOG, GATE_DT_BIAS };                        /* sources of kda_gate */
enum { GATE_DOUT, GATE_BACK_G, GATE_BACK_A_LOG, GATE_BACK_BIAS }; /* of kda_gate_back */
enum { GATE_CHUNKS = 64, GATE_COST = 8 };

static int64_t kda_gate_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_rows(c->dst), c->dst->ne[3], GATE_COST);
}

static void kda_gate_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const gg_kda_gate_attrs *at = c->attrs;
    const gg_tensor *g = &c->src[GATE_G];
    const int64_t K = g->ne[3], rows = gg_rows(g), tasks = kda_gate_tasks(c, 0);
    const int64_t from = gg_cut(rows, begin, tasks), to = gg_cut(rows, end, tasks);
    gg_walk walk = gg_walk_from(g, from);
    for (int64_t r = from; r < to; r++, gg_walk_on(&walk)) {
        const kda_gate gate =
            kda_gate_of(at->gate, at->lower_bound, c->src[GATE_A_LOG].data, c->src[GATE_DT_BIAS].data, r % g->ne[2], K);
        float *y = (float *)c->dst->data + r * K;
        for (int64_t i = 0; i < K; i += GG_VW) {
            const int count = (int)gg_min(GG_VW, K - i);
            gg_give(y + i, kda_gate_at(&gate, (const float *)walk.row, i, count), count);
        }
    }
}

GG_KERNEL(kda_gate, .stages = 1, .tasks = kda_gate_tasks, .run = kda_gate_run);

static int64_t kda_gate_chunks(const gg_call *c) {
    const gg_tensor *g = &c->src[GATE_BACK_G];
    return gg_min(GATE_CHUNKS, gg_row_tasks(gg_rows(g), g->ne[3], GATE_COST));
}

/* work: double [chunks, HV] of dA_log, float [chunks, HV, K] of ddt_bias */
static int64_t kda_gate_back_work(const gg_call *c) {
    const gg_tensor *g = &c->src[GATE_BACK_G];
    return kda_gate_chunks(c) * g->ne[2] * (int64_t)(sizeof(double) + g->ne[3] * sizeof(float));
}

static int64_t kda_gate_back_scratch(const gg_call *c) {
    const gg_tensor *g = &c->src[GATE_BACK_G];
    return g->ne[2] * g->ne[3] * (int64_t)sizeof(float);
}

static int64_t kda_gate_back_tasks(const gg_call *c, int stage) {
    return stage == 0 ? kda_gate_chunks(c) : c->n_dst == 1 ? 0 : c->src[GATE_BACK_G].ne[2];
}

static void kda_gate_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    float *const part = scratch; /* sums of some rows of a chunk that has many */
    const gg_kda_gate_back_attrs *at = c->attrs;
    const gg_tensor *g = &c->src[GATE_BACK_G], *dout = &c->src[GATE_DOUT];
    const float *A_log = c->src[GATE_BACK_A_LOG].data, *bias = c->src[GATE_BACK_BIAS].data;
    const int64_t HV = g->ne[2], K = g->ne[3], rows = gg_rows(g), chunks = kda_gate_chunks(c);
    double *by_A = c->work;
    float *by_bias = (float *)(by_A + chunks * HV);
    if (stage == 0) {
        for (int64_t chunk = begin; chunk < end; chunk++) {
            const int64_t from = gg_cut(rows, chunk, chunks), to = gg_cut(rows, chunk + 1, chunks);
            double *dA = by_A + chunk * HV;
            float *db = by_bias + chunk * HV * K;
            memset(dA, 0, HV * sizeof *dA);
            memset(db, 0, HV * K * sizeof *db);
            const int64_t some = gg_sum_block((to - from) / gg_max(1, HV)) * HV;
            gg_walk raw = gg_walk_from(g, from), d = gg_walk_from(dout, from);
            for (int64_t r = from; r < to; r++, gg_walk_on(&raw), gg_walk_on(&d)) {
                const int64_t head = r % HV;
                if (r > from && (r - from) % some == 0) {
                    if (r > from + some) gg_add_row(db, part, HV * K);
                    memset(part, 0, HV * K * sizeof *part);
                }
                const kda_gate gate = kda_gate_of(at->gate, at->lower_bound, A_log, bias, head, K);
                dA[head] +=
                    kda_gate_row_back(&gate, (const float *)d.row, (const float *)raw.row, K,
                                      (float *)c->dst[0].data + r * K, (r < from + some ? db : part) + head * K);
            }
            if (to > from + some) gg_add_row(db, part, HV * K);
        }
        return;
    }
    for (int64_t head = begin; head < end; head++) {
        if (A_log != NULL) {
            double sum = 0;
            for (int64_t chunk = 0; chunk < chunks; chunk++) sum += by_A[chunk * HV + head];
            ((float *)c->dst[1].data)[head] = (float)sum;
        }
        float *const to = bias != NULL ? (float *)c->dst[A_log != NULL ? 2 : 1].data + head * K : NULL;
        for (int64_t k = 0; to != NULL && k < K; k++) {
            double sum = 0;
            for (int64_t chunk = 0; chunk < chunks; chunk++) sum += by_bias[(chunk * HV + head) * K + k];
            to[k] = (float)sum;
        }
    }
}

GG_KERNEL(kda_gate_back, .stages = 2, .tasks = kda_gate_back_tasks, .run = kda_gate_back_run,
          .work = kda_gate_back_work, .scratch = kda_gate_back_scratch);
