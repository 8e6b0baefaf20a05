"""`solve`: every method on one published workload, under one budget, beside a proven bound.

Proven lower bounds on the two published objectives.

Placements of units without search: one device, blocks of a topological order, greedy; each fits where it can.

"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from rlplace.errors import UserError, check_known
from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.partitioning.contiguous import MOST_PAIRS, dp
from rlplace.partitioning.kernel_anneal import Search
from rlplace.partitioning.objectives import UnitGraph, unit_graph
from rlplace.records import check_seed
from rlplace.search import Budget
from rlplace.search.task import Failure

Ints = NDArray[np.int32]

METHODS = ("single", "blocks", "greedy", "dp", "local-search", "anneal", "portfolio")
SHARES = {"local-search": 1.0, "anneal": 2.0, "portfolio": 4.0}
"""How the rest of a time budget is divided among the methods that use it."""
NUM_CHAINS = 2
"""Annealing runs side by side; the number is fixed, so that results do not depend on the machine's cores."""
NUM_ROUNDS = 8
HEATS = (1.0, 0.015, 0.25, 0.015)
"""Of each chain, as a multiple of the objective's own temperature at the start: graphs of few heavy ops need the
heat to leave a valley, long chains of layers are done best almost without."""
MOST_STARTS = 5
"""Starts that chains take turns with."""
FIRST_STEPS = 20_000
"""Moves below which more rounds are not worth it, and the budget where none is given."""
PILOT_STEPS = 1_000
"""Moves of the first round under a time budget, from which the speed is told."""


@dataclass(frozen=True, eq=False)
class PublishedRow:
    """The result of one method.

    Attributes:
        method: its name.
        placement: (N,) int32; None where it found nothing feasible.
        value_ms: infinite where it found nothing feasible.
        evaluations: placements scored, moves of annealing included; pairs of ideals are not counted.
        plan_s: wall time that it took.
        status: `ok`, `infeasible` (nothing found fits) or `error` (it raised).
        why: further remarks.
    """

    method: str
    placement: Ints | None
    value_ms: float
    evaluations: int
    plan_s: float
    status: str = "ok"
    why: str = ""


@dataclass(frozen=True, eq=False)
class PublishedResult:
    """Rows in the order of `METHODS`, and the best proven bound with its name."""

    rows: tuple[PublishedRow, ...]
    lower_bound_ms: float
    bound: str

    @property
    def best(self) -> PublishedRow:
        """The row with the least value, the first of equals."""
        return min(self.rows, key=lambda row: row.value_ms)


def solve(
    record: DnnPartitioning,
    objective: str,
    *,
    seconds: float = math.inf,
    evaluations: int | None = None,
    seed: int = 0,
    methods: Sequence[str] = METHODS,
) -> PublishedResult:
    """The best placement of each method, and a bound; no row reports an infeasible placement.

    Args:
        record: the workload.
        objective: `max-load` or `piece-latency`.
        seconds: wall time for all methods together, on two cores.
        evaluations: moves for each method that searches; with it alone, the same seed gives the same placements.
            20,000 where neither budget is given.
        seed: of every random draw.
        methods: which to run, of `METHODS`.

    Raises:
        UnknownName: no such objective or method.
        InvalidValue: a budget that is not positive, a negative seed, or piece-latency of a training step.
    """
    for method in methods:
        check_known("method", method, METHODS)
    Budget(math.inf if evaluations is None else evaluations, seconds)  # which refuses what is out of range
    check_seed(seed, "budget")
    if evaluations is None and not math.isfinite(seconds):
        evaluations = FIRST_STEPS
    ordered = [name for name in METHODS if name in methods]
    run = _Run(record, objective, seconds, evaluations, seed, ordered)
    rows = tuple(map(run.row, ordered))
    return PublishedResult(rows, *lower_bound_ms(record, objective))


@dataclass(frozen=True, eq=False)
class _Answer:
    """Placements of units to be scored, the budget spent, and a remark."""

    devices: Ints | None = None
    evaluations: int = 0
    why: str = ""


