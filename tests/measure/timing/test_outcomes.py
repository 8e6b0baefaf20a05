"""What an error makes of a measurement, and what a race does.

Devices that are not there any more.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from core_hosts import core_device, core_host
from small_models import CASES

from rlplace.errors import DeviceLost, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure import evaluator as evaluator_module
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host, Route
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing import host_runner as runner_module
from rlplace.measure.timing.host_runner import HostRunner, all_lost, as_measurement, error_of, lost_of, status_of
from rlplace.measure.timing.race import Lane, RaceProtocol
from rlplace.measure.timing.threads import usable_cores


def test_the_status_that_an_error_gives() -> None:
    gone = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    assert status_of(gone) == status_of(DeviceLost(("cpu:1",), "gone")) == "lost"
    assert status_of(RuntimeError("CUDA out of memory")) == status_of(MemoryError("no room")) == "oom"
    assert status_of(TimeoutError("late")) == "timeout"
    assert status_of(ValueError("boom")) == "error"


def test_a_lane_becomes_its_median_beside_that_of_the_reference() -> None:
    lane = Lane([3.0, 1.0, 2.0], [5.0, 4.0, 9.0])
    assert as_measurement(lane, has_reference=True) == Measurement("ok", 2.0, (3.0, 1.0, 2.0), reference_s=5.0)
    assert as_measurement(lane, has_reference=False).reference_s == 0.0


def test_a_lane_that_was_stopped_keeps_its_samples_and_says_why() -> None:
    measured = as_measurement(Lane([3.0], [1.0], ValueError("boom")), has_reference=True)
    assert measured == Measurement("error", np.inf, (3.0,), why="boom")


GONE = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
PROTOCOL = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)


def gpu_host() -> Host:
    return Host("cuda", (dataclasses.replace(core_device("cuda:0"), backend="cuda"),))


def test_nothing_is_lost_on_a_host_that_is_all_there() -> None:
    host = Host("cores", (core_device("cpu:0", cores=usable_cores()[:1]),))
    assert lost_of(host) is None
    assert lost_of(host, RunnerError("boom")) is None


def test_a_core_that_may_not_be_used_any_more_is_lost() -> None:
    missing = max(usable_cores()) + 1
    host = Host("cores", (core_device("cpu:0", cores=(usable_cores()[0],)),))
    host = dataclasses.replace(
        host, devices=(dataclasses.replace(host.devices[0], cores=(usable_cores()[0], missing)),)
    )
    lost = lost_of(host)
    assert lost is not None
    assert lost.devices == ("cpu:0",)
    assert str(lost) == f"cpu:0 was lost: this process may not use core {missing} any more"


def test_a_gpu_is_lost_if_an_error_says_so() -> None:
    host = gpu_host()
    lost = lost_of(host, GONE)
    assert lost is not None
    assert lost.devices == ("cuda:0",)
    assert lost_of(host, RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_the_gpu_that_an_error_names_is_the_one() -> None:
    first, second = gpu_host().devices[0], dataclasses.replace(gpu_host().devices[0], name="cuda:1")
    routes = (Route("cuda:0", "cuda:1", ()), Route("cuda:1", "cuda:0", ()))
    host = Host("cuda", (first, second), routes=routes)
    error = RunnerError("op 'mm' (aten.mm) on cuda:1: CUDA error: no CUDA-capable device is detected")
    lost = lost_of(host, error)
    assert lost is not None
    assert lost.devices == ("cuda:1",)
    nameless = lost_of(host, GONE)
    assert nameless is not None
    assert nameless.devices == ()


def test_a_measurement_tells_what_its_error_told() -> None:
    host = core_host(2)
    lost = DeviceLost(("cpu:0", "cpu:1"), "this process may not use cores 0, 1 any more")
    first, second = all_lost(2, lost)
    assert (first.status, first.step_time_s) == ("lost", float("inf"))
    assert str(error_of(host, second)) == str(lost)
    assert error_of(host, second).devices == lost.devices
    assert error_of(host, Measurement("lost", float("inf"), why="the driver says nothing")).devices == ()


def small_problem() -> Problem:
    case = CASES["linear"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, axis=1), "estimated")
    return Problem(graph, core_host(2), costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))


def test_everything_in_a_race_in_which_a_device_is_lost_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem()
    simulator = Simulator(problem, threads=1)
    runner = HostRunner(problem, simulator)
    plan = simulator.plan(np.zeros(problem.graph.num_ops, dtype=np.int32))
    try:
        (fine,) = runner.measure_plans([plan], protocol=PROTOCOL)
        assert fine.ok
        lost = DeviceLost(("cpu:1",), "gone")
        monkeypatch.setattr(runner_module, "lost_of", lambda host, error=None: lost)
        outcomes = runner.measure_plans([plan, plan], protocol=PROTOCOL, others=[lambda: 1.0])
    finally:
        runner.close()
    assert [outcome.status for outcome in outcomes] == ["lost"] * 3
    assert outcomes[0].why == "cpu:1 was lost: gone"


def test_an_evaluator_keeps_nothing_of_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        """A runner whose host has lost a core."""

        def measure_plans(self, plans: list[object], **_: object) -> list[Measurement]:
            return all_lost(len(plans), DeviceLost(("cpu:1",), "gone"))

        def close(self) -> None:
            """It holds nothing."""

    class Log:
        """A log that refuses everything."""

        def recall(self, *_: object) -> None:
            return None

        def keep(self, *_: object, **__: object) -> None:
            raise AssertionError("nothing was measured")

    monkeypatch.setattr(evaluator_module, "make_runner", lambda *_, **__: Lost())
    problem = small_problem()
    simulator = Simulator(problem, threads=1)
    evaluator = Evaluator(problem, simulator, log=Log())  # type: ignore[arg-type]
    plan = simulator.plan(np.zeros(problem.graph.num_ops, dtype=np.int32))
    with pytest.raises(DeviceLost, match=r"^cpu:1 was lost: gone$") as told:
        evaluator.measure_plans([plan], PROTOCOL)
    assert told.value.devices == ("cpu:1",)


SHRINK = """
import os, sys
import numpy as np, torch
from rlplace.graphs import capture
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.costs.costs import Costs
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.timing.race import RaceProtocol
from rlplace.measure.simulate.simulator import Simulator
from rlplace.errors import DeviceLost

host = Host.detect("cores")
graph = capture(torch.nn.Linear(4, 4), torch.ones(2, 4), lambda y: y.sum(), "sgd")
costs = Costs(np.ones((graph.num_ops, host.num_devices)), "estimated")
problem = Problem(graph, host, costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))
simulator = Simulator(problem, threads=1)
evaluator = Evaluator(problem, simulator, isolated=sys.argv[1] == "worker")
plan = simulator.plan(np.zeros(graph.num_ops, dtype=np.int32))
protocol = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)
print(evaluator.measure_plans([plan], protocol)[0].status)
os.sched_setaffinity(0, set(host.devices[0].cores))
try:
    evaluator.measure_plans([plan], protocol)
except DeviceLost as error:
    print(error.devices, error)
evaluator.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores, of which one is taken away")
@pytest.mark.parametrize("where", ["worker", "here"])
def test_a_core_that_is_taken_away_while_measuring_is_noticed(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, where], capture_output=True, text=True, timeout=300, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == "ok"
    assert "'cpu:1'" in second
    assert "cpu:0'" not in second
    assert "any more" in second
