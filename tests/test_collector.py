"""While a graph is differentiated and planned nobody looks for rings: there are none, and each look takes all nodes."""

import gc

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.collector import collector_at_rest


@pytest.fixture
def collections():
    """The generations that were collected."""
    seen = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.mark.native
def test_gradients_and_plans_of_many_nodes_are_made_without_collections(collections):
    x = h = gg.tensor(np.ones(4), param=True)
    for _ in range(3_000):
        h = gg.silu(h * x)
    graph = gg.Graph().build_forward_expand(gg.sum(h))
    collections.clear()
    graph.build_backward_expand()
    graph.plan()
    assert len(collections) <= 4  # what is due afterwards, twice; else it is one for every 700 objects
    assert gc.isenabled()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_left_as_it_was_whatever_happens(on):
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(KeyError), collector_at_rest():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == on
    finally:
        gc.enable()
