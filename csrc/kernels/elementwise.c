/* Two operands, element by element, with tiling broadcast; and one operand times a number.
 * Sources have any strides; the destination is contiguous and may lie exactly on a source. */
static void elem_nest(nest *s, const gg_call *c) {
    const gg_tensor *const arrays[] = { c->dst, &c->src[0], &c->src[1] };
    nest_make(s, c->dst->ne, 1 + c->n_src, arrays);
}

static int64_t elem_tasks(const gg_call *c, int stage) {
    (void)stage;
    return nest_tasks(gg_elements(c->dst), 1);
}

static void elem_walk(const gg_call *c, int64_t begin, int64_t end, nest_row *row) {
    nest s;
    elem_nest(&s, c);
    const int64_t tasks = elem_tasks(c, 0);
    nest_walk(&s, nest_cut(s.total, begin, tasks), nest_cut(s.total, end, tasks), row, c->attrs);
}

/* out[i] = F(A, B) for i < n, a vector at a time; A and B are expressions of p (where to load) and of the loader. */
#define ELEM_LOOP(F, A, B)                                              \
    do {                                                                \
        int64_t i = 0;                                                  \
        for (; i + GG_VW <= n; i += GG_VW) {                            \
            const vf x = A(vf_load), y = B(vf_load);                    \
            vf_store(out + i, F(x, y));                                 \
        }                                                               \
        if (i < n) {                                                    \
            const vf x = A(ELEM_SOME), y = B(ELEM_SOME);                \
            vf_store_n(out + i, F(x, y), (int)(n - i));                 \
        }                                                               \
    } while (0)
#define ELEM_SOME(p) vf_load_n(p, (int)(n - i), 0)
#define ELEM_A(load) load(a + i)
#define ELEM_B(load) load(b + i)
#define ELEM_ONE_A(load) one_a
#define ELEM_ONE_B(load) one_b

/* Defines the kernel `name` that computes F of two vectors. */
#define ELEM_BINARY(name, F)                                                                                   \
    static void elem_##name##_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {         \
        (void)attrs;                                                                                           \
        float *out = (float *)at[0];                                                                           \
        const float *a = (const float *)at[1], *b = (const float *)at[2];                                       \
        if (step[1] && step[2]) {                                                                              \
            ELEM_LOOP(F, ELEM_A, ELEM_B);                                                                      \
        } else if (step[1]) {                                                                                  \
            const vf one_b = vf_set1(*b);                                                                      \
            ELEM_LOOP(F, ELEM_A, ELEM_ONE_B);                                                                  \
        } else if (step[2]) {                                                                                  \
            const vf one_a = vf_set1(*a);                                                                      \
            ELEM_LOOP(F, ELEM_ONE_A, ELEM_B);                                                                  \
        } else {                                                                                               \
            const vf one_a = vf_set1(*a), one_b = vf_set1(*b);                                                 \
            ELEM_LOOP(F, ELEM_ONE_A, ELEM_ONE_B);                                                              \
        }                                                                                                      \
    }                                                                                                          \
    static void elem_##name##_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {     \
        (void)stage, (void)scratch;                                                                            \
        elem_walk(c, begin, end, elem_##name##_row);                                                           \
    }                                                                                                          \
    GG_KERNEL(name, .stages = 1, .tasks = elem_tasks, .run = elem_##name##_run)

#define ELEM_ADD(x, y) ((x) + (y))
#define ELEM_SUB(x, y) ((x) - (y))
#define ELEM_MUL(x, y) ((x) * (y))
#define ELEM_DIV(x, y) ((x) / (y))
ELEM_BINARY(add, ELEM_ADD);
ELEM_BINARY(sub, ELEM_SUB);
ELEM_BINARY(mul, ELEM_MUL);
ELEM_BINARY(div, ELEM_DIV);

/* The leaf is both the first source and the destination. */
GG_KERNEL(accumulate, .stages = 1, .tasks = elem_tasks, .run = elem_add_run);

static void elem_scale_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    const gg_scale_attrs *number = attrs;
    float *out = (float *)at[0];
    const float *a = (const float *)at[1];
    const vf one_b = vf_set1(number->factor), bias = vf_set1(number->bias);
#define ELEM_SCALE(x, y) ((x) * (y) + bias)
    if (number->bias == 0) { /* adding 0 would turn -0 into 0 */
        if (step[1]) {
            ELEM_LOOP(ELEM_MUL, ELEM_A, ELEM_ONE_B);
        } else {
            const vf one_a = vf_set1(*a);
            ELEM_LOOP(ELEM_MUL, ELEM_ONE_A, ELEM_ONE_B);
        }
    } else if (step[1]) {
        ELEM_LOOP(ELEM_SCALE, ELEM_A, ELEM_ONE_B);
    } else {
        const vf one_a = vf_set1(*a);
        ELEM_LOOP(ELEM_SCALE, ELEM_ONE_A, ELEM_ONE_B);
    }
#undef ELEM_SCALE
}

static void elem_scale_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    elem_walk(c, begin, end, elem_scale_row);
}

GG_KERNEL(scale, .stages = 1, .tasks = elem_tasks, .run = elem_scale_run);

static void elem_neg_row(char *const *at, const int64_t *step, int64_t n, const void *attrs) {
    (void)attrs;
    float *out = (float *)at[0];
    const float *a = (const float *)at[1];
    const vf one_b = vf_zero();
#define ELEM_NEG(x, y) ((void)(y), -(x))
    if (step[1]) {
        ELEM_LOOP(ELEM_NEG, ELEM_A, ELEM_ONE_B);
    } else {
        const vf one_a = vf_set1(*a);
        ELEM_LOOP(ELEM_NEG, ELEM_ONE_A, ELEM_ONE_B);
    }
#undef ELEM_NEG
}

static void elem_neg_run(const gg_call *c, int stage, int64_t begin, int64_t end, void *scratch) {
    (void)stage, (void)scratch;
    elem_walk(c, begin, end, elem_neg_row);
}

GG_KERNEL(neg, .stages = 1, .tasks = elem_tasks, .run = elem_neg_run);

#undef ELEM_BINARY
#undef ELEM_LOOP
#undef ELEM_SOME
#undef ELEM_A
#undef ELEM_B
#undef ELEM_ONE_A
#undef ELEM_ONE_B
#undef ELEM_ADD
#undef ELEM_SUB
#undef ELEM_MUL
#undef ELEM_DIV
