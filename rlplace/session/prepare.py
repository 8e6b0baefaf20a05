"""`prepare`: the problem of a step cut as the user asked; how many micro-batches, where they ask for `auto`.

`is_cut_faster`: whether micro-batches that are chosen by simulation also pay on this machine, in one race.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import CaptureError, InvalidValue, RunnerError
from rlplace.format import format_seconds
from rlplace.graphs.opgraph import OpGraph
from rlplace.locks import measuring_alone
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate.isolated_runner import make_runner
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol
from rlplace.say import Say
from rlplace.search.methods import find
from rlplace.search.rules.baselines import nearest_allowed, single
from rlplace.search.task import Budget
from rlplace.session.cut import CutOptions
from rlplace.session.setup import ProblemOptions
from rlplace.session.steps import Steps, describe_problem, make_problem

EVALUATIONS = 10_000
"""Of the search that a choice is made for: it takes its share of them."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of micro-batches that `auto` may stand for."""
MANY_DEVICES = 16
"""From so many devices on, a search tries as many micro-batches; on fewer, up to eight."""


def _nothing(line: str) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem, and how its batch came to be cut.

    Attributes:
        problem: of the step that was chosen, with its order of ops.
        asked: by the user.
        evaluations: placements that were simulated to choose.
        start: (N,) int32, the best placement of it found on the way, where a search may go on from; None without one.
    """

    problem: Problem
    asked: CutOptions
    evaluations: int = 0
    start: NDArray[np.int32] | None = field(default=None, repr=False)

    @property
    def cut(self) -> tuple[int, CutOptions]:
        """The number of micro-batches of the step, and the options that cut it so again."""
        verdict = verdict_of(self.problem.graph) or {}
        return self.asked.again(self.problem.graph.num_micro_batches, verdict.get("kind"))

    def describe(self) -> dict[str, Any]:
        """What `problem.json` holds."""
        start = None if self.start is None else self.start.tolist()
        return describe_problem(self.problem) | {"evaluations": self.evaluations, "start": start}

    def to_dict(self) -> dict[str, Any]:
        """What `--json` says, and a run keeps, of micro-batches."""
        return describe_cut(self.problem.graph, self.asked) | {
            "op_order": self.problem.op_order,
            "evaluations": self.evaluations,
        }


def prepare(
    steps: Steps,
    say: Say,
    options: ProblemOptions,
    *,
    evaluations: float | None = None,
    most_s: float = math.inf,
) -> Prepared:
    """The problem of a step, cut as its `asked` says; says how the loss was judged, and what was chosen.

    Args:
        steps: of the workload.
        say: told what takes long.
        options: how groups are made, and what is profiled is run; the seed is of the searches that choose.
        evaluations: of the search that follows; the choice takes a share of them. `EVALUATIONS` where None.
        most_s: seconds for profiling it, whatever the numbers of micro-batches that are tried.

    Raises:
        UserError: the step cannot be captured, or its batch cannot be cut so.
    """
    host, made = steps.host, list[int]()
    deadline_s = time.monotonic() + most_s

    def problem_of(count: int) -> Problem:
        graph = steps.graph(count)
        each = "" if count == 1 else f", {count} micro-batches"
        say(f"{steps.spec}{each}: {graph.num_ops} ops, {graph.num_edges} edges on {host.name}")
        made.append(count)
        return make_problem(
            graph,
            host,
            options.num_groups,
            _nothing if host.is_simulated and len(made) > 1 else say,  # what it says of the host is said once
            spec=steps.spec,
            count=count,
            grouping=options.grouping,
            acyclic=options.acyclic,
            constraints=options.constraints,
            isolated=options.isolated,
            most_s=max(deadline_s - time.monotonic(), 0.0),
        )

    return chosen_problem(
        steps.asked, host, problem_of, seed=options.seed, evaluations=evaluations, say=say, isolated=options.isolated
    )


def chosen_problem(
    asked: CutOptions,
    host: Host,
    problem_of: Callable[[int], Problem],
    *,
    seed: int,
    evaluations: float | None = None,
    say: Say = _nothing,
    isolated: bool | None = None,
) -> Prepared:
    """The problem of the number of micro-batches that is asked for, and what choosing it came to.

    Where the batch is cut, the order of ops is chosen too, by simulation, as the number is. On this machine a batch is
    cut under `auto` only if that is also measured faster.

    Args:
        asked: by the user.
        host: where.
        problem_of: the problem of a number of micro-batches.
        seed: of the searches that choose.
        evaluations: as of `prepare`.
        say: told what is found, and how the loss was judged; nobody by default.
        isolated: whether what is measured for the choice runs in worker processes; see `Evaluator`.

    Raises:
        UserError: the batch cannot be cut as asked.
    """
    if asked.count == 1:
        return Prepared(problem_of(1), asked)
    from rlplace.search.parallel.choose import choose

    counts = candidates(host) if asked.count == "auto" else (asked.count,)
    kept = functools.cache(problem_of)
    if asked.is_auto and (asked.batch_dims is not None or asked.loss != "auto"):
        try:  # what the user says of the cut and is wrong must not be left out as what is slow is
            kept(counts[1])
        except InvalidValue as error:
            if error.field != "micro_batches":  # more of them than samples, or not exact
                raise
        except CaptureError:
            if asked.loss != "auto":
                raise
    chosen = choose(
        {count: partial(kept, count) for count in counts},
        evaluations=evaluations or EVALUATIONS,
        seed=seed,
        say=say,
    )
    problem, start = chosen.problem, chosen.devices
    if 1 in counts and chosen.num_micro_batches > 1 and chosen.devices is not None and not host.is_simulated:
        with measuring_alone(host, say=say):
            is_faster = is_cut_faster(problem, chosen.devices, kept(1), seed=seed, say=say, isolated=isolated)
        if not is_faster:
            problem, start = kept(1), None
    for line in judged(problem.graph):
        say(line)
    return Prepared(problem, asked, chosen.spent, start)


def candidates(host: Host) -> tuple[int, ...]:
    """The numbers of micro-batches that a search for `auto` tries on a host."""
    return tuple(count for count in COUNTS if count <= (16 if host.num_devices >= MANY_DEVICES else 8))


def describe_cut(graph: OpGraph, asked: CutOptions) -> dict[str, Any]:
    """What `--json` says of how the batch is cut: what was asked for, K, and how the loss was judged."""
    return asked.to_dict() | {"count": graph.num_micro_batches, "verdict": verdict_of(graph)}


def judged(graph: OpGraph) -> list[str]:
    """What people are told of a step that is cut: how the loss of its micro-batches was judged."""
    verdict = verdict_of(graph)
    if verdict is None:
        return []
    warning = "" if verdict["is_checked"] else "warning: "
    return [f"{warning}{graph.num_micro_batches} micro-batches, loss {verdict['kind']}: {verdict['why']}"]


def verdict_of(graph: OpGraph) -> dict[str, Any] | None:
    """How the loss of a step that is cut was judged; None where the batch is whole, or the graph came from a file."""
    micro = None if graph.program is None else graph.program.origin.micro
    return None if micro is None else {"kind": micro.loss, "is_checked": micro.is_checked, "why": micro.why}


RACE = RaceProtocol(max_rounds=15, min_rounds=15, hopeless=math.inf)
COMPARED_EVALUATIONS = 1000
"""Placements that are simulated to find what the whole batch races with."""


def is_cut_faster(
    cut: Problem,
    devices: NDArray[np.int32],
    whole: Problem,
    *,
    seed: int,
    say: Callable[[str], None],
    isolated: bool | None = None,
) -> bool:
    """Whether a placement of the step in micro-batches is measured faster than a searched one of the whole batch.

    A profile does not know how devices slow each other down, which favours whatever keeps all of them busy. So the
    simulator's choice is raced before it is taken, against everything on one device, or on one gang, too.

    Args:
        cut: in micro-batches, on a host of this machine.
        devices: (N,) of its best placement.
        whole: the same step and host, its batch not cut.
        seed: of the search for the whole batch.
        say: told both step times.
        isolated: whether they run in worker processes, one for each of the two steps; see `Evaluator`.
    """
    planner = Simulator(whole)
    found = find(whole, "portfolio", planner, Budget(evaluations=COMPARED_EVALUATIONS), seed=seed)
    if found.devices is None:
        return True
    first = Simulator(cut)
    options: dict[str, Any] = {"reference": None, "seed": seed, "isolated": isolated}
    with (
        contextlib.closing(make_runner(cut, first, **options)) as runner,
        contextlib.closing(make_runner(whole, planner, **options)) as other,
    ):
        try:
            rivals = [other.timer(planner.plan(each)) for each in (found.devices, _on_one_device(whole, planner))]
            outcome, *rivals_s = runner.measure_plans([first.plan(devices)], protocol=RACE, others=rivals)
        except (RunnerError, TimeoutError, MemoryError) as error:
            say(f"micro-batches are not raced: {error}")
            return False
    beside = min(rivals_s, key=lambda rival: rival.step_time_s)
    count = cut.graph.num_micro_batches
    say(
        f"measured: {format_seconds(outcome.step_time_s)} in {count} micro-batches, "
        f"{format_seconds(beside.step_time_s)} with the whole batch"
    )
    return outcome.ok and outcome.step_time_s <= beside.step_time_s


def _on_one_device(problem: Problem, simulator: Simulator) -> NDArray[np.int32]:
    """(N,) int32: everything on the device, or the gang, with the shortest simulated step."""
    rows = np.stack([single(problem, device) for device in range(problem.host.num_devices)])
    return np.asarray(nearest_allowed(problem, rows)[int(np.argmin(simulator.step_times(rows)))])
