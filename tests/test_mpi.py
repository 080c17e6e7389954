"""Jobs of several processes under mpirun."""

import re

import pytest
from mpi_job import launch, needs_mpi, run

pytestmark = needs_mpi


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_over_mpi_give_what_they_give_among_threads(ranks):
    assert f"values on {ranks} ranks" in run(ranks, "collectives.py")


FAULTS = {
    "exception": r"rank 1 of 3: ValueError: a bug of this rank",
    "index": r"rank 1 of 3: IndexRangeError: get_rows.*holds 9",
    "graphs": r"rank [012] of 3: DistributedError: the graphs of the ranks(.|\n)*rank 1: all_reduce\(f32\[1, ?3\]",
    "no graph": r"rank [02] of 3: waits in .*, and rank 1 has ended without it",
    "exit": r"rank [02] of 3: waits in .*, and rank 1 has ended without it",
    "SIGINT": r"rank 1 of 3: KeyboardInterrupt",
    "SIGTERM": r"rank [02] of 3: rank 1 has died|signal 15|EXIT CODE: 15",
    "SIGKILL": r"rank [02] of 3: rank 1 has died|signal 9|EXIT CODE: 9",
    "elsewhere": r"rank [02] of 3: has waited for 1 s in .*another rank does not come there",
}


@pytest.mark.parametrize("run_module", [False, True], ids=["python", "python -m mpi4py"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_ends_all_with_a_message(fault, run_module):
    env = {"GGRAD_DISTRIBUTED_TIMEOUT": "1"} if fault == "elsewhere" else {}
    job = launch(3, "faults.py", fault, timeout=60, run_module=run_module, **env)  # a job that hangs runs into it
    assert job.returncode != 0
    assert "went on" not in job.stdout.replace("went on 1", "" if fault == "no graph" else "went on 1")
    assert re.search(FAULTS[fault], job.stdout + job.stderr), job.stdout + job.stderr
