"""Sizes at which speed is worth measuring: those of a small language model, or arrays well beyond the caches."""

import ggrad as gg

TOKENS, WIDTH = 1024, 512
LONG = (1 << 22,)

PERF = {
    "add": lambda m: gg.add(m(*LONG), m(*LONG)),
    "cont": lambda m: gg.cont(gg.transpose(m(2048, 2048))),
    "cross_entropy_class": lambda m: gg.cross_entropy_loss(m(TOKENS, 32000), m.ints(TOKENS, below=32000)).src[0],
    "cumsum": lambda m: gg.cumsum(m(TOKENS, 4 * WIDTH)),
    "exp": lambda m: gg.exp(m(*LONG)),
    "flash_attn_ext": lambda m: gg.flash_attn_ext(m(1, 8, TOKENS, 64), m(1, 8, TOKENS, 64), m(1, 8, TOKENS, 64)),
    "get_rows": lambda m: gg.get_rows(m(32000, WIDTH), m.ints(TOKENS, below=32000)),
    "l2_norm": lambda m: gg.l2_norm(m(TOKENS, WIDTH)),
    "mul": lambda m: gg.mul(m(*LONG), m(*LONG)),
    "mul_mat": lambda m: gg.mul_mat(m(2048, WIDTH), m(TOKENS, WIDTH)),
    "norm": lambda m: gg.norm(m(TOKENS, WIDTH), m(WIDTH), m(WIDTH)),
    "rms_norm": lambda m: gg.rms_norm(m(TOKENS, WIDTH), m(WIDTH)),
    "rope": lambda m: gg.rope(m(TOKENS, 8, 64), m.ints(TOKENS, below=TOKENS)),
    "set_rows": lambda m: gg.set_rows(m(32000, WIDTH), m(TOKENS, WIDTH), m.ints(TOKENS, below=32000)),
    "silu": lambda m: gg.silu(m(*LONG)),
    "soft_max": lambda m: gg.soft_max(m(8, TOKENS, TOKENS)),
    "sum": lambda m: gg.sum(m(*LONG)),
    "set": lambda m: gg.set(m(2048, 2048), m(1024, 1024), offset=4 * 512),
    "swiglu": lambda m: gg.swiglu(m(TOKENS, 4 * WIDTH), m(TOKENS, 4 * WIDTH)),
    "triangle": lambda m: gg.tri(m(8, TOKENS, TOKENS)),
}
