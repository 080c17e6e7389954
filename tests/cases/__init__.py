"""Graphs to try every op on, by family.  A test fails when an op of the registry has no case here.

A family's module holds CASES: {op name: {case name: build}}.  `build(m)` makes its inputs with the maker `m` and
returns the op's result, or the tuple of its parts:

    CASES = {"mul": {"a row": lambda m: gg.mul(m(3, 5), m(5))}}

The maker decides about values and layout, so that one case is tried plain, transposed, reversed, strided
and broadcast.  See `maker.py`.
"""
