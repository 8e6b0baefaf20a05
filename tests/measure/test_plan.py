"""Everything on one device: its plan and its peak, as the simulator has them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from core_hosts import core_host
from micrographs import op_graph
from small_models import CASES
from torch import nn

from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem, capacity_bytes, single_device_peak_bytes, single_device_plan
from rlplace.measure.simulate.simulator import Simulator


def test_everything_on_one_device_in_order() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    plan = single_device_plan(graph, 1)
    assert plan.devices.tolist() == [1] * 4
    assert plan.sequence.tolist() == [0, 1, 2, 3]
    assert plan.num_transfers == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_cell", "batch_norm_train", "transformer_layer", "writes", "tied", "targets"])
@pytest.mark.parametrize("granularity", [1, 512])
def test_the_peak_is_the_simulators(name: str, granularity: int) -> None:
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam", targets=case.targets)
    host = core_host(2)
    facts = {"memory_granularity_bytes": granularity, "context_bytes": 1000, "memory_pool": ""}
    host = dataclasses.replace(host, devices=tuple(dataclasses.replace(each, **facts) for each in host.devices))
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, axis=1), "estimated")
    simulator = Simulator(Problem(graph, host, costs, group_ops(graph, costs.op_time_s[:, 0], 4)))
    peaks = simulator.retime(single_device_plan(graph, 1)).peak_bytes
    assert single_device_peak_bytes(graph, host, 1) == peaks[1]


def test_a_graph_without_ops_has_no_peak() -> None:
    assert single_device_peak_bytes(op_graph([]), core_host(1), 0) == 0


def test_contexts_of_others_in_the_pool_take_their_share() -> None:
    host = core_host(3)
    first, second, third = host.devices
    devices = (
        dataclasses.replace(first, memory_bytes=1000, context_bytes=1),
        dataclasses.replace(second, memory_bytes=900, context_bytes=20),
        dataclasses.replace(third, memory_bytes=10, context_bytes=5, memory_pool=""),
    )
    host = dataclasses.replace(host, devices=devices)
    assert [capacity_bytes(host, device) for device in range(3)] == [880, 899, 10]
