"""The tables of docs/speed.md and the README: runs the benchmarks, keeps their medians, writes the tables.

    python tests/bench/report.py --run [--scale 0.5]    all benchmarks, about ten minutes; then as without --run
    python tests/bench/report.py                        tables of results.json, put between the marks of both files

Needs the `bench` extra for --run.  Each benchmark is a process of its own and saves medians; they, and what they were
measured on, are results.json.  A test holds both files to what is made of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import ggrad as gg
from ggrad.files.atomic import write_whole

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
README, SPEED = (HERE.parent.parent / name for name in ("README.md", "docs/speed.md"))
BEGIN, END = "<!-- made by tests/bench/report.py -->\n", "<!-- until here -->\n"
PACKAGES = ("numpy", "torch", "jax", "fla-core", "libggml-python")

# Program -> seconds for each contestant, and its other arguments.
RUNS: dict[str, tuple[float, list[str]]] = {
    "bench_engine": (5, []),
    "bench_products": (0.7, []),
    "bench_attention": (1, ["--only", "full,causal,grouped,batch,long,wide,single,short,thin,threads"]),
    "bench_kda": (1.5, ["--only", "short,long,wide", "--peer", "short"]),
    "bench_mla": (1.5, ["--only", "speed,window,choice", "--tokens", "2048"]),
    "bench_ops": (0.5, ["--cpu"]),
}

Medians = dict[str, float]  # of one table: contestant -> seconds, bytes or a share
Tables = dict[str, Medians]  # title -> its medians

# -- running ------------------------------------------------------------------------------------------------


def run(scale: float) -> dict:
    """What results.json holds: all programs' medians, and where they were measured."""
    results = {"machine": machine(), "programs": {}}
    for program, (seconds, arguments) in RUNS.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "medians.json"
            command = [sys.executable, "-W", "ignore", HERE / f"{program}.py", "--seconds", f"{seconds * scale}"]
            subprocess.run([*command, *arguments, "--save", saved], check=True)
            results["programs"][program] = json.loads(saved.read_text())
        print(f"\n{program}: {time.monotonic() - began:.0f} s\n", flush=True)
    return results


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not here"
    return {
        "cpu": cpu,
        **dict(line.split(": ", 1) for line in gg.show_config().splitlines()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
    }


# -- the tables ---------------------------------------------------------------------------------------------


def report(results: dict) -> str:
    """The tables, in Markdown."""
    of = results["programs"]
    sections = [
        where(results["machine"]),
        training(of["bench_engine"], of["bench_products"]),
        engine(of["bench_engine"], of["bench_attention"]),
        products(of["bench_products"]),
        frozen_weights(of["bench_products"]),
        attention(of["bench_attention"]),
        kda(of["bench_kda"]),
        mla(of["bench_mla"]),
        single_ops(of["bench_ops"]),
    ]
    return "\n\n".join(sections) + "\n"


def headline(results: dict) -> str:
    """What the README shows of it."""
    of: dict[str, Tables] = results["programs"]
    return f"{where(results['machine'])}\n\n{training(of['bench_engine'], of['bench_products'])}\n"


def where(machine: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cpu = f"{machine['cpu']} (kernels: {machine['instruction set']})"
    return f"{machine['threads']} cores of an {cpu}, {machine['date']};\n{versions}."


def training(engine: Tables, products: Tables) -> str:
    peers = ("torch eager", "torch.compile", "JAX jit")
    rows = [
        [title, ms(medians["ggrad"]), *ratios(medians, peers)]
        for title, medians in (products | engine).items()
        if title.endswith(("training step", "loss and gradients"))
    ]
    memory = engine["small GPT, peak memory of training"]
    rows.append(["small GPT, peak memory", f"{memory['ggrad'] / 2**20:.0f} MiB", *ratios(memory, peers)])
    kept = memory["ggrad, checkpoints"] / memory["ggrad"]
    rows.append(["the same, gradient checkpoints", f"{memory['ggrad, checkpoints'] / 2**20:.0f} MiB ({kept:.2f})"])
    return "Training, forward, backward and AdamW; peers as multiples of ggrad's time:\n\n" + table(
        ["", "ggrad", *peers], rows
    )


def engine(engine: Tables, attention: Tables) -> str:
    nodes, step = engine["1,000 dependent nodes of eight floats"], engine["small GPT, training step, by threads"]
    causal = attention["causal, forward and backward, by threads"]
    many = next(iter(step))
    costs = ", ".join(f"{s * 1e6:.0f} ns on {threads}" for threads, s in nodes.items())
    gains = [times(medians["1 thread"] / medians[many]) for medians in (step, causal)]
    return (
        f"The engine's own cost for a node: {costs}. {many} are {gains[0]} times as fast as one\n"
        f"on the small GPT's step, {gains[1]} times on causal attention (1, 8, 8, 1024, 64)."
    )


def products(products: Tables) -> str:
    by_size: dict[str, list[str]] = {}
    for title, medians in products.items():
        layout, found, size = title.partition(": ")
        if found and layout.startswith("A"):
            peers = " / ".join(ratios(medians, ("NumPy", "torch")))
            by_size.setdefault(size, []).append(f"{ms(medians['ggrad'])}, {peers}")
    return (
        "Products of matrices, batches x (rows, length of the sums, columns): ggrad's time, then NumPy's / torch's as\n"
        "multiples of it:\n\n"
        + table(["", "A B^T", "A B", "A^T B"], [[size, *cells] for size, cells in by_size.items()])
    )


def frozen_weights(products: Tables) -> str:
    frozen = "ggrad, frozen"
    rows = [
        [title.partition(": ")[2], ms(medians[frozen]), *ratios(medians, ("ggrad", "NumPy", "torch"), first=frozen)]
        for title, medians in products.items()
        if title.startswith("weights")
    ]
    return (
        "The same with few rows, A B^T, and weights that never change (`gg.tensor(w, frozen=True)`); as multiples of\n"
        "that the time with weights that may:\n\n" + table(["", "frozen", "ggrad", "NumPy", "torch"], rows)
    )


ATTENTION = {
    "full": "1, 8, 8, 1024, 64, full",
    "causal": "1, 8, 8, 1024, 64",
    "grouped": "1, 8, 2, 1024, 64",
    "long": "1, 4, 4, 4096, 64",
    "wide": "1, 4, 4, 2048, 128",
    "single": "1, 1, 1, 2048, 64",
    "batch": "4, 6, 6, 256, 64",
    "short": "8, 4, 4, 64, 64",
    "thin": "8, 4, 4, 64, 16",
}


def attention(attention: Tables) -> str:
    rows = []
    for name, shape in ATTENTION.items():
        shares = attention[f"{name}, share of a large product"]
        forward, both = attention[f"{name}, forward"], attention[f"{name}, forward and backward"]
        rows.append(
            [
                shape,
                f"{shares['ggrad, forward']:.2f}, {shares['ggrad, backward']:.2f}",
                ms(both["ggrad"]),
                *(pair(forward, both, peer) for peer in ("torch", "JAX")),
            ]
        )
    return (
        "Attention, causal where it does not say full: ggrad's speed forward and backward as shares of a large\n"
        "product's, its time for both, and peers' as multiples of it, forward / forward and backward:\n\n"
        + table(["B, heads, kv heads, N, d", "shares", "ggrad", "torch", "JAX"], rows)
    )


def kda(kda: Tables) -> str:
    rows = []
    for name, shape in (("short", "2,048 tokens, 64"), ("long", "8,192 tokens, 64"), ("wide", "8,192 tokens, 128")):
        both = kda[f"{name}, forward and backward"]
        share = (
            kda[f"{name}, {what}, share of a large product"]["kda"] for what in ("forward", "forward and backward")
        )
        peers = ratios(both, ("causal attention", "fla-core, torch"), first="kda")
        rows.append([shape, ", ".join(f"{s:.2f}" for s in share), ms(both["kda"]), *peers])
    return (
        "Kimi Delta Attention, 4 heads, K = V: its share of a large product's speed forward and in all, its time\n"
        "forward and backward, and as multiples of it our own causal attention and the chunked form of\n"
        "flash-linear-attention in torch:\n\n" + table(["", "shares", "kda", "attention", "fla-core"], rows)
    )


def mla(mla: Tables) -> str:
    rows = []
    for kind in ("a window", "a window and a choice"):
        shares = mla[f"2048 tokens, {kind}, share of a large product"]
        both = mla[f"2048 tokens, {kind}, forward and backward"]
        peers = ratios(both, ("torch, gathered", "torch, dense"))
        rows.append([kind, f"{shares['forward']:.2f}, {shares['backward']:.2f}", ms(both["ggrad"]), *peers])
    return (
        "Sparse latent attention, 2,048 tokens, 16 heads, d 128, a window of 128: shares forward and backward, time\n"
        "of both, and as multiples of it torch's with gathered rows and with a dense mask:\n\n"
        + table(["", "shares", "ggrad", "gathered", "dense"], rows)
    )


def single_ops(ops: Tables) -> str:
    rows = []
    for title, forward in ops.items():
        name, _, what = title.rpartition(": ")
        if what != "forward":
            continue
        both = ops[f"{name}: and gradients"]
        torch = next((peer for peer in forward if peer.startswith("torch")), "torch")
        rows.append([name, f"{ms(forward['ggrad'])}, {ms(both['ggrad'])}"])
        rows[-1] += [pair(forward, both, peer, separator=", ") for peer in (torch, "ggml")]
    return (
        "Single ops, processor time of one thread, forward, then with all gradients; peers as multiples of ggrad's:\n\n"
        + table(["", "ggrad", "torch", "ggml"], rows)
    )


def ms(seconds: float) -> str:
    """Three digits that count."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def ratios(medians: Medians, peers: Iterable[str], first: str = "ggrad") -> list[str]:
    """Of contestants' times to the first one's; nothing for one that took no part."""
    return [times(medians[peer] / medians[first]) if peer in medians else "" for peer in peers]


def pair(forward: Medians, both: Medians, peer: str, separator: str = " / ") -> str:
    """A peer's ratio forward, and with gradients."""
    return separator.join(ratio for medians in (forward, both) for ratio in ratios(medians, [peer]) if ratio)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *(row + [""] * (len(header) - len(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the program --------------------------------------------------------------------------------------------


def placed(text: str, tables: str) -> str:
    """A file's text with the tables between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"report.py: there must be {BEGIN.strip()} and {END.strip()} in the file")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    parser.add_argument("--scale", type=float, default=1, help="of the seconds that contestants are timed for")
    options = parser.parse_args()
    if options.run:
        write_whole(RESULTS, (json.dumps(run(options.scale), indent=1) + "\n").encode())
    tables = report(json.loads(RESULTS.read_text()))
    write_whole(SPEED, placed(SPEED.read_text(), tables).encode())
    write_whole(README, placed(README.read_text(), headline(json.loads(RESULTS.read_text()))).encode())
    print(tables)


if __name__ == "__main__":
    main()
