"""What a store is worth to the next workload on a host: python benchmarks/store_transfer.py --json

On hosts whose truth nobody sees (`rlplace compare --true`), the agent learns on one workload; what it learned goes into
a store. Then it learns on another workload of the same host: with an empty store, and in half of the measurements with
that one. Reported for each case: after how many measurements the run with the store is as fast, truly, as the other is
in the end. Both simulate equally many placements. With `--control` the same half without a store stands beside them.

With `--host cores` the same on this machine's cores, measured (`store_transfer_cores.py`): it should be idle.

Writes `results/NAME.json`, anew after each host and truth; `--resume` goes on with what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import store_transfer_cores
from record import RESULTS, argument, parse, record
from suites import problem_of

from rlplace.files import read_json, write_json_atomic
from rlplace.measure import Measurement, Plan, Problem
from rlplace.measure.host_model import HostKnowledge, LearnedHost, knowledge_of
from rlplace.measure.measurement import versions_line
from rlplace.measure.truth import TrueTimer, Truth, true_problems
from rlplace.search import Budget
from rlplace.store import MeasurementStore, MeasuringProcess
from rlplace.store.rows import machine_key
from rlplace.training.agent import Agent, learn_host

PAIRS = (
    ("nmt", "inception_v3", "4xV100-pcie"),
    ("bert", "mixtral", "4xA100-nvlink"),
    ("rnnlm", "gpt2", "2xK80"),
    ("clip", "dlrm", "RTX4090+RTX3060"),
    ("inception_v3", "rnnlm", "2x8xA100-ib"),
)
"""The ten problems of `core-dev`, two on a host; each is learned on first in turn."""
TIED = 1.002
"""A placement is as fast as another if it is slower by no more than this."""
Case = dict[str, Any]


class Watched:
    """Measures on the truth, and notes the true step time of the best measured plan after each measurement."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.true_s: list[float] = []
        self._timer, self._best_s, self._true_s = TrueTimer(problem, seed), math.inf, math.inf

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        outcomes = self._timer.measure_plans(plans)
        for plan, outcome in zip(plans, outcomes, strict=True):
            if outcome.step_time_s < self._best_s:
                self._best_s, self._true_s = outcome.step_time_s, self._timer.truth(plan).step_time_s
            self.true_s.append(self._true_s)
        return outcomes


def learn(
    problem: Problem,
    true: Problem,
    seed: int,
    measured: int,
    evaluations: int,
    knowledge: HostKnowledge | None = None,
) -> tuple[Agent, list[float]]:
    """What the agent learned, and the true step time of its best plan after each measurement."""
    watched = Watched(true, seed)
    budget = Budget(evaluations, measurements=measured)
    return learn_host(problem, watched, budget, seed=seed, knowledge=knowledge), watched.true_s


def through_a_store(taught: Agent, workload: str, first: Problem, second: Problem) -> HostKnowledge | None:
    """What a store tells the second workload, after a run on the first one left there what it learned."""
    with tempfile.TemporaryDirectory() as folder, MeasurementStore.open(Path(folder) / "measurements.db") as store:
        process = MeasuringProcess(time.time(), workload, machine_key(), first.host.name, versions_line())
        store.add_learned(process, first.graph.fingerprint, LearnedHost.of(taught.posterior))
        kept = store.learned_hosts(second.host.fingerprint, machine_key())
    return knowledge_of(kept, second.costs.source)


def needed(times_s: Sequence[float], wanted_s: float, tied: float) -> int | None:
    """After how many measurements the best is as fast as wanted; None for never.

    >>> needed([3.0, 2.0, 1.001], 1.0, 1.002)
    3
    """
    return next((place + 1 for place, time_s in enumerate(times_s) if time_s <= tied * wanted_s), None)


