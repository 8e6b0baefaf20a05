"""`RacingHost`: the host of a search, which runs plans in races, keeps the results, and reports them.

`Raced`: the measured plans of a search, race by race, and the best of them so far.

`Candidates`: the placements that a search proposed, and their measurements.

`LoopBudget`: the budget of one method for a search that measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.cluster_evaluator import ClusterEvaluator
from rlplace.measure import Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.report.console import Progress
from rlplace.search import Task
from rlplace.search.methods import choose_diverse
from rlplace.search.task import BestSoFar, Failure, Saveable
from rlplace.session.session import MethodKeeper
from rlplace.session.session_records import MethodResult, Race, Unmeasured
from rlplace.training.tracking import Tracker

LEAST_KEPT, MOST_KEPT = 64, 512
"""Simulated placements that are kept to be measured: as many as may be run, within reason."""
SHOW_EVERY_S = 0.1
"""How often the progress of a search is told."""
ROUND = RaceProtocol(warmup=1, min_rounds=3, max_rounds=5)
"""How plans are raced while a method searches."""
FINAL = RaceProtocol(warmup=1, min_rounds=5, max_rounds=30)
"""How the best of them are raced at last."""


class RacingHost:
    """The measuring half of a search: its task's host and observer, and its reports for people.

    Attributes:
        task: of the search; it is set once it is made, as it is made with this host.
        raced: the results of the races.
        learning: the figures of every update of the learner, by name.
        raised: the last error of measuring or reporting; None where neither did.

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
        keeper: stores the method's state and result; None stores nothing.
        num_traced: traced steps of each plan while the method searches.
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
        keeper: MethodKeeper | None,
        num_traced: int = 0,
    ) -> None:
        self.raced = Raced(max(LEAST_KEPT, min(budget.measurements, MOST_KEPT)), single_s)
        self.learning: list[Mapping[str, float]] = []
        self.raised: Exception | None = None
        self._method, self._evaluator, self._progress, self._tracker = method, evaluator, progress, tracker
        self._budget_s, self._end_s, self._clock = budget.seconds, clock() + budget.seconds, clock
        self._on_best, self._keeper, self._shown_s = on_best, keeper, float("-inf")
        self._round = replace(ROUND, num_traced=num_traced)
        self._late = evaluator if isinstance(evaluator, ClusterEvaluator) else None
        self.task: Task
        self._is_searched = False
        self._failure: Failure | None = None

    @property
    def problem(self) -> Problem:
        """The problem to place."""
        return self._evaluator.problem

    @property
    def num_workers(self) -> int:
        """Machines that measure."""
        return 1 if self._late is None else self._late.num_workers

    @property
    def elapsed_s(self) -> float:
        """Wall time since the search began."""
        return self._clock() - self._end_s + self._budget_s

    @property
    def seconds_left(self) -> float:
        """Seconds until the last race; infinite before the first one, which always runs."""
        left_s = self._end_s - FINAL_SHARE * self._budget_s - self._clock()
        return left_s if self.raced.candidates.num_measured else math.inf

    def resume(self, before: MethodResult) -> None:
        """Goes on from the method's earlier result; its task gets the spent budget."""
        simulator = self._evaluator.simulator
        start = None if before.start is None else simulator.plan(before.start)
        simulated_s = math.inf if start is None else simulator.retime(start).step_time_s
        self.task.resume(
            evaluations=before.num_scored,
            measurements=before.num_measured,
            elapsed_s=before.seconds,
            plan=start if math.isfinite(simulated_s) else None,
            history=[BestSoFar(before.num_scored, before.num_measured, before.seconds, simulated_s)],
            raced=[(race.plans, race.outcomes) for race in before.races if not race.is_final],
        )
        self._end_s -= before.seconds
        self.learning, self._is_searched, self._failure = list(before.learning), before.is_searched, before.failure
        self.raced.resume(before)

    def end_search(self, learned: Saveable | None, failure: Failure | None) -> None:
        """Notes that the method has ended, with its policy or error; only measuring is left."""
        self._is_searched, self._failure = True, failure
        self._keep(learned=learned)

    def end(self, plan: Plan | None, learned: Saveable | None) -> MethodResult:
        """Takes note that all of it has ended, with this plan."""
        result = self._keep(plan=plan, tried=self.raced.tried(self._evaluator.simulator), is_done=True)
        return replace(result, learned=learned)

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
        return self.raced.candidates.next_to_measure(count)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """Races `placements` (B, N) on the host."""
        return self.measure_plans([self._evaluator.simulator.plan(row) for row in placements])

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """Races `plans` on the host, but for those that were raced before."""
        with self._noting():
            if self._late is None:
                return self._race(plans, self._round, is_recalled=True)
            came = self.measure_some(plans, is_all=True)
            return [outcome for _, outcome in came[len(came) - len(plans) :]]

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """As `LateHost` says, where a cluster measures; elsewhere all of `plans`, now."""
        if self._late is None:
            return list(zip(plans, self.measure_plans(plans), strict=True)) if plans else []
        with self._noting():
            came = self._late.measure_some(plans, self._round, deadline_s=self._end_s, is_all=is_all)
        if came:
            self._record([plan for plan, _ in came], [outcome for _, outcome in came], self._round)
        return came

    def decide(self, answer: Plan | None = None) -> Plan | None:
        """The best of the best measured placements, raced against each other while there is time.

        Args:
            answer: one that the method takes for the best, whatever its own races say; none by default.
        """
        self.measure_some([], is_all=True)
        named = [] if answer is None else [answer]
        finalists = list({plan.fingerprint: plan for plan in named + self.raced.best(FINALISTS)}.values())[:FINALISTS]
        if len(finalists) > 1 and self._clock() < self._end_s:
            measurements = self._race(finalists, FINAL)
            # everyone ran in this race: its own ratios decide, those of earlier races were under other conditions
            order = sorted(range(len(finalists)), key=lambda k: measurements[k].ratio)
            if best := [k for k in order if measurements[k].ok]:
                finalists, ratio = [finalists[k] for k in best], measurements[best[0]].ratio
                self._on_best(finalists[0], ratio * self.raced.single_s, ratio)
        self.report()
        return finalists[0] if finalists else None

    def report(self) -> None:
        """Shows how far the search is."""
        self._shown_s = self._clock()
        self._progress.update(
            placements=self.task.evaluations,
            measured=self.raced.candidates.num_measured,
            best_s=self.raced.best_ratio * self.raced.single_s,  # of one race and one reference: the ratio never rises
            single_s=self.raced.single_s,
            left_s=max(self._end_s - self._clock(), 0.0),
            budget_s=self._budget_s,
            method=self._method,
        )
        if self._keeper is not None and self._keeper.is_due:
            self._keep()

    def _keep(self, **changes: Any) -> MethodResult:
        """The method's result, with these changes; it is kept."""
        devices, simulated_s = self.raced.candidates.fresh()
        result = MethodResult(
            plan=self.raced.plan,
            num_scored=self.task.evaluations,
            num_measured=self.task.measurements,
            seconds=self.elapsed_s,
            single_s=self.raced.single_s,
            history=self.raced.history,
            learning=tuple(dict(figures) for figures in self.learning),
            failure=self._failure,
            budget=self._budget_s,
            is_searched=self._is_searched,
            races=tuple(self.raced.races),
            start=self.task.best_devices,
            unmeasured=Unmeasured(devices, simulated_s) if len(devices) else None,
        )
        result = replace(result, **changes)
        if self._keeper is not None:
            self._keeper.keep(result)
        return result

    def _race(self, plans: Sequence[Plan], protocol: RaceProtocol, *, is_recalled: bool = False) -> list[Measurement]:
        measurements = self._evaluator.measure_plans(plans, protocol, deadline_s=self._end_s, is_recalled=is_recalled)
        self._record(plans, measurements, protocol)
        return measurements

    def _record(self, plans: Sequence[Plan], measurements: Sequence[Measurement], protocol: RaceProtocol) -> None:
        """Takes in measurements of plans, and reports them."""
        raced, is_final = self.raced, protocol is FINAL
        is_better = raced.record(
            plans, measurements, is_final=is_final, num_scored=self.task.evaluations, seconds=self.elapsed_s
        )
        self._keep()  # before anybody is told: what was told must be known when the run goes on
        if is_better and raced.plan is not None:
            self._on_best(raced.plan, raced.best_s, raced.best_ratio)
        times_s = [measurement.step_time_s for measurement in measurements if measurement.ok]
        self._tracker.log_search(
            placements=self.task.evaluations,
            mean_s=float(np.mean(times_s)) if times_s else float("nan"),
            best_s=raced.best_s,
            vs_single=raced.best_ratio,
            infeasible_rate=1.0 - len(times_s) / max(len(measurements), 1),
        )
        if raced.history:
            self._tracker.log_best_so_far(
                self._method, raced.so_far(self.task.evaluations, self.elapsed_s), raced.single_s
            )
        self.report()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps an error that is raised meanwhile: it is no fault of the method that asked."""
        try:
            yield
        except Exception as error:
            self.raised = error
            raise


class Raced:
    """The plans of a search that ran, told apart by their ratios to the reference of their race.

    A machine slows down and speeds up: step times of different races would say more of the machine than of the plans.

    Attributes:
        candidates: the placements that may run next, and all that ran.
        races: in order.
        single_s: step time on the best single device, the reference, in the latest race.
        plan: the best so far; None before the first.
        best_ratio: its step time over the reference's; infinite before the first.
        best_s: its step time, at the reference of the race after which it was the best.

    Args:
        capacity: simulated placements that are kept to be run.
        single_s: step time on the best single device, before the first race.
    """

    def __init__(self, capacity: int, single_s: float) -> None:
        self.candidates = Candidates(capacity)
        self.races: list[Race] = []
        self.single_s = single_s
        self.plan: Plan | None = None
        self.best_ratio, self.best_s = float("inf"), float("inf")
        self._improved: list[tuple[float, BestSoFar]] = []

    def resume(self, before: MethodResult) -> None:
        """Goes on from the races and the candidates of an interrupted search."""
        self.single_s, self.races, self.plan = before.single_s, list(before.races), before.plan
        if before.unmeasured is not None:
            self.candidates.note(before.unmeasured.devices, before.unmeasured.simulated_s)
        for race in before.races:
            self.candidates.record(race.plans, race.outcomes)
        self._improved = [(best.best_s / self.single_s, best) for best in before.history]
        if before.plan is not None and before.history:
            self.best_s, self.best_ratio = before.best_s, self._improved[-1][0]
            if before.plan.fingerprint not in {plan.fingerprint for race in before.races for plan in race.plans}:
                known = Measurement("ok", before.best_s, reference_s=self.single_s)  # the store has lost it
                self.candidates.record([before.plan], [known])

    def record(
        self,
        plans: Sequence[Plan],
        measurements: Sequence[Measurement],
        *,
        is_final: bool,
        num_scored: int,
        seconds: float,
    ) -> bool:
        """Takes in a race; whether there is a new best plan.

        Args:
            plans: the plans that ran.
            measurements: of each.
            is_final: whether it was the last race.
            num_scored: placements that the search has simulated so far.
            seconds: wall time since it began.
        """
        self.candidates.record(plans, measurements)
        self.races.append(Race(tuple(plans), tuple(measurements), is_final))
        references_s = [measurement.reference_s for measurement in measurements if measurement.ok]
        if references_s:
            self.single_s = float(np.median(references_s))
        leader = self.candidates.best_measured(1)[0]
        if not leader.ratio < self.best_ratio:
            return False
        self.plan, self.best_ratio, self.best_s = leader.plan, leader.ratio, leader.ratio * self.single_s
        self._improved.append((leader.ratio, self.so_far(num_scored, seconds)))
        return True

    def so_far(self, num_scored: int, seconds: float) -> BestSoFar:
        """The best so far, at the latest reference; `num_scored` and `seconds` as of `record`."""
        return BestSoFar(num_scored, self.candidates.num_measured, seconds, self.best_ratio * self.single_s)

    def best(self, count: int) -> list[Plan]:
        """At most `count` plans that ran to their end, the best first."""
        return [one.plan for one in self.candidates.best_measured(count) if np.isfinite(one.ratio)]

    @property
    def history(self) -> tuple[BestSoFar, ...]:
        """The best ratio so far wherever it improved, as a step time at the latest one of the reference."""
        # step times as they were would go up and down with the machine; ratios only go down
        return tuple(replace(best, best_s=ratio * self.single_s) for ratio, best in self._improved)

    def tried(self, simulator: Simulator) -> tuple[tuple[float, float], ...]:
        """The simulated and the measured step time of every plan that ran, as of the latest reference.

        Seconds both, in the order in which they ran.
        """
        ran = (pair for race in self.races for pair in zip(race.plans, race.outcomes) if pair[1].ok)
        said = ((simulator.retime(plan), outcome.ratio * self.single_s) for plan, outcome in ran)
        return tuple((simulated.step_time_s, measured_s) for simulated, measured_s in said if simulated.ok)


@dataclass
class Candidate:
    """A plan that ran.

    Attributes:
        plan: as it was measured.
        ratios: measured step time over the reference's, one for each race that it ran in.
    """

    plan: Plan
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the measured ratios."""
        return float(np.median(self.ratios))