class _Run:
    """One call of `solve`: the clock, and results that methods hand on to each other."""

    def __init__(
        self,
        record: DnnPartitioning,
        objective: str,
        seconds: float,
        evaluations: int | None,
        seed: int,
        methods: list[str],
    ) -> None:
        self._deadline = time.monotonic() + seconds
        self._record, self._objective = record, objective
        self._search = Search(record, objective)
        self._evaluations, self._seed, self._methods = evaluations, seed, methods
        self._found: dict[str, tuple[Ints, float]] = {}

    def row(self, method: str) -> PublishedRow:
        """The result of a method, scored by the objective itself."""
        begin = time.monotonic()
        try:
            answer = self._answer(method)
        except UserError:
            raise
        except Exception as error:  # a method that failed is one row, not the table
            return PublishedRow(method, None, math.inf, 0, time.monotonic() - begin, "error", Failure.of(error).why)
        found = self._scored(answer.devices)
        spent, plan_s = answer.evaluations + len(found), time.monotonic() - begin
        devices, value = min(found, key=lambda one: one[1], default=(np.empty(0, dtype=np.int32), math.inf))
        if not math.isfinite(value):
            why = answer.why or "nothing that it tried fits in memory"
            return PublishedRow(method, None, math.inf, spent, plan_s, "infeasible", why)
        self._found[method] = (devices, value)
        return PublishedRow(method, self._search.units.expand(devices), value, spent, plan_s, why=answer.why)

    def _answer(self, method: str) -> _Answer:
        if method in QUICK:
            return _Answer(QUICK[method](self._search))
        if method in ANNEALED:
            return self._rounds(method, *ANNEALED[method])
        return self._dp()

    def _scored(self, placements: Ints | None) -> list[tuple[Ints, float]]:
        """Placements of units (B, U) with their values in milliseconds."""
        if placements is None or not len(placements):
            return []
        return list(zip(placements, self._search.values_ms(placements).tolist(), strict=True))

    def _seconds_for(self, method: str) -> float:
        """The method's share of the time that is left."""
        left_s = max(self._deadline - time.monotonic(), 0.01)
        later = self._methods[self._methods.index(method) :]
        return left_s * SHARES[method] / sum(SHARES.get(name, 0.0) for name in later)

    def _dp(self) -> _Answer:
        in_turn = self._objective == "piece-latency"
        most = (MOST_PAIRS // 4 if in_turn else MOST_PAIRS) * min((self._deadline - time.monotonic()) / 60, 1.0)
        split = dp(self._record, in_turn=in_turn, most_pairs=int(most))
        if split.devices is None:
            return _Answer(why="no contiguous split fits")
        among = "best of all contiguous splits" if split.is_exact else "best in one order of the graph"
        why = f"{among}, {split.num_ideals} ideals{', devices in turn' if in_turn else ''}"
        first = np.unique(self._search.units.op_unit, return_index=True)[1]
        return _Answer(split.devices[first][None], why=why)

    def _starts(self, names: Sequence[str]) -> list[Ints]:
        """Feasible placements of units to begin with, best first; placements of methods that did not run are made
        here."""
        rows = [self._found[name] for name in names if name in self._found]
        for name in names:
            if (name in QUICK and name not in self._found) or (name == "dp" and name not in self._methods):
                rows += self._scored(self._answer(name).devices)
        best = sorted(rows, key=lambda row: row[1])[:MOST_STARTS]
        return [devices for devices, value_ms in best if math.isfinite(value_ms)]

    def _rounds(self, method: str, starts: Sequence[str], heats: Sequence[float]) -> _Answer:
        """Rounds of chains side by side, from starts in turn; the last of each turn of heats from the best so far."""
        begin = self._starts(starts)
        if not begin:
            return _Answer()
        best, best_ms = begin[0], float(self._search.values_ms(begin[0])[0])
        deadline = time.monotonic() + self._seconds_for(method)
        seeds = np.random.SeedSequence((self._seed, METHODS.index(method))).generate_state(256).tolist()
        rounds, steps = NUM_ROUNDS, PILOT_STEPS
        if self._evaluations is not None:
            rounds = min(max(self._evaluations // FIRST_STEPS, 1), NUM_ROUNDS)
            steps = max(1, self._evaluations // (rounds * NUM_CHAINS))
        spent, index = 0, 0
        with ThreadPoolExecutor(NUM_CHAINS) as pool:
            while steps:
                began = time.monotonic()
                jobs = []
                for chain in range(index * NUM_CHAINS, (index + 1) * NUM_CHAINS):
                    turn = chain % len(heats)
                    origin = best if turn == len(heats) - 1 and chain else begin[chain % len(begin)]
                    hot = max(self._search.hot * heats[turn], self._search.cold)
                    seed = seeds[chain % len(seeds)]
                    jobs.append(pool.submit(self._search.anneal, origin, seed, steps, hot, self._search.cold))
                for devices, value in [job.result() for job in jobs]:
                    if value < best_ms:  # the kernels' running sums of bytes may be a rounding error off: score anew
                        value = float(self._search.values_ms(devices)[0])
                    if value < best_ms:
                        best, best_ms = devices, value
                spent += NUM_CHAINS * steps
                index += 1
                now = time.monotonic()
                if self._evaluations is not None:
                    steps = steps if index < rounds and now < deadline else 0
                else:
                    steps = self._next_steps(steps, now - began, deadline - now, rounds + 1 - index)
        return _Answer(best[None], evaluations=spent)

    @staticmethod
    def _next_steps(steps: int, took_s: float, left_s: float, rounds_left: int) -> int:
        """Moves a chain of the next round, for the rounds that are left to fill the time; 0 when it is over."""
        share_s = left_s / max(rounds_left, 1)
        if rounds_left < -NUM_ROUNDS or share_s <= 0 or left_s < 0.02 * NUM_ROUNDS:
            return 0
        most = 20 * steps if steps == PILOT_STEPS else 4 * steps
        return min(int(0.97 * share_s * steps / max(took_s, 1e-6)), max(most, FIRST_STEPS))


def largest_unit_ms(units: UnitGraph) -> float:
    """The longest unit where it is fastest: a unit is on one device, whose load is at least the unit's work."""
    fits = units.supported & (units.size_bytes <= units.capacity_bytes)
    return float(np.max(_fastest_ms(units, fits, units.accelerator_ms, units.cpu_ms), initial=0.0))


def shared_work_ms(units: UnitGraph) -> float:
    """All work shared out without remainder and without transfers.

    With a share `x_u` of each unit on the CPUs, the K accelerators' loads are at least `sum p_u (1 - x_u)` together, so
    the largest is at least a K-th of that; the CPUs' load is at least `sum q_u x_u`; the ops on accelerators fit in K
    memories. Every placement is such shares of 0 and 1, so the linear program's least maximum bounds them all. It
    contains the memory-forced work of the CPUs: where K memories do not hold everything, the shares cannot be 0.
    """
    count, k = units.num_units, units.num_accelerators
    if units.num_devices == k:
        return float(units.accelerator_ms.sum()) / k
    low = np.where(units.supported & (k > 0), 0.0, 1.0)
    scale = max(k * units.capacity_bytes, 1.0)
    shares = np.stack((-units.accelerator_ms, units.cpu_ms, -units.size_bytes / scale))
    table = np.column_stack((shares, [-k, -1.0, 0.0]))
    room = np.array([-units.accelerator_ms.sum(), 0.0, (k * units.capacity_bytes - units.size_bytes.sum()) / scale])
    limits = np.stack((np.append(low, 0.0), np.append(np.ones(count), np.inf)), axis=1)
    answer = linprog(np.append(np.zeros(count), 1.0), A_ub=table, b_ub=room, bounds=limits, method="highs")
    return float(answer.fun) * (1 - 1e-9) if answer.status == 0 else 0.0


def longest_path_ms(record: DnnPartitioning) -> float:
    """The longest path, every op where it is fastest, every transfer free.

    An op finishes at least its own time after its sources: on a CPU by definition; in a piece of an accelerator, all
    members finish together, after the work of all of them, so the work of a path's members inside the piece, which come
    one after the other, lies between the finish before the piece and its own.
    """
    fastest = _fastest_ms(record, record.supported, record.accelerator_ms, record.cpu_ms)
    return float(np.max(_through_ms(record, fastest), initial=0.0))


def forced_work_ms(record: DnnPartitioning) -> float:
    """The least latency whose forced work fits on the accelerators.

    With a latency L, an op whose longest path, itself on a CPU and all others where they are fastest, is longer than L
    is on an accelerator. The pieces of one accelerator run one after the other (each has a path from the one before
    it), so the forced work is at most K L, and the forced memory fits in K memories. The forced set shrinks as L grows,
    so an L that fails is a bound, and bisection finds the largest to within 1e-6 of itself.
    """
    k = record.num_accelerators
    fastest = _fastest_ms(record, record.supported, record.accelerator_ms, record.cpu_ms)
    through = _through_ms(record, fastest)
    on_cpu = through - fastest + (record.cpu_ms if record.num_cpus else np.full(record.num_ops, np.inf))

    def fails(latency_ms: float) -> bool:
        forced = on_cpu > latency_ms * (1 + 1e-9)
        work, size = float(record.accelerator_ms[forced].sum()), float(record.size_bytes[forced].sum())
        return bool(np.any(forced & ~record.supported)) or work > k * latency_ms or size > k * record.capacity_bytes

    low, high = 0.0, float(record.cpu_ms.sum() + record.accelerator_ms.sum()) + 1.0
    if fails(high):
        return 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return low


def lower_bound_ms(record: DnnPartitioning, objective: str) -> tuple[float, str]:
    """The best bound on `objective` (`max-load` or `piece-latency`) in milliseconds, and its name."""
    if objective == "max-load":
        units = unit_graph(record, record.units)
        bounds = (shared_work_ms(units), "shared work"), (largest_unit_ms(units), "largest unit")
    else:
        bounds = (longest_path_ms(record), "longest path"), (forced_work_ms(record), "forced work")
    return max(bounds, key=lambda pair: pair[0])


def _fastest_ms(
    on: DnnPartitioning | UnitGraph,
    is_accelerated: NDArray[np.bool_],
    accelerator_ms: NDArray[np.float64],
    cpu_ms: NDArray[np.float64],
) -> NDArray[np.float64]:
    """(N,) the time of each op, or unit, on the fastest device that can run it."""
    on_accelerator = np.where(is_accelerated & (on.num_accelerators > 0), accelerator_ms, np.inf)
    return np.minimum(on_accelerator, cpu_ms if on.num_devices > on.num_accelerators else np.inf)


def _through_ms(record: DnnPartitioning, op_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) the longest path through each op."""
    graph = record.graph
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    return op_ms + longest_before(op_ms, *edges) + longest_after(op_ms, *edges)


def single(search: Search) -> Ints:
    """(B, U): everything on the first accelerator, and on the CPUs, as far as allowed."""
    units, count = search.units, search.units.num_accelerators
    first = [0] if count and units.supported.all() else []
    devices = np.array(first + [count] * (units.num_devices - count), dtype=np.int32)
    return np.repeat(devices[:, None], units.num_units, axis=1)


def blocks(search: Search) -> Ints:
    """(B, U): the topological order cut into 2, 3, ..., K blocks of equal work, and of equal memory.

    Ops that an accelerator cannot run are on the CPUs.
    """
    units = search.units
    count = units.num_accelerators
    rows = []
    for weight in (units.accelerator_ms, units.size_bytes):
        ordered = weight[search.order]
        middle = (np.cumsum(ordered) - ordered / 2) / max(float(ordered.sum()), 1e-30)
        for parts in range(2, count + 1):
            row = np.empty(units.num_units, dtype=np.int32)
            row[search.order] = np.minimum((middle * parts).astype(np.int32), parts - 1)
            row[~units.supported] = count
            rows.append(row)
    return np.array(rows, dtype=np.int32).reshape(-1, units.num_units)


def greedy(search: Search) -> Ints:
    """(B, U): accelerators filled one after the other, up to their memory and to a share of the work.

    Units come in topological order; one that does not fit on the accelerator being filled opens the next; after the
    last it goes to the first with room, and to the CPUs where there is none. The share runs from an even one to all
    work, so that few and many accelerators are tried. This is the latency greedy of Tarnawski et al. (2020), with a cap
    on work.
    """
    units = search.units
    shares = units.accelerator_ms.sum() / np.arange(1, max(units.num_accelerators, 1) + 1)
    rows = [_fill(search, share, search.order) for share in (*shares, *(1.05 * shares))]
    rows.append(_fill(search, 0.0, np.argsort(-units.size_bytes, kind="stable").astype(np.int32)))
    return np.array([row for row in rows if row is not None], dtype=np.int32).reshape(-1, units.num_units)


def _fill(search: Search, share_ms: float, order: Ints) -> Ints | None:
    units = search.units
    count, capacity = units.num_accelerators, units.capacity_bytes
    held, work = [0.0] * count, 0.0
    row, device = np.empty(units.num_units, dtype=np.int32), 0
    for unit in order.tolist():
        size, ms = float(units.size_bytes[unit]), float(units.accelerator_ms[unit])
        target = count
        if units.supported[unit] and count:
            if device < count - 1 and (held[device] + size > capacity or (work > 0 and work + ms / 2 > share_ms)):
                device, work = device + 1, 0.0
            target = next((other for other in (device, *range(count)) if held[other] + size <= capacity), count)
        if target == count == units.num_devices:
            return None
        if target < count:
            held[target] += size
            work += ms
        row[unit] = target
    return row


QUICK: dict[str, Callable[[Search], Ints]] = {"single": single, "blocks": blocks, "greedy": greedy}
"""Methods without search."""
ANNEALED: dict[str, tuple[Sequence[str], Sequence[float]]] = {
    "local-search": (tuple(QUICK), (0.0,)),
    "anneal": (tuple(QUICK), HEATS),
    "portfolio": (METHODS, HEATS),
}
"""Methods that anneal: whose placements they start from, and their heats."""
