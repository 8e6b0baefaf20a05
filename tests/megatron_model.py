"""A transformer layer whose code takes the sizes of shards as they are, with a head that is tied to its words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY, WIDTH, HEAD = 11, 8, 2


class Megatron(nn.Module):
    """(B, T) words to (B, T, V) logits. With `num_heads`, its code says how many heads there are, also in a shard."""

    def __init__(self, num_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.words, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows)
        sizes = (-1, HEAD) if self.num_heads is None else (self.num_heads, -1)
        query, key, value = (
            layer(x).view(*rows.shape, *sizes).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return out


def megatron(num_heads: int | None = None) -> Megatron:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Megatron(num_heads).double()


def words_and_labels() -> tuple[Tensor, Tensor]:
    """Each (4, 5)."""
    generator = torch.Generator().manual_seed(1)
    rows, labels = (torch.randint(VOCABULARY, (4, 5), generator=generator) for _ in range(2))
    return rows, labels


def loss_of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
