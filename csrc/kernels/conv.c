/* Convolutions over three axes (those over one or two have axes of size 1), and the unfolding that defines them.
 *
 *   x:   [N * IC, D, H, W]         k: [OC * IC, KD, KH, KW]        dst: [N * OC, OD, OH, OW], all contiguous
 *
 * Line r = (ic, kd, kh, kw) of the unfolded input of one n has an element for each position p = (od, oh, ow):
 *
 *   line[r][p] = x[n, ic][od sd + kd dd - pd][oh sh + kh dh - ph][ow sw + kw dw - pw], 0 outside of x
 *
 *   conv_3d         dst[oc][p]  = sum over r of k[oc][r] line[r][p]          lines are packed as columns
 *   conv_3d_back_x  line[r][p]  = sum over oc of k[oc][r] dout[oc][p]        and added to where they came from, or
 *                                 of stride 1 a conv_3d of dout, with the taps from last to first
 *   conv_3d_back_k  dst[oc][r]  = sum over n, p of dout[oc][p] line[r][p]    lines are packed as columns, across
 *   im2col_3d       dst[n][p][r] = line[r][p]
 *   im2col_3d_back  its transpose
 *
 * so that what is unfolded is never there but for the piece a task works on. */
#include "abi/attrs/conv.h"
#include "walk/kernel.h"
#include "walk/rows.h"
#include "gemm/tile.h"

enum {
    CONV_COLUMNS = 256,  /* positions, or lines, packed at a time: a multiple of GG_NR */
    CONV_K = 384,        /* of what is summed along */
    CONV_STRIP = 8,      /* panels of rows that are packed at a time */
    CONV_PANELS = 98304, /* floats of packed columns: 384 KiB of L2 */
    CONV_TASK = 1 << 21, /* floating-point operations in the smallest task */
    CONV_TASKS = 16,     /* pieces of a product that could be done in one */
};

typedef struct conv {
    int64_t N, IC, OC;
    int64_t in[3], kernel[3], out[3], stride[3], padding[3], dilation[3];
    int64_t taps;  /* KD KH KW */
    int64_t R;     /* IC taps: lines */
    int64_t P;     /* OD OH OW: positions */
    int64_t plane; /* D H W */
} conv;

static conv conv_describe(int64_t IC, const gg_tensor *x, const int64_t *kernel, const gg_tensor *out,
                          const gg_conv_3d_attrs *a) {
    conv c = { .IC = IC, .N = x->ne[0] / IC, .taps = 1, .P = 1, .plane = 1 };
    for (int d = 0; d < 3; d++) {
        c.in[d] = x->ne[d + 1];
        c.kernel[d] = kernel[d];
        c.out[d] = out->ne[d + 1];
        c.stride[d] = a->stride[d];
        c.padding[d] = a->padding[d];
        c.dilation[d] = a->dilation[d];
        c.taps *= c.kernel[d];
        c.P *= c.out[d];
        c.plane *= c.in[d];
    }
    c.R = IC * c.taps;
    return c;
}

/* -- lines ---------------------------------------------------------------------------------------- */

/* A position, from which on lines are moved: the same for all lines of a piece. */
typedef struct conv_place {
    int64_t od, oh, ow;
} conv_place;

static conv_place conv_place_of(const conv *c, int64_t p) {
    const int64_t row = p / c->out[2];
    return (conv_place){ .od = row / c->out[1], .oh = row % c->out[1], .ow = p % c->out[2] };
}

/* to[i] = from[i * step]; nothing behind the last element is read or written. */
GG_INLINE void conv_gather(const float *from, int64_t step, int64_t n, float *to) {
    int64_t i = 0;
    if (step == 1 && n >= GG_VW) {
        for (; i + GG_VW <= n; i += GG_VW) vf_store(to + i, vf_load(from + i));
        vf_store(to + n - GG_VW, vf_load(from + n - GG_VW)); /* some of it once more */
        return;
    }
    if (step == 2)
        for (; i + GG_VW < n; i += GG_VW) vf_store(to + i, vf_load_every(from + 2 * i, 2));
    for (; i < n; i++) to[i] = from[i * step];
}

