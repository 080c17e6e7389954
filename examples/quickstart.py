"""The first steps: a graph, its gradients, a run, and training by a loop of three lines.

python quickstart.py
"""

import numpy as np

import ggrad as gg

rng = np.random.default_rng(0)
inputs = rng.standard_normal((64, 3))
outputs = inputs @ [[1.0], [-2.0], [0.5]] + 3.0

# Leaves hold data.  Parameters are those that gradients are wanted for.
x = gg.tensor(inputs, name="x")
y = gg.tensor(outputs, name="y")
w = gg.tensor(np.zeros((1, 3)), name="w", param=True)
b = gg.tensor(np.zeros(1), name="b", param=True)

# Ops make nodes; nothing is computed yet.
error = gg.mul_mat(w, x) + b - y  # [64, 1]
loss = gg.sum(error * error) * (1 / 64)

# The gradients are nodes of the same graph.
graph = gg.Graph()
graph.build_forward_expand(loss)
graph.build_backward_expand()
print(graph, end="\n\n")

graph.compute()
print("loss:", loss.item())
print("its gradient by w:", graph.grad(w).numpy(), "and by b:", graph.grad(b).numpy(), end="\n\n")

# So is the step of an optimizer: one call computes loss, gradients and new parameters.
optimizer = gg.optim.AdamW([w, b], lr=0.1, weight_decay=0.0)
optimizer.build(graph)
for _ in range(300):
    graph.compute()
print(f"after {optimizer.steps} steps: loss {loss.item():.1e}, w {w.numpy()}, b {b.numpy()}")
