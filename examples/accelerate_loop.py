"""A loop under Hugging Face's Accelerate around a placed module: accumulation, clipping, a schedule, checkpoints.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rlplace
from rlplace.export import to_module


def data(count: int) -> TensorDataset:
    """Points in the plane, and the product of their coordinates."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.prod(1, keepdim=True))


def train(budget_s: float = 5.0, epochs: int = 15, folder: Path | None = None) -> list[float]:
    """The mean loss of each epoch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    x, y = data(32)[:32]
    graph = rlplace.capture(net, x, functional.mse_loss, targets=y)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    placed = to_module(net, graph, rlplace.train(problem, budget_s=budget_s).placement)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(placed.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    model, optimizer, batches, schedule = accelerator.prepare(
        placed, optimizer, DataLoader(data(256), batch_size=32, shuffle=True), schedule
    )
    losses = []
    for _ in range(epochs):
        found = []
        for points, products in batches:
            with accelerator.accumulate(model):
                loss = functional.mse_loss(model(points), products)
                accelerator.backward(loss)  # runs as placed
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        schedule.step()
        losses.append(sum(found) / len(found))
    if folder is not None:
        accelerator.save_state(str(folder))  # weights as safetensors, optimizer and schedule beside them
        accelerator.load_state(str(folder))
    net.load_state_dict(accelerator.unwrap_model(model).state_dict())
    placed.close()
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as kept:
        losses = train(folder=Path(kept))
    print(f"loss {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
