"""The C runtime: threads, forks, faults, floating-point mode, and the choices it makes about the machine."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

_native = pytest.importorskip("ggrad._native", reason="the native module was not built")
ffi, lib = _native.ffi, _native.lib

pytestmark = pytest.mark.native


class Program:
    """Chains of additions, one for each size, interleaved: x, x + y, x + y + y, ..."""

    def __init__(self, sizes, length, seed=0):
        random = np.random.default_rng(seed)
        self.values = [[random.standard_normal(n, dtype=np.float32)] for n in sizes]
        self.y = [random.standard_normal(n, dtype=np.float32) for n in sizes]
        self.keep = []
        self.fault = ffi.new("gg_fault *")
        kernel = lib.gg_kernel_find(b"add")
        calls = []
        for _ in range(length):
            for chain, y in zip(self.values, self.y, strict=True):
                chain.append(np.full_like(y, np.nan))
                calls.append((kernel, [chain[-2], y], chain[-1]))
        self.add(calls)

    def add(self, calls):
        self.calls = ffi.new("gg_call[]", len(calls))
        for index, (kernel, sources, out) in enumerate(calls):
            src, dst = self.tensors(sources), self.tensors([out])
            call = self.calls[index]
            call.kernel, call.src, call.dst, call.fault, call.index = kernel, src, dst, self.fault, index
            call.n_src, call.n_dst = len(sources), 1
            self.keep += [src, dst, kernel]
        self.n = lib.gg_compile(self.calls, len(calls), ffi.NULL)
        self.steps = ffi.new("gg_step[]", self.n)
        assert lib.gg_compile(self.calls, len(calls), self.steps) == self.n

    def tensors(self, arrays):
        tensors = ffi.new("gg_tensor[]", len(arrays))
        for t, array in zip(tensors, arrays, strict=True):
            t.data, t.dtype, t.rank = ffi.from_buffer(array), lib.GG_F32, 1
            t.ne, t.nb = [1, 1, 1, array.size], [array.nbytes, array.nbytes, array.nbytes, 4]
        return tensors

    def run(self, threads):
        scratch = ffi.new("char[]", 64 * threads)
        self.fault.code = 0
        return lib.gg_run(self.steps, self.n, threads, scratch, 64, self.fault, ffi.NULL, self.n)

    def results(self):
        return [chain[-1].copy() for chain in self.values]

    def expected(self):
        for chain, y in zip(self.values, self.y, strict=True):
            x = chain[0]
            for _ in chain[1:]:
                x = x + y
            yield x


SIZES = (100_003, 7, 30_001, 1, 200_000)


def assert_right(program):
    for result, expected in zip(program.results(), program.expected(), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
def test_any_number_of_threads_gives_the_same_bits(threads):
    program = Program(SIZES, length=6)
    for _ in range(20):
        for chain in program.values:
            for value in chain[1:]:
                value.fill(np.nan)
        assert program.run(threads) == 0
        assert_right(program)


@pytest.mark.parametrize("threads", [-1, 0, 1000])
def test_odd_numbers_of_threads_are_taken_for_the_nearest_sensible(threads):
    program = Program(SIZES, length=2)
    scratch = ffi.new("char[]", 64 * 1000)
    assert lib.gg_run(program.steps, program.n, threads, scratch, 64, program.fault, ffi.NULL, program.n) == 0
    assert_right(program)


def test_nothing_to_run_is_fine():
    program = Program((), length=1)
    assert program.n == 0
    assert program.run(2) == 0


def test_several_python_threads_run_at_once():
    programs = [Program(SIZES, length=4, seed=seed) for seed in range(4)]
    codes = []

    def run_often(program):
        codes.extend(program.run(2) for _ in range(50))

    callers = [threading.Thread(target=run_often, args=(program,)) for program in programs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert codes == [0] * 200
    for program in programs:
        assert_right(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_runs_and_so_does_its_parent():
    program = Program(SIZES, length=4)
    program.run(3)
    for chain in program.values:
        chain[-1].fill(np.nan)
    child = os.fork()
    if child == 0:
        right = program.run(3) == 0 and all(map(np.array_equal, program.results(), program.expected()))
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    program.run(3)
    assert_right(program)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tasks", [1, 20])
def test_a_fault_ends_the_run_after_its_stage(threads, tasks):
    ran = []

    @ffi.callback("void(gg_call *, int, int64_t, int64_t, void *)")
    def run(call, stage, begin, end, scratch):
        ran.extend((call.index, i) for i in range(begin, end))
        if call.index == 1:
            call.fault.code, call.fault.node, call.fault.value = lib.GG_INDEX, call.index, 99

    @ffi.callback("int64_t(gg_call *, int)")
    def n_tasks(call, stage):
        return tasks

    kernel = ffi.new("gg_kernel *", {"stages": 1, "tasks": n_tasks, "run": run})
    program = Program((), length=0)
    nothing = np.zeros(1, np.float32)
    program.add([(kernel, [], nothing)] * 4)
    assert program.run(threads) == lib.GG_INDEX
    assert (program.fault.node, program.fault.value) == (1, 99)
    assert sorted(ran) == [(index, i) for index in (0, 1) for i in range(tasks)]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_steps_side_by_side_run_every_task_of_each_once(threads):
    ran = []

    @ffi.callback("void(gg_call *, int, int64_t, int64_t, void *)")
    def run(call, stage, begin, end, scratch):
        ran.extend((call.index, i) for i in range(begin, end))

    sizes = [1, 20, 3, 700, 1]
    n_tasks = ffi.callback("int64_t(gg_call *, int)", lambda call, stage: sizes[call.index])
    kernel = ffi.new("gg_kernel *", {"stages": 1, "tasks": n_tasks, "run": run})
    program = Program((), length=0)
    program.add([(kernel, [], np.zeros(1, np.float32))] * len(sizes))
    for first, together in ((0, 3), (3, 2)):
        for k in range(together):
            program.steps[first + k].together = together if k == 0 else 0
    assert program.run(threads) == 0
    assert sorted(ran) == [(i, k) for i, size in enumerate(sizes) for k in range(size)]
    half = sum(sizes[:3])
    assert {index for index, _ in ran[:half]} == {0, 1, 2}, "the second wave began before the first was complete"


def test_a_step_without_tasks_is_skipped():
    program = Program((), length=0)

    @ffi.callback("int64_t(gg_call *, int)")
    def n_tasks(call, stage):
        return [0, 3, 0][stage]

    kernel = ffi.new("gg_kernel *", {"stages": 3, "tasks": n_tasks})
    program.add([(kernel, [], np.zeros(1, np.float32))] * 2)
    assert [(step.stage, step.tasks) for step in program.steps] == [(1, 3), (1, 3)]


def test_work_and_scratch_are_none_where_a_kernel_names_none():
    call = ffi.new("gg_call *", {"kernel": ffi.new("gg_kernel *")})
    kernel = ffi.new("gg_kernel *")
    call.kernel = kernel
    assert (lib.gg_call_work(call), lib.gg_call_scratch(call)) == (0, 0)

    @ffi.callback("int64_t(gg_call *)")
    def many(call):
        return 1 << 40

    kernel.work = kernel.scratch = many
    assert (lib.gg_call_work(call), lib.gg_call_scratch(call)) == (1 << 40, 1 << 40)


class FloatMode:
    """MXCSR of this thread, through glibc's fenv_t, whose last four bytes it is."""

    FLUSH = 0x8040  # flush to zero, and denormals are zero

    def __init__(self):
        self.libm = ctypes.CDLL("libm.so.6")
        self.environment = (ctypes.c_uint32 * 8)()

    def get(self):
        self.libm.fegetenv(self.environment)
        return self.environment[7]

    def set(self, mxcsr):
        self.libm.fegetenv(self.environment)
        self.environment[7] = mxcsr
        self.libm.fesetenv(self.environment)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="knows glibc's fenv_t")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_denormals_survive_in_a_caller_that_flushes_them_and_the_mode_is_restored(threads):
    program = Program((200_000,), length=3)
    x, y = program.values[0][0], program.y[0]
    x.fill(1e-40)
    y.fill(1e-41)
    (expected,) = program.expected()
    assert (expected != 0).all()
    mode = FloatMode()
    before = mode.get()
    mode.set(before | FloatMode.FLUSH)
    try:
        program.run(threads)
        after = mode.get()
    finally:
        mode.set(before)
    assert after & FloatMode.FLUSH == FloatMode.FLUSH
    np.testing.assert_array_equal(program.results()[0], expected)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="knows glibc's fenv_t")
