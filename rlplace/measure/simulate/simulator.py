"""`Simulator`: the step-time model as a `Measurer`.

`check` tells whether a given plan can be followed, `simulated_timeline` when each op and transfer begins and ends and
how much memory is held.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.jit import Ints, kernel
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem, Timeline
from rlplace.measure.simulate.compiled_problem import (
    POSITION,
    TRANSFERS,
    Compiled,
    EventScratch,
    FastScratch,
    PlanBatch,
    Scratch,
    account_names,
    compile_problem,
    default_priorities,
    new_event_scratch,
    new_fast_scratch,
    new_scratch,
    stack_plans,
)
from rlplace.measure.simulate.kernel_batch import critical_path, evaluate, load_plan
from rlplace.measure.simulate.kernel_plan import is_updater, shares_memory
from rlplace.say import counted

if TYPE_CHECKING:
    from collections.abc import Sequence


class CriticalPaths(NamedTuple):
    """The critical path of each of B plans, from the start of its step to its end.

    Attributes:
        step_s: (B,) seconds; infinite where memory does not suffice.
        items: int32, every plan's path in order of time: op `i` as `i`, its transfer `k` as `num_ops + k`.
        offsets: (B + 1,) int64; a path is empty where the step time is infinite.
    """

    step_s: NDArray[np.float64]
    items: NDArray[np.int32]
    offsets: NDArray[np.int64]


Objective = Literal["latency", "throughput"]
Results = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Step times (B,) in seconds, infinite where memory does not suffice, and peaks (B, accounts) in bytes."""
Order = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Place of each op in order of priority, and the op at each place."""
Memory = tuple[Scratch, FastScratch | None, EventScratch | None]
"""Working memory of one thread."""

__all__ = ["Objective", "Simulator"]


class Simulator:
    """Computes step times as docs/step-time-model.md describes. Results are bit-identical for any number of threads.

    Attributes:
        problem: the problem whose placements are simulated.
        objective: the meaning of step times: `latency` or `throughput`.
        threads: placements simulated at once.
    """

    def __init__(self, problem: Problem, *, objective: Objective = "latency", threads: int | None = None) -> None:
        """Prepares the arrays of the problem for the kernels.

        Args:
            problem: the problem whose placements are simulated.
            objective: `latency`, one step from start to end, or `throughput`, seconds per step of a full pipeline.
            threads: placements simulated at once; every core by default.

        Raises:
            InvalidValue: an unknown objective, fewer than one thread, or a problem that cannot be simulated.
        """
        if objective not in ("latency", "throughput"):
            raise InvalidValue("objective", objective, "'latency' or 'throughput'", where="simulator")
        if threads is not None and threads < 1:
            raise InvalidValue("threads", threads, "at least 1", where="simulator")
        self.problem, self.objective = problem, objective
        self._is_throughput = objective == "throughput"
        self.threads = threads or len(os.sched_getaffinity(0))
        self._compiled = compile_problem(problem)
        self._default_order = _order(default_priorities(problem))
        self._idle: SimpleQueue[Memory] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: the problem is laid out again where it is loaded."""
        return partial(Simulator, objective=self.objective, threads=self.threads), (self.problem,)

    def __repr__(self) -> str:
        return f"Simulator({self.problem!r}, {self.objective}, {counted(self.threads, 'thread')})"

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One `Measurement` for each row of `placements` (B, N).

        Raises:
            InvalidValue: a placement of the wrong length, with a device out of range, or that violates a co-location
                rule.
        """
        return self._measurements(*self._evaluate(self._unplanned(placements)))

    def step_times(
        self, placements: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """(B,) float64 seconds, one for each row of `placements` (B, N); infinite if it does not fit into memory.

        Args:
            placements: (B, N) device of each op.
            priorities: (N,) float64, higher runs first; upward ranks by default.

        Raises:
            InvalidValue: a placement or priorities that do not fit the problem.
        """
        return self._evaluate(self._unplanned(placements), priorities)[0]

    def step_times_within(
        self,
        placements: NDArray[np.int32],
        cutoff_s: NDArray[np.float64],
        priorities: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """`step_times`, but faster: step times above `cutoff_s` (B,) may be returned as infinite. The others are equal.

        Raises:
            InvalidValue: a placement that does not fit the problem, or a wrong number of cutoffs.
        """
        batch, cutoff_s = self._unplanned(placements), np.ascontiguousarray(cutoff_s, dtype=np.float64)
        if cutoff_s.shape != (len(batch.devices),):
            raise InvalidValue("cutoff_s", cutoff_s.shape, f"shape {(len(batch.devices),)}", where="simulator")
        return self._evaluate(batch, priorities, cutoff_s)[0]

    def plan(self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None) -> Plan:
        """The plan of the placement `devices` (N,): with all orders fixed.

        Raises:
            InvalidValue: a placement or priorities that do not fit the problem.
        """
        return self.plan_and_time(devices, priorities)[0]

    def plan_and_time(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> tuple[Plan, Measurement]:
        """The plan of a placement and its `Measurement`: `plan` and `retime` in one.

        Raises:
            InvalidValue: a placement or priorities that do not fit the problem.
        """
        batch, order = self._unplanned(devices), self._priority_order(priorities)
        with self._scratch() as memory:
            results, s = self._here(memory, batch, order), memory[0]
            transfers = int(s.state[TRANSFERS])
            plan = Plan(
                devices=batch.devices[0],
                transfer_tensor=s.transfer_tensor[:transfers].copy(),
                transfer_destination=s.transfer_destination[:transfers].copy(),
                sequence=s.sequence[: s.state[POSITION]].copy(),
            )
        return plan, self._measurements(*results)[0]

    def retime(self, plan: Plan) -> Measurement:
        """The step time and peak memory of exactly this plan.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        return self.retime_batch(self.check_plans([plan]))[0]

    def check_plans(self, plans: Sequence[Plan]) -> PlanBatch:
        """Checks plans, and prepares them for `retime_batch` on this problem, or on a problem with other costs.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        batch = stack_plans(self.problem, self._compiled, plans)
        with self._scratch() as (s, *_):
            for b, plan in enumerate(plans):
                load_plan(s, batch, b)
                wrong = check(self._compiled, s, batch.devices[b])
                if wrong >= 0 or s.state[TRANSFERS] != plan.num_transfers:
                    found = f"item {plan.sequence[wrong]} at place {wrong}" if wrong >= 0 else plan.num_transfers
                    expected = "every op and needed transfer once, after what it needs"
                    raise InvalidValue("sequence", found, expected, where="plan")
        return batch

    def retime_batch(self, batch: PlanBatch) -> list[Measurement]:
        """The step time and peak memory of exactly these plans, in the order that `check_plans` got."""
        return self._measurements(*self._evaluate(batch))

    def critical_paths(self, batch: PlanBatch) -> CriticalPaths:
        """A critical path of each plan of a batch: the ops and transfers whose times add up to the step time, without
        waits for launches."""
        p, found = self._compiled, [np.zeros(0, dtype=np.int32)]
        cutoff_s, results = np.full(len(batch.devices), np.inf), self._new_results(batch)
        step_s = results[0]
        with self._scratch() as memory:
            for b in range(len(step_s)):
                evaluate(p, *memory, self._is_throughput, batch, b, b + 1, *self._default_order, cutoff_s, *results)
                found.append(critical_path(p, memory[0], batch.devices[b])[::-1] if step_s[b] < np.inf else found[0])
        return CriticalPaths(step_s, np.concatenate(found), np.cumsum([len(one) for one in found]))

    def critical_ops(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.int32]:
        """(C,) ops of a critical path of a placement (N,), the last op first; for a transfer, the producer of its
        tensor.

        Empty if the placement does not fit into memory, and for the objective `throughput`, which has no path from
        start to end.

        Raises:
            InvalidValue: a placement or priorities that do not fit the problem.
        """
        p, batch, order = self._compiled, self._unplanned(devices), self._priority_order(priorities)
        with self._scratch() as memory:
            if self._is_throughput or not self._here(memory, batch, order)[0][0] < np.inf:
                return np.zeros(0, dtype=np.int32)
            path = critical_path(p, memory[0], batch.devices[0])
            is_sent = path >= p.num_ops
            path[is_sent] = p.tensor_op[memory[0].transfer_tensor[path[is_sent] - p.num_ops]]
        return path

    def timeline(self, plan: Plan, transfer_factor: NDArray[np.float64] | None = None) -> Timeline:
        """Start and end of every op and transfer of this plan, and allocated bytes over time.

        Args:
            plan: exactly as it runs.
            transfer_factor: (K,) how many times as long each of its transfers takes, as in a disturbed step; as long by
                default.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        batch = self.check_plans([plan])
        with self._scratch() as memory:
            factor = memory[0].transfer_factor[: plan.num_transfers]
            factor[:] = 1.0 if transfer_factor is None else transfer_factor
            try:
                self._here(memory, batch, self._default_order)
                return simulated_timeline(self._compiled, memory[0], plan)
            finally:
                factor[:] = 1.0

    def _unplanned(self, placements: NDArray[np.int32]) -> PlanBatch:
        empty, offsets = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        devices = np.ascontiguousarray(self.problem.check_placement(np.atleast_2d(placements)))
        return PlanBatch(devices, empty, offsets, empty, empty, empty, offsets)

    @contextmanager
    def _scratch(self) -> Iterator[Memory]:
        """Working memory that no other thread uses."""
        try:
            memory = self._idle.get_nowait()
        except Empty:
            p = self._compiled
            memory = new_scratch(p), new_fast_scratch(p), new_event_scratch(p)
        try:
            yield memory
        finally:
            self._idle.put(memory)

    def _evaluate(
        self,
        batch: PlanBatch,
        priorities: NDArray[np.float64] | None = None,
        cutoff_s: NDArray[np.float64] | None = None,
    ) -> Results:
        """The results of a batch, on every thread; the same to the bit, however many there are."""
        order, count, results = self._priority_order(priorities), len(batch.devices), self._new_results(batch)
        cutoff_s = np.full(count, np.inf) if cutoff_s is None else cutoff_s
        size = max(1, count // (4 * self.threads))

        def run(first: int, last: int) -> None:
            with self._scratch() as memory:
                evaluate(self._compiled, *memory, self._is_throughput, batch, first, last, *order, cutoff_s, *results)

        if self.threads == 1 or count < 2:
            run(0, count)
            return results
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="rlplace-simulator")
            self._pool_process = os.getpid()
        firsts = range(0, count, size)
        list(self._pool.map(run, firsts, (min(first + size, count) for first in firsts)))
        return results

    def _here(self, memory: Memory, batch: PlanBatch, order: Order) -> Results:
        """As `_evaluate`, on this thread, in its working memory, which then holds the last plan with its times."""
        results, cutoff_s = self._new_results(batch), np.full(len(batch.devices), np.inf)
        evaluate(self._compiled, *memory, self._is_throughput, batch, 0, len(cutoff_s), *order, cutoff_s, *results)
        return results

    def _new_results(self, batch: PlanBatch) -> Results:
        count = len(batch.devices)
        return np.empty(count), np.empty((count, self._compiled.num_accounts), dtype=np.int64)

    def _priority_order(self, priorities: NDArray[np.float64] | None) -> Order:
        if priorities is None:
            return self._default_order
        priorities = np.asarray(priorities, dtype=np.float64)
        if priorities.shape != (self._compiled.num_ops,):
            raise InvalidValue("priorities", priorities.shape, f"shape {(self._compiled.num_ops,)}", where="simulator")
        if np.any(np.isnan(priorities)):
            raise InvalidValue("priorities", "NaN", "numbers", where="simulator")
        return _order(priorities)

    def _measurements(self, step_s: NDArray[np.float64], peak_bytes: NDArray[np.int64]) -> list[Measurement]:
        return [*map(self._measurement, step_s.tolist(), peak_bytes)]

    def _measurement(self, step_s: float, peak_bytes: NDArray[np.int64]) -> Measurement:
        peak = tuple(peak_bytes[: self._compiled.num_devices].tolist())
        if step_s < np.inf:
            return Measurement("ok", step_s, (step_s,), peak)
        over = [
            f"{name}: peak of {peak} bytes is {peak - capacity} bytes over its {capacity}"
            for name, peak, capacity in zip(
                account_names(self.problem.host), peak_bytes, self._compiled.capacity_bytes, strict=True
            )
            if peak > capacity
        ]
        return Measurement("oom", np.inf, (), peak, "; ".join(over))


