"""The paths that modules had before, as `ggrad.optim`: imports find the module where it is now, and one copy of it."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

NOW = {
    "accuracy": "testing.accuracy",
    "attention_check": "testing.attention_check",
    "attention_reference": "testing.attention_reference",
    "autodiff": "diff.autodiff",
    "callback": "jit.callback",
    "cases": "testing.cases",
    "check": "testing.check",
    "checkpoint": "files.checkpoint",
    "data": "train.data",
    "dtype": "core.dtype",
    "errors": "core.errors",
    "extras": "core.extras",
    "gguf_file": "files.gguf",
    "invariants": "testing.invariants",
    "kernel": "jit.kernel",
    "maker": "testing.maker",
    "native": "core.native",
    "op": "core.op",
    "optim": "train.optim",
    "plan": "compile.plan",
    "profile": "run.profile",
    "quant": "core.quant",
    "reference": "run.reference",
    "schedule": "train.schedule",
    "session": "run.session",
    "tensor": "core.tensor",
    "trainer": "train.trainer",
    "waves": "compile.waves",
}

WHEN_ASKED = ("models",)  # packages that not every program needs


class _Finder(MetaPathFinder, Loader):
    """Answers for the names in NOW, and for what lies below those that are packages."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, rest = fullname.partition(".")
        head, _, below = rest.partition(".")
        if package != __package__ or head not in NOW:
            return None
        now = ".".join([package, NOW[head], *([below] if below else [])])
        return ModuleSpec(fullname, self, origin=now)

    def create_module(self, spec):
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state  # its own again: the machinery has put in the former path's

    def get_code(self, fullname):
        """For `python -m`."""
        now = self.find_spec(fullname).origin
        return compile(f"import runpy; runpy.run_module({now!r}, run_name='__main__', alter_sys=True)", now, "exec")


def __getattr__(name):
    """For the package, of whose attributes such a module was one; also what is imported when it is first asked for."""
    if name in WHEN_ASKED:
        return importlib.import_module(f"{__package__}.{name}")
    if name in NOW:
        return importlib.import_module(f"{__package__}.{NOW[name]}")
    raise AttributeError(f"module {__package__!r} has no attribute {name!r}")


def keep_paths() -> None:
    """Call it once, when the package has been imported."""
    sys.meta_path.insert(0, _Finder())
    for former, now in NOW.items():
        # An import that has to find a module binds it in the package, where `op` and `tensor` are functions.
        if (module := sys.modules.get(f"{__package__}.{now}")) is not None:
            sys.modules[f"{__package__}.{former}"] = module
