"""`Task`: the problem of a search method, and the account of its budget and results.

Protocols around a `Task`: the host that runs placements for it, its observer, and a learned object that can be saved.
`BestSoFar`: the best step time that a search has found, and the budget spent by then. `Failure`: a method that raised,
as one line for a table and as a traceback. `Scoring`, `Simulating`: a task as a timer and as a measurer that other code
takes. `Guide`: suggests placements to a search, to start from and as moves of annealing; a policy can be one.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RlplaceError, refuse_if
from rlplace.graphs import Grouping
from rlplace.measure import Measurement, Measurer, Plan, Problem, Simulator
from rlplace.measure.measurement import CutoffTimer, PlanMeasurer, PlanTimer, StepTimer
from rlplace.search.groupings import majority_devices


@dataclass(frozen=True)
class Budget:
    """The budget of a method; the method ends at the first limit that it reaches."""

    evaluations: float = math.inf
    """Placements scored."""
    seconds: float = math.inf
    """Wall time."""
    measurements: int = 0
    """Placements that may run on the host, in addition to scored ones."""

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("evaluations", self.evaluations >= 1, "at least 1"),
            ("seconds", self.seconds > 0, "more than 0"),
            ("measurements", self.measurements >= 0, "at least 0"),
        ):
            refuse_if(not is_valid, name, getattr(self, name), expected, where="budget")


class Task:
    """A problem to solve: scores placements, keeps the best feasible one, counts evaluations and time.

    Every method uses the problem through a task, so that evaluations are counted in the same way. An evaluation is one
    simulated step time of a placement or a plan. It also counts if the simulation stops early, or if memory does not
    suffice. Planning in another order than the default (1F1B) is an evaluation, too. A method that calls a simulator
    directly reports its evaluations by `count`. These are not evaluations: simulating a scored placement again for its
    plan, timeline or critical path; a plan for the host to run; fitting a host model to measured steps.

    Attributes:
        problem: the problem to place.
        timer: scores placements.
        host: runs placements, if `budget.measurements` allows it; None if nothing can run.
        budget: the budget.
        generator: source of all random draws of the method.
        evaluations: placements scored so far.
        best_devices: (N,) int32, the best feasible placement so far; None before the first.
        priorities: (N,) float64, for later scores: ready ops with a higher priority run first. None for the problem's
            own order, which a timer without plans always uses.
        lower_bound_s: a bound that an exact method has proved; 0 otherwise.
        measurements: placements run on the host so far.
        history: the improvements of the best step time, with the first feasible placement.
        raced: for a resumed search, the plans that were measured before, with their measurements.
    """

    def __init__(
        self,
        problem: Problem,
        timer: StepTimer,
        budget: Budget | None = None,
        *,
        seed: int = 0,
        host: OpenHost | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.problem = problem
        self.timer = timer
        self.budget = budget or Budget()
        refuse_if(seed < 0, "seed", seed, "a whole number >= 0", where="search")
        self.generator = np.random.default_rng(seed)
        self._seed = seed
        self.host = host
        self.evaluations = 0
        self.measurements = 0
        self.best_devices: NDArray[np.int32] | None = None
        self.priorities: NDArray[np.float64] | None = None
        self._best_plan: Plan | None = None
        self._best_priorities: NDArray[np.float64] | None = None
        self.lower_bound_s = 0.0
        self.history: list[BestSoFar] = []
        self.raced: Sequence[tuple[Sequence[Plan], Sequence[Measurement]]] = ()
        self._cutoff_timer = timer if isinstance(timer, CutoffTimer) else None
        self._plan_timer = timer if isinstance(timer, PlanTimer) else None
        self._observer = observer
        self._is_stopped = False
        self._begin = time.monotonic()
        self._scoring_s, self._evaluations_before = 0.0, 0

    @property
    def is_serial(self) -> bool:
        """Whether the timer scores one placement after the other, so that batches are not faster."""
        return getattr(self.timer, "threads", 0) == 1

    @property
    def best_s(self) -> float:
        """Step time of the best feasible placement so far; infinite before the first."""
        return self.history[-1].best_s if self.history else math.inf

    @property
    def best_plan(self) -> Plan | None:
        """The best placement with all orders fixed, if it was scored in another order than the default."""
        is_planned = self._best_plan is not None or self._best_priorities is None
        if not is_planned and self._plan_timer is not None and self.best_devices is not None:
            self._best_plan = self._plan_timer.plan_and_time(self.best_devices, self._best_priorities)[0]
        return self._best_plan

    @property
    def best_found(self) -> tuple[NDArray[np.int32] | None, Plan | None, NDArray[np.float64] | None]:
        """Devices of the best placement, its plan if it was scored as a plan, and its priorities. Other threads may
        read them; the values may be slightly old, and not from the same moment."""
        return self.best_devices, self._best_plan, self._best_priorities

    @property
    def elapsed_s(self) -> float:
        """Wall time since the task began."""
        return time.monotonic() - self._begin

    @property
    def evaluations_left(self) -> float:
        """Placements that may still be scored."""
        return max(0.0, self.budget.evaluations - self.evaluations)

    @property
    def seconds_left(self) -> float:
        """Remaining wall time."""
        return max(0.0, self.budget.seconds - self.elapsed_s)

    @property
    def measurements_left(self) -> int:
        """Placements that may still be run on the host."""
        return max(0, self.budget.measurements - self.measurements) if self.measuring_s_left > 0 else 0

    @property
    def measuring_s_left(self) -> float:
        """Seconds until the host takes no more placements; 0 without one."""
        return 0.0 if self.host is None else self.host.seconds_left

    @property
    def spent(self) -> float:
        """Used share of the budget, 0 to 1."""
        if self._is_stopped:
            return 1.0
        return min(1.0, max(self.evaluations / self.budget.evaluations, self.elapsed_s / self.budget.seconds))

    def expected_evaluations(self, share: float) -> float:
        """Number of placements that may be scored until this share of the budget is used.

        With a budget of seconds alone, it is estimated from the speed of scoring so far. A budget of evaluations
        ignores the clock, so that results are deterministic.
        """
        left = max(0.0, share - self.spent)
        if math.isfinite(self.budget.evaluations):
            return left * self.budget.evaluations
        return left * self.budget.seconds * (self.evaluations - self._evaluations_before) / max(self._scoring_s, 1e-9)

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self._is_stopped or self.evaluations_left < 1 or self.elapsed_s >= self.budget.seconds

    def resume(
        self,
        *,
        evaluations: int,
        measurements: int,
        elapsed_s: float,
        plan: Plan | None = None,
        history: Sequence[BestSoFar] = (),
        raced: Sequence[tuple[Sequence[Plan], Sequence[Measurement]]] = (),
    ) -> None:
        """Continues an interrupted search: its used budget and its best placement count here.

        The random generator gets another state, because otherwise the same placements would be tried again.

        Args:
            evaluations: placements that it scored.
            measurements: placements that it ran.
            elapsed_s: its wall time.
            plan: its best placement, the last of `history`.
            history: the improvements of its best step time.
            raced: the plans that it measured, race by race, with their measurements.
        """
        self.evaluations, self.measurements, self._evaluations_before = evaluations, measurements, evaluations
        self._begin -= elapsed_s
        self.generator = np.random.default_rng((self._seed, evaluations, measurements))
        self.raced = raced
        if plan is not None:
            self.best_devices, self._best_plan, self.history = np.array(plan.devices), plan, list(history)

    def stop(self) -> None:
        """Ends the budget now, from any thread; the method ends at its next check."""
        self._is_stopped = True

    def score(self, placements: NDArray[np.int32], cutoff_s: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """(B,) step times of placements (B, N) or (N,); infinite for infeasible placements, and for those after the end
        of the budget.

        Args:
            placements: the placements to score; each one counts.
            cutoff_s: (B,) step times above these may be returned as infinite, which is faster.

        Raises:
            InvalidValue: a placement that violates a rule of the problem.
        """
        placements = np.atleast_2d(placements)
        count = int(min(len(placements), self.evaluations_left))
        times = np.full(len(placements), np.inf)
        if count == 0:
            return times
        begin = time.monotonic()
        if self.priorities is not None and self._plan_timer is not None:
            limits = np.full(count, np.inf) if cutoff_s is None else cutoff_s[:count]
            times[:count] = self._plan_timer.step_times_within(placements[:count], limits, self.priorities)
        elif cutoff_s is not None and self._cutoff_timer is not None:
            times[:count] = self._cutoff_timer.step_times_within(placements[:count], cutoff_s[:count])
        else:
            times[:count] = self.timer.step_times(placements[:count])
        self._scoring_s += time.monotonic() - begin
        self.evaluations += count
        self._keep(placements[:count], times[:count], None, self.priorities)
        if self._observer is not None and self.priorities is None:
            self._observer.scored(placements[:count], times[:count])
        return times

    def score_distinct(self, placements: NDArray[np.int32]) -> None:
        """`score` of placements (B, N) without duplicates, in the order of their first occurrence."""
        self.score(placements[np.sort(np.unique(placements, axis=0, return_index=True)[1])])

    @property
    def takes_plans(self) -> bool:
        """Whether the timer can score plans as well."""
        return self._plan_timer is not None

    def score_ordered(self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None) -> float:
        """Step time of a placement (N,) whose ready ops run by priority (N,), higher ones first.

        If it is the best so far, its plan is stored, too. Observers get only the problem's own order. A timer without
        plans scores the problem's own order.

        Raises:
            InvalidValue: as `score`.
        """
        return self._score_one(devices, lambda timer: timer.plan_and_time(devices, priorities))

    def score_plan(self, plan: Plan) -> float:
        """Like `score_ordered`, for exactly this plan."""
        return self._score_one(plan.devices, lambda timer: (plan, timer.retime(plan)))

    def score_groups(self, groups: NDArray[np.int32]) -> NDArray[np.float64]:
        """`score` of devices of groups, (B, G) or (G,).

        Raises:
            InvalidValue: as `score`; wrong length, no integers, or a device out of range.
        """
        return self.score(self.problem.grouping.expand(np.atleast_2d(self.problem.check_groups(groups))))

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """Measurements of placements (B, N) on the host; only as many as the budget allows.

        If the time ends after a check of `measurements_left`, the batch still runs completely: batches are never cut.
        """
        placements = np.atleast_2d(placements)[: self._take(len(np.atleast_2d(placements)))]
        return self.host.measure(placements) if self.host is not None and len(placements) else []

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """Like `measure`, for exactly these plans."""
        plans = plans[: self._take(len(plans))]
        return self.host.measure_plans(plans) if self.host is not None and plans else []

    def _take(self, count: int) -> int:
        """How many of `count` measurements the budget allows; they are counted."""
        taken = 0 if self.host is None else min(count, max(0, self.budget.measurements - self.measurements))
        self.measurements += taken
        return taken

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """Like `measure_plans`, but a `LateHost` returns the available results, of these plans and of earlier ones.

        Args:
            plans: the plans to measure; each counts now.
            is_all: wait for all requested results.
        """
        if isinstance(self.host, LateHost):
            return self.host.measure_some(plans[: self._take(len(plans))], is_all=is_all)
        return list(zip(plans, self.measure_plans(plans)))

    def count(self, evaluations: int) -> None:
        """Counts evaluations that the method made without `score`: with other costs, or beyond the budget."""
        self.evaluations += evaluations

    def _score_one(self, devices: NDArray[np.int32], run: Callable[[PlanTimer], tuple[Plan, Measurement]]) -> float:
        if self._plan_timer is None:
            return float(self.score(devices)[0])
        if self.evaluations_left < 1:
            return math.inf
        begin = time.monotonic()
        plan, measured = run(self._plan_timer)
        step_s = measured.step_time_s if measured.ok else math.inf
        self._scoring_s += time.monotonic() - begin
        self.evaluations += 1
        self._keep(plan.devices[None], np.array([step_s]), plan)
        return step_s

    def _keep(
        self,
        placements: NDArray[np.int32],
        times: NDArray[np.float64],
        plan: Plan | None,
        priorities: NDArray[np.float64] | None = None,
    ) -> None:
        first = int(np.argmin(times))
        if times[first] < self.best_s:
            self.best_devices = np.array(placements[first], dtype=np.int32)
            self._best_plan, self._best_priorities = plan, priorities
            self.history.append(BestSoFar(self.evaluations, self.measurements, self.elapsed_s, float(times[first])))

    def tell(self, figures: Mapping[str, float]) -> None:
        """Passes figures of the learner, by name, to the observer."""
        if self._observer is not None:
            self._observer.learned(figures)


class OpenHost(Measurer, PlanMeasurer, Protocol):
    """A host that runs placements and plans for as long as there is time."""

    @property
    def seconds_left(self) -> float:
        """Seconds until it takes no more of them; infinite before the first ones, which always run."""

    def promising(self, count: int) -> NDArray[np.int32]:
        """(<= count, N): the best placements scored so far that were never run, unlike each other if possible."""


class TimedHost:
    """A host that measures what it is asked to, until its time is up.

    Attributes:
        outcomes: of all plans, in order.

    Args:
        simulator: of the problem; makes plans.
        measurer: a measurement for each plan.
        seconds: after which it takes no more plans; infinite for no end.
    """

    def __init__(
        self, simulator: Simulator, measurer: Callable[[Sequence[Plan]], list[Measurement]], seconds: float
    ) -> None:
        self.problem, self._simulator, self._measurer = simulator.problem, simulator, measurer
        self.outcomes: list[Measurement] = []
        self._end_s = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """As `OpenHost` says."""
        return self._end_s - time.monotonic() if self.outcomes else math.inf

    def promising(self, count: int) -> NDArray[np.int32]:
        """(0, N): it keeps no placements."""
        return np.zeros((0, self.problem.graph.num_ops), dtype=np.int32)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """As `measure_plans`, of the plans of placements (B, N)."""
        return self.measure_plans([self._simulator.plan(devices) for devices in placements])

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """A measurement for each plan."""
        outcomes = self._measurer(plans)
        self.outcomes += outcomes
        return outcomes


@runtime_checkable
class LateHost(OpenHost, Protocol):
    """A host that gives measurements as they come: those of some plans later than those of others."""

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """Takes plans to be measured, and gives the measurements that have come of these and of earlier ones.

        Every plan is given back once, with its measurement. With `is_all` it waits for all that were ever taken; then
        those of `plans` come last, in their order.
        """


class Observer(Protocol):
    """Watches a task; it must not change the result."""

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Placements (B, N) were scored: (B,) seconds, infinite where infeasible."""

    def learned(self, figures: Mapping[str, float]) -> None:
        """The method has learned something; figures by name."""


