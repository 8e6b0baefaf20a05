"""Batch norm in micro-batches: what eager gradient accumulation over the same slices computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Case, ConvNorm, SharedNorm, mean_square, random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError
from rlplace.graphs import capture, run_graph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.slices import run_in_micro_batches
from rlplace.graphs.opgraph import OpGraph


class Twice(nn.Module):
    """One batch norm, called twice in a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64, **options)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(self.norm(x)))
        return out


class Recomputed(Twice):
    """Runs again in the backward, which updates running statistics once more."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def captured(case: Case, count: int) -> OpGraph:
    return capture(case.model, case.inputs, case.loss_fn, "sgd", micro_batches=count)


CASES = {
    "one call": lambda: Case(ConvNorm(), random(5, 2, 5, 5), mean_square),
    "of averages": lambda: Case(ConvNorm(momentum=None), random(5, 2, 5, 5), mean_square),
    "without affine": lambda: Case(ConvNorm(affine=False), random(5, 2, 5, 5), mean_square),
    "two calls": lambda: Case(Twice(), random(7, 4), mean_square),
    "two calls of averages": lambda: Case(Twice(momentum=None), random(7, 4), mean_square),
    "recomputed": lambda: Case(Recomputed(), random(7, 4), mean_square),
    "without statistics": lambda: Case(ConvNorm(track_running_stats=False), random(5, 2, 5, 5), mean_square),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_is_accumulation_over_the_slices(name: str, count: int) -> None:
    case = CASES[name]()
    case.model(case.inputs + 1)  # other statistics than the initial ones
    graph = captured(case, count)
    micro = require_program(graph).origin.micro
    assert micro is not None
    model = copy.deepcopy(case.model)
    loss = run_in_micro_batches(model, ((case.inputs,), {}), case.loss_fn, (), micro)
    result = run_graph(graph)
    torch.testing.assert_close(result.result, loss)
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(result.gradients[parameter], value.grad, rtol=1e-9, atol=1e-9)
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(result.state[buffer], value, rtol=1e-9, atol=1e-9)


def test_only_what_updates_a_buffer_lives_with_it() -> None:
    graph = captured(CASES["one call"](), 3)
    micro = require_program(graph).origin.micro
    assert micro is not None
    assert not micro.equals_whole
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        buffer = graph.names.index(name)
        together = np.flatnonzero(graph.colocation == graph.colocation[buffer])
        assert graph.colocation[buffer] >= 0
        assert (graph.micro_batch[together] == -1).all()
        assert {graph.targets[op] for op in together} <= {
            "buffer", "aten.cat.default", "aten.lerp.Scalar", "aten.add.Tensor", "aten.copy_.default",
        }  # fmt: skip
    norms = [op for op in range(graph.num_ops) if "batch_norm" in graph.targets[op]]
    assert len(norms) == 6
    assert (graph.colocation[norms] == -1).all()


def test_norms_that_are_not_trained_are_left_alone() -> None:
    case = CASES["one call"]()
    case.model(case.inputs + 1)
    case.model.eval()
    graph = captured(case, 2)
    micro = require_program(graph).origin.micro
    assert micro is not None
    assert micro.equals_whole
    assert not len(graph.mutation_op) - len(list(case.model.parameters()))
    loss = mean_square(case.model(case.inputs))
    torch.testing.assert_close(run_graph(graph).result, loss.detach())


def test_a_step_that_reads_running_statistics_is_refused() -> None:
    case = Case(SharedNorm(), random(6, 4), mean_square)
    with pytest.raises(CaptureError, match=r"running_mean"):
        capture(case.model, case.inputs, case.loss_fn, "sgd", micro_batches=2, loss="accumulated")


def test_the_model_stays_as_it_is() -> None:
    case = CASES["one call"]()
    before = copy.deepcopy(case.model.state_dict())
    captured(case, 2)
    assert all("forward" not in vars(module) for module in case.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


def test_neighbouring_norms_hand_over_their_statistics_together() -> None:
    """Of fourteen, four, one with another momentum, eight and one."""
    layers = [nn.BatchNorm1d(3, momentum=0.5 if k == 4 else 0.1, dtype=torch.float64) for k in range(14)]
    case = Case(nn.Sequential(*layers), random(6, 3), mean_square)
    graph = captured(case, 2)
    handed_over = [op for op in range(graph.num_ops) if graph.names[op].startswith("statistics")]
    assert sorted(graph.micro_batch[handed_over].tolist()) == [0] * 4 + [1] * 4
    model = copy.deepcopy(case.model)
    micro = require_program(graph).origin.micro
    assert micro is not None
    run_in_micro_batches(model, ((case.inputs,), {}), case.loss_fn, (), micro)
    state = run_graph(graph).state
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(state[buffer], value, rtol=1e-9, atol=1e-9)
