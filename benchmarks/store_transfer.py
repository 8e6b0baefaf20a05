"""What a store is worth to the next workload on a host: python benchmarks/store_transfer.py --json

On hosts whose truth nobody sees (`rlplace compare --true`), the agent learns on one workload; what it learned goes into
a store. Then it learns on another workload of the same host, with an empty store and with that one. Reported: after how
many measurements the second workload, with the store, has a placement that is truly as fast as the best that it found
with an empty one. Writes `results/store-transfer.json`.
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
from typing import Any

import numpy as np
from record import RESULTS, record
from suites import problem_of

from rlplace.files import write_json_atomic
from rlplace.measure import Plan, Problem
from rlplace.measure.host_model import HostKnowledge, LearnedHost, knowledge_of
from rlplace.measure.measurement import Measurement
from rlplace.measure.measurement_log import versions_line
from rlplace.measure.truth import TrueTimer, Truth, true_problem
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
    problem: Problem, truth: Truth, measured: int, evaluations: int, knowledge: HostKnowledge | None = None
) -> tuple[AgentResult, list[float]]:
    """What the agent learned, and the true step time of its best plan after each measurement."""
    watched = Watched(true_problem(problem, truth), truth.seed)
    budget = Budget(evaluations, measurements=measured)
    result = learn_host(problem, watched, budget, seed=truth.seed, knowledge=knowledge)
    return result, watched.true_s


def reached(true_s: Sequence[float], wanted_s: float) -> int | None:
    """After how many measurements there was a placement that fast; None where there was none."""
    return next((place + 1 for place, step_s in enumerate(true_s) if step_s <= TIED * wanted_s), None)


def compare(first: str, second: str, host: str, truth: Truth, measured: int, evaluations: int) -> dict[str, Any]:
    """The second workload with an empty store, and with one that holds what the first taught."""
    begin, problems = time.monotonic(), [problem_of(name, host) for name in (first, second)]
    with tempfile.TemporaryDirectory() as folder, MeasurementStore.open(Path(folder) / "measurements.db") as store:
        taught, _ = learn(problems[0], truth, measured, evaluations)
        session = store.begin(Session(time.time(), first, machine_key(), host, versions_line()))
        store.add_learned(session, problems[0].graph.fingerprint, LearnedHost.of(taught.posterior))
        kept = store.learned_hosts(problems[1].host.fingerprint, machine_key())
    knowledge = knowledge_of(kept, problems[1].costs.source)
    _, empty_s = learn(problems[1], truth, measured, evaluations)
    _, with_s = learn(problems[1], truth, measured, evaluations, knowledge)
    return {
        "host": host,
        "truth": str(truth),
        "first": first,
        "second": second,
        "measured": measured,
        "known_factors": 0 if knowledge is None else len(knowledge.factors),
        "empty_s": empty_s,
        "with_s": with_s,
        "empty_needed": reached(empty_s, empty_s[-1]),
        "with_needed": reached(with_s, empty_s[-1]),
        "half_ratio": with_s[measured // 2 - 1] / empty_s[-1],
        "seconds": time.monotonic() - begin,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cases reached it in half of the measurements, and the mean ratio of step times there."""
    halves = [row["with_needed"] is not None and row["with_needed"] <= row["measured"] // 2 for row in rows]
    needed = [row["with_needed"] or math.inf for row in rows]
    return {
        "cases": len(rows),
        "in_half": sum(halves),
        "median_needed": float(np.median(needed)),
        "mean_half_ratio": float(np.exp(np.mean([math.log(row["half_ratio"]) for row in rows]))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="hard", help="kinds of truth, with commas between them")
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--measured", type=int, default=16, help="plans that each search may measure")
    parser.add_argument("--evaluations", type=int, default=6000, help="placements that each search may simulate")
    parser.add_argument("--pairs", default="0,1", help="which of the pairs")
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
                    needed = f"{row['with_needed']} of {row['measured']} measurements, empty {row['empty_needed']}"
                    ratio = f"at half {row['half_ratio']:.3f} of its step"
                    print(f"{pair[2]} {truth} {first} -> {second}: {needed}; {ratio}", file=sys.stderr, flush=True)
    told = {"schema": 1, **record(), **summary(rows), "rows": rows}
    write_json_atomic(RESULTS / "store-transfer.json", told)
    if options.json:
        print(json.dumps({name: told[name] for name in ("schema", "cases", "in_half", "median_needed")}))


if __name__ == "__main__":
    main()
