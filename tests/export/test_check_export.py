"""`check_export`: a placed step against plain PyTorch in float64, random numbers and casts among them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_models import mean_square
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.export import check_export
from rlplace.export.formats import SeededDraws
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Problem, Simulator
from rlplace.measure.problem import Plan
from rlplace.search.rules import baselines


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_check_in_float64_is_exact_to_rounding() -> None:
    torch.manual_seed(0)
    problem = Problem.profile(capture(normed(), torch.randn(5, 6), mean_square, "adam"), Host.detect("cores"))
    devices = baselines.random(problem, np.random.default_rng(1))[0]
    result = check_export(problem.graph, problem.host, Simulator(problem).plan(devices))
    assert result.ok
    assert result.max_loss_rel_diff < 1e-12
    assert result.max_param_rel_diff < 1e-9
    assert set(result.to_dict()) >= {"schema", "max_loss_rel_diff", "max_param_rel_diff", "ok"}


@pytest.mark.parametrize(("model", "words"), [(normed(), "gradient accumulation"), (normed()[:1], "the whole batch")])
def test_what_it_was_compared_with_is_said(model: nn.Module, words: str) -> None:
    graph = capture(model, torch.randn(6, 6), mean_square, "sgd", micro_batches=2)
    problem = Problem.profile(graph, Host.detect("cores"))
    plan = Simulator(problem).plan(np.zeros(graph.num_ops, dtype=np.int32))
    result = check_export(graph, problem.host, plan, num_steps=2)
    assert result.ok
    assert result.to_dict()["compared_with"] == words


def with_dropout(micro_batches: int = 1) -> tuple[OpGraph, Host, Plan]:
    """A step with two dropouts, all of its ops on the first core but for the last layer's."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.25))
    graph = capture(model, torch.randn(8, 6), mean_square, "sgd", micro_batches=micro_batches)
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    devices = np.array([module == "2" for module in graph.modules], dtype=np.int32) % problem.host.num_devices
    return graph, problem.host, Simulator(problem).plan(problem.check_placement(together(graph, devices)))


def together(graph: OpGraph, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """Every co-location class where the first of its ops is."""
    first: dict[int, int] = {}
    for op, label in enumerate(graph.colocation.tolist()):
        if label >= 0:
            devices[op] = first.setdefault(label, int(devices[op]))
    return devices


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_dropout_is_checked_with_the_draws_of_the_placed_step(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = with_dropout(micro_batches)
    checked = check_export(*step, num_steps=3)
    assert checked.ok
    assert checked.num_random_ops == checked.to_dict()["num_random_ops"] == 2 * micro_batches
    monkeypatch.setattr("rlplace.export.formats.SeededDraws", partial(SeededDraws, seed=1))
    assert not check_export(*step, num_steps=3).ok


def test_random_ops_that_plain_pytorch_runs_otherwise_are_refused() -> None:
    graph, _, _ = with_dropout()
    draws = SeededDraws(graph)
    with pytest.raises(InvalidValue, match=r"model is 'randn in plain PyTorch'.*`model.eval\(\)`"), draws.of_step(0):
        torch.randn(3)
    with pytest.raises(InvalidValue, match=r"model is '0 random ops in plain PyTorch', expected 2"), draws.of_step(0):
        torch.ones(3)


def test_models_that_compute_parts_in_float32_are_checked_in_float64_throughout() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            scale = y.to(torch.float32).pow(2).mean(-1, keepdim=True).rsqrt().to(y.dtype)
            bias = torch.arange(8, dtype=torch.float32, device=y.device)
            return torch.softmax(y.float() * scale + bias, dim=-1, dtype=torch.float32).log()

    graph = capture(Careful(), torch.randn(5, 6), mean_square, "adam")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    result = check_export(graph, problem.host, Simulator(problem).plan(baselines.single(problem, 0)))
    assert result.max_loss_rel_diff < 1e-12
    assert result.max_param_rel_diff < 1e-9


def test_tensors_of_the_default_type_are_checked_in_float64_too() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shares = torch.softmax(torch.zeros(x.shape[0], 8), 1)
            return torch.bmm(shares.unsqueeze(1), self.linear(x).unsqueeze(2)) * torch.tensor(0.1)

    graph = capture(Routed(), torch.randn(5, 6), mean_square, "adam")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    result = check_export(graph, problem.host, Simulator(problem).plan(baselines.single(problem, 0)))
    assert result.max_loss_rel_diff < 1e-12
    assert torch.get_default_dtype() is torch.float32


def test_a_step_with_casts_cannot_be_checked_in_float64() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(normed(), torch.ones(5, 6), mean_square, "sgd")
    plan = Plan(np.zeros(graph.num_ops, dtype=np.int32), *(np.zeros(0, dtype=np.int32) for _ in range(3)))
    with pytest.raises(InvalidValue, match="captured under autocast"):
        check_export(graph, Host.detect("cores"), plan)
