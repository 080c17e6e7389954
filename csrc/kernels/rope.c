/* rope, rope_back: pairs of elements of x[.., T, H, D] turned by an angle that is pos[T] times the pair's frequency.
 *
 *   stage 0   cos and sin of all positions and pairs, into work: one table serves all heads
 *   stage 1   the rows
 *
 * The factor of attn_factor and YaRN is in the table.  Its rows hold cos[pairs] and sin[pairs]; for normal, what
 * makes a pair's two lanes alike: cos, cos and -sin, sin for each pair, [2 pairs] of both.
 * Modes with four positions for each place have pos[4 T]; each pair has one of them, its stream.
 * rope_back is rope with -sin: the transpose. */
#include "abi/attrs/rope.h"
#include "vec/simd.h"
#include "walk/kernel.h"

enum { ROPE_X, ROPE_POS, ROPE_FACTORS };
enum { ROPE_NORMAL = 0, ROPE_NEOX = 2, ROPE_MROPE = 8, ROPE_VISION = 24, ROPE_IMROPE = 40, ROPE_STREAMS = 4 };

static int64_t rope_dims(const gg_call *c) {
    const gg_rope_attrs *p = c->attrs;
    const int64_t D = c->dst->ne[3];
    return p->n_dims ? p->n_dims : p->mode == ROPE_VISION ? D / 2 : D - p->offset;
}

static int64_t rope_pairs(const gg_call *c) {
    const gg_rope_attrs *p = c->attrs;
    return p->mode == ROPE_VISION ? rope_dims(c) : rope_dims(c) / 2;
}

static int64_t rope_table_row(const gg_call *c) {
    const gg_rope_attrs *p = c->attrs;
    return p->mode == ROPE_NORMAL ? 4 * rope_pairs(c) : 2 * rope_pairs(c);
}

/* Which positions pair i turns by; *exponent is that of its frequency. */
static int rope_stream(const gg_rope_attrs *p, int64_t i, int64_t *exponent) {
    *exponent = i;
    if (p->mode < ROPE_MROPE) return 0;
    const int64_t *size = p->sections;
    int64_t sector = i % (size[0] + size[1] + size[2] + size[3]);
    if (p->mode == ROPE_IMROPE) return sector < 3 * size[sector % 3] ? (int)(sector % 3) : 3;
    int stream = 0;
    while (sector >= size[stream]) sector -= size[stream++];
    if (p->mode == ROPE_VISION) *exponent = sector;
    return stream;
}

/* Of the table's rows, zeros up to a whole vector: quarter turns per position of each pair, and its stream. */
typedef struct rope_pair {
    double quarters;
    int64_t stream;
} rope_pair;

static double rope_clip(double x) { return x < 0 ? 0 : x > 1 ? 1 : x; }

/* The pair that turns so often within n_ctx_orig positions. */
static double rope_pair_that_turns(const gg_rope_attrs *p, double n_dims, double times) {
    return n_dims * log(p->n_ctx_orig / (times * 2 * M_PI)) / (2 * log(p->freq_base));
}

/* Returns the factor on turned elements. */
static float rope_frequencies(const gg_call *c, rope_pair *pairs) {
    const gg_rope_attrs *p = c->attrs;
    const int64_t n_dims = rope_dims(c), n = rope_pairs(c);
    const gg_tensor *factors = &c->src[ROPE_FACTORS];
    double low = 0, high = 0, factor = p->attn_factor;
    if (p->ext_factor != 0) {
        low = fmax(0, floor(rope_pair_that_turns(p, n_dims, p->beta_fast)));
        high = fmin(n_dims - 1, ceil(rope_pair_that_turns(p, n_dims, p->beta_slow)));
        factor *= 1 + 0.1 * log(1 / (double)p->freq_scale);
    }
    for (int64_t i = 0; i < n; i++) {
        const double unscaled =
            p->ext_factor == 0 ? 0 : p->ext_factor * (1 - rope_clip((i - low) / fmax(0.001, high - low)));
        int64_t exponent;
        pairs[i].stream = rope_stream(p, i, &exponent);
        pairs[i].quarters =
            exp(log(p->freq_base) * (-2.0 * exponent / n_dims)) * (p->freq_scale * (1 - unscaled) + unscaled) * M_2_PI;
        if (factors->data != NULL)
            pairs[i].quarters /= *(const float *)((const char *)factors->data + i * factors->nb[3]);
    }
    for (int64_t i = n; i < gg_round_up(n, GG_VW); i++) pairs[i] = (rope_pair){ 0 };
    return (float)factor;
}

