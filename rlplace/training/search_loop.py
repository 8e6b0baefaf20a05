"""`search_within`: any proposer of placements, given a budget: simulate many, measure the promising ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.run.race import RaceProtocol
from rlplace.report.progress import Progress
from rlplace.runs.tracking import NoTracker, Tracker
from rlplace.training.candidates import Candidate, Candidates
from rlplace.training.config import TrainConfig
from rlplace.training.evaluator import Judge

FINALISTS = 4
FINAL_SHARE = 0.15
ROUND = RaceProtocol(warmup=1, min_rounds=3, max_rounds=5)
FINAL = RaceProtocol(warmup=1, min_rounds=5, max_rounds=30)


class Proposer(Protocol):
    """Proposes placements of groups; may learn from what came of them."""

    def simulate(self, candidates: Candidates, deadline_s: float, on_round: Callable[[], None]) -> None:
        """Proposes and simulates until `deadline_s` (on `time.monotonic`), noting everything in `candidates`."""
        ...

    def propose(self, count: int) -> NDArray[np.int32]:
        """(count, G) placements to measure next, beside the best simulated ones."""
        ...

    def learn(self, group_devices_BG: NDArray[np.int32], ratios: NDArray[np.float64]) -> None:
        """Takes note of measured step times, as ratios to the reference's."""
        ...


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        plan: the best placement; None if there was none.
        num_proposed: placements simulated.
        num_measured: placements run.
    """

    plan: Plan | None
    num_proposed: int
    num_measured: int


def search_within(
    proposer: Proposer,
    judge: Judge,
    config: TrainConfig,
    *,
    progress: Progress,
    tracker: Tracker | None = None,
    on_best: Callable[[Plan, float], None] = lambda plan, step_time_s: None,
) -> Found:
    """The best placement that `proposer` came up with in `config.budget_s` seconds.

    Half of each measured batch are the best simulated placements that were never measured, half come straight from
    the proposer; the last part of the budget goes to telling the best measured ones apart.
    """
    tracker = tracker or NoTracker()
    begin = time.monotonic()
    end = begin + config.budget_s
    share = config.simulate_share if judge.is_measured else 1.0
    candidates = Candidates()
    loop = _Loop(judge, candidates, progress, tracker, config.budget_s, on_best)
    proposer.simulate(candidates, begin + share * config.budget_s, loop.report)
    if not judge.is_measured:
        best = candidates.next_to_measure(1)
        return Found(loop.plan(best[0]) if best else None, candidates.num_proposed, 0)
    while time.monotonic() < end - FINAL_SHARE * config.budget_s or not candidates.num_measured:
        batch = loop.batch(proposer, config.num_measured)
        if not batch:
            break
        measurements = loop.measure(batch, ROUND, end)
        ratios = np.array([m.step_time_s / m.reference_s if m.ok else np.inf for m in measurements])
        proposer.learn(np.stack([candidate.group_devices for candidate in batch]), ratios)
    finalists = candidates.best_measured(FINALISTS)
    if len(finalists) > 1 and time.monotonic() < end:
        measurements = loop.measure(finalists, FINAL, end)
        kept = [(m.step_time_s / m.reference_s, k) for k, m in enumerate(measurements) if m.ok]
        # everyone ran in this race: its own ratios decide, those of earlier races were under other conditions
        finalists = [finalists[k] for _, k in sorted(kept)] or finalists
    loop.report()
    winner = finalists[0] if finalists and np.isfinite(finalists[0].ratio) else None
    return Found(None if winner is None else loop.plan(winner), candidates.num_proposed, candidates.num_measured)


class _Loop:
    """The measuring half of a search, and what it tells people."""

    def __init__(
        self,
        judge: Judge,
        candidates: Candidates,
        progress: Progress,
        tracker: Tracker,
        budget_s: float,
        on_best: Callable[[Plan, float], None],
    ) -> None:
        self._judge, self._candidates, self._progress, self._tracker = judge, candidates, progress, tracker
        self._budget_s, self._end_s, self._on_best = budget_s, time.monotonic() + budget_s, on_best
        self._best_ratio, self._reference_s = float("inf"), float("nan")

    def plan(self, candidate: Candidate) -> Plan:
        return self._judge.simulator.plan(self._judge.problem.grouping.expand(candidate.group_devices))

    def batch(self, proposer: Proposer, count: int) -> list[Candidate]:
        """Half from the simulator's best, half from the proposer; distinct."""
        simulated = self._candidates.next_to_measure(count - count // 2)
        chosen = {candidate.group_devices.tobytes(): candidate for candidate in simulated}
        for row in proposer.propose(count - len(simulated)):
            chosen.setdefault(row.tobytes(), Candidate(np.ascontiguousarray(row, dtype=np.int32)))
        return list(chosen.values())

    def measure(self, batch: list[Candidate], protocol: RaceProtocol, deadline_s: float) -> list[Measurement]:
        measurements = self._judge.judge([self.plan(c) for c in batch], protocol, deadline_s=deadline_s)
        self._candidates.record(batch, measurements)
        finite = [m for m in measurements if m.ok]
        self._reference_s = float(np.median([m.reference_s for m in finite])) if finite else self._reference_s
        leader = self._candidates.best_measured(1)
        if leader and leader[0].ratio < self._best_ratio:
            self._best_ratio = leader[0].ratio
            self._on_best(self.plan(leader[0]), self._best_ratio * self._reference_s)
        self._tracker.log_search(
            placements=self._candidates.num_proposed,
            mean_s=float(np.mean([m.step_time_s for m in finite])) if finite else float("nan"),
            best_s=self._best_ratio * self._reference_s,
            speedup=1.0 / self._best_ratio,
            infeasible_rate=1.0 - len(finite) / max(len(measurements), 1),
        )
        self.report()
        return measurements

    def report(self) -> None:
        """Shows how far the search is."""
        self._progress.update(
            placements=self._candidates.num_proposed,
            best_s=self._best_ratio * self._reference_s,
            single_s=self._reference_s,
            left_s=max(self._end_s - time.monotonic(), 0.0),
            budget_s=self._budget_s,
        )
