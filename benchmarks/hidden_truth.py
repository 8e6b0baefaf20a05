"""A truth that no method sees: python benchmarks/hidden_truth.py gpt2 --true hard:0 --measured 16.

Methods know a nominal problem on a simulated host and may measure a few plans; the score of each is the true step time
of the one plan that it names. `ROWS` are the methods. The true problem is described in docs/comparing.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from record import argument, mistakes_in_a_line, parse

from rlplace.cli.option_groups import only_json_on_stdout, print_json
from rlplace.compare.comparison import Comparison, Row, collected, row_or_failure
from rlplace.compare.run_compare import Output, method_words, say_row
from rlplace.errors import RunnerError, check_known, refuse_if
from rlplace.measure import Host, Measurement, Plan, Problem, Simulator, resolve_host
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.host_model import TracedMedians
from rlplace.measure.measurement import PlanMeasurer
from rlplace.measure.prediction_error import calibrate
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.truth import TrueTimer, Truth, check_no_gangs, true_problem
from rlplace.records import AtLeastOne, Positive, Seed, record
from rlplace.report.console import make_progress
from rlplace.search import METHODS, Budget, Task, find
from rlplace.search.methods import SEARCH, find_winners
from rlplace.search.task import BestSoFar
from rlplace.session.prepare import Steps, prepare
from rlplace.session.setup import ProblemOptions
from rlplace.training.config import AgentConfig
from rlplace.workloads import parse_workload


@record(frozen=True)
class TrueConfig:
    """The rows, the budget of each, and the truth.

    Raises:
        UnknownName: no such row.
        InvalidValue: a budget out of range.
    """

    truth: Truth
    """Kind and seed."""
    measured: AtLeastOne
    """Plans that each row may measure."""
    methods: tuple[str, ...] = ("all",)
    """Names of `ROWS`, or `all`."""
    evaluations: AtLeastOne | None = None
    """Placements that each row may simulate; as many as the agent takes by default."""
    seconds: Positive | None = None
    """Wall time of all rows together, in equal shares; no end by default."""
    threads: int = 1
    """Placements simulated at once."""
    seed: Seed | None = None
    """Of every row's own draws; that of the truth by default."""
    is_traced: bool = False
    """Whether measurements come with timelines of a traced step."""

    def __post_init__(self) -> None:
        for name in self.methods:
            check_known("method with a hidden truth", name, ("all", *ROWS))
            refuse_if(
                name == TRACED_COSTS and not self.is_traced,
                "trace",
                False,
                f"True beside {name}",
                where="compare",
                hint="Add --trace.",
            )

    @property
    def drawn_from(self) -> int:
        """The seed of every row's own draws."""
        return self.truth.seed if self.seed is None else self.seed

    @property
    def names(self) -> tuple[str, ...]:
        """The rows, `all` spelt out, each once, in the order in which they run."""
        named = self.methods
        if "all" in named:
            named = tuple(name for name in ROWS if self.is_traced or name != TRACED_COSTS)
        return tuple(name for name in ROWS if name in named)

    def budget(self) -> Budget:
        """Of one row."""
        evaluations = self.evaluations or AgentConfig().whole_evaluations(self.measured)
        seconds = math.inf if self.seconds is None else self.seconds / len(self.names)
        return Budget(evaluations, seconds, self.measured)


def check_host(host: Host) -> None:
    """Refuses this machine, where the truth is measured."""
    refuse_if(
        not host.is_simulated, "host", host.name, "a simulated host: a preset, or a host file", where="hidden truth"
    )


