"""An op whose kernel is a C function of one's own: built here with the system's compiler, loaded with ctypes.

    python examples/c_kernel.py

A package would build its library when it is installed. The contract that a kernel keeps is in docs/kernels.md.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import ggrad as gg

ROWS = 16  # in a task

KERNEL = """
#include <math.h>

struct attrs { float slope; };  /* those of the op, in order */

/* Rows begin * 16 ... of y = x / (1 + slope |x|). */
void softsign_run(const gg_call *call, int stage, int64_t begin, int64_t end, void *scratch) {
    const struct attrs *a = call->attrs;
    const gg_tensor *x = call->src, *y = call->dst;
    const int64_t n = y->ne[3], rows = y->ne[0] * y->ne[1] * y->ne[2];
    for (int64_t r = begin * 16; r < end * 16 && r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            const float v = ((const float *)x->data)[r * n + i];
            ((float *)y->data)[r * n + i] = v / (1 + a->slope * fabsf(v));
        }
}
"""


def built(folder: Path) -> ctypes.CDLL:
    """The library, compiled from the source above and ggrad's declarations."""
    source, library = folder / "softsign.c", folder / "softsign.so"
    source.write_text(gg.c_declarations() + KERNEL)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    return ctypes.CDLL(str(library))


@gg.op(layout="contiguous", inplace=("x",))
def softsign(x, *, slope: float):
    """x / (1 + slope |x|), elementwise."""
    return x.spec


@softsign.grad
def _(t, dout):
    bent = 1.0 + t.attrs["slope"] * abs(t.src[0])
    return (dout / (bent * bent),)


@softsign.reference
def _(x, *, slope):
    return x / (1 + slope * np.abs(x))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
    softsign.kernel_in_c(library.softsign_run, tasks=lambda t, stage: -(-t.size // max(1, t.shape[-1]) // ROWS))

    rng = np.random.default_rng(0)
    values = rng.standard_normal((100, 33))
    gg.testing.check_kernel(lambda x: softsign(x, slope=0.5), values)  # against the reference, on 1 to 7 threads
    gg.testing.check_gradients(lambda x: softsign(x, slope=0.5), values)

    w, x = gg.tensor(0.1 * rng.standard_normal((8, 33)), param=True, name="w"), gg.tensor(values)
    loss = gg.mean(softsign(x @ w.T, slope=1.0) ** 2)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    gg.AdamW([w], lr=1e-2).build(graph)
    for _ in range(20):
        graph.compute()
    print(f"a loss of {float(loss):.4f} after 20 steps through a kernel of one's own")


if __name__ == "__main__":
    main()
