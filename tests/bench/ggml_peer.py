"""ggml through ctypes, as the package libggml-python brings it: what its kernels give, and how long they take."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np


class GgmlParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The few functions of ggml that are needed here; memory is one context's."""

    def __init__(self) -> None:
        import libggml

        folder = Path(libggml.__file__).parent / "lib64"
        paths = [*folder.glob("libggml-base.so*"), *sorted(folder.glob("libggml-cpu*.so*"))]
        self.libraries = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in paths]
        self.ctx = self.call("init", ctypes.c_void_p, GgmlParams(1 << 30, None, False))

    def call(self, name: str, result, *args):
        for library in self.libraries:
            function = getattr(library, f"ggml_{name}", None)
            if function is not None:
                function.restype = result
                return function(*args)
        raise AttributeError(name)

    def tensor(self, rows: int, n: int, kind: int = 0, data: np.ndarray | None = None) -> ctypes.c_void_p:
        size = ctypes.c_int64
        t = self.pointer("new_tensor_2d", self.context, ctypes.c_int(kind), size(n), size(rows))
        if data is not None:
            at = self.call("get_data", ctypes.c_void_p, t)
            ctypes.memmove(at, np.ascontiguousarray(data).ctypes.data, data.nbytes)
        return t

    def of(self, array: np.ndarray) -> ctypes.c_void_p:
        """A tensor of f32, f16, i32 or i64 with these values."""
        kind = {"float32": 0, "float16": 1, "int32": 26, "int64": 27}[array.dtype.name]
        sizes = (ctypes.c_int64 * 4)(*array.shape[::-1])
        t = self.pointer("new_tensor", self.context, ctypes.c_int(kind), ctypes.c_int(array.ndim), sizes)
        data = np.ascontiguousarray(array)
        ctypes.memmove(self.call("get_data", ctypes.c_void_p, t), data.ctypes.data, data.nbytes)
        return t

    def values(self, root: ctypes.c_void_p, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """What a computed tensor of that shape holds; of another size: an error."""
        size = self.call("nbytes", ctypes.c_size_t, root)
        if size != np.prod(shape, dtype=int) * np.dtype(dtype).itemsize:
            raise ValueError(f"{size} bytes are not {shape} of {np.dtype(dtype)}")
        at = self.call("get_data", ctypes.c_void_p, root)
        return np.frombuffer(ctypes.string_at(at, size), dtype).reshape(shape)

    def forward(self, name: str, threads: int, *inputs: np.ndarray, more: tuple = ()) -> Callable:
        """A call of ggml_<name> of these inputs, and of further arguments."""
        return self.graph(self.pointer(name, self.context, *map(self.of, inputs), *more), threads)

    @property
    def context(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.ctx)

    def pointer(self, name: str, *args) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.call(name, ctypes.c_void_p, *args))

    def graph(self, root: ctypes.c_void_p, threads: int, backward: bool = False) -> Callable:
        graph = self.pointer("new_graph_custom", self.context, ctypes.c_size_t(64), ctypes.c_bool(backward))
        self.call("build_forward_expand", None, graph, root)
        if backward:
            self.call("set_loss", None, root)
            self.call("build_backward_expand", None, self.context, graph, ctypes.c_void_p(None))
            self.call("graph_reset", None, graph)
        run = ctypes.c_int(threads)
        return lambda: self.call("graph_compute_with_ctx", ctypes.c_int, self.context, graph, run)


def ggml_or_none() -> Ggml | None:
    try:
        return Ggml()
    except (ImportError, OSError, AttributeError) as error:
        print(f"without ggml: {error}")
        return None


# -- the cases --------------------------------------------------------------------------------------------------------
