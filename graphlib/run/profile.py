"""Where the time of a run went: by op, by node, by thread.

A profiled run gives C the same steps behind a kernel that notes when each piece of work began and
ended.  `print(graph.profile)` is a table; `graph.profile.save("run.json")` a trace that
https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.native import ffi, lib, struct_dtype
from ..core.scope import PHASES
from ..core.tensor import Tensor
from ..files.atomic import write_whole

GG_SPAN = struct_dtype("gg_span")


class Trace:
    """Steps that note when they run, and the memory for it."""

    def __init__(self, steps, n: int, threads: int) -> None:
        self._spans = np.zeros(lib.gg_pieces(steps, n, threads), GG_SPAN)
        self._traced = ffi.new("gg_traced_step[]", max(1, n))
        self._trace = ffi.new("gg_trace *")
        self._trace.spans = ffi.cast("gg_span *", self._spans.ctypes.data)
        self._trace.capacity = self._spans.size
        self.steps = ffi.new("gg_step[]", max(1, n))
        lib.gg_trace_steps(steps, n, self._trace, self._traced, self.steps)

    def spans(self) -> np.ndarray:
        """What was noted, in the order of the beginnings."""
        noted = self._spans[: self._trace.count]
        return noted[np.argsort(noted["begin"], kind="stable")]


@dataclass
class Row:
    """What some nodes cost together."""

    name: str
    nodes: int = 0
    seconds: float = 0.0  # of all threads
    flops: int = 0  # as far as the ops count them
    nbytes: int = 0  # of sources and results


class Profile:
    """A run, piece by piece.

    Attributes:
        nodes: the nodes that ran kernels, in their order.
        names: of all tensors of the graph, as `print(graph)` has them.
        followers: nodes whose elements others made on the way: their time is the leader's.
        spans: one row for each piece of work: `index` of the node, `stage`, `thread` (0 is the caller's),
            number of `tasks`, `begin` and `end` in nanoseconds since the run began.
        threads: the most that could have worked.
        seconds: from the beginning of the run to its end.
    """

    def __init__(
        self,
        nodes: list[Tensor],
        names: dict[Tensor, str],
        followers: dict[Tensor, list[Tensor]],
        spans: np.ndarray,
        threads: int,
        begin: int,
        end: int,
    ) -> None:
        self.nodes, self.names, self.followers, self.threads = nodes, names, followers, threads
        self.seconds = (end - begin) / 1e9
        self.spans = spans.copy()
        self.spans["thread"] = _numbered(spans["thread"])
        self.spans["begin"] -= begin
        self.spans["end"] -= begin

    @property
    def busy(self) -> float:
        """Seconds that threads spent in kernels, all together."""
        return float((self.spans["end"] - self.spans["begin"]).sum()) / 1e9

    def by_op(self) -> list[Row]:
        """The costs of every op, the dearest first; an op with followers is called mul_mat+add+relu."""
        return self._rows(self._name)

    def by_node(self) -> list[Row]:
        """The costs of every node, the dearest first."""
        return self._rows(self._label)

    def by_scope(self, depth: int | None = None) -> list[Row]:
        """The costs of every scope, gradients beside what they are of; the names cut to the first `depth`, if given."""
        return self._rows(lambda t: "/".join(t.scope.split("/")[:depth]) or "(no scope)")

    def by_phase(self) -> list[Row]:
        """The costs of what is forward, of the gradients, and of the optimizer's step."""
        return sorted(self._rows(lambda t: t.phase), key=lambda row: PHASES.index(row.name))

    def table(self, rows: list[Row] | None = None) -> str:
        """The rows as text; by op if none are given.  Rates are those of one busy thread."""
        rows = self.by_op() if rows is None else rows
        width = max([len(row.name) for row in rows], default=4)
        lines = [f"{'':<{width}}  nodes        ms   share  GFLOP/s     GB/s"]
        for row in rows:
            share = row.seconds / self.busy if self.busy else 0.0
            lines.append(
                f"{row.name:<{width}}{row.nodes:>7}{row.seconds * 1e3:>10.3f}{share:>8.1%}"
                f"{_rate(row.flops, row.seconds):>9}{_rate(row.nbytes, row.seconds):>9}"
            )
        used = self.busy / (self.seconds * self.threads) if self.seconds else 0.0
        phases = self.by_phase()
        split = ", ".join(f"{row.name} {row.seconds / self.busy:.0%}" for row in phases) if len(phases) > 1 else ""
        in_kernels = f"{used:.0%} of their time in kernels" + (f": {split}" if split else "")
        lines.append(f"{self.seconds * 1e3:.3f} ms; {self.threads} threads, {in_kernels}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike) -> None:
        """Write a trace in Chrome's JSON format: one lane a thread, one bar a piece of work.

        Raises:
            OSError: the file cannot be written.
        """
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": f"thread {thread}"}}
            for thread in range(int(self.spans["thread"].max(initial=0)) + 1)
        ]
        for index, stage, thread, tasks, begin, end in self.spans.tolist():
            t = self.nodes[index]
            events.append({
                "ph": "X", "name": self._name(t), "pid": 0, "tid": thread,
                "ts": begin / 1e3, "dur": (end - begin) / 1e3,
                "args": {"node": self._label(t), "inputs": [str(s.spec) for s in t.src if s is not None],
                         "stage": stage, "tasks": tasks},
            })  # fmt: skip
        write_whole(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())

    def __str__(self) -> str:
        return self.table()

    def _rows(self, key: Callable[[Tensor], str]) -> list[Row]:
        seconds = np.zeros(len(self.nodes))
        np.add.at(seconds, self.spans["index"], (self.spans["end"] - self.spans["begin"]) / 1e9)
        rows: dict[str, Row] = {}
        following = {t for chain in self.followers.values() for t in chain}
        for leader, spent in zip(self.nodes, seconds.tolist(), strict=True):
            if leader in following:
                continue
            row = rows.setdefault(key(leader), Row(key(leader)))
            row.seconds += spent
            for t in (leader, *self.followers.get(leader, ())):
                row.nodes += 1
                row.flops += t.op.count_flops(t)
                row.nbytes += bytes_of(t)
        return sorted(rows.values(), key=lambda row: -row.seconds)

    def _name(self, t: Tensor) -> str:
        return "+".join(node.op.name for node in (t, *self.followers.get(t, ())))

    def _label(self, t: Tensor) -> str:
        last = self.followers.get(t, [t])[-1]
        return f"{self._name(t)} {self.names[last]}: {last.spec}"


def bytes_of(t: Tensor) -> int:
    """Bytes of the node's sources and results."""
    return sum(s.nbytes for s in (*t.src, *(t.updates or t.outputs)) if s is not None)


def _numbered(idents: np.ndarray) -> np.ndarray:
    """Small numbers for the system's names of threads, 0 for the caller's."""
    caller = threading.get_ident()
    others = sorted(set(idents.tolist()) - {caller})
    number = {caller: 0, **{ident: i for i, ident in enumerate(others, start=1)}}
    return np.array([number[ident] for ident in idents.tolist()], dtype=np.uint64)


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds / 1e9:.2f}" if amount and seconds else ""
