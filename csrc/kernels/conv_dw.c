/* Depthwise convolutions: each channel has a kernel of its own.
 *
 *   x: [N, C, H, W]    k: [C, 1, KH, KW]    dst, dout: [N, C, OH, OW], all contiguous
 *
 *   conv_dw         dst[n, c][oh, ow] = sum over kh, kw of k[c][kh, kw] x[n, c][oh sh + kh dh - ph][ow sw + kw dw - pw]
 *   conv_dw_back_x  by x, conv_dw_back_k  by k
 *
 * A task copies a plane with its padding, columns sorted by their remainder by sw: then each tap's elements for a
 * row of outputs lie one after another, whatever the stride, and no edge needs a thought.  Planes of a task have their
 * elements at the same places of the copy, so that the zeros around them are written once. */
#include "abi/attrs/conv.h"
#include "walk/kernel.h"
#include "walk/rows.h"

typedef struct dw {
    int64_t N, C;
    int64_t in[2], kernel[2], out[2], stride[2], padding[2], dilation[2];
    int64_t taps;
    int64_t width; /* floats of the elements with one remainder in a padded row */
    int64_t row;   /* floats of a padded row */
    int64_t rows;
} dw;

static void dw_place(dw *c) {
    c->width = gg_round_up(c->out[1] + (c->kernel[1] - 1) * c->dilation[1] / c->stride[1] + 1, 16) + 16;
    c->row = c->width * c->stride[1];
    c->rows = gg_max(0, c->out[0] - 1) * c->stride[0] + (c->kernel[0] - 1) * c->dilation[0] + 1;
}

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
    dw_place(&c);
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
        int64_t i = first, at = 0;
        if (!out && step == 1)
            for (; i + GG_VW <= columns; i += GG_VW, at += GG_VW) vf_store(here + at, vf_load(x + i));
        if (!out && step == 2)
            for (; i + 2 * GG_VW <= columns; i += 2 * GG_VW, at += GG_VW) vf_store(here + at, vf_load_every(x + i, 2));
        for (; i < columns; i += step, at++) {
            if (out) x[i] = here[at];
            else here[at] = x[i];
        }
    }
    if (out)
        for (int64_t i = gg_max(0, columns); i < c->in[1]; i++) x[i] = 0;
}

static void dw_clear(const dw *c, float *padded) { memset(padded, 0, c->rows * c->row * sizeof(float)); }

/* Into a copy that dw_clear has seen. */
static void dw_read_plane(const dw *c, const float *x, float *padded) {
    for (int64_t q = c->padding[0]; q < gg_min(c->rows, c->padding[0] + c->in[0]); q++)
        dw_move_row(c, padded + q * c->row, (float *)x + (q - c->padding[0]) * c->in[1], 0);
}

enum { DW_TAPS = 9 }; /* that are added up at a time */

/* Behind the places of the taps, which whole pieces of them are read from: a float for each, and the copied plane. */
static int64_t dw_tap_floats(const dw *c) { return gg_round_up(c->taps + DW_TAPS, 16); }
static int64_t dw_scratch_of(const dw *c) { return (3 * dw_tap_floats(c) + c->rows * c->row) * (int64_t)sizeof(float); }

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
    return dw_scratch_of(&c);
}

enum { DW_SUMS = 4 };    /* vectors of outputs at a time: enough to hide how long each addition takes */
enum { DW_BLOCK = 256 }; /* terms of a sum in f32, before they are added to another */

