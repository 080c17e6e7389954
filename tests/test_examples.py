"""Every example runs, in a process of its own, and leaves what it says."""

import csv
import signal
import subprocess
import sys
import textwrap
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
    tested = {
        "quickstart",
        "attention",
        "attention_backward",
        "check_kernels",
        "custom_op",
        "digits",
        "finetune",
        "kda_lm",
        "lora",
        "sparse_mla",
        "train_gpt",
    }
    assert {p.stem for p in EXAMPLES.glob("*.py")} == tested


def test_quickstart():
    printed = run("quickstart")
    assert "# gradient of w" in printed and "mul_mat(w, x)" in printed
    loss = float(printed.rpartition("loss ")[2].split(",")[0])
    assert loss < 1e-6


def test_check_kernels():
    pytest.importorskip("torch")
    printed = run("check_kernels", "--only", "flash", "--brief")
    assert printed.startswith("== torch, flash, f32: ") and "wrong: NaN in hidden keys: out: NaN" in printed
    assert run("check_kernels", "--only", "nothing").strip().startswith("there is nothing to try")


def test_finetune(tmp_path):
    for package in ("gguf", "tokenizers", "jinja2"):
        pytest.importorskip(package)
    import tiny_models

    from ggrad.models.chat import CHATML

    tiny_models.transformer(tmp_path / "tiny.gguf", "llama", template=CHATML)
    printed = run("finetune", "--model", tmp_path / "tiny.gguf", "--folder", tmp_path / "run", "--epochs", 0.05)
    assert "60 examples" in printed and "a sample after" in printed
    assert (tmp_path / "run" / "keeper.gguf").exists()


@pytest.mark.parametrize("arguments", [(), ("--queries", 5, "--keys", 9, "--kv-heads", 4, "--checks", 2)])
def test_attention(arguments):
    printed = run("attention", *arguments)
    assert "flash_attn_back: f32[" in printed
    assert "largest difference" in printed


SMALL = ("--batch", 2, "--nhead-q", 4, "--ratios", 1, 2, 4, "--seqlen", 17, "--hdim", 8)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--mask", "top-left", "--softcap", 2, "--seqlen-k", 21, "--hdim-v", 5, "--deterministic"),
        ("--mask", "bottom-right", "--seqlen-k", 9, "--benchmark"),
        ("--mask", "window:3,2", "--dropout", 0.3, "--bias"),
        ("--mask", "prefix:2", "--sinks"),
    ],
)
def test_attention_backward(arguments):
    printed = run("attention_backward", *SMALL, *arguments)
    assert "all configurations pass: 3" in printed
    assert printed.count("the same bits on 1, 2, 3, 7 threads") == 3
    assert printed.count("GFLOP/s") == 3 * ("--benchmark" in arguments)
    rows = [line.split() for line in printed.splitlines() if line.startswith("  d")]
    more = ["dmask"] * ("--bias" in arguments) + ["dsinks"] * ("--sinks" in arguments)
    assert [row[0] for row in rows] == ["dq", "dk", "dv", *more] * 3
    assert all(float(cell) < 1e-5 for row in rows for cell in row[-3:])


def test_attention_backward_sweeps():
    printed = run("attention_backward", *SMALL[:7], "--seqlen", 5, "--hdim", 8, "--sweep", "nhead")
    assert "all configurations pass: 11" in printed  # ratios 1, 2 and 4, where they divide 1 to 32 heads


