"""`METHODS`: every method that finds placements, by name; `find` runs one, `find_winners` picks placements that are
worth measuring.

`choose_diverse`: of many placements the best that are unlike each other. `permuted`, `shuffled`: a placement with its
devices relabelled, for a shorter step or at random without loss. `OwnOrder`: a simulator for tasks whose placements
are planned later, in the problem's own order of ops.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure import Plan, Problem, Simulator
from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import OP_ORDERS
from rlplace.registry import Registry
from rlplace.search.task import BestSoFar, Budget, Saveable, Task

LEAST_DIFFERENCE = 0.01
"""Share of ops in which placements that are measured in one batch differ, where there is a choice."""


def choose_diverse(
    devices_KN: NDArray[np.int32],
    simulated_s_K: NDArray[np.float64],
    count: int,
    seen: Iterable[NDArray[np.int32]] = (),
) -> list[int]:
    """Rows to take, at most `count`: those unlike all before them by rank, then, if too few, the others by rank.

    A row is unlike another if at least `LEAST_DIFFERENCE` of its ops are on another device. The fastest is looked at
    first; equal step times rank by index.

    Args:
        devices_KN: (K, N) devices of ops.
        simulated_s_K: (K,) seconds that they are ranked by.
        count: how many are wanted.
        seen: placements (N,) that those taken should differ from, too.

    Example:
        >>> choose_diverse(np.array([[0, 0], [0, 1], [0, 0]]), np.array([2.0, 1.0, 1.5]), 2)
        [1, 2]
    """
    devices = _narrow(devices_KN)
    ranked = np.argsort(np.asarray(simulated_s_K), kind="stable").tolist()
    known = [_narrow(row) for row in seen]
    chosen: dict[int, None] = {}
    for row in ranked:
        if len(chosen) == count:
            break
        differing = (np.count_nonzero(devices[row] != other) / max(len(other), 1) for other in reversed(known))
        if all(share >= LEAST_DIFFERENCE for share in differing):
            known.append(devices[row])
            chosen[row] = None
    return list(chosen | dict.fromkeys(ranked))[:count]


def _narrow(devices: NDArray[np.int32]) -> NDArray[np.int32] | NDArray[np.uint8]:
    """The same devices in a quarter of the bytes, where their numbers allow it: comparing is all that is done."""
    devices = np.asarray(devices)
    return devices.astype(np.uint8) if devices.size and devices.max() < 256 else devices


_ROUNDING = 1e-9
"""The share by which two sums of the same seconds may differ."""


def permuted(
    problem: Problem, devices_N: NDArray[np.int32], step_s: float, timer: StepTimer, *, most: int
) -> tuple[NDArray[np.int32], float]:
    """`devices_N` relabelled among devices of the same kind so that it takes the least time, and that time.

    A descent: two devices are swapped after each other, every swap that helps is kept, until none does. It draws
    nothing. A swap that pins or exclusions forbid, or that changes nothing, is not timed.

    Args:
        problem: whose devices are relabelled.
        devices_N: (N,) devices of ops.
        step_s: its step time by `timer`, in seconds; infinite where it does not fit into memory.
        timer: times a placement.
        most: placements timed at most.
    """
    best, best_s = np.array(devices_N, dtype=np.int32), step_s
    swaps = _swaps(problem)
    timed, tried = {best.tobytes()}, 0
    while tried < len(swaps) and len(timed) <= most:
        swap = swaps.pop(0)
        swaps.append(swap)
        tried += 1
        swapped = _swapped(problem, best, swap)
        if swapped.tobytes() in timed or not _is_allowed(problem, swapped):
            continue
        timed.add(swapped.tobytes())
        swapped_s = float(timer.step_times(swapped[None])[0])
        if swapped_s < best_s:
            best, best_s, tried = swapped, swapped_s, 0
    return best, best_s


def shuffled(
    problem: Problem,
    devices_N: NDArray[np.int32],
    step_s: float,
    timer: StepTimer,
    generator: np.random.Generator,
    *,
    swaps: int,
) -> NDArray[np.int32]:
    """`devices_N` relabelled at random as far as `timer` sees no loss: by a symmetry of the host where it has one.

    A random walk: two devices of a kind are swapped, and stay so unless the step time grows.

    Args:
        problem: whose devices are relabelled.
        devices_N: (N,) devices of ops.
        step_s: its step time by `timer`, in seconds.
        timer: times a placement.
        generator: of the draws.
        swaps: steps of the walk; placements timed at most.
    """
    devices, pairs = np.array(devices_N, dtype=np.int32), _swaps(problem)
    for pair in generator.integers(len(pairs), size=swaps).tolist() if pairs else ():
        swapped = _swapped(problem, devices, pairs[pair])
        if np.array_equal(swapped, devices) or not _is_allowed(problem, swapped):
            continue
        if float(timer.step_times(swapped[None])[0]) <= step_s * (1.0 + _ROUNDING):
            devices = swapped
    return devices


def _swaps(problem: Problem) -> list[tuple[int, int]]:
    """Pairs of devices of the same kind, kinds in order of their first device."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for index, device in enumerate(problem.host.devices):
        kinds[device.kind].append(index)
    return [pair for devices in kinds.values() for pair in combinations(devices, 2)]


