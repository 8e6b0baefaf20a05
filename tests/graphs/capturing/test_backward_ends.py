"""What a backward may begin at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import mean_square
from torch import nn

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.capturing.trace import AsSlice, backward_ends


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (nn.Linear(4, 2), lambda y: y, "expected a scalar tensor"),
        (nn.Linear(4, 2), lambda y: 3.0, "the loss is float"),
        (nn.Linear(4, 2).requires_grad_(False), mean_square, "does not depend on any parameter"),
        (nn.Linear(4, 2), lambda y: torch.ones(()), "does not depend on any parameter"),
    ],
)
def test_a_step_without_a_meaning_says_why(model: nn.Module, loss_fn: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.ones(3, 4), loss_fn)


def test_a_whole_step_begins_at_its_loss_and_a_slice_at_its_part_of_it() -> None:
    loss = torch.ones((), requires_grad=True) * 3
    ends, seeds = backward_ends((loss, {"accuracy": 1.0}), [], None)
    assert ends == [loss]
    assert [seed.item() for seed in seeds] == [1.0]
    assert [seed.item() for seed in backward_ends(loss, [], AsSlice(weight=0.25))[1]] == [0.25]
    with pytest.raises(CaptureError, match="returned a tuple, expected the loss alone"):
        backward_ends((loss, 1.0), [], AsSlice(weight=0.25))


def test_without_a_loss_of_its_own_a_slice_begins_at_outputs_that_are_given() -> None:
    outputs = [torch.ones(2, requires_grad=True) * 2, torch.ones(2)]
    given = [torch.full((2,), 0.5)]
    ends, seeds = backward_ends(outputs, given, AsSlice(outputs=(0,)))
    assert ends == [outputs[0]]
    assert seeds is given