/* n elements of the line of `tap` in one channel's plane: copied from the plane, or added to it. */
GG_INLINE void conv_move_line(const conv *c, int64_t tap, conv_place at, int64_t n, float *line, float *plane,
                              const int add) {
    const int64_t W = c->in[2], OW = c->out[2], step = c->stride[2];
    const int64_t kw = tap % c->kernel[2], kh = tap / c->kernel[2] % c->kernel[1],
                  kd = tap / c->kernel[2] / c->kernel[1];
    const int64_t base = kw * c->dilation[2] - c->padding[2]; /* of ow = 0 */
    const int64_t lo = base >= 0 ? 0 : step == 1 ? -base : gg_ceil_div(-base, step);
    const int64_t hi = base >= W ? 0 : gg_min(OW, step == 1 ? W - base : (W - 1 - base) / step + 1);
    while (n > 0) {
        const int64_t id = at.od * c->stride[0] + kd * c->dilation[0] - c->padding[0];
        const int64_t ih = at.oh * c->stride[1] + kh * c->dilation[1] - c->padding[1];
        const int64_t m = gg_min(n, OW - at.ow);
        const int inside = id >= 0 && id < c->in[0] && ih >= 0 && ih < c->in[1];
        const int64_t first = inside ? gg_min(gg_max(lo, at.ow), at.ow + m) : at.ow + m;
        const int64_t last = gg_max(first, gg_min(hi, at.ow + m)), count = last - first;
        if (!add) {
            for (int64_t i = 0; i < first - at.ow; i++) line[i] = 0;
            for (int64_t i = last - at.ow; i < m; i++) line[i] = 0;
        }
        if (count > 0) {
            float *const here = plane + (id * c->in[1] + ih) * W + first * step + base, *const ours =
                                                                                            line + first - at.ow;
            if (!add) conv_gather(here, step, count, ours);
            else if (step == 1)
                for (int64_t i = 0; i < count; i++) here[i] += ours[i];
            else
                for (int64_t i = 0; i < count; i++) here[i * step] += ours[i];
        }
        line += m;
        n -= m;
        at.ow = 0;
        if (++at.oh == c->out[1]) {
            at.oh = 0;
            at.od++;
        }
    }
}

static void conv_read_line(const conv *c, const float *x, int64_t r, conv_place at, int64_t n, float *line) {
    conv_move_line(c, r % c->taps, at, n, line, (float *)x + r / c->taps * c->plane, 0);
}
static void conv_add_line(const conv *c, float *x, int64_t r, conv_place at, int64_t n, const float *line) {
    conv_move_line(c, r % c->taps, at, n, (float *)line, x + r / c->taps * c->plane, 1);
}

/* -- windows: many lines of a plane at once ------------------------------------------------------- */

enum {
    CONV_PIECES = 5,     /* of rows of outputs in a vector of positions */
    CONV_WIDEST = 512,   /* columns of a window */
    CONV_WINDOW = 32768, /* floats of a window */
    CONV_VECTORS = (CONV_K > CONV_COLUMNS ? CONV_K : CONV_COLUMNS) / GG_VW,
};

/* A vector of positions: lanes from first[i] on come from at[i] on. */
typedef struct conv_vector {
    int pieces, at[CONV_PIECES], first[CONV_PIECES];
} conv_vector;

/* What the outputs at n positions see of a channel, copied with its padding: with an offset for each tap, all lines are
 * loaded from there alike. */
typedef struct conv_window {
    int64_t vectors, top, rows, row; /* top: of the padded plane */
    float *copy;
    conv_vector vector[CONV_VECTORS];
} conv_window;

/* Floats for the window of n positions; none where lines are better read one by one. */
static int64_t conv_window_floats(const conv *c, int64_t n) {
    const int flat = c->IC > 0 && c->kernel[0] == 1 && c->out[0] == 1 && c->padding[0] == 0;
    if (!flat || c->stride[2] > 2 || c->taps == 1 || c->taps > CONV_COLUMNS || c->out[2] < (GG_VW + 3) / 4) return 0;
    const int64_t row = c->in[2] + 2 * c->padding[2], most = gg_min(c->out[1], (n - 1) / c->out[2] + 2);
    const int64_t rows = (most - 1) * c->stride[1] + (c->kernel[1] - 1) * c->dilation[1] + 1;
    return row > CONV_WIDEST || row * rows > CONV_WINDOW ? 0 : row * rows + 4 * GG_VW;
}