def compare_true(
    problem: Problem,
    config: TrueConfig,
    *,
    workload: str = "",
    on_row: Callable[[Row], None] | None = None,
) -> Comparison:
    """For every row the true step time of the one plan that it names, beside a bound of the true problem.

    A row that fails says so. Ctrl-C ends it: the rows that were done are compared.

    Args:
        problem: the nominal one, on a simulated host without gangs.
        config: the rows and the truth.
        workload: its name, for the record.
        on_row: told each row as it comes.

    Raises:
        InvalidValue: the host is real, or has gangs.
    """
    check_host(problem.host)
    true = true_problem(problem, config.truth)
    simulator, names = Simulator(problem, threads=config.threads), config.names
    coming = ((number, _row(name, simulator, true, config, config.budget())) for number, name in enumerate(names))
    rows, is_interrupted = collected(coming, {}, on_row)
    budget = config.budget()
    return Comparison(
        workload,
        problem.host.name,
        "latency",
        tuple(rows),
        *lower_bound_s(true),
        {"evaluations": budget.evaluations, "seconds": config.seconds, "measured": budget.measurements},
        is_interrupted=is_interrupted,
        truth=str(config.truth),
        is_traced=config.is_traced,
    )


@one_thread_here()
def _row(name: str, simulator: Simulator, true: Problem, config: TrueConfig, budget: Budget) -> Row:
    seed, timer = config.drawn_from, TrueTimer(true, config.truth.seed, is_traced=config.is_traced)
    trial = Trial(simulator.problem, simulator, Meter(timer, config.measured), budget, seed, config.is_traced)
    row = row_or_failure(name, seed, partial(_answered, name, trial, timer))
    return replace(row, plan_s=max(row.plan_s - trial.meter.seconds, 0.0), measured=timer.num_measured)


def _answered(name: str, trial: Trial, timer: TrueTimer) -> Row:
    begin = time.monotonic()
    answer = ROWS[name](trial)
    spent_s = time.monotonic() - begin
    if answer.plan is None:
        why = "found no placement that fits into memory"
        return Row(name, trial.seed, "oom", math.inf, answer.evaluations, spent_s, why=why)
    outcome = timer.truth(answer.plan)
    return Row(
        name,
        trial.seed,
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
    )


LINES = 3
"""Facts that an agent learned about the host; a row names the surest, and what tracing cost."""
TRACED_COSTS = "traced-costs"
SURVEY = 0.1
"""Share of the simulated placements for the plans that are only traced."""
LEAST_FITTED = 4
"""Measured plans without which nothing is calibrated."""


class Meter:
    """A measurer that keeps its measurements, and refuses more than its budget.

    Attributes:
        kept: plans and measurements, in order.
        seconds: wall time spent measuring.
        history: the best measured step time wherever it improved.

    Args:
        measurer: measures plans.
        most: plans measured at most.
    """

    def __init__(self, measurer: PlanMeasurer, most: int) -> None:
        self.kept: list[tuple[Plan, Measurement]] = []
        self.seconds = 0.0
        self.history: list[BestSoFar] = []
        self._measurer, self._most, self._begin = measurer, most, time.monotonic()

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """One `Measurement` for each plan.

        Raises:
            RunnerError: more than may be measured.
        """
        if len(self.kept) + len(plans) > self._most:
            raise RunnerError(f"{len(self.kept) + len(plans)} measurements were asked for, {self._most} are allowed")
        begin = time.monotonic()
        outcomes = self._measurer.measure_plans(plans)
        self.seconds += time.monotonic() - begin
        for plan, outcome in zip(plans, outcomes, strict=True):
            self.kept.append((plan, outcome))
            if outcome.ok and outcome.step_time_s < (self.history[-1].best_s if self.history else math.inf):
                self.history.append(BestSoFar(0, len(self.kept), time.monotonic() - self._begin, outcome.step_time_s))
        return outcomes

    @property
    def best(self) -> Plan | None:
        """The plan with the least measured step time; None where none fitted into memory."""
        return min((pair for pair in self.kept if pair[1].ok), key=lambda pair: pair[1].step_time_s, default=(None,))[0]