class Saveable(Protocol):
    """A learned policy or host model, as a file."""

    def save(self, path: Path) -> None:
        """Writes it to `path`, and its companions beside it."""


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """One improvement of a search; a run's `history` is one of these for each, in order.

    Attributes:
        evaluations: placements scored by then.
        measurements: placements run on the host by then.
        seconds: wall time since the search began; not compared, so that runs that found the same are equal.
        best_s: the step time that is now the best, in seconds; finite.
    """

    evaluations: int
    measurements: int
    seconds: float = field(compare=False)
    best_s: float

    def to_list(self) -> list[float]:
        """`[evaluations, measured, seconds, step_time_s]`, as `--json` and `result.json` hold it.

        Example:
            >>> BestSoFar(64, 0, 0.5, 0.125).to_list()
            [64, 0, 0.5, 0.125]
        """
        return [self.evaluations, self.measurements, self.seconds, self.best_s]


MOST_LETTERS = 300
"""Of an error's first line, so that a row of a table stays one."""


@dataclass(frozen=True)
class Failure:
    """A method that raised.

    Attributes:
        why: the error in one line; where it is none of ours, with its type, and the file and line that raised it.
        traceback: all of it, as Python prints it.
    """

    why: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure that an error is.

        Example:
            >>> Failure.of(MemoryError()).why
            'out of memory'
        """
        return cls(_line(error), "".join(traceback.format_exception(error)))


def _line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = first if len(first) <= MOST_LETTERS else f"{first[: MOST_LETTERS - 3]}..."
    if isinstance(error, RlplaceError):
        return first
    if isinstance(error, MemoryError):
        return first or "out of memory"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {first}' if first else ''}{place}"


class _OfTask:
    """An adapter of a task: everything that is asked of it counts as the task's."""

    def __init__(self, task: Task) -> None:
        self.problem = task.problem
        self._task = task