static void conv_window_make(const conv *c, int64_t p, int64_t n, float *copy, conv_window *w) {
    const int64_t OW = c->out[2], step = c->stride[2], oh = p / OW;
    w->vectors = gg_ceil_div(n, GG_VW);
    w->top = oh * c->stride[1];
    w->rows = ((p + n - 1) / OW - oh) * c->stride[1] + (c->kernel[1] - 1) * c->dilation[1] + 1;
    w->row = c->in[2] + 2 * c->padding[2];
    w->copy = copy + 2 * GG_VW;
    memset(copy, 0, (w->rows * w->row + 4 * GG_VW) * sizeof(float));
    for (int64_t j = 0; j < w->vectors; j++) {
        conv_vector *const v = &w->vector[j];
        v->pieces = 0;
        for (int64_t i = j * GG_VW; i < gg_min(n, (j + 1) * GG_VW);) {
            const int64_t row = (p + i) / OW, ow = (p + i) % OW, lane = i % GG_VW;
            v->at[v->pieces] = (int)((row - oh) * c->stride[1] * w->row + (ow - lane) * step);
            v->first[v->pieces++] = (int)lane;
            i += OW - ow;
        }
    }
}

static void conv_window_read(const conv *c, const conv_window *w, const float *plane) {
    const int64_t top = w->top - c->padding[1], W = c->in[2];
    for (int64_t ih = gg_max(0, top), last = gg_min(c->in[1], top + w->rows); ih < last; ih++)
        conv_gather(plane + ih * W, 1, W, w->copy + (ih - top) * w->row + c->padding[2]);
}

/* A vector of each of a channel's lines, `line` floats apart. */
GG_INLINE void conv_vector_lines(const conv *c, const conv_window *w, const conv_vector *v, float *to, int64_t line,
                                 const int step, const int pieces) {
    const vi lanes = vi_lanes();
    for (int64_t kh = 0; kh < c->kernel[1]; kh++)
        for (int64_t kw = 0; kw < c->kernel[2]; kw++, to += line) {
            const float *const from = w->copy + kh * c->dilation[1] * w->row + kw * c->dilation[2];
            vf x = vf_load_every(from + v->at[0], step);
            for (int i = 1; i < pieces; i++)
                x = vf_select(lanes < v->first[i], x, vf_load_every(from + v->at[i], step));
            vf_store(to, x);
        }
}

/* A channel's lines: vector j of line k is to[j / GG_NV * panel + j % GG_NV * GG_VW + k * line]. */
GG_INLINE void conv_window_lines(const conv *c, const conv_window *w, float *to, int64_t panel, int64_t line,
                                 const int step) {
    for (int64_t j = 0; j < w->vectors; j++) {
        const conv_vector *const v = &w->vector[j];
        float *const here = to + j / GG_NV * panel + j % GG_NV * GG_VW;
        if (v->pieces == 1) conv_vector_lines(c, w, v, here, line, step, 1);
        else if (v->pieces == 2) conv_vector_lines(c, w, v, here, line, step, 2);
        else conv_vector_lines(c, w, v, here, line, step, v->pieces);
    }
}

/* All lines of some channels. */
static void conv_unfold(const conv *c, const conv_window *w, const float *x, int64_t channels, float *to, int64_t panel,
                        int64_t line) {
    for (int64_t i = 0; i < channels; i++, x += c->plane, to += c->taps * line) {
        conv_window_read(c, w, x);
        if (c->stride[2] == 1) conv_window_lines(c, w, to, panel, line, 1);
        else conv_window_lines(c, w, to, panel, line, 2);
    }
}

/* -- cuts ----------------------------------------------------------------------------------------- */

/* Lines of as many whole channels as `most` lines have, cut equally. */
static int64_t conv_whole_channels(const conv *c, int64_t most) {
    return gg_ceil_div(c->IC, gg_ceil_div(c->IC, most / c->taps)) * c->taps;
}

/* Tasks that a piece may be cut into: as many as are worth it. */
static int64_t conv_more_parts(double flops, int64_t pieces, int64_t most) {
    const double wanted = fmin(CONV_TASKS, flops / CONV_TASK);
    int64_t parts = 1;
    while (pieces * parts * 2 <= wanted && parts * 2 <= most) parts *= 2;
    return parts;
}

static double conv_flops(const conv *c) { return 2.0 * (double)c->N * (double)c->OC * (double)c->R * (double)c->P; }

/* -- conv_3d -------------------------------------------------------------------------------------- */

static conv conv_of(const gg_call *call) {
    const gg_conv_3d_attrs *a = call->attrs;
    conv c = conv_describe(a->channels, &call->src[1], &call->src[0].ne[1], call->dst, a);
    c.OC = call->src[0].ne[0] / c.IC;
    return c;
}

/* Positions of a block, all about as many. */
static int64_t conv_block_columns(const conv *c) {
    return gg_round_up(gg_ceil_div(c->P, gg_ceil_div(c->P, CONV_COLUMNS)), GG_NR);
}
static int64_t conv_column_blocks(const conv *c) { return gg_ceil_div(c->P, conv_block_columns(c)); }
static int64_t conv_channel_parts(const conv *c) {
    return conv_more_parts(conv_flops(c), c->N * conv_column_blocks(c), gg_ceil_div(c->OC, GG_MR));
}

