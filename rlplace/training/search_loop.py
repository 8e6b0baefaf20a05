"""`search_and_measure`: gives any method its budget: it searches on the simulator, then the host runs the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.evaluator import ClusterEvaluator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.timeline import Timeline
from rlplace.report.progress import Progress
from rlplace.runs.tracking import Tracker
from rlplace.search.best_so_far import BestSoFar
from rlplace.search.own_order import OwnOrder
from rlplace.search.registry import METHODS
from rlplace.search.task import Budget, Saveable, Task
from rlplace.training.candidates import Candidates

FINALISTS = 4
FINAL_SHARE = 0.15
"""Share of a method's time in which its best measured placements are told apart."""
BATCH = 6
"""Placements a race, where the method does not measure by itself."""
LEAST_KEPT, MOST_KEPT = 64, 512
"""Simulated placements that are kept to be measured: as many as may be run, within reason."""
STEPS = 6.5
"""Steps that measuring a placement takes, about: a warm-up, up to five rounds, its share of the reference's."""
SHOW_EVERY_S = 0.1
"""How often the progress of a search is told."""
ROUND = RaceProtocol(warmup=1, min_rounds=3, max_rounds=5)
FINAL = RaceProtocol(warmup=1, min_rounds=5, max_rounds=30)

Clock = Callable[[], float]


@dataclass(frozen=True)
class LoopResult:
    """What a method came to within its budget.

    Attributes:
        plan: the best placement; None if there was none.
        num_scored: placements simulated.
        num_measured: placements run, each as often as it was, the last race aside.
        seconds: wall time that it took.
        history: the best measured step time so far wherever it improved, the last race included; the best simulated
            one where nothing is measured.
        single_s: step time on the best single device, which those of `history` are to be set against.
        learned: what the method learned, if it learns.
        learning: what it told of every update, figures by name.
        tried: simulated and measured step times of every placement that ran, in seconds, in order; in measured ones a
            drift of the machine is taken out by the reference of their race.
    """

    plan: Plan | None
    num_scored: int
    num_measured: int
    seconds: float = 0.0
    history: tuple[BestSoFar, ...] = ()
    single_s: float = float("nan")
    learned: Saveable | None = None
    learning: tuple[Mapping[str, float], ...] = ()
    tried: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class LoopBudget:
    """What one method may spend.

    Attributes:
        seconds: wall time, measuring included.
        simulate_share: share of it for simulated placements.
        measurements: placements that may be run, the last race aside.
    """

    seconds: float
    simulate_share: float = 0.6
    measurements: int = 0

    @classmethod
    def of(cls, seconds: float, simulate_share: float, reference_s: float) -> LoopBudget:
        """As many measurements as fit into the time for them, where a step takes about `reference_s`."""
        measuring_s = (1.0 - simulate_share) * seconds - FINAL_SHARE * seconds
        count = int(measuring_s / (STEPS * max(reference_s, 1e-6)))
        return cls(seconds, simulate_share, max(count, FINALISTS))


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
) -> LoopResult:
    """The placement that `method` came up with and that ran fastest on a host of this machine.

    A method that learns from measurements asks for them itself (`Task.measure`); what it leaves of them goes to the
    best simulated placements. Then the best measured ones race against each other.

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
    """
    loop = _Loop(method, evaluator, budget, progress, tracker, single_s, on_best, clock)
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
    learned = METHODS[method].run(task, **(options or {}))
    loop.report()
    while (count := min(BATCH * loop.num_workers, task.measurements_left)) > 0:
        batch = loop.promising(count)
        if not len(batch):
            break
        task.measure(batch)
    plan = loop.decide()
    return LoopResult(
        plan,
        task.evaluations,
        task.measurements,
        loop.elapsed_s,
        loop.history(),
        loop.single_s,
        learned,
        tuple(loop.learning),
        loop.tried(),
    )


class _Loop:
    """The measuring half of a search (its task's host and observer), and what it tells people."""

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
    ) -> None:
        self.candidates = Candidates(max(LEAST_KEPT, min(budget.measurements, MOST_KEPT)))
        self.single_s = single_s
        self.learning: list[Mapping[str, float]] = []
        self._method, self._evaluator, self._progress, self._tracker = method, evaluator, progress, tracker
        self._budget_s, self._end_s, self._clock = budget.seconds, clock() + budget.seconds, clock
        self._on_best, self._improved = on_best, list[tuple[float, BestSoFar]]()
        self._ran: list[tuple[Plan, float]] = []
        self._late = evaluator if isinstance(evaluator, ClusterEvaluator) else None
        self._task: Task | None = None
        self._best_s, self._best_ratio, self._shown_s = float("inf"), float("inf"), float("-inf")

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
            self.report()

    def learned(self, figures: Mapping[str, float]) -> None:
        """Keeps the learner's figures, and passes them on."""
        self.learning.append(figures)
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
        if self._late is not None:
            came = self.measure_some(plans, is_all=True)
            return [outcome for _, outcome in came[len(came) - len(plans) :]]
        return self._race(plans, ROUND, is_recalled=True)

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """As `LateHost` says, where a cluster measures; elsewhere all of `plans`, now."""
        if self._late is None:
            return list(zip(plans, self.measure_plans(plans), strict=True)) if plans else []
        came = self._late.measure_some(plans, ROUND, deadline_s=self._end_s, is_all=is_all)
        if came:
            self._record([plan for plan, _ in came], [outcome for _, outcome in came])
        return came

    def trace(self, plan: Plan) -> Timeline:
        """A typical step of `plan`, op by op."""
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

    def _race(self, plans: Sequence[Plan], protocol: RaceProtocol, *, is_recalled: bool = False) -> list[Measurement]:
        measurements = self._evaluator.measure_plans(plans, protocol, deadline_s=self._end_s, is_recalled=is_recalled)
        self._record(plans, measurements)
        return measurements

    def _record(self, plans: Sequence[Plan], measurements: Sequence[Measurement]) -> None:
        """Takes in what the host said of plans, and tells people."""
        self.candidates.record(plans, measurements)
        self._ran += [(plan, measurement.ratio) for plan, measurement in zip(plans, measurements) if measurement.ok]
        finite = [measurement for measurement in measurements if measurement.ok]
        if finite:
            self.single_s = float(np.median([measurement.reference_s for measurement in finite]))
        leader = self.candidates.best_measured(1)[0]
        if leader.ratio < self._best_ratio and leader.plan is not None:
            self._best_ratio, self._best_s = leader.ratio, leader.ratio * self.single_s
            self._improved.append((leader.ratio, self._now()))
            self._on_best(leader.plan, self._best_s)
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

    def _now(self) -> BestSoFar:
        best_s = self._best_ratio * self.single_s
        return BestSoFar(self.num_scored, self.candidates.num_measured, self.elapsed_s, best_s)
