/* Every kernel for the baseline of the architecture: SSE2 on x86-64, NEON on aarch64. */
#define GG_ISA base
#define GG_VECTOR_BYTES 16
#define GG_MR 6
#if defined(__aarch64__)
#define GG_NV 4 /* 32 registers: 24 accumulators */
#else
#define GG_NV 2 /* 16 registers: 12 accumulators */
#endif
#include "all_kernels.h"
