"""Jobs of several processes under mpirun."""

import re
from pathlib import Path

import pytest
from mpi_job import launch, needs_mpi, run

import ggrad as gg

pytestmark = needs_mpi
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_over_mpi_give_what_they_give_among_threads(ranks):
    assert f"values on {ranks} ranks" in run(ranks, "collectives.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example_trains_on_several_ranks_and_goes_on_there(ranks, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"The same script as on one. " * 400)
    small = [
        "--layers",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--hidden",
        "16",
        "--context",
        "16",
        "--batch",
        "5",
        "--sample",
        "5",
    ]
    folders = ["--text", text, "--out", tmp_path / "run"]
    printed = run(ranks, EXAMPLES / "train_gpt.py", *folders, *small, "--steps", 4, "--checkpoint-every", 2)
    assert printed.count("loss on held-out text after 4 steps") == 1
    printed = run(ranks, EXAMPLES / "train_gpt.py", *folders, "--resume", "--steps", 6)
    assert "going on after step 4" in printed and "after 6 steps" in printed
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 7


def test_ranks_share_the_cores_of_their_machine():
    printed = run(2, "threads.py", GGRAD_NUM_THREADS="")
    alone, *shares = printed.split()
    assert shares == [str(max(1, int(alone) // 2))] * 2


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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_one_rank_ends_training_on_all_after_the_same_step(name, tmp_path):
    printed = run(3, "train.py", tmp_path, name)
    assert f"all ended: {[(name, 5)] * 3}" in printed
    assert gg.checkpoint.peek(tmp_path / "run.safetensors").step == 5


def test_a_killed_rank_leaves_the_last_checkpoint_whole(tmp_path):
    job = launch(3, "train.py", tmp_path, "SIGKILL")
    assert job.returncode != 0
    assert gg.checkpoint.peek(tmp_path / "run.safetensors").step == 4  # its checksum is right too
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".unfinished"] == ["run.safetensors"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_over_ranks_under_mpi(ranks):
    assert f"attention of {ranks}" in run(ranks, "context.py")
