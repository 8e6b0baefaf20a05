"""`HostRunner`: placements run for real become measurements, whatever happens to them or to their devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_device, core_host
from faulty_ops import switched_graph
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from small_models import step_graph
from torch import nn

from rlplace.errors import DeviceLost, InvalidValue, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure import evaluator as evaluator_module
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.execute.device_threads import Worker
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.traced_ops import TracingCosts
from rlplace.measure.hosts.host import Host, Route
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing import host_runner as runner_module
from rlplace.measure.timing import race as race_module
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.host_runner import (
    HostRunner,
    all_lost,
    as_measurement,
    error_of,
    has_nan,
    lost_of,
    status_of,
    with_timelines,
)
from rlplace.measure.timing.race import Lane, RaceProtocol
from rlplace.measure.timing.threads import usable_cores

PROTOCOL = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, hopeless=1e9)


class NaivePlanner:
    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        return naive_plan(self.graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return Measurement("ok", 1.0, peak_bytes=(0, 0))


def problem_of(graph: OpGraph) -> Problem:
    op_time_s = np.where(graph.is_source, 0.0, 1.0)
    costs = Costs(np.repeat(op_time_s[:, None], 2, axis=1), "estimated")
    return Problem(graph, core_host(2), costs, group_ops(graph, op_time_s, 8))


def training() -> OpGraph:
    torch.manual_seed(0)
    return step_graph("linear")


@pytest.fixture
def runner() -> Iterator[HostRunner]:
    yield from run_on(training())


def run_on(graph: OpGraph, reference: NDArray[np.int32] | None = None) -> Iterator[HostRunner]:
    made = HostRunner(problem_of(graph), NaivePlanner(graph), reference=reference, protocol=PROTOCOL)
    yield made
    made.close()


def placements(graph: OpGraph, count: int) -> NDArray[np.int32]:
    generator = np.random.default_rng(0)
    return np.stack([random_devices(graph, 2, generator) for _ in range(count)])


@pytest.fixture
def one_step_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "WARM_S", 0.0)


@pytest.mark.usefixtures("one_step_a_turn")
def test_one_measurement_a_row(runner: HostRunner) -> None:
    graph = runner.problem.graph
    measured = runner.measure(placements(graph, 3))
    assert [measurement.status for measurement in measured] == ["ok"] * 3
    for measurement in measured:
        assert len(measurement.samples_s) == 2
        assert measurement.step_time_s == np.median(measurement.samples_s) > 0
        assert measurement.reference_s == 0.0, "there was none"
    assert runner.num_steps == 3 * 3
    assert len(runner.measure(placements(graph, 1)[0])) == 1, "a single placement is a batch of one"


@pytest.mark.usefixtures("one_step_a_turn")
def test_a_reference_is_timed_beside_them() -> None:
    graph = training()
    for runner in run_on(graph, reference=np.zeros(graph.num_ops, dtype=np.int32)):
        measured = runner.measure(placements(graph, 2))
        assert all(measurement.reference_s > 0 for measurement in measured)
        assert runner.num_steps == 3 * 3


def test_placements_that_make_no_sense_are_refused_before_anything_runs(runner: HostRunner) -> None:
    graph = runner.problem.graph
    with pytest.raises(InvalidValue, match="one for each op"):
        runner.measure(np.zeros((1, 3), dtype=np.int32))
    with pytest.raises(InvalidValue, match=r"0\.\.1"):
        runner.measure(np.full((1, graph.num_ops), 2, dtype=np.int32))
    apart = np.zeros(graph.num_ops, dtype=np.int32)
    apart[graph.names.index("update_linear.weight")] = 1
    with pytest.raises(InvalidValue, match="live together"):
        runner.measure(apart)
    assert runner.num_steps == 0


def test_others_join_the_race(runner: HostRunner) -> None:
    plan = naive_plan(runner.problem.graph, placements(runner.problem.graph, 1)[0])
    protocol = RaceProtocol(warmup=0, min_rounds=1, max_rounds=4, hopeless=1e9, margin=1e9)
    measured = runner.measure_plans([plan], protocol=protocol, others=[lambda: 1e-9, lambda: 7.0])
    assert len(measured[0].samples_s) == 4
    assert [measurement.step_time_s for measurement in measured[1:]] == [1e-9, 7.0]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("cores", [(0,), (0, 1)])
def test_after_the_steps_of_a_team_of_threads_the_next_ones_wait(
    cores: tuple[int, ...], num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not set(cores) <= set(usable_cores()):
        pytest.skip("needs two cores")
    waits: list[bool] = []
    monkeypatch.setattr(race_module, "await_quiet_teams", lambda: waits.append(True))
    graph, host = training(), core_host(2)
    host = dataclasses.replace(host, devices=(host.devices[0], dataclasses.replace(host.devices[1], cores=cores)))
    problem = dataclasses.replace(problem_of(graph), host=host)
    protocol = RaceProtocol(warmup=0, min_rounds=3, max_rounds=3, hopeless=1e9)
    planner = NaivePlanner(graph)
    with contextlib.closing(HostRunner(problem, planner)) as runner:
        plans = [planner.plan(np.full(graph.num_ops, device, dtype=np.int32)) for device in (0, 1)]
        runner.measure_plans(plans, protocol=protocol, others=[EagerRecipe(num_threads=num_threads)])
    assert len(waits) == 3 * (len(cores) == 2) + 3 * (num_threads == 2)


def test_a_deadline_in_the_past_still_measures_everyone_once(runner: HostRunner) -> None:
    plans = [naive_plan(runner.problem.graph, row) for row in placements(runner.problem.graph, 2)]
    measured = runner.measure_plans(plans, deadline_s=0.0)
    assert [len(measurement.samples_s) for measurement in measured] == [1, 1]


def test_every_race_starts_from_the_captured_parameters(runner: HostRunner) -> None:
    graph = runner.problem.graph
    losses = []
    plan = naive_plan(graph, placements(graph, 1)[0])
    for _ in range(2):
        runner.measure_plans([])
        step = runner.load(plan)
        step.run(0)
        losses.append(step.result.clone())
        step.run(1)
    assert torch.equal(*losses)


def test_timelines_come_in_order_of_step_time(runner: HostRunner) -> None:
    graph = runner.problem.graph
    timelines = runner.trace(naive_plan(graph, placements(graph, 1)[0]), num_steps=3, warmup=1)
    assert len(timelines) == 3
    assert all(np.all(timeline.op_end_s[~graph.is_source] > 0) for timeline in timelines)
    assert runner.num_steps == 4


TRACED = dataclasses.replace(PROTOCOL, num_traced=3)


def test_a_timeline_tells_the_memory_that_its_ops_were_seen_to_take_besides() -> None:
    """On one device no timing matters: it is what the simulator says."""
    graph = training()
    problem, scratch = problem_of(graph), np.zeros((graph.num_ops, 2), dtype=np.int64)
    scratch[graph.names.index("addmm")] = 10_000
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, workspace_bytes=scratch))
    plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
    runner = HostRunner(problem, NaivePlanner(graph), protocol=PROTOCOL)
    (timeline,) = runner.trace(plan, num_steps=1)
    runner.close()
    assert 10_000 < timeline.memory_bytes.max() == Simulator(problem, threads=1).retime(plan).peak_bytes[0]


@pytest.mark.usefixtures("one_step_a_turn")
def test_plans_of_a_race_are_traced_after_it(runner: HostRunner) -> None:
    graph = runner.problem.graph
    plans = [naive_plan(graph, row) for row in placements(graph, 2)]
    *measured, other = runner.measure_plans(plans, protocol=TRACED, others=[lambda: 7.0])
    for plan, outcome in zip(plans, measured, strict=True):
        timeline = outcome.timeline
        assert timeline.op_device.tolist() == plan.devices.tolist()
        assert np.all(timeline.op_end_s[~graph.is_source] > timeline.op_start_s[~graph.is_source])
        assert np.all(timeline.transfer_end_s > timeline.transfer_start_s)
        assert not len(timeline.memory_bytes), "small enough to send"
        assert len(outcome.samples_s) == 2, "none is of a traced step"
    assert other.timeline is None
    assert runner.num_steps == 2 * (3 + 1 + 3), "warm-up and rounds, then one untraced step before the traced ones"
    assert not runner._loaded._steps, "nothing stays loaded"
    assert runner.measure_plans(plans)[0].timeline is None


def test_the_timeline_of_a_race_is_that_of_the_median_traced_step(
    runner: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = runner.problem.graph
    empty = Timeline.empty(graph.num_ops)
    made = (dataclasses.replace(empty, op_end_s=np.full(graph.num_ops, float(k))) for k in range(3))
    seconds = iter([1.0, 1.0, 1.0, 9.0, 3.0, 1.0, 2.0])
    monkeypatch.setattr(PlacedStep, "timeline", lambda _, **__: next(made))
    monkeypatch.setattr(PlacedStep, "run", lambda *_, **__: next(seconds))
    monkeypatch.setattr(runner_module, "has_nan", lambda _: False)
    monkeypatch.setattr(PlacedStep, "result", None)
    (outcome,) = runner.measure_plans([naive_plan(graph, placements(graph, 1)[0])], protocol=TRACED)
    assert outcome.timeline.step_s == 2.0, "the third one, of 3, 1 and 2 seconds"


def test_a_plan_that_was_dropped_is_traced_and_none_after_the_deadline(
    runner: HostRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = runner.problem.graph
    plan = naive_plan(graph, placements(graph, 1)[0])
    hopeless = RaceProtocol(warmup=0, min_rounds=1, max_rounds=2, num_traced=1)
    (outcome, _) = runner.measure_plans([plan], protocol=hopeless, others=[lambda: 1e-9])
    assert (len(outcome.samples_s), outcome.timeline is None) == (1, False)
    (outcome,) = runner.measure_plans([plan], protocol=hopeless, deadline_s=0.0)
    assert (outcome.status, len(outcome.samples_s), outcome.timeline) == ("ok", 1, None)
    monkeypatch.setattr(runner_module.time, "monotonic", lambda: 10.0)
    ran = [Measurement("ok", 3.0), Measurement("ok", 2.0), Measurement("oom", math.inf)]
    empty = Timeline.empty(1)
    traced = with_timelines([plan] * 3, ran, hopeless, 15.0, lambda *_, **__: [empty])
    assert [each.timeline for each in traced] == [None, empty, None], "two steps of 3 s end at 16 s"


def test_where_tracing_costs_too_much_some_ops_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    graph = capture(nn.Sequential(*layers), torch.ones(3, 4), torch.sum, "sgd")
    plan = naive_plan(graph, placements(graph, 1)[0])
    monkeypatch.setattr(runner_module, "tracing_costs", lambda *_: TracingCosts(np.full(2, 1e9), np.array([3.0, 3.0])))
    for runner in run_on(graph):
        (outcome,) = runner.measure_plans([plan], protocol=TRACED)
        (whole,) = runner.trace(plan, num_steps=1)
    is_told = outcome.timeline.op_end_s > outcome.timeline.op_start_s
    runs = ~graph.is_source
    cells = [{(graph.signatures[op], plan.devices[op]) for op in np.flatnonzero(which)} for which in (is_told, runs)]
    assert cells[0] == cells[1]
    assert is_told.sum() < runs.sum()
    assert np.all(whole.op_end_s[runs] > whole.op_start_s[runs]), "of no race: people look at it"
    assert outcome.timeline.traced_op_s == whole.traced_op_s == 3.0


# What goes wrong


FINE, FAILS = [1, 1, 0, 1], [0, 0, 1, 0]


@pytest.fixture
def risky(switch: dict[str, Any]) -> dict[str, Any]:
    """Of the second device alone."""
    switch["thread"] = "rlplace cpu:1"
    return switch


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("boom"), "error"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "oom"),
    ],
)
def test_a_failing_op_is_a_measurement_and_the_others_are_measured(
    error: Exception, status: str, risky: dict[str, Any]
) -> None:
    for runner in run_on(switched_graph()):
        risky["fails"] = error
        failed, fine = runner.measure(np.array([FAILS, FINE], dtype=np.int32))
        risky["fails"] = None
        assert (failed.status, failed.step_time_s, failed.ok) == (status, float("inf"), False)
        assert str(error) in failed.why
        assert "op 'switched'" in failed.why
        assert fine.ok
        assert runner.measure(np.array(FAILS, dtype=np.int32))[0].ok, "it may work the next time"


@pytest.mark.parametrize("is_fatal", [False, True])
def test_a_traced_step_that_fails_costs_the_timeline_alone(
    is_fatal: bool, risky: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, load = switched_graph(), HostRunner.load

    def failing(runner: HostRunner, plan: Plan, *, is_traced: bool = False, **options: object) -> PlacedStep:
        error = RuntimeError("CUDA error: misaligned address" if is_fatal else "boom")
        risky["fails"] = error if is_traced else None
        return load(runner, plan, is_traced=is_traced, **options)

    monkeypatch.setattr(HostRunner, "load", failing)
    for runner in run_on(graph):
        plans = [naive_plan(graph, np.array(row, dtype=np.int32)) for row in (FAILS, FINE)]
        failed, fine = runner.measure_plans(plans, protocol=TRACED)
        risky["fails"] = None
        assert (failed.status, failed.timeline, len(failed.samples_s)) == ("ok", None, 2)
        assert (fine.status, fine.timeline is None) == ("ok", is_fatal), "nothing runs on a GPU that is lost"
        assert not runner._loaded._steps


def test_a_lost_gpu_is_nobodys_measurement(risky: dict[str, Any]) -> None:
    risky["fails"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    told = r"reported at op 'switched' .* on cpu:1: RuntimeError: CUDA error"
    for runner in run_on(switched_graph()):
        with pytest.raises(RunnerError, match=told) as lost:
            runner.measure(np.array([FAILS, FINE], dtype=np.int32))
        assert "start again" in str(lost.value)
        assert "CUDA_LAUNCH_BLOCKING=1" in str(lost.value)
        assert lost.value.op == "switched"


def test_a_stuck_op_is_a_timeout_and_the_others_are_measured(
    risky: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up once a thread is stuck; steps without one have all of theirs, however busy the machine."""
    graph, stuck, wait = switched_graph(), threading.Event(), Worker.wait
    runner = HostRunner(problem_of(graph), NaivePlanner(graph), protocol=PROTOCOL)

    def wait_until_stuck(worker: Worker, *_: object) -> bool:
        while not any(each._thread is risky["stuck"] for each in runner._crew.workers):
            if wait(worker, 0.01):
                return True
        return False

    monkeypatch.setattr(Worker, "wait", wait_until_stuck)
    risky["fails"] = stuck
    late, fine = runner.measure(np.array([FAILS, FINE], dtype=np.int32))
    risky["fails"] = None
    stuck.set()
    assert late.status == "timeout"
    assert "did not end its part within 120 s" in late.why
    assert fine.ok
    runner.close()


