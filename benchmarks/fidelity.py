"""The simulator against this machine: python benchmarks/fidelity.py [WORKLOAD ...].

Placements that no fit has seen are measured twice, as `rlplace fidelity` does, and judged three ways: by the simulator
as profiled, by the six figures that were fitted before there was a host model (`rlplace.measure.prediction_error`), and
by the host model, all from the same measured steps. An idle machine is needed. Writes `results/fidelity.md` and, for
each workload, a scatter plot.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from record import RESULTS, argument, as_markdown, parse, record, table

from rlplace.compare.simulated_and_measured import measure_mix
from rlplace.files import write_json_atomic, write_text_atomic
from rlplace.measure import Host
from rlplace.measure.prediction_error import calibrate
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report import save_fidelity_png
from rlplace.report.console import make_progress
from rlplace.session.calibrate import calibrate_on, step_times
from rlplace.session.prepare import Steps, make_problem
from rlplace.workloads import parse_workload

WORKLOADS = ("inception_v3@small", "nmt@small", "nmt@units=64")
NUM_PLACEMENTS, NUM_FIT = 40, 16
FIGURES = {
    "spearman": ("Spearman, all", ".3f"),
    "spearman_best_quartile": ("Spearman, best quartile", ".3f"),
    "median_abs_rel_error": ("median relative error", ".1%"),
    "p90_abs_rel_error": ("90th percentile", ".1%"),
    "pick_regret": ("regret of the simulator's pick", ".1%"),
    "peak_bytes_max_rel_error": ("largest error of peak bytes", ".1%"),
}
"""Words for each figure, and how it is written."""


@one_thread_here()
def judged(workload: str, seed: int) -> dict[str, Any]:
    """Figures of one workload for each way, and the ceiling."""
    host, spec, progress = Host.detect("cores"), parse_workload(workload), make_progress()
    problem = make_problem(Steps(spec, host, seed).graph(1), host, 256, progress.say, spec=spec)
    mix = measure_mix(problem, num_placements=NUM_PLACEMENTS, num_fit=NUM_FIT, seed=seed)
    known = mix.known
    figures = calibrate(problem, list(known.plans), step_times(known.outcomes).tolist(), seed=seed).problem
    model = calibrate_on(known)
    by_way = {
        name: mix.judge(under)
        for name, under in (("profiled", problem), ("six figures", figures), ("host model", model.problem))
    }
    found, simulated_s = by_way["host model"]
    plot = RESULTS / f"fidelity-{workload.replace('@', '-').replace('=', '')}.png"
    save_fidelity_png(plot, simulated_s, mix.measured_s.tolist(), mix.kinds, asdict(found))
    row = {
        "workload": workload,
        "ceiling": found.spearman_ceiling,
        "ceiling_best_quartile": found.spearman_ceiling_best_quartile,
        "step_times_ms": [float(mix.measured_s.min()) * 1e3, float(mix.measured_s.max()) * 1e3],
        "idle": mix.idle_share,
        "is_kept": model.is_kept,
        "ways": {name: asdict(figures) for name, (figures, _) in by_way.items()},
    }
    progress.say(str(row))
    return row


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """One table a workload."""
    text = [
        "# The simulator against this machine\n",
        as_markdown(facts),
        f"\nHost `cores`, {NUM_PLACEMENTS} unseen placements each, a quarter each random, contiguous blocks, near the\n"
        "best by annealing, and unbalanced or on a single device; measured twice, all in turn. Both fits have the\n"
        f"same {NUM_FIT} other placements: `six figures` is how the simulator was calibrated before the host model.\n"
        "The ceiling is the rank correlation of the two measurements with each other.\n",
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
        )
    return "".join(text)


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS)),
        argument("--seed", type=int, default=0),
    )
    facts, rows = record(), []
    for workload in options.workloads:
        rows.append(judged(workload, options.seed))
        write_json_atomic(RESULTS / "fidelity.json", {"schema": 1, **facts, "rows": rows}, indent=1)
    write_text_atomic(RESULTS / "fidelity.md", markdown(rows, facts))


if __name__ == "__main__":
    main()
