"""The parts of random models: layers, writes through views, random draws, buffers, wrappers, and losses.

Every part keeps the shape of what it is given, (B, ...), so that any of them may follow any other. What a part with
draws computes does not depend on the values that are drawn, only on which draws are equal to which: plain PyTorch and a
placed step then agree without drawing the same numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

DOMAINS = {"vector": (12,), "sequence": (6, 8), "image": (4, 6, 6)}
"""The shape of one sample in each kind of model: features; positions and features; channels, rows and columns."""

# --- layers: (random numbers, domain) to a module that keeps the shape


def linear(r: random.Random, domain: str) -> nn.Module:
    features = DOMAINS[domain][-1]
    return nn.Sequential(nn.Linear(features, features), r.choice([nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus])())


def bottleneck(r: random.Random, domain: str) -> nn.Module:
    features, hidden = DOMAINS[domain][-1], r.choice([3, 16])
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, features, bias=False))


def layer_norm(r: random.Random, domain: str) -> nn.Module:
    shape = DOMAINS[domain]
    return nn.LayerNorm(shape[-1:] if r.random() < 0.7 else shape, elementwise_affine=r.random() < 0.7)


def rms_norm(_: random.Random, domain: str) -> nn.Module:
    return nn.RMSNorm(DOMAINS[domain][-1])


class ChannelsFirst(nn.Module):
    """Runs a layer of (B, C, N) on (B, N, C)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(1, 2)).transpose(1, 2)


def batch_norm(r: random.Random, domain: str) -> nn.Module:
    options: dict[str, Any] = {"momentum": r.choice([0.1, 0.5, None]), "affine": r.random() < 0.8}
    if r.random() < 0.15:
        options["track_running_stats"] = False
    if domain == "vector":
        return nn.BatchNorm1d(12, **options)
    return nn.BatchNorm2d(4, **options) if domain == "image" else ChannelsFirst(nn.BatchNorm1d(8, **options))


