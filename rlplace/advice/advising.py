"""Is a step worth placing? `advise` answers from its bound, a short search and, on a real host, a short race.

`advise_workload`: `rlplace advise`, from words to a verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from rlplace.advice.verdict import Figures, Verdict, Words, decide
from rlplace.errors import RlplaceError, UserError, refuse_if
from rlplace.graphs import Constraints, OpGraph
from rlplace.graphs.capturing.trace import kept_traces
from rlplace.locks import measuring_alone
from rlplace.measure import Host, Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.bounds import even_split_s, lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.problem import OP_ORDERS, capacity_bytes, single_device_peak_bytes
from rlplace.measure.profiling.profile import profile_costs, profile_links
from rlplace.measure.timing.eager_step import EagerRecipe, check_has_values
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.measure.timing.verdict import Outcome, disturbance, judge
from rlplace.report.console import make_progress
from rlplace.say import Say, format_seconds
from rlplace.search import Budget, find
from rlplace.search.parallel.choose_micro_batches import shard_counts, spread_s
from rlplace.search.rules.baselines import best_single, plain_devices, whole_single_s
from rlplace.session.prepare import Steps, describe_cut, make_problem
from rlplace.session.setup import NO_SPLIT, Setup
from rlplace.workloads import WorkloadSpec

SEARCH = "portfolio"
EVALUATIONS = 2000
"""Placements that a search may simulate, of every number of micro-batches."""
FIRST_EVALUATIONS = 50
"""Simulated in any case."""
WARM_UP_EVALUATIONS = 400
"""Before the clock starts: every kernel is called once, and compiled where that has never happened on this machine."""
SEARCH_SHARE, SIMULATED_SHARE = 0.5, 0.9
"""Part of the time for all searches, where a race follows and where none does."""
RACE = RaceProtocol(warmup=1, min_rounds=3, max_rounds=15, hopeless=math.inf, margin=math.inf)


@dataclass(frozen=True, eq=False)
class _Found:
    """The best placement of one number of micro-batches."""

    problem: Problem
    simulator: Simulator
    plan: Plan | None = field(repr=False)
    step_s: float
    evaluations: int

    @property
    def count(self) -> int:
        return self.problem.graph.num_micro_batches


@one_thread_here()
def advise(
    problem: Problem,
    *,
    seconds: float = 30.0,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    cuts: Mapping[int, Callable[[], Problem]] | None = None,
    words: Words | None = None,
    say: Say | None = None,
    isolated: bool | None = None,
) -> Verdict:
    """Decides whether placing the step of `problem` on its host is worth it, with the reason and the expected gain.

    On a real host, a race measures one device, eager PyTorch and the best placement of a short search. On a simulated
    host, they are simulated. If the batch is not cut, and `cuts` is empty, an even split of the batch is estimated.

    Args:
        problem: the step to place.
        seconds: approximate time of the whole call; a part that has begun is completed.
        evaluations: placements that each search may simulate.
        seed: of the search.
        cuts: for each number of micro-batches, a function that makes the problem; they are tried while there is time.
        words: names for the message; by default those of the Python API.
        say: called with messages about results; no messages by default.
        isolated: whether placements run in a worker process; see `Evaluator`.

    Raises:
        InvalidValue: no time, or no evaluations.
        RunnerError: no placement could be run.
    """
    Budget(evaluations, seconds)  # which refuses what is out of range
    say = say or (lambda _: None)
    find(problem, SEARCH, Simulator(problem), Budget(WARM_UP_EVALUATIONS), seed=seed)
    begin_s = time.monotonic()
    searching_s = seconds * (SIMULATED_SHARE if problem.host.is_simulated else SEARCH_SHARE)
    search_s = searching_s / (1 + len(cuts or {}))
    found, is_refused = [_search(problem, search_s, evaluations, seed)], False
    say(f"{_each(found[0].count)}: {_words(found[0])}")
    for count, make in (cuts or {}).items():
        if time.monotonic() - begin_s > searching_s:
            say(f"{_each(count)}: left out, the time is up")
            continue
        try:
            found.append(_search(make(), search_s, evaluations, seed))
        except UserError as error:
            is_refused = True
            say(f"{_each(count)}: left out ({str(error).splitlines()[0]})")
        else:
            say(f"{_each(count)}: {_words(found[-1])}")
    # a batch that cannot be cut cannot be split over devices either
    figures = _simulated(found, can_cut=found[0].count == 1 and not is_refused)
    if not problem.host.is_simulated:
        say("racing one device, the best placement and plain PyTorch")
        with measuring_alone(problem.host, say=say):
            figures = _measured(figures, found, begin_s + seconds, seed, isolated)
    return decide(figures, words)


def _search(problem: Problem, seconds: float, evaluations: int, seed: int) -> _Found:
    """The result of a short search, in the order of ops in which something fits."""
    budget = Budget(min(FIRST_EVALUATIONS, evaluations))
    made = [find(problem, SEARCH, Simulator(problem), budget, seed=seed)]
    problem = replace(problem, op_order=made[0].op_order)
    if evaluations > FIRST_EVALUATIONS:
        share_s = seconds / (1 if made[0].devices is not None else len(OP_ORDERS))
        more = Budget(evaluations - FIRST_EVALUATIONS, max(share_s, 0.1))
        made.insert(0, find(problem, SEARCH, Simulator(problem), more, seed=seed))
    best = min(made, key=lambda one: one.step_time_s)
    simulator = Simulator(replace(problem, op_order=best.op_order))
    plan = simulator.plan(best.devices) if best.plan is None and best.devices is not None else best.plan
    return _Found(simulator.problem, simulator, plan, best.step_time_s, sum(one.evaluations for one in made))


def _simulated(found: list[_Found], *, can_cut: bool) -> Figures:
    """The figures by simulation: of the first problem, which may be cut itself, and of the best of the others."""
    problem, simulator = found[0].problem, found[0].simulator
    single = best_single(problem, simulator)
    single_s = min(float(simulator.step_times(single[None])[0]), whole_single_s(problem))
    device = (
        int(np.bincount(single).argmax())
        if math.isfinite(single_s)
        else max(plain_devices(problem), key=lambda index: capacity_bytes(problem.host, index))
    )
    bound_s, bound = min((lower_bound_s(one.problem) for one in found), key=lambda pair: pair[0])
    whole, cut = [one for one in found if one.count == 1], _best_cut(found)
    best = min(found, key=lambda one: one.step_s).problem
    plain = [problem.host.devices[index] for index in plain_devices(problem)]
    can_split = best.graph.program is not None and best.graph.num_shards == 1
    return Figures(
        kind="simulated",
        costs=problem.costs.source,
        bound_s=bound_s,
        bound=bound,
        single_s=_finite(single_s),
        single_device=problem.host.devices[device].name,
        single_bytes=single_device_peak_bytes(problem.graph, problem.host, device, problem.workspace_bytes[:, device]),
        single_capacity_bytes=capacity_bytes(problem.host, device),
        placed_s=_finite(min((single_s, *(one.step_s for one in whole)))) if whole else None,
        num_placements=sum(one.evaluations for one in found),
        cut_s=None if cut is None else _finite(cut.step_s),
        cut_count=1 if cut is None else cut.count,
        counts=tuple(one.count for one in found),
        split_s=_finite(even_split_s(problem)) if can_cut else None,
        work_s=spread_s(best) if can_split and shard_counts(best) else None,
        eager_why="the host is simulated" if problem.host.is_simulated else "",
        op_order=problem.op_order,
        state_bytes=int(problem.graph.output_bytes[problem.graph.is_resident].sum() + problem.graph.state_bytes.sum()),
        memory_bytes=sum({each.memory_pool or each.name: each.memory_bytes for each in plain}.values())
        - sum(each.context_bytes for each in plain),
    )


def _measured(
    figures: Figures,
    found: list[_Found],
    deadline_s: float,
    seed: int,
    isolated: bool | None,
) -> Figures:
    """The figures with step times that were measured: the first problem's, and of the best in micro-batches.

    The latter is raced only where it is faster in simulation. The bound, the even split and all work spread
    evenly, which op times give, are scaled by the measured over the simulated step time of one device: a busy machine
    is slower than its profile.
    """
    first = found[0]
    cut = _best_cut(found[1:])
    single, placed, eager, why, outcome = _race(first, deadline_s, seed, isolated)
    single_s = _step_s(single)
    ratio = single_s / figures.single_s if single_s is not None and figures.single_s else 1.0
    figures = replace(
        figures,
        kind="measured",
        bound_s=figures.bound_s * ratio,
        split_s=None if figures.split_s is None else figures.split_s * ratio,
        work_s=None if figures.work_s is None else figures.work_s * ratio,
        single_s=single_s,
        eager_s=_step_s(eager),
        eager_why=why,
        placed_s=_step_s(placed) if first.count == 1 else None,
        cut_s=_step_s(placed) if first.count > 1 else figures.cut_s,
    )
    outcomes = {_step_s(placed) or math.inf: outcome}
    if cut is not None and cut.step_s >= first.step_s:
        figures = replace(figures, cut_s=None, cut_count=1)
    elif cut is not None:
        _, placed, *_, outcome = _race(cut, deadline_s, seed, isolated)
        figures, outcomes[_step_s(placed) or math.inf] = replace(figures, cut_s=_step_s(placed)), outcome
    return replace(figures, outcome=outcomes[min(outcomes)])


def _best_cut(found: list[_Found]) -> _Found | None:
    return min((one for one in found if one.count > 1), key=lambda one: one.step_s, default=None)


def _race(
    one: _Found, deadline_s: float, seed: int, isolated: bool | None
) -> tuple[Measurement | None, Measurement | None, Measurement | None, str, Outcome | Literal[""]]:
    """Measurements of the best single device, the best placement and eager, why there is none of eager, and whether
    the placement is faster than both; empty where nothing can be said of that, since one of them is missing."""
    problem, simulator = one.problem, one.simulator
    plans = [simulator.plan(best_single(problem, simulator)), *([] if one.plan is None else [one.plan])]
    eager, why = [EagerRecipe()], ""
    try:
        check_has_values(problem.graph)
    except RlplaceError as error:
        eager, why = [], str(error)
    with closing(Evaluator(problem, simulator, seed=seed, isolated=isolated)) as evaluator:
        outcomes = evaluator.measure_plans(plans, RACE, others=eager, deadline_s=deadline_s)
    plain = outcomes[len(plans)] if eager else None
    if plain is not None and not plain.ok:
        why = plain.why or plain.status
    single, placed = outcomes[0], outcomes[1] if len(plans) > 1 else None
    others = {str(k): each.samples_s for k, each in enumerate((single, plain)) if each is not None and each.ok}
    outcome: Outcome | Literal[""] = ""
    if placed is not None and placed.ok and others:
        why_not = disturbance(idle_share(), single.spread_s / single.step_time_s, "one device")
        outcome = judge(placed.samples_s, others, why=why_not).outcome
    return single, placed, plain, why, outcome


def _step_s(outcome: Measurement | None) -> float | None:
    return outcome.step_time_s if outcome is not None and outcome.ok else None


def _finite(step_s: float) -> float | None:
    return step_s if math.isfinite(step_s) else None


def _each(count: int) -> str:
    return "the whole batch" if count == 1 else f"{count} micro-batches"


def _words(one: _Found) -> str:
    if math.isinf(one.step_s):
        return f"none of {one.evaluations:,} placements fits"
    return f"{format_seconds(one.step_s)} simulated, the best of {one.evaluations:,} placements"


MOST_COUNT = 16
"""Most micro-batches that `auto` tries."""
NUM_STEPS = 3
"""Steps of one kind of device that are traced."""
COPIES = 7
"""Of each size over each link."""


@one_thread_here()
def advise_workload(setup: Setup, *, seconds: float = 30.0, is_quiet: bool = False) -> dict[str, Any]:
    """The object that `--json` prints:  the verdict with its figures, capture_s, seconds, micro_batches.

    Args:
        setup: the step; a host of this machine is profiled in a hurry. Its batch may be cut: into a number beside the
            whole batch, or `auto`.
        seconds: for all but building the model and capturing its step, which are told apart.
        is_quiet: no progress.

    Raises:
        RunnerError: another search measures here, and waiting was not asked for.
        UserError: the workload cannot be built or captured.
    """
    spec, host, asked = setup.spec, setup.host, setup.asked
    hint = "`train`, `place` and `compare` choose a split, or take one."
    refuse_if(asked.split != NO_SPLIT, "split", asked.split, NO_SPLIT, where="advise", hint=hint)
    progress = make_progress(is_quiet=is_quiet)
    with measuring_alone(host, say=progress.say, is_waiting=setup.is_waiting), kept_traces():
        begin_s = time.monotonic()
        progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
        steps = Steps(spec, host, setup.workload_seed, asked)
        graph = steps.graph(1)
        capture_s = time.monotonic() - begin_s
        after, left = format_seconds(capture_s), format_seconds(seconds)
        progress.say(f"{spec}: {graph.num_ops:,} ops after {after}; about {left} from here")
        begin_s = time.monotonic()
        make = (
            partial(_estimated, spec, host, setup.constraints, is_quiet)
            if host.is_simulated
            else _profiled(host, setup.constraints, progress.say)
        )
        problem = make(graph, 1)
        counts = counts_for(host) if asked.is_auto else () if asked.count == 1 else (int(asked.count),)
        verdict = advise(
            problem,
            seconds=max(seconds - (time.monotonic() - begin_s), 1.0),
            seed=setup.seed,
            cuts={count: partial(_cut, steps, make, count) for count in counts},
            words=Words(str(spec), setup.host_word),
            say=progress.say,
            isolated=setup.isolated,
        )
        progress.close()
        return verdict.to_dict() | {
            "workload": str(spec),
            "seed": setup.seed,
            "workload_seed": setup.workload_seed,
            "host": host.name,
            "capture_s": capture_s,
            "seconds": time.monotonic() - begin_s,
            "micro_batches": describe_cut(graph, asked),
        }


Make = Callable[[OpGraph, int], Problem]


def counts_for(host: Host) -> tuple[int, ...]:
    """The numbers of micro-batches that `auto` tries beside the whole batch while there is time: one a device first."""
    devices = sum(not device.members for device in host.devices)
    wanted = (min(devices, MOST_COUNT), min(2 * devices, MOST_COUNT), 2)
    return tuple(dict.fromkeys(count for count in wanted if count > 1))


def _cut(steps: Steps, make: Make, count: int) -> Problem:
    return make(steps.graph(count), count)


def _estimated(
    spec: WorkloadSpec, host: Host, constraints: Constraints | None, is_quiet: bool, graph: OpGraph, count: int
) -> Problem:
    """A problem on a simulated host; that it is one is said once."""
    progress = make_progress(is_quiet=is_quiet or count > 1)
    return make_problem(graph, host, 256, progress.say, spec=spec, count=count, constraints=constraints)


def _profiled(host: Host, constraints: Constraints | None, say: Say) -> Make:
    """Makes problems of this machine from few steps and copies."""
    say("profiling with few steps: figures are rougher than those of `train`")
    linked = profile_links(host, repeats=COPIES)

    def make(graph: OpGraph, count: int) -> Problem:
        costs = profile_costs(graph, linked, num_steps=NUM_STEPS, warmup=1, on_progress=say)
        return Problem.grouped(graph, linked, costs, constraints=constraints)

    return make
