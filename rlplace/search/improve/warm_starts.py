"""Where searches start: cheap heuristics, projected onto groups and scored; bytes where none of them is feasible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, MissingExtra, RunnerError
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import FORWARD
from rlplace.measure.problem import Problem
from rlplace.search.guide import Scoring
from rlplace.search.parallel.starts import first_layouts, parallel_starts
from rlplace.search.rules.baselines import blocks, single, solve_expert
from rlplace.search.rules.partition import solve_metis
from rlplace.search.schedule.baechi import solve_m_etf, solve_m_sct
from rlplace.search.schedule.eft import eft
from rlplace.search.schedule.list_scheduling import solve_critical_path, solve_heft, solve_peft
from rlplace.search.task import Budget, Task, majority_devices

INFEASIBLE = 1e3
"""Loss of a placement that does not fit: more than any logarithm of a step time."""
MOST_TRIED = 20_000
"""Placements that are few enough to try all of them, where only seconds bound a search."""
HEURISTICS = (
    solve_expert,
    solve_heft,
    solve_m_etf,
    solve_critical_path,
    solve_peft,
    solve_m_sct,
    solve_metis,
)
"""Methods that need a handful of evaluations each, the quickest first."""
MICRO_BATCHED = (solve_metis, solve_critical_path, solve_heft)
"""Those of them for a step that is cut into micro-batches, the best first: it has many ops, and layouts besides."""
HEURISTICS_SHARE = 0.3
"""No further heuristic begins once this share of the budget is gone."""
LEAST_S = 1e-3
"""Seconds of a heuristic that begins as the time ends: a budget is never nothing."""
LAYOUTS = 4
"""Layouts of a step cut into micro-batches that are starts over groups, the first."""
_CHUNK = 256


def best_start(task: Task) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 of ops and step time of the best of all cheap heuristics, those over ops included.

    The step time is infinite where none is feasible; the devices are then balanced by bytes or on a single device.

    Raises:
        InvalidValue: as `score_starts`.
    """
    starts, times = score_starts(task)
    found = [(float(times[0]), task.problem.grouping.expand(starts[0])), *score_layouts(task)]
    found += score_heuristics(task, HEURISTICS if task.problem.graph.num_micro_batches == 1 else MICRO_BATCHED)
    step_s, devices = min(found, key=lambda pair: pair[0])
    return devices, step_s


def score_heuristics(task: Task, heuristics: Sequence[Callable[[Task], None]]) -> list[tuple[float, NDArray[np.int32]]]:
    """Step time and devices (N,) int32 of what each of some heuristics finds, where it finds something feasible."""
    found: list[tuple[float, NDArray[np.int32]]] = []
    for solve in heuristics:
        if task.spent >= HEURISTICS_SHARE or task.is_spent:
            break
        part = Task(task.problem, Scoring(task), Budget(task.evaluations_left, task.seconds_left or LEAST_S))
        try:
            solve(part)
        except (MissingExtra, RunnerError):
            continue
        if part.best_devices is not None:
            found.append((part.best_s, part.best_devices))
    return found