def compare(
    pair: tuple[str, str, str], truth: Truth, measured: int, evaluations: int, *, has_control: bool
) -> Iterator[Case]:
    """Both directions of two workloads on one host: each with what the other taught, beside itself without it."""
    names, host = pair[:2], pair[2]
    problems = [problem_of(name, host) for name in names]
    trues, half = true_problems(problems, truth), measured // 2
    alone = [learn(*both, truth.seed, measured, evaluations) for both in zip(problems, trues, strict=True)]
    for k in (1, 0):
        begin, first = time.monotonic(), 1 - k
        knowledge = through_a_store(alone[first][0], names[first], problems[first], problems[k])
        _, with_s = learn(problems[k], trues[k], truth.seed, half, evaluations, knowledge)
        half_s = learn(problems[k], trues[k], truth.seed, half, evaluations)[1] if has_control else []
        empty_s = alone[k][1]
        yield {
            "host": host,
            "truth": str(truth),
            "first": names[first],
            "second": names[k],
            "measured": measured,
            "evaluations": evaluations,
            "known_factors": 0 if knowledge is None else len(knowledge.factors),
            "empty_s": empty_s,
            "with_s": with_s,
            "half_s": half_s,
            "needed": needed(with_s, empty_s[-1], TIED),
            "ratio": with_s[-1] / empty_s[-1],
            "half_ratio": half_s[-1] / empty_s[-1] if half_s else None,
            "seconds": time.monotonic() - begin,
        }


def summary(rows: Sequence[Case]) -> dict[str, Any]:
    """How many cases reached it, the middle number of measurements, and geometric means of step times over the others.

    A case that did not reach it counts as one that needs one more than it had.
    """
    counts = [row["needed"] or row["measured"] // 2 + 1 for row in rows]
    halves = [row["half_ratio"] for row in rows if row.get("half_ratio")]
    return {
        "cases": len(rows),
        "reached": sum(row["needed"] is not None for row in rows),
        "median_needed": median(counts),
        "mean_ratio": math.exp(fmean(math.log(row["ratio"]) for row in rows)),
        "mean_ratio_without": math.exp(fmean(map(math.log, halves))) if halves else None,
    }


def simulated(options: argparse.Namespace, done: Sequence[Case]) -> Iterator[list[Case]]:
    """The cases of every host and truth that is not done."""
    finished = {(row["host"], row["truth"]) for row in done}
    kinds, seeds = options.kinds.split(","), [int(seed) for seed in options.seeds.split(",")]
    for place, kind, seed in product(options.pairs.split(","), kinds, seeds):
        pair, truth = PAIRS[int(place)], Truth(kind, seed)
        if (pair[2], str(truth)) not in finished:
            budget = options.measured or 16, options.evaluations or 16_000
            yield list(compare(pair, truth, *budget, has_control=options.control))


def measured(options: argparse.Namespace, done: Sequence[Case]) -> Iterator[list[Case]]:
    """The cases of every seed on this machine's cores that is not done."""
    for seed in (int(seed) for seed in options.seeds.split(",")):
        if not any(row["seed"] == seed for row in done):
            budget = options.measured or 16, options.evaluations or 8_000
            yield store_transfer_cores.compare(options.workloads, seed, *budget, through_a_store, needed)


def main() -> None:
    options = parse(
        __doc__,
        argument("--host", choices=("true", "cores"), default="true", help="hidden truths, or this machine"),
        argument("--kinds", default="hard", help="kinds of truth, with commas between them"),
        argument("--seeds", default="100,101,102,103,104"),
        argument("--measured", type=int, help="plans that a run with an empty store may measure"),
        argument("--evaluations", type=int, help="placements that each search may simulate"),
        argument("--pairs", default="0,1,2,3,4", help="which of the pairs, on hidden truths"),
        argument("--workloads", nargs=2, default=store_transfer_cores.PAIR, help="on this machine"),
        argument("--control", action="store_true", help="also half of the measurements without a store"),
        argument("--name", help="of the results' file"),
        argument("--resume", action="store_true", help="go on with the cases that the file has"),
        argument("--json", action="store_true"),
    )
    path = RESULTS / f"{options.name or f'store-transfer-{options.host}'}.json"
    rows: list[Case] = read_json(path)["rows"] if options.resume and path.exists() else []
    for cases in (simulated if options.host == "true" else measured)(options, rows):
        rows += cases
        for row in cases:
            words = f"after {row['needed']}" if row["needed"] else f"not after {row['measured'] // 2}"
            where = f"{row['host']} {row.get('truth', row.get('seed'))} {row['first']} -> {row['second']}"
            print(f"{where}: {words} measurements, {row['ratio']:.3f} in the end", file=sys.stderr, flush=True)
        write_json_atomic(path, {"schema": 1, **record(), **summary(rows), "rows": rows})
    if options.json:
        print(json.dumps({"schema": 1, **summary(rows)}))


if __name__ == "__main__":
    main()
