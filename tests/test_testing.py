"""The checks that users and our own tests rely on object to what is wrong, and to nothing else."""

import numpy as np
import pytest
from python_kernels import PythonKernel, temporary_ops

import ggrad as gg
from ggrad.core.errors import GgradError, GradientError, GradientMismatch, GraphError, KernelError, KernelMismatch

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _own_ops():
    with temporary_ops():
        yield


def twice(rule=2.0, kernel=2.0):
    @gg.op(layout="any")
    def twice(x):
        """2 * x, or so"""
        return x.spec

    twice.grad(lambda t, dout: (gg.scale(dout, factor=rule),))
    twice.reference(lambda x: 2 * x)

    def run(dst, src, begin, end):
        dst[...] = np.float32(kernel) * src[0]

    twice.in_python = PythonKernel(run)
    return twice


# -- gradients ----------------------------------------------------------------------------------------------


def test_right_rules_pass():
    gg.testing.check_gradients(twice(), rng.normal(size=(3, 4)))
    gg.testing.check_gradients(gg.mul, rng.normal(size=(3, 4)), rng.normal(size=4), directions=3)


def test_a_wrong_rule_is_named_with_both_numbers():
    with pytest.raises(GradientMismatch, match=r"twice\(x=input 0: f32\[3,4\]\): the gradient by input 0") as caught:
        gg.testing.check_gradients(twice(rule=2.001), rng.normal(size=(3, 4)))
    numbers = [float(word) for word in str(caught.value).replace(";", "").split() if word[-1].isdigit() and "." in word]
    slope, quotient = numbers[:2]
    assert slope / quotient == pytest.approx(2.001 / 2, rel=1e-6)
    assert isinstance(caught.value, (AssertionError, GgradError))


def test_the_wrong_rule_is_found_among_right_ones():
    wrong = twice(rule=2.001)
    x = gg.tensor(rng.normal(size=(3, 4)), name="weights", param=True)
    with pytest.raises(GradientMismatch, match=r"weights: .*alone, the rule of twice\(x=f32\[4,3\]\) fails"):
        gg.testing.check_gradients(lambda: gg.neg(wrong((x * 3.0).T)) + 1.0)


def test_a_rule_that_denies_a_dependence_is_found():
    op = twice()
    op.grad(lambda t, dout: (None,))
    with pytest.raises(GradientMismatch, match="no gradient at all"):
        gg.testing.check_gradients(op, rng.normal(size=5))


def test_a_rule_that_is_wrong_for_one_input_only_is_found():
    op = gg.mul
    rule = op._grad
    try:
        op.grad(lambda t, dout: (gg.mul(dout, t.src[1]), gg.mul(dout, gg.scale(t.src[0], factor=1.001))))
        with pytest.raises(GradientMismatch, match="the gradient by input 1: f32"):
            gg.testing.check_gradients(gg.mul, rng.normal(size=(3, 4)), rng.normal(size=(3, 4)))
    finally:
        op.grad(rule)


def test_a_rule_that_ignores_the_incoming_gradient_is_found():
    op = twice()
    op.grad(lambda t, dout: (gg.broadcast_to(gg.tensor(2.0), shape=dout.shape),))
    with pytest.raises(GradientMismatch):
        gg.testing.check_gradients(op, rng.normal(size=5))


def test_a_rule_that_needs_every_part_is_found():
    @gg.op(layout="any")
    def both(x):
        """x and -x"""
        return gg.Pack(plus=x.spec, minus=x.spec)

    both.reference(lambda x: (x, -x))
    both.grad(
        lambda t, dplus, dminus: (
            (dplus,) if dminus is None else (gg.sub(dplus, dminus),) if dplus is not None else (dminus,)
        )
    )
    with pytest.raises(GradientMismatch):  # only minus is used: its gradient is -dminus
        gg.testing.check_gradients(both, rng.normal(size=5))


def test_nan_is_no_agreement():
    with pytest.raises(GradientMismatch):
        gg.testing.check_gradients(lambda x: gg.div(x, gg.sub(x, x)), np.ones(3))


def test_there_must_be_something_to_check():
    with pytest.raises(GradientError, match="no parameter"):
        gg.testing.check_gradients(gg.neg, gg.tensor([1.0]))
    with pytest.raises(GradientError, match="all results are integers"):
        gg.testing.check_gradients(lambda: gg.cont(gg.tensor([1, 2])))
    with pytest.raises(GraphError, match="holds no value"):
        gg.testing.check_gradients(lambda: gg.neg(gg.tensor(shape=3, param=True)))


def test_integer_arguments_are_constants():
    gg.testing.check_gradients(lambda x, i: (gg.neg(x), gg.cont(i)), rng.normal(size=3), np.arange(3))


# -- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.native
def test_right_kernels_pass():
    gg.testing.check_kernel(twice(), rng.normal(size=(3, 4)))


@pytest.mark.native
def test_a_wrong_kernel_is_named_with_both_numbers():
    message = r"twice\(x=input 0: f32\[3\]\), 1 thread: element \(0,\) is 2.00099\d* .*says 2 "
    with pytest.raises(KernelMismatch, match=message):
        gg.testing.check_kernel(twice(kernel=2.001), np.ones(3))


@pytest.mark.native
def test_a_kernel_that_reads_what_nobody_wrote_is_found():
    op = twice()

    def run(dst, src, begin, end):
        dst += 2 * src[0]

    op.in_python = PythonKernel(run)
    with pytest.raises(KernelMismatch, match="is nan"):
        gg.testing.check_kernel(op, np.ones(3))


@pytest.mark.native
def test_a_kernel_that_leaves_an_element_out_is_found():
    op = twice()

    def run(dst, src, begin, end):
        dst[:-1] = 2 * src[0][:-1]

    op.in_python = PythonKernel(run)
    with pytest.raises(KernelMismatch, match=r"element \(2,\) is nan"):
        gg.testing.check_kernel(op, np.ones(3))


@pytest.mark.native
def test_bits_that_depend_on_the_threads_are_found():
    op = twice()
    runs = []

    def run(dst, src, begin, end):
        runs.append(begin)
        dst[...] = 2 * src[0] * np.float32(1 + 2e-7 * (len(runs) - 1))  # well within the tolerance

    op.in_python = PythonKernel(run)
    with pytest.raises(KernelMismatch, match="2 threads: other bits than with 1"):
        gg.testing.check_kernel(op, np.ones(3))


@pytest.mark.native
def test_a_wrong_kernel_in_the_gradients_is_found():
    wrong = twice(kernel=2.001)
    outer = gg.op(layout="any")(_negative)
    outer.grad(lambda t, dout: (gg.scale(wrong(dout), factor=-0.5),))
    outer.reference(lambda x: -x)
    outer.in_python = PythonKernel(lambda dst, src, begin, end: np.negative(src[0], out=dst))
    gg.testing.check_kernel(outer, np.ones(3))
    with pytest.raises(KernelMismatch):
        gg.testing.check_kernel(outer, np.ones(3), backward=True)


def _negative(x):
    """-x"""
    return x.spec


@pytest.mark.native
def test_leaves_that_are_updated_are_compared_and_restored():
    total = gg.tensor(np.ones(4), role="accumulator")
    gg.testing.check_kernel(lambda x: gg.accumulate(total, x), np.ones(4))
    np.testing.assert_array_equal(total.numpy(), np.ones(4))


def test_without_the_native_module_there_is_no_kernel_to_check(monkeypatch):
    monkeypatch.setattr(gg.core.native, "lib", None)
    with pytest.raises(KernelError, match="without its C module"):
        gg.testing.check_kernel(gg.neg, np.ones(3))
