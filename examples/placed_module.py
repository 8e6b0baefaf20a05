"""A model as a placed module: the loop, the loss and the optimizer are PyTorch's own, and stay as they are.

python examples/placed_module.py
"""

from __future__ import annotations

import torch
from torch.nn import functional

import rlplace
from rlplace.export import to_module


def train(budget_s: float = 5.0, num_steps: int = 100) -> list[float]:
    """Losses of a regression by a placed module."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    x = torch.randn(256, 4)
    y = x.prod(1, keepdim=True)
    graph = rlplace.capture(model, x, functional.mse_loss, "adam", targets=y)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    placed = to_module(model, graph, rlplace.train(problem, budget_s=budget_s).placement)
    optimizer = torch.optim.Adam(placed.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        loss = functional.mse_loss(placed(x), y)  # forward and backward run as placed, the loss here
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.load_state_dict(placed.state_dict())
    placed.close()
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
