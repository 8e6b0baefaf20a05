"""A plain PyTorch training loop around a placed step: batches, clipping, a schedule, evaluation, checkpoints.

    python examples/training_loop.py --epochs 4 --folder runs/loop    # again with more epochs: it goes on

The step leaves gradients in `grad` of the placed parameters, so that all of the rest is PyTorch's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rlplace
from rlplace.export import PlacedModel, to_step


def data(count: int, seed: int) -> TensorDataset:
    """Points in the plane, and in which of three rings they lie."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)) * 1.5
    return TensorDataset(points, (points.norm(dim=1) - 0.5).clamp(0, 2.9).long())


def placed(model: torch.nn.Module, budget_s: float) -> PlacedModel:
    """The model as a step, placed on this machine as was found best in `budget_s` seconds."""
    x, labels = data(64, seed=0)[:64]
    graph = rlplace.capture(model, x, functional.cross_entropy, targets=labels)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    return to_step(model, graph, rlplace.train(problem, budget_s=budget_s).placement)


def accuracy(step: PlacedModel, batches: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Share of right answers; the forward alone, in evaluation mode, is captured at its first batch."""
    right = [(step.evaluate(x).argmax(1) == labels).float() for x, labels in batches]
    return float(torch.cat(right).mean())


def train(epochs: int, folder: Path, budget_s: float) -> list[float]:
    """Trains for `epochs`, those of earlier calls included; the accuracy after each epoch of this call."""
    torch.manual_seed(0)
    width = 64
    model = torch.nn.Sequential(
        torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 3)
    )
    held_out = DataLoader(data(200, seed=2), batch_size=64)
    found = []
    with placed(model, budget_s) as step:
        optimizer = torch.optim.AdamW(step.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        first = 0
        if (folder / "rest.pt").exists():
            step.load(folder / "step.safetensors")
            rest = torch.load(folder / "rest.pt", weights_only=True)
            optimizer.load_state_dict(rest["optimizer"])
            schedule.load_state_dict(rest["schedule"])
            first = rest["epoch"] + 1
        for epoch in range(first, epochs):
            shuffled = torch.Generator().manual_seed(epoch)
            for x, labels in DataLoader(data(500, seed=1), batch_size=64, shuffle=True, generator=shuffled):
                optimizer.zero_grad()
                step.backward(x, targets=labels)  # the last batch is smaller: its graph is placed alike
                torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
                optimizer.step()
            schedule.step()
            found.append(accuracy(step, held_out))
            print(f"epoch {epoch}: {found[-1]:.1%} right, {step.num_graphs} graphs", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            step.save(folder / "step.safetensors")
            rest = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch}
            torch.save(rest, folder / "rest.pt")
        step.copy_to(model)  # the trained parameters, back in the model
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/loop"))
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of search")
    options = parser.parse_args()
    train(options.epochs, options.folder, options.budget)


if __name__ == "__main__":
    main()