@pytest.mark.parametrize(
    ("mistake", "sign"),
    [
        ("gg.flash_attn_ext = lambda q, k, v, *a, **o: ext(q, k * 1.0001, v, *a, **o)", "dk "),
        ("gg.flash_attn_ext = lambda q, k, v, *a, **o: ext(q, k, v, *a, **o | {'causal': 'top-left'})", "lse "),
        ("gg.repeat = lambda x, shape: repeat(x * 1.0001, shape=shape)", "out "),
        ("gg.testing.attention_reference = lambda *a, **o: reference(*a, **o, scale=0.3)", "dq "),
        (
            "gg.Graph.compute = lambda graph, threads=None: compute(graph, threads=threads, spoil=threads == 3)",
            "3 threads",
        ),
    ],
)
def test_attention_backward_ends_with_1_when_something_is_wrong(mistake, sign):
    code = f"""
        import runpy, sys
        import numpy as np
        import ggrad as gg
        ext, repeat, reference, run = gg.flash_attn_ext, gg.repeat, gg.testing.attention_reference, gg.Graph.compute
        def compute(graph, threads, spoil):
            run(graph, threads=threads)
            if spoil:
                bits = graph.grad(graph.params[0]).numpy().view(np.int32)
                bits.flags.writeable = True
                bits ^= 1
        {mistake}
        runpy.run_path(sys.argv.pop(1), run_name="__main__")
    """
    script, *arguments = command("attention_backward", *SMALL)[2:]
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), script, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "3 of 3 configurations FAILED" in done.stdout
    assert any(sign in line for line in done.stdout.splitlines() if "WRONG" in line or "other bits" in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ratios", 3), "--ratios 3: it does not divide the 16 query heads"),
        (("--mask", "diagonal"), "--mask diagonal: it must be none, top-left, bottom-right, window:LEFT,RIGHT"),
        (("--mask", "window:3"), "--mask window:3: it must be"),
        (("--dropout", 1), "1 is no number from 0 up to, and not including, 1"),
        (("--hdim", 0), "0 is no whole number of at least 1"),
        (("--softcap", -1), "-1 is no number of at least 0"),
    ],
)
def test_attention_backward_says_what_is_wrong_with_arguments(arguments, message):
    done = subprocess.run(command("attention_backward", *arguments), capture_output=True, text=True)
    assert done.returncode == 2 and message in " ".join(done.stderr.split()), done.stderr


def test_custom_op():
    pytest.importorskip("numba")
    assert run("custom_op")


def test_digits():
    pytest.importorskip("sklearn")
    last = run("digits", "--steps", 150).splitlines()[-1]
    accuracy = float(last.partition("%")[0].rpartition(" ")[2])
    assert accuracy > 90, last


@pytest.mark.parametrize("arguments", [(), ("--window", 5, "--ratio", 3, "--choice", 3)])
def test_sparse_mla_recalls_what_is_out_of_the_window_and_only_with_compressed_rows(arguments):
    printed = run("sparse_mla", "--length", 48, "--batch", 48, "--steps", 200, *arguments)
    assert printed.endswith("Solved with compressed rows, and not without.\n")


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


def test_lora_tunes_a_trained_model_to_other_text(text, tmp_path):
    out, letters = tmp_path / "out", tmp_path / "letters.txt"
    letters.write_text("".join(chr(ord("a") + i * i % 26) for i in range(3000)))
    run("train_gpt", *TINY, "--width", 32, "--hidden", 32, "--text", text, "--out", out, "--steps", 25)
    printed = run("lora", "--model", out, "--text", letters, "--dtype", "q4_0", "--steps", 150, "--sample", 20)
    trained, quantized, tuned = (float(line.split()[-1]) for line in printed.splitlines() if line.startswith("  "))
    assert abs(quantized - trained) < 0.5 and tuned < quantized - 1
    assert gg.checkpoint.peek(out / "adapters.safetensors").step == 150


def test_lora_says_where_a_model_comes_from(tmp_path):
    done = subprocess.run(command("lora", "--model", tmp_path), capture_output=True, text=True)
    assert done.returncode == 1 and "train_gpt.py --out" in done.stderr


def test_kda_lm_writes_token_by_token_what_it_trained_in_chunks(text, tmp_path):
    out = tmp_path / "out"
    printed = run("kda_lm", *TINY, "--text", text, "--out", out, "--steps", 150, "--context", 70)
    off = float(printed.partition("those in chunks by ")[2].partition(" of")[0])
    assert off < 1e-5  # some hundreds of roundings, of a model of a few layers
    losses = [float(line.split()[-1]) for line in printed.splitlines() if "this model" in line]
    assert len(losses) == 1 and losses[0] < 4.5  # a uniform guess costs 5.5
    assert (out / "sample.txt").read_text().startswith("def ")


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
