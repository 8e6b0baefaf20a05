"""How honest the uncertainty of a traced host model is: python benchmarks/trace_coverage.py [--seeds 0-49].

For every kind of hidden truth and every seed: the problem of that seed in `learn-dev`, traced measurements of a few
plans, a fit, and the intervals of the step times of eight plans that were not measured. An interval is the range of 19
draws of the posterior (`HostModel.draw`, the agent's); beside it stands that of draws with the misfit that the fit
allows (`FitConfig.misfit`), for what no factor expresses on real hosts, and which these truths have little of.
The first measured plan is the agent's survey; of the others half are the best of short searches with the factors as
they are known by then, half are drawn. Intervals that are right hold nine true step times in ten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import learn_dev
import numpy as np
from core_true import seeds_of, whole_command
from record import argument, as_markdown, parse, record, save, table

from rlplace.measure import Plan, Problem, Simulator
from rlplace.measure.host_model import HostModel, Scales, TracedPrior, prior_of
from rlplace.measure.prediction_error import draw_mix
from rlplace.measure.truth import KINDS, TrueTimer, Truth, true_problem
from rlplace.say import say
from rlplace.search import Budget, find
from rlplace.search.groupings import majority_devices
from rlplace.search.methods import find_winners
from rlplace.training.agent.proposals import Proposer, log_step_times
from rlplace.training.config import AgentConfig

MEASURED = (4, 16)
"""Traced plans, after which the intervals are taken."""
BATCHES = (1, 3, 4, 4, 4)
UNSEEN = 8
DRAWS = 19
"""Of so many exact draws, and the truth as one more, the least and the largest are beyond the others alike: the range
of the draws holds 18 truths in 20."""
EVALUATIONS = 150
"""Of a search for plans to measure, or for the best placement of the truth."""


def measured_in(problem: Problem, true: Problem, truth: Truth) -> Iterator[tuple[int, HostModel]]:
    """The model after each number of plans in `MEASURED`, and that number."""
    generator = np.random.default_rng([truth.seed, 1])
    timer, simulator = TrueTimer(true, truth.seed, is_traced=True), Simulator(problem, threads=1)
    model = HostModel(Scales(problem, prior_of(problem), None, TracedPrior()))
    plans = [simulator.plan(devices) for devices in Proposer(problem, generator, AgentConfig()).spread(simulator)]
    for count in BATCHES:
        if model.num_measured:
            known = Simulator(model.fit().problem, threads=1)
            seed, wanted = int(generator.integers(2**31)), (count + 1) // 2
            found = find_winners(known.problem, known, Budget(EVALUATIONS), wanted, seed=seed).devices
            best = majority_devices(problem, found[0])
            groups = draw_mix(problem, best, count, generator)[0][: count - len(found)]
            plans = [known.plan(devices) for devices in [*found, *problem.grouping.expand(groups)]]
        model.learn(plans, timer.measure_plans(plans))
        if model.num_measured in MEASURED:
            yield model.num_measured, model


def unseen_plans(problem: Problem, true: Problem, seed: int) -> list[Plan]:
    """Drawn plans and some near the best of the truth, all in the nominal problem's order."""
    generator = np.random.default_rng([seed, 2])
    simulator = Simulator(problem, threads=1)
    best = find(true, "portfolio", Simulator(true, threads=1), Budget(EVALUATIONS), seed=seed).devices
    groups, _ = draw_mix(problem, majority_devices(problem, best), UNSEEN, generator)
    plans, judge = map(simulator.plan, problem.grouping.expand(groups)), Simulator(true, threads=1)
    return [plan for plan in plans if judge.retime(plan).ok]


def judged(problem: Problem, truth: Truth) -> list[dict[str, Any]]:
    """Rows of a truth: for each number of measured plans the errors, and the intervals, of the unseen ones."""
    true, rows = true_problem(problem, truth), []
    unseen = unseen_plans(problem, true, truth.seed)
    true_log_s = log_step_times(unseen, [Simulator(true, threads=1)], np.inf)[0]
    for count, model in measured_in(problem, true, truth):
        generator = np.random.default_rng([truth.seed, 3])
        said = log_step_times(unseen, [Simulator(model.fit().problem, threads=1)], np.inf)[0]
        drawn = (Simulator(model.draw(generator), threads=1) for _ in range(DRAWS))
        log_s = log_step_times(unseen, drawn, np.inf)
        misfit = model.config.misfit * generator.standard_normal(log_s.shape)
        row = {"truth": str(truth), "measured": count, "error": (said - true_log_s).tolist()}
        for name, drawn_log_s in (("draws", log_s), ("with_misfit", log_s + misfit)):
            ends = drawn_log_s.min(axis=0) - true_log_s, drawn_log_s.max(axis=0) - true_log_s
            row[name] = [end.tolist() for end in ends]
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """A line for each kind and number of measured plans."""
    lines = []
    for kind in KINDS:
        for count in MEASURED:
            of_kind = [row for row in rows if row["truth"].startswith(kind + ":") and row["measured"] == count]
            if not of_kind:
                continue
            error = np.concatenate([row["error"] for row in of_kind])
            figures: list[str] = []
            for name in ("draws", "with_misfit"):
                low, high = (np.concatenate([row[name][end] for row in of_kind]) for end in range(2))
                figures += [f"{np.mean((low <= 0) & (high >= 0)):.3f}", f"{np.median(high - low):.1%}"]
            figures += [f"{np.median(np.abs(error)):.2%}", f"{error.mean():+.2%}"]
            lines.append((kind, count, len(of_kind), *figures))
    head = (
        *("truths", "traced plans", "how many", "coverage", "median width"),
        *("with misfit", "median width", "median error", "mean error"),
    )
    return (
        f"# Coverage of a traced host model's intervals\n{as_markdown(facts)}"
        "\nOf the true step times of eight unseen plans of each truth: how many the 90 % intervals hold, their median\n"
        "width, the same with the misfit that is allowed for real hosts, and errors of the most probable step times\n"
        "(all of the logarithm).\n\n" + table(head, *lines)
    )


def main() -> None:
    options = parse(
        __doc__,
        argument("--truths", default=",".join(KINDS)),
        argument("--seeds", default="0-49", help="FIRST-LAST, or with commas"),
        argument("--name", default="trace_coverage", help="of the results' files"),
    )
    facts, rows = record(), []
    facts["command"] = whole_command(facts["command"])
    for seed in seeds_of(options.seeds):
        problem = learn_dev.problem_of(seed)
        for kind in options.truths.split(","):
            rows += judged(problem, Truth(kind, seed))
        say(f"seed {seed}: {time.process_time():.0f} s of CPU time")
        save(options.name, {"schema": 1, **facts, "rows": rows}, markdown(rows, facts), indent=None)


if __name__ == "__main__":
    main()
