"""What the simulator says of a limit of memory, and what a worker with that limit does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.isolate.isolated_runner import IsolatedRunner
from rlplace.measure.isolate.messages import TimeLimits
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol

PROTOCOL = RaceProtocol(warmup=1, min_rounds=12, max_rounds=12, hopeless=1e9)
"""Steps enough for the allocator to keep more holes than fit the limit, were they not given back."""
BLOCK = 64 << 20
PEAK = 3 * BLOCK
"""What `Blocks` holds at most, beside its small input."""


class Blocks(nn.Module):
    """Holds three blocks of memory at a time: one, its sine, and their sum."""

    def forward(self, x: Tensor) -> Tensor:
        block = x.repeat(BLOCK // x.nbytes)
        return (block + block.sin()).sum()


class Unaware:
    """A planner that knows of no memory, so that everything is run."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        return naive_plan(self.graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return Measurement("ok", 1.0, peak_bytes=(0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "status"), [(PEAK // 2, "oom"), (3 * PEAK, "ok")])
def test_a_worker_with_a_limit_does_what_was_predicted(limit: int, status: str) -> None:
    graph = capture(Blocks(), torch.ones(1 << 18))
    host = core_host(2)
    devices = tuple(dataclasses.replace(device, memory_bytes=limit) for device in host.devices)
    limited = dataclasses.replace(host, devices=devices)
    costs = Costs(np.where(graph.is_source, 0.0, 1e-3)[:, None].repeat(2, axis=1), "estimated")
    plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
    predicted = Simulator(Problem.grouped(graph, limited, costs), threads=1).retime(plan)
    assert predicted.status == status
    assert PEAK <= predicted.peak_bytes[0] <= PEAK + (2 << 20)
    runner = IsolatedRunner(
        Problem.grouped(graph, host, costs),
        Unaware(graph),
        limits=TimeLimits(least_s=20.0, longest_s=60.0),
        memory_limit_bytes=limit,
    )
    try:
        (measured,) = runner.measure_plans([plan], protocol=PROTOCOL)
    finally:
        runner.close()
    assert measured.status == status, measured.why
