"""A loss that keeps something of its own is as it was after a capture, or refused where the step would lose it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import CaptureError
from rlplace.graphs import capture


class Counting(nn.Module):
    """Weighs its loss by how often it was called."""

    def __init__(self, change: Callable[[Counting], None]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("weights", torch.arange(3.0))
        self.change = change
        self.last = 0

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        self.change(self)
        self.last += 1
        return ((y - t).square() * self.weights).mean() * (1 + self.calls)


def in_place(loss: Counting) -> None:
    loss.calls += 1


def anew(loss: Counting) -> None:
    loss.calls = loss.calls + 1


@pytest.mark.parametrize("change", [in_place, anew])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_changes_its_buffer_is_refused_and_left_as_it_was(
    change: Callable[[Counting], None], micro_batches: int
) -> None:
    loss, batch = Counting(change), (torch.randn(8, 4), torch.randn(8, 3))
    calls = loss.calls
    for loss_fn in (loss, lambda y, t: loss(y, t) / 2):
        with pytest.raises(CaptureError, match=r"the loss changes its buffer '(loss\.)?calls'"):
            capture(nn.Linear(4, 3), batch[0], loss_fn, "sgd", targets=batch[1], micro_batches=micro_batches)
        assert loss.calls is calls
        assert calls == 0
        assert loss.last == 0


def test_a_loss_that_reads_its_buffers_is_captured() -> None:
    loss = Counting(lambda loss: None)
    graph = capture(nn.Linear(4, 3), torch.randn(8, 4), loss, "sgd", targets=torch.randn(8, 3))
    assert graph.num_ops > 0
    assert loss.last == 0


def test_what_the_model_changes_is_its_own() -> None:
    """Though the loss reaches the model: its running statistics are part of the step."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, torch.randn(8, 4), lambda y: y.square().mean() + 0 * len(list(model.children())), "sgd")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
