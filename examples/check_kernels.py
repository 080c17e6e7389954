"""Hold other people's kernels against the answer in double precision, on a CPU or a GPU, and print tables.

    python examples/check_kernels.py                          # what is installed of torch and JAX, on the CPU
    python examples/check_kernels.py --device cuda --formats tf32 bf16 f16 --brief

For torch, JAX and flash-linear-attention `ggrad.testing.adapters` has the kernels ready; one's own is a function of
NumPy arrays.  Each line of a table is a case, with the relative errors of the result and of every gradient, beside
those that a plain implementation makes in the same format.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import ggrad as gg
from ggrad.testing import adapters, compare_attention, compare_kda


def kernels(device: str) -> Iterator[tuple[str, Callable, Callable, float]]:
    """Name, how to make it, what to compare it with, how many times the plain implementation's error it may make."""
    gpu = device != "cpu"
    if find_spec("torch"):
        for backend in ["math", "flash", *(["efficient", "cudnn"] if gpu else [])]:
            yield f"torch, {backend}", lambda b=backend: adapters.torch_sdpa(device, backend=b), compare_attention, 3
        flex = {"compiled": gpu, "gradients": gpu}
        yield "torch, FlexAttention", lambda: adapters.flex_attention(device, **flex), compare_attention, 3
    if find_spec("jax"):
        for name in ("xla", "cudnn") if gpu else ("xla",):
            yield f"JAX, {name}", lambda n=name: adapters.jax_dot_product_attention(n), compare_attention, 3
    if gpu and find_spec("fla"):
        yield "flash-linear-attention, KDA", lambda: adapters.fla_kda(device), compare_kda, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch's name of it (default %(default)s)")
    parser.add_argument("--formats", nargs="+", default=["f32"], choices=["f32", "tf32", "bf16", "f16"])
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--brief", action="store_true", help="the counts, and the cases that are wrong")
    args = parser.parse_args()

    tried = 0
    for name, make, compare, factor in kernels(args.device):
        if args.only.lower() not in name.lower():
            continue
        tried += 1
        kernel = make()
        for given in args.formats:
            result: gg.testing.Comparison = compare(kernel, dtype=given, factor=factor)
            print(f"== {name}, {given}: {result.summary}")
            if not args.brief:
                print(result)
                continue
            for row in result.failed:
                errors = ", ".join(f"{n} {e:.1e}" for n, e in row.errors.items() if e > factor * row.plain[n] + 1e-6)
                print(f"   wrong: {row.case.name}: {row.problem or errors}")
    print(f"{tried} kernels were tried" if tried else "there is nothing to try: install torch or JAX")


if __name__ == "__main__":
    main()
