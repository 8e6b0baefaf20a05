"""What every method reports to have simulated is what the simulator was asked for, as `Task` says that it counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from host_models import learnable_problem
from micro_batched import cut_graph, layered_step, step_problem
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.errors import MissingExtra
from rlplace.measure import Simulator
from rlplace.measure.host_model import HostModel
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan
from rlplace.measure.truth import TrueTimer, Truth, true_problem
from rlplace.policy import LearnConfig
from rlplace.search.task import Budget, Task
from rlplace.training.agent import AgentConfig
from rlplace.training.agent.agent import Agent
from rlplace.training.method_choice import METHODS

PROBLEM = learnable_problem(plain_host(3, 100.0, 0.05), 12)
CUT = step_problem(cut_graph(layered_step(4), 2), PROBLEM.host)
SPLIT = step_problem(
    dataclasses.replace(CUT.graph, shard=np.where(CUT.graph.colocation >= 0, -1, CUT.graph.micro_batch)), PROBLEM.host
)


class Host:
    """Measures plans on a hidden truth, which is not simulating them, and has nothing promising by itself."""

    seconds_left, problem = float("inf"), PROBLEM

    def __init__(self) -> None:
        self._timer = TrueTimer(true_problem(PROBLEM, Truth("hard", 1)), 1)

    def promising(self, count: int) -> NDArray[np.int32]:
        return np.zeros((0, PROBLEM.graph.num_ops), dtype=np.int32)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        return self.measure_plans([Simulator(PROBLEM, threads=1).plan(devices) for devices in placements])

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        return self._timer.measure_plans(plans)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Evaluations call by call, as `Task` says what is one, whichever simulator is asked."""
    counted, timed, depth = list[int](), set[bytes](), 0

    def watch(owner: type, name: str, count: Callable[[Any, Any], int]) -> None:
        real = getattr(owner, name)

        def call(self: object, *args: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                found = real(self, *args, **options)
            finally:
                depth -= 1
            if not depth:
                counted.append(count(args, found))
            return found

        monkeypatch.setattr(owner, name, call)

    def rows(args: Any, found: Any) -> int:
        timed.update(devices.tobytes() for devices in args[0])
        return len(found)

    def again(args: Any, found: Any) -> int:
        return 0 if len(args) == 1 and args[0].tobytes() in timed else 1

    watch(Simulator, "step_times", rows)
    watch(Simulator, "step_times_within", rows)
    watch(Simulator, "retime_batch", lambda args, found: len(found))
    watch(Simulator, "plan_and_time", again)
    watch(Simulator, "retime", lambda args, found: 1)
    watch(Simulator, "plan", lambda args, found: len(args) - 1)  # in the problem's own order it is none
    fitting = ((Agent, "learn"), (HostModel, "fit"), (HostModel, "draw"))
    for owner, name in ((Simulator, "timeline"), (Host, "measure_plans"), *fitting):
        watch(owner, name, lambda *_: 0)
    return counted


@pytest.mark.slow
def test_every_method_reports_what_it_simulated(simulated: list[int]) -> None:
    told, were = {}, {}
    for name, method in METHODS.items():
        problem = SPLIT if method.min_shards > 1 else CUT if method.min_micro_batches > 1 else PROBLEM
        task = Task(problem, Simulator(problem, threads=1), Budget(200), seed=0)
        simulated.clear()
        with contextlib.suppress(MissingExtra):
            method.run(task)
        told[name], were[name] = task.evaluations, sum(simulated)
    assert told == were


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("learned", {"config": AgentConfig(batch=3, evaluations=60, later_evaluations=40)}),
        ("policy", {"config": LearnConfig(num_samples=8, num_measured=4)}),
        ("guided", {}),
    ],
)
def test_so_does_one_that_measures(simulated: list[int], name: str, options: dict[str, object]) -> None:
    task = Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(300, measurements=9), seed=0, host=Host())
    METHODS[name].run(task, **options)
    assert task.evaluations == sum(simulated)