def test_a_plan_that_cannot_be_loaded_is_a_measurement(runner: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = naive_plan(runner.problem.graph, placements(runner.problem.graph, 1)[0])

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room for parameters")

    monkeypatch.setattr(runner_module, "PlacedStep", broken)
    (measured,) = runner.measure_plans([plan])
    assert (measured.status, measured.why) == ("oom", "no room for parameters")


def test_a_simulated_host_and_a_graph_file_cannot_be_measured() -> None:
    graph = training()
    problem = problem_of(graph)
    devices = tuple(dataclasses.replace(device, backend="simulated") for device in problem.host.devices)
    simulated = dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=devices))
    with pytest.raises(InvalidValue, match="simulate instead"):
        HostRunner(simulated, NaivePlanner(graph))
    with pytest.raises(InvalidValue, match="capture it again"):
        HostRunner(dataclasses.replace(problem, graph=dataclasses.replace(graph, program=None)), NaivePlanner(graph))


def test_a_closed_runner_says_so_at_once(runner: HostRunner) -> None:
    runner.close()
    runner.close()
    (measured,) = runner.measure(placements(runner.problem.graph, 1))
    assert measured.status == "error"
    assert "closed" in measured.why


NAN, NUMBER = torch.tensor(math.nan), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (NUMBER, False),
        (torch.tensor(math.inf), False),
        (NAN, True),
        ((NUMBER, {"aux": [NAN]}), True),
        (torch.tensor([1, 2]), False),
        (torch.tensor([complex(math.nan, 0.0)]), True),
        (torch.empty(0), False),
        ((None, 3, "text"), False),
    ],
)
def test_what_holds_a_nan(result: object, expected: bool) -> None:
    assert has_nan(result) is expected


