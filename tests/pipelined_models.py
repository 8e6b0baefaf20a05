"""Models that are hard to cut into stages: late inputs, skips, shared parameters, modules that run twice."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.out(functional.gelu(self.into(self.norm(x)))) * scale


class Skipping(nn.Module):
    """Every block reads the same input, and what the first made; the last reads `late` besides; the head is tied."""

    def __init__(self, width: int = 8, blocks: int = 4, vocab: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.gate = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.twice = nn.Linear(width, width)
        self.frozen, self.unused = (
            nn.Parameter(torch.full((width,), 0.9), requires_grad=False),
            nn.Linear(2, 2).requires_grad_(False),
        )
        self.register_buffer("offset", torch.full((width,), 0.1))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("passing", torch.zeros(width), persistent=False)

    def forward(self, late: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.words(rows)
        with torch.no_grad():
            shift = x.mean(dim=1, keepdim=True)
        scale = torch.sigmoid(self.gate(x - shift)).T.contiguous().T  # sent, and not contiguous
        x = self.twice(x) * self.frozen + self.offset + self.passing
        for block in self.blocks:
            x = block(x, scale)
        x = self.twice(x) + late
        return functional.linear(x, self.words.weight)


def skipping_batch(batch: int = 8, width: int = 8, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`late`, `rows` and labels."""
    generator = torch.Generator().manual_seed(1)
    late = torch.randn(batch, width, generator=generator)
    return late, *(torch.randint(vocab, (batch,), generator=generator) for _ in range(2))


def skipping_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, labels)


class Centred(nn.Module):
    """Adds a layer of what differs from the mean over dimension 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x - x.mean(0, keepdim=True)))


class SequenceFirst(nn.Module):
    """Takes tokens as (sequence, batch), and mixes those of one sequence."""

    def __init__(self, width: int = 8, blocks: int = 4, vocab: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(Centred(width) for _ in range(blocks)))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens)))


def sequences(length: int = 6, batch: int = 4, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (length, batch), generator=generator), torch.randint(
        vocab, (length, batch), generator=generator
    )


def sequences_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())
