"""`IsolatedRunner`: every fault costs the placement that has it, and no other.

The words for the contender that was at work when a worker ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from core_hosts import core_host
from faulty_ops import FAULTS, faulty_graph
from micrographs import fork_join
from naive_plan import naive_plan
from numpy.typing import NDArray
from small_models import CASES

from rlplace.errors import InvalidValue, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.isolate import isolated_runner as wait_module
from rlplace.measure.isolate import worker as process_module
from rlplace.measure.isolate.isolated_runner import IsolatedRunner, describe
from rlplace.measure.isolate.messages import IDLE, Race, TimeLimits
from rlplace.measure.isolate.worker import CannotIsolate, WorkerProcess
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.race import REFERENCE, RaceProtocol
from rlplace.measure.timing.threads import usable_cores

PROTOCOL = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, hopeless=1e9)
PATIENT = TimeLimits(least_s=6.0, longest_s=30.0)
SMALL = 256 << 20
"""Bytes that placements may take in these tests."""


class NaivePlanner:
    """Plans that put each op where it is told; peaks as given."""

    def __init__(self, graph: OpGraph, outcome: Measurement | None = None) -> None:
        self.graph = graph
        self.outcome = outcome or Measurement("ok", 1.0, peak_bytes=(0, 0))

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        return naive_plan(self.graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return self.outcome


def problem_of(graph: OpGraph) -> Problem:
    op_time_s = np.where(graph.is_source, 0.0, 1.0)
    costs = Costs(np.repeat(op_time_s[:, None], 2, axis=1), "estimated")
    return Problem(graph, core_host(2), costs, group_ops(graph, op_time_s, 8))


def runner_of(graph: OpGraph, **options: object) -> IsolatedRunner:
    made = IsolatedRunner(problem_of(graph), NaivePlanner(graph), limits=PATIENT, **options)
    assert made.num_started == 1
    return made


def training() -> OpGraph:
    torch.manual_seed(0)
    case = CASES["linear"]()
    return capture(case.model, case.inputs, case.loss_fn, "adam")


def with_fault(graph: OpGraph, kind: str) -> Plan:
    """Everything on `cpu:0` but the op with that fault."""
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    devices[1 + FAULTS.index(kind)] = 1
    return naive_plan(graph, devices)


def harmless(graph: OpGraph) -> list[Plan]:
    """Two plans without a fault."""
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    devices[-1] = 1
    return [naive_plan(graph, np.zeros_like(devices)), naive_plan(graph, devices)]


@pytest.fixture(scope="module")
def raced() -> dict[str, Measurement]:
    """Every fault and two harmless plans, in one race."""
    graph = faulty_graph()
    plans = {kind: with_fault(graph, kind) for kind in FAULTS}
    first, second = harmless(graph)
    plans = {"first": first, **plans, "second": second}
    runner = runner_of(graph, memory_limit_bytes=SMALL, reference=np.zeros(graph.num_ops, dtype=np.int32))
    try:
        found = runner.measure_plans(list(plans.values()), protocol=PROTOCOL)
        again = runner.measure_plans([first], protocol=PROTOCOL)
    finally:
        runner.close()
    assert again[0].ok, "the runner goes on"
    return dict(zip(plans, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("abort", "error", "SIGABRT"),
        ("segfault", "error", "SIGSEGV"),
        ("exit", "error", "exit code 3"),
        ("kill", "error", "ended from outside"),
        ("hang", "timeout", "did not end within"),
        ("raise", "error", "boom"),
        ("nan", "error", "NaN"),
        ("allocate", "oom", "alloc"),
        ("map", "oom", "out of memory"),
    ],
)
def test_a_fault_is_the_measurement_of_its_plan(
    raced: dict[str, Measurement], kind: str, status: str, words: str
) -> None:
    outcome = raced[kind]
    assert (outcome.status, outcome.step_time_s) == (status, math.inf)
    assert words in outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["abort", "segfault", "hang", "raise", "allocate"])
def test_its_op_is_named(raced: dict[str, Measurement], kind: str) -> None:
    index = FAULTS.index(kind)
    assert f"op 'faulty{f'_{index}' if index else ''}'" in raced[kind].why
    assert "cpu:1" in raced[kind].why


@pytest.mark.slow
def test_the_others_are_measured_as_if_it_had_not_been_there(raced: dict[str, Measurement]) -> None:
    for name in ("first", "second"):
        assert raced[name].ok, raced[name].why
        assert len(raced[name].samples_s) == PROTOCOL.max_rounds
        assert raced[name].reference_s > 0


@pytest.fixture(scope="module")
def runner() -> Iterator[IsolatedRunner]:
    made = runner_of(training())
    yield made
    made.close()


def on_first(runner: IsolatedRunner) -> Plan:
    graph = runner._problem.graph
    return naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))


def test_plain_pytorch_runs_in_the_worker_and_own_timers_here(runner: IsolatedRunner) -> None:
    ran_in: list[int] = []

    def own() -> float:
        ran_in.append(os.getpid())
        return 7.0

    def fails() -> float:
        raise TimeoutError("too late")

    placed, eager, seven, late = runner.measure_plans(
        [on_first(runner)], protocol=PROTOCOL, others=[EagerRecipe(num_threads=1), own, fails]
    )
    assert placed.ok
    assert eager.ok
    assert eager.step_time_s > 0
    assert (seven.samples_s, set(ran_in)) == ((7.0, 7.0), {os.getpid()})
    assert (late.status, late.why) == ("timeout", "too late")
    assert runner.num_started == 1


def test_traces_come_back(runner: IsolatedRunner) -> None:
    timelines = runner.trace(on_first(runner), num_steps=3, warmup=1)
    assert [timeline.source for timeline in timelines] == ["measured"] * 3
    is_run = ~runner._problem.graph.is_source
    assert all(np.all(timeline.op_end_s[is_run] > 0) for timeline in timelines)


def test_plans_of_a_race_are_traced_in_the_worker(runner: IsolatedRunner) -> None:
    traced = dataclasses.replace(PROTOCOL, num_traced=2)
    placed, seven = runner.measure_plans([on_first(runner)], protocol=traced, others=[lambda: 7.0])
    is_run = ~runner._problem.graph.is_source
    assert placed.timeline is not None
    assert np.all(placed.timeline.op_end_s[is_run] > placed.timeline.op_start_s[is_run])
    assert (len(placed.samples_s), seven.timeline, runner.num_started) == (2, None, 1)


@pytest.mark.slow
def test_a_traced_step_that_ends_the_worker_costs_the_timeline_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, answers = faulty_graph(("traced", "hang")), []
    wait_for = wait_module.wait_for
    monkeypatch.setattr(wait_module, "wait_for", lambda *given: answers.append(wait_for(*given)) or answers[-1])
    runner = runner_of(graph)
    try:
        plans = [naive_plan(graph, np.array(row, dtype=np.int32)) for row in ([0, 1, 0, 0], [0, 0, 0, 1])]
        failed, fine = runner.measure_plans(plans, protocol=dataclasses.replace(PROTOCOL, num_traced=1))
        assert (failed.status, failed.timeline) == ("ok", None)
        assert (fine.status, fine.timeline is None) == ("ok", False), "by the next worker"
        assert runner.num_started == 2
        assert "SIGABRT in this placement, op 'faulty' " in answers[1].why, "lines of traced code are looked up there"
    finally:
        runner.close()


def test_its_steps_can_be_raced_by_another_runner(runner: IsolatedRunner) -> None:
    timer = runner.timer(on_first(runner))
    assert timer() > 0
    assert runner.measure_plans([on_first(runner)], protocol=PROTOCOL)[0].ok
    assert timer() > 0, "a race lets go of what was loaded, and it is loaded again"


@pytest.mark.slow
def test_the_worker_has_the_affinity_of_this_process_and_so_has_its_successor(runner: IsolatedRunner) -> None:
    for _ in range(2):
        assert runner._process is not None
        assert set(os.sched_getaffinity(runner._process.pid)) == set(usable_cores())
        before = runner.num_started
        os.kill(runner._process.pid, signal.SIGKILL)
        (measured,) = runner.measure_plans([on_first(runner)], protocol=PROTOCOL)
        assert measured.ok, "a worker that somebody else ended says nothing about the plan"
        assert runner.num_started == before + 1


@pytest.mark.slow
def test_a_worker_that_stopped_alone_is_replaced(runner: IsolatedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "STOPPED_S", 0.5)
    before = runner.num_started
    assert runner._process is not None
    os.kill(runner._process.pid, signal.SIGSTOP)
    (measured,) = runner.measure_plans([on_first(runner)], protocol=PROTOCOL)
    assert measured.ok, "nobody is to blame"
    assert runner.num_started == before + 1


@pytest.mark.slow
def test_a_worker_that_hangs_between_steps_is_replaced(runner: IsolatedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "BETWEEN_S", 0.5)
    monkeypatch.setattr(WorkerProcess, "is_stopped", False)  # it only looks as if it hung
    before = runner.num_started
    assert runner._process is not None
    os.kill(runner._process.pid, signal.SIGSTOP)
    assert len(runner.trace(on_first(runner), num_steps=1)) == 1
    assert runner.num_started == before + 1


def unreadable() -> None:
    raise ValueError("this cannot be read")


class Unreadable(EagerRecipe):
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return unreadable, ()


def test_a_request_that_the_worker_cannot_read_is_an_error_that_says_so(runner: IsolatedRunner) -> None:
    before = runner.num_started
    with pytest.raises(RunnerError, match="this cannot be read"):
        runner.measure_plans([on_first(runner)], protocol=PROTOCOL, others=[Unreadable()])
    assert runner.measure_plans([on_first(runner)], protocol=PROTOCOL)[0].ok
    assert runner.num_started == before


@pytest.mark.slow
def test_a_worker_that_is_killed_amid_a_race_gives_its_plan_another_try(runner: IsolatedRunner) -> None:
    before = runner.num_started
    assert runner._process is not None
    victim = runner._process

    def kill_it() -> None:
        while victim.board.contender != 0:
            time.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    long = RaceProtocol(warmup=1, min_rounds=20_000, max_rounds=20_000)
    measured = runner.measure_plans([on_first(runner)], protocol=long, deadline_s=time.monotonic() + 5.0)
    killer.join()
    assert measured[0].ok
    assert runner.num_started == before + 1


def test_a_plan_that_is_predicted_to_need_too_much_is_not_run(runner: IsolatedRunner) -> None:
    planner, before = runner._planner, runner._planner.outcome
    planner.outcome = Measurement("oom", math.inf, peak_bytes=(9, 0), why="cpu:0: peak of 9 bytes is 1 over its 8")
    try:
        (measured,) = runner.measure_plans([on_first(runner)], protocol=PROTOCOL)
    finally:
        planner.outcome = before
    assert (measured.status, measured.samples_s) == ("oom", ())
    assert measured.why == "cpu:0: peak of 9 bytes is 1 over its 8 (simulated; it was not run)"


@pytest.mark.slow
def test_ctrl_c_leaves_a_runner_that_can_be_asked_again(runner: IsolatedRunner) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.measure_plans([on_first(runner)], protocol=PROTOCOL, others=[interrupted])
    assert runner._process is None
    assert runner.measure_plans([on_first(runner)], protocol=PROTOCOL)[0].ok


@pytest.mark.slow
def test_ctrl_c_while_a_worker_starts_leaves_a_runner_that_can_be_asked_again(
    runner: IsolatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: WorkerProcess, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(WorkerProcess, "await_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner._start(runner._process)
    assert runner.measure_plans([on_first(runner)], protocol=PROTOCOL)[0].ok


@pytest.mark.slow
def test_a_reference_that_fails_leaves_nothing_to_compare_with() -> None:
    graph = faulty_graph()
    runner = runner_of(graph, reference=with_fault(graph, "abort").devices)
    try:
        with pytest.raises(RunnerError, match="reference placement failed: the worker died: SIGABRT"):
            runner.measure_plans(harmless(graph), protocol=PROTOCOL)
        with pytest.raises(RunnerError, match="SIGABRT"):
            runner.trace(with_fault(graph, "abort"))
        assert len(runner.trace(harmless(graph)[0], num_steps=1)) == 1
        for kind, error in (("raise", RunnerError), ("exit", RunnerError)):
            with pytest.raises(error):
                runner.timer(with_fault(graph, kind))
    finally:
        runner.close()


@pytest.mark.slow
def test_a_model_of_nan_is_nobodys_fault() -> None:
    graph = faulty_graph(("nan", "raise"))
    runner = runner_of(graph)
    devices = np.array([0, 1, 0, 0], dtype=np.int32)
    try:
        (measured,) = runner.measure_plans([naive_plan(graph, devices)], protocol=PROTOCOL)
        assert measured.ok, "no other placement says what the loss should be"
    finally:
        runner.close()


@pytest.mark.slow
def test_a_closed_runner_says_so(runner: IsolatedRunner) -> None:
    other = runner_of(runner._problem.graph)
    other.close()
    other.close()
    with pytest.raises(RunnerError, match="ended"):
        other.measure_plans([on_first(runner)])


def test_what_cannot_be_sent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()
    problem = problem_of(graph)
    object.__setattr__(problem.graph.program, "result", threading.Lock())
    with pytest.raises(CannotIsolate, match="cannot be sent"):
        IsolatedRunner(problem, NaivePlanner(graph))
    monkeypatch.setattr(process_module, "_CODE", "raise SystemExit(5) # {path} {ends} {index}")
    with pytest.raises(CannotIsolate, match="exit code 5"):
        runner_of(training())


@pytest.mark.slow
def test_a_simulated_host_is_refused() -> None:
    problem = problem_of(training())
    devices = tuple(dataclasses.replace(device, backend="simulated") for device in problem.host.devices)
    simulated = dataclasses.replace(problem, host=dataclasses.replace(problem.host, devices=devices))
    with pytest.raises(InvalidValue, match="simulate instead"):
        IsolatedRunner(simulated, NaivePlanner(problem.graph))


def test_a_worker_goes_on_with_a_reference_and_other_figures() -> None:
    graph = training()
    plans = [naive_plan(graph, np.full(graph.num_ops, device, dtype=np.int32)) for device in (0, 1)]
    with contextlib.closing(runner_of(graph)) as runner:
        assert all(
            outcome.ok and outcome.reference_s == 0.0 for outcome in runner.measure_plans(plans, protocol=PROTOCOL)
        )
        runner.turn_to(problem_of(graph), NaivePlanner(graph), np.zeros(graph.num_ops, dtype=np.int32))
        assert all(
            outcome.ok and outcome.reference_s > 0.0 for outcome in runner.measure_plans(plans, protocol=PROTOCOL)
        )
        assert runner.num_started == 1


def test_contenders_are_not_numbered() -> None:
    """Those that are left are raced again without the others, so a number would be that of another race."""
    graph = fork_join(2, 1, 8)
    costs = Costs(np.ones((graph.num_ops, 2)), "estimated")
    problem = Problem(graph, core_host(2), costs, Grouping(np.arange(graph.num_ops)))
    plan = naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))
    race = Race([plan, plan], [(0, 0)] * 2, [EagerRecipe()], RaceProtocol(), math.inf, plan)
    said = [describe(race, problem, contender, "") for contender in (0, 1, 2, REFERENCE, IDLE)]
    assert said[:2] == ["this placement"] * 2
    assert said[2:] == ["plain PyTorch", "the reference placement", "nothing that it was asked for"]
