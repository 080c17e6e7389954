/* The instruction sets that kernels are compiled for, weakest first: whoever runs one of them runs those before it.
 *
 * A new one is a line here: its name, the architecture it belongs to, what a CPU must have beside all before it, and the
 * compiler's flags.  dispatch.c chooses among them, setup.py reads these lines, and tests ask the module.  (How wide its
 * vectors are, and which tile fits its registers, isa.h says by what the flags switch on.)
 *
 * HAS: by the name that compilers know; HAS_BIT: of ecx of leaf 1 of cpuid, where not every compiler knows the name. */
#pragma once
#define GG_ISAS(X) \
    X(base, any, 1, "") \
    X(v3, x86_64, HAS(avx2) && HAS(fma) && HAS_BIT(f16c, 29), "-march=x86-64-v3") \
    X(v4, x86_64, HAS(avx512f) && HAS(avx512bw) && HAS(avx512dq) && HAS(avx512vl), \
      "-march=x86-64-v4 -mprefer-vector-width=512")
