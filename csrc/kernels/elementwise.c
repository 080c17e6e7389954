/* Elementwise kernels.  So far: add of contiguous f32. */
static int64_t add_tasks(const gg_call *c, int stage) {
    (void)stage;
    return gg_row_tasks(gg_elements(c->dst), 1, 1);
}

static void add_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    const float *a = c->src[0].data, *b = c->src[1].data;
    float *out = c->dst->data;
    const int64_t n = gg_elements(c->dst), tasks = add_tasks(c, 0);
    const int64_t to = gg_cut(n, end, tasks);
    for (int64_t i = gg_cut(n, begin, tasks); i < to; i++) out[i] = a[i] + b[i];
}

GG_KERNEL(add, .stages = 1, .tasks = add_tasks, .run = add_run);