@dataclass(frozen=True)
class Trial:
    """The problem and the budget of a row.

    Attributes:
        problem: the nominal one.
        simulator: of the nominal problem; makes plans.
        meter: measures on the true one.
        budget: simulated placements, seconds and measurements.
        seed: of every draw.
        is_traced: whether measurements have timelines.
    """

    problem: Problem
    simulator: Simulator
    meter: Meter
    budget: Budget
    seed: int
    is_traced: bool = False

    def halved(self) -> Budget:
        """Half of the simulated placements and seconds."""
        return Budget(max(self.budget.evaluations // 2, 1), self.budget.seconds / 2)

    def measure(self, placements: Iterable[NDArray[np.int32]], simulator: Simulator | None = None) -> list[Measurement]:
        """Measures the plans that a simulator makes of placements (N,); the nominal one by default."""
        return self.meter.measure_plans([(simulator or self.simulator).plan(devices) for devices in placements])


@dataclass(frozen=True)
class Answer:
    """The result of a row.

    Attributes:
        plan: the one plan that it names; None where it has none.
        evaluations: placements simulated.
        why: a remark: facts that it learned.
    """

    plan: Plan | None
    evaluations: int
    why: str = ""


def _single(trial: Trial) -> Answer:
    found = find(trial.problem, "single", trial.simulator, seed=trial.seed)
    return Answer(None if found.devices is None else trial.simulator.plan(found.devices), found.evaluations)


def _portfolio(trial: Trial) -> Answer:
    found = find_winners(trial.problem, trial.simulator, trial.budget, trial.budget.measurements, seed=trial.seed)
    trial.measure(found.devices)
    return Answer(trial.meter.best, found.evaluations)


@dataclass(frozen=True)
class _OnTheHost:
    """A step timer that measures the placements that it is asked to score."""

    trial: Trial
    threads: int = 1

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        return np.array([outcome.step_time_s for outcome in self.trial.measure(placements)])


def _portfolio_measured(trial: Trial) -> Answer:
    budget = Budget(trial.budget.measurements, trial.budget.seconds)
    METHODS[SEARCH].run(Task(trial.problem, _OnTheHost(trial), budget, seed=trial.seed))
    return Answer(trial.meter.best, 0)


def _calibrated(trial: Trial) -> Answer:
    """Half of everything for plans to calibrate on, half for a search on the calibrated problem."""
    evaluations, problem = 0, trial.problem
    if first := trial.budget.measurements // 2:
        found = find_winners(problem, trial.simulator, trial.halved(), first, seed=trial.seed)
        trial.measure(found.devices)
        evaluations = found.evaluations
    fitted = [(plan, outcome.step_time_s) for plan, outcome in trial.meter.kept if outcome.ok]
    if len(fitted) >= LEAST_FITTED:
        plans, times_s = zip(*fitted, strict=True)
        problem = calibrate(problem, plans, times_s, seed=trial.seed).problem
    simulator, seen = Simulator(problem, threads=trial.simulator.threads), [p.devices for p, _ in trial.meter.kept]
    left = trial.budget.measurements - len(trial.meter.kept)
    found = find_winners(problem, simulator, trial.halved(), left, seed=trial.seed, seen=seen)
    trial.measure(found.devices, simulator)
    return Answer(trial.meter.best, evaluations + found.evaluations)


def _traced_costs(trial: Trial) -> Answer:
    """A first quarter of the plans, four at most, to trace; then a search on the medians of what the traces say."""
    problem, seen, first = trial.problem, TracedMedians(trial.problem), min(max(trial.budget.measurements // 4, 1), 4)
    budget = Budget(max(round(trial.budget.evaluations * SURVEY), 1), trial.budget.seconds * SURVEY)
    found = find_winners(problem, trial.simulator, budget, first, seed=trial.seed)
    for outcome in trial.measure(found.devices):
        if outcome.timeline is not None:
            seen.add(outcome.timeline)
    evaluations, left = found.evaluations, trial.budget.measurements - len(trial.meter.kept)
    budget = Budget(max(trial.budget.evaluations - evaluations, 1), trial.budget.seconds * (1 - SURVEY))
    simulator = Simulator(seen.problem(), threads=trial.simulator.threads)
    known = [plan.devices for plan, _ in trial.meter.kept]
    found = find_winners(simulator.problem, simulator, budget, left, seed=trial.seed, seen=known)
    trial.measure(found.devices, simulator)
    return Answer(trial.meter.best, evaluations + found.evaluations)


def _learned(trial: Trial, **changes: bool) -> Answer:
    from rlplace.training.agent import AgentConfig, learn_host

    config = AgentConfig(**changes)
    result = learn_host(
        trial.problem, trial.meter, trial.budget, seed=trial.seed, config=config, is_traced=trial.is_traced
    )
    lines = result.say()
    cost = lines[LINES:][-1:] if trial.is_traced else []  # the last line
    return Answer(result.plan, result.evaluations, "; ".join([*lines[:LINES], *cost]))


ROWS: Mapping[str, Callable[[Trial], Answer]] = {
    "single": _single,
    "portfolio": _portfolio,
    "portfolio-measured": _portfolio_measured,
    "calibrated": _calibrated,
    TRACED_COSTS: _traced_costs,
    "learned": _learned,
    "learned-no-prior": partial(_learned, is_prior=False),
    "learned-mean": partial(_learned, is_thompson=False),
    "learned-no-permutations": partial(_learned, is_permuted=False),
}
"""Rows by name, in the order in which they run."""


def main(words: Sequence[str] | None = None) -> int:
    options = parse(
        __doc__,
        argument("workload", help="as of `rlplace compare`"),
        argument("--host", default="4xV100-pcie", help="a preset, or a host file"),
        argument("--true", required=True, help="KIND:SEED: moderate, hard, misfit or in-place"),
        argument("--measured", type=int, required=True, help="plans that each method may measure"),
        argument("--methods", default="all"),
        argument("--evaluations", type=int, help="placements that each method may simulate"),
        argument("--seconds", type=float, help="of all methods together"),
        argument("--trace", action="store_true", help="measurements have timelines"),
        argument("--seed", type=int, help="of every method's draws; that of the truth by default"),
        argument("--workload-seed", type=int, default=0),
        argument("--save", type=Path, help="a folder for METHOD-SEED.placement.json"),
        argument("--plot", type=Path, help="a PNG file for every method's best so far"),
        argument("--json", action="store_true"),
        argument("--quiet", action="store_true"),
        words=words,
    )
    with only_json_on_stdout() if options.json else nullcontext():
        return _compared(options)


def _compared(options: argparse.Namespace) -> int:
    rows = method_words(options.methods, ROWS, "method with a hidden truth")
    config = TrueConfig(
        Truth.parse(options.true),
        options.measured,
        rows,
        options.evaluations,
        options.seconds,
        seed=options.seed,
        is_traced=options.trace,
    )
    spec, host = parse_workload(options.workload), resolve_host(options.host)
    check_host(host)
    check_no_gangs(host)
    output = Output(options.save, options.plot, options.quiet, not (options.quiet and options.json))
    output.check()
    progress = make_progress(is_quiet=options.quiet)
    steps = Steps(spec, host, options.workload_seed)
    problem = prepare(steps, progress.say, ProblemOptions(), evaluations=config.evaluations).problem
    progress.say(f"truth {config.truth}")
    told = compare_true(problem, config, workload=str(spec), on_row=lambda row: progress.say(say_row(row)))
    result = output.conclude(told, true_problem(problem, config.truth), progress)
    if options.json:
        print_json(result | {"seed": config.drawn_from, "workload_seed": options.workload_seed})
    return 130 if told.is_interrupted else 0


if __name__ == "__main__":
    with mistakes_in_a_line("hidden_truth"):
        sys.exit(main())
