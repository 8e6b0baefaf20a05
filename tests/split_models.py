"""Models with one trait each that decides how far a device map can split them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block: its sum reads what comes in and what its layers made."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Tied(nn.Module):
    """Its last layer has the weight of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.words(x))))


class Meeting(nn.Module):
    """Two branches whose outputs meet in an op of the root, and one layer after that."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.right, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.left(x) * self.right(x))


class Borrowing(nn.Module):
    """A part that uses its layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.after = Borrower(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(x))


class Borrower(nn.Module):
    """`Borrowing`'s part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.layer.weight))


class OwnScale(nn.Module):
    """A root that holds a parameter itself, and adds its input to what its layers made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.before, self.layer, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)) * self.scale + x)


def features() -> Tensor:
    """What all but `Tied` take."""
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def words() -> Tensor:
    """What `Tied` takes."""
    return torch.arange(12).reshape(3, 4) % 10
