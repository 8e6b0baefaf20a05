"""What a step does to sums over samples decides its loss of micro-batches, not the values of the batch at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged_losses import BATCH, CLASSES, judge, labels, net, x
from small_models import Model
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
    micro = graph.program.origin.micro
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


def of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Learns how much each of two losses counts (Kendall et al. 2018)."""
    y, scales = output
    losses = torch.zeros(2, dtype=y.dtype)
    losses[0] = functional.mse_loss(y, target)
    losses[1] = functional.l1_loss(y, target)
    return (losses * torch.exp(-scales) + scales).sum() + 0.1 * scales.norm()


def forces(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Energies and their gradients, by a backward in its forward."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = model.net(x)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def flat(model: nn.Module, x: Tensor) -> Tensor:
    """Picks tokens by their places in the flattened batch, and fills its output in place."""
    hidden = model.net(x)
    first = hidden[..., :3].argmax(-1) + torch.arange(len(x))[:, None] * x.shape[1]
    picked = hidden.reshape(-1, hidden.shape[-1])[first[:, :2]]
    out = torch.zeros(len(x), 2, 2 * CLASSES, dtype=hidden.dtype)
    out[..., :CLASSES] = picked
    out[..., CLASSES:] += picked.square()
    return out


WEIGHTED = Model(lambda model, x: (model.net(x), model.scales), net=net(), scales=nn.Parameter(torch.zeros(2)))
FORCES = Model(forces, net=nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)))


@pytest.mark.parametrize(
    ("model", "given", "loss_fn", "targets"),
    [
        (WEIGHTED, x(), of_two, x(BATCH, CLASSES)),
        (FORCES, x(), lambda y: y[0].square().mean() + y[1].abs().mean(), None),
        (Model(flat, net=net()), x(BATCH, 3, 5), lambda y: (y.sum(-1) ** 2).mean() / 3, None),
    ],
)
def test_sums_over_samples_stay_separate(model: nn.Module, given: Tensor, loss_fn: Any, targets: Any) -> None:
    verdict = judge(model, given, loss_fn, targets)
    assert (verdict.kind, verdict.weights, verdict.is_checked) == ("separate", "mean", True)


def test_a_loop_over_samples_is_joined_and_where_the_loss_is_inside_judged_by_values() -> None:
    def one_by_one(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([model.net(sample) for sample in x])

    assert judge(Model(one_by_one, net=net()), x(), lambda y: y.square().mean()).kind == "joined"
    with_loss = Model(lambda model, x: one_by_one(model, x).square().mean(), net=net())
    inside = judge(with_loss, x(), lambda loss: loss)
    assert inside.kind == "separate"
    assert "cannot be judged" in inside.why


def each(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y, t.clamp(min=0), reduction="none")


def masked(y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return (each(y, t) * mask).sum() / mask.sum()


def unpadded(y: Tensor, t: Tensor) -> Tensor:
    valid = t != -100
    return (each(y, t) * valid).sum() / valid.sum()


def non_negative(y: Tensor, t: Tensor) -> Tensor:
    return (each(y, t) * (t >= 0)).sum() / (t >= 0).sum()


def up_to_length(y: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(CLASSES)[None] < lengths[:, None]
    return (y.square() * mask).sum() / mask.sum()


def known(y: Tensor, t: Tensor) -> Tensor:
    is_known = ~torch.isnan(t)
    return ((y - t.nan_to_num()).square() * is_known).sum() / is_known.sum()


def tokens_shifted(y: Tensor, t: Tensor) -> Tensor:
    """Of a causal language model: each position predicts the next, and 0 is padding."""
    counts = t[:, 1:] != 0
    return (each(y[:, :-1].mT, t[:, 1:]) * counts).sum() / counts.sum()


def shifted_by_sample(y: Tensor, t: Tensor) -> Tensor:
    losses = functional.cross_entropy(y[:, :-1].mT, t[:, 1:], reduction="none")
    return (losses.sum(1) / (t[:, 1:] != -100).sum(1)).mean()


def positives(y: Tensor, t: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(y, t, reduction="none").sum() / t.sum().clamp(min=1)


def padded_by_cast(y: Tensor, t: Tensor) -> Tensor:
    return (each(y, t) * t.bool()).sum() / t.bool().sum()


def not_special(y: Tensor, t: Tensor) -> Tensor:
    is_plain = ~torch.isin(t, torch.tensor([0, 9]))
    return (each(y, t.clamp(max=CLASSES - 1)) * is_plain).sum() / is_plain.sum()


def non_zero(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum() / t.count_nonzero()


def token_labels() -> Tensor:
    return 1 + labels(BATCH, 5) % (CLASSES - 1)


ALL = torch.ones(BATCH)
COUNTING: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "label -100, by hand": (unpadded, labels()),
    "labels of at least 0": (non_negative, labels()),
    "mask of floats": (masked, (labels(), ALL)),
    "mask of integers": (masked, (labels(), ALL.long())),
    "mask of bools": (masked, (labels(), ALL.bool())),
    "lengths": (up_to_length, torch.full((BATCH,), CLASSES)),
    "targets that are unknown": (known, x(BATCH, CLASSES)),
    "one-hot labels": (positives, functional.one_hot(labels(), CLASSES).float()),
    "labels as truth": (padded_by_cast, 1 + labels() % (CLASSES - 1)),
    "labels among some": (not_special, 1 + labels() % (CLASSES - 1)),
    "targets that are not 0": (non_zero, x(BATCH, CLASSES)),
}


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("count", [2, 3])
def test_a_loss_that_divides_by_what_counts_is_joined_though_all_counts(name: str, count: int) -> None:
    loss_fn, targets = COUNTING[name]
    verdict = judge(net(), x(), loss_fn, targets, count)
    assert (verdict.kind, verdict.is_checked) == ("joined", True)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES))


def test_tokens_that_are_shifted_are_padded_too() -> None:
    assert judge(words(), token_labels(), tokens_shifted, token_labels()).kind == "joined"
    assert judge(words(), token_labels(), shifted_by_sample, token_labels()).kind == "separate"


def test_a_mask_that_the_model_hands_on_is_counted() -> None:
    hands_on = Model(lambda model, x, mask: (model.net(x), mask != 0), net=net())
    inputs = {"x": x(), "mask": ALL.long()}
    assert judge(hands_on, inputs, lambda y, t: masked(y[0], t, y[1]), labels()).kind == "joined"
    assert judge(hands_on, inputs, lambda y, t: (each(y[0], t) * y[1]).mean(), labels()).kind == "separate"


def test_labels_are_looked_at_all_over_the_batch() -> None:
    """Padded behind its middle alone: the first samples, as many as are checked, know nothing of it."""
    targets = labels(64)
    targets[40:] = -100
    verdict = judge(net(), x(64, 5), unpadded, targets, 2)
    assert verdict.kind == "joined"
    assert "neither their sum nor their mean" in verdict.why


def test_what_is_asked_for_is_taken_and_says_as_long_as_what() -> None:
    verdict = judge(net(), x(), masked, (labels(), ALL.bool()), asked="separate")
    assert (verdict.kind, verdict.weights) == ("separate", "mean")
    assert "not by what it computes: aten.div.Tensor in the loss takes samples together" in verdict.why


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (lambda y, t, m: (each(y, t) * m).mean(), (labels(), ALL.bool())),
        (lambda y, t, m: (each(y, t) * m).sum() / m.numel(), (labels(), ALL.long())),
        (lambda y, t: (each(y, t) * (t != -100)).mean(), labels()),
        (lambda y, n: (y.square() * (torch.arange(CLASSES) < n[:, None])).sum(1).mean(), torch.full((BATCH,), CLASSES)),
        (lambda y, n: (y.square().sum(1) / n).mean(), torch.full((BATCH,), CLASSES)),
    ],
)
def test_a_mean_over_samples_stays_separate_whatever_is_masked(loss_fn: Any, targets: Any) -> None:
    verdict = judge(net(), x(), loss_fn, targets)
    assert (verdict.kind, verdict.weights) == ("separate", "mean")