def test_importing_the_module_leaves_the_float_mode_alone():
    code = (
        "import ctypes; libm = ctypes.CDLL('libm.so.6'); e = (ctypes.c_uint32 * 8)();"
        "import numpy, ggrad._native; libm.fegetenv(e); print(e[7] & 0x8040)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def isa_for(*missing, cap=None):
    features = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"]
    has = " ".join(feature for feature in features if feature not in missing)
    return ffi.string(lib.gg_isa_for(has.encode(), ffi.NULL if cap is None else cap.encode())).decode()


def test_the_instruction_set_is_the_best_that_a_cpu_has_whole():
    assert isa_for() == "v4"
    for feature in ("avx512f", "avx512bw", "avx512dq", "avx512vl"):
        assert isa_for(feature) == "v3"
    for feature in ("avx2", "fma", "f16c"):
        assert isa_for(feature) == "base"


def test_a_cap_lowers_the_instruction_set_and_never_raises_it():
    assert [isa_for(cap=cap) for cap in ("base", "v3", "v4", "unknown", "")] == ["base", "v3", "v4", "v4", "v4"]
    assert [isa_for("avx512f", cap=cap) for cap in ("base", "v3", "v4")] == ["base", "v3", "v3"]
    assert isa_for("fma", cap="v4") == "base"


def test_every_instruction_set_of_this_cpu_runs(isa):
    assert ffi.string(lib.gg_isa()).decode() == isa
    program = Program(SIZES, length=2)
    program.run(2)
    assert_right(program)


def test_the_module_has_the_instruction_sets_of_the_table():
    table = (Path(__file__).parent.parent / "csrc" / "abi" / "isas.h").read_text()
    names = [ffi.string(lib.gg_isa_name(i)).decode() for i in range(3)]
    assert names == re.findall(r"X\((\w+), (?:any|x86_64), ", table)
    assert lib.gg_isa_name(3) == lib.gg_isa_name(-1) == ffi.NULL


def test_an_unknown_instruction_set_is_refused():
    before = ffi.string(lib.gg_isa())
    assert lib.gg_isa_select(b"v9") != 0
    assert ffi.string(lib.gg_isa()) == before


def test_an_unknown_kernel_is_null():
    assert lib.gg_kernel_find(b"no_such_kernel") == ffi.NULL


def test_the_environment_caps_the_instruction_set():
    code = "import ggrad._native as n; print(n.ffi.string(n.lib.gg_isa()).decode())"
    environment = {**os.environ, "GGRAD_ISA": "base"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "base"


# Files below the root of a fake system, the number of cpus, and the threads that follow.
CGROUPS = {
    "nothing known": ({}, 8, 8),
    "v2, no limit": ({"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/cpu.max": "max 100000\n"}, 8, 8),
    "v2, two and a half cpus": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 8, 3),
    "v2, limited far above": (
        {
            "proc/self/cgroup": "0::/a/b/c\n",
            "sys/fs/cgroup/a/b/c/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        8,
        2,
    ),
    "v2, inside a container": (
        {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        8,
        2,
    ),
    "v2, own root": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 8, 4),
    "v2, less than one cpu": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "10000 100000\n"}, 8, 1),
    "v2, more than there are": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "900000 100000\n"}, 4, 4),
    "v1": (
        {
            "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/job\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
        8,
        3,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "4:cpuacct,cpu:/job\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
        8,
        8,
    ),
    "v1, inside a container": (
        {
            "proc/self/cgroup": "4:cpu:/docker/0123\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "25000\n",
        },
        8,
        2,
    ),
    "v1, only other controllers": (
        {
            "proc/self/cgroup": "4:cpuacct:/job\n3:cpuset:/job\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        },
        8,
        8,
    ),
    "both, v1 holds the controller": (
        {
            "proc/self/cgroup": "2:cpu:/x\n0::/y\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
        },
        8,
        2,
    ),
    "nonsense": ({"proc/self/cgroup": "\n:\nx\n0:\n0::\n", "sys/fs/cgroup/cpu.max": "many\n"}, 8, 8),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_quota_of_a_cgroup_limits_the_threads(case, tmp_path):
    files, cpus, threads = CGROUPS[case]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert lib.gg_threads_for(cpus, str(tmp_path).encode()) == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs sched_getaffinity")
def test_the_default_is_no_more_than_the_cpus_this_process_may_use():
    assert 1 <= lib.gg_default_threads() <= len(os.sched_getaffinity(0))
