"""ggrad: static compute graphs, their gradients, and fast CPU kernels to run them.

    import ggrad as gg

    w = gg.tensor(weights, name="w", param=True)
    loss = gg.sum(gg.sqr(gg.mul_mat(w, x) - y))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    graph.compute()
    graph.grad(w).numpy()

Every op is a function of this module, under ggml's name where ggml has it.  Shapes are in NumPy order.
"""

if __name__ != "ggrad":
    # This folder is called graphlib, as a module of the standard library is.  When the repository's root
    # is first on sys.path, `import graphlib` finds us: hand over to the module that was meant.
    import importlib.util as _util
    import sys as _sys
    import sysconfig as _sysconfig

    _path = _sysconfig.get_path("stdlib") + "/graphlib.py"
    _spec = _util.spec_from_file_location("graphlib", _path)
    assert _spec is not None and _spec.loader is not None
    _module = _util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _sys.modules[__name__] = _module
else:
    import typing as _typing

    from .core.native import check_environment as _check_environment

    _check_environment()
    from . import distributed, ops, testing
    from .core import errors
    from .core.dtype import BF16, F16, F32, I32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, DType
    from .core.native import show_config
    from .core.op import Any4, AnyRows, Blocks, Float, Half, Int, Number, Op, Record, Weight, ensure, op
    from .core.quant import dequantize, quantize
    from .core.tensor import Pack, Spec, Tensor, Update, View, set_frozen, set_loss, set_output, set_param, tensor
    from .diff.autodiff import grad
    from .files import checkpoint
    from .files.gguf import GgufFile, load_gguf
    from .former import keep_paths
    from .graph import Graph
    from .ops import *  # noqa: F403
    from .train import data, optim, schedule
    from .train.optim import SGD, AdamW
    from .train.trainer import Trainer

    keep_paths()
    if not _typing.TYPE_CHECKING:  # who would then believe in any name
        from .former import __getattr__

    _MODULES = {"checkpoint", "data", "distributed", "errors", "ops", "optim", "schedule", "testing"}
    _RARE = {*ops.__all__, "Any4", "AnyRows", "Blocks", "Weight", "keep_paths"} - ops.COMMON
    _SHOWN = [
        name
        for name, value in globals().items()
        if not name.startswith("_") and (name in _MODULES if hasattr(value, "__spec__") else name not in _RARE)
    ]

    def __dir__() -> list[str]:
        """What most programs call; all ops are in `ggrad.ops`."""
        return [*_SHOWN, "__doc__", "__name__", "__version__"]

    __version__ = "0.1.0"