static int64_t conv_tasks_of(const conv *c) { return c->N * conv_column_blocks(c) * conv_channel_parts(c); }
static int64_t conv_tasks(const gg_call *call, int stage) {
    (void)stage;
    const conv c = conv_of(call);
    return gg_elements(call->dst) == 0 ? 0 : conv_tasks_of(&c);
}

/* Panels, rows, and a line or a window. */
static int64_t conv_scratch_of(const conv *c) {
    const int64_t rows = gg_row_panels_floats(CONV_STRIP * GG_MR, CONV_K);
    const int64_t line = gg_max(CONV_COLUMNS + GG_VW, conv_window_floats(c, CONV_COLUMNS));
    return (CONV_COLUMNS * CONV_K + rows + line) * (int64_t)sizeof(float);
}
static int64_t conv_scratch(const gg_call *call) {
    const conv c = conv_of(call);
    return conv_scratch_of(&c);
}

/* Lines r0 ... r0 + K at n positions from p on, as columns. */
static void conv_pack_positions(const conv *c, const float *x, int64_t r0, int64_t K, int64_t p, int64_t n,
                                float *panels, float *line) {
    const conv_place at = conv_place_of(c, p);
    for (int64_t k = 0; k < K; k++) {
        conv_read_line(c, x, r0 + k, at, n, line);
        for (int64_t j = 0; j < n; j += GG_VW)
            vf_store(panels + (j / GG_NR * K + k) * GG_NR + j % GG_NR, vf_load(line + j));
    }
}

/* dst's rows n0 ... n1 (+)= those of `rows` times the packed columns. */
static void conv_run_rows(const gg_lines *rows, int64_t N, int64_t M, int64_t K, const float *panels, float *dst,
                          int64_t dst_step, int add, float *packed) {
    for (int64_t n = 0; n < N; n += CONV_STRIP * GG_MR) {
        const int64_t some = gg_min(CONV_STRIP * GG_MR, N - n);
        const gg_lines from = gg_lines_from(rows, n, 0);
        gg_run_strip(&(gg_strip){
            .N = some,
            .M = M,
            .K = K,
            .rows = gg_pack_rows(&from, some, K, packed),
            .panels = panels,
            .dst = dst + n * dst_step,
            .dst_step = dst_step,
            .add = add,
        });
    }
}

static void conv_run_tasks(const conv *c, const float *k, const float *x, float *dst, int64_t begin, int64_t end,
                           float *scratch) {
    const int64_t blocks = conv_column_blocks(c), parts = conv_channel_parts(c), columns = conv_block_columns(c);
    const int64_t window_floats = conv_window_floats(c, CONV_COLUMNS);
    const int64_t block = window_floats > 0 ? conv_whole_channels(c, CONV_K) : CONV_K;
    float *const panels = scratch, *const packed = panels + CONV_COLUMNS * CONV_K,
                 *const line = packed + gg_row_panels_floats(CONV_STRIP * GG_MR, CONV_K);
    conv_window window = { .vectors = 0 };
    memset(line, 0, (CONV_COLUMNS + GG_VW) * sizeof(float));
    for (int64_t t = begin; t < end; t++) {
        const int64_t n = t / parts / blocks, p = t / parts % blocks * columns, M = gg_min(columns, c->P - p);
        const int64_t oc = gg_cut(c->OC, t % parts, parts), rows = gg_cut(c->OC, t % parts + 1, parts) - oc;
        const float *const planes = x + n * c->IC * c->plane;
        float *const out = dst + (n * c->OC + oc) * c->P + p;
        if (window_floats > 0) conv_window_make(c, p, M, line, &window);
        for (int64_t r = 0; r < c->R; r += block) {
            const int64_t K = gg_min(block, c->R - r);
            if (window_floats > 0)
                conv_unfold(c, &window, planes + r / c->taps * c->plane, K / c->taps, panels, K * GG_NR, GG_NR);
            else conv_pack_positions(c, planes, r, K, p, M, panels, line);
            const gg_lines kernels = { .data = (const char *)(k + oc * c->R + r),
                                       .dtype = GG_F32,
                                       .line = c->R * (int64_t)sizeof(float),
                                       .k = sizeof(float) };
            conv_run_rows(&kernels, rows, M, K, panels, out, c->P, r > 0, packed);
        }
    }
}

