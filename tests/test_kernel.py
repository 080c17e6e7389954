"""Kernels written in Python: what their bodies see, what they are refused, and the code kept on disk."""

import enum
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from python_kernels import temporary_ops

import ggrad as gg
from ggrad.core import errors
from ggrad.core.errors import KernelError
from ggrad.core.native import ffi
from ggrad.core.op import op
from ggrad.jit import objects
from ggrad.testing import check_gradients, check_kernel

pytestmark = pytest.mark.native
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A folder of this module's own, so that tests never run what an earlier session compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def forgotten():
    with temporary_ops():
        yield


def run(*results, **options):
    gg.Graph().build_forward_expand(*results).compute(**options)
    return [t.numpy() for t in results]


def build(t):
    gg.Graph().build_forward_expand(t).plan()


# -- what a body sees ---------------------------------------------------------------------------------------


def test_a_row_at_a_time_and_attributes_by_name():
    @op
    def scaled(x, *, factor: float, bias: float = 0.0):
        return x.spec

    scaled.reference(lambda x, *, factor, bias: factor * x + bias)

    @scaled.kernel
    def _(out, x, *, factor, bias):
        for i in range(out.size):
            out[i] = factor * x[i] + bias

    for shape in ((4, 3, 5, 33), (7,), (), (0, 3), (3, 0), (1000, 40)):
        check_kernel(lambda x: scaled(x, factor=2.5, bias=-1.0), RNG.standard_normal(shape))
    x = gg.tensor(RNG.standard_normal((6, 8)))
    check_kernel(lambda: scaled(x[::-2, ::-1].T, factor=2.5))


