"""`HostRunner` where memory is short, and where a GPU is lost: plans take turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from small_models import mean_square
from torch import Tensor, nn

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep, resident_bytes
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing import race as race_module
from rlplace.measure.timing.host_runner import HostRunner, LoadedPlans
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


class Machine:
    """Everything of a graph on one of several devices."""

    def __init__(self, graph: OpGraph, host: Host) -> None:
        self.graph, self.host = graph, host
        self.residents = Residents(graph, host)
        self.crew = Crew(host.devices)
        self.plans = LoadedPlans(graph, host, self.residents)

    def step(self, devices: int | np.ndarray) -> PlacedStep:
        row = np.full(self.graph.num_ops, devices, dtype=np.int32) if isinstance(devices, int) else devices
        return PlacedStep(self.graph, self.host, naive_plan(self.graph, row), self.residents, self.crew)

    def prepare(self, step: PlacedStep, running_bytes: int = 0) -> bool:
        context = np.array([device.context_bytes for device in self.host.devices])
        own = resident_bytes(self.graph, self.host, step.plan.devices)
        return self.plans.prepare(step, (own + context + np.where(own > 0, running_bytes, 0)).tolist())

    def homes(self) -> set[str]:
        return {home for _, home in self.residents.made}


GRAPH = training()
RESIDENT = int(resident_bytes(GRAPH, plain_gpus.gpu_host(1, 1), np.zeros(GRAPH.num_ops, dtype=np.int32))[0])


def machine_of(host: Host, graph: OpGraph = GRAPH) -> Iterator[Machine]:
    made = Machine(graph, host)
    yield made
    made.crew.stop()


def roomy(num_plans: float, context_bytes: int = 100) -> Host:
    """GPUs that hold the residents of so many plans."""
    return plain_gpus.gpu_host(3, int(num_plans * RESIDENT) + context_bytes, context_bytes)


def test_plans_that_fit_stay_where_they_are(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(roomy(1.0)):
        steps = [machine.step(device) for device in (0, 1, 2)]
        for step in (*steps, *steps):
            assert machine.prepare(step) is False
            step.run()
        assert all(step.is_loaded for step in steps)
        assert machine.homes() == {"cuda:0", "cuda:1", "cuda:2"}
        assert gpus.num_given_back == 0


def test_a_model_that_fits_only_when_split_is_measured_both_ways(gpus: plain_gpus.Calls) -> None:
    """Two layers on two GPUs, and the other way round: each GPU holds one layer, not both."""
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8), mean_square, "adam")
    first_layer = np.array(
        [module == "0" or name.startswith("input") for module, name in zip(graph.modules, graph.names)]
    )
    splits = [np.where(first_layer, one, 1 - one).astype(np.int32) for one in (0, 1)]
    host = plain_gpus.gpu_host(2, 1)
    needs = max(int(resident_bytes(graph, host, devices).max()) for devices in splits)
    for machine in machine_of(plain_gpus.gpu_host(2, int(1.2 * needs)), graph):
        one, other = (machine.step(devices) for devices in splits)
        for k in range(4):
            runs, waits = (one, other) if k % 2 == 0 else (other, one)
            assert machine.prepare(runs) is (k >= 2)
            assert [runs.is_loaded, waits.is_loaded] == [True, False]
            assert machine.residents.made == runs.needs
        assert gpus.num_given_back == 3


def pooled(num_plans: float) -> Host:
    """Devices that share one memory, which holds the residents of so many plans."""
    host = roomy(num_plans, context_bytes=10)
    devices = tuple(dataclasses.replace(device, memory_pool="one GPU") for device in host.devices)
    return dataclasses.replace(host, devices=devices)


def test_in_one_pool_the_least_recently_run_leaves_first(gpus: plain_gpus.Calls) -> None:
    """Capacity: two plans and a half, contexts of all three devices aside."""
    for machine in machine_of(pooled(2.5)):
        first, second, third = (machine.step(device) for device in (0, 1, 2))
        for step in (first, second, first):
            assert machine.prepare(step) is False
            step.run()
        assert machine.prepare(third) is False, "it never ran, so there is nothing that it lost"
        third.run()
        assert [step.is_loaded for step in (first, second, third)] == [True, False, True]
        assert machine.homes() == {"cuda:0", "cuda:2"}
        assert gpus.num_given_back == 1
        assert machine.prepare(first) is True, "the memory of its last step was given back"
        assert machine.prepare(first) is False
        assert machine.prepare(second) is True, "it was unloaded"
        assert machine.homes() == {"cuda:0", "cuda:1"}
        second.run()
        assert np.isfinite(float(second.result))


def test_what_runs_on_top_of_residents_counts(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(pooled(2.5)):
        first, second = machine.step(0), machine.step(1)
        machine.prepare(first)
        assert machine.prepare(second, running_bytes=RESIDENT // 4) is False
        assert first.is_loaded
        third = machine.step(1)
        machine.prepare(third, running_bytes=RESIDENT)
        assert not first.is_loaded
        assert second.is_loaded, "it has the same residents: unloading it would give nothing"


def test_residents_that_no_loaded_plan_needs_go_before_any_plan(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(pooled(2.5)):
        first, second, third = (machine.step(device) for device in (0, 1, 2))
        machine.prepare(first)
        machine.prepare(second)
        machine.plans.forget(second)
        assert machine.homes() == {"cuda:0", "cuda:1"}, "nobody needs the room yet"
        machine.prepare(third)
        assert first.is_loaded
        assert machine.homes() == {"cuda:0", "cuda:2"}


def test_a_plan_that_does_not_fit_alone_has_everything(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(pooled(0.5)):
        first, second = machine.step(0), machine.step(1)
        machine.prepare(first)
        machine.prepare(second)
        assert [first.is_loaded, second.is_loaded] == [False, True]
        assert machine.homes() == {"cuda:1"}


def test_without_known_peaks_residents_alone_count(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(pooled(2.1)):
        for device in (0, 1):
            machine.plans.prepare(machine.step(device), ())
        assert machine.homes() == {"cuda:0", "cuda:1"}


def test_leaving_one_alone_tells_whether_a_gpu_got_memory(gpus: plain_gpus.Calls) -> None:
    for machine in machine_of(roomy(1.0)):
        first, second = machine.step(0), machine.step(1)
        machine.prepare(first)
        assert machine.plans.leave_alone(first) is False, "it is alone already"
        machine.prepare(second)
        assert machine.plans.leave_alone(first) is True
        assert [first.is_loaded, second.is_loaded] == [True, False]
        assert machine.plans.leave_alone(None) is True
        assert machine.residents.made == frozenset()


def test_cores_share_their_residents_so_nothing_leaves() -> None:
    host = core_host(2)
    tiny = tuple(dataclasses.replace(device, memory_bytes=1) for device in host.devices)
    for machine in machine_of(dataclasses.replace(host, devices=tiny)):
        generator = np.random.default_rng(0)
        steps = [machine.step(random_devices(GRAPH, 2, generator)) for _ in range(3)]
        losses = []
        for step in (*steps, *steps):
            assert machine.prepare(step, running_bytes=10) is False
            step.run()
            losses.append(float(step.result))
        assert all(step.is_loaded for step in steps)
        assert losses == sorted(losses, reverse=True), "training goes on: no value was made anew"
        assert machine.plans.leave_alone(steps[0]) is False