def _order(priorities: NDArray[np.float64]) -> Order:
    """Place of each op in order of priority (ties by index), and the op at each place."""
    order = np.argsort(-priorities, kind="stable").astype(np.int32)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank, order


@kernel
def check(p: Compiled, s: Scratch, devices: Ints) -> int:
    """Position of the first item of the sequence that comes too early or twice, or -1 where the sequence is sound.

    Leaves the number of transfers that the placement needs in `s.state[TRANSFERS]`.
    """
    n, num_devices = p.num_ops, p.num_devices
    input_offsets, input_tensors, output_offsets = p.input_offsets, p.input_tensors, p.output_offsets
    tensor_op, sequence, state, done = p.tensor_op, s.sequence, s.users, s.waiting
    done[:] = 0
    state[:] = 0
    missing, there = 1, 2
    needed = 0
    for i in range(n):
        for a in range(input_offsets[i], input_offsets[i + 1]):
            t = input_tensors[a]
            place = t * num_devices + devices[i]
            if devices[i] != devices[tensor_op[t]] and state[place] == 0:
                state[place] = missing
                needed += 1
    s.state[TRANSFERS] = needed
    for position in range(s.state[POSITION]):
        item = sequence[position]
        if done[item]:
            return position
        done[item] = 1
        if item < n:
            for a in range(input_offsets[item], input_offsets[item + 1]):
                if state[input_tensors[a] * num_devices + devices[item]] != there:
                    return position
            for a in range(p.updated_offsets[item], p.updated_offsets[item + 1]):
                t = p.updated_tensors[a]
                source = devices[tensor_op[t]]
                for e in range(num_devices):
                    if not shares_memory(p, source, e) and state[t * num_devices + e] == missing:
                        return position
                for b in range(p.reader_offsets[t], p.reader_offsets[t + 1]):
                    reader = p.reader_ops[b]
                    if not done[reader] and not is_updater(p, reader, t) and shares_memory(p, source, devices[reader]):
                        return position
                for b in range(p.updater_offsets[t], p.updater_offsets[t + 1]):
                    if p.updater_ops[b] < item and not done[p.updater_ops[b]]:
                        return position
            for t in range(output_offsets[item], output_offsets[item + 1]):
                state[t * num_devices + devices[item]] = there
        else:
            tensor, destination = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            place = tensor * num_devices + destination
            if state[tensor * num_devices + devices[tensor_op[tensor]]] != there or state[place] != missing:
                return position
            state[place] = there
    return -1