def score_starts(task: Task) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Groups' devices (S, G) of every start and their step times (S,), best first; some infinite if the budget ends.

    Starts are a single device of every kind, contiguous blocks, earliest finish, groups balanced by bytes, and the
    first layouts of a step that is cut into micro-batches.

    Raises:
        InvalidValue: the task's budget is infinite: a search would never end.
    """
    check_budget(task)
    problem = task.problem
    devices = [single(problem, device) for device in _kinds(problem)]
    devices += [blocks(problem), eft(problem), *first_layouts(problem, LAYOUTS)]
    starts = np.stack([*(majority_devices(problem, row) for row in devices), balanced(problem)])
    starts = starts[np.sort(np.unique(starts, axis=0, return_index=True)[1])]
    times = task.score_groups(starts)
    order = np.argsort(times, kind="stable")
    return starts[order], times[order]


def score_layouts(task: Task) -> list[tuple[float, NDArray[np.int32]]]:
    """Step time and devices (N,) int32 of the best layouts of a step cut into micro-batches; none where it is not."""
    return [(start.step_s, start.devices) for start in parallel_starts(task)]


def check_budget(task: Task) -> None:
    """Refuses a task whose budget is infinite.

    Raises:
        InvalidValue: it is: a search would never end.
    """
    if math.isinf(task.budget.evaluations) and math.isinf(task.budget.seconds):
        raise InvalidValue("budget", "none", "evaluations or seconds: a search goes on until they end", where="search")


def _kinds(problem: Problem) -> list[int]:
    """The first of every kind of devices: equal costs, room and rules."""
    allowed = np.ones((1, problem.host.num_devices)) if problem.allowed is None else problem.allowed
    columns = np.concatenate((problem.costs.op_time_s, room_bytes(problem)[None], allowed))
    first: list[int] = np.sort(np.unique(columns, axis=1, return_index=True)[1]).tolist()
    return first


def kept_bytes(problem: Problem, grouping: Grouping) -> NDArray[np.float64]:
    """(G,) float64: bytes that a group keeps where it is: parameters, gradients, optimizer state, forward outputs."""
    graph = problem.graph
    outputs = np.where(graph.phases == FORWARD, graph.output_bytes, 0)
    kept = np.where(graph.is_source, np.maximum(graph.parameter_bytes, outputs), graph.parameter_bytes + outputs)
    kept = kept + graph.gradient_bytes + graph.state_bytes
    table = np.zeros(grouping.num_groups)
    np.add.at(table, grouping.op_group, kept)
    return table


def held_bytes(problem: Problem, grouping: Grouping) -> NDArray[np.float64]:
    """(G,) float64: parameters, gradients, optimizer state and forward outputs, in which parameters weigh twice.

    Features and orders of list schedulers are made of it, and learned weights know no other.
    """
    graph = problem.graph
    held = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
    held = held + np.where(graph.phases == FORWARD, graph.output_bytes, 0)
    table = np.zeros(grouping.num_groups)
    np.add.at(table, grouping.op_group, held)
    return table


def room_bytes(problem: Problem) -> NDArray[np.float64]:
    """(D,) float64: bytes of each device beside its context, at least 1."""
    devices = problem.host.devices
    return np.array([max(float(device.memory_bytes - device.context_bytes), 1.0) for device in devices])


def fullness(
    held: NDArray[np.float64], room: NDArray[np.float64], placements: NDArray[np.int32]
) -> NDArray[np.float64]:
    """(B,) float64: bytes held on the fullest device over its room, for `placements` (B, G) of groups."""
    table = np.zeros((len(placements), len(room)))
    np.add.at(table, (np.arange(len(placements))[:, None], placements), held[None, :])
    full: NDArray[np.float64] = (table / room).max(axis=1)
    return full


def balanced(problem: Problem) -> NDArray[np.int32]:
    """(G,) int32: groups, most bytes first, each on the device that it leaves least full."""
    grouping = problem.grouping
    held, room, allowed = held_bytes(problem, grouping), room_bytes(problem), problem.group_allowed
    used = np.zeros(len(room))
    devices = np.zeros(grouping.num_groups, dtype=np.int32)
    for group in np.argsort(-held, kind="stable").tolist():
        share = np.where(allowed[group], (used + held[group]) / room, np.inf)
        devices[group] = int(np.argmin(share))
        used[devices[group]] += held[group]
    return devices


def losses(
    problem: Problem, grouping: Grouping, placements: NDArray[np.int32], step_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(B,) float64: log step times of `placements` (B, G); those that do not fit lose to all others, by fullness."""
    full = INFEASIBLE + fullness(kept_bytes(problem, grouping), room_bytes(problem), placements)
    return np.where(np.isfinite(step_s), np.log(np.maximum(step_s, 1e-300)), full)


def try_all(task: Task, *, share: float) -> bool:
    """Whether all placements of the problem's groups were scored: only where they fit in a share of what is left."""
    choices = [np.flatnonzero(row).astype(np.int32) for row in task.problem.group_allowed]
    count = math.prod(len(row) for row in choices)
    if count > share * min(task.evaluations_left, MOST_TRIED):
        return False
    for first in range(0, count, _CHUNK):
        place = np.arange(first, min(first + _CHUNK, count))
        placements = np.empty((len(place), len(choices)), dtype=np.int32)
        for group, row in enumerate(choices):
            placements[:, group] = row[place % len(row)]
            place = place // len(row)
        task.score_groups(placements)
        if task.is_spent:
            return False
    return True
