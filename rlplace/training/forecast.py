"""How long a run is going to take, from the time of one step: told before it begins."""

from __future__ import annotations

from rlplace.errors import RlplaceError
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.eager.eager_step import EagerStep
from rlplace.measure.run.race import RaceProtocol
from rlplace.report.format import format_clock
from rlplace.runs.calibration import LEAST
from rlplace.runs.durations import Durations
from rlplace.training.config import TrainConfig

PROFILED_STEPS = 15
"""Steps that are traced on each kind of device, those before the first that counts included."""
CALIBRATION_STEPS = 6
"""Steps of each placement that the simulator is calibrated on."""
LOAD_S_PER_OP = 0.05e-3
"""Seconds that it takes to make code of a plan, for each of its ops."""
HEURISTICS_S = 3.0
"""What the heuristics take, and reading the kernels of searches from disk."""
COMPILING_S = 60.0
"""What compiling the kernels takes instead, the first time."""
LONG_STEP_S = 5.0
"""An eager step of this length is not run a second time to know it better."""


def forecast(
    graph: OpGraph,
    host: Host,
    config: TrainConfig,
    step_s: float,
    *,
    num_rows: int,
    is_profiled: bool = True,
    is_compiled: bool = True,
) -> Durations:
    """Seconds that the parts of a run are expected to take; a search of so many evaluations counts as none.

    Args:
        graph: of the step.
        host: of this machine, or a simulated one, where the search is all there is.
        config: of the run.
        step_s: seconds of one step, with everything on one device.
        num_rows: of the final table.
        is_profiled: whether the ops have been profiled already.
        is_compiled: whether the kernels have been compiled already.
    """
    heuristics_s = HEURISTICS_S if is_compiled else COMPILING_S
    if host.is_simulated:
        return Durations(heuristics_s=heuristics_s, search_s=0.0 if config.evaluations else config.budget_s)
    load_s = LOAD_S_PER_OP * graph.num_ops
    num_kinds = 0 if is_profiled else len({device.kind for device in host.devices})
    num_calibrated = max(config.search.num_calibrated, LEAST) if config.search.num_calibrated else 0
    num_rounds = config.search.table_rounds + RaceProtocol().warmup
    return Durations(
        profiling_s=num_kinds * (PROFILED_STEPS * step_s + load_s),
        calibration_s=num_calibrated * (CALIBRATION_STEPS * step_s + load_s),
        heuristics_s=heuristics_s,
        search_s=config.budget_s,
        table_s=num_rows * (num_rounds * step_s + load_s),
    )


def one_device_step_s(graph: OpGraph, host: Host) -> float | None:
    """Seconds that a step on one device takes, from an eager one there; None where plain PyTorch cannot run it."""
    try:
        eager = EagerStep(graph, host, num_threads=max(len(host.devices[0].cores), 1))
        step_s = eager()
        if step_s < LONG_STEP_S:  # the first takes long for other reasons
            step_s = min(step_s, eager())
    except RlplaceError:  # it has no values, or does not fit on one device
        return None
    return step_s


def ahead(
    expected: Durations,
    methods: tuple[str, ...],
    *,
    is_simulated: bool,
    whole: str,
    evaluations: int | None = None,
    is_compiled: bool = True,
) -> str:
    """What people are told before a run.

    Args:
        expected: how long its parts take.
        methods: that search.
        is_simulated: whether they do so side by side.
        whole: what the sum of the parts is: `in all`, or `from here`.
        evaluations: placements that each method scores, where that ends the search and not the time.
        is_compiled: whether the kernels have been compiled already.
    """
    once = "" if is_compiled else "; kernels are compiled first, once"
    how = "search side by side" if is_simulated else "search in turn"
    who = f"{' and '.join(methods)} {how if methods[1:] else 'searches'}"
    if evaluations is not None:
        return f"{evaluations:,} placements for each method; {who}{once}"
    return f"about {format_clock(expected.total_s)} {whole}: {expected}; {who}{once}"


def afterwards(taken: Durations, expected: Durations, evaluations: int | None = None) -> str:
    """What people are told in the end; `evaluations` as of `ahead`."""
    if evaluations is not None:
        return f"took {format_clock(taken.total_s)}: {taken}"
    return f"took {format_clock(taken.total_s)}: {taken} (expected: about {format_clock(expected.total_s)})"
