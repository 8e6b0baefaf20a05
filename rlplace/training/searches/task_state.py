"""What a task on a simulated host has come to: as a result, and as a state that another process goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.measure.plan import Plan
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import BestSoFar, Budget, Failure, Saveable, Task
from rlplace.training.resume.state import MethodState
from rlplace.training.searches.result import LoopResult


def resume_task(task: Task, before: MethodState, planner: Simulator) -> None:
    """Puts a task where an interrupted one was; the step time of its best is taken afresh, whatever was noted."""
    history = list(before.history)
    if before.plan is not None:
        step_s = planner.retime(before.plan).step_time_s
        if history and history[-1].best_s != step_s:
            history = [best for best in history if best.best_s > step_s]
            history.append(BestSoFar(before.num_scored, 0, before.seconds, step_s))
    task.resume(
        evaluations=before.num_scored,
        measurements=0,
        elapsed_s=before.seconds,
        plan=before.plan if history else None,
        history=history,
    )


def state_so_far(
    planner: Simulator, task: Task, single_s: float, learning: Sequence[Mapping[str, float]]
) -> MethodState:
    """What a task has come to that is still at work in its own thread; its best may be a moment old."""
    devices, plan, priorities = task.best_found
    if plan is None and devices is not None:
        plan = planner.plan_and_time(devices, priorities)[0]
    start = None if plan is None else plan.devices
    history, learned = tuple(task.history), tuple(learning)
    return MethodState(
        task.budget.seconds, task.elapsed_s, task.evaluations, 0, single_s, history, learned, plan=plan, start=start
    )


def done_state(result: LoopResult, budget: Budget) -> MethodState:
    """What is kept of a method that has ended.

    Args:
        result: what it came to.
        budget: what it was given.
    """
    return MethodState(
        min(budget.seconds, budget.evaluations),
        result.seconds,
        result.num_scored,
        0,
        result.single_s,
        result.history,
        result.learning,
        plan=result.plan,
        start=None if result.plan is None else result.plan.devices,
        is_searched=True,
        is_done=True,
        failure=result.failure,
    )


def result_of(
    planner: Simulator,
    task: Task,
    single_s: float,
    learned: Saveable | None,
    learning: Sequence[Mapping[str, float]],
    failure: Failure | None,
) -> LoopResult:
    """What a task has come to that has ended.

    Args:
        planner: of its problem.
        task: with its best placement.
        single_s: step time on the best single device.
        learned: what the method learned, if it learns.
        learning: what it told of every update, figures by name.
        failure: what it raised; None of all others.
    """
    return LoopResult(
        best_plan(planner, task),
        task.evaluations,
        0,
        task.elapsed_s,
        tuple(task.history),
        single_s,
        learned,
        tuple(learning),
        failure=failure,
    )


def best_plan(planner: Simulator, task: Task) -> Plan | None:
    """The best that a task found, in the order in which it was scored."""
    if task.best_plan is not None or task.best_devices is None:
        return task.best_plan
    return planner.plan(task.best_devices)
