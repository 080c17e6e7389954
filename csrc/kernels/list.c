/* All kernels of one instruction set, by name: what dispatch.c chooses from. */
#include "abi/kernels.h"
#include "walk/kernel.h"

#define DECLARE(op) extern const gg_kernel GG_PASTE3(gg_##op, _, GG_ISA);
#define ENTRY(op) &GG_PASTE3(gg_##op, _, GG_ISA),
GG_KERNELS(DECLARE)

extern const gg_kernel *const GG_CAT(gg_kernels_, GG_ISA)[];
const gg_kernel *const GG_CAT(gg_kernels_, GG_ISA)[] = { GG_KERNELS(ENTRY) NULL };
