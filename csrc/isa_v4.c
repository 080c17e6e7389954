/* Every kernel for x86-64-v4: AVX-512 F, BW, DQ and VL. */
#if defined(__x86_64__)
#include "intrinsics.h" /* before the target changes: its functions carry targets of their own */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,bmi,bmi2,f16c,lzcnt,movbe"))), \
    apply_to = function)
#else
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#endif
#define GG_ISA v4
#define GG_VECTOR_BYTES 64
#define GG_MR 12
#define GG_NV 2
#define GG_HAS_AVX2 1
#define GG_HAS_AVX512 1
#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
typedef int gg_isa_v4_not_empty;
