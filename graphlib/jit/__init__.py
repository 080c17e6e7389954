"""Kernels in Python: their declaration, their way to machine code, and the files that keep it."""

from .kernel import Kernel as Kernel
