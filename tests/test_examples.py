"""Every example runs, in a process of its own, and leaves what it says."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ggrad as gg

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 1500  # enough that there is time to press Ctrl-C
SIZES = {"layers": 1, "width": 16, "heads": 2, "kv-heads": 1, "hidden": 24, "context": 16, "batch": 4, "sample": 20}
TINY = [word for name, n in SIZES.items() for word in (f"--{name}", str(n))]


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-P", str(EXAMPLES / f"{name}.py"), *map(str, arguments)]


def run(name: str, *arguments: object) -> str:
    """What the example prints."""
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_test_of_every_example():
    tested = {"quickstart", "attention", "custom_op", "digits", "train_gpt"}
    assert {p.stem for p in EXAMPLES.glob("*.py")} == tested


def test_quickstart():
    printed = run("quickstart")
    assert "# gradient of w" in printed and "mul_mat(w, x)" in printed
    loss = float(printed.rpartition("loss ")[2].split(",")[0])
    assert loss < 1e-6


@pytest.mark.parametrize("arguments", [(), ("--queries", 5, "--keys", 9, "--kv-heads", 4, "--checks", 2)])
def test_attention(arguments):
    printed = run("attention", *arguments)
    assert "flash_attn_back: f32[" in printed
    assert "largest difference" in printed


def test_custom_op():
    pytest.importorskip("numba")
    assert run("custom_op")


def test_digits():
    pytest.importorskip("sklearn")
    last = run("digits", "--steps", 150).splitlines()[-1]
    accuracy = float(last.partition("%")[0].rpartition(" ")[2])
    assert accuracy > 90, last


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(p.read_text() for p in sorted(EXAMPLES.glob("*.py"))))
    return path


def steps_in(log: Path) -> list[int]:
    with open(log) as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_train_gpt_leaves_a_model_a_log_a_picture_and_a_sample(text, tmp_path):
    out = tmp_path / "out"
    printed = run("train_gpt", *TINY, "--text", text, "--out", out, "--steps", 25, "--accumulate", 2)
    for expected in ("parameters", "optimizer state", "table of pairs", "table of triples", "this model", "a sample"):
        assert expected in printed
    assert gg.checkpoint.peek(out / "model.safetensors").step == 25
    assert steps_in(out / "log.csv") == list(range(1, 26))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("def ")

    printed = run("train_gpt", "--resume", "--out", out, "--steps", 30, "--sample", 5)
    assert "going on after step 25" in printed and "after 30 steps" in printed
    assert steps_in(out / "log.csv") == list(range(1, 31))


def test_train_gpt_stopped_by_ctrl_c_goes_on_to_the_same_model(text, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    arguments = [*TINY, "--text", text, "--steps", STEPS, "--evaluate-every", 0, "--seconds", 1e9]
    run("train_gpt", *arguments, "--out", whole)

    with subprocess.Popen(
        command("train_gpt", *arguments, "--out", stopped), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (stopped / "log.csv").exists() or len(steps_in(stopped / "log.csv")) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "--resume goes on from there" in errors
    at = gg.checkpoint.peek(stopped / "model.safetensors").step
    assert 5 <= at < STEPS

    printed = run(
        "train_gpt", "--resume", "--out", stopped, "--evaluate-every", 0, "--seconds", 1e9, "--sample", SIZES["sample"]
    )
    assert f"going on after step {at}" in printed
    for name in ("log.csv", "sample.txt"):
        first, second = ((folder / name).read_text().splitlines() for folder in (whole, stopped))
        assert [line.split(",")[:5] for line in first] == [line.split(",")[:5] for line in second]  # without seconds
    assert steps_in(stopped / "log.csv") == list(range(1, STEPS + 1))


def test_train_gpt_runs_without_the_c_module(text, tmp_path):
    """As it would be where there was no compiler."""
    without = (
        "import runpy, sys; sys.modules['ggrad._native'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    script, *arguments = command("train_gpt", *TINY, "--text", text, "--out", tmp_path, "--steps", 3)[2:]
    done = subprocess.run([sys.executable, "-P", "-c", without, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("NativeModuleWarning") == 1
    assert steps_in(tmp_path / "log.csv") == [1, 2, 3]
