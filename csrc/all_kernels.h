/* Every kernel file, in one translation unit for each instruction set. */
#include "intrinsics.h"
#ifdef __GNUC__
#ifndef __clang__
#pragma GCC optimize("fp-contract=fast", "no-math-errno", "no-trapping-math")
#endif
#endif
#include "kernel.h"
#include "kernels.h"
#include "simd.h"
#include "microkernel.h"
#include "convert.h"
#include "nest.h"
#include "rows.h"
#include "vector_math.h"
#include "activation.h"

#include "kernels/attention.c"
#include "kernels/copy.c"
#include "kernels/dropout.c"
#include "kernels/elementwise.c"
#include "kernels/glu.c"
#include "kernels/loss.c"
#include "kernels/mul_mat.c"
#include "kernels/norm.c"
#include "kernels/optim.c"
#include "kernels/reduce.c"
#include "kernels/rope.c"
#include "kernels/rows.c"
#include "kernels/softmax.c"
#include "kernels/unary.c"

#define X(op) &GG_PASTE3(gg_##op, _, GG_ISA),
const gg_kernel *const GG_CAT(gg_kernels_, GG_ISA)[] = { GG_KERNELS(X) NULL };
#undef X
