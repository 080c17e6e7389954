"""Convolutions: strides, paddings and dilations, unequal along the axes; one channel and several; edges of tiles."""

import ggrad as gg

SHAPES = {  # N, IC, OC, image, kernel, then stride, padding, dilation
    "2d": (2, 3, 4, (1, 7, 6), (1, 3, 3), {}),
    "stride, padding and dilation that differ": (
        2, 2, 3, (1, 9, 8), (1, 3, 2), dict(stride=(1, 2, 3), padding=(0, 2, 1), dilation=(1, 2, 1)),
    ),
    "three axes": (2, 2, 3, (4, 5, 6), (2, 3, 2), dict(stride=(2, 1, 1), padding=(1, 1, 0), dilation=(1, 2, 2))),
    "one axis": (3, 2, 5, (1, 1, 19), (1, 1, 5), dict(stride=(1, 1, 2), padding=(0, 0, 4))),
    "one by one": (1, 5, 7, (1, 3, 4), (1, 1, 1), {}),
    "a kernel as large as the image": (2, 3, 2, (1, 4, 3), (1, 4, 3), {}),
    "padding wider than the kernel": (1, 1, 1, (1, 2, 2), (1, 2, 2), dict(padding=(0, 3, 3))),
    "many positions and lines": (1, 45, 13, (1, 17, 19), (1, 3, 3), dict(padding=(0, 1, 1))),
    "rows of several vectors": (2, 2, 3, (1, 5, 71), (1, 3, 3), dict(padding=(0, 1, 1))),
    "every other one of several vectors": (1, 2, 3, (1, 9, 71), (1, 3, 3), dict(stride=(1, 2, 2), padding=(0, 1, 1))),
    "no batch": (0, 3, 4, (1, 5, 5), (1, 3, 3), {}),
    "no output channels": (2, 3, 0, (1, 5, 5), (1, 3, 3), {}),
    "an empty image": (2, 3, 2, (1, 0, 3), (1, 2, 2), dict(padding=(0, 1, 1))),
}  # fmt: skip
LARGE = (2, 24, 30, (1, 26, 23), (1, 3, 3), dict(stride=(1, 2, 1), padding=(0, 1, 2)))


def out_of(image, kernel, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1)):
    axes = zip(image, kernel, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)


def forward(m, N, IC, OC, image, kernel, options):
    return gg.conv_3d(m(OC * IC, *kernel), m(N * IC, *image), channels=IC, **options)


def back_x(m, N, IC, OC, image, kernel, options):
    dout = m(N * OC, *out_of(image, kernel, **options))
    return gg.conv_3d_back_x(m(OC * IC, *kernel), dout, channels=IC, **options, size=image)


def back_k(m, N, IC, OC, image, kernel, options):
    dout = m(N * OC, *out_of(image, kernel, **options))
    return gg.conv_3d_back_k(m(N * IC, *image), dout, channels=IC, **options, shape=(OC * IC, *kernel))


def unfold(m, N, IC, OC, image, kernel, options):
    return gg.im2col_3d(m(N * IC, *image), channels=IC, **options, kernel=kernel)


def fold(m, N, IC, OC, image, kernel, options):
    OD, OH, OW = out_of(image, kernel, **options)
    rows = m(N * OD, OH, OW, IC * kernel[0] * kernel[1] * kernel[2])
    return gg.im2col_3d_back(rows, channels=IC, **options, kernel=kernel, size=image)


def each(build, *names):
    cases = {name: lambda m, s=SHAPES[name]: build(m, *s) for name in names or SHAPES}
    return cases | {"large": lambda m: build(m, *LARGE)}


UNFOLDED = ["2d", "stride, padding and dilation that differ", "three axes", "many positions and lines", "no batch"]

PLANES = {  # N, C, image, kernel, options
    "2d": (2, 3, (7, 6), (3, 3), {}),
    "stride, padding and dilation that differ": (
        2, 2, (9, 40), (3, 2), dict(stride=(2, 3), padding=(2, 1), dilation=(2, 1)),
    ),
    "stride and dilation along rows": (1, 2, (3, 50), (1, 4), dict(stride=(1, 2), dilation=(1, 3), padding=(0, 5))),
    "a signal": (2, 5, (1, 83), (1, 4), {}),
    "three by three": (2, 3, (10, 29), (3, 3), dict(padding=(1, 1))),
    "three by three, every other one": (2, 3, (13, 71), (3, 3), dict(stride=(2, 2), padding=(1, 1))),
    "padding wider than the kernel": (1, 2, (2, 2), (2, 2), dict(padding=(3, 3))),
    "large": (3, 7, (33, 31), (3, 5), dict(padding=(1, 2))),
    "no batch": (0, 2, (5, 5), (3, 3), {}),
    "no channels": (2, 0, (5, 5), (3, 3), {}),
    "an empty image": (2, 3, (0, 3), (2, 2), dict(padding=(1, 1))),
}  # fmt: skip


def small_out(image, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1)):
    return out_of(image, kernel, stride, padding, dilation)


def dw(m, N, C, image, kernel, options):
    return gg.conv_dw(m(C, 1, *kernel), m(N, C, *image), **options)


def dw_back_x(m, N, C, image, kernel, options):
    dout = m(N, C, *small_out(image, kernel, **options))
    return gg.conv_dw_back_x(m(C, 1, *kernel), dout, **options, size=image)


def dw_back_k(m, N, C, image, kernel, options):
    dout = m(N, C, *small_out(image, kernel, **options))
    return gg.conv_dw_back_k(m(N, C, *image), dout, **options, kernel=kernel)


def each_plane(build):
    return {name: lambda m, s=s: build(m, *s) for name, s in PLANES.items()}


CASES = {
    "conv_3d": each(forward),
    "conv_3d_back_x": each(back_x),
    "conv_3d_back_k": each(back_k),
    "im2col_3d": each(unfold, *UNFOLDED),
    "im2col_3d_back": each(fold, *UNFOLDED),
    "conv_dw": each_plane(dw),
    "conv_dw_back_x": each_plane(dw_back_x),
    "conv_dw_back_k": each_plane(dw_back_k),
}