static void conv_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage;
    const conv c = conv_of(call);
    conv_run_tasks(&c, call->src[0].data, call->src[1].data, call->dst->data, begin, end, scratch);
}

GG_KERNEL(conv_3d, .stages = 1, .tasks = conv_tasks, .run = conv_run, .scratch = conv_scratch);

/* -- conv_3d_back_x ------------------------------------------------------------------------------- */

static conv conv_back_x_of(const gg_call *call) {
    gg_conv_3d_attrs a;
    memcpy(&a, call->attrs, sizeof a);
    conv c = conv_describe(a.channels, call->dst, &call->src[0].ne[1], &call->src[1], &a);
    c.OC = call->src[0].ne[0] / c.IC;
    return c;
}

/* A task has some channels of one n: planes that nobody else adds to. */
static int64_t conv_back_x_parts(const conv *c) { return conv_more_parts(conv_flops(c), c->N, c->IC); }

static conv conv_turned(const conv *c) {
    conv turned = *c;
    turned.IC = c->OC;
    turned.OC = c->IC;
    turned.R = c->OC * c->taps;
    turned.P = turned.plane = 1;
    for (int d = 0; d < 3; d++) {
        turned.in[d] = c->out[d];
        turned.out[d] = c->in[d];
        turned.padding[d] = (c->kernel[d] - 1) * c->dilation[d] - c->padding[d];
        turned.plane *= turned.in[d];
        turned.P *= turned.out[d];
    }
    return turned;
}

/* Whether to do it by a conv_3d: of stride 1, if windows serve that one. */
static int conv_turns(const conv *c) {
    const conv turned = conv_turned(c);
    for (int d = 0; d < 3; d++)
        if (c->stride[d] != 1 || turned.padding[d] < 0) return 0;
    return conv_window_floats(&turned, CONV_COLUMNS) > 0;
}

static int64_t conv_back_x_tasks_of(const conv *c) { return c->N * conv_back_x_parts(c); }
static int64_t conv_back_x_tasks(const gg_call *call, int stage) {
    const conv c = conv_back_x_of(call), turned = conv_turned(&c);
    if (gg_elements(call->dst) == 0) return 0;
    if (!conv_turns(&c)) return stage == 0 ? 0 : conv_back_x_tasks_of(&c);
    return stage == 0 ? gg_row_tasks(c.IC, turned.R, 2) : conv_tasks_of(&turned);
}

/* The turned kernels, and for each channel whether they are finite. */
static int64_t conv_back_x_work(const gg_call *call) {
    const conv c = conv_back_x_of(call);
    return conv_turns(&c) ? c.IC * (c.OC * c.taps * (int64_t)sizeof(float) + (int64_t)sizeof(int32_t)) : 0;
}

/* Positions whose elements of all output channels are packed at a time. */
static int64_t conv_back_x_columns(const conv *c) {
    return gg_min(CONV_COLUMNS, gg_max(1, CONV_PANELS / gg_max(1, c->OC) / GG_NR) * GG_NR);
}

static int64_t conv_back_x_scratch(const gg_call *call) {
    const conv c = conv_back_x_of(call), turned = conv_turned(&c);
    const int64_t columns = conv_back_x_columns(&c), rows = CONV_STRIP * GG_MR;
    const int64_t here = (columns * c.OC + rows * columns + gg_row_panels_floats(rows, c.OC)) * (int64_t)sizeof(float);
    return conv_turns(&c) ? gg_max(here, conv_scratch_of(&turned)) : here;
}

static void conv_turn(const gg_call *call, const conv *c, int64_t begin, int64_t end) {
    const int64_t R = c->OC * c->taps;
    const float *const k = call->src[0].data;
    float *const turned = call->work;
    int32_t *const finite = (int32_t *)(turned + c->IC * R);
    for (int64_t ic = begin; ic < end; ic++) {
        float *to = turned + ic * R;
        for (int64_t oc = 0; oc < c->OC; oc++)
            for (int64_t t = c->taps - 1; t >= 0; t--) *to++ = k[oc * c->R + ic * c->taps + t];
        finite[ic] = gg_row_finite(turned + ic * R, R);
    }
}

