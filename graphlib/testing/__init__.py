"""Checks for ops and models, one's own included: rules against difference quotients, kernels against references.

    gg.testing.check_gradients(my_op, np.ones((3, 4)), np.ones(4))
    gg.testing.check_kernel(lambda: my_model(x, w))

Both take a function that builds what is checked: it is called with one leaf for each further argument and
returns a tensor or a tuple of them.  They raise an `AssertionError` that names what is wrong and both numbers.

For authors of kernels, of any framework: `compare_attention`, `compare_kda`, `compare_sparse_mla`, and `compare` for
any op, hold one's own against the answer in double precision, in cases that trap, and print a table; the answers are
`attention_reference`, `kda_reference` and `sparse_mla_reference`.  `ggrad.testing.adapters` has torch's and JAX's.
"""

from .attention_check import AttentionCase, attention_cases, compare_attention
from .attention_reference import AttentionResult, attention_reference, dropout_factors, visible_pairs
from .compare import check_gradients, check_kernel, compare_with_reference
from .comparison import Comparison, Row
from .kda_check import KdaCase, compare_kda, kda_cases
from .kda_reference import KdaResult, kda_reference
from .maker import Maker
from .op_check import OpCase, compare
from .sparse_mla_check import SparseMlaCase, compare_sparse_mla, sparse_mla_cases
from .sparse_mla_reference import SparseMlaResult, sparse_mla_reference

__all__ = [
    "AttentionCase",
    "AttentionResult",
    "Comparison",
    "KdaCase",
    "KdaResult",
    "Maker",
    "OpCase",
    "Row",
    "SparseMlaCase",
    "SparseMlaResult",
    "attention_cases",
    "attention_reference",
    "check_gradients",
    "check_kernel",
    "compare",
    "compare_attention",
    "compare_kda",
    "compare_sparse_mla",
    "compare_with_reference",
    "dropout_factors",
    "kda_cases",
    "kda_reference",
    "sparse_mla_cases",
    "sparse_mla_reference",
    "visible_pairs",
]
