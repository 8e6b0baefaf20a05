"""What `forward` changes under `torch.no_grad()`: captured as it is, or named where micro-batches cannot have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import random
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from rlplace.errors import CaptureError
from rlplace.graphs import capture, run_graph


class Layer(nn.Module):
    def __init__(self, change: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3, dtype=torch.float64), change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.linear)
        return self.linear(x)


def normalised(layer: nn.Linear) -> None:
    layer.weight /= layer.weight.norm(dim=1, keepdim=True)


def shifted(layer: nn.Linear) -> None:
    layer.bias += 1


def clamped(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


CHANGES = [(normalised, "weight"), (shifted, "bias"), (clamped, "weight")]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_parameters_that_forward_writes_to(change: Callable[[nn.Linear], object], name: str) -> None:
    model, x = Layer(change), random(6, 4)
    step = run_graph(capture(model, x, lambda y: (y * y).mean(), "sgd"))
    with pytest.raises(CaptureError, match=rf"changes 'linear.{name}'"):
        capture(model, x, lambda y: (y * y).mean(), "sgd", micro_batches=2)
    (model(x) ** 2).mean().backward()
    for parameter in ("weight", "bias"):
        torch.testing.assert_close(
            step.gradients[f"linear.{parameter}"], model.get_parameter(f"linear.{parameter}").grad
        )


def test_a_norm_of_all_processes_is_in_one_process_as_any_other() -> None:
    x, steps = random(8, 4), []
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), kind(3)).double()
        steps.append(run_graph(capture(model, x, lambda y: (y**3).mean(), "sgd", micro_batches=2)))
    one, other = steps
    assert one.state.keys() == other.state.keys()
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_sizes_that_fit_one_batch_alone_are_named() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x)).as_strided((8, 2), (4, 2))

    with pytest.raises(CaptureError, match=r"x\.shape\[0\]"):
        capture(Fixed(), random(8, 4), lambda y: (y * y).mean(), "sgd", micro_batches=2)