static void conv_add_products(const conv *c, const float *kernels, const float *gradient, float *dst, int64_t begin,
                              int64_t end, float *scratch) {
    const int64_t parts = conv_back_x_parts(c), columns = conv_back_x_columns(c), strip = CONV_STRIP * GG_MR;
    float *const panels = scratch, *const lines = panels + columns * c->OC, *const packed = lines + strip * columns;
    for (int64_t t = begin; t < end; t++) {
        const int64_t n = t / parts, ic = gg_cut(c->IC, t % parts, parts), ic1 = gg_cut(c->IC, t % parts + 1, parts);
        float *const dx = dst + n * c->IC * c->plane;
        const float *const dout = gradient + n * c->OC * c->P;
        memset(dx + ic * c->plane, 0, (ic1 - ic) * c->plane * sizeof(float));
        for (int64_t p = 0; p < c->P; p += columns) {
            const int64_t M = gg_min(columns, c->P - p);
            const gg_lines positions = { .data = (const char *)(dout + p),
                                         .dtype = GG_F32,
                                         .line = sizeof(float),
                                         .k = c->P * (int64_t)sizeof(float) };
            gg_pack_columns(&positions, M, c->OC, panels);
            const conv_place at = conv_place_of(c, p);
            for (int64_t r = ic * c->taps; r < ic1 * c->taps; r += strip) {
                const int64_t rows = gg_min(strip, ic1 * c->taps - r);
                const gg_lines k = { .data = (const char *)(kernels + r),
                                     .dtype = GG_F32,
                                     .line = sizeof(float),
                                     .k = c->R * (int64_t)sizeof(float) };
                conv_run_rows(&k, rows, M, c->OC, panels, lines, columns, 0, packed);
                for (int64_t i = 0; i < rows; i++) conv_add_line(c, dx, r + i, at, M, lines + i * columns);
            }
        }
    }
}

static void conv_back_x_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    const conv c = conv_back_x_of(call), turned = conv_turned(&c);
    const float *const k = call->src[0].data, *const dout = call->src[1].data, *const work = call->work;
    float *const dx = call->dst->data;
    const int64_t tasks = conv_back_x_tasks(call, stage), added = conv_back_x_tasks_of(&c);
    if (stage == 0) {
        conv_turn(call, &c, gg_cut(c.IC, begin, tasks), gg_cut(c.IC, end, tasks));
        return;
    }
    int finite = conv_turns(&c); /* of other kernels the zeros around dout become NaNs */
    for (int64_t ic = 0; finite && ic < c.IC; ic++) finite = ((const int32_t *)(work + c.IC * turned.R))[ic];
    if (finite) conv_run_tasks(&turned, work, dout, dx, begin, end, scratch);
    else conv_add_products(&c, k, dout, dx, gg_cut(added, begin, tasks), gg_cut(added, end, tasks), scratch);
}

GG_KERNEL(conv_3d_back_x, .stages = 2, .tasks = conv_back_x_tasks, .run = conv_back_x_run, .work = conv_back_x_work,
          .scratch = conv_back_x_scratch);

/* -- conv_3d_back_k ------------------------------------------------------------------------------- */

static conv conv_back_k_of(const gg_call *call) {
    gg_conv_3d_attrs a;
    memcpy(&a, call->attrs, sizeof a);
    conv c = conv_describe(a.channels, &call->src[0], &call->dst->ne[1], &call->src[1], &a);
    c.OC = call->dst->ne[0] / c.IC;
    return c;
}

/* The sum runs over pieces: so many positions of one n.  Where dst alone has too few blocks to share, tasks take ranges
 * of the pieces, each with a sum of its own, and a second stage adds these up. */
static int64_t conv_piece(const conv *c) { return gg_round_up(gg_ceil_div(c->P, gg_ceil_div(c->P, CONV_K)), 16); }
static int64_t conv_pieces_of_n(const conv *c) { return gg_ceil_div(c->P, conv_piece(c)); }
static int64_t conv_columns_of_lines(const conv *c) {
    return conv_window_floats(c, CONV_K) > 0 ? conv_whole_channels(c, CONV_COLUMNS) : CONV_COLUMNS;
}
static int64_t conv_line_blocks(const conv *c) { return gg_ceil_div(c->R, conv_columns_of_lines(c)); }
static int64_t conv_sums(const conv *c) {
    return conv_more_parts(conv_flops(c), conv_line_blocks(c), c->N * conv_pieces_of_n(c));
}

static int64_t conv_back_k_tasks(const gg_call *call, int stage) {
    const conv c = conv_back_k_of(call);
    const int64_t n = gg_elements(call->dst), sums = conv_sums(&c);
    if (n == 0) return 0;
    if (stage == 0) return conv_line_blocks(&c) * sums;
    return sums == 1 ? 0 : gg_row_tasks(n, 1, sums);
}

static int64_t conv_back_k_work(const gg_call *call) {
    const conv c = conv_back_k_of(call);
    const int64_t sums = conv_sums(&c);
    return sums == 1 ? 0 : sums * gg_elements(call->dst) * (int64_t)sizeof(float);
}