def normed_weight(r: random.Random, domain: str) -> nn.Module:
    features = DOMAINS[domain][-1]
    norm = r.choice([parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
    return norm(nn.Linear(features, features))


class Gated(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.both = nn.Linear(features, 2 * features)

    def forward(self, h: Tensor) -> Tensor:
        one, gate = self.both(h).chunk(2, -1)
        return one * gate.sigmoid()


class Tied(nn.Module):
    """One weight, used forward and transposed."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(features, features), nn.Linear(features, features, bias=False)
        self.other.weight = self.one.weight

    def forward(self, h: Tensor) -> Tensor:
        return self.other(self.one(h).tanh()) + F.linear(h, self.one.weight.t()) * 0.1


class LowRank(nn.Module):
    """An adapter beside a frozen layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.base = nn.Linear(features, features).requires_grad_(False)
        self.a, self.b = nn.Linear(features, 2, bias=False), nn.Linear(2, features, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.base(h) + self.b(self.a(h))


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
        if self.kind == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "masked":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        else:
            scores = (q @ k.mT / 2).masked_fill_(~self.mask, float("-inf"))
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class OfItself(nn.Module):
    """`nn.MultiheadAttention`, and recurrent layers, which return more than one result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(h, h, h, need_weights=False)[0]
        return self.layer(h)[0]


class Cells(nn.Module):
    """A recurrent cell in a loop that stops by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        state, outputs = h.new_zeros(h.shape[0], 8), []
        for position in range(h.shape[1]):
            state = self.cell(h[:, position], state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class Resampled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "pool":
            return F.interpolate(F.max_pool2d(self.inner(h), 2), scale_factor=2, mode="nearest")
        if self.kind == "shuffle":
            return F.pixel_shuffle(F.pixel_unshuffle(self.inner(h), 2).flip(1), 2)
        patches = F.unfold(self.inner(h), 3, padding=1)
        return F.fold(patches * 0.3, (6, 6), 3, padding=1)


LAYERS: dict[str, dict[str, Callable[[random.Random, str], nn.Module]]] = {
    "vector": {
        "linear": linear, "bottleneck": bottleneck, "layer_norm": layer_norm, "rms_norm": rms_norm,
        "batch_norm": batch_norm, "normed_weight": normed_weight, "gated": lambda r, d: Gated(12),
        "tied": lambda r, d: Tied(12), "low_rank": lambda r, d: LowRank(12),
    },
    "sequence": {
        "linear": linear, "layer_norm": layer_norm, "batch_norm": batch_norm, "gated": lambda r, d: Gated(8),
        "low_rank": lambda r, d: LowRank(8), "attention": lambda r, d: Attention(r.choice(["fused", "masked", "own"])),
        "multi_head": lambda r, d: OfItself(nn.MultiheadAttention(8, 2, batch_first=True)),
        "recurrent": lambda r, d: OfItself(r.choice([nn.GRU, nn.LSTM, nn.RNN])(8, 8, batch_first=True)),
        "cells": lambda r, d: Cells(),
        "conv": lambda r, d: ChannelsFirst(nn.Conv1d(8, 8, 3, padding=1, groups=r.choice([1, 8]))),
        "encoder": lambda r, d: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
    },
    "image": {
        "conv": lambda r, d: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=r.choice([1, 2, 4])), nn.Tanh()),
        "wide": lambda r, d: nn.Conv2d(4, 4, 3, padding=2, dilation=2, padding_mode=r.choice(["zeros", "circular"])),
        "group_norm": lambda r, d: nn.GroupNorm(2, 4), "batch_norm": batch_norm,
        "instance_norm": lambda r, d: nn.InstanceNorm2d(4, affine=True, track_running_stats=r.random() < 0.3),
        "linear": linear, "resampled": lambda r, d: Resampled(r.choice(["pool", "shuffle", "fold"])),
    },
}  # fmt: skip


# --- writes: of (B, F) in memory of its own, and a number k that is fixed for the model


def slice_set(f: Tensor, k: int) -> Tensor:
    f[:, k % 5 : k % 5 + 3] = k % 3 / 2
    return f


def slice_scaled(f: Tensor, k: int) -> Tensor:
    f[:, k % 3 :: 2] *= 1.5
    return f


def column_added(f: Tensor, k: int) -> Tensor:
    f[:, k % 5].add_(f[:, (k + 1) % 5], alpha=0.5)
    return f


def swapped(f: Tensor, k: int) -> Tensor:
    f[:, 0], f[:, k % 4 + 1] = f[:, k % 4 + 1], f[:, 0]  # the second sees what the first has written
    return f


def shifted(f: Tensor, k: int) -> Tensor:
    f[:, 1:] = f[:, :-1] * (0.5 + k % 2)
    return f


def recurrence(f: Tensor, k: int) -> Tensor:
    for column in range(1, 3 + k % 4):
        f[:, column] += f[:, column - 1] * 0.5
    return f


def unfold_gaps(f: Tensor, k: int) -> Tensor:
    f.unfold(1, 3, 4 + k % 2)[:, ::2] = 0.5
    return f


def unfold_scaled(f: Tensor, k: int) -> Tensor:
    f.unfold(1, 2, 3 + k % 3).mul_(1.5)
    return f


def unfold_columns(f: Tensor, k: int) -> Tensor:
    f.unfold(1, 4, 4)[..., k % 4] = 1.0
    return f


def unfold_twice(f: Tensor, k: int) -> Tensor:
    f.view(f.shape[0], 3, -1).unfold(1, 2, 2).unfold(2, 3, 3 + k % 2)[:, 0].mul_(0.5)
    return f


def unfold_read(f: Tensor, k: int) -> Tensor:
    windows = f.unfold(1, 4, 1 + k % 2).sum(-1)
    return f * windows.mean(1, keepdim=True).sigmoid()


def strided_read(f: Tensor, k: int) -> Tensor:
    width = f.shape[1]
    return f + f.as_strided((f.shape[0], width // 2), (width, 2), k % 2).sum(1, keepdim=True) * 0.1


def strided_set(f: Tensor, k: int) -> Tensor:
    width = f.shape[1]
    f.as_strided((f.shape[0], width // 3), (width, 3), k % 3).mul_(0.5)
    return f


def put_columns(f: Tensor, k: int) -> Tensor:
    f[:, [0, 3]] = f[:, [1, 2 + k % 2]] * 0.5
    return f


def put_added(f: Tensor, k: int) -> Tensor:
    rows = torch.arange(f.shape[0]).repeat(2)
    columns = torch.cat([torch.full((f.shape[0],), k % 4), torch.full((f.shape[0],), (k + 1) % 4)])
    return f.index_put_((rows, columns), f[rows, columns] * 0.3, accumulate=True)


def mask_set(f: Tensor, k: int) -> Tensor:
    f[f > 0.5 + k % 2] = 0.25
    return f


def mask_filled(f: Tensor, k: int) -> Tensor:
    return f.masked_fill_(f.detach() < -0.3, -0.1 * (k % 3)).clamp_(max=2.0)


def mask_scattered(f: Tensor, k: int) -> Tensor:
    mask = (torch.arange(f.shape[1]) % (2 + k % 2) == 0).expand_as(f)
    return f.masked_scatter_(mask, f.detach().flip(1) * 0.5)


def scattered(f: Tensor, k: int) -> Tensor:
    where = torch.tensor([[k % 3, 4, 7]]).expand(f.shape[0], 3)
    return f.scatter_(1, where, f[:, 1:4] * 2.0)


def scatter_value(f: Tensor, k: int) -> Tensor:
    return f.scatter_(1, f.detach().argmax(1, keepdim=True), 0.5 * (k % 3))


def scatter_added(f: Tensor, k: int) -> Tensor:
    where = torch.tensor([[k % 3, 4, 4]]).expand(f.shape[0], 3)
    return f.scatter_add_(1, where, f[:, 1:4] * 0.5)


def scatter_reduced(f: Tensor, k: int) -> Tensor:
    where = torch.tensor([[k % 3, 4, 7]]).expand(f.shape[0], 3)
    return f.scatter_reduce_(1, where, f[:, 1:4] * 0.5, "sum", include_self=bool(k % 2))


def index_added(f: Tensor, k: int) -> Tensor:
    f.index_add_(1, torch.tensor([k % 4, 5, 5]), f[:, 2:5] * 0.5)
    return f.index_fill_(1, torch.tensor([7]), 0.3)


def index_copied(f: Tensor, k: int) -> Tensor:
    return f.index_copy_(1, torch.tensor([k % 4, 6]), f[:, 1:3] * 0.5)


def filled_by_slices(f: Tensor, k: int) -> Tensor:
    out, cut = torch.empty(f.shape, dtype=f.dtype), 1 + k % 5
    out[:, :cut] = f[:, :cut] * 2
    out[:, cut:] = f[:, cut:]
    return out


def filled_by_columns(f: Tensor, k: int) -> Tensor:
    out = f.new_zeros(f.shape) if k % 2 else torch.empty_like(f)
    for column in range(f.shape[1]):
        out[:, column] = f[:, -1 - column]
    return out


def diagonal_set(f: Tensor, k: int) -> Tensor:
    square = f[:, :9].view(-1, 3, 3) if k % 2 else f.view(f.shape[0], 3, -1)
    square.diagonal(dim1=1, dim2=2).mul_(0.5)
    return f


def transposed_set(f: Tensor, k: int) -> Tensor:
    f.t()[k % 5].mul_(0.5)
    f.view(f.shape[0], 2, -1).transpose(1, 2)[:, 0].add_(0.1)
    f.mT[1] = 0.3
    return f


def complex_scaled(f: Tensor, k: int) -> Tensor:
    torch.view_as_complex(f.view(f.shape[0], -1, 2)).mul_(0.5 + k % 2)
    return f


def shapes_in_place(f: Tensor, k: int) -> Tensor:
    return f.unsqueeze_(1).squeeze_(1).t_().t_().transpose_(0, 1).mul_(0.5 + k % 2).swapaxes_(0, 1)


def data_scaled(f: Tensor, k: int) -> Tensor:
    f.data.mul_(0.5 + k % 2)  # autograd is not told
    return f


def detached_set(f: Tensor, k: int) -> Tensor:
    f.detach()[:, k % 4] = 0.3
    return f


def without_gradient(f: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        f[:, k % 4] = 0.3
        f.mul_(0.9)
    return f


def foreach_scaled(f: Tensor, k: int) -> Tensor:
    parts = [f * 1, f + 1]
    with torch.no_grad() if k % 2 else contextlib.nullcontext():
        torch._foreach_mul_(parts, 0.5)
    return parts[0] + parts[1]


def written_out(f: Tensor, k: int) -> Tensor:
    room = torch.empty_like(f)
    with torch.no_grad():
        torch.add(f, 1.0, out=room)
    return f * room.sigmoid() + k % 2


def activations(f: Tensor, k: int) -> Tensor:
    f = (f.relu_, f.tanh_, f.sigmoid_, lambda: F.elu_(f), lambda: F.leaky_relu_(f, 0.1))[k % 5]() + 0
    return f.add_(0.1).addcmul_(f.detach(), f.detach(), value=0.1).lerp_(torch.zeros_like(f), 0.2)


def real_part(f: Tensor, k: int) -> Tensor:
    z = torch.complex(f, f * 0.5)
    z.real[:, k % 4].mul_(0.5)
    return z.real + z.imag


def narrowed(f: Tensor, k: int) -> Tensor:
    f.narrow(1, k % 4, 3).select(1, 1).unsqueeze(1).squeeze(1).neg_()
    f.unflatten(1, (2, -1))[:, 1, 0] = 0.2
    return f


def split_data(f: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        first, *_, last = f.split(3, 1)
        first.mul_(0.5)
        last += k % 2
        f.unbind(1)[1].neg_()
    return f


def copied(f: Tensor, k: int) -> Tensor:
    room = torch.zeros(f.shape[0], f.shape[1] + 4, dtype=f.dtype)
    room[:, 2:-2].copy_(f)
    room[:, :2] = f[:, :1]
    return room[:, k % 4 :][:, : f.shape[1]]


def rolled(f: Tensor, k: int) -> Tensor:
    return f.roll(k % 5, 1) + f.flip(1) * 0.5 + F.pad(f, (1, 0))[:, :-1]


def sorted_back(f: Tensor, k: int) -> Tensor:
    values, order = f.sort(1, descending=bool(k % 2))
    return torch.zeros_like(f).scatter_(1, order, values * 0.5) + f.cumsum(1) * 0.1


WRITES: dict[str, Callable[[Tensor, int], Tensor]] = {
    each.__name__: each
    for each in (
        slice_set, slice_scaled, column_added, swapped, shifted, recurrence, unfold_gaps, unfold_scaled, unfold_columns,
        unfold_twice, unfold_read, strided_read, strided_set, put_columns, put_added, mask_set, mask_filled,
        mask_scattered, scattered, scatter_value, scatter_added, scatter_reduced, index_added, index_copied,
        filled_by_slices, filled_by_columns, diagonal_set, transposed_set, complex_scaled, shapes_in_place, data_scaled,
        detached_set, without_gradient, foreach_scaled, written_out, activations, real_part, narrowed, split_data,
        copied, rolled, sorted_back,
    )
}  # fmt: skip


class Write(nn.Module):
    def __init__(self, name: str, k: int) -> None:
        super().__init__()
        self.name, self.k = name, k

    def forward(self, h: Tensor) -> Tensor:
        return WRITES[self.name](h.flatten(1) * 1, self.k).reshape(h.shape)


# --- parts that look at the positions or the number of the samples: a slice of the batch is not like the whole


def first_rows(h: Tensor, k: int) -> Tensor:
    h = h * 1
    h[: 1 + k % 3] *= 0.5
    return h


def every_seventh(h: Tensor, k: int) -> Tensor:
    h = h.contiguous() * 1
    h.view(-1)[k % 5 :: 7] = 0.3
    return h


def by_number(h: Tensor, k: int) -> Tensor:
    return h * 0.5 if h.shape[0] > 3 + k % 8 else h + 0.1


def by_position(h: Tensor, k: int) -> Tensor:
    weight = (torch.arange(h.shape[0]) % (2 + k % 3) == 0).to(h.dtype)
    return h * weight.view(-1, *[1] * (h.dim() - 1)) + h * 0.5


def centred(h: Tensor, k: int) -> Tensor:
    return h - h.mean(0, keepdim=True) * (0.5 + k % 2)


def neighbours(h: Tensor, k: int) -> Tensor:
    return h * 0.7 + h.roll(1 + k % 2, 0) * 0.3


def detached_half(h: Tensor, k: int) -> Tensor:
    half = h.shape[0] // 2
    return torch.cat([h[:half].detach(), h[half:]]) if k % 2 else torch.cat([h[:half], h[half:].detach() * 0.5])


def largest_of_all(h: Tensor, k: int) -> Tensor:
    return h / (1 + h.detach().abs().amax() + k % 2)


POSITIONS = {
    each.__name__: each
    for each in (
        first_rows, every_seventh, by_number, by_position, centred, neighbours, detached_half, largest_of_all,
    )
}  # fmt: skip


class Position(nn.Module):
    def __init__(self, name: str, k: int) -> None:
        super().__init__()
        self.name, self.k = name, k

    def forward(self, h: Tensor) -> Tensor:
        return POSITIONS[self.name](h, self.k)


# --- draws: identities if, and only if, the right draws are equal


def same_state(h: Tensor, k: int) -> Tensor:
    state = torch.get_rng_state()
    one = torch.rand(h.shape, dtype=h.dtype)
    torch.set_rng_state(state)
    return h * (1 + one - torch.rand(h.shape, dtype=h.dtype))


def same_seed(h: Tensor, k: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(k)
        one = torch.randn_like(h)
        torch.manual_seed(k)
        return h * (1 + one - torch.randn_like(h))


def forked(h: Tensor, k: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        one = torch.rand_like(h)
        F.dropout(h, 0.5)
    return h * (1 + one - torch.rand_like(h))


def seeded_anew(h: Tensor, k: int) -> Tensor:
    torch.manual_seed(k)
    one = torch.normal(torch.zeros_like(h), 1.0)
    torch.manual_seed(k)
    return h * (1 + one - torch.normal(torch.zeros_like(h), 1.0))


def unlike(h: Tensor, k: int) -> Tensor:
    one, other = torch.rand(h.shape, dtype=h.dtype), torch.rand(h.shape, dtype=h.dtype)
    return h * (1 + (one == other).to(h.dtype).mean())


def halves(h: Tensor, k: int) -> Tensor:
    mask = F.dropout(torch.ones_like(h), 0.5)  # 0 or 2
    return h + h * mask * (mask - 2)


def in_place(h: Tensor, k: int) -> Tensor:
    noise = torch.empty_like(h).uniform_() if k % 2 else torch.empty(h.shape, dtype=h.dtype).normal_()
    coins = torch.empty_like(h).bernoulli_(0.5)
    return h * (1 + noise - noise.clone()) + h * coins * (1 - coins)


def permuted_back(h: Tensor, k: int) -> Tensor:
    order = torch.randperm(h.shape[1]) if k % 2 else torch.rand(h.shape[1]).argsort()
    return h[:, order].tanh()[:, order.argsort()]


def samples_permuted_back(h: Tensor, k: int) -> Tensor:
    order = torch.randperm(h.shape[0]) if k % 2 else torch.rand(h.shape[0]).argsort()
    return h[order].tanh()[order.argsort()]


def own_generator(h: Tensor, k: int) -> Tensor:
    one = torch.rand(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(k))
    return h * (1 + one - torch.rand(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(k)))


def reparametrised(h: Tensor, k: int) -> Tensor:
    sample = torch.distributions.Normal(torch.zeros_like(h), 1.0, validate_args=False).rsample()
    return h * (1 + sample - sample * 1)


def masked(h: Tensor, mask: Tensor, later: Tensor) -> Tensor:
    """`h`, with gradient 1, for `later` = h * mask: if it is the same mask (0 or 2) in forward and backward."""
    return later * mask / 4 + h * (2 - mask) / 2


def redrawn(h: Tensor, k: int) -> Tensor:
    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = F.dropout(torch.ones_like(x), 0.5)
        return x * mask, mask.detach()

    later, mask = checkpoint(part, h, use_reentrant=False)
    return masked(h, mask, later)


def redrawn_reentrant(h: Tensor, k: int) -> Tensor:
    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = F.dropout(torch.ones_like(x), 0.5)
        return x * mask, mask.detach()

    later, mask = checkpoint(part, h, use_reentrant=True)
    return masked(h, mask, later)


def redrawn_nested(h: Tensor, k: int) -> Tensor:
    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.rand_like(x) < 0.5).to(x.dtype) * 2
        return x * mask, mask

    def outer(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first = checkpoint(inner, x, use_reentrant=False)
        second = checkpoint(inner, x, use_reentrant=False)
        return (*first, *second)

    one, mask, other, second_mask = checkpoint(outer, h, use_reentrant=False)
    return (masked(h, mask.detach(), one) + masked(h, second_mask.detach(), other)) / 2


def redrawn_by_seed(h: Tensor, k: int) -> Tensor:
    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(k)
            mask = torch.bernoulli(torch.full_like(x, 0.5)) * 2
        return x * mask, mask.detach()

    later, mask = checkpoint(part, h, use_reentrant=False)
    return masked(h, mask, later)


class KeepsState(torch.autograd.Function):
    """Keeps the state of random numbers in place of the mask that was drawn."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        ctx.state = torch.get_rng_state()
        mask = (torch.rand_like(h) < 0.5).to(h.dtype) * 2
        ctx.mark_non_differentiable(mask)
        return h * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        mask = (torch.rand_like(grad) < 0.5).to(grad.dtype) * 2
        torch.set_rng_state(now)
        return grad * mask


def kept_state(h: Tensor, k: int) -> Tensor:
    later, mask = KeepsState.apply(h)
    return masked(h, mask, later)


DRAWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    each.__name__: each
    for each in (
        same_state, same_seed, forked, seeded_anew, unlike, halves, in_place, permuted_back, samples_permuted_back,
        own_generator, reparametrised, redrawn, redrawn_reentrant, redrawn_nested, redrawn_by_seed, kept_state,
    )
}  # fmt: skip


class Draw(nn.Module):
    def __init__(self, name: str, k: int) -> None:
        super().__init__()
        self.name, self.k = name, k

    def forward(self, h: Tensor) -> Tensor:
        return DRAWS[self.name](h, self.k)


class SeedOfSteps(nn.Module):
    """Draws behind a fixed seed are those of the step before; draws without one are not."""

    def __init__(self, is_seeded: bool, k: int) -> None:
        super().__init__()
        self.is_seeded, self.k = is_seeded, k
        self.register_buffer("before", torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.is_seeded:
            torch.manual_seed(self.k)
        now = torch.rand(16, dtype=h.dtype)
        differs = (now != self.before).to(h.dtype).mean()
        wrong = torch.where(self.count > 0, differs if self.is_seeded else 1 - differs, 0.0)
        with torch.no_grad():
            self.before.copy_(now)
            self.count.add_(1)
        return h * (1 + wrong)


# draws whose values matter: plain PyTorch has to be given the same


class Noise(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "normal":
            return h + torch.randn_like(h) * 0.1
        if self.kind == "path":
            return h * 0.5 + h.tanh() * torch.bernoulli(torch.full((h.shape[0], *[1] * (h.dim() - 1)), 0.5).to(h))
        if self.kind == "mixup":
            return h * 0.5 + h[torch.rand(h.shape[0]).argsort()] * 0.5
        return h + torch.empty_like(h).uniform_(-0.1, 0.1)


DROPOUTS: dict[str, Callable[[random.Random, str], nn.Module]] = {
    "dropout": lambda r, d: nn.Dropout(r.choice([0.1, 0.5])),
    "alpha_dropout": lambda r, d: nn.AlphaDropout(0.2),
    "channels": lambda r, d: nn.Dropout2d(0.5) if d == "image" else nn.Dropout(0.5),
    "noise": lambda r, d: Noise(r.choice(["normal", "uniform"])),
    "path": lambda r, d: Noise("path"),
    "mixup": lambda r, d: Noise("mixup"),
}


# --- state: buffers, and parameters that forward writes to


class State(nn.Module):
    KINDS = (
        "average", "replaced", "counter", "queue", "observer", "slices", "read_late", "clipped", "centre", "nested",
    )  # fmt: skip

    def __init__(self, kind: str, domain: str) -> None:
        super().__init__()
        self.kind = kind
        features = DOMAINS[domain][-1]
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(4, features))
        self.scale = nn.Parameter(torch.ones(features) * 0.9)

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        now = flat.detach().mean(0)
        if self.kind == "average":
            self.mean.lerp_(now, 0.1)
            return h - self.mean * 0.5
        if self.kind == "replaced":
            self.mean = self.mean * 0.9 + now * 0.1
            return h * self.scale + self.mean
        if self.kind == "counter":
            self.count += 1
            return h / (1 + 0.1 * self.count)
        if self.kind == "queue":
            self.queue = torch.cat([now[None], self.queue[:-1]])
            return h + self.queue.mean(0) * 0.5
        if self.kind == "observer":
            torch.maximum(self.mean, flat.detach().abs().amax(0), out=self.mean)
            step = self.mean / 127 + 1e-3
            return h + ((h / step).round() * step - h).detach()
        if self.kind == "slices":
            self.queue[1:] = self.queue[:-1].clone()
            self.queue[0] = now
            return h + self.queue[2] * 0.5
        if self.kind == "read_late":
            before = self.mean.clone()
            self.mean.copy_(now)
            self.mean[0].add_(1)
            return h * self.scale + before
        if self.kind == "clipped":
            with torch.no_grad():
                self.scale.clamp_(-0.8, 0.8)
            return h * self.scale
        if self.kind == "centre":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
            return h * self.scale + self.mean.detach()
        self.queue.view(-1)[:3].add_(now[:3])
        self.count.add_(1)
        return h * self.scale + self.queue.view(-1)[1]


# --- wrappers: around a module, or several


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(h, scale)
        return h.sin() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, scale = ctx.saved_tensors
        return grad * h.cos() * scale, (grad * h.sin()).sum()


class Straight(torch.autograd.Function):
    """A rounding with the gradient of an identity, in the newer form."""

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return (h * 8).round() / 8

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class OnTheSide(torch.autograd.Function):
    """Runs a module's own backward in its own, which leaves gradients in parameters that autograd is not told of."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.run = run
        with torch.no_grad():
            return run(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            torch.autograd.backward(ctx.run(h), grad)
        assert h.grad is not None
        return h.grad, None


class Wrapper(nn.Module):
    KINDS = (
        "residual", "checkpoint", "reentrant", "nested", "nested_reentrant", "sequential", "twice", "frozen",
        "detached", "no_grad", "hooked", "tensor_hook", "parameter_hook", "backward_hook", "doubled", "saved",
        "straight", "in_place", "on_the_side", "vmap", "by_samples", "energy", "parametrized", "replaced_output",
        "inputs_require", "saved_hooks", "kwargs", "other_shape", "weight_data", "functional", "autocast_off",
        "reused_view", "loop",
    )  # fmt: skip

    def __init__(self, kind: str, inner: nn.Module, k: int) -> None:
        super().__init__()
        self.kind, self.inner, self.k = kind, inner, k
        self.scale = nn.Parameter(torch.ones(()) * 0.8)
        if kind == "frozen":
            for parameter in [*inner.parameters()][:: 1 + k % 2]:
                parameter.requires_grad_(False)
        if kind == "hooked":
            inner.register_forward_hook(lambda module, inputs, output: output * 0.5)
        if kind == "backward_hook":
            inner.register_full_backward_hook(lambda module, given, grads: (given[0] * 0.5,))
        if kind == "inputs_require":
            for parameter in inner.parameters():
                parameter.requires_grad_(False)
        if kind == "parameter_hook":
            self.scale.register_hook(lambda grad: grad * 3)
        if kind == "parametrized":
            self.gain = nn.Linear(2, 1)
            parametrize.register_parametrization(self.gain, "weight", nn.Tanh())
        if kind == "other_shape":
            self.side = nn.Parameter(torch.ones(()) * 0.3)

    def forward(self, h: Tensor) -> Tensor:
        inner, kind = self.inner, self.kind
        if kind == "residual":
            return h + inner(h) * self.scale
        if kind in ("checkpoint", "reentrant"):
            return checkpoint(inner, h, use_reentrant=kind == "reentrant")
        if kind in ("nested", "nested_reentrant"):
            is_reentrant = kind == "nested_reentrant"

            def outer(x: Tensor) -> Tensor:
                return checkpoint(inner, x.tanh(), use_reentrant=is_reentrant) * self.scale

            return checkpoint(outer, h, use_reentrant=is_reentrant)
        if kind == "sequential":
            parts = [inner, nn.Tanh(), nn.Sigmoid()]
            return checkpoint_sequential(parts, 2, h, use_reentrant=bool(self.k % 2))
        if kind == "twice":
            return inner(inner(h).tanh())
        if kind == "detached":
            return h * self.scale + inner(h).detach() * 0.5
        if kind == "no_grad":
            with torch.no_grad():
                aside = inner(h)
            return h + aside * self.scale
        if kind == "tensor_hook":
            h = inner(h)
            if h.requires_grad:
                h.register_hook(lambda grad: grad.clamp(-0.01, 0.01) + grad * 0.5)
            return h
        if kind == "doubled":
            return inner(Doubled.apply(h))
        if kind == "saved":
            return Saved.apply(inner(h), self.scale)
        if kind == "straight":
            return Straight.apply(inner(h)) * self.scale
        if kind == "in_place":
            return InPlace.apply(inner(h) * 1)
        if kind == "on_the_side":
            return OnTheSide.apply(h, inner) if h.requires_grad else inner(h)
        if kind == "vmap":
            return torch.vmap(lambda x: x * self.scale + x.sum() * 0.01)(inner(h))
        if kind == "by_samples":
            return torch.cat([inner(each) for each in h.split(2)]) if h.shape[0] > 3 else inner(h)
        if kind == "energy":
            with torch.enable_grad():
                x = h if h.requires_grad else h.detach().requires_grad_()
                (force,) = torch.autograd.grad(inner(x).pow(2).sum(), x, create_graph=True)
            return h * self.scale - force * 0.01
        if kind == "parametrized":
            return inner(h) * self.gain(torch.ones(1, 2, dtype=h.dtype)).reshape(())
        if kind == "inputs_require":
            x = h if h.requires_grad else h.clone().requires_grad_()
            return checkpoint(inner, x, use_reentrant=bool(self.k % 2)) * self.scale
        if kind == "saved_hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                return inner(h) * self.scale
        if kind == "kwargs":
            return checkpoint(lambda x, *, gain: inner(x) * gain, h, gain=self.scale, use_reentrant=False)
        if kind == "other_shape":
            h = inner(h)
            return h * self.side if h.shape[0] % 2 else h
        if kind == "weight_data":
            return inner(h) * self.scale.data + h * self.scale
        if kind == "functional":
            state = {name: value * 0.9 for name, value in inner.named_parameters()}
            return torch.func.functional_call(inner, state, (h,))
        if kind == "autocast_off":
            with torch.autocast("cpu", enabled=False):
                return inner(h) * self.scale
        if kind == "reused_view":
            views = [h.view(h.shape[0], -1)[:, position::2] for position in range(2)]
            return inner(h) + (views[0] * views[1]).mean() * self.scale
        if kind == "loop":
            for _ in range(2 + self.k % 2):
                h = h + inner(h) * self.scale / 4
            return h
        return inner(h)


# --- losses: of the output (B, 3) and targets (B, 3)


def _labels(t: Tensor) -> Tensor:
    return t.argmax(1)


LOSSES: dict[str, Callable[[int], Callable[[Tensor, Tensor], Tensor]]] = {
    "mse": lambda k: F.mse_loss,
    "sum": lambda k: lambda o, t: ((o - t) ** 2).sum(),
    "huber": lambda k: lambda o, t: F.smooth_l1_loss(o, t) + F.l1_loss(o, t) * 0.1,
    "classes": lambda k: lambda o, t: F.cross_entropy(o, _labels(t), label_smoothing=0.1 * (k % 2)),
    "ignored": lambda k: lambda o, t: F.cross_entropy(o, _labels(t), ignore_index=k % 3),
    "weighted": lambda k: lambda o, t: F.cross_entropy(o, _labels(t), weight=torch.tensor([1.0, 2.0, 0.5]).to(o)),
    "logits": lambda k: lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid()),
    "divergence": lambda k: lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "first": lambda k: lambda o, t: F.mse_loss(o[: 2 + k % 8], t[: 2 + k % 8]),
    "last": lambda k: lambda o, t: F.mse_loss(o[-(1 + k % 3) :], t[-(1 + k % 3) :]) + o.mean() * 0.1,
    "every": lambda k: lambda o, t: F.mse_loss(o[:: 2 + k % 2], t[:: 2 + k % 2]),
    "at_least": lambda k: lambda o, t: ((o - t) ** 2).sum() / max(len(o), 3 + k % 8),
    "if_many": lambda k: lambda o, t: F.mse_loss(o, t) + (o.pow(2).mean() if len(o) > 3 + k % 8 else 0),
    "times_size": lambda k: lambda o, t: F.mse_loss(o, t) * len(o) ** (k % 2 + 1) / 10,
    "positions": lambda k: lambda o, t: (((o - t) ** 2).mean(1) * (torch.arange(len(o)) < 1 + k % 8).to(o.dtype)).sum(),
    "odd_even": lambda k: lambda o, t: (((o - t) ** 2).mean(1) * (torch.arange(len(o)) % 2).to(o.dtype)).mean(),
    "halves": lambda k: lambda o, t: F.mse_loss(o[: len(o) // 2], o[len(o) - len(o) // 2 :].detach()) + o.mean(),
    "contrast": lambda k: lambda o, t: F.cross_entropy(o @ t.t(), torch.arange(len(o))),
    "spread": lambda k: lambda o, t: F.mse_loss(o, t) + o.std(0).mean() * 0.1,
    "hardest": lambda k: lambda o, t: ((o - t) ** 2).mean(1).topk(max(len(o) // 2, 1)).values.mean(),
    "running": lambda k: lambda o, t: F.mse_loss(o.cumsum(0), t),
    "flipped": lambda k: lambda o, t: F.mse_loss(o, t) + F.mse_loss(o, o.flip(0).detach()) * 0.3,
    "by_weights": lambda k: lambda o, t: (((o - t) ** 2).mean(1) * t[:, 0].abs()).sum() / t[:, 0].abs().sum(),
    "masked": lambda k: lambda o, t: ((o - t) ** 2)[:, : 1 + k % 3].masked_fill(t[:, :1] < 0, 0.0).mean(),
    "written": lambda k: lambda o, t: _written(o * 1, t, k),
    "permuted": lambda k: lambda o, t: (o[torch.rand(len(o)).argsort()].sum(0) - t.sum(0)).pow(2).mean(),
    "largest": lambda k: lambda o, t: (o - t).abs().amax(),
    "log_sum": lambda k: lambda o, t: F.mse_loss(o, t) + o.logsumexp((0, 1)) * 0.1,
}


def _written(o: Tensor, t: Tensor, k: int) -> Tensor:
    o[:, k % 3] = o[:, k % 3].detach() * 0.5
    o[o > 1] = 0.5
    return F.mse_loss(o, t)
