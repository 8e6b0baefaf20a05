"""The plan of one graph becomes one of another: twins stay together, and it can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loops import apart, batches, captured, classifier
from naive_plan import naive_plan, random_devices
from placed_steps import alternating
from torch import nn
from torch.nn import functional

from rlplace.export.placed.graphs import Flags, captured_again, captured_evaluation, carried_plan
from rlplace.graphs import capture
from rlplace.graphs.opgraph import FORWARD
from rlplace.measure.placement import check_plan


def test_the_same_graph_keeps_its_devices_and_order() -> None:
    graph = captured(classifier(), "adam")
    for seed in range(3):
        plan = naive_plan(graph, random_devices(graph, 3, np.random.default_rng(seed)), np.random.default_rng(seed))
        carried = check_plan(graph, 3, carried_plan(graph, plan, graph))
        assert np.array_equal(carried.devices, plan.devices)
        ops = [item for item in plan.sequence.tolist() if item < graph.num_ops]
        assert [item for item in carried.sequence.tolist() if item < graph.num_ops] == ops


@pytest.mark.parametrize("seed", range(4))
def test_another_batch_has_the_same_devices(seed: int) -> None:
    model = classifier(dropout=0.5)
    graph = captured(model, "adam")
    ((x, labels),) = batches(1, 2)
    other = captured_again(graph, ((x,), {}, (labels,)), Flags.of(model))
    plan = naive_plan(graph, random_devices(graph, 3, np.random.default_rng(seed)))
    assert np.array_equal(check_plan(other, 3, carried_plan(graph, plan, other)).devices, plan.devices)


def test_the_forward_alone_goes_where_the_forward_was() -> None:
    graph = captured(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double(), "adam")
    ((x, _),) = batches(1, 7)
    other = captured_evaluation(graph, ((x,), {}, ()))
    plan = apart(graph)
    carried = check_plan(other, 2, carried_plan(graph, plan, other))
    where = dict(zip(graph.names, plan.devices.tolist(), strict=True))
    forward = [op for op in range(other.num_ops) if other.phases[op] == FORWARD]
    assert len(forward) == other.num_ops
    assert {other.targets[op]: where[other.names[op]] for op in forward} == {
        other.targets[op]: int(carried.devices[op]) for op in forward
    }


def test_longer_sequences_go_on_where_the_last_step_was() -> None:
    model = nn.LSTM(4, 5)
    graphs = [capture(model, torch.ones(length, 2, 4), lambda y: y[0].sum(), "sgd") for length in (3, 6)]
    plan = naive_plan(graphs[0], alternating(graphs[0], 2))
    for graph, other in (graphs, graphs[::-1]):
        mine = plan if graph is graphs[0] else carried_plan(graphs[0], plan, graph)
        check_plan(other, 2, carried_plan(graph, mine, other))


def test_the_last_ops_come_last() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4), functional.mse_loss, "sgd", targets=torch.ones(3, 2))
    last = {op for op in range(graph.num_ops) if graph.phases[op] != FORWARD}
    plan = check_plan(graph, 2, carried_plan(graph, apart(graph), graph, last=last))
    sends_late = {
        graph.num_ops + k for k, tensor in enumerate(plan.transfer_tensor.tolist()) if graph.tensor_op[tensor] in last
    }
    is_late = [item in last or item in sends_late for item in plan.sequence.tolist()]
    assert is_late == sorted(is_late)
