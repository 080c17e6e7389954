"""Times contestants beside each other: one process, interleaved, medians and ratios.

An absolute time means little on a shared machine; a ratio of medians of interleaved blocks does.
Before a block everybody's threads come to rest: OpenBLAS and OpenMP workers spin for a while after a call,
and would take a core from whoever is timed next.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

recorded: dict[str, dict[str, float]] = {}  # what `table` printed by title, and what else was noted

REST = 0.08  # seconds for other libraries' threads to stop spinning

# An OpenBLAS told to run another CPU's kernels is no fair peer.  Must happen before NumPy is imported.
for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(variable, None)


def interleave(
    contestants: dict[str, Callable[[], object]],
    *,
    seconds: float,
    block: float = 0.15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times of single calls, in blocks that take turns.

    Args:
        contestants: name -> a call; warmed up here.
        seconds: in all, for each contestant.
        block: seconds of one contestant before the next has its turn.
        clock: of seconds; `time.process_time` counts those of the processor, in which other programs have no part.
    """
    for call in contestants.values():
        began = clock()
        for _ in range(3):
            call()
            if clock() - began > 1:
                break
    times: dict[str, list[float]] = {name: [] for name in contestants}
    while any(sum(t) < seconds for t in times.values()):
        for name, call in contestants.items():
            time.sleep(REST)
            call()  # brings caches and threads back
            until = clock() + block
            while True:
                start = clock()
                call()
                end = clock()
                times[name].append(end - start)
                if end > until:
                    break
    return times


def table(
    title: str, times: dict[str, list[float]], *, unit: float = 1e-3, symbol: str = "ms", work: float = 0.0
) -> dict[str, float]:
    """Print medians, spread and ratios against the first contestant; returns the medians in seconds.

    Args:
        work: floating-point operations of one call, for a column of GFLOP/s.
    """
    medians = recorded[title] = {name: statistics.median(t) for name, t in times.items()}
    first = next(iter(medians))
    print(f"\n{title}  (load {os.getloadavg()[0]:.1f})")
    print(f"  {'':<22}{'median':>10}{'quartiles':>22}{'n':>6}{'ratio':>8}" + (f"{'GFLOP/s':>10}" if work else ""))
    for name, t in times.items():
        low, _, high = statistics.quantiles(t, n=4) if len(t) > 1 else (t[0], t[0], t[0])
        line = (
            f"  {name:<22}{medians[name] / unit:>7.3f} {symbol:<2}{low / unit:>11.3f} to {high / unit:<7.3f}{len(t):>6}"
        )
        line += f"{medians[name] / medians[first]:>8.2f}"
        print(line + (f"{work / medians[name] / 1e9:>10.1f}" if work else ""))
    return medians


def parser(description: str, *, seconds: float, only: str) -> argparse.ArgumentParser:
    """What every benchmark can be asked for."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=seconds, help="of timing for each contestant")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--only", default=only, help=f"default: {only or 'all'}")
    made.add_argument("--save", type=Path, metavar="FILE", help="write the medians there, as JSON")
    return made


def save(path: Path | None) -> None:
    """What was recorded, if there is a file to write it to."""
    if path is not None:
        path.write_text(json.dumps(recorded, indent=1) + "\n")
