/* Which instruction set's kernels run: chosen once, when the module is loaded.
 *
 * GGRAD_ISA=base|v3|v4 caps the choice; gg_isa_select changes it later, for tests. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "abi/ggrad.h"
#include "abi/isas.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef struct isa {
    const char *name;
    const gg_kernel *const *kernels; /* end with NULL; NULL itself if they were not compiled */
} isa;

/* kernels/list.c makes the lists; weak, since not all are linked. */
#define DECLARE(name, architecture, has, flags) extern const gg_kernel *const gg_kernels_##name[] __attribute__((weak));
#define ENTRY(name, architecture, has, flags) { #name, gg_kernels_##name },
GG_ISAS(DECLARE)

static const isa isas[] = { GG_ISAS(ENTRY) };
enum { N_ISAS = sizeof isas / sizeof *isas };

static const isa *_Atomic chosen = &isas[0];

/* Its place in the table; that of the last if unknown. */
static int place(const char *name) {
    int i = 0;
    while (i < N_ISAS - 1 && (name == NULL || strcmp(name, isas[i].name) != 0)) i++;
    return i;
}

const char *gg_isa_name(int i) { return i >= 0 && i < N_ISAS ? isas[i].name : NULL; }

static int best_of(const int has[N_ISAS], const char *cap) {
    int best = 0;
    while (best < place(cap) && has[best + 1]) best++;
    return best;
}

/* Whether a list of words, divided by spaces, has this one. */
static int has_word(const char *words, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = words; (at = strstr(at, word)) != NULL; at += length)
        if ((at == words || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) return 1;
    return 0;
}

#define CONDITION(name, architecture, has, flags) has,

const char *gg_isa_for(const char *features, const char *cap) {
#define HAS(feature) has_word(features, #feature)
#define HAS_BIT(feature, bit) HAS(feature)
    const int has[N_ISAS] = { GG_ISAS(CONDITION) };
#undef HAS
#undef HAS_BIT
    return isas[best_of(has, cap)].name;
}

/* What this CPU has and this library was compiled for. */
static int best_here(const char *cap) {
#if defined(__x86_64__)
    /* __builtin_cpu_supports also asks whether the operating system saves the wide registers: a bit of an instruction
     * that needs them counts only with AVX enabled. */
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    const int asked = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d);
#define HAS(feature) (__builtin_cpu_supports(#feature) != 0)
#define HAS_BIT(feature, bit) (asked && (c >> (bit) & 1))
#else
#define HAS(feature) 0
#define HAS_BIT(feature, bit) 0
#endif
    int has[N_ISAS] = { GG_ISAS(CONDITION) };
#undef HAS
#undef HAS_BIT
    for (int i = 0; i < N_ISAS; i++) has[i] = has[i] && isas[i].kernels != NULL;
    return best_of(has, cap);
}

const char *gg_isa(void) { return atomic_load_explicit(&chosen, memory_order_relaxed)->name; }

int gg_isa_select(const char *name) {
    const int at = place(name);
    if (strcmp(isas[at].name, name) != 0 || at > best_here(NULL)) return -1;
    atomic_store_explicit(&chosen, &isas[at], memory_order_relaxed);
    return 0;
}

const gg_kernel *gg_kernel_find(const char *name) {
    const isa *const here = atomic_load_explicit(&chosen, memory_order_relaxed);
    for (const gg_kernel *const *k = here->kernels; *k != NULL; k++)
        if (strcmp((*k)->name, name) == 0) return *k;
    return NULL;
}

__attribute__((constructor)) static void choose(void) {
    atomic_store_explicit(&chosen, &isas[best_here(getenv("GGRAD_ISA"))], memory_order_relaxed);
}
