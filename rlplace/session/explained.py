"""The explanation of a run: made from the measurements of its table, and read back from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlplace.errors import FileProblem
from rlplace.measure.explain.explanation import Alternative, Explanation, Kind
from rlplace.session.session import Session

if TYPE_CHECKING:
    from rlplace.measure import Plan, Problem, Timeline

SPLIT_NOTE = "at best: an even split of the batch, ops shrinking with it, a ring summing the gradients"


def explain_run(
    problem: Problem, plan: Plan, timeline: Timeline, rows: Sequence[Mapping[str, Any]], method: str
) -> Explanation:
    """The parts of the best placement's step time, beside the step time of alternatives.

    Args:
        problem: of the run.
        plan: of its best placement.
        timeline: of a typical step of it.
        rows: of the run's table, `single` and `eager` among them.
        method: the method that found the placement, one of the rows.
    """
    from rlplace.measure.explain.explain_step import explain

    kind: Kind = timeline.source
    by_name = {str(row["method"]): row for row in rows}
    one_device = _of_row("one device", by_name.get("single"), kind)
    row = by_name.get(method, {})
    return explain(
        problem,
        plan,
        timeline,
        method=method,
        step_time_s=row.get("step_time_s"),
        spread_s=row.get("spread_s") or 0.0,
        alternatives=[
            one_device,
            data_parallel(problem, one_device),
            _of_row("eager", by_name.get("eager"), kind),
        ],
    )


def data_parallel(problem: Problem, one_device: Alternative) -> Alternative:
    """The step time with the batch split over devices: simulated where it is cut, else an estimate.

    Args:
        problem: of the run.
        one_device: where it was measured, simulated and estimated times are scaled by measured over simulated.
    """
    from rlplace.measure import Simulator
    from rlplace.measure.bounds import even_split_s
    from rlplace.search import find
    from rlplace.search.rules.baselines import best_single

    simulator, ratio = Simulator(problem), 1.0
    if one_device.kind == "measured" and one_device.step_time_s is not None:
        single_s = float(simulator.step_times(best_single(problem, simulator)[None])[0])
        ratio = one_device.step_time_s / single_s if 0 < single_s < math.inf else 1.0
    if problem.graph.num_micro_batches > 1:
        kind: Literal["simulated", "estimated"] = "simulated"
        step_s = ratio * find(problem, "data-parallel", simulator).step_time_s
        note = f"{problem.graph.num_micro_batches} micro-batches dealt out"
        failed = f"{note}: does not fit into memory"
    else:
        kind, step_s, note = "estimated", ratio * even_split_s(problem), SPLIT_NOTE
        failed = "the batch is one sample, or no two devices hold the model each"
    is_possible = math.isfinite(step_s)
    return Alternative("data parallel", step_s if is_possible else None, kind, note if is_possible else failed)


def read_explanation(folder: Path) -> Explanation:
    """The explanation that a run left in its folder; needs neither its model nor its host.

    Raises:
        FileProblem: no such run, or one without an explanation.
        InvalidValue, UnknownName: a malformed file.
    """
    with Session.read(folder) as session:
        explanation = session.explanation
    if explanation is None:
        raise FileProblem(
            folder,
            "this run has no explanation: it stopped before its end. Go on with it: "
            f"`rlplace train --resume {folder}`.",
        )
    return explanation


def _of_row(name: str, row: Mapping[str, Any] | None, kind: Kind) -> Alternative:
    if row is None:
        return Alternative(name, None, kind, "not in the table")
    step_s = row.get("step_time_s")
    if row.get("status") == "ok" and step_s is not None:
        return Alternative(name, float(step_s), kind)
    why = str(row.get("why") or "")
    return Alternative(name, None, kind, why or str(row.get("status", "")))
