"""The simulator against this machine: python benchmarks/fidelity.py [WORKLOAD ...].

Placements that no fit has seen are measured twice, as `rlplace fidelity` does, and judged four ways: by the simulator
as profiled, by the six figures that were fitted before there was a host model (`rlplace.measure.prediction_error`), by
the host model, all from the same measured steps, and by the host model from the first four of them with their
timelines. For the last, the simulator's pick races the best of the best quartile again. An idle machine is needed.
With `--split`, ops are split into shards. Writes `results/NAME.md` and, for each workload, a scatter plot.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import RESULTS, argument, as_markdown, parse, record, table

from rlplace.compare.simulated_and_measured import Mix, measure_mix
from rlplace.files import write_json_atomic, write_text_atomic
from rlplace.measure import Host, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostModel, Posterior, Scales, TracedPrior, prior_of
from rlplace.measure.prediction_error import calibrate
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report import save_fidelity_png
from rlplace.report.console import make_progress
from rlplace.session.calibrate import calibrate_on, step_times
from rlplace.session.prepare import Steps, make_problem
from rlplace.session.setup import NO_SPLIT, TWO, CutOptions
from rlplace.workloads import parse_workload

WORKLOADS = ("inception_v3@small", "nmt@small", "nmt@units=64")
Floats = NDArray[np.float64]
NUM_PLACEMENTS, NUM_FIT, NUM_TRACED = 40, 16, 4
TRACED = "four traced steps"
PAIRS = RaceProtocol(warmup=3, min_rounds=60, max_rounds=60, hopeless=float("inf"))
FIGURES = {
    "spearman": ("Spearman, all", ".3f"),
    "spearman_best_quartile": ("Spearman, best quartile", ".3f"),
    "median_abs_rel_error": ("median relative error", ".1%"),
    "p90_abs_rel_error": ("90th percentile", ".1%"),
    "common_factor": ("simulated over measured, median", ".3f"),
    "error_without_it": ("median relative error without this factor", ".1%"),
    "pick_regret": ("regret of the simulator's pick", ".1%"),
    "peak_bytes_max_rel_error": ("largest error of peak bytes", ".1%"),
}
"""Words for each figure, and how it is written."""


@one_thread_here()
def judged(workload: str, seed: int, asked: CutOptions, name: str) -> dict[str, Any]:
    """Figures of one workload for each way, and the ceiling."""
    host, spec, progress = Host.detect("cores"), parse_workload(workload), make_progress()
    problem = make_problem(Steps(spec, host, seed, asked).graph(1), host, 256, progress.say, spec=spec)
    mix = measure_mix(problem, num_placements=NUM_PLACEMENTS, num_fit=NUM_FIT, seed=seed, num_traced=1)
    known = mix.known
    figures = calibrate(problem, list(known.plans), step_times(known.outcomes).tolist(), seed=seed).problem
    model, traced = calibrate_on(known), from_traces(mix)
    ways = {"profiled": problem, "six figures": figures, "host model": model.problem, TRACED: traced.problem}
    by_way = {name: mix.judge(under) for name, under in ways.items()}
    found, simulated_s = by_way[TRACED]
    plot = RESULTS / f"{name}-{workload.replace('@', '-').replace('=', '').replace(',', '-')}.png"
    save_fidelity_png(plot, simulated_s, mix.measured_s.tolist(), mix.kinds, asdict(found))
    factors = {name: np.array(simulated_s) / mix.measured_s for name, (_, simulated_s) in by_way.items()}
    row = {
        "workload": workload,
        "ceiling": found.spearman_ceiling,
        "ceiling_best_quartile": found.spearman_ceiling_best_quartile,
        "step_times_ms": [float(mix.measured_s.min()) * 1e3, float(mix.measured_s.max()) * 1e3],
        "idle": mix.idle_share,
        "is_kept": model.is_kept,
        "tracing": asdict(traced.scales.tracing) if traced.scales.tracing else None,
        "regret": regret(mix, simulated_s, seed),
        "ways": {name: asdict(figures) | apart(factors[name]) for name, (figures, _) in by_way.items()},
    }
    progress.say(str(row))
    return row


def apart(factors: Floats) -> dict[str, float]:
    """What is common to the errors of all placements, and the error without it.

    A machine whose speed changes between the calibration and the race gives all of them one factor.
    """
    common = float(np.median(factors))
    return {"common_factor": common, "error_without_it": float(np.median(np.abs(factors / common - 1.0)))}


def from_traces(mix: Mix) -> Posterior:
    """The host model from the first measured placements alone, with their timelines."""
    known = mix.known
    model = HostModel(Scales(known.problem, prior_of(known.problem), None, TracedPrior()))
    model.learn(known.plans[:NUM_TRACED], known.outcomes[:NUM_TRACED])
    return model.fit()


def regret(mix: Mix, simulated_s: list[float], seed: int) -> list[float]:
    """By how much the placement that is simulated as the fastest is slower than the best measured one: the median over
    the rounds of another race, and the ends of an interval that holds it with 95 % (order statistics)."""
    plans = [mix.plans[int(np.argmin(times))] for times in (simulated_s, mix.measured_s)]
    if plans[0] is plans[1]:
        return [0.0, 0.0, 0.0]
    problem = mix.known.problem
    with closing(Evaluator(problem, Simulator(problem), seed=seed)) as evaluator:
        pick, best = evaluator.measure_plans(plans, PAIRS)
    slower = np.sort(np.array(pick.samples_s) / np.array(best.samples_s)) - 1.0
    middle, half = len(slower) // 2, round(0.98 * len(slower) ** 0.5)
    return [float(np.median(slower)), float(slower[middle - half]), float(slower[min(middle + half, len(slower) - 1)])]


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any], asked: CutOptions) -> str:
    """One table a workload."""
    text = [
        f"# The simulator against this machine{'' if asked.plan is None else ', with ops in shards'}\n",
        as_markdown(facts),
        f"\nHost `cores`, {NUM_PLACEMENTS} unseen placements each, a quarter each random, contiguous blocks, near the\n"
        "best by annealing, and unbalanced or on a single device; measured twice, all in turn. Both fits have the\n"
        f"same {NUM_FIT} other placements: `six figures` is how the simulator was calibrated before the host model.\n"
        f"`{TRACED}` is the host model from the first {NUM_TRACED} of them, each traced once. The ceiling is the rank\n"
        "correlation of the two measurements with each other.\n",
        "" if asked.plan is None else f"\nOps are split: {asked.split} in {asked.split_parts} shards.\n",
    ]
    for row in rows:
        low, high = row["step_times_ms"]
        unused = "" if row["is_kept"] else "; the host model is not used here: it is worse on plans held out of its fit"
        text.append(
            f"\n## {row['workload']}\n\nSteps of {low:.0f} to {high:.0f} ms, machine {row['idle']:.0%} idle before; "
            f"ceiling {row['ceiling']:.3f}, of the best quartile {row['ceiling_best_quartile']:.3f}{unused}.\n\n"
            + table(
                ("", *row["ways"]),
                *(
                    (words, *(format(way[key], form) for way in row["ways"].values()))
                    for key, (words, form) in FIGURES.items()
                ),
            )
            + "\nThe pick of `{}` and the best of the best quartile, {} rounds each in another race: it is {:.1%}\n"
            "slower ({:.1%} to {:.1%}).".format(TRACED, PAIRS.max_rounds, *row["regret"])
        )
        if tracing := row["tracing"]:
            text.append(
                f" A traced step was {tracing['share']:.1%} longer; recording took {tracing['added_s'] * 1e6:.2f} us\n"
                "an op, as fitted.\n"
            )
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--seed", type=int, default=0),
        argument("--split", default=NO_SPLIT, help="classes of ops that are split, as of `rlplace fidelity`"),
        argument("--split-parts", default=TWO),
        argument("--name", default="fidelity", help="of the results' files"),
    )
    facts, rows, asked = record(), [], CutOptions(split=options.split, split_parts=options.split_parts)
    for workload in options.workloads:
        rows.append(judged(workload, options.seed, asked, options.name))
        write_json_atomic(RESULTS / f"{options.name}.json", {"schema": 1, **facts, "rows": rows}, indent=1)
        write_text_atomic(RESULTS / f"{options.name}.md", markdown(rows, facts, asked))


if __name__ == "__main__":
    main()
