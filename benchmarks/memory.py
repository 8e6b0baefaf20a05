"""Peak memory of placements, predicted and held: python benchmarks/memory.py [--placements 50] [WORKLOAD ...].

A workload may end in `/K` for K micro-batches. Each placement is planned and simulated, then run; PyTorch's allocator
says what each device held at most over `NUM_STEPS` steps (`rlplace.measure.metering`). Nothing is timed, so other
programs may run beside it. Then memory is limited artificially: a placement that is predicted to fit must not hold more
than the limit. Writes `results/memory.md` and `results/memory.json`, where rows of other workloads stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from record import RESULTS, argument, as_markdown, parse, record, save

from rlplace.files import read_json
from rlplace.measure import Host, Plan, Problem, Simulator
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.detect import SPARE, usable_bytes
from rlplace.measure.prediction_error import draw_mix
from rlplace.measure.profiling.metered_step import MeteredStep
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, find
from rlplace.search.groupings import majority_devices
from rlplace.session.prepare import Steps, make_problem
from rlplace.session.setup import CutOptions
from rlplace.workloads import parse_workload

WORKLOADS = ("nmt@small", "gpt2@small", "inception_v3@small", "bert@small", "gpt2@small/2")
METHODS = ("single", "round-robin", "blocks", "expert", "eft", "m-topo", "m-etf", "m-sct")
CUT_METHODS = ("data-parallel", "pipeline")
SEARCH = Budget(evaluations=4000, seconds=60.0)
NUM_STEPS = 2
NUM_GROUPS = 256
BOUND = 0.05
"""The largest error of a peak that is asked for."""


class Peaks(NamedTuple):
    """Bytes of P placements on D devices.

    Attributes:
        kinds: of each placement: the method that made it, or how it was drawn.
        predicted: (P, D) by the simulator.
        held: (P, D) by PyTorch's allocator, the most of the steps.
    """

    kinds: tuple[str, ...]
    predicted: NDArray[np.int64]
    held: NDArray[np.int64]


def draw(problem: Problem, simulator: Simulator, count: int, seed: int) -> tuple[list[Plan], tuple[str, ...]]:
    """`count` plans: those of methods, the best that annealing finds, the rest random, in blocks, near the best and
    unbalanced in turn."""
    names = (*METHODS, *(CUT_METHODS if problem.graph.num_micro_batches > 1 else ()), "anneal")
    found = [find(problem, name, simulator, SEARCH, seed=seed) for name in names]
    assert found[-1].devices is not None, "memory is not limited, so everything is feasible"
    best = majority_devices(problem, found[-1].devices)
    drawn, kinds = draw_mix(problem, best, max(count - len(names), 1), np.random.default_rng(seed))
    plans = [each.plan or simulator.plan(each.devices) for each in found if each.devices is not None]
    plans += [simulator.plan(group_devices[problem.grouping.op_group]) for group_devices in drawn]
    return plans[:count], (*names, *kinds)[:count]


def measure(problem: Problem, simulator: Simulator, plans: Sequence[Plan], kinds: tuple[str, ...]) -> Peaks:
    """What each plan is predicted to hold, and what it held."""
    crew, residents = Crew(problem.host.devices), Residents(problem.graph, problem.host)
    held = []
    try:
        for plan in plans:
            step = MeteredStep(problem.graph, problem.host, plan, residents, crew)
            peaks = []
            for number in range(NUM_STEPS):
                step.run(number)
                peaks.append(step.peak_bytes)
            held.append(np.max(peaks, axis=0))
            step.unload()
    finally:
        crew.stop()
    predicted = [simulator.retime(plan).peak_bytes for plan in plans]
    return Peaks(kinds, np.array(predicted, dtype=np.int64), np.array(held, dtype=np.int64))


def judge(peaks: Peaks) -> dict[str, Any]:
    """Errors of the peaks, of the fullest device of a placement and of every device that it uses; then the limits."""
    used = peaks.held > 0
    errors = peaks.predicted[used] / peaks.held[used] - 1.0
    fullest = peaks.predicted.max(axis=1) / peaks.held.max(axis=1) - 1.0
    return {
        "num_placements": len(peaks.kinds),
        "held_mb": [float(peaks.held.max(axis=1).min() / 1e6), float(peaks.held.max(axis=1).max() / 1e6)],
        "fullest_device": spread(fullest),
        "every_device": spread(errors),
        "limits": limits(peaks),
    }


def spread(errors: NDArray[np.float64]) -> dict[str, float]:
    """Median, 95th percentile and worst of |predicted / held - 1|, and the most that was predicted too little."""
    return {
        "median": float(np.median(np.abs(errors))),
        "p95": float(np.percentile(np.abs(errors), 95)),
        "worst": float(np.abs(errors).max()),
        "most_below": float(np.maximum(-errors, 0.0).max()),
    }


def limits(peaks: Peaks) -> dict[str, int]:
    """Placements on hosts whose devices have only so much memory: each limit lies halfway between two peaks.

    Every placement meets every limit, on all its devices. `to_the_brim` is what would be if a detected device offered
    all of its memory.
    """
    predicted, held = peaks.predicted.max(axis=1)[:, None], peaks.held.max(axis=1)[:, None]
    ladder = np.unique(predicted)
    between = (ladder[1:] + ladder[:-1]) // 2
    offered = np.array([usable_bytes(int(total)) for total in between])
    fits, to_the_brim, ran_out = predicted <= offered, predicted <= between, held > between
    return {
        "limits": len(between),
        "predicted_to_fit": int(fits.sum()),
        "of_these_ran_out": int((fits & ran_out).sum()),
        "predicted_not_to_fit": int((~fits).sum()),
        "of_these_would_have_fit": int((~fits & ~ran_out).sum()),
        "fit_to_the_brim": int(to_the_brim.sum()),
        "of_these_to_the_brim_ran_out": int((to_the_brim & ran_out).sum()),
    }


@one_thread_here()
def compare(word: str, count: int, seed: int) -> dict[str, Any]:
    """One workload's row."""
    name, _, cut = word.partition("/")
    host, spec, progress = Host.detect("cores"), parse_workload(name), make_progress()
    micro_batches = int(cut or 1)
    graph = Steps(spec, host, seed, CutOptions(count=micro_batches)).graph(micro_batches)
    problem = make_problem(graph, host, NUM_GROUPS, progress.say, spec=spec)
    simulator = Simulator(problem)
    plans, kinds = draw(problem, simulator, count, seed)
    progress.say(f"running {len(plans)} placements of {word}")
    peaks = measure(problem, simulator, plans, kinds)
    row = {"workload": name, "micro_batches": micro_batches, **judge(peaks)}
    progress.say(str(row))
    return row | {
        "kinds": list(peaks.kinds),
        "predicted_bytes": peaks.predicted.tolist(),
        "held_bytes": peaks.held.tolist(),
    }


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The tables."""
    text = [
        "# Peak memory, predicted and held\n\n",
        as_markdown(facts),
        "\nRows of other workloads are of earlier runs of the same command.\n"
        "\nHost `cores`. `predicted` is the simulator's peak of a device, `held` the most that PyTorch's allocator\n"
        f"had given to it at a time, over {NUM_STEPS} steps ([what counts](../../docs/step-time-model.md#memory)).\n"
        "The placements are those of methods (single, blocks, expert, earliest finish, Baechi's, the best of a\n"
        "search) and drawn ones: random, contiguous blocks, near the best, unbalanced.\n\n"
        "| workload | placements | held, MB | fullest device: median | 95 % | worst | every device: median | 95 % "
        "| worst | most predicted too little |\n|---|---|---|---|---|---|---|---|---|---|\n",
    ]
    for row in rows:
        low, high = row["held_mb"]
        cells = (
            *(title(row), str(row["num_placements"]), f"{low:.0f} to {high:.0f}"),
            *(f"{row['fullest_device'][key]:.2%}" for key in ("median", "p95", "worst")),
            *(f"{row['every_device'][key]:.2%}" for key in ("median", "p95", "worst", "most_below")),
        )
        text.append(f"| {' | '.join(cells)} |\n")
    text += [
        "\n## Artificial limits\n\nEvery placement on hosts whose devices have less memory: each limit lies halfway\n"
        "between the peaks of two placements. None that is predicted to fit should hold more than the limit.\n"
        f"A detected device offers {1.0 - SPARE:.0%} of its memory: it may take its copy of a tensor later than\n"
        "simulated, so that the maker holds it longer. On the right what would be if it offered all of it.\n\n"
        "| workload | limits | predicted to fit | of these ran out | predicted not to fit | of these would have fit "
        "| would fit to the brim | of these ran out |\n|---|---|---|---|---|---|---|---|\n"
    ]
    text += [f"| {title(row)} | {' | '.join(f'{count:,}' for count in row['limits'].values())} |\n" for row in rows]
    return "".join(text)


def title(row: dict[str, Any]) -> str:
    cut = row["micro_batches"]
    return f"{row['workload']}, {cut} micro-batches" if cut > 1 else str(row["workload"])


def render(path: Path) -> None:
    """Judges the kept peaks anew."""
    kept = read_json(path)
    for row in kept["rows"]:
        row |= judge(Peaks(tuple(row["kinds"]), np.array(row["predicted_bytes"]), np.array(row["held_bytes"])))
    save(path.with_suffix(""), kept, markdown(kept["rows"], kept))


def main() -> None:
    options = parse(
        __doc__,
        argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD"),
        argument("--placements", type=int, default=50, help="of each workload"),
        argument("--seed", type=int, default=0),
        argument("--render", action="store_true", help="no run: the table of the peaks that are kept"),
    )
    facts, path = record(), RESULTS / "memory.json"
    if options.render:
        render(path)
        return
    for workload in options.workloads:
        row = compare(workload, options.placements, options.seed)
        kept = read_json(path)["rows"] if path.exists() else []
        rows = [row, *(other for other in kept if title(other) != title(row))]
        rows.sort(key=title)
        save(path.with_suffix(""), {"schema": 1, **facts, "bound": BOUND, "rows": rows}, markdown(rows, facts))


if __name__ == "__main__":
    main()
