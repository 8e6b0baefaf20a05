"""`search_and_measure`: gives any method its budget: it searches on the simulator, then the host runs the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.evaluator import ClusterEvaluator
from rlplace.errors import UserError
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.timeline import Timeline
from rlplace.report.progress import Progress
from rlplace.runs.tracking import Tracker
from rlplace.search.best_so_far import BestSoFar
from rlplace.search.failure import Failure
from rlplace.search.own_order import OwnOrder
from rlplace.search.registry import METHODS
from rlplace.search.task import Budget, Saveable, Task
from rlplace.training.candidates import Candidates
from rlplace.training.loop import FINAL_SHARE, FINALISTS, LoopBudget, LoopResult
from rlplace.training.resume.journal import MethodJournal
from rlplace.training.resume.state import MethodState, Race, Unmeasured

BATCH = 6
"""Placements a race, where the method does not measure by itself."""
LEAST_KEPT, MOST_KEPT = 64, 512
"""Simulated placements that are kept to be measured: as many as may be run, within reason."""
SHOW_EVERY_S = 0.1
"""How often the progress of a search is told."""
ROUND = RaceProtocol(warmup=1, min_rounds=3, max_rounds=5)
FINAL = RaceProtocol(warmup=1, min_rounds=5, max_rounds=30)

Clock = Callable[[], float]


def search_and_measure(
    method: str,
    evaluator: Evaluator,
    budget: LoopBudget,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[Plan, float], None] = lambda plan, step_time_s: None,
    options: Mapping[str, Any] | None = None,
    clock: Clock = time.monotonic,
    before: MethodState | None = None,
    journal: MethodJournal | None = None,
) -> LoopResult:
    """The placement that `method` came up with and that ran fastest on a host of this machine.

    A method that learns from measurements asks for them itself (`Task.measure`); what it leaves of them goes to the
    best simulated placements. Then the best measured ones race against each other. What a method that raised had found
    until then counts.

    Args:
        method: a name of `METHODS`.
        evaluator: simulates, and runs.
        budget: of this method alone.
        seed: of the method's draws.
        progress: told how it goes.
        tracker: told figures.
        single_s: step time on the best single device.
        on_best: told each new best measured plan and its step time.
        options: of the method's own.
        clock: seconds that never go back.
        before: what the method had come to where it was interrupted: it goes on from there, with what is left.
        journal: keeps what the method comes to, after every race and from time to time; nobody by default.

    Raises:
        UserError: the method does not fit the problem.
        Exception: whatever measuring raised.
    """
    loop = _Loop(method, evaluator, budget, progress, tracker, single_s, on_best, clock, journal)
    search_s = budget.seconds * budget.simulate_share
    task = Task(
        evaluator.problem,
        OwnOrder(evaluator.simulator),
        Budget(seconds=max(search_s, 1e-3), measurements=budget.measurements),
        seed=seed,
        host=loop,
        observer=loop,
    )
    loop.watch(task)
    learned, failure = None, None
    if before is not None:
        loop.resume(before, task)
        failure = before.failure
    if before is None or not before.is_searched:
        try:
            learned, failure = METHODS[method].run(task, **(options or {})), None
        except UserError:
            raise
        except Exception as error:
            if error is loop.raised:  # the host, not the method
                raise
            failure = Failure.of(error)
            progress.say(f"{method} raised {failure.why}: what it found until then counts")
        loop.end_search(learned, failure)
    loop.report()
    while (count := min(BATCH * loop.num_workers, task.measurements_left)) > 0:
        batch = loop.promising(count)
        if not len(batch):
            break
        task.measure(batch)
    plan = loop.decide()
    result = LoopResult(
        plan,
        task.evaluations,
        task.measurements,
        loop.elapsed_s,
        loop.history(),
        loop.single_s,
        learned,
        tuple(loop.learning),
        loop.tried(),
        failure,
    )
    loop.end(result)
    return result


class _Loop:
    """The measuring half of a search (its task's host and observer), and what it tells people.

    Attributes:
        raised: what measuring, or telling, raised at last; None where neither did.
    """

    def __init__(
        self,
        method: str,
        evaluator: Evaluator,
        budget: LoopBudget,
        progress: Progress,
        tracker: Tracker,
        single_s: float,
        on_best: Callable[[Plan, float], None],
        clock: Clock,
        journal: MethodJournal | None,
    ) -> None:
        self.candidates = Candidates(max(LEAST_KEPT, min(budget.measurements, MOST_KEPT)))
        self.single_s = single_s
        self.learning: list[Mapping[str, float]] = []
        self.raised: Exception | None = None
        self._failure: Failure | None = None
        self._method, self._evaluator, self._progress, self._tracker = method, evaluator, progress, tracker
        self._budget_s, self._end_s, self._clock = budget.seconds, clock() + budget.seconds, clock
        self._on_best, self._improved = on_best, list[tuple[float, BestSoFar]]()
        self._ran: list[tuple[Plan, float]] = []
        self._late = evaluator if isinstance(evaluator, ClusterEvaluator) else None
        self._task: Task | None = None
        self._best_s, self._best_ratio, self._shown_s = float("inf"), float("inf"), float("-inf")
        self._journal, self._is_searched = journal, False
        self._plan: Plan | None = None
        self._races = list[Race]()

    @property
    def problem(self) -> Problem:
        return self._evaluator.problem

    @property
    def num_scored(self) -> int:
        """Placements simulated so far, also those that the method counted by itself."""
        return self._task.evaluations if self._task is not None else 0

    @property
    def num_workers(self) -> int:
        """Machines that measure."""
        return 1 if self._late is None else self._late.num_workers

    def watch(self, task: Task) -> None:
        """Takes the number of placements simulated from `task`."""
        self._task = task

    def resume(self, before: MethodState, task: Task) -> None:
        """Goes on from what the method had come to; its task is told what was spent."""
        start = None if before.start is None else self._evaluator.simulator.plan(before.start)
        simulated_s = math.inf if start is None else self._evaluator.simulator.retime(start).step_time_s
        is_known = start is not None and math.isfinite(simulated_s)
        task.resume(
            evaluations=before.num_scored,
            measurements=before.num_measured,
            elapsed_s=before.seconds,
            plan=start if is_known else None,
            history=[BestSoFar(before.num_scored, before.num_measured, before.seconds, simulated_s)],
            raced=[(race.plans, race.outcomes) for race in before.races if not race.is_final],
        )
        self._end_s -= before.seconds
        self.single_s, self.learning = before.single_s, list(before.learning)
        self._races, self._is_searched, self._plan = list(before.races), before.is_searched, before.plan
        self._failure = before.failure
        if before.unmeasured is not None:
            self.candidates.note(before.unmeasured.devices, before.unmeasured.simulated_s)
        for race in before.races:
            self.candidates.record(race.plans, race.outcomes)
            self._ran += [(plan, outcome.ratio) for plan, outcome in zip(race.plans, race.outcomes) if outcome.ok]
        self._improved = [(best.best_s / self.single_s, best) for best in before.history]
        if before.plan is not None and before.history:
            self._best_s, self._best_ratio = before.best_s, self._improved[-1][0]
            if before.plan.fingerprint not in {plan.fingerprint for race in before.races for plan in race.plans}:
                known = Measurement("ok", before.best_s, reference_s=self.single_s)  # the store has lost it
                self.candidates.record([before.plan], [known])

    def end_search(self, learned: Saveable | None, failure: Failure | None) -> None:
        """Takes note that the method has ended, with what it learned or raised; what is left is to measure."""
        self._is_searched, self._failure = True, failure
        if self._journal is not None:
            if learned is not None:
                self._journal.keep_learned(learned)
            self._journal.keep(self._state())

    def end(self, result: LoopResult) -> None:
        """Takes note that all of it has ended."""
        if self._journal is not None:
            done = replace(self._state(), seconds=result.seconds, plan=result.plan, tried=result.tried, is_done=True)
            self._journal.keep(done)

    def _state(self) -> MethodState:
        task, (devices, simulated_s) = self._task, self.candidates.fresh()
        return MethodState(
            self._budget_s,
            self.elapsed_s,
            self.num_scored,
            0 if task is None else task.measurements,
            self.single_s,
            self.history(),
            tuple(self.learning),
            (),
            tuple(self._races),
            self._plan,
            None if task is None else task.best_devices,
            Unmeasured(devices, simulated_s) if len(devices) else None,
            self._is_searched,
            failure=self._failure,
        )

    @property
    def elapsed_s(self) -> float:
        """Wall time since the search began."""
        return self._clock() - self._end_s + self._budget_s

    @property
    def is_open(self) -> bool:
        """Whether there is time to run one more batch before the last race; the first one is always run."""
        return self._clock() < self._end_s - FINAL_SHARE * self._budget_s or not self.candidates.num_measured

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Keeps the best for measuring."""
        self.candidates.note(placements, step_s)
        if self._clock() >= self._shown_s + SHOW_EVERY_S:  # a search scores thousands a second
            with self._noting():
                self.report()

    def learned(self, figures: Mapping[str, float]) -> None:
        """Keeps the learner's figures, and passes them on."""
        self.learning.append(figures)
        with self._noting():
            self._tracker.log({f"train/{name}": value for name, value in figures.items()})

    def promising(self, count: int) -> NDArray[np.int32]:
        """(<= count, N): the best simulated placements that were never run."""
        chosen = [candidate.devices for candidate in self.candidates.next_to_measure(count)]
        return np.array(chosen, dtype=np.int32).reshape(len(chosen), self.problem.graph.num_ops)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """Races `placements` (B, N) on the host."""
        return self.measure_plans([self._evaluator.simulator.plan(row) for row in placements])

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """Races `plans` on the host, but for those that were raced before."""
        with self._noting():
            if self._late is None:
                return self._race(plans, ROUND, is_recalled=True)
            came = self.measure_some(plans, is_all=True)
            return [outcome for _, outcome in came[len(came) - len(plans) :]]

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """As `LateHost` says, where a cluster measures; elsewhere all of `plans`, now."""
        if self._late is None:
            return list(zip(plans, self.measure_plans(plans), strict=True)) if plans else []
        with self._noting():
            came = self._late.measure_some(plans, ROUND, deadline_s=self._end_s, is_all=is_all)
        if came:
            self._record([plan for plan, _ in came], [outcome for _, outcome in came], ROUND)
        return came

    def trace(self, plan: Plan) -> Timeline:
        """A typical step of `plan`, op by op."""
        with self._noting():
            return self._evaluator.timeline(plan)

    def decide(self) -> Plan | None:
        """The best of the best measured placements, raced against each other while there is time."""
        self.measure_some([], is_all=True)
        best = self.candidates.best_measured(FINALISTS)
        finalists = [one.plan for one in best if np.isfinite(one.ratio) and one.plan is not None]
        if len(finalists) > 1 and self._clock() < self._end_s:
            measurements = self._race(finalists, FINAL)
            # everyone ran in this race: its own ratios decide, those of earlier races were under other conditions
            order = sorted(range(len(finalists)), key=lambda k: measurements[k].ratio)
            finalists = [finalists[k] for k in order if measurements[k].ok] or finalists
        self.report()
        return finalists[0] if finalists else None

    def history(self) -> tuple[BestSoFar, ...]:
        """The best ratio so far wherever it improved, as a step time at the latest one of the reference."""
        # step times as they were would go up and down with the machine; ratios only go down
        return tuple(replace(best, best_s=ratio * self.single_s) for ratio, best in self._improved)

    def tried(self) -> tuple[tuple[float, float], ...]:
        """What the simulator says of every plan that ran, and what the host said, as of the latest reference."""
        simulator = self._evaluator.simulator
        said = [(simulator.retime(plan), ratio * self.single_s) for plan, ratio in self._ran]
        return tuple((simulated.step_time_s, measured_s) for simulated, measured_s in said if simulated.ok)

    def report(self) -> None:
        """Shows how far the search is."""
        self._shown_s = self._clock()
        self._progress.update(
            placements=self.num_scored,
            measured=self.candidates.num_measured,
            best_s=self._best_ratio * self.single_s,  # of one race and one reference, or the ratio shown goes up
            single_s=self.single_s,
            left_s=max(self._end_s - self._clock(), 0.0),
            budget_s=self._budget_s,
        )
        if self._journal is not None and self._journal.is_due:
            self._journal.keep(self._state())

    def _race(self, plans: Sequence[Plan], protocol: RaceProtocol, *, is_recalled: bool = False) -> list[Measurement]:
        measurements = self._evaluator.measure_plans(plans, protocol, deadline_s=self._end_s, is_recalled=is_recalled)
        self._record(plans, measurements, protocol)
        return measurements

    def _record(self, plans: Sequence[Plan], measurements: Sequence[Measurement], protocol: RaceProtocol) -> None:
        """Takes in what the host said of plans, and tells people."""
        self.candidates.record(plans, measurements)
        self._ran += [(plan, measurement.ratio) for plan, measurement in zip(plans, measurements) if measurement.ok]
        self._races.append(Race(tuple(plans), tuple(measurements), protocol is FINAL))
        finite = [measurement for measurement in measurements if measurement.ok]
        if finite:
            self.single_s = float(np.median([measurement.reference_s for measurement in finite]))
        leader = self.candidates.best_measured(1)[0]
        is_better = leader.ratio < self._best_ratio and leader.plan is not None
        if is_better:
            self._best_ratio, self._best_s = leader.ratio, leader.ratio * self.single_s
            self._improved.append((leader.ratio, self._now()))
            self._plan = leader.plan
        if self._journal is not None:  # before anybody is told: what was told must be known when the run goes on
            self._journal.keep(self._state())
        if is_better and self._plan is not None:
            self._on_best(self._plan, self._best_s)
        self._tracker.log_search(
            placements=self.num_scored,
            mean_s=float(np.mean([m.step_time_s for m in finite])) if finite else float("nan"),
            best_s=self._best_s,
            vs_single=self._best_ratio,
            infeasible_rate=1.0 - len(finite) / max(len(measurements), 1),
        )
        if self._improved:
            self._tracker.log_best_so_far(self._method, self._now(), self.single_s)
        self.report()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps what is raised meanwhile: it is no fault of the method that asked."""
        try:
            yield
        except Exception as error:
            self.raised = error
            raise

    def _now(self) -> BestSoFar:
        best_s = self._best_ratio * self.single_s
        return BestSoFar(self.num_scored, self.candidates.num_measured, self.elapsed_s, best_s)
