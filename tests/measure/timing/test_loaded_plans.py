"""Plans take turns where memory does not hold them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from small_models import mean_square
from torch import nn

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep, resident_bytes
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.host_runner import LoadedPlans


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


def training() -> OpGraph:
    torch.manual_seed(0)
    return capture(nn.Linear(8, 8), torch.ones(2, 8), mean_square, "adam")


GRAPH = training()
RESIDENT = int(resident_bytes(GRAPH, plain_gpus.gpu_host(1, 1), np.zeros(GRAPH.num_ops, dtype=np.int32))[0])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> plain_gpus.Calls:
    return plain_gpus.install(monkeypatch)


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