/* factor * cos and sin of `turn` quarter turns, |turn| <= 1/2, after whole quarters of which `quarter` are left.
 * The polynomials are within 4e-9; cos(0) and sin(0) are exact. */
GG_INLINE void rope_cos_sin(vf turn, vi quarter, float factor, vf *cos_of, vf *sin_of) {
    const vf r = turn * (float)M_PI_2, z = r * r;
    const vf s = r + r * z * (-1.666665495e-1f + z * (8.332178227e-3f + z * -1.951730909e-4f));
    const vf c = 1.0f - 0.5f * z + z * z * (4.166664687e-2f + z * (-1.388736752e-3f + z * 2.443845340e-5f));
    const vi odd = -(quarter & 1);
    *cos_of = factor * (vf)((vi)vf_select(odd, s, c) ^ ((quarter + 1) << 30 & (int32_t)0x80000000));
    *sin_of = factor * (vf)((vi)vf_select(odd, c, s) ^ (quarter << 30 & (int32_t)0x80000000));
}

static void rope_table(const gg_call *c, int64_t begin, int64_t end, rope_pair *pair, float sign) {
    const gg_rope_attrs *p = c->attrs;
    const int64_t pairs = rope_pairs(c), T = c->dst->ne[1], streams = p->mode < ROPE_MROPE ? 1 : ROPE_STREAMS;
    const float factor = rope_frequencies(c, pair);
    const char *pos = c->src[ROPE_POS].data;
    float turn[GG_VW], cos_of[GG_VW], sin_of[GG_VW];
    int32_t quarter[GG_VW];
    for (int64_t t = begin; t < end; t++) {
        double at[ROPE_STREAMS];
        for (int64_t k = 0; k < streams; k++) at[k] = *(const int32_t *)(pos + (k * T + t) * c->src[ROPE_POS].nb[3]);
        float *const row = (float *)c->work + t * rope_table_row(c);
        for (int64_t first = 0; first < pairs; first += GG_VW) {
            const int n = (int)gg_min(GG_VW, pairs - first);
            for (int i = 0; i < GG_VW; i++) {
                const double magic = 6755399441055744.0; /* 1.5 * 2^52: the sum ends in the nearest integer */
                const double turns = at[pair[first + i].stream] * pair[first + i].quarters, shifted = turns + magic;
                int64_t bits;
                memcpy(&bits, &shifted, sizeof bits);
                quarter[i] = (int32_t)(bits & 3);
                turn[i] = (float)(turns - (shifted - magic));
            }
            vf cosines, sines;
            rope_cos_sin(vf_load(turn), vi_load(quarter), factor, &cosines, &sines);
            vf_store(cos_of, cosines);
            vf_store(sin_of, sign * sines);
            if (p->mode != ROPE_NORMAL) {
                memcpy(row + first, cos_of, n * sizeof(float));
                memcpy(row + pairs + first, sin_of, n * sizeof(float));
            } else {
                float *const same = row + 2 * first, *const other = same + 2 * pairs;
                for (int i = 0; i < n; i++) {
                    same[2 * i] = same[2 * i + 1] = cos_of[i];
                    other[2 * i] = -sin_of[i];
                    other[2 * i + 1] = sin_of[i];
                }
            }
        }
    }
}

