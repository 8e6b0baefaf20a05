"""How long a run is going to take, from the time of one step: told before it begins.

`Durations`: how long the parts of a run take, as expected before it begins and as they took in the end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from rlplace.errors import RlplaceError
from rlplace.graphs import OpGraph
from rlplace.measure import Host, RaceProtocol
from rlplace.measure.timing.eager_step import EagerStep
from rlplace.measure.timing.verdict import USUAL_ROUNDS, judged_rounds
from rlplace.say import format_clock
from rlplace.session.calibrate import LEAST, LEAST_TRACED
from rlplace.training.config import TrainConfig

PROFILED_STEPS = 15
"""Steps that are traced on each kind of device, those before the first that counts included."""
CALIBRATION_STEPS = 6
"""Steps of each placement that the simulator is calibrated on; as many with a traced one, which has fewer rounds."""
LOAD_S_PER_OP = 0.05e-3
"""Seconds that it takes to make code of a plan, for each of its ops."""
HEURISTICS_S = 3.0
"""Seconds of the heuristics, and before them of starting the process that measures, while kernels are read from
disk."""
COMPILING_S = 24.0
"""The same the first time, when kernels are compiled instead."""
PROFILING_SHARE = CALIBRATION_SHARE = COMPILING_SHARE = JUDGING_SHARE = 0.2
TABLE_SHARE = 0.15
"""Parts of a limit for all of a run that profiling, calibration, `torch.compile`, the verdict and the final table may
take ..."""
LEAST_SEARCH_SHARE = 0.1
"""... and the least share of the search, however long the others take."""
LEAST_RACED = 6
"""The least that the final table measures: the reference, two placements that were searched, one device,
and plain PyTorch with all threads and with one."""
LEAST_RACE_S = 1.0
"""Seconds that the final table may take in any case: short steps cost little."""
NUM_JUDGED = 3
"""Steps that are judged in one race, mostly: the best placement, one device and plain PyTorch."""
COMPILING_S_PER_OP = 0.02
"""The least that `torch.compile` takes for each op of a step: if that is too much, it is not tried."""
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
    warmup = RaceProtocol().warmup if config.total_s is None else 1
    rounds, num_raced = config.search.table_rounds, num_rows
    profiling_s = num_kinds * (PROFILED_STEPS * step_s + load_s)
    if config.total_s is not None:
        profiling_s = min(profiling_s, max(PROFILING_SHARE * config.total_s, num_kinds * (2 * step_s + load_s)))
        num_raced, rounds = race_within(
            max(TABLE_SHARE * config.total_s, LEAST_RACE_S), step_s, load_s, num_rows, rounds
        )
    return Durations(
        profiling_s=profiling_s,
        calibration_s=config.num_calibrated * (CALIBRATION_STEPS * step_s + load_s * (1 + config.is_traced)),
        heuristics_s=heuristics_s,
        search_s=config.budget_s,
        table_s=num_raced * ((rounds + warmup) * step_s + load_s) + verdict_s(graph, host, config, step_s),
    )


def verdict_s(graph: OpGraph, host: Host, config: TrainConfig, step_s: float) -> float:
    """Seconds of the race that gives the verdict, and of compiling for it; arguments are those of `forecast`."""
    rounds = judged_rounds(judging_s(config), NUM_JUDGED * step_s)
    load_s = LOAD_S_PER_OP * graph.num_ops
    return NUM_JUDGED * ((rounds + 1) * step_s + load_s) + compiling_s(graph, host, config, step_s)


def judging_s(config: TrainConfig) -> float:
    """Seconds, at most, for the race that gives the verdict."""
    return limit_s(config.budget_s) if config.total_s is None else JUDGING_SHARE * config.total_s


def compiling_s(graph: OpGraph, host: Host, config: TrainConfig, step_s: float) -> float:
    """Seconds that `torch.compile` may take before the verdict; 0 where it is not tried: on GPUs, where it takes longer
    than that, and where there is hardly time for the race. Arguments are those of `forecast`."""
    most_s = COMPILING_SHARE * (config.total_s or config.budget_s)
    is_cpu = all(device.backend == "cpu" for device in host.devices)
    is_roomy = judged_rounds(judging_s(config), NUM_JUDGED * step_s) >= USUAL_ROUNDS
    return most_s if is_cpu and is_roomy and COMPILING_S_PER_OP * graph.num_ops <= most_s else 0.0


def within(
    graph: OpGraph,
    host: Host,
    config: TrainConfig,
    step_s: float,
    *,
    num_rows: int,
    is_profiled: bool = True,
    is_compiled: bool = True,
) -> tuple[TrainConfig, Durations]:
    """`config` with as much calibration and search as its `total_s` has room for, and the expected durations.

    Kernels that have to be compiled take their time beside `total_s`.

    Arguments are those of `forecast`; a configuration without `total_s` stays as it is.
    """
    expected = partial(
        forecast, graph, host, step_s=step_s, num_rows=num_rows, is_profiled=is_profiled, is_compiled=is_compiled
    )
    if (total_s := config.total_s) is not None:
        each_s = CALIBRATION_STEPS * step_s + LOAD_S_PER_OP * graph.num_ops * (1 + config.is_traced)
        room = int(CALIBRATION_SHARE * total_s / max(each_s, 1e-9))
        count = min(config.num_calibrated, room) if room >= least_calibrated(config) else 0
        config = dataclasses.replace(config, search=dataclasses.replace(config.search, num_calibrated=count))
        others = dataclasses.replace(expected(config), search_s=0.0, heuristics_s=HEURISTICS_S)
        config = searching_within(config, total_s - others.total_s)
    return config, expected(config)


def least_calibrated(config: TrainConfig) -> int:
    """Placements that are calibrated on, at least, where any are."""
    return LEAST_TRACED if config.is_traced else LEAST


def searching_within(config: TrainConfig, left_s: float, spent_s: float = 0.0) -> TrainConfig:
    """`config` with a search of at most `left_s`, and no less than its share of `total_s`; itself without a limit.

    `spent_s`, the seconds before an interruption, is part of its budget, but not of `total_s`.
    """
    if config.total_s is None:
        return config
    most_s = max(left_s, LEAST_SEARCH_SHARE * config.total_s) + spent_s
    return dataclasses.replace(config, budget_s=min(config.budget_s, most_s))


def within_rest(config: TrainConfig, begin_s: float) -> TrainConfig:
    """`config` with the rest of its `total_s`, which began at `begin_s` of the monotonic clock."""
    if config.total_s is None:
        return config
    left_s = config.total_s - (time.monotonic() - begin_s)
    return dataclasses.replace(config, total_s=max(left_s, LEAST_SEARCH_SHARE * config.total_s))


def race_within(room_s: float, step_s: float, load_s: float, count: int, rounds: int) -> tuple[int, int]:
    """How many of `count` contenders, and how many of `rounds`, a race has time for after one step of each.

    >>> race_within(30.0, 1.0, 0.0, 9, 25), race_within(2.0, 1.0, 0.0, 9, 25), race_within(9e3, 1.0, 0.0, 9, 25)
    ((9, 2), (6, 1), (9, 25))
    """
    raced = min(max(int(room_s / (2 * step_s + load_s)), LEAST_RACED), count)
    fitting = int((room_s - raced * (step_s + load_s)) / (raced * step_s))
    return raced, min(max(fitting, 1), rounds)


def one_device_step_s(graph: OpGraph, host: Host) -> float | None:
    """Seconds that a step on one device takes, from an eager one there; None where plain PyTorch cannot run it."""
    try:
        eager = EagerStep(graph, host, num_threads=max(len(host.devices[0].cores), 1))
        step_s = eager()
        return min(step_s, eager()) if step_s < LONG_STEP_S else step_s  # the first takes long for other reasons
    except RlplaceError:  # it has no values, or does not fit on one device
        return None


def ahead(
    expected: Durations,
    methods: tuple[str, ...],
    config: TrainConfig,
    *,
    is_simulated: bool,
    whole: str,
    is_compiled: bool = True,
) -> str:
    """The message for people before a run.

    Args:
        expected: how long its parts take.
        methods: that search.
        config: of the run.
        is_simulated: whether they do so side by side.
        whole: the words for the sum of the parts: `in all`, or `from here`.
        is_compiled: whether the kernels have been compiled already.
    """
    once = "" if is_compiled else "; kernels are compiled first, once"
    how = "search side by side" if is_simulated else "search in turn"
    who = f"{' and '.join(methods)} {how if methods[1:] else 'searches'}"
    budget, total_s = f"`budget` of the search {format_clock(config.budget_s)}", config.total_s
    limit = budget if total_s is None else f"within a `total` of {format_clock(total_s)}"
    spent = f"about {format_clock(expected.total_s)} {whole}, {limit}: {expected}"
    return (
        f"{spent if config.evaluations is None else f'{config.evaluations:,} placements for each method'}; {who}{once}"
    )


def afterwards(taken: Durations, expected: Durations, evaluations: int | None = None) -> str:
    """The message for people at the end; `evaluations` as of the configuration."""
    beside = f" (expected: about {format_clock(expected.total_s)})" if evaluations is None else ""
    return f"took {format_clock(taken.total_s)}: {taken}{beside}"


LEAST_LIMIT_S = 20.0
"""A part that surrounds a search is given so long at least, however short the search."""


def limit_s(budget_s: float) -> float:
    """Seconds after which calibration, or the final table, is cut short: no longer than the search, within reason.

    On a busy machine either may take many times the expected seconds.
    """
    return max(budget_s, LEAST_LIMIT_S)


@dataclass(frozen=True)
class Durations:
    """Seconds of each part of a run; 0 for a part that the run does not have.

    Example:
        >>> print(Durations(calibration_s=12.0, search_s=150.0))
        calibration 0:12, search 2:30
    """

    profiling_s: float = 0.0
    """Measurement of op and link times, and with `auto` the choice of micro-batches."""
    calibration_s: float = 0.0
    """Measurement of placements before the search, and the fit to them."""
    heuristics_s: float = 0.0
    """Placements of heuristics, and loading the kernels of searches from disk, or compiling them the first time."""
    search_s: float = 0.0
    """The search of all methods, with measurements."""
    table_s: float = 0.0
    """The final table, the verdict, and the timeline of the best placement."""

    @property
    def total_s(self) -> float:
        """All parts together."""
        return float(sum(asdict(self).values()))

    def to_dict(self) -> dict[str, float]:
        """The parts and `total_s`, as in `result.json`."""
        return {**asdict(self), "total_s": self.total_s}

    def __str__(self) -> str:
        shown = {name: seconds for name, seconds in asdict(self).items() if seconds >= 0.5 or name == "search_s"}
        return ", ".join(f"{name.removesuffix('_s')} {format_clock(seconds)}" for name, seconds in shown.items())


class Stopwatch:
    """Times one part after another.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()

    def lap_s(self) -> float:
        """Seconds since the last lap, or since it was made."""
        before, self._since_s = self._since_s, self._clock()
        return self._since_s - before
