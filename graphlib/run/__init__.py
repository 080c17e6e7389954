"""Running a graph: by the C kernels or by the NumPy references, and measured."""