def test_a_model_that_counts_its_mask_is_refused() -> None:
    inside = Model(lambda model, x, t, mask: masked(model.net(x), t, mask), net=net())
    inputs = {"x": x(), "t": labels(), "mask": ALL.bool()}
    told = r"neither a loss each \(.*aten\.div\.Tensor in the root .*\) nor one together .*`loss_fn"
    with pytest.raises(CaptureError, match=told):
        judge(inside, inputs, lambda loss: loss)
    assert judge(inside, inputs, lambda loss: loss, asked="separate").kind == "separate"


def known_and_kept(model: nn.Module, x: Tensor, t: Tensor, kept: Tensor | None = None) -> Tensor:
    """A mean over the targets that are known, and kept by a mask of floats."""
    if kept is None:
        return known(model.net(x), t)
    return ((model.net(x) - t).square() * kept).sum() / kept.sum()


@pytest.mark.parametrize(
    "others",
    [{}, {"kept": 1 - functional.one_hot(labels(), CLASSES).float()}],
    ids=["unknown", "as many of each sample are kept"],
)
def test_floats_of_a_model_that_makes_its_loss_may_be_targets_and_masks(others: dict[str, Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"aten\.div\.Tensor in the root .*takes samples together"):
        judge(Model(known_and_kept, net=net()), {"x": x(), "t": x(BATCH, CLASSES), **others}, lambda loss: loss)


def test_what_lay_there_before_mixes_nothing() -> None:
    """A dropout makes an empty tensor first; what mixes is the loss."""
    with pytest.raises(CaptureError, match="samples of the batch are mixed by") as caught:
        judge(nn.Sequential(nn.Dropout(0.5), net(), Root()), x(), lambda y: y)
    assert "empty" not in str(caught.value)


class Root(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.square().mean().sqrt()


def test_samples_that_an_op_saturates_for_do_not_hide_what_mixes_them() -> None:
    """Every fourth is at right angles to the others like it, and long: a softmax over them is that over each itself.

    What the loss does to them tells, where their values cannot.
    """
    samples = x(16, 5)
    samples[::4] = 10 * torch.eye(4, 5)

    def over_the_batch(y: Tensor) -> Tensor:
        return (y @ y.T).logsumexp(1).mean()

    layer = nn.Linear(5, 5, bias=False)
    nn.init.eye_(layer.weight)
    verdict = judge(layer, samples[::4], over_the_batch)
    assert (verdict.kind, "aten.mm.default in the loss takes samples together" in verdict.why) == ("joined", True)
    verdict = judge(layer, samples, over_the_batch)
    assert verdict.kind == "joined"