def simulated_timeline(p: Compiled, s: Scratch, plan: Plan) -> Timeline:
    """The timeline of a plan that was just evaluated.

    Args:
        p: the problem.
        s: working memory that the plan was evaluated in.
        plan: for both.
    """
    n = p.num_ops
    items = slice(n, n + plan.num_transfers)
    times_s, held_bytes = zip(*(_memory_steps(s, device) for device in range(p.num_devices)), strict=True)
    return Timeline(
        op_device=plan.devices,
        op_start_s=s.start_s[:n].copy(),
        op_end_s=s.end_s[:n].copy(),
        transfer_tensor=plan.transfer_tensor,
        transfer_source=s.transfer_source[: plan.num_transfers].copy(),
        transfer_destination=plan.transfer_destination,
        transfer_start_s=s.start_s[items].copy(),
        transfer_end_s=s.end_s[items].copy(),
        memory_time_s=np.concatenate(times_s),
        memory_device=np.repeat(np.arange(p.num_devices, dtype=np.int32), [*map(len, times_s)]),
        memory_bytes=np.concatenate(held_bytes),
        source="simulated",
    )


def _memory_steps(s: Scratch, device: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Instants at which a device's allocated bytes change, and the bytes from then on."""
    times, deltas = [np.zeros(1)], [s.held_bytes[device : device + 1]]
    for lane, sign in ((2 * device, 1), (2 * device + 1, -1)):
        first = 2 * int(s.event_base[lane])
        events = slice(first, first + 2 * int(s.event_count[lane]))
        times.append(s.events[events][::2])
        deltas.append(sign * s.events.view(np.int64)[events][1::2])
    instants, places = np.unique(np.concatenate(times), return_inverse=True)
    changes = np.zeros(len(instants), dtype=np.int64)
    np.add.at(changes, places, np.concatenate(deltas))
    steps = (changes != 0) | (instants == 0.0)
    return instants[steps], np.cumsum(changes)[steps]