/* Lines that are read before they are packed: all of a block from windows, or as many as are transposed at once. */
static int64_t conv_lines_floats(const conv *c) {
    const int64_t window = conv_window_floats(c, CONV_K);
    return (window > 0 ? CONV_COLUMNS : GG_VW) * gg_line_step(CONV_K) + window;
}

static int64_t conv_back_k_scratch(const gg_call *call) {
    const conv c = conv_back_k_of(call);
    const int64_t rows = gg_row_panels_floats(CONV_STRIP * GG_MR, CONV_K);
    return (CONV_COLUMNS * CONV_K + rows + conv_lines_floats(&c)) * (int64_t)sizeof(float);
}

/* `count` lines from r on, at K positions from p on, as columns. */
static void conv_pack_lines(const conv *c, const float *x, int64_t r, int64_t count, int64_t p, int64_t K,
                            float *panels, float *lines) {
    const int64_t step = gg_line_step(CONV_K);
    const int whole = conv_window_floats(c, CONV_K) > 0;
    const conv_place at = conv_place_of(c, p);
    if (whole) {
        conv_window window;
        conv_window_make(c, p, K, lines + CONV_COLUMNS * step, &window);
        conv_unfold(c, &window, x + r / c->taps * c->plane, count / c->taps, lines, GG_NR, step);
    }
    for (int64_t l = 0; l < count; l += GG_VW) {
        const int64_t n = gg_min(GG_VW, count - l);
        float *const some = whole ? lines + l * step : lines;
        for (int64_t i = 0; i < n && !whole; i++) conv_read_line(c, x, r + l + i, at, K, some + i * step);
        gg_transpose(GG_F32, (const char *)some, step * (int64_t)sizeof(float), (int)n, K,
                     panels + l / GG_NR * GG_NR * K + l % GG_NR, GG_NR);
    }
}

static void conv_back_k_sum(const gg_call *call, const conv *c, int64_t task, float *dst, float *scratch) {
    const int64_t sums = conv_sums(c), columns = conv_columns_of_lines(c);
    const int64_t r = task / sums * columns, M = gg_min(columns, c->R - r);
    const int64_t piece = conv_piece(c), pieces = conv_pieces_of_n(c), first = gg_cut(c->N * pieces, task % sums, sums);
    const int64_t last = gg_cut(c->N * pieces, task % sums + 1, sums);
    float *const panels = scratch, *const packed = panels + CONV_COLUMNS * CONV_K,
                 *const lines = packed + gg_row_panels_floats(CONV_STRIP * GG_MR, CONV_K);
    if (first == last)
        for (int64_t oc = 0; oc < c->OC; oc++) memset(dst + oc * c->R + r, 0, M * sizeof(float));
    for (int64_t i = first; i < last; i++) {
        const int64_t n = i / pieces, p = i % pieces * piece, K = gg_min(piece, c->P - p);
        conv_pack_lines(c, (const float *)call->src[0].data + n * c->IC * c->plane, r, M, p, K, panels, lines);
        const gg_lines dout = { .data = (const char *)((const float *)call->src[1].data + n * c->OC * c->P + p),
                                .dtype = GG_F32,
                                .line = c->P * (int64_t)sizeof(float),
                                .k = sizeof(float) };
        conv_run_rows(&dout, c->OC, M, K, panels, dst + r, c->R, i > first, packed);
    }
}

static void conv_back_k_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    const conv c = conv_back_k_of(call);
    const int64_t sums = conv_sums(&c), n = gg_elements(call->dst);
    float *const dst = call->dst->data, *const partial = call->work;
    if (stage == 0) {
        for (int64_t t = begin; t < end; t++)
            conv_back_k_sum(call, &c, t, sums == 1 ? dst : partial + t % sums * n, scratch);
        return;
    }
    const int64_t tasks = conv_back_k_tasks(call, 1);
    for (int64_t i = gg_cut(n, begin, tasks), last = gg_cut(n, end, tasks); i < last; i++) {
        float total = partial[i];
        for (int64_t s = 1; s < sums; s++) total += partial[s * n + i];
        dst[i] = total;
    }
}

GG_KERNEL(conv_3d_back_k, .stages = 2, .tasks = conv_back_k_tasks, .run = conv_back_k_run, .work = conv_back_k_work,
          .scratch = conv_back_k_scratch);

/* -- im2col_3d ------------------------------------------------------------------------------------ */

