"""Models that the rules were not made on: their split steps are equal to the whole ones, and little is gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from split_steps import CLEAN, check_equal
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, gelu, mse_loss

from rlplace.graphs import SplitPlan

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 37, 12


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RelativeAttention(nn.Module):
    """Heads by plain products, with a bias for each distance, as T5 has (Raffel et al. 2020, arXiv:1910.10683)."""

    def __init__(self, *, is_causal: bool = False, has_bias: bool = True) -> None:
        super().__init__()
        self.norm = RootMeanSquare()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Embedding(8, HEADS) if has_bias else None
        self.is_causal = is_causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        source = y if memory is None else memory
        query, key, value = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.query(y), self.key(source), self.value(source))
        )
        scores = query @ key.transpose(-1, -2)
        distance = torch.arange(key.shape[2])[None, :] - torch.arange(query.shape[2])[:, None]
        if self.bias is not None:
            scores = scores + self.bias(distance.clamp(-4, 3) + 4).permute(2, 0, 1).unsqueeze(0)
        if self.is_causal:
            scores = scores.masked_fill(distance > 0, -torch.inf)
        found = torch.softmax(scores, -1) @ value
        return x + self.out(found.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RootMeanSquare()
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 24), (WIDTH, 24), (24, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(gelu(self.gate(y), approximate="tanh") * self.up(y))


class EncoderDecoder(nn.Module):
    """T5's layers, with one table of words for both sides and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.Sequential(RelativeAttention(), Gated(), RootMeanSquare())
        self.first, self.cross = RelativeAttention(is_causal=True), RelativeAttention(has_bias=False)
        self.last = nn.Sequential(Gated(), RootMeanSquare())

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.words(source))
        found = self.last(self.cross(self.first(self.words(target)), memory))
        return found @ self.words.weight.t()


class Convolved(nn.Module):
    """Two convolutions around a residual, and normed groups of channels."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(ins, outs, 3, padding=1), nn.Conv2d(outs, outs, 3, padding=1)
        self.one, self.other = nn.GroupNorm(2, outs), nn.GroupNorm(2, outs)
        self.past = nn.Conv2d(ins, outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.other(self.second(torch.relu(self.one(self.first(x)))))
        return torch.relu(inner + self.past(x))


class UNet(nn.Module):
    """Down, attention and a product of two in the middle, and up again, with skipped channels joined."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Convolved(3, 8), Convolved(8, WIDTH), Convolved(WIDTH + 8, 8)
        self.attention, self.mlp, self.last = RelativeAttention(has_bias=False), Gated(), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        deep = self.middle(nn.functional.max_pool2d(wide, 2))
        tokens = self.mlp(self.attention(deep.flatten(2).transpose(1, 2)))
        deep = tokens.transpose(1, 2).unflatten(2, deep.shape[2:])
        joined = torch.cat((nn.functional.interpolate(deep, scale_factor=2, mode="nearest"), wide), 1)
        return self.last(self.up(joined))


class Factors(nn.Module):
    """DeepFM: products of pairs of fields beside layers over all of them (Guo et al. 2017, arXiv:1703.04247)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (50, 40, 30))
        self.weights = nn.ModuleList(nn.Embedding(size, 1) for size in (50, 40, 30))
        self.deep = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, fields: Tensor) -> Tensor:
        found = torch.stack([table(fields[:, k]) for k, table in enumerate(self.tables)], 1)
        linear = sum(weight(fields[:, k]) for k, weight in enumerate(self.weights))
        pairs = (found.sum(1).square() - found.square().sum(1)).sum(1, keepdim=True) / 2
        return (self.deep(found.flatten(1)) + pairs + linear).squeeze(1)


class Mixer(nn.Module):
    """A layer that mixes tokens, then one that mixes channels (Tolstikhin et al. 2021, arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(9, WIDTH), nn.Linear(WIDTH, 10)
        self.one, self.other, self.end = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for width in (LENGTH, WIDTH)
        )

    def forward(self, patches: Tensor) -> Tensor:
        x = self.stem(patches)
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.other(x))
        return self.last(self.end(x).mean(1))


class MultiQuery(nn.Module):
    """Heads that share one of keys and values, as rows of one product: (batch, tokens x heads, width of a head).

    As in GPT-BigCode (Li et al. 2023, arXiv:2305.06161); by `einsum` rows are (heads x tokens).
    """

    def __init__(self, *, is_einsum: bool = False) -> None:
        super().__init__()
        self.norm, self.is_einsum = RootMeanSquare(), is_einsum
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)
        self.last = Gated()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        if self.is_einsum:
            scores = torch.einsum("bnhd,bmd->bhnm", query.unflatten(-1, (HEADS, -1)), key)
            found = torch.einsum("bhnm,bmd->bnhd", torch.softmax(scores, -1), value)
        else:
            scores = query.view(len(x), -1, WIDTH // HEADS) @ key.transpose(1, 2)
            found = (torch.softmax(scores, -1) @ value).view(x.shape)
        return self.last(x + self.out(found.reshape(x.shape)))


def of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Any, Callable[[], Tensor], set[str]]

CASES: dict[str, Case] = {
    "encoder-decoder": (
        EncoderDecoder,
        lambda: (torch.randint(WORDS, (2, LENGTH)), torch.randint(WORDS, (2, 8))),
        of_words,
        lambda: torch.randint(WORDS, (2, 8)),
        {"vocabulary", "attention", "mlp", "tables"},
    ),
    "u-net": (
        UNet,
        lambda: torch.rand(2, 3, 8, 8, dtype=torch.float64),
        mse_loss,
        lambda: torch.rand(2, 3, 8, 8, dtype=torch.float64),
        {"attention", "mlp"},
    ),
    "deepfm": (
        Factors,
        lambda: torch.randint(30, (8, 3)),
        binary_cross_entropy_with_logits,
        lambda: torch.rand(8, dtype=torch.float64),
        {"tables", "mlp"},
    ),
    **{
        f"multi-query{' by einsum' * is_einsum}": (
            partial(MultiQuery, is_einsum=is_einsum),
            lambda: torch.rand(2, LENGTH, WIDTH, dtype=torch.float64),
            mse_loss,
            lambda: torch.rand(2, LENGTH, WIDTH, dtype=torch.float64),
            {"attention", "mlp"},
        )
        for is_einsum in (False, True)
    },
    "mixer": (
        Mixer,
        lambda: torch.rand(4, LENGTH, 9, dtype=torch.float64),
        cross_entropy,
        lambda: torch.randint(10, (4,)),
        {"vocabulary", "mlp"},
    ),
}


@pytest.mark.parametrize("reduce", ["owner", "chunks"])
@pytest.mark.parametrize(
    ("parts", "micro_batches"), [(2, 1), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((4, 1), ((3, 1), 2)))]
)
@pytest.mark.parametrize("name", CASES)
def test_a_split_step_is_that_of_the_whole(name: str, parts: Any, micro_batches: int, reduce: Any) -> None:
    make, inputs, loss_fn, targets, classes = CASES[name]
    torch.manual_seed(0)
    graph = check_equal(
        make().double(),
        inputs(),
        loss_fn,
        SplitPlan(parts=parts, reduce=reduce),
        CLEAN,
        targets=targets(),
        micro_batches=micro_batches,
        **({"loss": "separate"} if micro_batches > 1 else {}),
    )
    report = graph.program.split
    print(name, f"gathered {report.gathered_share:.2%} of the FLOPs", sorted(report.parameters))
    assert set(report.parameters.values()) == classes
    assert report.gathered_share < 0.05
