"""`compare_true`: methods that know a nominal problem and may measure a little, judged by a truth that none sees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlplace.compare.row import Comparison, Row
from rlplace.compare.true_rows import ROWS, Meter, Trial
from rlplace.errors import InvalidValue, MissingExtra, UnknownName, UserError
from rlplace.measure.bounds.bounds import lower_bound_s
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import TrueTimer, Truth, true_problem
from rlplace.search.failure import Failure
from rlplace.search.task import Budget
from rlplace.training.agent.config import AgentConfig


@dataclass(frozen=True)
class TrueConfig:
    """Who takes part, what each may spend, and what is true.

    Raises:
        UnknownName: no such row.
        InvalidValue: a budget out of range.
    """

    truth: Truth
    """Kind and seed; every row's own draws have the same seed."""
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

    def __post_init__(self) -> None:
        given: object = self.methods
        if isinstance(given, str):
            hint = f"Write `methods=({given!r},)`."
            raise InvalidValue("methods", given, "a tuple of names", where="compare", hint=hint)
        for name in self.methods:
            if name != "all" and name not in ROWS:
                raise UnknownName("method with a hidden truth", name, ("all", *ROWS))
        if self.measured < 1:
            raise InvalidValue("measured", self.measured, "at least 1", where="compare")
        if self.evaluations is not None and self.evaluations < 1:
            raise InvalidValue("evaluations", self.evaluations, "at least 1", where="compare")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise InvalidValue("seconds", self.seconds, "more than 0, and finite", where="compare")

    @property
    def names(self) -> tuple[str, ...]:
        """The rows, `all` spelt out, each once, in the order in which they run."""
        named = ROWS if "all" in self.methods else self.methods
        return tuple(name for name in ROWS if name in named)

    @property
    def budget(self) -> Budget:
        """Of one row."""
        evaluations = self.evaluations or AgentConfig().whole_evaluations(self.measured)
        seconds = math.inf if self.seconds is None else self.seconds / len(self.names)
        return Budget(evaluations, seconds, self.measured)


def compare_true(
    problem: Problem, config: TrueConfig, *, workload: str = "", on_row: Callable[[Row], None] | None = None
) -> Comparison:
    """For every row the true step time of the one plan that it names, beside a bound of the true problem.

    A row that fails says so. Ctrl-C ends it: the rows that were done are compared.

    Args:
        problem: the nominal one, on a simulated host without gangs.
        config: who takes part and what is true.
        workload: its name, for the record.
        on_row: told each row as it comes.

    Raises:
        InvalidValue: the host is real, or has gangs.
    """
    if not problem.host.is_simulated:
        raise InvalidValue("host", problem.host.name, "a simulated host: a preset, or a host file", where="compare")
    true = true_problem(problem, config.truth)
    rows: list[Row] = []
    is_interrupted = False
    try:
        for row in _rows(problem, true, config):
            rows.append(row)
            if on_row is not None:
                on_row(row)
    except KeyboardInterrupt:
        if not rows:
            raise
        is_interrupted = True
    bound_s, bound = lower_bound_s(true)
    budget, seconds = config.budget, config.seconds
    spent = {"evaluations": budget.evaluations, "seconds": seconds, "measured": budget.measurements}
    return Comparison(
        workload,
        problem.host.name,
        "latency",
        tuple(rows),
        bound_s,
        bound,
        spent,
        is_interrupted=is_interrupted,
        truth=str(config.truth),
    )


def _rows(problem: Problem, true: Problem, config: TrueConfig) -> Iterator[Row]:
    simulator = Simulator(problem, threads=config.threads)
    for name in config.names:
        timer = TrueTimer(true, config.truth.seed)
        yield _row(
            name, Trial(problem, simulator, Meter(timer, config.measured), config.budget, config.truth.seed), timer
        )


def _row(name: str, trial: Trial, timer: TrueTimer) -> Row:
    begin, seed = time.monotonic(), trial.seed
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
