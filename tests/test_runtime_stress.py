"""The C runtime alone, built with random delays at each step of publishing and claiming, under sanitizers too.

What is checked stands in stress_runtime.c.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What the stress program is built with, and its arguments: threads, runs, callers, forked children.
# A thread sanitizer cannot follow forks, and an address sanitizer's allocator may hang in a child.
STRESS = {
    "delays": ([], "7 800 1 10"),
    "many threads": ([], "64 100 1 3"),
    "several callers": ([], "5 500 3 10"),
    "condition variable": (["-DGG_NO_FUTEX"], "7 500 1 5"),
    "thread sanitizer": (["-fsanitize=thread"], "5 400 2 0"),
    "address sanitizer": (["-fsanitize=address,undefined", "-fno-sanitize-recover"], "5 500 2 0"),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", STRESS)
def test_random_programs_run_right_under_delays(name, tmp_path):
    flags, arguments = STRESS[name]
    sources = [str(ROOT / "csrc" / "runtime" / "runtime.c"), str(ROOT / "tests" / "stress_runtime.c")]
    program = str(tmp_path / "stress")
    always = ["-std=gnu11", "-g", "-O2", "-pthread", "-DGG_STRESS", f"-I{ROOT / 'csrc'}"]
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    built = subprocess.run(
        ["cc", *always, *flags, *sources, "-o", program], capture_output=True, text=True, env=environment
    )
    if built.returncode != 0 and "sanitizer" in name:
        pytest.skip(f"this compiler has no {name}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, *arguments.split()], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