/* Vectors of `rows` rows of outputs, `vectors` of each; `count` lanes of the last one exist. */
GG_INLINE void dw_outputs(const dw *c, const float *k, const int64_t *at, const float *padded, float *out,
                          const int rows, const int vectors, const int count) {
    const int64_t step = c->stride[0] * c->row;
    for (int64_t t = 0; t == 0 || t < c->taps;) {
        const int64_t first = t, end = gg_min(c->taps, t + DW_BLOCK);
        vf sum[DW_SUMS] = { 0 };
        for (; t < end; t++) {
            const vf weight = vf_set1(k[t]);
#pragma GCC unroll 4
            for (int i = 0; i < rows * vectors; i++)
                sum[i] += weight * vf_load(padded + at[t] + i / vectors * step + i % vectors * GG_VW);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows * vectors; i++) {
            float *const to = out + i / vectors * c->out[1] + i % vectors * GG_VW;
            const int here = i == rows * vectors - 1 ? count : GG_VW;
            gg_give(to, first > 0 ? gg_take(to, here, 0) + sum[i] : sum[i], here);
        }
        if (c->taps == 0) break;
    }
}

/* The same of 3 x 3 taps without dilation, a vector of each row: what several rows see is loaded once. */
GG_INLINE void dw_outputs_3x3(const dw *c, const vf weight[9], const int64_t *at, const float *padded, float *out,
                              const int stride, const int count) {
    vf sum[DW_SUMS] = { 0 };
#pragma GCC unroll 16
    for (int q = 0; q < (DW_SUMS - 1) * stride + 3; q++)
#pragma GCC unroll 3
        for (int kw = 0; kw < 3; kw++) {
            const vf x = vf_load(padded + q * c->row + at[kw]);
#pragma GCC unroll 4
            for (int i = 0; i < DW_SUMS; i++) {
                const int kh = q - i * stride;
                if (kh >= 0 && kh < 3) sum[i] += weight[kh * 3 + kw] * x;
            }
        }
#pragma GCC unroll 4
    for (int i = 0; i < DW_SUMS; i++) gg_give(out + i * c->out[1], sum[i], count);
}

/* DW_SUMS rows, vector by vector; the last one begins before the end of the one before it. */
GG_INLINE void dw_row_block(const dw *c, const float *k, const int64_t *at, const float *padded, float *out,
                            const int stride) {
    const int64_t OW = c->out[1];
    vf weight[9];
    if (stride != 0)
#pragma GCC unroll 9
        for (int t = 0; t < 9; t++) weight[t] = vf_set1(k[t]);
    for (int64_t ow = 0; ow < OW; ow += GG_VW) {
        const int64_t first = OW < GG_VW ? 0 : gg_min(ow, OW - GG_VW);
        if (OW < GG_VW) {
            if (stride != 0) dw_outputs_3x3(c, weight, at, padded, out, stride, (int)OW);
            else
                for (int i = 0; i < DW_SUMS; i++)
                    dw_outputs(c, k, at, padded + i * c->stride[0] * c->row, out + i * OW, 1, 1, (int)OW);
        } else if (stride != 0) dw_outputs_3x3(c, weight, at, padded + first, out + first, stride, GG_VW);
        else dw_outputs(c, k, at, padded + first, out + first, DW_SUMS, 1, GG_VW);
    }
}

static void dw_plane(const dw *c, const float *k, const int64_t *at, const float *x, float *padded, float *out) {
    const int64_t OW = c->out[1], step = c->stride[0] * c->row;
    const int small = c->kernel[0] == 3 && c->kernel[1] == 3 && c->dilation[0] == 1;
    dw_read_plane(c, x, padded);
    int64_t oh = 0;
    for (; oh + DW_SUMS <= c->out[0]; oh += DW_SUMS) {
        const float *const from = padded + oh * step;
        if (small && c->stride[0] == 1) dw_row_block(c, k, at, from, out + oh * OW, 1);
        else if (small && c->stride[0] == 2) dw_row_block(c, k, at, from, out + oh * OW, 2);
        else dw_row_block(c, k, at, from, out + oh * OW, 0);
    }
    for (; oh < c->out[0]; oh++) {
        const float *const from = padded + oh * step;
        float *const row = out + oh * OW;
        int64_t ow = 0;
        for (; ow + DW_SUMS * GG_VW <= OW; ow += DW_SUMS * GG_VW)
            dw_outputs(c, k, at, from + ow, row + ow, 1, DW_SUMS, GG_VW);
        for (; ow + GG_VW <= OW; ow += GG_VW) dw_outputs(c, k, at, from + ow, row + ow, 1, 1, GG_VW);
        if (ow < OW) dw_outputs(c, k, at, from + ow, row + ow, 1, 1, (int)(OW - ow));
    }
}

