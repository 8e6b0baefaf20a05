"""`run_graph`: the plainest meaning of a captured step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from micrographs import op_graph
from small_models import CASES, mean_square, random, step_graph
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs import OptimizerSpec, capture, run_graph
from rlplace.graphs.interpreter import require_program


def linear(weight: list[list[float]]) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weight, dtype=torch.float64))
    return model


def test_a_step_by_hand() -> None:
    """loss = sum(x w) with x = (1, 2), (3, 4): gradient (4, 6), then one step of 0.5 times that."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    graph = capture(linear([[1.0, 10.0]]), x, torch.sum, OptimizerSpec("sgd", lr=0.5))
    step = run_graph(graph)
    assert float(step.result) == 64.0
    assert step.gradients["weight"].tolist() == [[4.0, 6.0]]
    assert step.state["weight"].tolist() == [[-1.0, 7.0]]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_every_read_of_a_parameter_sees_the_value_before_its_update(optimizer: str) -> None:
    case = CASES["tied"]()
    without = run_graph(capture(case.model, case.inputs, case.loss_fn))
    updated = run_graph(capture(case.model, case.inputs, case.loss_fn, optimizer))
    assert torch.equal(updated.result, without.result)
    assert not torch.equal(updated.state["embedding.weight"], without.state["embedding.weight"])


def test_running_twice_starts_from_the_same_values() -> None:
    graph = step_graph("buffers")
    first, second = run_graph(graph), run_graph(graph)
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    assert int(first.state["count"]) == 1


def test_gradients_are_reported_without_updates_and_none_without_a_loss() -> None:
    model, x = linear([[1.0, 1.0]]), random(3, 2)
    expected = run_graph(capture(model, x, mean_square, "sgd")).gradients
    found = run_graph(capture(model, x, mean_square)).gradients
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run_graph(capture(model, x)).gradients == {}


def test_a_graph_without_a_program_cannot_run() -> None:
    with pytest.raises(InvalidValue, match="capture it again") as refused:
        run_graph(op_graph([[], [0]]))
    assert refused.value.field == "program"
    graph = capture(linear([[1.0, 1.0]]), random(3, 2))
    assert require_program(graph) is graph.program
    with pytest.raises(InvalidValue):
        require_program(dataclasses.replace(graph, program=None))
