"""`choose`: how many micro-batches a step is cut into, and in which order their ops run, by a race of searches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UserError
from rlplace.measure.problem import OP_ORDERS, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.registry import METHODS
from rlplace.search.task import Budget, Task

SEARCH = "portfolio"
SHARE = 0.3
"""Part of all evaluations that the choice takes ..."""
MOST_EACH = 1000
"""... and evaluations of one search above which the choice does not get better."""
LEFT = (1.0, 0.35, 0.15)
"""Part of the contenders that takes part in each round, by successive halving (Karnin, Koren, Somekh 2013): rounds get
equal shares of the budget."""
LEAST_LEFT = 2
"""Contenders in a later round, at the least."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a race came to.

    Attributes:
        num_micro_batches: K.
        op_order: one of `OP_ORDERS`.
        problem: of K micro-batches with that order.
        spent: evaluations of the whole race.
        devices: (N,) int32, the best placement found on the way; None where none fits.
        step_time_s: its step time; infinite where none fits.
    """

    num_micro_batches: int
    op_order: str
    problem: Problem
    spent: int
    devices: NDArray[np.int32] | None = field(repr=False)
    step_time_s: float


@dataclass(eq=False)
class _Contender:
    count: int
    problem: Problem
    devices: NDArray[np.int32] | None = None
    step_s: float = math.inf

    @property
    def key(self) -> tuple[float, int, int]:
        """Better ones are less; fewer micro-batches and the plainer order where step times are equal.

        Where nothing was found that fits into memory, it is the other way round: small ones need less.
        """
        sign = 1 if math.isfinite(self.step_s) else -1
        return self.step_s, sign * self.count, sign * OP_ORDERS.index(self.problem.op_order)


def choose(
    problems: Mapping[int, Callable[[], Problem]],
    *,
    evaluations: float,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Chosen:
    """The number of micro-batches and the op order with which short searches find the shortest step.

    Every number of micro-batches competes with every op order (a step that is not cut has one). Those that do best go
    on to a round with more evaluations each, at most `MOST_EACH`. A number that cannot be captured is left out.

    Args:
        problems: for every number of micro-batches what makes the problem; all the same global batch.
        evaluations: placements that the choice and the search that follows may score: the race takes `SHARE` of them.
        seed: of every search.
        say: told what was found, a line at a time.

    Raises:
        InvalidValue: no problems, or no evaluations.
        UserError: none of the problems can be made; the error of the first.
    """
    if not problems:
        raise InvalidValue("problems", 0, "one or more numbers of micro-batches", where="choose")
    if not 1 <= evaluations < math.inf:
        raise InvalidValue("evaluations", evaluations, "a number of at least 1", where="choose")
    say = say or (lambda _: None)
    racing, spent, budget = _contenders(problems, say), 0, SHARE * evaluations
    if len(racing) == 1:
        only = racing[0]
        return Chosen(only.count, only.problem.op_order, only.problem, 0, None, math.inf)
    whole = len(racing)
    for number, left in enumerate(LEFT):
        racing = sorted(racing, key=lambda one: one.key)[: max(math.ceil(left * whole), LEAST_LEFT)]
        share = (budget - spent) / (len(LEFT) - number)
        each = int(max(1, min(share / len(racing), MOST_EACH)))
        for one in racing:
            if (count := int(min(each, budget - spent))) < 1:
                break
            spent += _search(one, count, seed)
            say(f"{_words(one)}: {_milliseconds(one.step_s)} after {count:,} evaluations")
    best = min(racing, key=lambda one: one.key)
    say(f"chosen: {_words(best)}, {_milliseconds(best.step_s)} ({spent:,} evaluations in all)")
    return Chosen(best.count, best.problem.op_order, best.problem, spent, best.devices, best.step_s)


def _contenders(problems: Mapping[int, Callable[[], Problem]], say: Callable[[str], None]) -> list[_Contender]:
    racing: list[_Contender] = []
    failure: UserError | None = None
    for count, make in sorted(problems.items()):
        try:
            problem = make()
        except UserError as error:
            failure = failure or error
            say(f"{_micro_batches(count)}: left out ({str(error).splitlines()[0]})")
            continue
        orders = OP_ORDERS if problem.graph.num_micro_batches > 1 else OP_ORDERS[:1]
        racing += [_Contender(count, dataclasses.replace(problem, op_order=order)) for order in orders]
    if failure is not None and not racing:
        raise failure
    return racing


def _search(one: _Contender, evaluations: int, seed: int) -> int:
    """Evaluations that a short search took; what it found is kept where it is better."""
    task = Task(one.problem, _InOrder(Simulator(one.problem)), Budget(evaluations), seed=seed)
    METHODS[SEARCH].run(task)
    if task.best_s < one.step_s:
        one.devices, one.step_s = task.best_devices, task.best_s
    return task.evaluations


class _InOrder:
    """A simulator of the problem's own order alone: a search would else try all orders in one."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of (B, N) placements."""
        return self._simulator.step_times(placements)

    def step_times_within(self, placements: NDArray[np.int32], cutoff_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same, sooner where they are above `cutoff_s` (B,)."""
        return self._simulator.step_times_within(placements, cutoff_s)


def _words(one: _Contender) -> str:
    order = f", order {one.problem.op_order}" if one.problem.graph.num_micro_batches > 1 else ""
    return f"{_micro_batches(one.count)}{order}"


def _micro_batches(count: int) -> str:
    return "the whole batch at once" if count == 1 else f"{count} micro-batches"


def _milliseconds(step_s: float) -> str:
    return f"{step_s * 1e3:.1f} ms" if math.isfinite(step_s) else "nothing that fits into memory"