def _swapped(problem: Problem, devices: NDArray[np.int32], swap: tuple[int, int]) -> NDArray[np.int32]:
    """The placement with two devices in each other's place."""
    mapping = np.arange(problem.host.num_devices, dtype=np.int32)
    mapping[list(swap)] = swap[::-1]
    return mapping[devices]


def _is_allowed(problem: Problem, devices: NDArray[np.int32]) -> bool:
    """Whether pins and exclusions let every op be where it is; relabelling breaks no co-location class."""
    return problem.allowed is None or bool(problem.allowed[np.arange(len(devices)), devices].all())


class OwnOrder:
    """A step timer that knows no order but the problem's own.

    A search of a step that is cut into micro-batches would else go on in the order that suits its start: such
    placements are never run on the host, and observers are not told of them.

    Attributes:
        threads: placements simulated at once.

    Args:
        simulator: times placements.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.threads = simulator.threads
        self._simulator = simulator

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of (B, N) placements."""
        return self._simulator.step_times(placements)

    def step_times_within(self, placements: NDArray[np.int32], cutoff_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same, sooner where they are above `cutoff_s` (B,)."""
        return self._simulator.step_times_within(placements, cutoff_s)


class OwnOrderWithPaths(OwnOrder):
    """The same, which tells critical paths: for searches for the best placement, not for different ones to learn
    from."""

    def critical_ops(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.int32]:
        """(C,) ops of a critical path of a placement (N,), with any priorities."""
        return self._simulator.critical_ops(devices)


SEARCH = "portfolio"
DESCENT, WALK = 16, 8
"""Placements simulated at most for each winner to relabel its devices: for the better, then at random at no loss."""
LEAST_SEARCHED = 0.5
"""Least share of a budget for the search, beside relabelling."""
KEPT = 4
"""Placements that are kept for each one that is wanted: winners are chosen among them once more at the end."""


class Winners:
    """The best placements that a search scores, unlike each other: an observer of its task.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[bytes, tuple[NDArray[np.int32], float]] = {}
        self._worst_s = float("inf")

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Keeps those that are better than the worst of as many as there is room for."""
        for row in np.flatnonzero(step_s < self._worst_s).tolist():
            self._kept[placements[row].tobytes()] = (np.array(placements[row], dtype=np.int32), float(step_s[row]))
        if len(self._kept) >= 2 * self._capacity:  # now and then: a search scores thousands a second
            best = self.best(self._capacity)
            self._kept = {devices.tobytes(): (devices, step_s) for devices, step_s in best}
            self._worst_s = max(step_s for _, step_s in best)

    def learned(self, figures: Mapping[str, float]) -> None:
        """A learned policy or host model is not kept."""

    def best(self, count: int, seen: Iterable[NDArray[np.int32]] = ()) -> list[tuple[NDArray[np.int32], float]]:
        """At most `count` placements and their step times, fastest first, unlike each other and `seen` if possible."""
        kept = list(self._kept.values())
        devices, times = np.array([devices for devices, _ in kept]), np.array([step_s for _, step_s in kept])
        return sorted((kept[row] for row in choose_diverse(devices, times, count, seen)), key=lambda one: one[1])


@dataclass(frozen=True)
class Found:
    """The result of a search and of relabelling.

    Attributes:
        devices: placements (N,), by rank.
        evaluations: placements simulated.
    """

    devices: list[NDArray[np.int32]]
    evaluations: int


class CountedTimer:
    """A step timer that counts the placements it is asked for.

    Attributes:
        count: placements timed so far.
    """

    def __init__(self, timer: StepTimer) -> None:
        self.count = 0
        self._timer = timer

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        self.count += len(placements)
        return self._timer.step_times(placements)


def find_winners(
    problem: Problem,
    simulator: Simulator,
    budget: Budget,
    count: int,
    *,
    seed: int,
    seen: Iterable[NDArray[np.int32]] = (),
) -> Found:
    """The `count` best placements of a search that are unlike each other, each relabelled among devices of a kind.

    A winner's devices are swapped as long as it gets better; then, where the host is symmetric, at random: placements
    that are equal in simulation need not be equal.

    Args:
        problem: of the search.
        simulator: of that problem.
        budget: evaluations and seconds of all of it.
        count: how many are wanted.
        seed: of every draw.
        seen: placements that they should differ from.
    """
    kinds = {device.kind for device in problem.host.devices}
    relabelling = count * (DESCENT + WALK) if len(kinds) < problem.host.num_devices else 0
    searched = max(budget.evaluations - relabelling, LEAST_SEARCHED * budget.evaluations, 1)
    winners, seen = Winners(KEPT * count), list(seen)
    task = Task(problem, OwnOrder(simulator), Budget(int(searched), budget.seconds), seed=seed, observer=winners)
    METHODS[SEARCH].run(task)
    timer, generator = CountedTimer(simulator), np.random.default_rng(seed)
    chosen: list[NDArray[np.int32]] = []
    taken = {devices.tobytes() for devices in seen}
    left = int(budget.evaluations) - task.evaluations
    for devices, step_s in winners.best(count, seen):
        better, better_s = permuted(problem, devices, step_s, timer, most=min(DESCENT, left - timer.count))
        other = shuffled(problem, better, better_s, timer, generator, swaps=min(WALK, left - timer.count))
        new = next((one for one in (other, better, devices) if one.tobytes() not in taken), None)
        if new is not None:
            chosen.append(new)
            taken.add(new.tobytes())
    return Found(chosen, task.evaluations + timer.count)


@dataclass(frozen=True)
class Method:
    """A way to find a placement.

    Attributes:
        name: as in `--methods`.
        home: a function that takes a `Task`, or its name as `module:function`. It scores placements with the task, and
            the task's best placement is the result. It may return the policy or model that it learned.
        kind: `baseline` and `scheduler` need a few evaluations, `exact` and `search` use the budget.
        source: its purpose.
        min_micro_batches: least number of micro-batches that the method needs.
        min_shards: least number of shards that it needs.
    """

    name: str
    home: str | Callable[..., Saveable | None]
    kind: Literal["baseline", "scheduler", "exact", "search"]
    source: str
    min_micro_batches: int = 1
    min_shards: int = 1

    def refusal(self, problem: Problem) -> InvalidValue | None:
        """The reason why the method cannot be used for `problem`; None if it can."""
        graph = problem.graph
        cut, split = "slices of a batch: cut the step with `--micro-batches K`", "shards of ops: split the step with"
        for name, count, least, what in (
            ("micro_batches", graph.num_micro_batches, self.min_micro_batches, cut),
            ("shards", graph.num_shards, self.min_shards, f"{split} `--split` and `--split-parts P`"),
        ):
            if count < least:
                hint = f"It deals out {what}."
                return InvalidValue(name, count, f"at least {least}", where=f"method {self.name}", hint=hint)
        return None

    def run(self, task: Task, **options: Any) -> Saveable | None:
        """Runs the method on `task`; returns the learned policy or host model, if there is one.

        Args:
            task: the problem to solve, and its budget.
            options: options of the method.

        Raises:
            InvalidValue: the batch is not cut into enough micro-batches.
            MissingExtra: it needs a package that is not installed.
        """
        if (refused := self.refusal(task.problem)) is not None:
            raise refused
        solve = self.home
        if isinstance(solve, str):
            module, _, function = solve.partition(":")
            solve = cast(Callable[..., Saveable | None], getattr(importlib.import_module(module), function))
        try:
            return solve(task, **options)
        except Exception as error:
            error.add_note(f"It happened in method {self.name!r}.")
            raise


_BUILT_IN = (
    Method(
        "single", "rlplace.search.rules.baselines:solve_single", "baseline", "everything on the best feasible device"
    ),
    Method("round-robin", "rlplace.search.rules.baselines:solve_round_robin", "baseline", "groups dealt out in order"),
    Method("random", "rlplace.search.rules.baselines:solve_random", "search", "groups drawn uniformly"),
    Method("blocks", "rlplace.search.rules.baselines:solve_blocks", "baseline", "contiguous blocks of equal cost"),
    Method(
        "expert",
        "rlplace.search.rules.baselines:solve_expert",
        "baseline",
        "by module, as by hand: runs, layer k on device k, halves",
    ),
    Method(
        "metis",
        "rlplace.search.rules.baselines:solve_metis",
        "baseline",
        "balanced parts, few bytes cut: Karypis and Kumar 1998",
    ),
    Method(
        "scotch",
        "rlplace.search.rules.baselines:solve_scotch",
        "baseline",
        "mapping onto the devices: Pellegrini 1996",
    ),
    Method(
        "eft",
        "rlplace.search.schedule.list_schedulers:solve_eft",
        "scheduler",
        "earliest finish time, without insertion",
    ),
    Method(
        "heft",
        "rlplace.search.schedule.list_schedulers:solve_heft",
        "scheduler",
        "HEFT with insertion: Topcuoglu et al. 2002",
    ),
    Method(
        "peft",
        "rlplace.search.schedule.list_schedulers:solve_peft",
        "scheduler",
        "look-ahead by optimistic costs: Arabnejad and Barbosa 2014",
    ),
    Method(
        "critical-path",
        "rlplace.search.schedule.list_schedulers:solve_critical_path",
        "scheduler",
        "CPOP: Topcuoglu et al. 2002",
    ),
    Method(
        "m-topo",
        "rlplace.search.schedule.list_schedulers:solve_m_topo",
        "scheduler",
        "even memory, in order: Baechi, Jeon et al. 2020",
    ),
    Method(
        "m-etf",
        "rlplace.search.schedule.list_schedulers:solve_m_etf",
        "scheduler",
        "earliest start first: Baechi, Jeon et al. 2020",
    ),
    Method(
        "m-sct",
        "rlplace.search.schedule.list_schedulers:solve_m_sct",
        "scheduler",
        "favourite children by LP: Baechi, Jeon et al. 2020",
    ),
    Method(
        "data-parallel",
        "rlplace.search.parallel.hybrid:solve_data_parallel",
        "baseline",
        "micro-batches dealt out, parameters owned evenly: ZeRO-1, Rajbhandari et al. 2020",
        min_micro_batches=2,
    ),
    Method(
        "pipeline",
        "rlplace.search.parallel.hybrid:solve_pipeline",
        "baseline",
        "a stage a device: GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2019",
        min_micro_batches=2,
    ),
    Method(
        "hybrid",
        "rlplace.search.parallel.hybrid:solve_hybrid",
        "baseline",
        "stages x replicas by dynamic programming: DAPPLE, Fan et al. 2021",
        min_micro_batches=2,
    ),
    Method(
        "tensor-parallel",
        "rlplace.search.parallel.hybrid:solve_tensor_parallel",
        "baseline",
        "shards within teams of devices, replicas over teams: Megatron-LM, Shoeybi et al. 2019",
        min_shards=2,
    ),
    Method(
        "hybrid-3d",
        "rlplace.search.parallel.hybrid:solve_hybrid",
        "baseline",
        "stages x replicas x shards: Narayanan et al. 2021",
        min_shards=2,
    ),
    Method(
        "cp-sat",
        "rlplace.search.cp_sat:solve_cp_sat",
        "exact",
        "constraint program: optimal when small, else a bound (OR-Tools)",
    ),
    Method(
        "anneal",
        "rlplace.search.improve.anneal:solve_anneal",
        "search",
        "annealing over groups, then ops: Kirkpatrick et al. 1983",
    ),
    Method(
        "evolve",
        "rlplace.search.improve.portfolio:solve_evolve",
        "search",
        "a list scheduler whose weights CMA-ES tunes, then annealing",
    ),
    Method(
        "genetic",
        "rlplace.search.improve.portfolio:solve_genetic",
        "search",
        "biased random keys: Gonçalves & Resende 2011",
    ),
    Method(
        "cem",
        "rlplace.search.improve.portfolio:solve_cem",
        "search",
        "cross-entropy method, a categorical a group: Rubinstein 1999",
    ),
    Method(
        "portfolio",
        "rlplace.search.improve.portfolio:solve_portfolio",
        "search",
        "all placements where they are few, else evolve",
    ),
)
METHODS: Registry[Method] = Registry(
    "method", {method.name: method for method in _BUILT_IN}, group="rlplace.methods", entry_type=Method
)
"""Every method by name; installed packages bring more as entry points of `rlplace.methods`."""


def register_method(method: Method) -> None:
    """Adds a method under its name, for this process.

    Raises:
        InvalidValue: the name is malformed or taken.
    """
    METHODS.register(method.name, method)


def adopt_methods(methods: Iterable[Method]) -> None:
    """Makes methods of another process known to this one, in place of others of their names.

    A worker of a cluster knows the methods that are built in or installed, and is sent those that `register_method`
    added where the command runs.
    """
    for method in methods:
        if METHODS.get(method.name) != method:
            with contextlib.suppress(UnknownName):  # new here, or of an installed package, which it hides
                METHODS.unregister(method.name)
            register_method(method)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of a method.

    Attributes:
        devices: (N,) int32; None if it found no feasible placement.
        step_time_s: infinite if it found no feasible placement.
        evaluations: placements scored.
        plan_s: wall time of the method.
        lower_bound_s: a bound that the method proved; 0 if it proved none.
        history: the improvements of the best step time.
        learned: the learned policy or host model; None for a method that learns none.
        plan: `devices` with all orders fixed, if the step time is for another than the default order.
        op_order: the default order of ops that the method searched in: another than the problem's where nothing fits in
            that.
    """

    devices: NDArray[np.int32] | None
    step_time_s: float
    evaluations: int
    plan_s: float
    lower_bound_s: float
    history: tuple[BestSoFar, ...]
    learned: Saveable | None = None
    plan: Plan | None = None
    op_order: str = "rank"

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every op."""
        spent = f"{self.evaluations:,} placements in {self.plan_s:.3g} s"
        found = "nothing feasible" if self.devices is None else f"{self.step_time_s * 1e3:.4g} ms a step"
        return f"SearchResult({found}, {spent})"

    @classmethod
    def of(cls, task: Task, learned: Saveable | None = None) -> SearchResult:
        """The result of a task."""
        return cls(
            task.best_devices,
            task.best_s,
            task.evaluations,
            task.elapsed_s,
            task.lower_bound_s,
            tuple(task.history),
            learned,
            task.best_plan,
            task.problem.op_order,
        )


def find(
    problem: Problem, method: str, timer: StepTimer, budget: Budget | None = None, *, seed: int = 0, **options: Any
) -> SearchResult:
    """The best placement that `method` finds within `budget`; deterministic for a seed and a number of evaluations.

    Where nothing fits into memory, a step in micro-batches is searched once more in each other order of ops, until
    something fits.

    Args:
        problem: the problem to place.
        method: a name of `METHODS`.
        timer: scores placements; another order is tried only with a `Simulator`.
        budget: the budget of each order; unlimited by default.
        seed: of all random draws.
        options: options of the method.

    Raises:
        UnknownName: no such method.
        InvalidValue: a seed below 0.
        MissingExtra: the method needs a package that is not installed.
    """
    task = Task(problem, timer, budget, seed=seed)
    result = SearchResult.of(task, METHODS[method].run(task, **options))
    others = [order for order in OP_ORDERS[::-1] if order != problem.op_order]  # what needs least memory first
    while result.devices is None and others and problem.graph.num_micro_batches > 1 and isinstance(timer, Simulator):
        simulator = Simulator(replace(problem, op_order=others.pop(0)))
        task = Task(simulator.problem, simulator, budget, seed=seed)
        again = SearchResult.of(task, METHODS[method].run(task, **options))
        plan = again.plan if again.plan or again.devices is None else simulator.plan(again.devices)
        result = replace(again, plan=plan, evaluations=result.evaluations + again.evaluations)
    return result
