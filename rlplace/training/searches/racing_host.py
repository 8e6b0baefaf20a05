"""`RacingHost`: the host of a search, which runs plans in races, keeps what comes of them, and tells people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.evaluator import ClusterEvaluator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timing.race import RaceProtocol
from rlplace.report.console import Progress
from rlplace.runs.tracking import Tracker
from rlplace.search.task import BestSoFar, Failure, Saveable, Task
from rlplace.training.resume.journal import MethodJournal
from rlplace.training.resume.state import MethodState, Unmeasured
from rlplace.training.searches.budget import FINAL_SHARE, FINALISTS, LoopBudget
from rlplace.training.searches.raced import Raced
from rlplace.training.searches.result import LoopResult

LEAST_KEPT, MOST_KEPT = 64, 512
"""Simulated placements that are kept to be measured: as many as may be run, within reason."""
SHOW_EVERY_S = 0.1
"""How often the progress of a search is told."""
ROUND = RaceProtocol(warmup=1, min_rounds=3, max_rounds=5)
"""How plans are raced while a method searches."""
FINAL = RaceProtocol(warmup=1, min_rounds=5, max_rounds=30)
"""How the best of them are raced at last."""


class RacingHost:
    """The measuring half of a search: its task's host and observer, and what it tells people.

    Attributes:
        raced: what came of the races.
        learning: what the method told of every update, figures by name.
        raised: what measuring, or telling, raised at last; None where neither did.

    Args:
        method: that searches.
        evaluator: simulates, and runs.
        budget: of this method alone.
        progress: told how it goes.
        tracker: told figures.
        single_s: step time on the best single device.
        on_best: told each new best measured plan, its step time and its ratio to the reference; at last the plan that
            the last race decided for.
        clock: seconds that never go back.
        journal: keeps what the method comes to; None for nobody.
    """

    def __init__(
        self,
        method: str,
        evaluator: Evaluator,
        budget: LoopBudget,
        progress: Progress,
        tracker: Tracker,
        single_s: float,
        on_best: Callable[[Plan, float, float], None],
        clock: Callable[[], float],
        journal: MethodJournal | None,
    ) -> None:
        self.raced = Raced(max(LEAST_KEPT, min(budget.measurements, MOST_KEPT)), single_s)
        self.learning: list[Mapping[str, float]] = []
        self.raised: Exception | None = None
        self._method, self._evaluator, self._progress, self._tracker = method, evaluator, progress, tracker
        self._budget_s, self._end_s, self._clock = budget.seconds, clock() + budget.seconds, clock
        self._on_best, self._journal, self._shown_s = on_best, journal, float("-inf")
        self._late = evaluator if isinstance(evaluator, ClusterEvaluator) else None
        self._task: Task | None = None
        self._is_searched = False
        self._failure: Failure | None = None

    @property
    def problem(self) -> Problem:
        """What is placed."""
        return self._evaluator.problem

    @property
    def num_scored(self) -> int:
        """Placements simulated so far, also those that the method counted by itself."""
        return self._task.evaluations if self._task is not None else 0

    @property
    def num_workers(self) -> int:
        """Machines that measure."""
        return 1 if self._late is None else self._late.num_workers

    @property
    def elapsed_s(self) -> float:
        """Wall time since the search began."""
        return self._clock() - self._end_s + self._budget_s

    @property
    def is_open(self) -> bool:
        """Whether there is time to run one more batch before the last race; the first one is always run."""
        is_early = self._clock() < self._end_s - FINAL_SHARE * self._budget_s
        return is_early or not self.raced.candidates.num_measured

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
        self.learning, self._is_searched, self._failure = list(before.learning), before.is_searched, before.failure
        self.raced.resume(before)

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

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Keeps the best for measuring."""
        self.raced.candidates.note(placements, step_s)
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
        chosen = [candidate.devices for candidate in self.raced.candidates.next_to_measure(count)]
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

    def decide(self) -> Plan | None:
        """The best of the best measured placements, raced against each other while there is time."""
        self.measure_some([], is_all=True)
        finalists = self.raced.best(FINALISTS)
        if len(finalists) > 1 and self._clock() < self._end_s:
            measurements = self._race(finalists, FINAL)
            # everyone ran in this race: its own ratios decide, those of earlier races were under other conditions
            order = sorted(range(len(finalists)), key=lambda k: measurements[k].ratio)
            if best := [k for k in order if measurements[k].ok]:
                finalists, ratio = [finalists[k] for k in best], measurements[best[0]].ratio
                self._on_best(finalists[0], ratio * self.raced.single_s, ratio)
        self.report()
        return finalists[0] if finalists else None

    def tried(self) -> tuple[tuple[float, float], ...]:
        """Simulated and measured step times of every plan that ran, as `Raced.tried`."""
        return self.raced.tried(self._evaluator.simulator)

    def report(self) -> None:
        """Shows how far the search is."""
        self._shown_s = self._clock()
        self._progress.update(
            placements=self.num_scored,
            measured=self.raced.candidates.num_measured,
            best_s=self.raced.best_ratio * self.raced.single_s,  # of one race and one reference: the ratio never rises
            single_s=self.raced.single_s,
            left_s=max(self._end_s - self._clock(), 0.0),
            budget_s=self._budget_s,
            method=self._method,
        )
        if self._journal is not None and self._journal.is_due:
            self._journal.keep(self._state())

    def _state(self) -> MethodState:
        """What the method has come to."""
        task, (devices, simulated_s) = self._task, self.raced.candidates.fresh()
        return MethodState(
            self._budget_s,
            self.elapsed_s,
            self.num_scored,
            0 if task is None else task.measurements,
            self.raced.single_s,
            self.raced.history,
            tuple(self.learning),
            (),
            tuple(self.raced.races),
            self.raced.plan,
            None if task is None else task.best_devices,
            Unmeasured(devices, simulated_s) if len(devices) else None,
            self._is_searched,
            failure=self._failure,
        )

    def _race(self, plans: Sequence[Plan], protocol: RaceProtocol, *, is_recalled: bool = False) -> list[Measurement]:
        measurements = self._evaluator.measure_plans(plans, protocol, deadline_s=self._end_s, is_recalled=is_recalled)
        self._record(plans, measurements, protocol)
        return measurements

    def _record(self, plans: Sequence[Plan], measurements: Sequence[Measurement], protocol: RaceProtocol) -> None:
        """Takes in what the host said of plans, and tells people."""
        raced, is_final = self.raced, protocol is FINAL
        is_better = raced.record(
            plans, measurements, is_final=is_final, num_scored=self.num_scored, seconds=self.elapsed_s
        )
        if self._journal is not None:  # before anybody is told: what was told must be known when the run goes on
            self._journal.keep(self._state())
        if is_better and raced.plan is not None:
            self._on_best(raced.plan, raced.best_s, raced.best_ratio)
        times_s = [measurement.step_time_s for measurement in measurements if measurement.ok]
        self._tracker.log_search(
            placements=self.num_scored,
            mean_s=float(np.mean(times_s)) if times_s else float("nan"),
            best_s=raced.best_s,
            vs_single=raced.best_ratio,
            infeasible_rate=1.0 - len(times_s) / max(len(measurements), 1),
        )
        if raced.history:
            self._tracker.log_best_so_far(self._method, raced.so_far(self.num_scored, self.elapsed_s), raced.single_s)
        self.report()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps what is raised meanwhile: it is no fault of the method that asked."""
        try:
            yield
        except Exception as error:
            self.raised = error
            raise
