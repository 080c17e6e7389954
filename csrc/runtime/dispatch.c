/* Which instruction set's kernels run: chosen once, when the module is loaded.
 *
 * GGRAD_ISA=base|v3|v4 caps the choice; gg_isa_select changes it later, for tests. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "abi/ggrad.h"
#include "abi/kernels.h"
#if defined(GG_X86_LEVELS)
#include <cpuid.h>
#endif

/* A list of every kernel, as compiled for one instruction set. */
#define DECLARE_BASE(op) extern const gg_kernel gg_##op##_base;
#define DECLARE_V3(op) extern const gg_kernel gg_##op##_v3;
#define DECLARE_V4(op) extern const gg_kernel gg_##op##_v4;
#define LIST_BASE(op) &gg_##op##_base,
#define LIST_V3(op) &gg_##op##_v3,
#define LIST_V4(op) &gg_##op##_v4,

GG_KERNELS(DECLARE_BASE)
static const gg_kernel *const base[] = { GG_KERNELS(LIST_BASE) NULL };
#if defined(GG_X86_LEVELS) /* setup.py says that it compiles the kernels for these too */
GG_KERNELS(DECLARE_V3)
GG_KERNELS(DECLARE_V4)
static const gg_kernel *const v3[] = { GG_KERNELS(LIST_V3) NULL };
static const gg_kernel *const v4[] = { GG_KERNELS(LIST_V4) NULL };
#endif

typedef struct isa {
    const char *name;
    const gg_kernel *const *kernels; /* ends with NULL */
} isa;

/* Ascending: whoever runs one of them runs those before it. */
static const isa isas[] = {
    { "base", base },
#if defined(GG_X86_LEVELS)
    { "v3", v3 },
    { "v4", v4 },
#endif
};
enum { N_ISAS = sizeof isas / sizeof *isas };

static const isa *_Atomic chosen = &isas[0];

/* Its place in the order of instruction sets, on any architecture; beyond all of them if unknown. */
static int level(const char *name) {
    static const char *const order[] = { "base", "v3", "v4" };
    int i = 0;
    while (i < 3 && (name == NULL || strcmp(name, order[i]) != 0)) i++;
    return i;
}

const char *gg_isa_for(int avx2, int fma, int f16c, int avx512f, int avx512bw, int avx512dq, int avx512vl,
                       const char *cap) {
    const int v3 = avx2 && fma && f16c;
    const int v4 = v3 && avx512f && avx512bw && avx512dq && avx512vl;
    const int highest = level(cap);
    if (v4 && highest >= 2) return "v4";
    if (v3 && highest >= 1) return "v3";
    return "base";
}

static const char *best_isa(const char *cap) {
#if defined(GG_X86_LEVELS)
    /* __builtin_cpu_supports also asks whether the operating system saves the wide registers.
     * Not every clang knows the name "f16c": its bit counts only with AVX enabled. */
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    const int f16c = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    return gg_isa_for(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"), f16c,
                      __builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
                      __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl"), cap);
#else
    return gg_isa_for(0, 0, 0, 0, 0, 0, 0, cap);
#endif
}

const char *gg_isa(void) { return atomic_load_explicit(&chosen, memory_order_relaxed)->name; }

int gg_isa_select(const char *name) {
    if (level(name) > level(best_isa(NULL))) return -1;
    for (int i = 0; i < N_ISAS; i++)
        if (strcmp(isas[i].name, name) == 0) {
            atomic_store_explicit(&chosen, &isas[i], memory_order_relaxed);
            return 0;
        }
    return -1;
}

const gg_kernel *gg_kernel_find(const char *name) {
    const isa *const here = atomic_load_explicit(&chosen, memory_order_relaxed);
    for (const gg_kernel *const *k = here->kernels; *k != NULL; k++)
        if (strcmp((*k)->name, name) == 0) return *k;
    return NULL;
}

__attribute__((constructor)) static void choose(void) { gg_isa_select(best_isa(getenv("GGRAD_ISA"))); }
