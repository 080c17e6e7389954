"""Names of parts of a model, and what shows them: text, pictures, profiles, plans, messages."""

import re

import numpy as np
import pytest

import ggrad as gg


def model():
    x = gg.tensor(np.ones((4, 8)), name="x")
    w1, w2 = (gg.tensor(np.full((8, 8), 0.1), param=True, name=n) for n in ("w1", "w2"))
    with gg.scope("block0"):
        with gg.scope("inner"):
            h = gg.tanh(gg.matmul(x, w1))
        h = h + x
    with gg.scope("block1"):
        loss = gg.sum(gg.sqr(gg.matmul(h, w2)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    gg.AdamW([w1, w2], lr=0.1).build(graph, clip=1.0)
    return graph, h, loss


def test_nodes_are_named_by_their_scopes_and_gradients_by_what_they_are_of():
    graph, h, loss = model()
    assert (h.scope, loss.scope) == ("block0", "block1")
    assert {t.scope for t in graph.nodes if t.phase == "forward"} == {"block0", "block0/inner", "block1"}
    backward = {t.op.name: t.scope for t in graph.nodes if t.phase == "backward"}
    assert backward["tanh_back"] == "block0/inner" and backward["sqr_back"] == "block1"
    step = [t.op.name for t in graph.nodes if t.phase == "step"]
    assert set(step) - {"cont"} == {"global_norm", "clip_factor", "opt_step_adamw", "opt_step_count"}
    text = str(graph)
    assert re.search(r"^block0/inner/%\d+ = tanh\(block0/inner/%\d+\): f32\[4,8\]", text, re.M)
    assert re.search(r"^w1: f32\[8,8\] param", text, re.M)  # leaves keep the names that checkpoints know


def test_a_scope_ends_with_its_block_even_by_an_error():
    with pytest.raises(gg.errors.ShapeError, match=r"reshape"), gg.scope("a"):
        gg.reshape(gg.tensor(np.ones(3)), (2,))
    assert gg.neg(gg.tensor(1.0)).scope == ""
    for name in ("", None, 3):
        with pytest.raises(gg.errors.GraphError, match="a name is a string that is not empty"), gg.scope(name):
            pass


def test_messages_name_the_scope():
    with gg.scope("block7"):
        y = gg.neg(gg.tensor(np.ones(3)))
    with pytest.raises(gg.errors.NotComputedError, match=r"block7/neg: f32\[3\] cannot be read"):
        y.numpy()


def test_the_profile_and_the_text_number_alike_and_the_profile_splits():
    graph, *_ = model()
    graph.compute(profile=True)
    profile, text = graph.profile, str(graph)
    printed = set(re.findall(r"^(\S+) = ", text, re.M))
    named = {row.name.split(" ")[1].rstrip(":") for row in profile.by_node()}
    assert named <= printed and any(name.startswith("block0/inner/%") for name in named)
    assert [row.name for row in profile.by_phase()] == ["forward", "backward", "step"]
    total = sum(row.seconds for row in profile.by_op())
    for rows in (profile.by_phase(), profile.by_scope(), profile.by_scope(1)):
        assert sum(row.seconds for row in rows) == pytest.approx(total)
    assert {row.name for row in profile.by_scope(1)} == {"block0", "block1", "(no scope)"}
    assert {row.name for row in profile.by_scope()} >= {"block0/inner", "block1"}  # what follows is its leader's
    assert re.search(r"in kernels: forward \d+%, backward \d+%, step \d+%$", str(profile))


def test_the_picture_has_a_box_for_each_scope():
    graph, *_ = model()
    dot = graph.dot()
    assert "subgraph cluster" in dot and 'label="block0/inner"' in dot
    assert dot.count("{") == dot.count("}")
    assert dot.count("mistyrose") == sum(t.phase != "forward" for t in graph.nodes)


def test_the_plan_tells_the_bytes_of_each_scope():
    graph, *_ = model()
    scopes = graph.plan().by_scope()
    assert scopes["block1"] >= 4 * 8 * 4 and set(scopes) == {"block0", "block0/inner", "block1", ""}
    assert sum(scopes.values()) <= graph.plan().unshared


def test_threads_have_scopes_of_their_own():
    import threading

    made = []
    with gg.scope("here"):
        thread = threading.Thread(target=lambda: made.append(gg.neg(gg.tensor(1.0)).scope))
        thread.start()
        thread.join()
    assert made == [""]
