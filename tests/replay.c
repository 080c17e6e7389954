/* Runs graphs that were recorded on another machine, and compares every result with what that machine got.
 *
 *   replay <file> <threads>
 *
 * Python and its packages do not have to exist here, so the kernels of any architecture can be tried under
 * an emulator.  test_replay.py writes the file; both sides are little-endian. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "abi/ggrad.h"

enum { GUARD = 64, NAME = 96 };

static FILE *in;

static void *take(int64_t n) {
    void *p = NULL;
    if (posix_memalign(&p, 64, (size_t)n + 1) != 0 || fread(p, 1, (size_t)n, in) != (size_t)n) {
        fprintf(stderr, "the file ends too early\n");
        exit(2);
    }
    return p;
}

static int64_t take_number(void) {
    int64_t *p = take(8), n = *p;
    free(p);
    return n;
}

typedef struct region {
    int64_t size;
    unsigned char *bytes; /* followed by a guard */
} region;

/* The bytes are in the file for leaves; results begin as NaN. */
static region take_region(void) {
    region r = { .size = take_number() };
    const int64_t given = take_number();
    void *p = NULL;
    if (posix_memalign(&p, 64, (size_t)(r.size + GUARD)) != 0) exit(2);
    r.bytes = p;
    memset(r.bytes, 0xFF, (size_t)(r.size + GUARD));
    if (given) {
        void *content = take(r.size);
        memcpy(r.bytes, content, (size_t)r.size);
        free(content);
    }
    return r;
}

static gg_tensor take_tensor(const region *regions) {
    gg_tensor t = { 0 };
    const int64_t at = take_number(), offset = take_number();
    t.data = at < 0 ? NULL : regions[at].bytes + offset;
    t.dtype = (int32_t)take_number();
    t.rank = (int32_t)take_number();
    for (int d = 0; d < GG_MAX_DIMS; d++) t.ne[d] = take_number();
    for (int d = 0; d < GG_MAX_DIMS; d++) t.nb[d] = take_number();
    return t;
}

static double value_of(const unsigned char *p, int dtype) {
    uint32_t bits = 0;
    float x;
    if (dtype == GG_I32) return *(const int32_t *)p;
    if (dtype == GG_F32) return *(const float *)p;
    memcpy(&bits, p, 2);
    if (dtype == GG_BF16) {
        bits <<= 16;
        memcpy(&x, &bits, 4);
        return x;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits >> 15 ? -1 : 1;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

/* As many elements as differ by more than rtol times the largest finite magnitude. */
static int64_t differences(const unsigned char *got, const unsigned char *wanted, int64_t n, int dtype, double rtol) {
    const int64_t size = dtype == GG_F32 || dtype == GG_I32 ? 4 : 2;
    double largest = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = fabs(value_of(wanted + i * size, dtype));
        if (isfinite(x) && x > largest) largest = x;
    }
    for (int64_t i = 0; i < n; i++) {
        const double g = value_of(got + i * size, dtype), w = value_of(wanted + i * size, dtype);
        count += !(g == w || (isnan(g) && isnan(w)) || fabs(g - w) <= rtol * largest);
    }
    return count;
}

/* Returns whether the graph did what it did when it was recorded. */
static int replay(int threads) {
    char *name = take(NAME);
    const int64_t n_regions = take_number();
    region *regions = calloc((size_t)n_regions + 1, sizeof *regions);
    for (int64_t i = 0; i < n_regions; i++) regions[i] = take_region();
    const int64_t n_tensors = take_number();
    gg_tensor *tensors = calloc((size_t)n_tensors + 1, sizeof *tensors);
    for (int64_t i = 0; i < n_tensors; i++) tensors[i] = take_tensor(regions);

    const int64_t n_calls = take_number();
    gg_call *calls = calloc((size_t)n_calls + 1, sizeof *calls);
    gg_fault fault = { 0 };
    int64_t scratch_size = 64;
    int ok = 1;
    for (int64_t i = 0; i < n_calls; i++) {
        gg_call *c = &calls[i];
        char *kernel = take(NAME);
        c->kernel = gg_kernel_find(kernel);
        c->n_src = (int32_t)take_number();
        c->n_dst = (int32_t)take_number();
        c->src = tensors + take_number();
        c->dst = c->src + c->n_src;
        c->attrs = take(take_number());
        c->fault = &fault;
        c->index = i;
        if (c->kernel == NULL) {
            fprintf(stderr, "%s: no kernel %s here\n", name, kernel);
            exit(2);
        }
        free(kernel);
        const int64_t work = gg_call_work(c), scratch = gg_call_scratch(c);
        if (posix_memalign(&c->work, 64, (size_t)work + 64) != 0) exit(2);
        memset(c->work, 0xFF, (size_t)work + 64);
        if (scratch > scratch_size) scratch_size = scratch;
    }
    scratch_size = (scratch_size + 4095) / 4096 * 4096;
    void *scratch = NULL;
    if (posix_memalign(&scratch, 4096, (size_t)(scratch_size * threads)) != 0) exit(2);
    memset(scratch, 0xFF, (size_t)(scratch_size * threads));
    const int64_t n_steps = gg_compile(calls, n_calls, NULL);
    gg_step *steps = calloc((size_t)n_steps + 1, sizeof *steps);
    gg_compile(calls, n_calls, steps);
    gg_run(steps, n_steps, threads, scratch, scratch_size, &fault, NULL, n_steps);
    if (fault.code != GG_OK) {
        fprintf(stderr, "%s: call %lld reports a fault\n", name, (long long)fault.node);
        ok = 0;
    }

    for (int64_t i = take_number(); i > 0; i--) {
        const int64_t at = take_number(), offset = take_number(), n = take_number(), dtype = take_number();
        double *rtol = take(8);
        unsigned char *wanted = take(take_number());
        const int64_t off = differences(regions[at].bytes + offset, wanted, n, (int)dtype, *rtol);
        if (off != 0) {
            fprintf(stderr, "%s: %lld of %lld elements differ\n", name, (long long)off, (long long)n);
            ok = 0;
        }
        free(rtol);
        free(wanted);
    }
    for (int64_t i = 0; i < n_regions; i++) {
        for (int k = 0; k < GUARD; k++)
            if (regions[i].bytes[regions[i].size + k] != 0xFF) {
                fprintf(stderr, "%s: something was written behind a result\n", name);
                ok = 0;
                break;
            }
        free(regions[i].bytes);
    }
    for (int64_t i = 0; i < n_calls; i++) {
        free((void *)calls[i].attrs);
        free(calls[i].work);
    }
    free(steps);
    free(scratch);
    free(calls);
    free(tensors);
    free(regions);
    free(name);
    return ok;
}

int main(int argc, char **argv) {
    if (argc != 3 || (in = fopen(argv[1], "rb")) == NULL) {
        fprintf(stderr, "usage: replay <file> <threads>\n");
        return 2;
    }
    const int64_t graphs = take_number();
    int64_t wrong = 0;
    for (int64_t i = 0; i < graphs; i++) wrong += !replay(atoi(argv[2]));
    printf("%s: %lld graphs, %lld wrong\n", gg_isa(), (long long)graphs, (long long)wrong);
    return wrong != 0;
}
