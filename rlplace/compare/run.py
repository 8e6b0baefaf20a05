"""`compare`: runs search methods on one problem at equal budgets and sets their results beside a proven bound."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlplace.compare.find_row import Learning, find_row, spread_rows
from rlplace.compare.row import Comparison, Objective, Row
from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement, MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.eager_step import Other
from rlplace.measure.timing.race import RaceProtocol
from rlplace.runs.calibration import Known
from rlplace.search.op_order import shorten
from rlplace.search.task import Budget
from rlplace.seeds import check_seed
from rlplace.training.methods import LEARNED, METHODS

if TYPE_CHECKING:
    from rlplace.cluster import Cluster

RACE = RaceProtocol(max_rounds=15, min_rounds=15, hopeless=math.inf)
"""Rounds of the final race on a real host."""
DEFAULT_SECONDS = 60.0
OP_ORDER = "op-order"
"""A row of its own at the end: the best placement with a better op order."""
ORDER_EVALUATIONS = 300
"""Plans that the op order is improved with, where the budget is in seconds."""
ROUNDING = 1e-9
"""By what share two sums of the same seconds may differ."""


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Who takes part and what each may spend.

    Raises:
        UnknownName: no such method.
        InvalidValue: a budget or a number of seeds out of range.
    """

    methods: tuple[str, ...] = ("all",)
    """Names of methods, `op-order`, or `all`."""
    evaluations: int | None = None
    """Placements that each method may score with each seed."""
    seconds: float | None = None
    """Wall time of all methods and seeds together; 60 s where no budget is given."""
    seeds: int = 1
    """How many seeds each method that draws is run with: `seed`, `seed` + 1, ..."""
    objective: Objective = "latency"
    """What is minimised."""
    threads: int | None = None
    """Placements simulated at once; every core by default."""
    isolated: bool | None = None
    """Whether rows are measured in a worker process (on a real host); by default they are, unless the environment says
    `RLPLACE_IN_PROCESS=1`."""
    is_count_chosen: bool = False
    """Whether the problem's number of micro-batches was chosen by `auto`; rows that need more of them then say so."""
    seed: int = 0
    """Of every method's draws, the first of `seeds`; and of random ops."""
    measured: int | None = None
    """Plans that `learned` measures on a host of this machine; without them it has nothing to learn from."""

    def __post_init__(self) -> None:
        given: object = self.methods
        if isinstance(given, str):
            hint = f"Write `methods=({given!r},)`."
            raise InvalidValue("methods", given, "a tuple of names", where="compare", hint=hint)
        for name in self.methods:
            if name not in ("all", OP_ORDER) and name not in METHODS:
                raise UnknownName("method", name, ("all", OP_ORDER, *METHODS))
        if self.seeds < 1:
            raise InvalidValue("seeds", self.seeds, "at least 1", where="compare")
        check_seed(self.seed, where="compare")
        check_seed(self.seed + self.seeds - 1, where="the last of compare")
        if self.measured is not None and self.measured < 1:
            raise InvalidValue("measured", self.measured, "at least 1", where="compare")
        if self.measured is not None and LEARNED not in self.names:
            hint = f"Only `{LEARNED}` measures while it searches."
            raise InvalidValue("measured", self.measured, f"none without {LEARNED}", where="compare", hint=hint)
        if self.measured is not None and self.objective != "latency":
            hint = "What is measured is the time of a step."
            raise InvalidValue("objective", self.objective, "latency beside measured", where="compare", hint=hint)
        if self.evaluations is not None and self.evaluations < 1:
            raise InvalidValue("evaluations", self.evaluations, "at least 1", where="compare")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InvalidValue("seconds", self.seconds, "more than 0, and finite", where="compare")

    @property
    def total_s(self) -> float:
        """Wall time of the whole command; infinite where only evaluations count."""
        if self.seconds is not None:
            return self.seconds
        return DEFAULT_SECONDS if self.evaluations is None else math.inf

    @property
    def budget(self) -> dict[str, float | None]:
        """What `--json` says of the budget."""
        spent = {"evaluations": self.evaluations, "seconds": None if math.isinf(self.total_s) else self.total_s}
        return spent if self.measured is None else spent | {"measured": self.measured}

    @property
    def names(self) -> tuple[str, ...]:
        """The methods, `all` spelt out, each once."""
        listed = (name for word in self.methods for name in (METHODS if word == "all" else (word,)))
        return tuple(name for name in dict.fromkeys(listed) if name != OP_ORDER)

    @property
    def is_ordered(self) -> bool:
        """Whether the best placement's op order is improved at the end."""
        return self.objective == "latency" and not {"all", OP_ORDER}.isdisjoint(self.methods)

    @property
    def num_quick(self) -> int:
        """How many of `runs`, the first ones, need no budget."""
        return sum(METHODS[name].kind in ("baseline", "scheduler") for name in self.names)

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """Methods and seeds in the order in which they run: what needs no budget first."""
        kinds = {name: METHODS[name].kind for name in self.names}
        quick = [(name, self.seed) for name in self.names if kinds[name] in ("baseline", "scheduler")]
        spent = [
            (name, seed)
            for seed in range(self.seed, self.seed + self.seeds)
            for name in self.names
            if kinds[name] == "search" or (kinds[name] == "exact" and seed == self.seed)
        ]
        return (*quick, *spent)