class Scoring(_OfTask):
    """A task's scoring as a `StepTimer`: every placement that is timed counts as one of the task's."""

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of (B, N) placements, as `Task.score`."""
        return self._task.score(placements)


class Simulating(_OfTask):
    """A task's scoring as a `Measurer`: every placement counts once, also one that does not fit into memory.

    A `Measurer` that is a `StepTimer` too would be asked again, by `measure`, why a step time is infinite.
    """

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One measurement a placement, of its step time alone; one that is infinite does not fit into memory."""
        times = self._task.score(placements).tolist()
        return [Measurement("ok" if math.isfinite(step_s) else "oom", step_s) for step_s in times]


MOST_STARTS = 64
"""Placements of a guide at most that a search tries to start from."""
ListSchedule = tuple[str, tuple[float, ...]]
"""A grouping's name and weights of the list scheduler over it, as searches begin with."""


class Guide(Protocol):
    """Suggests placements of a problem's ops, which a search scores and takes or leaves like any others."""

    @property
    def start_share(self) -> float:
        """Share of a search's evaluations for placements to start from, 0 to 1."""

    @property
    def move_share(self) -> float:
        """Share of annealing's moves that are suggested, 0 to 1."""

    def schedules(self, count: int) -> Sequence[ListSchedule]:
        """At most `count` list schedules to start from, the best guess first; none where it knows nothing of them."""

    def starts(self, count: int) -> NDArray[np.int32]:
        """(<= count, N) placements to start from, the best guess first; none where it knows nothing yet."""

    def moves(self, devices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """(count, N) placements near `devices` (N,), each after a move; unchanged where it has nothing to suggest."""

    def imitate(self, devices: NDArray[np.int32]) -> None:
        """Is told the placement (N,) that the search goes on from, which is the best that it knows of."""


def guided_schedules(task: Task, guide: Guide | None) -> Sequence[ListSchedule]:
    """The list schedules that a guide would start from, as many as its share of the task's budget; () without one."""
    return guide.schedules(count) if guide is not None and (count := _num_starts(task, guide)) else ()


def score_guided(task: Task, guide: Guide | None) -> list[tuple[NDArray[np.int32], float]]:
    """Devices (N,) int32 and step times of the placements that a guide would start from, best first; [] without one.

    Args:
        task: scores and counts; the guide's share is of its whole budget.
        guide: asked for at most `MOST_STARTS`; equal placements are scored once.
    """
    if guide is None or not (count := _num_starts(task, guide)):
        return []
    starts = guide.starts(count)
    starts = starts[np.sort(np.unique(starts, axis=0, return_index=True)[1])]
    return sorted(zip(starts, task.score(starts).tolist(), strict=True), key=lambda one: one[1])


def _num_starts(task: Task, guide: Guide) -> int:
    """One at least, unless the guide has no share or nothing more may be scored."""
    if not guide.start_share:
        return 0
    return int(min(max(guide.start_share * task.budget.evaluations, 1), task.evaluations_left, MOST_STARTS))


def guided_moves(
    guide: Guide,
    problem: Problem,
    grouping: Grouping,
    current: NDArray[np.int32],
    moved: NDArray[np.int32],
    generator: np.random.Generator,
) -> NDArray[np.int32]:
    """(C, G) int32: `moved`, but for a share of its rows, which the guide moved from `current`.

    Args:
        guide: suggests placements of ops.
        problem: the problem to place.
        grouping: the groups that annealing moves; a suggestion is taken as far as its groups can follow it.
        current: (G,) the devices of groups that the moves start from.
        moved: (C, G) moves that are there already; they stay where the guide would change nothing.
        generator: draws which rows are the guide's, one number a row.
    """
    rows = np.flatnonzero(generator.random(len(moved)) < guide.move_share)
    if not len(rows):
        return moved
    mixed = moved.copy()
    for row, devices in zip(rows, guide.moves(grouping.expand(current), len(rows)), strict=True):
        groups = majority_devices(problem, devices, grouping)
        if not np.array_equal(groups, current):
            mixed[row] = groups
    return mixed
