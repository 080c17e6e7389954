"""Ranks on one machine: sums of arrays over MPI beside gloo, data parallel steps beside one process and torch's DDP.

    python tests/bench/bench_distributed.py [--ranks 2] [--rounds 3]

Each contestant is a job of its own; the jobs take turns, and every number is the median over all rounds.  Needs mpirun.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import numpy as np
from gpt import SMALL, TINY, ggrad_step, torch_step

BYTES = (8, 4096, 262_144, 4_000_000, 64_000_000)
CONFIGS = {"tiny": TINY, "small": SMALL}


def timed(work, repeat: int, barrier) -> list[float]:
    times = []
    for i in range(repeat + 2):
        barrier()
        begin = time.perf_counter()
        work()
        if i >= 2:
            times.append(time.perf_counter() - begin)
    return times


def contestant(name: str, threads: int) -> dict[str, float]:
    """On every rank: the medians of what it measures."""
    if name.startswith("torch"):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        size = int(os.environ.get("PMI_SIZE", "1"))
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{os.environ['BENCH_STORE']}",
                rank=int(os.environ["PMI_RANK"]),
                world_size=size,
            )
        barrier = dist.barrier if size > 1 else lambda: None

        def all_reduce(a):
            dist.all_reduce(torch.from_numpy(a))

        def make(c):
            return torch_step(c, threads, distributed=size > 1)

    else:
        import ggrad as gg

        comm = gg.distributed.init()
        size, all_reduce = comm.size, comm.all_reduce

        def barrier():
            comm.exchange(None)

        def make(c):
            return ggrad_step(c, threads, comm=comm, shard="sharded" in name)

    found = {}
    if size > 1 and "sharded" not in name:
        for n in BYTES:
            a = np.ones(n // 4, np.float32)
            found[f"sum of {n:,} bytes"] = statistics.median(
                timed(lambda a=a: all_reduce(a), 60 if n < 1e6 else 10, barrier)
            )
    for label, c in CONFIGS.items():
        step = make(replace(c, batch=c.batch // size))
        found[f"step, {label} GPT"] = statistics.median(timed(step, 60 if c is TINY else 8, barrier))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        found = contestant(args.contestant, args.threads)
        if int(os.environ.get("PMI_RANK", "0")) == 0:
            print("FOUND", json.dumps(found), flush=True)
        return
    jobs = {
        f"ggrad, 1 process, {args.ranks} threads": ("ggrad", 1, args.ranks),
        f"ggrad, {args.ranks} ranks": ("ggrad", args.ranks, 1),
        f"ggrad, {args.ranks} ranks, state sharded": ("ggrad sharded", args.ranks, 1),
        f"torch, 1 process, {args.ranks} threads": ("torch", 1, args.ranks),
        f"torch DDP over gloo, {args.ranks} ranks": ("torch", args.ranks, 1),
    }
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in jobs}
    for _ in range(args.rounds):
        for name, (who, ranks, threads) in jobs.items():
            store = tempfile.mktemp()
            program = [sys.executable, __file__, "--contestant", who, "--threads", str(threads)]
            made = subprocess.run(
                ["mpirun", "-n", str(ranks), *program],
                env={**os.environ, "BENCH_STORE": store, "OMP_NUM_THREADS": str(threads)},
                capture_output=True, text=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if made.returncode:
                sys.exit(made.stdout + made.stderr)
            line = next(line for line in made.stdout.splitlines() if line.startswith("FOUND "))
            for what, seconds in json.loads(line.removeprefix("FOUND ")).items():
                seen[name].setdefault(what, []).append(seconds)
    for name, found in seen.items():
        print(name)
        for what, seconds in found.items():
            print(f"  {what:<26}{statistics.median(seconds) * 1e3:>10.3f} ms")


if __name__ == "__main__":
    main()
