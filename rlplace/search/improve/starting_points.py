"""Placements that searches start from.

`score_starts`, `best_start`: cheap heuristics, over groups and over ops; groups balanced by bytes where none fits.

`best_start_with_greedy`: the list scheduler `Greedy` with fixed weights over several groupings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra, RunnerError, refuse_if
from rlplace.graphs import Grouping
from rlplace.measure import Problem
from rlplace.search.groupings import (
    balanced,
    by_module,
    by_role,
    fullness,
    kept_bytes,
    majority_devices,
    nested,
    room_bytes,
)
from rlplace.search.parallel.hybrid import Starts, first_layouts, parallel_starts
from rlplace.search.rules.baselines import blocks, single, solve_expert, solve_metis
from rlplace.search.schedule.list_schedulers import (
    eft,
    solve_critical_path,
    solve_heft,
    solve_m_etf,
    solve_m_sct,
    solve_peft,
)
from rlplace.search.schedule.partial_schedule import Greedy
from rlplace.search.task import Budget, Scoring, Task

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
"""Least seconds of a heuristic's budget, which must be more than 0, also where the time has ended."""
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
    found = [(task.problem.grouping.expand(starts[0]), float(times[0])), *parallel_starts(task)]
    found += score_heuristics(task, MICRO_BATCHED if task.problem.graph.is_in_parts else HEURISTICS)
    return min(found, key=lambda start: start[1])


def score_heuristics(task: Task, heuristics: Sequence[Callable[[Task], None]]) -> Starts:
    """The result of each of some heuristics whose placement is feasible."""
    found: Starts = []
    for solve in heuristics:
        if task.spent >= HEURISTICS_SHARE or task.is_spent:
            break
        part = Task(task.problem, Scoring(task), Budget(task.evaluations_left, task.seconds_left or LEAST_S))
        try:
            solve(part)
        except (MissingExtra, RunnerError):
            continue
        if part.best_devices is not None:
            found.append((part.best_devices, part.best_s))
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
    allowed = np.ones((1, problem.host.num_devices)) if problem.allowed is None else problem.allowed
    columns = np.concatenate((problem.costs.op_time_s, room_bytes(problem)[None], allowed))  # of equal devices alike
    kinds = np.sort(np.unique(columns, axis=1, return_index=True)[1]).tolist()
    devices = [
        *(single(problem, device) for device in kinds),
        blocks(problem),
        eft(problem),
        *first_layouts(problem, LAYOUTS),
    ]
    starts = np.stack([*(majority_devices(problem, row) for row in devices), balanced(problem)])
    starts = starts[np.sort(np.unique(starts, axis=0, return_index=True)[1])]
    times = task.score_groups(starts)
    order = np.argsort(times, kind="stable")
    return starts[order], times[order]


def check_budget(task: Task) -> None:
    """Refuses a task whose budget is infinite.

    Raises:
        InvalidValue: it is: a search would never end.
    """
    refuse_if(
        math.isinf(task.budget.evaluations) and math.isinf(task.budget.seconds),
        "budget",
        "none",
        "evaluations or seconds: a search goes on until they end",
        where="search",
    )


