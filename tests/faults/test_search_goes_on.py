"""A search whose placements fail comes to the placement that it comes to where those are ruled out beforehand.

What each fault costs its placement is in tests/measure/isolate/test_isolated_runner.py, what becomes of stores in
tests/store, of disks in test_full_disk.py beside this file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from core_hosts import core_host
from faulty_ops import paused_graph
from micrographs import op_graph
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure import evaluator as evaluator_module
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol
from rlplace.report.console import make_progress
from rlplace.search.methods import METHODS, Method, register_method
from rlplace.search.task import Task
from rlplace.training import TrainConfig, train
from rlplace.training.config import SearchConfig
from rlplace.training.searches.racing_host import LoopBudget
from rlplace.training.searches.search_all import search_and_measure
from rlplace.training.tracking import NoTracker

FAULTS: dict[int, tuple[Status, str]] = {
    1: ("error", "the worker died: SIGABRT"),
    2: ("timeout", "a step did not end within 5 s"),
    3: ("error", "boom"),
    4: ("error", "the loss is NaN"),
    5: ("oom", "allocation failed"),
}
"""What happens where an op runs on the second device."""


class FaultyRunner:
    """Takes as long as the simulator says, and has a fault for each op of `FAULTS` on the second device."""

    num_failed = 0

    def turn_to(self, problem: Problem, simulator: Simulator, reference: NDArray[np.int32]) -> None:
        self._simulator, self._reference = simulator, simulator.plan(reference)

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol | None = None,
        others: Sequence[object] = (),
        deadline_s: float = math.inf,
    ) -> list[Measurement]:
        return [self._measure(plan) for plan in plans]

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        raise RunnerError("nothing can be traced here")

    def close(self) -> None:
        pass

    def _measure(self, plan: Plan) -> Measurement:
        for op, (status, why) in FAULTS.items():
            if plan.devices[op] == 1:
                self.num_failed += 1
                return Measurement(status, math.inf, why=why)
        step_s, reference_s = (self._simulator.retime(each).step_time_s for each in (plan, self._reference))
        return Measurement("ok", step_s, (step_s,) * 3, (0, 0), reference_s=reference_s)


def problem_of(*, is_known: bool) -> Problem:
    """Two chains; the ops of `FAULTS` are said to be faster on the second device, where they fail, and others slower.

    Where that is known, nothing may put them there.
    """
    graph = op_graph([[], [0], [1], [2], [3], [4], [0], [6], [7], [5, 8]])
    op_time_s = np.tile([1.0, 4.0], (graph.num_ops, 1))
    op_time_s[list(FAULTS), 1] = 0.5
    op_time_s[[7, 8], 1] = 1.5
    costs = Costs(1e-5 * op_time_s, "estimated")
    problem = Problem(graph, core_host(2), costs, Grouping(np.arange(graph.num_ops)))
    return ruled_out(problem, FAULTS) if is_known else problem


def ruled_out(problem: Problem, ops: Sequence[int] | dict[int, object]) -> Problem:
    """The problem with these ops kept from the second device."""
    allowed = np.ones((problem.graph.num_ops, problem.host.num_devices), dtype=np.bool_)
    allowed[list(ops), 1] = False
    return dataclasses.replace(problem, allowed=allowed)


@pytest.mark.slow
def test_the_best_is_that_of_a_search_without_the_faulty_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[FaultyRunner] = []

    def make(problem: Problem, planner: Simulator, **_: object) -> FaultyRunner:
        runners.append(FaultyRunner())
        return runners[-1]

    monkeypatch.setattr(evaluator_module, "make_runner", make)
    search = SearchConfig(method="random", num_calibrated=0, table_rounds=2)
    config = TrainConfig(budget_s=4.0, store="off", search=search)
    tried, spared = (train(problem_of(is_known=is_known), config, progress=False) for is_known in (False, True))
    assert runners[0].num_failed > 0
    assert runners[1].num_failed == 0
    assert tried.placement.devices.tolist() == spared.placement.devices.tolist()
    assert tried.step_time_s == spared.step_time_s
    failed = {row["status"]: row["why"] for row in tried.table.rows if row["placement"] and row["status"] != "ok"}
    assert failed, "heuristics believe the costs"
    assert set(failed.items()) <= {*FAULTS.values(), ("skipped", "found no feasible placement")}


KINDS = ("abort", "hang", "raise", "nan", "allocate")


@pytest.fixture
def _listed() -> Iterator[None]:
    def score(task: Task, placements: NDArray[np.int32]) -> None:
        task.score(placements)

    register_method(Method("listed", score, "search", "a test"))
    yield
    METHODS.unregister("listed")


def small_host() -> Host:
    """Two cores with a quarter of a gigabyte: what allocates without end must not take the machine's."""
    host = core_host(2)
    return dataclasses.replace(
        host, devices=tuple(dataclasses.replace(device, memory_bytes=1 << 28) for device in host.devices)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_listed")
def test_so_it_is_on_this_machine_with_every_fault_in_a_worker() -> None:
    graph = paused_graph(KINDS)
    op_time_s = np.tile([[1e-3, 1e-4]], (graph.num_ops, 1))
    problem = Problem(graph, small_host(), Costs(op_time_s, "estimated"), Grouping(np.arange(graph.num_ops)))
    everything_on_first = np.zeros(graph.num_ops, dtype=np.int32)
    best = everything_on_first.copy()
    best[-1] = 1
    placements = [everything_on_first, best]
    for op in range(1, len(KINDS) + 1):
        faulty = best.copy()
        faulty[op] = 1
        placements.append(faulty)
    answers = []
    for asked, listed in ((problem, placements), (ruled_out(problem, range(1, len(KINDS) + 1)), placements[:2])):
        simulator = Simulator(asked, threads=1)
        evaluator = Evaluator(asked, simulator, everything_on_first, isolated=True)
        try:
            found = search_and_measure(
                "listed",
                evaluator,
                LoopBudget(600.0, 0.1, measurements=len(listed)),
                seed=0,
                progress=make_progress(is_quiet=True),
                tracker=NoTracker(),
                options={"placements": np.array(listed)},
            )
        finally:
            evaluator.close()
        assert found.num_measured == len(listed)
        assert found.plan is not None
        answers.append(found.plan.devices.tolist())
    assert answers == [best.tolist()] * 2
