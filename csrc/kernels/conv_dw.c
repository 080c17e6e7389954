/* Depthwise convolutions: each channel has a kernel of its own.
 *
 *   x: [N, C, H, W]    k: [C, 1, KH, KW]    dst, dout: [N, C, OH, OW], all contiguous
 *
 *   conv_dw         dst[n, c][oh, ow] = sum over kh, kw of k[c][kh, kw] x[n, c][oh sh + kh dh - ph][ow sw + kw dw - pw]
 *   conv_dw_back_x  by x, conv_dw_back_k  by k
 *
 * A task copies a plane with its padding, columns sorted by their remainder by sw: then each tap's elements for a
 * row of outputs lie one after another, whatever the stride, and no edge needs a thought. */
#include "../kernel.h"
#include "../rows.h"

typedef struct dw {
    int64_t N, C;
    int64_t in[2], kernel[2], out[2], stride[2], padding[2], dilation[2];
    int64_t taps;
    int64_t width; /* floats of the elements with one remainder in a padded row */
    int64_t row;   /* floats of a padded row */
    int64_t rows;
} dw;

static dw dw_describe(const gg_tensor *x, const int64_t *kernel, const gg_tensor *out, const gg_conv_dw_attrs *a) {
    dw c = { .N = x->ne[0], .C = x->ne[1], .taps = kernel[0] * kernel[1] };
    for (int d = 0; d < 2; d++) {
        c.in[d] = x->ne[d + 2];
        c.kernel[d] = kernel[d];
        c.out[d] = out->ne[d + 2];
        c.stride[d] = a->stride[d];
        c.padding[d] = a->padding[d];
        c.dilation[d] = a->dilation[d];
    }
    c.width = gg_round_up(c.out[1] + (c.kernel[1] - 1) * c.dilation[1] / c.stride[1] + 1, 16) + 16;
    c.row = c.width * c.stride[1];
    c.rows = gg_max(0, c.out[0] - 1) * c.stride[0] + (c.kernel[0] - 1) * c.dilation[0] + 1;
    return c;
}

/* Where a tap finds the element of output (0, 0). */
static void dw_taps(const dw *c, int64_t *at) {
    for (int64_t t = 0; t < c->taps; t++) {
        const int64_t column = t % c->kernel[1] * c->dilation[1];
        at[t] = t / c->kernel[1] * c->dilation[0] * c->row + column % c->stride[1] * c->width + column / c->stride[1];
    }
}

/* Elements of x's row in the padded plane's one, or the other way. */
GG_INLINE void dw_move_row(const dw *c, float *padded, float *x, const int out) {
    const int64_t step = c->stride[1], columns = gg_min(c->in[1], c->width * step - c->padding[1]);
    for (int64_t remainder = 0; remainder < step; remainder++) {
        const int64_t first = (remainder + step - c->padding[1] % step) % step;
        float *const here = padded + remainder * c->width + (first + c->padding[1]) / step;
        if (step == 1 && columns > 0) memcpy(out ? x : here, out ? here : x, columns * sizeof(float));
        else
            for (int64_t i = first, at = 0; i < columns; i += step, at++) {
                if (out) x[i] = here[at];
                else here[at] = x[i];
            }
    }
    if (out)
        for (int64_t i = gg_max(0, columns); i < c->in[1]; i++) x[i] = 0;
}

static void dw_read_plane(const dw *c, const float *x, float *padded) {
    memset(padded, 0, c->rows * c->row * sizeof(float));
    for (int64_t q = c->padding[0]; q < gg_min(c->rows, c->padding[0] + c->in[0]); q++)
        dw_move_row(c, padded + q * c->row, (float *)x + (q - c->padding[0]) * c->in[1], 0);
}

static int64_t dw_plane_bytes(const dw *c) {
    return (c->rows * c->row + 2 * gg_round_up(c->taps, 16)) * (int64_t)sizeof(float);
}

/* -- conv_dw -------------------------------------------------------------------------------------- */

static dw dw_of(const gg_call *c) { return dw_describe(&c->src[1], &c->src[0].ne[2], c->dst, c->attrs); }

