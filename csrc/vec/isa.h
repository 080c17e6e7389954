/* The instruction set this compilation is for: its name, its vectors and its micro-kernel's tile.
 *
 * setup.py compiles every kernel file once for each instruction set, with GG_ISA and the
 * compiler's flags for it; alone, a file is compiled for the baseline of the architecture. */
#pragma once
#ifndef GG_ISA
#define GG_ISA base
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define GG_HAS_AVX512 1
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GG_HAS_AVX2 1
#endif

#if defined(GG_HAS_AVX512)
#define GG_VECTOR_BYTES 64
#define GG_MR 12
#define GG_NV 2
#elif defined(GG_HAS_AVX2)
#define GG_VECTOR_BYTES 32
#define GG_MR 6
#define GG_NV 2
#elif defined(__aarch64__)
#define GG_VECTOR_BYTES 16
#define GG_MR 6
#define GG_NV 4 /* 32 registers: 24 accumulators */
#else
#define GG_VECTOR_BYTES 16
#define GG_MR 6
#define GG_NV 2 /* 16 registers: 12 accumulators */
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
