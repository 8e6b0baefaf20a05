"""`HostRunner` where memory is short, and where a GPU is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import plain_gpus
import pytest
import torch
from naive_plan import naive_plan
from numpy.typing import NDArray
from small_models import mean_square
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.placed_step import resident_bytes
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing import race as race_module
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.race import RaceProtocol

PROTOCOL = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, hopeless=1e9)


class Planner:
    """Whose plans take nothing beside their residents."""

    def __init__(self, graph: OpGraph, host: Host) -> None:
        self.graph, self.host = graph, host

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        return naive_plan(self.graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return Measurement("ok", 1.0, peak_bytes=tuple(resident_bytes(self.graph, self.host, plan.devices).tolist()))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> plain_gpus.Calls:
    return plain_gpus.install(monkeypatch)


def training() -> OpGraph:
    torch.manual_seed(0)
    return capture(nn.Linear(8, 8), torch.ones(2, 8), mean_square, "adam")


def run_on(graph: OpGraph, num_bytes: int, *, is_pooled: bool = False) -> Iterator[HostRunner]:
    host = plain_gpus.gpu_host(2, num_bytes)
    if is_pooled:
        devices = tuple(dataclasses.replace(device, memory_pool="gpu") for device in host.devices)
        host = dataclasses.replace(host, devices=devices)
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, axis=1), "estimated")
    problem = Problem(graph, host, costs, group_ops(graph, costs.op_time_s[:, 0], 4))
    runner = HostRunner(problem, Planner(graph, host), protocol=PROTOCOL)
    try:
        yield runner
    finally:
        runner.close()


def on_each(graph: OpGraph) -> NDArray[np.int32]:
    """Everything on the first device, then everything on the second."""
    return np.repeat(np.arange(2, dtype=np.int32)[:, None], graph.num_ops, axis=1)


def test_placements_that_do_not_fit_together_race_all_the_same(
    gpus: plain_gpus.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race_module, "WARM_S", 0.0)  # one step a turn
    graph = training()
    one = int(resident_bytes(graph, plain_gpus.gpu_host(2, 1), on_each(graph)[0]).sum())
    for runner in run_on(graph, int(1.5 * one), is_pooled=True):
        before = gpus.num_given_back
        measured = runner.measure(on_each(graph))
        assert [outcome.status for outcome in measured] == ["ok", "ok"]
        assert [len(outcome.samples_s) for outcome in measured] == [2, 2]
        swaps = gpus.num_given_back - before
        assert swaps >= 2
        assert runner.num_steps == 6 + swaps - 1, "each time that a plan comes back it runs once untimed"
        assert len(runner.trace(naive_plan(graph, on_each(graph)[0]), num_steps=2)) == 2
    for runner in run_on(graph, 2 * one, is_pooled=True):
        runner.measure(on_each(graph))
        assert runner.num_steps == 6


def test_a_gpu_is_limited_until_the_runner_is_closed(gpus: plain_gpus.Calls) -> None:
    for _ in run_on(training(), 1000):
        assert gpus.limits == [("cuda:0", 1000), ("cuda:1", 1000)]
    assert gpus.limits[2:] == [("cuda:0", cuda.UNLIMITED), ("cuda:1", cuda.UNLIMITED)]


def test_who_runs_out_of_memory_beside_others_runs_alone(
    gpus: plain_gpus.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is planned is not all that is taken: there was room for both."""
    make = Residents.tensor

    def tensor(residents: Residents, op: int, device: int) -> Tensor:
        if any(home != residents.home(device) for _, home in residents.made):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(residents, op, device)

    monkeypatch.setattr(Residents, "tensor", tensor)
    graph = training()
    tries = iter([torch.OutOfMemoryError("CUDA out of memory"), None])

    def other() -> float:
        error = next(tries, None)
        if error is not None:
            raise error
        return 1.0

    for runner in run_on(graph, 1 << 30):
        measured = runner.measure_plans([naive_plan(graph, row) for row in on_each(graph)], others=[other])
        assert [outcome.status for outcome in measured] == ["ok"] * 3


def test_out_of_memory_alone_is_a_measurement_and_leaves_nothing_behind(
    gpus: plain_gpus.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Residents.tensor

    def tensor(residents: Residents, op: int, device: int) -> Tensor:
        if device == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(residents, op, device)

    monkeypatch.setattr(Residents, "tensor", tensor)
    graph = training()
    for runner in run_on(graph, 1 << 30):
        too_big, fine = runner.measure(on_each(graph))
        assert (too_big.status, fine.status) == ("oom", "ok")
        assert "OutOfMemoryError: CUDA out of memory" in too_big.why


def test_a_lost_gpu_ends_the_race_and_says_so(gpus: plain_gpus.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()

    def lost() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for runner in run_on(graph, 1 << 30):
        plan = naive_plan(graph, on_each(graph)[0])
        with pytest.raises(RunnerError, match="cannot be used by this process any more; start again"):
            runner.measure_plans([plan], others=[lost])

        def settled(stream: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(cuda, "await_stream", settled)
        before = runner.num_steps
        with pytest.raises(RunnerError, match="CUDA_LAUNCH_BLOCKING") as failed:
            runner.measure(on_each(graph))
        assert str(failed.value).count("start again") == 1
        assert runner.num_steps == before + 1, "nobody else was measured"
