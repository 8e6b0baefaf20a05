"""`choose`: how many micro-batches a step is cut into, and in which order their ops run, by a race of searches.

It may also split ops into shards: `CLASSES` are the ways that are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, RunnerError, UserError, refuse_if
from rlplace.graphs import BACKWARD
from rlplace.measure import Problem, Simulator
from rlplace.measure.costs.costs import estimate_costs
from rlplace.measure.placement import PlacedSplit
from rlplace.measure.problem import OP_ORDERS
from rlplace.search.groupings import balanced
from rlplace.search.methods import METHODS, OwnOrderWithPaths
from rlplace.search.parallel.hybrid import parallel_starts
from rlplace.search.rules.baselines import plain_devices
from rlplace.search.task import Budget, Task

if TYPE_CHECKING:
    from rlplace.graphs import SplitPlan

SEARCH = "portfolio"
FIRST_ORDER, LEAN_ORDER = "tilt", "backward-first"
"""The order that numbers of micro-batches are compared in, and that where nothing fits in it."""
SHARE = 0.3
"""Part of all evaluations that the choice takes, a third of it for the powers of two, the rest for the next numbers
..."""
ROUNDS = 3
MOST_EACH = 1000
"""... and evaluations of one search above which the choice does not get better."""
WORSE = 1.1
"""Once two numbers of micro-batches in turn are this many times as slow as the best, larger ones are left out."""
KEPT_COUNTS = 3
"""Most numbers of micro-batches that go on to a round of all orders ..."""
NEAR = 1.15
"""... of those that are at most this many times as slow as the best."""
FINAL = 2
"""Most contenders in the last round ..."""
NEAREST = 1.03
"""... of those that are at most this many times as slow as the best."""
HEADROOM = 1.05
"""Splits are not tried where the best step takes less than this many times all work spread evenly."""
CLASSES = {
    ("vocabulary", "attention", "mlp", "experts", "tables"): 0.5,
    ("vocabulary", "attention"): 0.2,
    ("vocabulary",): 0.0,
    ("tables",): 0.0,
    ("updates",): 0.1,
}
"""What is split, by classes of `SplitPlan`, and how many ops a shard adds for each op of the step (gpt2, mixtral)."""
SPLIT_SHARE = 0.2
"""Part of all evaluations that splits take, beside `SHARE` ..."""
STARTS_SHARE = 0.4
"""... and of these, the layouts by which most of them are left out ..."""
LAYOUTS = 40
"""... at most so many evaluations each, ..."""
SPLITS = 3
"""... so that the best ones are searched, as many as this ..."""
SPLIT_NEAR = 1.2
"""... of those whose layout is at most so many times as slow as the best search."""
SPLIT_GAIN = 0.98
"""A split is chosen where its step takes at most this part of that of the best step without one. ..."""
CLEAR, DUEL = 0.9, 0.8
"""... Where neither takes less than the first part of the other, both go on for the second part of `SPLIT_SHARE`."""
MOST_PARTS, LAUNCHED = 64, 0.4
"""Shards of one op in all micro-batches, at most; and launches of all ops, over the best step without splits."""
CAPTURE, SPLIT_CAPTURE = 1000, 750
"""Evaluations of one micro-batch that take as long as a capture, and as one whose trace is kept. Where numbers of
micro-batches were raced, splits take about as long as they did, ..."""
TRIED_SHARE, LEAST_TRIED = 0.4, 8
"""... captures and layouts this part of it, or so many; on a host of this machine as many as there were numbers."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """The result of a race.

    Attributes:
        num_micro_batches: K.
        op_order: one of `OP_ORDERS`.
        problem: of K micro-batches with that order.
        spent: evaluations of the whole race.
        devices: (N,) int32, the best placement found on the way; None where none fits.
        step_time_s: its step time; infinite where none fits.
        split: which ops are split into shards; None where it was not to be chosen, or none is best.
        unsplit: the best problem without a split.
        unsplit_s: its step time; infinite where none was found.
    """

    num_micro_batches: int
    op_order: str
    problem: Problem
    spent: int
    devices: NDArray[np.int32] | None = field(repr=False)
    step_time_s: float
    split: SplitPlan | None = None
    unsplit: Problem | None = field(default=None, repr=False)
    unsplit_s: float = math.inf


@dataclass(eq=False)
class _Contender:
    """A number of micro-batches, an order and a split, with the best placement that was found for them."""

    count: int
    problem: Problem
    split: SplitPlan | None = None
    devices: NDArray[np.int32] | None = None
    step_s: float = math.inf
    fullness: float = math.inf
    """Where nothing was found that fits into memory: the largest ratio of needed to available memory of a device, when
    the step is spread.

    More micro-batches hold fewer activations at a time, and more sums of gradients: either may be too large.
    """
    evaluations: int = 0

    @property
    def key(self) -> tuple[float, float, int, int]:
        """Better ones are less: a shorter step, or where none fits one nearer to it; else fewer, the plainer order."""
        fullness = 0.0 if math.isfinite(self.step_s) else self.fullness
        return self.step_s, fullness, self.count, OP_ORDERS.index(self.problem.op_order)

    def in_all_orders(self) -> list[_Contender]:
        """It and the same in every other order; a step that is not cut has one."""
        if self.problem.graph.num_micro_batches == 1:
            return [self]
        problems = (replace(self.problem, op_order=order) for order in OP_ORDERS)
        others = (problem for problem in problems if problem.op_order != self.problem.op_order)
        return [self, *(_Contender(self.count, problem, self.split) for problem in others)]


def choose(
    problems: Mapping[int, Callable[[], Problem]],
    *,
    evaluations: float,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    split: Callable[[int, SplitPlan], Problem] | None = None,
    by_size: bool = False,
) -> Chosen:
    """The number of micro-batches and the op order with which short searches find the shortest step.

    First the powers of two, from the least on, in one order, and the numbers between them on both sides of the best;
    then those that are near the best in all orders; then the best two of those, if they are nearly equal, with more
    evaluations each. After a clear answer the rest of the budget is not spent. A number that cannot be captured is left
    out.

    Then steps with shards, where `split` makes them, unless work is spread nearly evenly without. Of all plans a few
    layouts are timed; the best three are searched, and have to be clearly better than the best step without shards
    (`by_size`: also where small ops are less efficient).

    Args:
        problems: for every number of micro-batches a function that makes the problem; all the same global batch.
        evaluations: placements that the choice and the search that follows may score: the race takes `SHARE` of them.
        seed: of every search.
        say: told results, a line at a time.
        split: makes the problem of a number of micro-batches whose ops are split; None: no split is tried.
        by_size: for estimated costs: no split that is better only because small ops reach what large ones do.

    Raises:
        InvalidValue: no problems, or no evaluations.
        UserError: none of the problems can be made; the error of the first.
    """
    refuse_if(not problems, "problems", 0, "one or more numbers of micro-batches", where="choose")
    refuse_if(not 1 <= evaluations < math.inf, "evaluations", evaluations, "a number of at least 1", where="choose")
    if len(problems) == 1:
        ((count, make),) = problems.items()
        only = make()
        if only.graph.num_micro_batches == 1 and split is None:
            return Chosen(count, only.op_order, only, 0, None, math.inf)
        problems = {count: lambda: only}
    race = _Race(SHARE * evaluations, seed, say or (lambda _: None))
    if len(problems) == 1 and split is None:
        race.say(f"racing orders of ops: at most {max(int(race.left), 1):,} evaluations")
    racing = [other for one in _near(race.counts(problems), NEAR, KEPT_COUNTS) for other in one.in_all_orders()]
    if len(racing) > 1:
        race.run(racing, race.left / (ROUNDS - 1))
    if len(final := _near(racing, NEAREST, FINAL)) > 1:
        race.run(final, race.left)
    for one in racing:
        race.tell(one)
    best = min(racing, key=lambda one: one.key)
    if split is not None:
        best = _with_split(race, best, list(problems), split, SPLIT_SHARE * evaluations, by_size=by_size)
    race.say(f"chosen: {_words(best)}, {_milliseconds(best.step_s)} ({race.spent:,} evaluations in all)")
    whole = min(racing, key=lambda one: one.key)
    key = best.count, best.problem.op_order, best.problem
    return Chosen(*key, race.spent, best.devices, best.step_s, best.split, whole.problem, whole.step_s)


def _with_split(
    race: _Race,
    whole: _Contender,
    counts: Sequence[int],
    make: Callable[[int, SplitPlan], Problem],
    budget: float,
    *,
    by_size: bool,
) -> _Contender:
    """The best contender with shards, where it is clearly better than the best without; else that one.

    First every set of classes, in up to four shards, with about the best number of micro-batches without them; then the
    best two of these with other sums, numbers of micro-batches and of shards.
    """
    from rlplace.graphs import SplitPlan  # it brings torch

    host, whole_ops = whole.problem.host, whole.problem.graph.num_ops
    if math.isfinite(whole.step_s) and whole.step_s < HEADROOM * spread_s(whole.problem):
        return whole
    launchers = {host.devices[device].dispatcher for device in plain_devices(whole.problem)} - {""}
    launch_s = host.dispatch_s / len(launchers) if launchers else 0.0
    sizes = shard_counts(whole.problem)
    least = LEAST_TRIED if host.is_simulated else min(LEAST_TRIED, len(counts))  # each of them is profiled
    tried: set[tuple[int, SplitPlan]] = set()
    seen: set[str] = set()
    best: dict[tuple[str, ...], _Contender] = {}  # by classes; the others would hold copies of parameters
    race.extend(budget)
    until, is_cut = race.spent + STARTS_SHARE * budget, max(counts) > 1  # else there was no choice before
    work, race.most_work = (1 + (TRIED_SHARE if is_cut else 1)) * race.work, 2 * race.work if is_cut else math.inf
    each = max(min(STARTS_SHARE * budget / 16, LAYOUTS), 4)

    def attempt(count: int, plan: SplitPlan) -> None:
        is_late = race.spent >= until or (race.work > work and len(tried) >= least)
        if (count, plan) in tried or count * plan.num_shards > MOST_PARTS or count not in counts or is_late:
            return
        tried.add((count, plan))
        try:
            one = _Contender(count, _ordered(make(count, plan)), plan)
        except (RunnerError, UserError) as error:  # there is nothing of this class, not enough, or it does not run
            race.say(f"{PlacedSplit(**plan.words)}: left out ({str(error).splitlines()[0]})")
            race.work += SPLIT_CAPTURE * whole_ops / whole.count
            return
        race.work += SPLIT_CAPTURE * one.problem.graph.num_ops / count
        if one.problem.graph.fingerprint not in seen:
            seen.add(one.problem.graph.fingerprint)
            one = race.start(one, int(each))
            if plan.classes not in best or one.key < best[plan.classes].key:
                best[plan.classes] = one
            for classes in [key for key, other in best.items() if other not in ranked()]:
                del best[classes]

    def largest(classes: tuple[str, ...], size: int) -> int:
        """The best number of micro-batches without shards; half of it, and so on, where there were many launches."""
        count, added = whole.count, 1 + CLASSES[classes] * size
        while count > 1 and (
            count * size > MOST_PARTS
            or count * added * launch_s * whole_ops / whole.count > LAUNCHED * whole.step_s
            or count not in counts
        ):
            count //= 2
        return count

    def ranked() -> list[_Contender]:
        return sorted(best.values(), key=lambda one: one.key)[:SPLITS]

    first = max((size for size in sizes if size <= 4), default=0)
    is_trained = bool((whole.problem.graph.phases == BACKWARD).any())
    for classes in CLASSES if first else ():
        count = largest(classes, first)
        if classes != ("updates",) or (count > 1 and is_trained):  # gradients of one are in one place
            attempt(count, SplitPlan(classes, shares_of(whole.problem, first)))
    leaders = [(one.count, one.split) for one in ranked() if one.split is not None]
    for count, plan in leaders:
        if count < plan.num_shards:  # else its whole ops are on all devices of a team anyway
            attempt(count, replace(plan, reduce="chunks"))
    for _, plan in leaders[:2]:
        for size in (first, *sizes):
            for count in dict.fromkeys((host.num_devices // size, largest(plan.classes, size))):
                attempt(count, SplitPlan(plan.classes, shares_of(whole.problem, size)))
    racing = [one for one in ranked() if one.step_s <= SPLIT_NEAR * whole.step_s]
    for one in racing:
        race.tell(one)
    racing = [one for one in racing if not by_size or race.holds(one, whole)]
    race.run(racing, race.left / 2)
    for one in sorted(racing, key=lambda one: one.key)[:1]:
        race.run([one], race.left)
        race.tell(one)
        if CLEAR * whole.step_s < one.step_s <= whole.step_s / CLEAR:  # either may become the better one
            race.extend(DUEL * budget)
            race.run([whole, one], race.left, goes_on=True)
            race.tell(whole)
            race.tell(one)
    better = [one for one in racing if one.step_s <= SPLIT_GAIN * whole.step_s]
    better.sort(key=lambda one: one.key)
    return next((one for one in better if not by_size or race.holds(one, whole, SPLIT_GAIN)), whole)


def sized(problem: Problem) -> Problem | None:
    """The problem with costs whose efficiency depends on the size of ops; None where they cannot be estimated."""
    try:
        return replace(problem, costs=estimate_costs(problem.graph, problem.host, by_size=True))
    except InvalidValue:
        return None


def spread_s(problem: Problem) -> float:
    """Seconds of all work of a step, spread over all devices so that they end together."""
    time_s = np.where(problem.graph.is_source[:, None], 0.0, problem.costs.op_time_s)[:, plain_devices(problem)]
    return float(1.0 / (1.0 / np.maximum(time_s.sum(axis=0), 1e-30)).sum())


def shard_counts(problem: Problem) -> list[int]:
    """Numbers of shards that are tried: 2, 4, and all devices that one reaches as fast as the nearest."""
    plain = plain_devices(problem)
    if len(plain) < 2:
        return []
    s_per_byte = np.sort(problem.transfer_s_per_byte[plain[0], plain[1:]])
    node = 1 + int(np.count_nonzero(s_per_byte <= SAME_LINK * s_per_byte[0]))
    return sorted({size for size in (2, 4, node) if size <= node})


SAME_LINK = 1.5
"""A link is as fast as another one that takes at least this part of its time for a byte."""
MOST_SHARE = 8
"""The largest share of a shard, where the smallest is 1."""


def shares_of(problem: Problem, size: int) -> int | tuple[int, ...]:
    """So many shards for the devices of a problem: their number, or shares where the fastest ones differ in speed."""
    plain = plain_devices(problem)
    whole_s = np.sort(np.where(problem.graph.is_source[:, None], 0.0, problem.costs.op_time_s).sum(axis=0)[plain])
    speed = np.minimum(whole_s[:size].max() / np.maximum(whole_s[:size], 1e-30), MOST_SHARE)
    shares = tuple(np.rint(speed).astype(int).tolist())
    return size if len(set(shares)) == 1 else shares


def _ordered(problem: Problem) -> Problem:
    """The problem in the first order that contenders are compared in."""
    return replace(problem, op_order=FIRST_ORDER) if problem.graph.num_micro_batches > 1 else problem


def _near(racing: Sequence[_Contender], ratio: float, most: int) -> list[_Contender]:
    """The best contenders, at most `most`, that are at most `ratio` times as slow as the best."""
    ranked = sorted(racing, key=lambda one: one.key)[:most]
    return [one for one in ranked if one is ranked[0] or one.step_s <= ratio * ranked[0].step_s]


class _Race:
    """Searches under one budget."""

    def __init__(self, budget: float, seed: int, say: Callable[[str], None]) -> None:
        self.spent = 0
        self.work, self.most_work = 0.0, math.inf
        self.say = say
        self._budget = budget
        self._seed = seed
        self._told: set[tuple[str, str]] = set()

    @property
    def left(self) -> float:
        """Evaluations that are left."""
        return self._budget - self.spent

    def extend(self, evaluations: float) -> None:
        """Gives it so many evaluations from here on."""
        self._budget = self.spent + evaluations

    def counts(self, problems: Mapping[int, Callable[[], Problem]]) -> list[_Contender]:
        """Every power of two that can be made, from the least on, then the numbers on both sides of the best.

        Where a number is not between two powers of two that are offered as well, all are tried, from the least on.
        """
        coarse = sorted(problems)
        if all({1 << count.bit_length() - 1, 1 << (count - 1).bit_length()} <= problems.keys() for count in problems):
            coarse = [count for count in coarse if count.bit_count() == 1]
        share = self.left / ROUNDS / len(coarse)
        found: list[_Contender] = []
        failures: list[tuple[int, UserError]] = []

        def attempt(count: int) -> None:
            try:
                one = self._first(count, problems[count](), share)
            except UserError as error:
                failures.append((count, error))
                return
            found.append(one)
            if len(problems) > 1:
                self.tell(one)

        for count in coarse:
            best_s = min((one.step_s for one in found), default=math.inf)
            if len(found) > 2 and all(one.step_s > WORSE * best_s for one in found[-2:]):
                self.say(f"{_micro_batches(count)} and more: left out (fewer are faster)")
                break
            attempt(count)
        best = min(found, key=lambda one: one.key).count if found else 0
        for count in sorted(problems.keys() - set(coarse)):
            if not best or best < 2 * count < 4 * best:
                attempt(count)
        if failures and not found:
            raise failures[0][1]
        reasons: dict[str, list[int]] = {}
        for count, failure in failures:
            reasons.setdefault(str(failure).splitlines()[0], []).append(count)
        for reason, counts in reasons.items():
            numbers = ", ".join(map(str, counts[:-1]))
            self.say(f"{numbers}{' and ' if numbers else ''}{_micro_batches(counts[-1])}: left out ({reason})")
        return found

    def _first(self, count: int, problem: Problem, share: float) -> _Contender:
        """A number of micro-batches, searched in the first order; in that which needs least where nothing fits."""
        one = _Contender(count, _ordered(problem))
        self.work += CAPTURE * problem.graph.num_ops / count
        self.run([one], share)
        if problem.graph.num_micro_batches > 1 and math.isinf(one.step_s):
            one = _Contender(count, replace(problem, op_order=LEAN_ORDER))
            self.run([one], share)
        return one

    def run(self, racing: Sequence[_Contender], budget: float, *, goes_on: bool = False) -> None:
        """A search of each contender, for equal shares of `budget`; none where it is spent."""
        for place, one in enumerate(racing):
            room = (self.most_work - self.work) / (len(racing) - place) / one.problem.graph.num_ops
            evaluations = int(min(max(budget / len(racing), 1), MOST_EACH, self.left, room))
            if evaluations >= 1:
                one.evaluations += (spent := _search(one, evaluations, self._seed, one.devices if goes_on else None))
                self.spent += spent
                self.work += spent * one.problem.graph.num_ops

    def start(self, one: _Contender, evaluations: int) -> _Contender:
        """The best layout of a contender in the best order for it."""
        task = Task(one.problem, OwnOrderWithPaths(Simulator(one.problem)), Budget(evaluations), seed=self._seed)
        starts = parallel_starts(task)
        self.spent += task.evaluations
        self.work += task.evaluations * one.problem.graph.num_ops
        one.evaluations = task.evaluations
        for other in one.in_all_orders():
            if starts:
                times = Simulator(other.problem).step_times(np.stack([devices for devices, _ in starts]))
                self.spent += len(starts)
                self.work += len(starts) * one.problem.graph.num_ops
                first = int(times.argmin())
                other.evaluations = one.evaluations + len(starts)
                other.devices, other.step_s = starts[first][0], float(times[first])
            if other.step_s < one.step_s:
                one = other
        return one

    def holds(self, one: _Contender, whole: _Contender, most: float = 1.0) -> bool:
        """Whether a split takes at most a part of the whole step with `sized` costs too, both placed as they are."""
        found_s: list[float] = []
        for each in (one, whole):
            problem = sized(each.problem)
            if problem is None or each.devices is None:
                return True
            found_s.append(float(Simulator(problem).step_times(each.devices[None])[0]))
            self.spent += 1
        is_better = found_s[0] <= most * found_s[1]
        if not is_better:
            times = " against ".join(map(_milliseconds, found_s))
            self.say(f"{_words(one)}: left out ({times} of the whole step where small ops are less efficient)")
        return is_better

    def tell(self, one: _Contender) -> None:
        """Says the step time of a contender, unless it was said before."""
        said = _words(one), _milliseconds(one.step_s)
        if one.evaluations and said not in self._told:
            self._told.add(said)
            self.say(f"{said[0]}: {said[1]} after {one.evaluations:,} evaluations")


def _search(one: _Contender, evaluations: int, seed: int, start: NDArray[np.int32] | None = None) -> int:
    """Evaluations that a short search took; its result is kept where it is better."""
    simulator = Simulator(one.problem)
    task = Task(one.problem, OwnOrderWithPaths(simulator), Budget(evaluations), seed=seed)
    METHODS[SEARCH].run(task, start=start)
    if task.best_s < one.step_s:
        one.devices, one.step_s = task.best_devices, task.best_s
    if math.isfinite(one.step_s) or math.isfinite(one.fullness):
        return task.evaluations
    (measured,) = simulator.measure(one.problem.grouping.expand(balanced(one.problem))[None])
    devices = one.problem.host.devices
    one.fullness = max(peak / device.memory_bytes for peak, device in zip(measured.peak_bytes, devices, strict=True))
    return task.evaluations + 1


def _words(one: _Contender) -> str:
    order = f", order {one.problem.op_order}" if one.problem.graph.num_micro_batches > 1 else ""
    plan = "" if one.split is None else f", {PlacedSplit(**one.split.words)}"
    return f"{_micro_batches(one.count)}{plan}{order}"


def _micro_batches(count: int) -> str:
    return "the whole batch at once" if count == 1 else f"{count} micro-batches"


def _milliseconds(step_s: float) -> str:
    """With four digits: contenders are often nearly equal."""
    if not math.isfinite(step_s):
        return "nothing that fits into memory"
    decimals = max(3 - math.floor(math.log10(step_s * 1e3)), 0) if step_s > 0 else 0
    return f"{step_s * 1e3:.{decimals}f} ms"