/* dst: [N * OD, OH, OW, R], for which the positions of an n are rows of R elements. */
static conv conv_unfold_of(const gg_call *call, const gg_tensor *x, const gg_tensor *rows, const int64_t *kernel) {
    gg_conv_3d_attrs a;
    memcpy(&a, call->attrs, sizeof a);
    conv c = conv_describe(a.channels, x, kernel, x, &a);
    c.out[0] = c.N == 0 ? 0 : rows->ne[0] / c.N;
    c.out[1] = rows->ne[1];
    c.out[2] = rows->ne[2];
    c.P = c.out[0] * c.out[1] * c.out[2];
    return c;
}
static conv conv_im2col_of(const gg_call *call) {
    return conv_unfold_of(call, call->src, call->dst, ((const gg_im2col_3d_attrs *)call->attrs)->kernel);
}
static conv conv_im2col_back_of(const gg_call *call) {
    return conv_unfold_of(call, call->dst, call->src, ((const gg_im2col_3d_back_attrs *)call->attrs)->kernel);
}

enum { CONV_ROWS = 64 }; /* positions unfolded at a time */

static int64_t conv_im2col_blocks(const conv *c) { return c->N * gg_ceil_div(c->P, CONV_ROWS); }
static int64_t conv_im2col_tasks(const gg_call *call, int stage) {
    (void)stage;
    const conv c = conv_im2col_of(call);
    return gg_elements(call->dst) == 0 ? 0 : gg_row_tasks(conv_im2col_blocks(&c), CONV_ROWS * c.R, 2);
}

static void conv_im2col_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const conv c = conv_im2col_of(call);
    const int64_t tasks = conv_im2col_tasks(call, 0), blocks = conv_im2col_blocks(&c);
    const int64_t in_n = blocks / gg_max(1, c.N);
    float some[GG_VW][CONV_ROWS];
    for (int64_t b = gg_cut(blocks, begin, tasks), last = gg_cut(blocks, end, tasks); b < last; b++) {
        const int64_t n = b / in_n, p = b % in_n * CONV_ROWS, rows = gg_min(CONV_ROWS, c.P - p);
        const float *const x = (const float *)call->src->data + n * c.IC * c.plane;
        float *const dst = (float *)call->dst->data + (n * c.P + p) * c.R;
        const conv_place at = conv_place_of(&c, p);
        for (int64_t r = 0; r < c.R; r += GG_VW) {
            const int64_t lines = gg_min(GG_VW, c.R - r);
            for (int64_t i = 0; i < lines; i++) conv_read_line(&c, x, r + i, at, rows, some[i]);
            if (lines == GG_VW) gg_transpose(GG_F32, (const char *)some, sizeof some[0], GG_VW, rows, dst + r, c.R);
            else
                for (int64_t j = 0; j < rows; j++)
                    for (int64_t i = 0; i < lines; i++) dst[j * c.R + r + i] = some[i][j];
        }
    }
}

GG_KERNEL(im2col_3d, .stages = 1, .tasks = conv_im2col_tasks, .run = conv_im2col_run);

/* A task has planes of its own. */
static int64_t conv_im2col_back_tasks(const gg_call *call, int stage) {
    (void)stage;
    const conv c = conv_im2col_back_of(call);
    return gg_elements(call->dst) == 0 ? 0 : gg_row_tasks(c.N * c.IC, c.plane + c.taps * c.P, 2);
}

static void conv_im2col_back_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const conv c = conv_im2col_back_of(call);
    const int64_t tasks = conv_im2col_back_tasks(call, 0), planes = c.N * c.IC;
    for (int64_t i = gg_cut(planes, begin, tasks), last = gg_cut(planes, end, tasks); i < last; i++) {
        const int64_t n = i / c.IC, r = i % c.IC * c.taps;
        float *const dx = (float *)call->dst->data + n * c.IC * c.plane;
        memset((float *)call->dst->data + i * c.plane, 0, c.plane * sizeof(float));
        for (int64_t p = 0; p < c.P; p += CONV_ROWS) {
            const int64_t rows = gg_min(CONV_ROWS, c.P - p);
            const float *const from = (const float *)call->src->data + (n * c.P + p) * c.R + r;
            const conv_place at = conv_place_of(&c, p);
            for (int64_t tap = 0; tap < c.taps; tap++) {
                float line[CONV_ROWS];
                for (int64_t j = 0; j < rows; j++) line[j] = from[j * c.R + tap];
                conv_add_line(&c, dx, r + tap, at, rows, line);
            }
        }
    }
}

GG_KERNEL(im2col_3d_back, .stages = 1, .tasks = conv_im2col_back_tasks, .run = conv_im2col_back_run);
