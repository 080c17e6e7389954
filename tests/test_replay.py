"""The kernels of any architecture: graphs recorded here, run again by a C program that knows no Python.

By default it is built for this machine, which tries the recorder and the program. Elsewhere the two variables say
how to build and to run it, as .ci/run does with a cross compiler and an emulator:

    GGRAD_REPLAY_CC="aarch64-linux-gnu-gcc -static" GGRAD_REPLAY_RUN=qemu-aarch64-static pytest tests/test_replay.py
"""

import os
import shlex
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.op import registry
from ggrad.core.tensor import MAX_DIMS
from ggrad.testing.cases import CASES, RTOL
from ggrad.testing.check import gradients_of, results_of
from ggrad.testing.maker import Maker

ROOT = Path(__file__).parent.parent
CC = shlex.split(os.environ.get("GGRAD_REPLAY_CC", "cc"))
RUN = shlex.split(os.environ.get("GGRAD_REPLAY_RUN", ""))
FLAGS = ["-std=gnu11", "-O1", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-pthread"]
# Twice what check_kernel allows in f32, since each side may be off; two roundings of 11 and of 8 bits.
OFF = {gg.F32: 2e-5, gg.F16: 2e-3, gg.BF16: 1.6e-2, gg.I32: 0.0}
NAME = 96  # bytes


def numbers(*values) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def record(graph: gg.Graph, name: str, rtol: float) -> bytes | None:
    """The graph with its leaves' bytes and its results, as replay.c reads it; None if a kernel is not in C."""
    nodes = [t for t in graph.nodes if not t.is_view]
    if any(t.op.in_python is not None for t in nodes):
        return None
    owners = list(dict.fromkeys(t.storage[0] for t in (*graph.leaves, *nodes)))
    place = {t: i for i, t in enumerate(owners)}
    out = [name.encode()[: NAME - 1].ljust(NAME, b"\0"), numbers(len(owners))]
    for t in owners:
        out.append(numbers(t.nbytes, t.is_leaf))
        if t.is_leaf:
            out.append(t.memory().tobytes())

    tensors, calls = [], []
    for t in nodes:
        sources, results = t.src, t.updates or t.outputs
        attrs = t.op.pack_attrs(t.attrs).tobytes() if t.op.record.names else b""
        calls.append(t.op.name.encode().ljust(NAME, b"\0"))
        calls.append(numbers(len(sources), len(results), len(tensors), len(attrs)) + attrs)
        tensors += [describe(s, place) for s in (*sources, *results)]
    out += [numbers(len(tensors)), *tensors, numbers(len(nodes)), *calls]

    before = {t: t.memory().copy() for t in graph.leaves}
    graph.compute(threads=1)
    written = {owner for t in graph.kept if not (owner := t.storage[0]).is_leaf}
    written.update(leaf for t in nodes for leaf in t.updates)
    checks = []
    for owner in sorted(written, key=lambda t: t.serial):
        for p in owner.outputs:
            content = (p.memory() if p.is_leaf else memory_of(graph, p)).tobytes()
            checks.append(numbers(place[owner], p.storage[1], p.size, p.dtype.code))
            checks.append(struct.pack("<d", max(rtol, OFF[p.dtype])) + numbers(len(content)) + content)
    for t, content in before.items():
        t.memory()[...] = content
    return b"".join([*out, numbers(len(checks) // 2), *checks])


def describe(t: gg.Tensor | None, place: dict) -> bytes:
    if t is None:
        return numbers(-1, 0, 0, 0, *(0,) * 2 * MAX_DIMS)
    owner, offset = t.storage
    pad = MAX_DIMS - len(t.shape)
    outer = t.strides[0] * t.shape[0] if t.shape else t.dtype.nbytes
    ne, nb = (1,) * pad + t.shape, (outer,) * pad + t.strides
    return numbers(place[owner], offset, t.dtype.code, len(t.shape), *ne, *nb)


def memory_of(graph: gg.Graph, t: gg.Tensor) -> np.ndarray:
    """The bytes of a result, padding left out."""
    session = graph.prepared("native")
    owner, offset = t.storage
    start = session.plan.offsets[owner] + offset
    return session.values.arena[start : start + t.nbytes]


def graphs():
    """Every case of every op, and its gradients."""
    for op, cases in CASES.items():
        for name, build in cases.items():
            results = results_of(build)
            yield f"{op}: {name}", results, op
            if registry[op]._grad is not None:
                yield f"gradients of {op}: {name}", tuple(gradients_of(results, Maker(seed=1)).values()), op


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "graphs"
    recorded = []
    for name, roots, op in graphs():
        if roots and (one := record(gg.Graph().build_forward_expand(*roots), name, RTOL.get(op, 0.0))) is not None:
            recorded.append(one)
    path.write_bytes(numbers(len(recorded)) + b"".join(recorded))
    return path, len(recorded)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    sources = [*ROOT.glob("csrc/*/*.c"), ROOT / "tests" / "replay.c"]

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        done = subprocess.run(
            [*CC, *FLAGS, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", target], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([*CC, "-pthread", *objects, "-lm", "-o", str(folder / "replay")], check=True)
    return folder / "replay"


@pytest.mark.skipif(shutil.which(CC[0]) is None, reason="needs a C compiler")
@pytest.mark.parametrize("threads", [1, 3])
def test_recorded_graphs_give_the_same_results(recording, program, threads):
    path, count = recording
    assert count > 500
    done = subprocess.run([*RUN, str(program), str(path), str(threads)], capture_output=True, text=True, timeout=1200)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[:5000]


@pytest.mark.skipif(shutil.which(CC[0]) is None, reason="needs a C compiler")
def test_a_wrong_result_is_noticed(program, tmp_path):
    x = gg.tensor(np.arange(1.0, 8.0))
    graph = gg.Graph().build_forward_expand(gg.sqr(x))
    right = record(graph, "sqr", 0.0)
    wrong = right[:-4] + struct.pack("<f", 48.0)  # the last element's expected value, 49
    for content, status in ((right, 0), (wrong, 1)):
        path = tmp_path / "graph"
        path.write_bytes(numbers(1) + content)
        done = subprocess.run([*RUN, str(program), str(path), "1"], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
