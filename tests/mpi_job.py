"""Starts programs of several ranks under mpirun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "mpi"


def _missing() -> str:
    """Why no job can be started here; empty if one can."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed"
    found = subprocess.run(
        ["mpirun", "-n", "1", sys.executable, "-c", "from mpi4py import MPI"],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return "" if found.returncode == 0 else "mpi4py is not installed, or finds no MPI library"


missing = _missing()
needs_mpi = pytest.mark.skipif(bool(missing), reason=missing)


def launch(ranks: int, program: str, *args, timeout: float = 100, run_module: bool = False, **env: str):
    """Run tests/mpi/<program> or another file on so many ranks.  Gives the finished process, whatever came of it.

    Args:
        run_module: through `python -m mpi4py`.
    """
    python = [sys.executable, *(["-m", "mpi4py"] if run_module else [])]
    path = program if os.path.isabs(program) else PROGRAMS / program
    return subprocess.run(
        ["mpirun", "-n", str(ranks), *python, str(path), *map(str, args)],
        capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        env={name: value for name, value in {**os.environ, "GGRAD_NUM_THREADS": "1", **env}.items() if value},
    )  # fmt: skip


def run(ranks: int, program: str, *args, **options) -> str:
    """As `launch`, for a job that must end well.  Gives what was printed."""
    job = launch(ranks, program, *args, **options)
    assert job.returncode == 0, f"{job.stdout[-3000:]}\n{job.stderr[-3000:]}"
    return job.stdout