def losses(
    problem: Problem, grouping: Grouping, placements: NDArray[np.int32], step_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(B,) float64: log step times of `placements` (B, G); those that do not fit lose to all others, by fullness."""
    full = INFEASIBLE + fullness(kept_bytes(problem, grouping), room_bytes(problem), placements)
    return np.where(np.isfinite(step_s), np.log(np.maximum(step_s, 1e-300)), full)


def try_all(task: Task, *, share: float) -> bool:
    """Whether all placements of the problem's groups were scored: only where they fit in a share of the rest."""
    choices = [np.flatnonzero(row).astype(np.int32) for row in task.problem.group_allowed]
    if math.prod(len(row) for row in choices) > share * min(task.evaluations_left, MOST_TRIED):
        return False
    every = itertools.product(*reversed(choices))  # the first group changes fastest
    while chunk := list(itertools.islice(every, _CHUNK)):
        task.score_groups(np.array(chunk, dtype=np.int32)[:, ::-1])
        if task.is_spent:
            return False
    return True


GROUPINGS = ("own", "coarser", "finer", "modules-16", "modules-64", "roles", "finest")
"""Names of groupings: the problem's own groups, the next coarser, next finer and finest of `nested`, modules cut into
about 16 and 64, and roles cut into about 64."""
CROSSED = ("own", "coarser", "finer", "modules-16", "modules-64")
"""Those that every one of `START_WEIGHTS` is tried over."""
MANY = 300
"""Evaluations of a budget from which heuristics begin: by then the seconds that they take are worth it."""
WEIGHTS_SHARE = 0.2
"""Most that fixed weights may take of such a budget ..."""
FEW_WEIGHTS_SHARE = 0.25
"""... and of a smaller one, which begins with `FIRST_WEIGHTS` ..."""
LEAST = 7
"""... but for so many evaluations, which they may always take."""

Pair = tuple[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class GreedyPlacement:
    """The schedule of the list scheduler `Greedy` with one set of weights.

    Attributes:
        greedy: the scheduler and its grouping.
        weights: (9,) its weights.
        devices: (N,) int32 device of each op.
        step_s: step time; infinite where memory does not suffice.
        loss: log step time, or how full devices are, as `losses` has it.
    """

    greedy: Greedy
    weights: NDArray[np.float64]
    devices: NDArray[np.int32]
    step_s: float
    loss: float


class Schedulers(dict[str, Greedy]):
    """A problem's list schedulers by name of a grouping of `GROUPINGS`; each is laid out when it is first read."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __missing__(self, grouping: str) -> Greedy:
        """Lays out the scheduler of a grouping."""
        self[grouping] = Greedy.of(self._problem, grouping_of(self._problem, self._levels, grouping))
        return self[grouping]

    @cached_property
    def _levels(self) -> list[Grouping]:
        return nested(self._problem)


def best_start_with_greedy(
    task: Task, *, first: Sequence[Pair] = ()
) -> tuple[NDArray[np.int32], float, list[GreedyPlacement]]:
    """Devices (N,) int32 and step time of the best of fixed weights and other starts, and the former, best first.

    The step time is infinite where none is feasible; nothing here draws, so every seed starts here. With few
    evaluations the other starts are the plain ones, which take milliseconds, with many all cheap heuristics.

    Args:
        task: scores and counts.
        first: names of groupings, and weights (9,), that come before the fixed ones and share their budget.

    Raises:
        InvalidValue: the task's budget is infinite.
    """
    crossed = [(name, weights) for weights in START_WEIGHTS for name in CROSSED]
    if has_few_evaluations(task):
        share = max(FEW_WEIGHTS_SHARE, LEAST / task.budget.evaluations)
        leaders = score_greedy(task, [*first, *FIRST_WEIGHTS, *crossed], until=task.spent + share)
        start = _plain_start(task)
    else:
        start = best_start(task)
        leaders = score_greedy(task, [*first, *crossed], until=task.spent + WEIGHTS_SHARE)
    return *min([start, *((one.devices, one.step_s) for one in leaders[:1])], key=lambda one: one[1]), leaders


def has_few_evaluations(task: Task) -> bool:
    """Whether the whole budget is less than `MANY` evaluations."""
    return task.budget.evaluations < MANY


def _plain_start(task: Task) -> tuple[NDArray[np.int32], float]:
    """The best of `score_starts`, devices (N,) int32 and step time; groups by bytes come first where nothing fits yet.

    A budget may end before all are scored.
    """
    own = task.problem.grouping
    found = parallel_starts(task)
    if task.problem.graph.is_in_parts:
        found += score_heuristics(task, MICRO_BATCHED[:1])
    if task.best_devices is None:
        groups = balanced(task.problem)
        found += [(own.expand(groups), float(task.score_groups(groups)[0]))]
    starts, times = score_starts(task)
    return min([*found, (own.expand(starts[0]), float(times[0]))], key=lambda start: start[1])


def score_greedy(task: Task, pairs: Sequence[Pair], *, until: float) -> list[GreedyPlacement]:
    """The placements from weights, each over the grouping of that name, best first; equal placements are scored once.

    Args:
        task: scores and counts.
        pairs: names of groupings, and weights (9,).
        until: share of the task's budget at which to stop.
    """
    schedulers, seen = Schedulers(task.problem), set[bytes]()
    found: list[GreedyPlacement] = []
    for first in range(0, len(pairs), len(CROSSED)):
        if evaluations_until(task, until) < 1:
            break
        batch = [(schedulers[name], np.array(weights)) for name, weights in pairs[first : first + len(CROSSED)]]
        found += score_weights(task, batch, seen, until=until)
    return sorted(found, key=lambda one: one.loss)


def score_weights(
    task: Task, pairs: Sequence[tuple[Greedy, NDArray[np.float64]]], seen: set[bytes], *, until: float
) -> list[GreedyPlacement]:
    """The schedule of each scheduler with its weights (9,), where it is not among `seen`, to which it is added.

    Args:
        task: scores and counts.
        pairs: schedulers and weights.
        seen: placements that were scored before.
        until: share of the task's budget at which to stop; the last pairs may be left out by it.
    """
    fresh: list[tuple[Greedy, NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]] = []
    for greedy, weights in pairs:
        groups = greedy.place(weights)
        devices = greedy.grouping.expand(groups)[0]
        if devices.tobytes() not in seen:
            seen.add(devices.tobytes())
            fresh.append((greedy, weights, groups, devices))
    fresh = fresh[: int(min(len(fresh), evaluations_until(task, until)))]
    if not fresh:
        return []
    times = task.score(np.stack([devices for *_, devices in fresh]))
    return [
        GreedyPlacement(
            greedy,
            weights,
            devices,
            float(step_s),
            float(losses(task.problem, greedy.grouping, groups, np.array([step_s]))[0]),
        )
        for (greedy, weights, groups, devices), step_s in zip(fresh, times, strict=True)
    ]


VARIATION, LEAST_VARIED = 0.4, 0.3
"""Standard deviation of a weight that is varied, as a share of it, or of this where it is smaller."""


def varied(weights: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """(9,) float64: `weights` with about half of them varied."""
    scale = VARIATION * np.maximum(np.abs(weights), LEAST_VARIED) * (generator.random(len(weights)) < 0.5)
    return np.asarray(weights + generator.normal(size=len(scale)) * scale)


def evaluations_until(task: Task, until: float) -> float:
    """Evaluations that the budget leaves until a share of it, infinite under one of seconds alone; 0 once it is gone.

    The true rest of evaluations, where `Task.expected_evaluations` guesses it from the pace under a budget of seconds.
    """
    if task.is_spent or task.spent >= until:
        return 0.0
    return min(until * task.budget.evaluations - task.evaluations, task.evaluations_left)


def grouping_of(problem: Problem, levels: Sequence[Grouping], name: str) -> Grouping:
    """The grouping that a name of `GROUPINGS` stands for.

    Args:
        problem: the problem to place.
        levels: its nested groupings.
        name: one of `GROUPINGS`.
    """
    own = next(rung for rung, level in enumerate(levels) if level is problem.grouping)
    if name.startswith("modules-"):
        return by_module(problem, int(name.removeprefix("modules-")))
    if name == "roles":
        return by_role(problem, 64)
    last = len(levels) - 1
    return levels[{"coarser": max(own - 1, 0), "own": own, "finer": min(own + 1, last), "finest": last}[name]]


FIRST_WEIGHTS = (
    ("coarser", (0.33, 0.81, 0.93, 3.21, 1.5, 0.62, 1.21, 0.38, -0.05)),
    ("modules-16", (1.91, 0, 2.05, 0.57, 3.18, 0.28, 1.47, -0.05, 0)),
    ("finest", (1.38, 2.7, 0, 2.01, 0, 0, 0, 1.01, 0.4)),
    ("coarser", (0.29, 1.22, 1.17, 0.47, 1.63, 0.19, 3.86, 0, 0)),
    ("own", (0, 1.21, 4.41, 2.24, 1.25, 1.05, 1.53, 1.14, 0.17)),
    ("modules-16", (0.07, 1.22, 4.32, 1.64, 1.82, 1.05, 1.21, 1.09, 0.08)),
    ("finest", (7.54, 1.55, 0, 0, 1.28, 0, 1.23, 0.84, 0)),
    ("own", (-0.04, 0.11, 0.14, 2.57, 2.84, 0.34, 1.27, -0.19, -0.03)),
    ("own", (0.65, 0.61, 0.27, 3.21, 0.58, 0.66, 1.31, 0.27, -0.08)),
    ("modules-16", (6.63, 0.92, 6.19, 1.13, 5.65, 0, 4.89, 11.11, 1.39)),
    ("coarser", (4.41, 0.71, 2.47, 1.13, 6.65, 0, 5.17, 10.26, 0.88)),
    ("modules-16", (9.53, 0.82, 0, 0.34, 3.45, 0.02, 1.26, 0.55, -0.54)),
    ("finer", (1.91, 0, 3.61, 0.52, 3.18, 0.45, 1.29, 0, 0)),
    ("roles", (1.66, 0.57, 0.13, 4.78, 0.97, 0, -0.18, 1.59, 0.69)),
    ("own", (1.17, 1.48, 2.16, 0.43, 1, 0, 2.74, 3.73, 0.01)),
    ("modules-16", (0.29, 1.22, 1.91, 0.22, 1.63, 0.19, 3.58, -0.08, 0)),
)
"""The starts of small budgets: names of groupings, each with weights in the order of `FEATURES`.

`scripts/choose_start_weights.py` prints them. Chosen on reduced training steps of `t5`, `vit`, `whisper`, `llama`,
`resnet50` and `evoformer`, and of two recurrent networks unrolled over steps, on random hosts of 2 to 8 devices: each
is, of some 1,500, the one with which the best of those up to it is best in the geometric mean.
"""

START_WEIGHTS = (
    (1.33, 1.32, 0.88, 2.12, 1.35, 0.42, 1.22, 1.1, 0.0),
    (1.25, 0.83, 1.44, 0.56, 1.57, -0.04, 0.89, 0.0, -0.14),
    (1.15, 0.43, 0.12, 0.0, 0.97, 0.0, 0.36, 0.15, 0.09),
    (0.72, 0.0, 0.17, 0.0, 2.54, 0.48, 0.43, 0.0, 0.0),
    (0.0, 0.0, 3.87, 5.18, 0.14, 0.82, 1.85, 0.0, 0.0),
    (2.52, 2.8, 0.94, 0.0, 0.96, -0.23, -0.16, 0.02, 0.0),
    (1.96, 1.74, 3.52, 0.12, 4.98, 0.83, 3.85, 1.49, -0.06),
    (0.19, 0.45, 0.0, 1.79, 0.25, -0.12, 0.56, 0.57, -0.57),
    (0.44, 0.39, 3.26, 0.0, 0.0, 0.0, 0.0, 3.84, -0.99),
    (1.11, 1.05, 0.0, 1.23, 0.0, 0.5, 0.68, 0.51, 0.03),
    (1.8, 0.0, 2.01, 3.99, 5.07, 0.69, 3.48, 0.0, 1.12),
    (1.14, 0.3, 1.18, 1.39, 0.0, 0.15, 0.55, -0.07, -0.37),
    (0.81, 1.21, 0.85, 0.37, 2.73, 0.0, 0.76, 0.37, 0.0),
    (0.38, 0.93, 3.63, 1.44, 2.87, 0.77, 2.92, 3.64, -1.13),
    (0.59, 0.15, 0.0, 0.0, 0.28, 0.1, 0.22, 0.0, 0.07),
    (2.36, 2.49, 3.81, 7.53, 3.91, 0.43, 2.29, 1.88, -1.39),
)
"""Weights to begin with, in the order of `FEATURES`: of 316, most of them drawn uniformly, the 16 of which the best
over `CROSSED` is best in the geometric mean over the training steps of four models (`rnnlm`, `inception_v3`, `gpt2`,
`clip`) on five hosts."""