static int64_t dw_plane_tasks(const dw *c) {
    return gg_row_tasks(c->N * c->C, c->in[0] * c->in[1] + c->taps * c->out[0] * c->out[1], 1);
}
static int64_t dw_tasks(const gg_call *call, int stage) {
    (void)stage;
    const dw c = dw_of(call);
    return gg_elements(call->dst) == 0 ? 0 : dw_plane_tasks(&c);
}
static int64_t dw_scratch(const gg_call *call) {
    const dw c = dw_of(call);
    return dw_plane_bytes(&c);
}

/* `vectors` vectors of outputs; `last` lanes of the last one exist. */
GG_INLINE void dw_outputs(const dw *c, const float *k, const int64_t *at, const float *padded, float *out,
                          const int vectors, const int last) {
    vf sum[4] = { 0 };
    for (int64_t t = 0; t < c->taps; t++) {
        const vf weight = vf_set1(k[t]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[v] += weight * vf_load(padded + at[t] + v * GG_VW);
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) gg_give(out + v * GG_VW, sum[v], v == vectors - 1 ? last : GG_VW);
}

static void dw_plane(const dw *c, const float *k, const int64_t *at, const float *x, float *padded, float *out) {
    const int64_t OW = c->out[1];
    dw_read_plane(c, x, padded);
    for (int64_t oh = 0; oh < c->out[0]; oh++, out += OW) {
        const float *const from = padded + oh * c->stride[0] * c->row;
        int64_t ow = 0;
        for (; ow + 4 * GG_VW <= OW; ow += 4 * GG_VW) dw_outputs(c, k, at, from + ow, out + ow, 4, GG_VW);
        for (; ow + GG_VW <= OW; ow += GG_VW) dw_outputs(c, k, at, from + ow, out + ow, 1, GG_VW);
        if (ow < OW) dw_outputs(c, k, at, from + ow, out + ow, 1, (int)(OW - ow));
    }
}

static void dw_plane_back(const dw *c, const float *k, const int64_t *at, const float *dout, float *padded, float *dx) {
    memset(padded, 0, c->rows * c->row * sizeof(float));
    for (int64_t oh = 0; oh < c->out[0]; oh++, dout += c->out[1])
        for (int64_t t = 0; t < c->taps; t++) {
            float *const here = padded + oh * c->stride[0] * c->row + at[t];
            for (int64_t ow = 0; ow < c->out[1]; ow++) here[ow] += k[t] * dout[ow];
        }
    memset(dx, 0, c->in[0] * c->in[1] * sizeof(float));
    for (int64_t q = c->padding[0]; q < gg_min(c->rows, c->padding[0] + c->in[0]); q++)
        dw_move_row(c, padded + q * c->row, dx + (q - c->padding[0]) * c->in[1], 1);
}

/* The planes of some tasks, each with its channel's kernel: x to outputs, or their gradients back to x. */
GG_INLINE void dw_planes(const gg_call *call, const dw *c, int64_t begin, int64_t end, void *scratch, const int back) {
    const int64_t tasks = dw_plane_tasks(c), planes = c->N * c->C, in = c->in[0] * c->in[1],
                  out = c->out[0] * c->out[1];
    int64_t *const at = scratch;
    float *const padded = (float *)scratch + 2 * gg_round_up(c->taps, 16);
    dw_taps(c, at);
    for (int64_t i = gg_cut(planes, begin, tasks), to = gg_cut(planes, end, tasks); i < to; i++) {
        const float *const k = (const float *)call->src[0].data + i % c->C * c->taps;
        const float *const from = (const float *)call->src[1].data + i * (back ? out : in);
        float *const result = (float *)call->dst->data + i * (back ? in : out);
        if (back) dw_plane_back(c, k, at, from, padded, result);
        else dw_plane(c, k, at, from, padded, result);
    }
}

static void dw_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const dw c = dw_of(call);
    dw_planes(call, &c, begin, end, scratch, 0);
}

GG_KERNEL(conv_dw, .stages = 1, .tasks = dw_tasks, .run = dw_run, .scratch = dw_scratch);

/* -- conv_dw_back_x ------------------------------------------------------------------------------- */

