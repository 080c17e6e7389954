/* The floating-point mode of a thread: rounding, and whether denormals are flushed to zero.
 *
 * A thread inherits the mode of its creator, so results would depend on who called first;
 * kernels therefore always run in the default mode. */
#pragma once
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

typedef uint32_t gg_fpmode;
static inline gg_fpmode gg_fpmode_get(void) { return _mm_getcsr(); }
static inline void gg_fpmode_set(gg_fpmode mode) { _mm_setcsr(mode); }
static inline void gg_fpmode_default(void) { _mm_setcsr(0x1f80); }

#elif defined(__aarch64__)

typedef uint64_t gg_fpmode;
static inline void gg_fpmode_set(gg_fpmode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
static inline gg_fpmode gg_fpmode_get(void) {
    gg_fpmode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void gg_fpmode_default(void) { gg_fpmode_set(0); }

#else
#include <fenv.h>

typedef fenv_t gg_fpmode;
static inline gg_fpmode gg_fpmode_get(void) {
    gg_fpmode mode;
    fegetenv(&mode);
    return mode;
}
static inline void gg_fpmode_set(gg_fpmode mode) { fesetenv(&mode); }
static inline void gg_fpmode_default(void) { fesetenv(FE_DFL_ENV); }

#endif
