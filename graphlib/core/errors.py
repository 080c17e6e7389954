"""Everything ggrad raises and warns of.  One base, so that `except ggrad.errors.GgradError` catches it all."""


class GgradError(Exception):
    """Base of all errors of this package."""


class ShapeError(GgradError, ValueError):
    """The shapes, dtypes or attributes given to an op do not fit together."""


class GradientError(GgradError):
    """A gradient was asked for that cannot be had."""


class GraphError(GgradError, RuntimeError):
    """A graph was built or used in an order that has no meaning."""


class NotComputedError(GgradError, RuntimeError):
    """A value was read that no run has made, or whose bytes the plan has given to another."""


class NotFiniteError(GgradError, FloatingPointError):
    """A run that was asked to look for NaN and infinities has found one."""


class IndexRangeError(GgradError, IndexError):
    """An index tensor held a value outside of what it indexes.  Nothing after that node ran."""


class DistributedError(GgradError, RuntimeError):
    """Ranks of a job do not fit together, or one of them is not there any more; see `ggrad.distributed`."""


class KernelError(GgradError, RuntimeError):
    """An op has no kernel to run, or its kernel could not be compiled."""


class GradientMismatch(GgradError, AssertionError):
    """A gradient rule is not the derivative of what it belongs to; see `ggrad.testing`."""


class KernelMismatch(GgradError, AssertionError):
    """A kernel does not compute what its op's reference says; see `ggrad.testing`."""


class FormatError(GgradError, ValueError):
    """A file is damaged, or is not of the format that was asked for.  Says the file, the part of it and the rule."""


class CheckpointError(FormatError):
    """A checkpoint file is damaged, or does not fit the model that it was asked to fill."""


class TrainingError(GgradError, RuntimeError):
    """A training run cannot go on."""


class MissingExtraError(GgradError, ImportError):
    """A package is not installed that only a part of ggrad needs."""


class NativeModuleWarning(RuntimeWarning):
    """The C module is missing, so graphs run through the references: right, and slow."""


def not_whole(t) -> NotComputedError:
    """Of a value whose graph's last run was ended by an error, or an interrupt."""
    return NotComputedError(
        f"{t.label()} cannot be read: the last run of its graph did not come to its end. graph.compute() runs it again"
    )


class CacheWarning(RuntimeWarning):
    """The folder of compiled kernels is not safe, so nothing is kept in it."""