def test_smaller_inputs_are_shared_as_by_broadcasting():
    @op
    def gated(x, gate, row, left=None):
        return x.spec

    @gated.kernel
    def _(out, x, gate, row, left):
        for i in range(out.size):
            out[i] = x[i] * gate[0] + row[i] + left.size

    @gated.reference
    def _(x, gate, row, left):
        return x * np.repeat(gate, x.shape[1] // gate.shape[1], 1) + row + (0 if left is None else left.shape[-1])

    x, gate, row = RNG.standard_normal((2, 6, 3, 5)), RNG.standard_normal((2, 2, 3, 1)), RNG.standard_normal(5)
    check_kernel(gated, x, gate, row)
    check_kernel(gated, x, gate, row, np.ones((3, 7)))


def linear_scan_shape(x, a, b, c):
    batch, heads, steps, n = a.shape
    return gg.Pack(y=gg.Spec((batch, heads, steps)), h=gg.Spec((batch, heads, n)))


def test_a_recurrence_over_a_block_of_two_axes_with_heads_that_share_inputs():
    @op
    def linear_scan(x, a, b, c):
        """h = a[t] h + b[t] x[t];  y[t] = c[t] . h"""
        return linear_scan_shape(x, a, b, c)

    @linear_scan.kernel(dims={"a": 2, "b": 2, "c": 2}, fastmath={"contract", "reassoc"})
    def _(y, h, x, a, b, c):
        steps, n = a.shape
        h[:] = 0.0
        for t in range(steps):
            total = 0.0
            for i in range(n):
                h[i] = a[t, i] * h[i] + b[t, i] * x[t]
                total += c[t, i] * h[i]
            y[t] = total

    @linear_scan.reference
    def _(x, a, b, c):
        b, c = (np.repeat(m, a.shape[1] // m.shape[1], 1) for m in (b, c))
        h, y = np.zeros(a[:, :, 0].shape), np.zeros(x.shape)
        for t in range(x.shape[-1]):
            h = a[:, :, t] * h + b[:, :, t] * x[:, :, t, None]
            y[:, :, t] = (c[:, :, t] * h).sum(-1)
        return y, h

    inputs = [RNG.uniform(-1, 1, shape) for shape in ((2, 6, 17), (2, 6, 17, 5), (2, 2, 17, 5), (1, 1, 17, 5))]
    check_kernel(linear_scan, *inputs)


class Mode(enum.IntEnum):
    ADD = 3
    MULTIPLY = 7


def test_integers_and_every_kind_of_attribute():
    @op
    def mixed(x, ids: gg.Int, *, times: int, mode: Mode, twice: bool, window: tuple[int, ...], dtype: object = None):
        return gg.Spec(x.shape, gg.I32)

    @mixed.kernel
    def _(out, x, ids, *, twice, mode, times, window):
        for i in range(out.size):
            value = ids[i] + times if mode == 3 else ids[i] * times
            if twice:
                value *= 2
            out[i] = value + window[0] - window[1] + np.int32(x[i])

    @mixed.reference
    def _(x, ids, *, times, mode, twice, window, dtype):
        value = (ids + times if mode is Mode.ADD else ids * times) * (2 if twice else 1)
        return value + window[0] - window[1] + np.trunc(x)

    for mode in ("add", "multiply"):
        for twice in (False, True):
            attrs = {"times": -5, "mode": mode, "twice": twice, "window": (9, 4)}
            x, ids = np.array([[1.0, 2.0, -3.0]]), np.array([[4, 5, 6]])
            check_kernel(lambda x, ids, attrs=attrs: mixed(x, ids, **attrs), x, ids)


def test_any_layout_is_read_where_it_lies():
    @op(layout="any")
    def doubled(x):
        return x.spec

    doubled.reference(lambda x: 2 * x)

    @doubled.kernel(dims=2)
    def _(out, x):
        for i in range(out.shape[0]):
            for j in range(out.shape[1]):
                out[i, j] = x[i, j] + x[i, j]

    x = gg.tensor(RNG.standard_normal((2, 6, 8)))
    for view in (x, x.T, x[:, ::-1, ::3], gg.broadcast_to(x[:, :1], shape=(2, 4, 8))):
        check_kernel(lambda view=view: doubled(view))


def test_stages_share_work_and_threads_have_scratch():
    @op
    def centred(x):
        """x - mean(x), with partial sums of 4 rows each."""
        return x.spec

    centred.reference(lambda x: x - x.mean())

    @centred.kernel(
        dims=2,
        stages=2,
        tasks=lambda t, stage: -(-t.shape[0] // 4),
        work=lambda t: -(-t.shape[0] // 4),
        scratch=lambda t: t.shape[1],
    )
    def _(out, x, *, stage, task, tasks, work, scratch):
        first, last = 4 * task, min(4 * task + 4, out.shape[0])
        if stage == 0:
            scratch[:] = 0.0
            for i in range(first, last):
                for j in range(scratch.size):
                    scratch[j] += x[i, j]
            work[task] = 0.0
            for j in range(scratch.size):
                work[task] += scratch[j]
            return
        total = 0.0
        for i in range(tasks):
            total += work[i]
        for i in range(first, last):
            for j in range(out.shape[1]):
                out[i, j] = x[i, j] - total / np.float32(x.size)

    check_kernel(centred, RNG.standard_normal((18, 7)))


def test_leaves_are_updated_in_place():
    @op
    def decay(total, rate):
        """total *= rate"""
        return gg.Update(total)

    decay.reference(lambda total, rate: (total * rate,))

    @decay.kernel
    def _(out, total, rate):
        for i in range(out.size):
            out[i] = total[i] * rate[0]

    total = gg.tensor(np.ones((3, 5)))
    check_kernel(lambda: decay(total, gg.tensor([0.5])))
    run(decay(total, gg.tensor([0.5])))
    assert np.array_equal(total.numpy(), np.full((3, 5), 0.5, np.float32))


HALF = 0.5


def cube(x):
    return x * x * x


def test_functions_constants_and_closures_are_compiled_along_in_single_precision():
    thirds = 1.0 / 3.0

    def smooth(x):
        return max(min(cube(x), thirds), -thirds) + math.tanh(x) * HALF

    @op
    def shaped(x):
        return x.spec

    shaped.reference(lambda x: np.clip(x**3, -1 / 3, 1 / 3) + np.tanh(x) / 2)

    @shaped.kernel
    def _(out, x):
        for i in range(out.size):
            out[i] = smooth(x[i]) * 1.5 - 0.5 * smooth(x[i])

    check_kernel(shaped, RNG.standard_normal((3, 33)))
    assert b"cvtss2sd" not in disassembly(shaped), "something is computed in double precision"


def disassembly(made) -> bytes:
    """The kernel's LLVM assembly."""
    from ggrad.jit import lowering

    arrays = made.in_python._arrays_of(made(np.ones((2, 3))))
    kept = []
    original = lowering._called
    try:
        lowering._called = lambda text: kept.append(text) or original(text)
        lowering.compile_kernel(made.in_python, arrays)
    finally:
        lowering._called = original
    return kept[0].replace("fpext float", "cvtss2sd").encode()


def test_a_users_op_trains_with_its_own_gradient():
    @op
    def softened(x, *, width: float):
        """x / (1 + |x| / width)"""
        return x.spec

    @softened.kernel
    def _(out, x, *, width):
        for i in range(out.size):
            out[i] = x[i] / (1.0 + abs(x[i]) / width)

    softened.reference(lambda x, *, width: x / (1 + np.abs(x) / width))

    @op(inplace=("dout",))
    def softened_back(dout, x, *, width: float):
        return x.spec

    @softened_back.kernel
    def _(dx, dout, x, *, width):
        for i in range(dx.size):
            slope = 1.0 + abs(x[i]) / width
            dx[i] = dout[i] / (slope * slope)

    softened_back.reference(lambda dout, x, *, width: dout / (1 + np.abs(x) / width) ** 2)

    @softened.grad
    def _(t, dout):
        return (softened_back(dout, t.src[0], **t.attrs),)

    x = RNG.standard_normal((5, 17))
    check_gradients(lambda x: softened(x, width=2.0), x)
    check_kernel(lambda x: softened(x, width=2.0), x, backward=True)


# -- what is refused ----------------------------------------------------------------------------------------


def refused(body, message, **options):
    @op
    def bad(x):
        return x.spec

    bad.kernel(body, **options)
    with pytest.raises(KernelError, match=message):
        build(bad(np.ones((2, 3))))


def test_bodies_that_may_raise_or_allocate_are_refused_with_the_reason():
    def raises(out, x):
        for i in range(out.size):
            if x[i] < 0:
                raise ValueError
            out[i] = x[i]

    def checks(out, x):
        assert x.size > 0
        out[0] = x[0]

    def allocates(out, x):
        scaled = np.empty(x.size, np.float32)
        for i in range(out.size):
            scaled[i] = x[i]
        for i in range(out.size):
            out[i] = scaled[i]

    def squares(out, x):
        out[0] = x[0] ** 2

    def writes_input(out, x):
        x[0] = 1.0

    def no_such_name(out, x):
        out[0] = undefined_name(x[0])  # noqa: F821

    refused(raises, "must not raise; line [0-9]+ of .*test_kernel.py")
    refused(checks, "must not raise")
    refused(allocates, "must not allocate")
    refused(squares, "must not raise, and something in this one may")
    refused(writes_input, "numba cannot compile the kernel: .*readonly")
    refused(no_such_name, "numba cannot compile the kernel: .*undefined_name")


def test_declarations_that_cannot_work_are_refused_at_once():
    @op
    def some(x, *, factor: float, dtype: object = None, work: int = 0):
        return x.spec

    for body, message, options in [
        (lambda x: None, r"its outputs, then x; not \(x\)", {}),
        (lambda out, y: None, r"inputs are called \['y'\], the op's \['x'\]", {}),
        (lambda out, x, *, power: None, "power is no attribute; a kernel may ask for factor, scratch, stage", {}),
        (lambda out, x, *, dtype: None, "dtype is a .*, which kernels cannot see", {}),
        (lambda out, x, *, work: None, "cannot have an attribute called work", {}),
        (lambda out, x, *, task: None, "give @some.kernel the option tasks", {}),
        (lambda out, x, *, scratch: None, "give @some.kernel the option scratch", {}),
        (lambda out, x: None, "dims of out is 5", {"dims": 5}),
        (lambda out, x: None, "dims of y is 2", {"dims": {"y": 2}}),
    ]:
        with pytest.raises(KernelError, match=message):
            some.kernel(body, **options)

    @op
    def many(*xs):
        return xs[0].spec

    with pytest.raises(KernelError, match="any number of inputs"):
        many.kernel(lambda out, xs: None)


@pytest.mark.parametrize("dtype", [gg.F16, gg.BF16])
def test_halves_come_as_copies_in_f32(dtype):
    @op(layout="any")
    def doubled(x: gg.Any4):
        return x.spec

    @doubled.kernel
    def _(out, x):
        for i in range(out.size):
            out[i] = x[i] + x[i]

    doubled.reference(lambda x: x + x)
    out = doubled(gg.tensor(np.arange(6.0).reshape(2, 3), dtype=dtype))
    assert out.dtype is gg.F32
    gg.testing.check_kernel(lambda: out)


def test_nodes_that_do_not_fit_the_declaration_are_refused():
    @op(layout="any")
    def picked(x: gg.Half, other):
        return gg.Spec(x.shape)

    @picked.kernel
    def _(out, x, other):
        out[0] = x[0]

    @op(layout="any")
    def halved(x):
        return gg.Spec(x.shape, gg.F16)

    @halved.kernel
    def _(out, x):
        out[0] = x[0]

    with pytest.raises(KernelError, match="out is f16, and kernels in Python take and give f32 and i32"):
        build(halved(np.ones((2, 3))))
    with pytest.raises(KernelError, match=r"other=f32\[3,3\] has \(1, 1, 3\) blocks of 1 axes.*shared by equal groups"):
        build(picked(np.ones((2, 3)), np.ones((3, 3))))

    @op
    def halved(x):
        return gg.Pack(a=gg.Spec(x.shape), b=gg.Spec(x.shape[1:]))

    @halved.kernel
    def _(a, b, x):
        a[0] = x[0]

    with pytest.raises(KernelError, match="an output has a block for each"):
        build(halved(np.ones((2, 3)))[0])


# -- the code on disk ---------------------------------------------------------------------------------------

PROGRAM = '''
import sys, numpy as np, ggrad as gg
from ggrad.core.op import op

def helper(x):
    return x * FACTOR

FACTOR = 2.0

@op
def helped(x):
    return x.spec

@helped.kernel
def _(out, x):
    for i in range(out.size):
        out[i] = helper(x[i])

y = helped(np.ones((3, 5)))
gg.Graph().build_forward_expand(y).compute()
print(float(y.numpy()[2, 4]), "numba" in sys.modules)
'''  # fmt: skip


def output_of(program: str, folder: Path, cache: Path, **environment: str) -> str:
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "GGRAD_CACHE": str(cache), **environment}
    command = [sys.executable, "-P", "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numba_is_imported_only_where_nothing_compiled_is_on_disk(tmp_path):
    cache = tmp_path / "cache"
    assert output_of(PROGRAM, tmp_path, cache) == "2.0 True"
    assert output_of(PROGRAM, tmp_path, cache) == "2.0 False"
    changed = PROGRAM.replace("FACTOR = 2.0", "FACTOR = 3.0")
    assert output_of(changed, tmp_path, cache) == "3.0 True"
    [folder] = cache.iterdir()
    [*files] = folder.iterdir()
    assert len(files) == 2 and all(f.suffix == ".o" for f in files)
    for f in files:  # what was cut short is compiled again
        f.write_bytes(f.read_bytes()[:-100])
    assert output_of(changed, tmp_path, cache) == "3.0 True"
    assert output_of(changed, tmp_path, cache) == "3.0 False"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    assert output_of(PROGRAM, tmp_path, tmp_path / "file" / "below") == "2.0 True"


def test_only_files_of_ones_own_in_a_folder_of_ones_own_are_loaded(tmp_path):
    [first, *_] = [line for line in PROGRAM.splitlines() if line.startswith("FACTOR")]
    evil = PROGRAM.replace(first, "FACTOR = 100.0")
    assert output_of(PROGRAM, tmp_path, tmp_path / "good") == "2.0 True"
    assert output_of(evil, tmp_path, tmp_path / "evil") == "100.0 True"
    [folder] = (tmp_path / "good").iterdir()
    [file] = folder.iterdir()
    [planted] = (tmp_path / "evil").rglob("*.o")
    assert folder.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600

    def planted_is_run() -> bool:
        return output_of(PROGRAM, tmp_path, tmp_path / "good").startswith("100")

    file.write_bytes(planted.read_bytes())
    assert planted_is_run()  # so the attack would work
    file.chmod(0o622)
    assert not planted_is_run()  # others could have written it
    file.unlink()
    file.symlink_to(planted)
    assert not planted_is_run() and not file.is_symlink()
    file.write_bytes(planted.read_bytes())
    folder.chmod(0o777)
    assert not planted_is_run()  # others could have put it there
    folder.chmod(0o700)
    if os.geteuid() == 0:  # only root can give files away
        for given in (file, folder):
            file.write_bytes(planted.read_bytes())
            os.chown(given, 65534, -1)
            assert not planted_is_run(), given
            os.chown(given, 0, -1)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert not planted_is_run()


def test_an_unsafe_folder_is_warned_of_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GGRAD_CACHE", str(tmp_path))
    own = objects._own_folder()
    own.mkdir(mode=0o755)
    with pytest.warns(
        errors.CacheWarning, match="must be of user .* and mode 0700, and is of user .* and mode 0755"
    ) as w:
        for _ in range(3):
            objects._to_disk("key", "name", b"code")
            assert objects._from_disk("key") is None
    assert len(w) == 1 and not list(own.iterdir())
    own.chmod(0o700)
    objects._to_disk("key", "name", b"code")
    assert objects._from_disk("key") == ("name", b"code")


def test_a_full_disk_leaves_nothing_in_the_cache(tmp_path):
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + PROGRAM
    )
    for _ in range(2):
        assert output_of(limited, tmp_path, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == "2.0 True"
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_the_folder_is_the_users_cache_unless_said_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("GGRAD_CACHE", str(tmp_path))
    assert objects.folder() == tmp_path
    monkeypatch.delenv("GGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert objects.folder() == tmp_path / "xdg" / "ggrad"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert objects.folder() == Path.home() / ".cache" / "ggrad"


def test_structs_are_laid_out_as_the_header_says():
    from llvmlite import binding

    from ggrad.jit import lowering

    machine = binding.Target.from_default_triple().create_target_machine()
    for struct, ours in (
        ("gg_tensor", lowering.TENSOR),
        ("gg_fitted_kernel", lowering.KERNEL),
        ("gg_call", lowering.CALL),
    ):
        assert ours.get_abi_size(machine.target_data) == ffi.sizeof(struct)
    names = list(dict(ffi.typeof("gg_call").fields))
    assert [names[i] for i in (lowering.CALL_KERNEL, lowering.SRC, lowering.DST, lowering.ATTRS, lowering.WORK)] == [
        "kernel", "src", "dst", "attrs", "work",
    ]  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_kernel_is_compiled_can_compile():
    """Whoever held the lock does not exist in the child."""
    held, done = threading.Event(), threading.Event()

    def compiles():
        with objects._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=compiles)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if objects._lock.acquire(timeout=5) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()