def compare(
    problem: Problem,
    config: CompareConfig | None = None,
    *,
    workload: str = "",
    others: Sequence[tuple[Row, Other | None]] = (),
    on_row: Callable[[Row], None] | None = None,
    log: MeasurementLog | None = None,
    cluster: Cluster | None = None,
    known: Known | None = None,
) -> Comparison:
    """Every method's best placement; simulated, or on a host of this machine measured in one interleaved race.

    Methods search on the simulator; `learned` also measures, as many plans as `config` says. A method that lacks its
    extra, or raises, gives a row that says so. Ctrl-C ends the search: what was found until then is compared as
    simulated.

    Args:
        problem: what is placed; profiled (and calibrated) where the host is real.
        config: who takes part and what each may spend.
        workload: its name, for the record.
        others: rows of PyTorch baselines; one with a timer is measured in the same race.
        on_row: told each row as it comes, before it is measured.
        log: keeps what is measured.
        cluster: whose workers search, a run each; it is closed before anything is measured, on this machine alone.
        known: what was measured to calibrate, which `learned` learns from, too.

    Raises:
        UnknownName, InvalidValue: a mistake in `config`; or plans are to be measured on a simulated host, or while a
            cluster searches.
    """
    config = config or CompareConfig()
    if config.objective not in ("latency", "throughput"):
        raise InvalidValue(
            "objective",
            config.objective,
            "latency or throughput",
            where="compare",
            hint="max-load and piece-latency are for files of the published benchmark.",
        )
    check_measured(config, problem.host, is_spread=cluster is not None)
    simulator = Simulator(problem, objective=config.objective, threads=config.threads)
    learning = Learning(known, log, config.isolated, config.measured or 0)
    others = [(dataclasses.replace(row, seed=config.seed), timer) for row, timer in others]
    found: dict[int, Row] = {}
    is_interrupted = False
    try:
        for number, row in _searched(problem, simulator, config, found, cluster, learning):
            found[number] = row
            if on_row is not None:
                on_row(row)
    except KeyboardInterrupt:
        if not found:
            raise
        is_interrupted = True
    rows = [found[number] for number in sorted(found)]
    is_measured = not (problem.host.is_simulated or is_interrupted) and config.objective == "latency"
    if is_measured:
        if cluster is not None:
            cluster.close()
        rows = _measured(problem, simulator, rows, others, log, config)
    else:
        rows += [row for row, timer in others if timer is None]
    bound_s, bound = max((lower_bound_s(problem, config.objective), *((row.proved_s, row.method) for row in rows)))
    reached = min((row.value_s for row in rows if row.is_placement), default=math.inf)
    if bound_s * (1 - ROUNDING) <= reached < bound_s:  # a bound that is reached, summed up in another order
        bound_s = reached
    return Comparison(
        workload,
        problem.host.name,
        config.objective,
        tuple(rows),
        bound_s,
        bound,
        config.budget,
        is_measured,
        is_interrupted,
    )


def check_measured(config: CompareConfig, host: Host, *, is_spread: bool) -> None:
    """Refuses plans to be measured where nothing can be measured while methods search.

    Args:
        config: who takes part and what each may spend.
        host: where.
        is_spread: whether a cluster searches.

    Raises:
        InvalidValue: the host is simulated, or a cluster searches.
    """
    if config.measured is not None and (host.is_simulated or is_spread):
        expected = "none beside a cluster" if is_spread else f"none on {host.name}, which is simulated"
        raise InvalidValue("measured", config.measured, expected, where="compare")


