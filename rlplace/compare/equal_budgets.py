"""`compare`: runs search methods on one problem at equal budgets and sets their results beside a proven bound.

`find_row`: one method with one seed on one problem, as a row; `spread_rows`: many of them, on a cluster.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Literal

from rlplace.cluster import Cluster
from rlplace.compare.comparison import Comparison, Objective, Row, RowStatus, collected, row_or_failure
from rlplace.errors import InvalidValue, check_known, refuse_if
from rlplace.measure import Host, Measurement, Problem, RaceProtocol, Simulator
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.timing.eager_step import EagerRecipe, Other
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.timing.verdict import JUDGING_S, SpeedVerdict
from rlplace.records import LARGEST_SEED, AtLeastOne, Positive, Seed, record
from rlplace.say import counted
from rlplace.search import Budget, Method, Task, find
from rlplace.search.methods import adopt_methods
from rlplace.search.op_order import shorten
from rlplace.search.rules.baselines import best_single
from rlplace.search.task import TimedHost
from rlplace.session.calibrate import Known
from rlplace.session.session_records import tracing_words
from rlplace.training import SearchConfig
from rlplace.training.agent.agent import Agent
from rlplace.training.method_choice import LEARNED, METHODS
from rlplace.training.searches.racing_host import ROUND

RACE = RaceProtocol(max_rounds=15, min_rounds=15, hopeless=math.inf)
"""Rounds of the final race on a real host."""
DEFAULT_SECONDS = 60.0
OP_ORDER = "op-order"
"""A row of its own at the end: the best placement with a better op order."""
ORDER_EVALUATIONS = 300
"""Plans that the op order is improved with, where the budget is in seconds."""
ROUNDING = 1e-9
"""The share by which two sums of the same seconds may differ."""
Run = tuple[str, int]
"""A method and a seed."""


@record(frozen=True)
class CompareConfig:
    """The methods, and the budget of each.

    Raises:
        UnknownName: no such method or objective.
        InvalidValue: a budget or a number of seeds out of range.
    """

    methods: tuple[str, ...] = ("all",)
    """Names of methods, `op-order`, or `all`."""
    evaluations: AtLeastOne | None = None
    """Placements that each method may score with each seed."""
    seconds: Positive | None = None
    """Wall time of all methods and seeds together; 60 s without any budget."""
    seeds: AtLeastOne = 1
    """Number of seeds for each random method: `seed`, `seed` + 1, ..."""
    objective: Objective = "latency"
    """The value that is minimised."""
    threads: int | None = None
    """Placements simulated at once; every core by default."""
    isolated: bool | None = None
    """Whether rows are measured in a worker process (on a real host); the default is True, or False with the
    environment variable `RLPLACE_IN_PROCESS=1`."""
    chosen: tuple[str, ...] = ()
    """What `auto` chose of the problem, `micro_batches` and `shards`; rows that need more of these then mention it."""
    seed: Seed = 0
    """Seed of all methods (the first of `seeds`), and of random ops."""
    measured: AtLeastOne | None = None
    """Plans that `learned` measures on a real host; it needs at least one."""
    is_traced: bool = True
    """Whether plans that are measured on a real host for calibration or `learned` also run a traced step."""

    def __post_init__(self) -> None:
        for name in self.methods:
            check_known("method", name, ("all", OP_ORDER, *METHODS))
        if self.seed + self.seeds - 1 > LARGEST_SEED:
            most = LARGEST_SEED - self.seed + 1
            raise InvalidValue("seeds", self.seeds, f"at most {most:,} from seed {self.seed} on", where="compare")
        refuse_if(
            self.measured is not None and LEARNED not in self.names,
            "measured",
            self.measured,
            f"none without {LEARNED}",
            where="compare",
            hint=f"Only `{LEARNED}` measures while it searches.",
        )
        refuse_if(
            self.measured is not None and self.objective != "latency",
            "objective",
            self.objective,
            "latency beside measured",
            where="compare",
            hint="What is measured is the time of a step.",
        )

    @property
    def total_s(self) -> float:
        """Wall time of the whole command; infinite if only evaluations count."""
        return self.seconds or (DEFAULT_SECONDS if self.evaluations is None else math.inf)

    @property
    def budget(self) -> dict[str, float | None]:
        """The budget as `--json` prints it."""
        seconds = None if math.isinf(self.total_s) else self.total_s
        measured = {} if self.measured is None else {"measured": self.measured}
        return {"evaluations": self.evaluations, "seconds": seconds, **measured}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the methods, with `all` expanded, without duplicates."""
        listed = (name for word in self.methods for name in (METHODS if word == "all" else (word,)))
        return tuple(name for name in dict.fromkeys(listed) if name != OP_ORDER)

    @property
    def is_ordered(self) -> bool:
        """Whether the best placement's op order is improved at the end."""
        return self.objective == "latency" and not {"all", OP_ORDER}.isdisjoint(self.methods)

    @property
    def quick_runs(self) -> tuple[Run, ...]:
        """The methods that need no budget, each with the first seed."""
        return tuple((name, self.seed) for name in self.names if METHODS[name].kind in ("baseline", "scheduler"))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Methods and seeds in the order in which they run: those without a budget first."""
        kinds = {name: METHODS[name].kind for name in self.names}
        return self.quick_runs + tuple(
            (name, seed)
            for seed in range(self.seed, self.seed + self.seeds)
            for name in self.names
            if kinds[name] == "search" or (kinds[name] == "exact" and seed == self.seed)
        )


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
    """The best placement of every method, simulated or, on a real host, measured in one interleaved race.

    Methods search with the simulator; `learned` also measures as many plans as `config` allows. If a method lacks its
    extra, or raises an exception, its row shows this. Ctrl-C ends the search: the placements found so far are compared
    with simulated times.

    Args:
        problem: the problem to place; profiled (and calibrated) on a real host.
        config: the methods, and the budget of each.
        workload: its name, for the record.
        others: rows of PyTorch baselines; one with a timer is measured in the same race.
        on_row: called with each row when it is found, before it is measured.
        log: stores measurements.
        cluster: its workers search, one run each; it is closed before the measurements, which run on this machine
            alone.
        known: the measured steps of calibration, from which `learned` learns, too.

    Raises:
        UnknownName, InvalidValue: a mistake in `config`; measurements on a simulated host, or together with a cluster.
    """
    config = config or CompareConfig()
    objective = check_on(problem.host, config, is_spread=cluster is not None)
    simulator = Simulator(problem, objective=objective, threads=config.threads)
    learn = None if config.measured is None else partial(_learned, simulator, config, known, log)
    others = [(dataclasses.replace(row, seed=config.seed), timer) for row, timer in others]
    found: dict[int, Row] = {}
    rows, is_interrupted = collected(_searched(simulator, config, found, cluster, learn), found, on_row)
    is_measured = not (problem.host.is_simulated or is_interrupted) and config.objective == "latency"
    verdict = None
    if is_measured:
        if cluster is not None:
            cluster.close()
        rows, verdict = _measured(simulator, rows, others, log, config)
    else:
        rows += [row for row, timer in others if timer is None]
    bound_s, bound = max((lower_bound_s(problem, objective), *((row.proved_s, row.method) for row in rows)))
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
        verdict=verdict,
    )


def check_on(host: Host, config: CompareConfig, *, is_spread: bool) -> Literal["latency", "throughput"]:
    """The objective, unless methods are asked for what they cannot do on a host.

    Args:
        host: where.
        config: the methods, and the budget of each.
        is_spread: whether a cluster searches.

    Raises:
        InvalidValue: an objective of the published benchmark, or plans to be measured while methods search, where the
            host is simulated or a cluster searches.
    """
    if config.objective not in ("latency", "throughput"):
        raise InvalidValue(
            "objective",
            config.objective,
            "latency or throughput",
            where="compare",
            hint="max-load and piece-latency are for files of the published benchmark.",
        )
    refuse_if(
        config.measured is not None and (host.is_simulated or is_spread),
        "measured",
        config.measured,
        "none beside a cluster" if is_spread else f"none on {host.name}, which is simulated",
        where="compare",
    )
    return config.objective


def _searched(
    simulator: Simulator,
    config: CompareConfig,
    before: Mapping[int, Row],
    cluster: Cluster | None,
    learn: Callable[[int, Budget], Row] | None,
) -> Iterator[tuple[int, Row]]:
    """The number of a run and its row, then the best of `before`, which holds the rows so far, in a better order."""
    if cluster is not None:
        yield from _on_cluster(simulator, config, cluster)
    else:
        deadline_s, chosen = time.monotonic() + config.total_s, config.chosen
        for number, (name, seed) in enumerate(config.runs):
            budget = _budget(config, deadline_s, len(config.runs) - number)
            yield number, find_row(simulator, name, seed, budget, chosen=chosen, learn=learn)
    found = (before[number] for number in sorted(before) if before[number].ok)
    best = min(found, key=lambda row: row.value_s, default=None)
    if config.is_ordered and best is not None:
        yield len(config.runs), _ordered(simulator, best, config.evaluations or ORDER_EVALUATIONS)


def _on_cluster(simulator: Simulator, config: CompareConfig, cluster: Cluster) -> Iterator[tuple[int, Row]]:
    """Where time counts, searches begin after the methods that need no budget, and share the remaining time."""
    deadline_s = time.monotonic() + config.total_s
    cut = 0 if math.isinf(config.total_s) else len(config.quick_runs)
    for first, runs in ((0, config.runs[:cut]), (cut, config.runs[cut:])):
        if runs:
            budget = _budget(config, deadline_s, math.ceil(len(runs) / cluster.num_workers))
            rows = spread_rows(cluster, simulator, runs, budget, chosen=config.chosen)
            yield from ((first + number, row) for number, row in rows)


def _ordered(simulator: Simulator, best: Row, evaluations: int) -> Row:
    assert best.devices is not None
    begin = time.monotonic()
    order = shorten(simulator.problem, best.devices, evaluations=evaluations)
    (plan, outcome), rule = simulator.plan_and_time(best.devices, order.priorities), order.rule
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
    simulator: Simulator,
    rows: Sequence[Row],
    others: Sequence[tuple[Row, Other | None]],
    log: MeasurementLog | None,
    config: CompareConfig,
) -> tuple[list[Row], SpeedVerdict | None]:
    """The rows with measured step times, equal placements measured once, all in one race with `others`; then the best
    of them beside one device and plain PyTorch, in a race of its own. The verdict is None where none ran."""
    plans = {row.plan.fingerprint: row.plan for row in rows if row.plan is not None and row.ok}
    timers = [timer for _, timer in others if timer is not None]
    with closing(
        Evaluator(simulator.problem, simulator, seed=config.seed, log=log, isolated=config.isolated)
    ) as evaluator:
        outcomes, verdict = evaluator.measure_plans(list(plans.values()), RACE, others=timers), None
        if ran := {name: each.step_time_s for name, each in zip(plans, outcomes) if each.ok}:
            single = simulator.plan(best_single(simulator.problem, simulator))
            recipes = {row.method: timer for row, timer in others if isinstance(timer, EagerRecipe)}
            best, most_s = plans[min(ran, key=ran.__getitem__)], JUDGING_S
            beside = {} if best.fingerprint == single.fingerprint else {"one device": single}
            _, verdict = evaluator.judge(best, beside, recipes, step_s=sum(ran.values()) / len(ran), most_s=most_s)
    timed, placed = iter(outcomes[len(plans) :]), dict(zip(plans, outcomes))
    measured = [
        row if row.plan is None or not row.ok else _timed(row, placed[row.plan.fingerprint], simulated_s=row.value_s)
        for row in rows
    ]
    return measured + [row if timer is None else _timed(row, next(timed)) for row, timer in others], verdict


def _timed(row: Row, outcome: Measurement, simulated_s: float | None = None) -> Row:
    return dataclasses.replace(
        row,
        status=outcome.status,
        value_s=outcome.step_time_s,
        spread_s=outcome.spread_s,
        why=outcome.why or row.why,
        simulated_s=simulated_s,
    )


def spread_rows(
    cluster: Cluster, simulator: Simulator, runs: Sequence[Run], budget: Budget, *, chosen: Collection[str] = ()
) -> Iterator[tuple[int, Row]]:
    """The number of each of `runs` and its row, as they end on the workers of a cluster.

    Under a budget of evaluations the rows are those of this machine, to the bit.

    Args:
        cluster: whose workers search, each with one simulator thread.
        simulator: of the problem.
        runs: methods and seeds.
        budget: of each run.
        chosen: as `find_row`.

    Raises:
        RunnerError: the cluster is lost.
    """
    methods = [METHODS[name] for name in dict(runs)]
    return cluster.map(partial(_search, methods, simulator.problem, simulator.objective, budget, chosen), runs)


def _search(
    methods: Sequence[Method],
    problem: Problem,
    objective: Literal["latency", "throughput"],
    budget: Budget,
    chosen: Collection[str],
    run: Run,
) -> Row:
    adopt_methods(methods)
    with one_thread_here():
        simulator = Simulator(problem, objective=objective, threads=1)
        return find_row(simulator, *run, budget, chosen=chosen)


_CHOSEN = {"micro_batches": "auto chose the whole batch", "shards": "auto chose whole ops"}


def find_row(
    simulator: Simulator,
    name: str,
    seed: int,
    budget: Budget,
    *,
    chosen: Collection[str] = (),
    learn: Callable[[int, Budget], Row] | None = None,
) -> Row:
    """The row of a method and a seed: a method that lacks its extra, or fails, gives one that says so.

    Args:
        simulator: of the problem.
        name: of the method.
        seed: of its draws.
        budget: of the method.
        chosen: what `auto` chose of the problem, as a row that needs more of it says.
        learn: the row of `learned` with a seed and a budget; None where nothing may be measured.
    """
    refused = METHODS[name].refusal(simulator.problem)
    is_chosen = refused is not None and refused.field in chosen
    why = "" if refused is None else _CHOSEN[refused.field] if is_chosen else str(refused)
    if name == LEARNED and learn is None and not (refused and chosen):
        ask = "a host of this machine" if simulator.problem.host.is_simulated else "`--measured N`"
        why = f"it learns from measured steps: that needs {ask}"
    if why:
        return Row(name, seed, "skipped", why=why)
    run = partial(learn, seed, budget) if name == LEARNED and learn else partial(_row, simulator, name, seed, budget)
    return row_or_failure(name, seed, run)


def _learned(
    simulator: Simulator,
    config: CompareConfig,
    known: Known | None,
    log: MeasurementLog | None,
    seed: int,
    budget: Budget,
) -> Row:
    """The row of `learned`, which measures: as in `train`, a share of its seconds is for simulated placements."""
    begin, problem = time.monotonic(), simulator.problem
    reference = best_single(problem, simulator)
    with closing(Evaluator(problem, simulator, reference, seed=seed, log=log, isolated=config.isolated)) as evaluator:
        race = partial(
            evaluator.measure_plans,
            protocol=dataclasses.replace(ROUND, num_traced=int(config.is_traced)),
            deadline_s=begin + budget.seconds,
            is_recalled=True,
        )
        host = TimedHost(evaluator.simulator, race, begin + budget.seconds - time.monotonic())
        searched = Budget(budget.evaluations, budget.seconds * SearchConfig.simulate_share, config.measured or 0)
        task = Task(problem, simulator, searched, seed=seed, host=host)
        result = METHODS[LEARNED].run(task, known=known, is_traced=config.is_traced)
    spent_s, count = time.monotonic() - begin, task.measurements
    if not isinstance(result, Agent) or result.plan is None:
        why = f"none of {count} plans ran to its end"
        return Row(LEARNED, seed, "error", evaluations=task.evaluations, plan_s=spent_s, why=why, measured=count)
    outcome = simulator.retime(result.plan)
    return Row(
        LEARNED,
        seed,
        "ok",
        outcome.step_time_s,
        task.evaluations,
        spent_s,
        outcome.peak_bytes,
        "; ".join(filter(None, (f"measured {counted(count, 'plan')}", tracing_words(host.outcomes)))),
        devices=result.plan.devices,
        plan=result.plan,
        measured=count,
    )


def _row(simulator: Simulator, name: str, seed: int, budget: Budget) -> Row:
    found = find(simulator.problem, name, simulator, budget, seed=seed)
    if found.devices is None:
        status: RowStatus = "oom"
        why = "found no placement that fits into memory"
        if found.evaluations == 0 and found.plan_s >= budget.seconds:
            status, why = "timeout", "its time was up before its first placement"
        elif found.evaluations == 0:
            is_free = simulator.problem.allowed is None
            status, why = "skipped", "it tried no placement" if is_free else "pins and exclusions leave it no placement"
        return Row(
            name,
            seed,
            status,
            evaluations=found.evaluations,
            plan_s=found.plan_s,
            why=why,
            proved_s=found.lower_bound_s,
        )
    plan = simulator.plan(found.devices) if found.plan is None else found.plan
    outcome = simulator.retime(plan)
    return Row(
        name,
        seed,
        outcome.status,
        outcome.step_time_s,
        found.evaluations,
        found.plan_s,
        outcome.peak_bytes,
        outcome.why,
        proved_s=found.lower_bound_s,
        history=found.history,
        devices=found.devices,
        plan=plan,
    )
