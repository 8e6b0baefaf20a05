"""What a step does to sums over samples decides its loss of micro-batches, not the values of the batch at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged_losses import BATCH, CLASSES, judge, labels, net, x
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError
from rlplace.graphs import capture


def flooded(output: Tensor, target: Tensor) -> Tensor:
    """Flooding (Ishida et al. 2020): of the mean loss, which is above the flood here."""
    return (functional.mse_loss(output, target) - 0.05).abs() + 0.05


def capped(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target).clamp(max=1e6)


def free_bits(output: Tensor) -> Tensor:
    return (0.5 * output.pow(2)).mean(0).clamp(max=1e6).sum()


def of_the_sure(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples whose output is sure enough, all of them here."""
    counts = (output.detach().softmax(1).amax(1) < 2).to(output.dtype)
    return (functional.cross_entropy(output, target, reduction="none") * counts).sum() / counts.sum().clamp(min=1)


def switched(output: Tensor) -> Tensor:
    return torch.where((output < 1e6).all(), output.square().mean(), output.mean())


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (flooded, 9 + x(BATCH, CLASSES)),
        (capped, x(BATCH, CLASSES)),
        (free_bits, None),
        (of_the_sure, labels()),
        (switched, None),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_what_is_no_sum_over_samples_is_joined_though_it_looks_like_one(
    loss_fn: Callable[..., Tensor], targets: Any, count: int
) -> None:
    graph = capture(net(), x(), loss_fn, "sgd", targets=targets, micro_batches=count)
    assert graph.program is not None
    micro = graph.program.origin.micro
    assert micro is not None
    assert (micro.verdict.kind, micro.verdict.is_checked) == ("joined", True)
    asked = judge(net(), x(), loss_fn, targets, count, asked="separate")
    assert "losses of slices make it with this batch, but not" in asked.why


class ByLargest(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().amax().clamp(min=1e3))


class ByNorm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden * (1e3 / hidden.norm().clamp(min=1e3))


class Routed(nn.Linear):
    """Leaves out what comes after a capacity that the batch here does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        place = (hidden > 0).long().cumsum(0)
        return hidden * (place < 100)


@pytest.mark.parametrize(
    ("kind", "op"),
    [(ByLargest, r"aten\.amax\.default"), (ByNorm, r"aten\.linalg_vector_norm\.default"), (Routed, r"aten\.cumsum")],
)
@pytest.mark.parametrize("asked", ["auto", "joined"])
def test_models_that_mix_samples_once_they_are_large_are_refused_by_name(kind: Any, op: str, asked: str) -> None:
    given: dict[str, Any] = {"targets": labels(), "micro_batches": 2, "loss": asked}
    with pytest.raises(CaptureError, match=rf"mixed by {op}.* in the root \({kind.__name__}\)"):
        capture(kind(5, CLASSES), x(), functional.cross_entropy, "sgd", **given)
    with pytest.raises(CaptureError, match=op):
        capture(kind(5, CLASSES), x(), micro_batches=2)


class Weighted(nn.Module):
    """Learns how much each of two losses counts (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scales = net(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.scales


def of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    y, scales = output
    losses = torch.zeros(2, dtype=y.dtype)
    losses[0] = functional.mse_loss(y, target)
    losses[1] = functional.l1_loss(y, target)
    return (losses * torch.exp(-scales) + scales).sum() + 0.1 * scales.norm()


class Forces(nn.Module):
    """Returns energies and their gradients, by a backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.net(x)
            return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Flat(nn.Module):
    """Picks tokens by their places in the flattened batch, and fills its output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        first = hidden[..., :3].argmax(-1) + torch.arange(len(x))[:, None] * x.shape[1]
        picked = hidden.reshape(-1, hidden.shape[-1])[first[:, :2]]
        out = torch.zeros(len(x), 2, 2 * CLASSES, dtype=hidden.dtype)
        out[..., :CLASSES] = picked
        out[..., CLASSES:] += picked.square()
        return out


@pytest.mark.parametrize(
    ("model", "given", "loss_fn", "targets"),
    [
        (Weighted(), x(), of_two, x(BATCH, CLASSES)),
        (Forces(), x(), lambda y: y[0].square().mean() + y[1].abs().mean(), None),
        (Flat(), x(BATCH, 3, 5), lambda y: (y.sum(-1) ** 2).mean() / 3, None),
    ],
)
def test_sums_over_samples_stay_separate(model: nn.Module, given: Tensor, loss_fn: Any, targets: Any) -> None:
    verdict = judge(model, given, loss_fn, targets)
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", True)


def test_a_loop_over_samples_is_joined_and_where_the_loss_is_inside_judged_by_values() -> None:
    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.net(sample) for sample in x])

    class Inside(OneByOne):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    assert judge(OneByOne(), x(), lambda y: y.square().mean()).kind == "joined"
    inside = judge(Inside(), x(), lambda loss: loss)
    assert inside.kind == "separate"
    assert "cannot be judged" in inside.why