class Candidates:
    """Distinct placements: the best `capacity` simulated ones, and every measured plan.

    Attributes:
        num_measured: placements that were measured, each as often as it was.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._fresh: dict[bytes, tuple[NDArray[np.int32], float]] = {}
        self._measured: dict[str, Candidate] = {}
        self._ran: set[bytes] = set()
        self._worst_s = float("inf")
        self.num_measured = 0

    def note(self, devices: NDArray[np.int32], simulated_s: NDArray[np.float64]) -> None:
        """Takes note of placements (B, N) and their simulated step times (B,); keeps the best."""
        for row in np.flatnonzero(simulated_s < self._worst_s).tolist():
            key = devices[row].tobytes()
            if key not in self._fresh and key not in self._ran:
                self._fresh[key] = np.array(devices[row], dtype=np.int32), float(simulated_s[row])
        if len(self._fresh) >= 2 * self._capacity:  # sorted now and then: a search scores thousands a second
            self._prune()

    def next_to_measure(self, count: int) -> NDArray[np.int32]:
        """(<= count, N): the best simulated placements that were never measured, unlike each other if possible."""
        devices, simulated_s = self.fresh()
        seen = [candidate.plan.devices for candidate in self._measured.values()]
        return devices[choose_diverse(devices, simulated_s, count, seen)]

    def fresh(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The placements (C, N) that may be measured next, the best first, and their simulated step times (C,)."""
        self._prune()
        if not self._fresh:
            return np.zeros((0, 0), dtype=np.int32), np.zeros(0)
        devices, simulated_s = zip(*self._fresh.values(), strict=True)
        return np.array(devices), np.array(simulated_s)

    def best_measured(self, count: int) -> list[Candidate]:
        """The `count` plans with the lowest measured ratio."""
        return sorted(self._measured.values(), key=lambda candidate: candidate.ratio)[:count]

    def record(self, plans: Sequence[Plan], measurements: Iterable[Measurement]) -> None:
        """Adds measurements of plans; a failed one counts as infinitely slow."""
        for plan, measurement in zip(plans, measurements, strict=True):
            self.num_measured += 1
            self._fresh.pop(plan.devices.tobytes(), None)
            self._measured.setdefault(plan.fingerprint, Candidate(plan)).ratios.append(measurement.ratio)
            self._ran.add(plan.devices.tobytes())

    def _prune(self) -> None:
        kept = sorted(self._fresh.items(), key=lambda item: item[1][1])[: self._capacity]
        self._fresh = dict(kept)
        if len(kept) == self._capacity:
            self._worst_s = kept[-1][1][1]


FINALISTS = 4
"""Best measured placements of a method that race against each other at last."""
FINAL_SHARE = 0.15
"""Share of a method's time in which its best measured placements are told apart."""
STEPS = 6.5
"""Steps that measuring a placement takes, about: a warm-up, up to five rounds, its share of the reference's."""


@dataclass(frozen=True)
class LoopBudget:
    """The budget of one method.

    Attributes:
        seconds: wall time, measuring included.
        simulate_share: share of it for simulated placements.
        measurements: placements that may be run, the last race aside.
    """

    seconds: float
    simulate_share: float = 0.6
    measurements: int = 0

    @classmethod
    def of(cls, seconds: float, simulate_share: float, reference_s: float, *, is_traced: bool = False) -> LoopBudget:
        """As many measurements as fit into the time for them, where a step takes about `reference_s`.

        If one of each plan's steps is traced, it has a warm-up of its own.
        """
        measuring_s = (1.0 - simulate_share) * seconds - FINAL_SHARE * seconds
        each_s = (STEPS + 2 * is_traced) * max(reference_s, 1e-6)
        return cls(seconds, simulate_share, max(int(measuring_s / each_s), FINALISTS))
