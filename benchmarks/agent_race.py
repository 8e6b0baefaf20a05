"""The agent against search on a calibrated simulator, on this machine's cores: python benchmarks/agent_race.py.

For each workload, `portfolio` searches on the simulator calibrated on twelve measured placements (six figures,
`rlplace.measure.prediction_error`) and has its ten best measured; `learned` starts from the profile and four traced
placements, as `rlplace train` does, and traces what it measures. Both have the same seconds; then their plans and the
best single device race, every round one step of each, until the interval of their ratio is narrow. All of it again from
wrong costs: the factors of a `hard` truth are put on the profiled costs and links that both begin with. Writes
`results/agent_race.md`. An idle machine is needed.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from record import RESULTS, argument, as_markdown, parse, record, save, table
from scipy.stats import t as student

from rlplace.measure import Host, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import prior_of
from rlplace.measure.prediction_error import calibrate, draw_mix
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.truth import Truth, true_problem
from rlplace.report.console import make_progress
from rlplace.search import eft
from rlplace.search.groupings import majority_devices
from rlplace.search.rules import baselines
from rlplace.session.calibrate import Known, calibrated, measure_all, plans_of, step_times
from rlplace.session.prepare import Steps, make_problem
from rlplace.training.config import NUM_TRACED
from rlplace.training.method_choice import LEARNED
from rlplace.training.searches.racing_host import LoopBudget
from rlplace.training.searches.search_all import search_and_measure
from rlplace.training.tracking import NoTracker
from rlplace.workloads import parse_workload

WORKLOADS = ("inception_v3@small", "nmt@small", "gpt2@small", "clip@small")
NUM_FIRST, NUM_BEST = 12, 10
ROUNDS = RaceProtocol(warmup=3, min_rounds=60, max_rounds=60, hopeless=float("inf"))
MOST_ROUNDS = 1200
"""Of a final race, which ends before if its interval is narrow enough."""
WRONG = Truth("hard", 0)
HEAD = (
    *("workload", "costs", "single, ms", "portfolio, ms", "learned, ms"),
    *("learned / portfolio", "rounds", "machine idle"),
)


@one_thread_here()
def race(workload: str, seconds: float, seed: int, narrow: float) -> list[dict[str, Any]]:
    """Two rows: from costs as profiled, and from wrong ones."""
    host, spec, progress = Host.detect("cores"), parse_workload(workload), make_progress()
    profiled = make_problem(Steps(spec, host, seed).graph(1), host, 256, progress.say, spec=spec)
    simulator = Simulator(profiled)
    generator = np.random.default_rng(seed)
    groups, _ = draw_mix(profiled, majority_devices(profiled, eft(profiled)), NUM_FIRST, generator)
    plans = plans_of(profiled, simulator, groups)
    with closing(Evaluator(profiled, simulator, seed=seed)) as evaluator:
        outcomes = measure_all(evaluator, plans, rounds=7, seed=seed)
        _, traced = calibrated(profiled, NUM_TRACED, seed=seed, say=progress.say, evaluator=evaluator, is_traced=True)
    rows = []
    for start, problem in (("profiled", profiled), ("wrong", true_problem(profiled, WRONG))):
        few, known = Known(problem, traced.plans, traced.outcomes), Known(problem, plans, outcomes)
        found = [portfolio(known, seconds, seed), learned(few, seconds, seed, is_wrong=start == "wrong")]
        rows.append({"workload": workload, "start": start, **final(profiled, found, seed, narrow)})
        progress.say(str(rows[-1]))
    return rows


def portfolio(known: Known, seconds: float, seed: int) -> Plan:
    """What `portfolio` finds on the simulator calibrated as it was before there was a host model."""
    fitted = calibrate(known.problem, known.plans, step_times(known.outcomes).tolist(), seed=seed).problem
    return searched("portfolio", fitted, LoopBudget(seconds, 0.6, NUM_BEST), seed, {})


def learned(known: Known, seconds: float, seed: int, *, is_wrong: bool) -> Plan:
    """What the agent finds from traced steps; costs that are wrong are no better than estimated ones."""
    prior = prior_of(known.problem)
    if is_wrong:
        prior = dataclasses.replace(prior, op_type=0.5, device=0.15, bandwidth=0.6)
    budget = LoopBudget.of(seconds, 0.6, float(np.min(step_times(known.outcomes))), is_traced=True)
    return searched(LEARNED, known.problem, budget, seed, {"known": known, "prior": prior, "is_traced": True})


def searched(method: str, problem: Problem, budget: LoopBudget, seed: int, options: dict[str, Any]) -> Plan:
    """The plan that a method ends with."""
    simulator, progress = Simulator(problem), make_progress(is_quiet=True)
    single = baselines.best_single(problem, simulator)
    with closing(Evaluator(problem, simulator, single, seed=seed)) as evaluator:
        found = search_and_measure(
            method, evaluator, budget, seed=seed, progress=progress, tracker=NoTracker(), options=options
        )
    assert found.plan is not None
    return found.plan


def final(problem: Problem, plans: list[Plan], seed: int, narrow: float) -> dict[str, Any]:
    """Step times of both plans and of one device; paired ratio with its 95 % interval.

    They race again and again, until half of the interval is at most `narrow`, or after `MOST_ROUNDS`.
    """
    simulator = Simulator(problem)
    single = simulator.plan(baselines.best_single(problem, simulator))
    with closing(Evaluator(problem, simulator, seed=seed)) as evaluator:
        before, times_s = idle_share(), np.zeros((3, 0))
        half = float("inf")
        while half > narrow and times_s.shape[1] < MOST_ROUNDS:
            outcomes = evaluator.measure_plans([*plans, single], ROUNDS)
            times_s = np.append(times_s, [outcome.samples_s for outcome in outcomes], axis=1)
            old, new, one = times_s
            logs = np.log(new / old)
            half = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return {
        "rounds": len(logs),
        "portfolio_ms": float(np.median(old)) * 1e3,
        "learned_ms": float(np.median(new)) * 1e3,
        "single_ms": float(np.median(one)) * 1e3,
        "ratio": float(np.exp(logs.mean())),
        "low": float(np.exp(logs.mean() - half)),
        "high": float(np.exp(logs.mean() + half)),
        "idle": before,
    }


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The table."""
    earlier = sorted({(row["command"], row["date"]) for row in rows} - {(facts["command"], facts["date"])})
    cells = [
        (
            *(
                row["workload"],
                row["start"],
                *(f"{row[name]:.1f}" for name in ("single_ms", "portfolio_ms", "learned_ms")),
            ),
            f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            row.get("rounds", 30),
            f"{row['idle']:.0%}",
        )
        for row in rows
    ]
    means = {
        start: np.exp(np.mean([np.log(row["ratio"]) for row in rows if row["start"] == start]))
        for start in ("profiled", "wrong")
    }
    text = [
        "# The agent against search on a calibrated simulator, measured\n",
        as_markdown(facts),
        *(f"    {command} ({date})\n" for command, date in earlier),
        "\nSeconds of search are the same for both, step times are medians of the race of a row, ratios geometric\n"
        "means of its rounds with 95 % t-intervals. `portfolio` is calibrated on twelve placements, `learned` on four\n"
        "traced ones. `wrong`: the factors of a hard truth are on the costs of both.\n\n",
        table(HEAD, *cells),
        *(f"\nGeometric mean, {start} costs: {mean:.3f}.\n" for start, mean in means.items()),
    ]
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--seconds", type=float, default=60.0, help="of each side's search"),
        argument("--seed", type=int, default=0),
        argument("--narrow", type=float, default=0.01, help="half of the interval of a ratio at which a race ends"),
        argument("--out", default="agent_race", help="the result: a name in results/, or a path without its ending"),
    )
    facts = record()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if (kept := Path(f"{RESULTS / options.out}.json")).exists():  # other workloads keep their rows
        rows = {(row["workload"], row["start"]): row for row in json.loads(kept.read_text())["rows"]}
    for workload in options.workloads:
        for row in race(workload, options.seconds, options.seed, options.narrow):
            rows[workload, row["start"]] = {**row, "date": facts["date"], "command": facts["command"]}
        told = list(rows.values())
        save(options.out, {"schema": 1, **facts, "rows": told}, markdown(told, facts), indent=1)


if __name__ == "__main__":
    main()
