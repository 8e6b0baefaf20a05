"""Losses that divide by what counts are joined, though all of the batch that is checked counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from judged_losses import BATCH, CLASSES, judge, labels, net, x
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.micro.other_values import MOST_VALUES, other_values
from rlplace.graphs.slicing import Slicing


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


ALL = torch.ones(BATCH)
COUNTING: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "label -100, by hand": (unpadded, labels()),
    "labels of at least 0": (non_negative, labels()),
    "mask of floats": (masked, (labels(), ALL)),
    "mask of integers": (masked, (labels(), ALL.long())),
    "mask of bools": (masked, (labels(), ALL.bool())),
    "lengths": (up_to_length, torch.full((BATCH,), CLASSES)),
    "targets that are unknown": (known, x(BATCH, CLASSES)),
}


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("count", [2, 3])
def test_a_loss_that_divides_by_what_counts_is_joined_though_all_counts(name: str, count: int) -> None:
    loss_fn, targets = COUNTING[name]
    verdict = judge(net(), x(), loss_fn, targets, count)
    assert (verdict.kind, verdict.is_checked) == ("joined", True)


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
    assert "not once some of target 1 is 0" in verdict.why


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


class Inside(nn.Module):
    """Makes its loss itself, a mean over what its mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return masked(self.net(x), t, mask)


def test_a_model_that_counts_its_mask_is_refused() -> None:
    inputs = {"x": x(), "t": labels(), "mask": ALL.bool()}
    with pytest.raises(CaptureError, match=r"neither a loss each \(.*input 2 is 0.*\) nor one together .*`loss_fn"):
        judge(Inside(), inputs, lambda loss: loss)
    assert judge(Inside(), inputs, lambda loss: loss, asked="separate").kind == "separate"


def test_other_values_are_next_to_what_was_compared_and_change_one_slice_of_one_tensor() -> None:
    given = [x(), torch.tensor([3, 1, 4, 1]), torch.ones(4, dtype=torch.bool)]
    slicing = Slicing((None, 0, 0), (1, 3))
    found = [(other.position, other.value, other.tensors[other.position].tolist()) for other in others(given, slicing)]
    assert found == [
        (1, -99.0, [-99, 1, 4, 1]),
        (1, -100.0, [-100, 1, 4, 1]),
        (1, -101.0, [-101, 1, 4, 1]),
        (2, 0.0, [False, True, True, True]),
        (2, 1.0, [True, True, True, True]),
    ]
    assert given[1].tolist() == [3, 1, 4, 1]
    assert len(list(other_values(given, slicing, 1, set(range(50))))) == MOST_VALUES + 2
    assert not list(other_values([x()], Slicing((0,), (4, 4)), 1, {0.0}))


def others(given: list[Tensor], slicing: Slicing) -> list[Any]:
    return list(other_values(given, slicing, 1, {-100.0}))


def test_samples_that_an_op_saturates_for_do_not_hide_what_mixes_them() -> None:
    """Every fourth is at right angles to the others like it, and long: a softmax over them is that over each itself."""
    samples = x(16, 5)
    samples[::4] = 10 * torch.eye(4, 5)

    def over_the_batch(y: Tensor) -> Tensor:
        return (y @ y.T).logsumexp(1).mean()

    layer = nn.Linear(5, 5, bias=False)
    nn.init.eye_(layer.weight)
    verdict = judge(layer, samples[::4], over_the_batch)
    assert (verdict.kind, verdict.is_checked) == ("separate", True), "as far as these can tell"
    verdict = judge(layer, samples, over_the_batch)
    assert (verdict.kind, "not of others" in verdict.why) == ("joined", True)
