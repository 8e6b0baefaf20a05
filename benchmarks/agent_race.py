"""The agent against search on a calibrated simulator, on this machine's cores: python benchmarks/agent_race.py.

For each workload twelve placements are measured, for both sides. `portfolio` searches on the simulator calibrated on
them (six figures, `rlplace.measure.prediction_error`) and has its ten best measured; `learned` starts from the profile
and the same twelve. Both have the same seconds; then their plans and the best single device race, every round one step
of each. All of it again from wrong costs: the factors of a `hard` truth are put on the profiled costs and links that
both begin with. Writes `results/agent_race.md`. An idle machine is needed.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from typing import Any

import numpy as np
from record import RESULTS, argument, as_markdown, parse, record, table
from scipy.stats import t as student

from rlplace.files import write_json_atomic, write_text_atomic
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
from rlplace.session.calibrate import Known, measure_all, plans_of, step_times
from rlplace.session.prepare import Steps, make_problem
from rlplace.training.method_choice import LEARNED
from rlplace.training.searches.racing_host import LoopBudget
from rlplace.training.searches.search_all import search_and_measure
from rlplace.training.tracking import NoTracker
from rlplace.workloads import parse_workload

WORKLOADS = ("inception_v3@small", "nmt@small", "gpt2@small", "clip@small")
NUM_FIRST, NUM_BEST = 12, 10
ROUNDS = RaceProtocol(warmup=3, min_rounds=30, max_rounds=30, hopeless=float("inf"))
WRONG = Truth("hard", 0)
HEAD = (
    *("workload", "costs", "single, ms", "portfolio, ms", "learned, ms"),
    *("learned / portfolio", "machine idle"),
)


@one_thread_here()
def race(workload: str, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Two rows: from costs as profiled, and from wrong ones."""
    host, spec, progress = Host.detect("cores"), parse_workload(workload), make_progress()
    profiled = make_problem(Steps(spec, host, seed).graph(1), host, 256, progress.say, spec=spec)
    simulator = Simulator(profiled)
    generator = np.random.default_rng(seed)
    groups, _ = draw_mix(profiled, majority_devices(profiled, eft(profiled)), NUM_FIRST, generator)
    plans = plans_of(profiled, simulator, groups)
    with closing(Evaluator(profiled, simulator, seed=seed)) as evaluator:
        outcomes = measure_all(evaluator, plans, rounds=7, seed=seed)
    rows = []
    for start, problem in (("profiled", profiled), ("wrong", true_problem(profiled, WRONG))):
        known = Known(problem, plans, outcomes)
        found = [portfolio(known, seconds, seed), learned(known, seconds, seed, is_wrong=start == "wrong")]
        rows.append({"workload": workload, "start": start, **final(profiled, found, seed)})
        progress.say(str(rows[-1]))
    return rows


def portfolio(known: Known, seconds: float, seed: int) -> Plan:
    """What `portfolio` finds on the simulator calibrated as it was before there was a host model."""
    fitted = calibrate(known.problem, known.plans, step_times(known.outcomes).tolist(), seed=seed).problem
    return searched("portfolio", fitted, LoopBudget(seconds, 0.6, NUM_BEST), seed, {})


def learned(known: Known, seconds: float, seed: int, *, is_wrong: bool) -> Plan:
    """What the agent finds from the same steps; costs that are wrong are no better than estimated ones."""
    prior = prior_of(known.problem)
    if is_wrong:
        prior = dataclasses.replace(prior, op_type=0.5, device=0.15, bandwidth=0.6)
    budget = LoopBudget.of(seconds, 0.6, float(np.min(step_times(known.outcomes))))
    return searched(LEARNED, known.problem, budget, seed, {"known": known, "prior": prior})


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


def final(problem: Problem, plans: list[Plan], seed: int) -> dict[str, Any]:
    """Step times of both plans and of one device in one race; paired ratio with its 95 % interval."""
    simulator = Simulator(problem)
    single = simulator.plan(baselines.best_single(problem, simulator))
    with closing(Evaluator(problem, simulator, seed=seed)) as evaluator:
        before = idle_share()
        outcomes = evaluator.measure_plans([*plans, single], ROUNDS)
    old, new, one = (np.array(outcome.samples_s) for outcome in outcomes)
    logs = np.log(new / old)
    half = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return {
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
        "\nSeconds of search are the same for both, step times are medians of one race a row, ratios geometric means\n"
        "of its rounds with 95 % t-intervals. `wrong`: the factors of a hard truth are on the costs of both.\n\n",
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
    )
    facts = record()
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if (RESULTS / "agent_race.json").exists():  # other workloads keep their rows
        kept = json.loads((RESULTS / "agent_race.json").read_text())["rows"]
        rows = {(row["workload"], row["start"]): row for row in kept}
    for workload in options.workloads:
        for row in race(workload, options.seconds, options.seed):
            rows[workload, row["start"]] = {**row, "date": facts["date"], "command": facts["command"]}
        write_json_atomic(RESULTS / "agent_race.json", {"schema": 1, **facts, "rows": list(rows.values())}, indent=1)
    write_text_atomic(RESULTS / "agent_race.md", markdown(list(rows.values()), facts))


if __name__ == "__main__":
    main()