def _searched(
    problem: Problem,
    simulator: Simulator,
    config: CompareConfig,
    before: Mapping[int, Row],
    cluster: Cluster | None,
    learning: Learning,
) -> Iterator[tuple[int, Row]]:
    """The number of a run and its row, then the best of `before`, which holds the rows so far, in a better order."""
    if cluster is None:
        yield from _one_by_one(problem, simulator, config, learning)
    else:
        yield from _spread(simulator, config, cluster)
    found = (before[number] for number in sorted(before) if before[number].ok)
    best = min(found, key=lambda row: row.value_s, default=None)
    if config.is_ordered and best is not None:
        yield len(config.runs), _ordered(problem, simulator, best, config.evaluations or ORDER_EVALUATIONS)


def _one_by_one(
    problem: Problem, simulator: Simulator, config: CompareConfig, learning: Learning
) -> Iterator[tuple[int, Row]]:
    deadline_s = time.monotonic() + config.total_s
    for number, (name, seed) in enumerate(config.runs):
        budget = _budget(config, deadline_s, len(config.runs) - number)
        chosen = config.is_count_chosen
        yield number, find_row(problem, simulator, name, seed, budget, is_count_chosen=chosen, learning=learning)


def _spread(simulator: Simulator, config: CompareConfig, cluster: Cluster) -> Iterator[tuple[int, Row]]:
    """Where time counts, searches begin when what needs no budget is done, and share what is left of it."""
    deadline_s = time.monotonic() + config.total_s
    cut = 0 if math.isinf(config.total_s) else config.num_quick
    for first, runs in ((0, config.runs[:cut]), (cut, config.runs[cut:])):
        if runs:
            budget = _budget(config, deadline_s, math.ceil(len(runs) / cluster.num_workers))
            rows = spread_rows(cluster, simulator, runs, budget, is_count_chosen=config.is_count_chosen)
            yield from ((first + number, row) for number, row in rows)


def _ordered(problem: Problem, simulator: Simulator, best: Row, evaluations: int) -> Row:
    assert best.devices is not None
    begin = time.monotonic()
    order = shorten(problem, best.devices, evaluations=evaluations)
    plan, outcome = simulator.plan_and_time(best.devices, order.priorities)
    rule = order.rule
    if best.plan is not None and best.value_s < outcome.step_time_s:  # it came with an order of its own
        plan, outcome, rule = best.plan, simulator.retime(best.plan), "the method itself"
    return Row(
        OP_ORDER,
        best.seed,
        outcome.status,
        outcome.step_time_s,
        evaluations,
        time.monotonic() - begin,
        outcome.peak_bytes,
        f"the placement of {best.method}, ordered by {rule}",
        devices=best.devices,
        plan=plan,
    )


def _budget(config: CompareConfig, deadline_s: float, left: int) -> Budget:
    """The evaluations of one run, and an equal share of the time that is left."""
    seconds = math.inf if math.isinf(deadline_s) else max((deadline_s - time.monotonic()) / left, 0.05)
    return Budget(evaluations=math.inf if config.evaluations is None else config.evaluations, seconds=seconds)


def _measured(
    problem: Problem,
    simulator: Simulator,
    rows: Sequence[Row],
    others: Sequence[tuple[Row, Other | None]],
    log: MeasurementLog | None,
    config: CompareConfig,
) -> list[Row]:
    """The rows with measured step times, equal placements measured once, all in one race with `others`."""
    lanes: dict[str, int] = {}
    plans: list[Plan] = []
    for row in rows:
        if row.plan is not None and row.ok and row.plan.fingerprint not in lanes:
            lanes[row.plan.fingerprint] = len(plans)
            plans.append(row.plan)
    timers = [timer for _, timer in others if timer is not None]
    evaluator = Evaluator(problem, simulator, seed=config.seed, log=log, isolated=config.isolated)
    try:
        outcomes = evaluator.measure_plans(plans, RACE, others=timers)
    finally:
        evaluator.close()
    timed = iter(outcomes[len(plans) :])
    measured = [
        row
        if row.plan is None or not row.ok
        else _timed(row, outcomes[lanes[row.plan.fingerprint]], simulated_s=row.value_s)
        for row in rows
    ]
    return measured + [row if timer is None else _timed(row, next(timed)) for row, timer in others]


def _timed(row: Row, outcome: Measurement, simulated_s: float | None = None) -> Row:
    return dataclasses.replace(
        row,
        status=outcome.status,
        value_s=outcome.step_time_s,
        spread_s=outcome.spread_s,
        why=outcome.why or row.why,
        simulated_s=simulated_s,
    )