static void dw_plane_back(const dw *c, const float *k, const int64_t *at, const float *dout, float *padded, float *dx) {
    dw_clear(c, padded);
    for (int64_t oh = 0; oh < c->out[0]; oh++, dout += c->out[1])
        for (int64_t t = 0; t < c->taps; t++) {
            float *const here = padded + oh * c->stride[0] * c->row + at[t];
            for (int64_t ow = 0; ow < c->out[1]; ow++) here[ow] += k[t] * dout[ow];
        }
    memset(dx, 0, c->in[0] * c->in[1] * sizeof(float));
    for (int64_t q = c->padding[0]; q < gg_min(c->rows, c->padding[0] + c->in[0]); q++)
        dw_move_row(c, padded + q * c->row, dx + (q - c->padding[0]) * c->in[1], 1);
}

/* Of stride 1, what the gradients become x is a convolution too: with the taps from last to first. */
static int dw_turns(const dw *c) {
    int turns = 1;
    for (int d = 0; d < 2; d++) turns &= c->stride[d] == 1 && c->padding[d] <= (c->kernel[d] - 1) * c->dilation[d];
    return turns;
}

static dw dw_turned(const dw *c) {
    dw turned = *c;
    for (int d = 0; d < 2; d++) {
        turned.in[d] = c->out[d];
        turned.out[d] = c->in[d];
        turned.padding[d] = (c->kernel[d] - 1) * c->dilation[d] - c->padding[d];
    }
    dw_place(&turned);
    return turned;
}