static dw dw_back_x_of(const gg_call *call) {
    gg_conv_dw_attrs a;
    memcpy(&a, call->attrs, sizeof a);
    return dw_describe(call->dst, &call->src[0].ne[2], &call->src[1], &a);
}

static int64_t dw_back_x_tasks(const gg_call *call, int stage) {
    (void)stage;
    const dw c = dw_back_x_of(call);
    return gg_elements(call->dst) == 0 ? 0 : dw_plane_tasks(&c);
}
static int64_t dw_back_x_scratch(const gg_call *call) {
    const dw c = dw_back_x_of(call);
    return dw_plane_bytes(&c);
}

static void dw_back_x_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const dw c = dw_back_x_of(call);
    dw_planes(call, &c, begin, end, scratch, 1);
}

GG_KERNEL(conv_dw_back_x, .stages = 1, .tasks = dw_back_x_tasks, .run = dw_back_x_run, .scratch = dw_back_x_scratch);

/* -- conv_dw_back_k ------------------------------------------------------------------------------- */

static dw dw_back_k_of(const gg_call *call) {
    gg_conv_dw_attrs a;
    memcpy(&a, call->attrs, sizeof a);
    return dw_describe(&call->src[0], &call->dst->ne[2], &call->src[1], &a);
}

static int64_t dw_back_k_tasks(const gg_call *call, int stage) {
    (void)stage;
    const dw c = dw_back_k_of(call);
    const int64_t plane = c.in[0] * c.in[1] + c.taps * c.out[0] * c.out[1];
    return gg_elements(call->dst) == 0 ? 0 : gg_row_tasks(c.C, gg_max(1, c.N) * gg_max(1, plane), 1);
}
static int64_t dw_back_k_scratch(const gg_call *call) {
    const dw c = dw_back_k_of(call);
    return dw_plane_bytes(&c);
}

/* Adds to `taps` taps' sums the products of one plane. */
GG_INLINE void dw_add_products(const dw *c, const float *dout, const float *padded, const int64_t *at, float *dk,
                               const int taps) {
    vf sum[4] = { 0 };
    for (int64_t oh = 0; oh < c->out[0]; oh++) {
        const float *const from = padded + oh * c->stride[0] * c->row, *const row = dout + oh * c->out[1];
        int64_t ow = 0;
        for (; ow + GG_VW <= c->out[1]; ow += GG_VW) {
            const vf d = vf_load(row + ow);
#pragma GCC unroll 4
            for (int t = 0; t < taps; t++) sum[t] += d * vf_load(from + at[t] + ow);
        }
        const int rest = (int)(c->out[1] - ow);
        if (rest > 0)
#pragma GCC unroll 4
            for (int t = 0; t < taps; t++)
                sum[t] += vf_load_n(row + ow, rest, 0) * vf_load_n(from + at[t] + ow, rest, 0);
    }
#pragma GCC unroll 4
    for (int t = 0; t < taps; t++) dk[t] += vf_sum(sum[t]);
}

static void dw_back_k_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const dw c = dw_back_k_of(call);
    const int64_t tasks = dw_back_k_tasks(call, 0);
    int64_t *const at = scratch;
    float *const padded = (float *)scratch + 2 * gg_round_up(c.taps, 16);
    dw_taps(&c, at);
    for (int64_t i = gg_cut(c.C, begin, tasks), to = gg_cut(c.C, end, tasks); i < to; i++) {
        float *const dk = (float *)call->dst->data + i * c.taps;
        memset(dk, 0, c.taps * sizeof(float));
        for (int64_t n = 0; n < c.N; n++) {
            const int64_t plane = n * c.C + i;
            const float *const dout = (const float *)call->src[1].data + plane * c.out[0] * c.out[1];
            dw_read_plane(&c, (const float *)call->src[0].data + plane * c.in[0] * c.in[1], padded);
            int64_t t = 0;
            for (; t + 4 <= c.taps; t += 4) dw_add_products(&c, dout, padded, at + t, dk + t, 4);
            for (; t < c.taps; t++) dw_add_products(&c, dout, padded, at + t, dk + t, 1);
        }
    }
}

GG_KERNEL(conv_dw_back_k, .stages = 1, .tasks = dw_back_k_tasks, .run = dw_back_k_run, .scratch = dw_back_k_scratch);
