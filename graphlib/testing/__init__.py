"""Checks for ops and models, one's own included: rules against difference quotients, kernels against references.

    gg.testing.check_gradients(my_op, np.ones((3, 4)), np.ones(4))
    gg.testing.check_kernel(lambda: my_model(x, w))

Both take a function that builds what is checked: it is called with one leaf for each further argument and
returns a tensor or a tuple of them.  They raise an `AssertionError` that names what is wrong and both numbers.

For authors of attention kernels, of any framework: `attention_reference` is the answer in double precision,
and `compare_attention` compares one's own with it and prints a table.
"""

from .attention_check import AttentionCase, AttentionComparison, AttentionRow, attention_cases, compare_attention
from .attention_reference import AttentionResult, attention_reference, dropout_factors, visible_pairs
from .compare import check_gradients, check_kernel, compare_with_reference
from .maker import Maker

__all__ = [
    "AttentionCase",
    "AttentionComparison",
    "AttentionResult",
    "AttentionRow",
    "Maker",
    "attention_cases",
    "attention_reference",
    "check_gradients",
    "check_kernel",
    "compare_attention",
    "compare_with_reference",
    "dropout_factors",
    "visible_pairs",
]
