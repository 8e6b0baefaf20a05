"""What a store is worth to the next workload on a host: python benchmarks/store_transfer.py --json

On hosts whose truth nobody sees (`rlplace compare --true`), the agent learns on one workload; what it learned goes into
a store. Then it learns on another workload of the same host: with an empty store, and in half of the measurements with
that one. Reported: the true step time of what each finds, as a ratio to that with an empty store. Writes
`results/NAME.json`, anew after each case.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from record import RESULTS, record
from suites import problem_of

from rlplace.files import write_json_atomic
from rlplace.measure import Plan, Problem
from rlplace.measure.host_model import HostKnowledge, LearnedHost, knowledge_of
from rlplace.measure.measurement import Measurement
from rlplace.measure.measurement_log import versions_line
from rlplace.measure.truth import TrueTimer, Truth, true_problems
from rlplace.search.task import Budget
from rlplace.store import MeasurementStore, Session
from rlplace.store.folders import machine_key
from rlplace.training.agent import AgentResult, learn_host

PAIRS = (("nmt", "inception_v3", "4xV100-pcie"), ("bert", "mixtral", "4xA100-nvlink"))
"""Two workloads of `core-dev` on one host; each is learned on first in turn."""
TIED = 1.002
"""A placement is as fast as another if it is slower by no more than this."""


class Watched:
    """Measures on the truth, and notes the true step time of the best measured plan after each measurement."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.true_s: list[float] = []
        self._timer, self._best_s, self._true_s = TrueTimer(problem, seed), math.inf, math.inf

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        outcomes = self._timer.measure_plans(plans)
        for plan, outcome in zip(plans, outcomes, strict=True):
            if outcome.step_time_s < self._best_s:
                self._best_s, self._true_s = outcome.step_time_s, self._timer.truth_s(plan)
            self.true_s.append(self._true_s)
        return outcomes


def learn(
    problem: Problem,
    true: Problem,
    seed: int,
    measured: int,
    evaluations: int,
    knowledge: HostKnowledge | None = None,
) -> tuple[AgentResult, list[float]]:
    """What the agent learned, and the true step time of its best plan after each measurement."""
    watched = Watched(true, seed)
    budget = Budget(evaluations, measurements=measured)
    result = learn_host(problem, watched, budget, seed=seed, knowledge=knowledge)
    return result, watched.true_s


def compare(first: str, second: str, host: str, truth: Truth, measured: int, evaluations: int) -> dict[str, Any]:
    """The second workload with an empty store, and in half of the measurements with one that the first has filled.

    All searches simulate equally many placements. That of half of the measurements without a store stands beside them.
    """
    begin, problems = time.monotonic(), [problem_of(name, host) for name in (first, second)]
    trues, half = true_problems(problems, truth), measured // 2
    with tempfile.TemporaryDirectory() as folder, MeasurementStore.open(Path(folder) / "measurements.db") as store:
        taught, _ = learn(problems[0], trues[0], truth.seed, measured, evaluations)
        session = store.begin(Session(time.time(), first, machine_key(), host, versions_line()))
        store.add_learned(session, problems[0].graph.fingerprint, LearnedHost.of(taught.posterior))
        kept = store.learned_hosts(problems[1].host.fingerprint, machine_key())
    knowledge = knowledge_of(kept, problems[1].costs.source)
    _, empty_s = learn(problems[1], trues[1], truth.seed, measured, evaluations)
    _, half_s = learn(problems[1], trues[1], truth.seed, half, evaluations)
    _, with_s = learn(problems[1], trues[1], truth.seed, half, evaluations, knowledge)
    return {
        "host": host,
        "truth": str(truth),
        "first": first,
        "second": second,
        "measured": measured,
        "known_factors": 0 if knowledge is None else len(knowledge.factors),
        "empty_s": empty_s,
        "half_s": half_s,
        "with_s": with_s,
        "ratio": with_s[-1] / empty_s[-1],
        "half_ratio": half_s[-1] / empty_s[-1],
        "seconds": time.monotonic() - begin,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cases reached it in half of the measurements, and geometric means of step times over the empty one's."""
    return {
        "cases": len(rows),
        "reached": sum(row["ratio"] <= TIED for row in rows),
        "reached_without": sum(row["half_ratio"] <= TIED for row in rows),
        "mean_ratio": math.exp(fmean(math.log(row["ratio"]) for row in rows)),
        "mean_ratio_without": math.exp(fmean(math.log(row["half_ratio"]) for row in rows)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="hard", help="kinds of truth, with commas between them")
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--measured", type=int, default=16, help="plans that each search may measure")
    parser.add_argument("--evaluations", type=int, default=16_000, help="placements that each search may simulate")
    parser.add_argument("--pairs", default="0,1", help="which of the pairs")
    parser.add_argument("--name", default="store-transfer", help="of the results' file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for pair in (PAIRS[int(place)] for place in options.pairs.split(",")):
        for kind in options.kinds.split(","):
            for seed in (int(seed) for seed in options.seeds.split(",")):
                for first, second in (pair[:2], pair[1::-1]):
                    truth = Truth(kind, seed)
                    row = compare(first, second, pair[2], truth, options.measured, options.evaluations)
                    rows.append(row)
                    ratios = f"{row['ratio']:.3f} with the store, {row['half_ratio']:.3f} without"
                    print(f"{pair[2]} {truth} {first} -> {second}: {ratios}", file=sys.stderr, flush=True)
                    told = {"schema": 1, **record(), **summary(rows), "rows": rows}
                    write_json_atomic(RESULTS / f"{options.name}.json", told)
    if options.json:
        print(json.dumps({name: told[name] for name in ("schema", *summary(rows))}))


if __name__ == "__main__":
    main()
