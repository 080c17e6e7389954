/* Every kernel for x86-64-v3: AVX2 and FMA. */
#if defined(__x86_64__)
#include "intrinsics.h" /* before the target changes: its functions carry targets of their own */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,lzcnt,movbe"))), apply_to = function)
#else
#pragma GCC target("arch=x86-64-v3")
#endif
#define GG_ISA v3
#define GG_VECTOR_BYTES 32
#define GG_MR 6
#define GG_NV 2
#define GG_HAS_AVX2 1
#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int gg_isa_v3_not_empty;