def test_beside_a_number_a_nan_is_an_error(runner: HostRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a placement that ran before the one with a number; of NaN alone the model may be the cause."""
    chosen = placements(runner.problem.graph, 3)
    monkeypatch.setattr(runner_module, "has_nan", lambda _: True)
    assert [measurement.status for measurement in runner.measure(chosen)] == ["ok"] * 3
    first = iter([True, False, True])
    monkeypatch.setattr(runner_module, "has_nan", lambda _: next(first))
    measured = runner.measure(chosen)
    assert [measurement.status for measurement in measured] == ["error", "ok", "error"]
    assert all("NaN" in measured[k].why for k in (0, 2))


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
ONE_ROUND = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)


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
    assert lost.devices == ("cpu:0",)
    assert str(lost) == f"cpu:0 was lost: this process may not use core {missing} any more"


def test_a_gpu_is_lost_if_an_error_says_so() -> None:
    host = gpu_host()
    lost = lost_of(host, GONE)
    assert lost.devices == ("cuda:0",)
    assert lost_of(host, RuntimeError("CUDA error: an illegal memory access was encountered")) is None


def test_the_gpu_that_an_error_names_is_the_one() -> None:
    first, second = gpu_host().devices[0], dataclasses.replace(gpu_host().devices[0], name="cuda:1")
    routes = (Route("cuda:0", "cuda:1", ()), Route("cuda:1", "cuda:0", ()))
    host = Host("cuda", (first, second), routes=routes)
    error = RunnerError("op 'mm' (aten.mm) on cuda:1: CUDA error: no CUDA-capable device is detected")
    lost = lost_of(host, error)
    assert lost.devices == ("cuda:1",)
    nameless = lost_of(host, GONE)
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
    graph = step_graph("linear")
    costs = Costs(np.where(graph.is_source, 0.0, 1.0)[:, None].repeat(2, axis=1), "estimated")
    return Problem(graph, core_host(2), costs, Grouping(np.zeros(graph.num_ops, dtype=np.int32)))


def test_everything_in_a_race_in_which_a_device_is_lost_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem()
    simulator = Simulator(problem, threads=1)
    runner = HostRunner(problem, simulator)
    plan = simulator.plan(np.zeros(problem.graph.num_ops, dtype=np.int32))
    try:
        (fine,) = runner.measure_plans([plan], protocol=ONE_ROUND)
        assert fine.ok
        lost = DeviceLost(("cpu:1",), "gone")
        monkeypatch.setattr(runner_module, "lost_of", lambda host, error=None: lost)
        outcomes = runner.measure_plans([plan, plan], protocol=ONE_ROUND, others=[lambda: 1.0])
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
        evaluator.measure_plans([plan], ONE_ROUND)
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
