"""An op of one's own: shape rule, gradient, reference, and kernels in Python that run on all threads.

python custom_op.py
"""

import numpy as np

import ggrad as gg


@gg.op
def softsign(x, *, sharpness: float = 1.0):
    """x / (1 + sharpness |x|)"""
    return x.spec  # the result: as large as x


@softsign.reference
def _(x, *, sharpness):  # what it means, in NumPy
    return x / (1 + sharpness * np.abs(x))


@softsign.kernel
def _(out, x, *, sharpness):  # one row at a time, compiled when a graph first needs it
    for i in range(out.size):
        out[i] = x[i] / (1.0 + sharpness * abs(x[i]))


@softsign.grad
def _(t, dout):  # the gradients are nodes too
    return (softsign_back(dout, t.src[0], **t.attrs),)


@gg.op(inplace=("dout",))
def softsign_back(dout, x, *, sharpness: float = 1.0):
    """dout / (1 + sharpness |x|)^2; its kernel may write over dout"""
    return x.spec


@softsign_back.reference
def _(dout, x, *, sharpness):
    return dout / (1 + sharpness * np.abs(x)) ** 2


@softsign_back.kernel
def _(dx, dout, x, *, sharpness):
    for i in range(dx.size):
        s = 1.0 + sharpness * abs(x[i])
        dx[i] = dout[i] / (s * s)


def main() -> None:
    rng = np.random.default_rng(0)

    # Is the gradient the derivative, and does the kernel do what the reference says, on any number of threads?
    points = rng.standard_normal((7, 33))
    gg.testing.check_gradients(softsign, points)
    gg.testing.check_kernel(lambda x: softsign(x, sharpness=3.0), points, backward=True)
    print("softsign: gradient and kernel are right")

    # Then it trains like any other.
    x = gg.tensor(rng.standard_normal((256, 4)), name="x")
    w1 = gg.tensor(rng.standard_normal((32, 4)) / 2, name="w1", param=True)
    w2 = gg.tensor(rng.standard_normal((1, 32)) / 6, name="w2", param=True)
    y = gg.tensor(np.sin(x.numpy().sum(axis=1, keepdims=True)), name="y")
    error = gg.mul_mat(w2, softsign(gg.mul_mat(w1, x), sharpness=0.5)) - y
    loss = gg.sum(error * error) * (1 / 256)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    for step in range(1001):
        graph.compute()
        for w in (w1, w2):
            w.set(w.numpy() - 0.1 * graph.grad(w).numpy())
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
