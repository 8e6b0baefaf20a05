"""What a store is worth on this machine's cores: the measured half of `store_transfer.py`.

A workload is learned with an empty store, another one too, and each again in half of the measurements with what the
other one taught. All that the runs with the store had found after each measurement races against what the run without
one ended with, so that all figures of a case are of the same minutes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rlplace.locks import measuring_alone
from rlplace.measure import Host, Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget
from rlplace.search.rules import baselines
from rlplace.session.prepare import Steps, make_problem
from rlplace.training.agent import Agent, learn_host
from rlplace.training.searches.racing_host import ROUND
from rlplace.workloads import parse_workload

PAIR = ("clip@small", "gpt2@small,layers=2")
"""Steps of 10 to 40 ms, so that five seeds take less than a quarter of an hour."""
FINAL = RaceProtocol(warmup=2, min_rounds=30, max_rounds=30, hopeless=float("inf"))
TIED = 1.01
"""As fast, as far as a race of 30 rounds can tell."""
Store = Callable[[Agent, str, Problem, Problem], HostKnowledge | None]
Needed = Callable[[Sequence[float], float, float], int | None]


class Timed:
    """Measures plans on this machine, and notes the best one after each measurement.

    Attributes:
        best: the plan with the least ratio to one device, after each measurement.

    Args:
        evaluator: with a reference.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.best: list[Plan] = []
        self._evaluator, self._least, self._reference_s = evaluator, float("inf"), 0.0

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """As beside the reference of the first race, so that the machine's drift cancels."""
        outcomes = self._evaluator.measure_plans(plans, ROUND)
        told = []
        for plan, outcome in zip(plans, outcomes, strict=True):
            is_better = not self.best or outcome.ratio < self._least
            self._least = outcome.ratio if is_better else self._least
            self.best.append(plan if is_better else self.best[-1])
            self._reference_s = self._reference_s or outcome.reference_s
            told.append(_at(outcome, self._reference_s))
        return told


class Bench:
    """A workload on this machine's cores, profiled, with its runner.

    Args:
        name: of the workload.
        seed: of its inputs, and of random ops.
    """

    def __init__(self, name: str, seed: int) -> None:
        host, spec = Host.detect("cores"), parse_workload(name)
        graph = Steps(spec, host, seed).graph(1)
        self.name = name
        self.problem = make_problem(graph, host, 256, make_progress(is_quiet=True).say, spec=spec)
        simulator = Simulator(self.problem)
        single = baselines.best_single(self.problem, simulator)
        self.evaluator = Evaluator(self.problem, simulator, single, seed=seed)

    def learn(
        self, seed: int, measured: int, evaluations: int, knowledge: HostKnowledge | None = None
    ) -> tuple[Agent, list[Plan]]:
        """What the agent learned, and its best plan after each measurement."""
        timed = Timed(self.evaluator)
        budget = Budget(evaluations, measurements=measured)
        return learn_host(self.problem, timed, budget, seed=seed, knowledge=knowledge), timed.best


@one_thread_here()
def compare(
    pair: Sequence[str], seed: int, measured: int, evaluations: int, store: Store, needed: Needed
) -> list[dict[str, Any]]:
    """Both directions of two workloads.

    Args:
        pair: their names.
        seed: of everything.
        measured: plans that a run with an empty store may measure.
        evaluations: placements that each search may simulate.
        store: what a store tells the second of two workloads.
        needed: after how many measurements a best so far was reached.
    """
    with measuring_alone(Host.detect("cores"), say=print), ExitStack() as stack:
        idle, benches = idle_share(), [Bench(name, seed) for name in pair]
        for bench in benches:
            stack.callback(bench.evaluator.close)
        alone = [bench.learn(seed, measured, evaluations) for bench in benches]
        rows = []
        for k in (1, 0):
            begin, first, second = time.monotonic(), benches[1 - k], benches[k]
            knowledge = store(alone[1 - k][0], first.name, first.problem, second.problem)
            _, found = second.learn(seed, measured // 2, evaluations, knowledge)
            empty_s, *with_s = _raced(second.evaluator, [alone[k][1][-1], *found])
            rows.append(
                {
                    "host": "cores",
                    "seed": seed,
                    "first": first.name,
                    "second": second.name,
                    "measured": measured,
                    "evaluations": evaluations,
                    "known_factors": 0 if knowledge is None else len(knowledge.factors),
                    "empty_s": empty_s,
                    "with_s": with_s,
                    "needed": needed(with_s, empty_s, TIED),
                    "ratio": with_s[-1] / empty_s,
                    "idle": idle,
                    "seconds": time.monotonic() - begin,
                }
            )
        return rows


def _raced(evaluator: Evaluator, plans: Sequence[Plan]) -> list[float]:
    """Median step times of plans, all in one race, equal ones once."""
    distinct = {plan.fingerprint: plan for plan in plans}
    outcomes = evaluator.measure_plans(list(distinct.values()), FINAL)
    step_s = dict(zip(distinct, (outcome.step_time_s for outcome in outcomes), strict=True))
    return [step_s[plan.fingerprint] for plan in plans]


def _at(outcome: Measurement, reference_s: float) -> Measurement:
    """With the step times that it would have had beside a reference of `reference_s`."""
    if not outcome.ok or not outcome.reference_s:
        return outcome
    factor = reference_s / outcome.reference_s
    samples_s = tuple(sample_s * factor for sample_s in outcome.samples_s)
    return dataclasses.replace(outcome, step_time_s=outcome.step_time_s * factor, samples_s=samples_s)