/* out may be x. */
static void rope_row_neox(const float *x, float *out, const float *cosines, const float *sines, int64_t pairs) {
    int64_t i = 0;
    for (; i + GG_VW <= pairs; i += GG_VW) {
        const vf a = vf_load(x + i), b = vf_load(x + pairs + i), cos_of = vf_load(cosines + i),
                 sin_of = vf_load(sines + i);
        vf_store(out + i, a * cos_of - b * sin_of);
        vf_store(out + pairs + i, a * sin_of + b * cos_of);
    }
    for (; i < pairs; i++) {
        const float a = x[i], b = x[pairs + i];
        out[i] = a * cosines[i] - b * sines[i];
        out[pairs + i] = a * sines[i] + b * cosines[i];
    }
}

/* The lanes of each pair exchanged. */
GG_INLINE vf rope_exchange(vf x) {
    typedef uint64_t pairs __attribute__((vector_size(GG_VECTOR_BYTES)));
    return (vf)((pairs)x >> 32 | (pairs)x << 32);
}

static void rope_row_normal(const float *x, float *out, const float *same, const float *other, int64_t n_dims) {
    int64_t i = 0;
    for (; i + GG_VW <= n_dims; i += GG_VW) {
        const vf v = vf_load(x + i);
        vf_store(out + i, v * vf_load(same + i) + rope_exchange(v) * vf_load(other + i));
    }
    for (; i < n_dims; i += 2) {
        const float a = x[i], b = x[i + 1];
        out[i] = a * same[i] + b * other[i];
        out[i + 1] = b * same[i + 1] + a * other[i + 1];
    }
}

static int64_t rope_tasks(const gg_call *c, int stage) {
    const gg_tensor *dst = c->dst;
    return stage == 0 ? gg_row_tasks(dst->ne[1], rope_pairs(c), 6) : gg_row_tasks(gg_rows(dst), dst->ne[3], 1);
}

static void rope_rows(const gg_call *c, int64_t begin, int64_t end) {
    const gg_rope_attrs *p = c->attrs;
    const gg_tensor *x = &c->src[ROPE_X], *dst = c->dst;
    const int64_t T = dst->ne[1], H = dst->ne[2], D = dst->ne[3], width = rope_table_row(c);
    const int64_t pairs = rope_pairs(c), first = p->offset, last = first + 2 * pairs;
    for (int64_t r = begin; r < end; r++) {
        const float *from = (const float *)gg_row(x, r), *row = (const float *)c->work + r / H % T * width;
        float *to = (float *)gg_row(dst, r);
        if (p->mode == ROPE_NORMAL) rope_row_normal(from + first, to + first, row, row + 2 * pairs, 2 * pairs);
        else rope_row_neox(from + first, to + first, row, row + pairs, pairs);
        if (from == to) continue;
        memcpy(to, from, first * sizeof(float));
        memcpy(to + last, from + last, (D - last) * sizeof(float));
    }
}

static void rope_stage(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch, float sign) {
    const int64_t tasks = rope_tasks(c, stage), lines = stage == 0 ? c->dst->ne[1] : gg_rows(c->dst);
    begin = gg_cut(lines, begin, tasks);
    end = gg_cut(lines, end, tasks);
    if (stage == 0) rope_table(c, begin, end, scratch, sign);
    else rope_rows(c, begin, end);
}

static void rope_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    rope_stage(c, stage, begin, end, scratch, 1);
}

static void rope_back_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    rope_stage(c, stage, begin, end, scratch, -1);
}

static int64_t rope_work(const gg_call *c) { return c->dst->ne[1] * rope_table_row(c) * (int64_t)sizeof(float); }

static int64_t rope_scratch(const gg_call *c) { return gg_round_up(rope_pairs(c), GG_VW) * (int64_t)sizeof(rope_pair); }

GG_KERNEL(rope, .stages = 2, .tasks = rope_tasks, .run = rope_run, .work = rope_work, .scratch = rope_scratch);
GG_KERNEL(rope_back, .stages = 2, .tasks = rope_tasks, .run = rope_back_run, .work = rope_work,
          .scratch = rope_scratch);
