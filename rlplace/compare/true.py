"""`compare_true`: methods that know a nominal problem and may measure a little, judged by a truth that none sees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rlplace.compare.row import Comparison, Row
from rlplace.compare.true_rows import ROWS, Meter, Trial
from rlplace.errors import InvalidValue, MissingExtra, UnknownName, UserError
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.truth import TrueTimer, Truth, true_problem
from rlplace.search.task import Budget, Failure
from rlplace.seeds import check_seed
from rlplace.training.agent.config import AgentConfig

if TYPE_CHECKING:
    from rlplace.cluster import Cluster


@dataclass(frozen=True)
class TrueConfig:
    """Who takes part, what each may spend, and what is true.

    Raises:
        UnknownName: no such row.
        InvalidValue: a budget out of range.
    """

    truth: Truth
    """Kind and seed."""
    measured: int
    """Plans that each row may measure."""
    methods: tuple[str, ...] = ("all",)
    """Names of `ROWS`, or `all`."""
    evaluations: int | None = None
    """Placements that each row may simulate; as many as the agent takes by default."""
    seconds: float | None = None
    """Wall time of all rows together, in equal shares; no end by default."""
    threads: int = 1
    """Placements simulated at once."""
    seed: int | None = None
    """Of every row's own draws; that of the truth by default."""

    def __post_init__(self) -> None:
        given: object = self.methods
        if isinstance(given, str):
            hint = f"Write `methods=({given!r},)`."
            raise InvalidValue("methods", given, "a tuple of names", where="compare", hint=hint)
        for name in self.methods:
            if name != "all" and name not in ROWS:
                raise UnknownName("method with a hidden truth", name, ("all", *ROWS))
        if self.seed is not None:
            check_seed(self.seed, where="compare")
        if self.measured < 1:
            raise InvalidValue("measured", self.measured, "at least 1", where="compare")
        if self.evaluations is not None and self.evaluations < 1:
            raise InvalidValue("evaluations", self.evaluations, "at least 1", where="compare")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InvalidValue("seconds", self.seconds, "more than 0, and finite", where="compare")

    @property
    def drawn_from(self) -> int:
        """The seed of every row's own draws."""
        return self.truth.seed if self.seed is None else self.seed

    @property
    def names(self) -> tuple[str, ...]:
        """The rows, `all` spelt out, each once, in the order in which they run."""
        named = ROWS if "all" in self.methods else self.methods
        return tuple(name for name in ROWS if name in named)

    @property
    def budget(self) -> Budget:
        """Of one row, where they run one after the other."""
        return self.budget_beside(1)

    def budget_beside(self, count: int) -> Budget:
        """Of one row, where `count` of them run at once."""
        evaluations = self.evaluations or AgentConfig().whole_evaluations(self.measured)
        seconds = math.inf if self.seconds is None else self.seconds / math.ceil(len(self.names) / count)
        return Budget(evaluations, seconds, self.measured)


def compare_true(
    problem: Problem,
    config: TrueConfig,
    *,
    workload: str = "",
    on_row: Callable[[Row], None] | None = None,
    cluster: Cluster | None = None,
) -> Comparison:
    """For every row the true step time of the one plan that it names, beside a bound of the true problem.

    A row that fails says so. Ctrl-C ends it: the rows that were done are compared.

    Args:
        problem: the nominal one, on a simulated host without gangs.
        config: who takes part and what is true.
        workload: its name, for the record.
        on_row: told each row as it comes.
        cluster: whose workers have a row each; without a limit in seconds the rows are those of this machine.

    Raises:
        InvalidValue: the host is real, or has gangs.
    """
    if not problem.host.is_simulated:
        raise InvalidValue("host", problem.host.name, "a simulated host: a preset, or a host file", where="compare")
    true = true_problem(problem, config.truth)
    found: dict[int, Row] = {}
    is_interrupted = False
    try:
        for number, row in _rows(problem, true, config) if cluster is None else _spread(problem, config, cluster):
            found[number] = row
            if on_row is not None:
                on_row(row)
    except KeyboardInterrupt:
        if not found:
            raise
        is_interrupted = True
    bound_s, bound = lower_bound_s(true)
    budget, seconds = config.budget, config.seconds
    spent = {"evaluations": budget.evaluations, "seconds": seconds, "measured": budget.measurements}
    return Comparison(
        workload,
        problem.host.name,
        "latency",
        tuple(found[number] for number in sorted(found)),
        bound_s,
        bound,
        spent,
        is_interrupted=is_interrupted,
        truth=str(config.truth),
    )


def _rows(problem: Problem, true: Problem, config: TrueConfig) -> Iterator[tuple[int, Row]]:
    simulator = Simulator(problem, threads=config.threads)
    for number, name in enumerate(config.names):
        yield number, _row(name, simulator, true, config, config.budget)


def _spread(problem: Problem, config: TrueConfig, cluster: Cluster) -> Iterator[tuple[int, Row]]:
    budget = config.budget_beside(cluster.num_workers)
    return cluster.map(partial(_row_alone, problem, config, budget), config.names)


def _row_alone(problem: Problem, config: TrueConfig, budget: Budget, name: str) -> Row:
    with one_thread_here():
        true, simulator = true_problem(problem, config.truth), Simulator(problem, threads=config.threads)
        return _row(name, simulator, true, config, budget)


def _row(name: str, simulator: Simulator, true: Problem, config: TrueConfig, budget: Budget) -> Row:
    seed, timer = config.drawn_from, TrueTimer(true, config.truth.seed)
    trial = Trial(simulator.problem, simulator, Meter(timer, config.measured), budget, seed)
    begin = time.monotonic()
    try:
        answer = ROWS[name](trial)
    except MissingExtra as error:
        return Row(name, seed, "skipped", why=str(error), measured=timer.num_measured)
    except UserError:
        raise
    except Exception as error:  # whatever it is: a row that failed is one row, not the table
        failed, spent_s = Failure.of(error), time.monotonic() - begin - trial.meter.seconds
        return Row(
            name,
            seed,
            "error",
            plan_s=spent_s,
            why=failed.why,
            measured=timer.num_measured,
            traceback=failed.traceback,
        )
    spent_s = time.monotonic() - begin - trial.meter.seconds
    if answer.plan is None:
        why = "found no placement that fits into memory"
        return Row(name, seed, "oom", math.inf, answer.evaluations, spent_s, why=why, measured=timer.num_measured)
    outcome = timer.truth(answer.plan)
    return Row(
        name,
        seed,
        outcome.status,
        outcome.step_time_s,
        answer.evaluations,
        spent_s,
        outcome.peak_bytes,
        outcome.why or answer.why,
        history=tuple(trial.meter.history),
        simulated_s=trial.simulator.retime(answer.plan).step_time_s,
        devices=answer.plan.devices,
        plan=answer.plan,
        measured=timer.num_measured,
    )