/* The planes of some tasks, each with its channel's kernel: x to outputs, or their gradients back to x. */
GG_INLINE void dw_planes(const gg_call *call, const dw *c, int64_t begin, int64_t end, void *scratch, const int back) {
    const int64_t tasks = dw_plane_tasks(c), planes = c->N * c->C, in = c->in[0] * c->in[1],
                  out = c->out[0] * c->out[1];
    const int turns = back && dw_turns(c);
    const dw turned = turns ? dw_turned(c) : *c;
    int64_t *const at = scratch;
    float *const taps = (float *)(at + dw_tap_floats(c)), *const padded = taps + dw_tap_floats(c);
    dw_taps(&turned, at);
    dw_clear(&turned, padded);
    for (int64_t i = gg_cut(planes, begin, tasks), to = gg_cut(planes, end, tasks); i < to; i++) {
        const float *const k = (const float *)call->src[0].data + i % c->C * c->taps;
        const float *const from = (const float *)call->src[1].data + i * (back ? out : in);
        float *const result = (float *)call->dst->data + i * (back ? in : out);
        if (turns && gg_row_finite(k, c->taps)) { /* others make NaNs of the zeros around dout */
            for (int64_t t = 0; t < c->taps; t++) taps[t] = k[c->taps - 1 - t];
            dw_plane(&turned, taps, at, from, padded, result);
        } else if (back) {
            dw_taps(c, at);
            dw_plane_back(c, k, at, from, padded, result);
            dw_taps(&turned, at);
            dw_clear(&turned, padded);
        } else {
            dw_plane(c, k, at, from, padded, result);
        }
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
    const dw c = dw_back_x_of(call), turned = dw_turned(&c);
    return gg_max(dw_scratch_of(&c), dw_turns(&c) ? dw_scratch_of(&turned) : 0);
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
    return dw_scratch_of(&c) + gg_round_up(c.taps, 16) * (int64_t)sizeof(float);
}

/* Elements ow ... end - 1 of rows oh ... last - 1 of a plane: the sums of their products for `taps` taps at a time, of which
 * `count` exist. */
GG_INLINE void dw_add_piece(const dw *c, const float *dout, const float *padded, const int64_t *at, float *dk,
                            const int taps, int64_t count, int64_t oh, int64_t last, int64_t first, int64_t end) {
    vf sum[DW_TAPS] = { 0 };
    const int rest = (int)((end - first) % GG_VW);
    const vi there = vi_lanes() < rest; /* of an element that is not finite the product with 0 is NaN */
    for (; oh < last; oh++) {
        const float *const from = padded + oh * c->stride[0] * c->row, *const row = dout + oh * c->out[1];
        int64_t ow = first;
        for (; ow + GG_VW <= end; ow += GG_VW) {
            const vf d = vf_load(row + ow);
#pragma GCC unroll 9
            for (int t = 0; t < taps; t++) sum[t] += d * vf_load(from + at[t] + ow);
        }
        if (rest > 0) {
            const vf d = vf_load_n(row + ow, rest, 0);
#pragma GCC unroll 9
            for (int t = 0; t < taps; t++) sum[t] += d * (vf)((vi)vf_load(from + at[t] + ow) & there);
        }
    }
#pragma GCC unroll 9
    for (int t = 0; t < taps; t++)
        if (t < count) dk[t] += vf_sum(sum[t]);
}

/* Rows of a piece of a plane, which has about DW_BLOCK vectors. */
static int64_t dw_piece_rows(const dw *c) { return gg_max(1, DW_BLOCK / gg_ceil_div(gg_max(1, c->out[1]), GG_VW)); }

/* The sums of a plane, in pieces of so many rows. */
GG_INLINE void dw_add_products(const dw *c, const float *dout, const float *padded, const int64_t *at, float *dk,
                               const int taps, int64_t count, int64_t rows) {
    const int64_t width = DW_BLOCK * GG_VW;
    for (int64_t ow = 0; ow < c->out[1]; ow += width)
        for (int64_t oh = 0; oh < c->out[0]; oh += rows)
            dw_add_piece(c, dout, padded, at, dk, taps, count, oh, gg_min(c->out[0], oh + rows), ow,
                         gg_min(c->out[1], ow + width));
}

static void dw_back_k_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const dw c = dw_back_k_of(call);
    const int64_t tasks = dw_back_k_tasks(call, 0), rows = dw_piece_rows(&c), block = gg_sum_block(c.N);
    float *const sums = scratch; /* of a block of planes */
    int64_t *const at = (int64_t *)(sums + gg_round_up(c.taps, 16));
    float *const padded = (float *)(at + dw_tap_floats(&c)) + dw_tap_floats(&c);
    memset(at, 0, dw_tap_floats(&c) * sizeof *at);
    dw_taps(&c, at);
    dw_clear(&c, padded);
    for (int64_t i = gg_cut(c.C, begin, tasks), to = gg_cut(c.C, end, tasks); i < to; i++) {
        float *const dk = (float *)call->dst->data + i * c.taps;
        memset(dk, 0, c.taps * sizeof(float));
        memset(sums, 0, c.taps * sizeof(float));
        for (int64_t n = 0; n < c.N; n++) {
            const int64_t plane = n * c.C + i;
            const float *const dout = (const float *)call->src[1].data + plane * c.out[0] * c.out[1];
            dw_read_plane(&c, (const float *)call->src[0].data + plane * c.in[0] * c.in[1], padded);
            int64_t t = 0;
            for (; c.taps - t > 4; t += DW_TAPS)
                dw_add_products(&c, dout, padded, at + t, sums + t, DW_TAPS, c.taps - t, rows);
            if (t < c.taps) dw_add_products(&c, dout, padded, at + t, sums + t, 4, c.taps - t, rows);
            if ((n + 1) % block > 0 && n + 1 < c.N) continue;
            gg_add_row(dk, sums, c.taps);
            memset(sums, 0, c.taps * sizeof(float));
        }
    }
}

GG_KERNEL(conv_dw_back_k, .stages = 1, .tasks = dw_back_k_tasks, .run = dw_back_k_run, .scratch = dw_back_k_scratch);
