"""`Simulator`: the step-time model as a `Measurer`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import compile_problem
from rlplace.measure.simulate.evaluation import Evaluation, Order, Results
from rlplace.measure.simulate.host_tables import account_names
from rlplace.measure.simulate.kernel_batch import load_plan
from rlplace.measure.simulate.kernel_check import check
from rlplace.measure.simulate.kernel_critical import critical_path
from rlplace.measure.simulate.plan_batch import PlanBatch, stack_plans, unplanned
from rlplace.measure.simulate.ranks import default_priorities
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS
from rlplace.measure.simulate.simulated_timeline import simulated_timeline
from rlplace.measure.timeline import Timeline
from rlplace.say import counted

if TYPE_CHECKING:
    from collections.abc import Sequence


class CriticalPaths(NamedTuple):
    """What binds each of B plans, from the start of its step to its end.

    Attributes:
        step_s: (B,) seconds; infinite where memory does not suffice.
        items: int32, every plan's path in order of time: op `i` as `i`, its transfer `k` as `num_ops + k`.
        offsets: (B + 1,) int64; a path is empty where the step time is infinite.
    """

    step_s: NDArray[np.float64]
    items: NDArray[np.int32]
    offsets: NDArray[np.int64]


Objective = Literal["latency", "throughput"]

__all__ = ["Objective", "Simulator"]


class Simulator:
    """Computes step times exactly as docs/step-time-model.md says; deterministic to the bit, whatever the threads."""

    def __init__(self, problem: Problem, *, objective: Objective = "latency", threads: int | None = None) -> None:
        """Lay the problem out for the kernels.

        Args:
            problem: what placements are simulated on.
            objective: `latency`, one step from start to end, or `throughput`, seconds per step of a full pipeline.
            threads: placements simulated at once; every core by default.

        Raises:
            InvalidValue: an unknown objective, no thread, or a problem that cannot be simulated.
        """
        if objective not in ("latency", "throughput"):
            raise InvalidValue("objective", objective, "'latency' or 'throughput'", where="simulator")
        if threads is not None and threads < 1:
            raise InvalidValue("threads", threads, "at least 1", where="simulator")
        self._problem = problem
        self._throughput = objective == "throughput"
        self.threads = threads if threads is not None else len(os.sched_getaffinity(0))
        self._compiled = compile_problem(problem)
        self._default_order = _order(default_priorities(problem))
        self._evaluation = Evaluation(self._compiled, is_throughput=self._throughput, threads=self.threads)

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: the problem is laid out again where it is loaded."""
        return partial(Simulator, objective=self.objective, threads=self.threads), (self._problem,)

    def __repr__(self) -> str:
        return f"Simulator({self._problem!r}, {self.objective}, {counted(self.threads, 'thread')})"

    @property
    def problem(self) -> Problem:
        """The problem that placements are simulated on."""
        return self._problem

    @property
    def objective(self) -> Objective:
        """What step times mean."""
        return "throughput" if self._throughput else "latency"

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One `Measurement` for each row of `placements` (B, N).

        Raises:
            InvalidValue: a placement of the wrong length, with a device out of range, or against a co-location rule.
        """
        return self._measurements(*self._evaluate(self._unplanned(placements)))

    def step_times(
        self, placements: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """(B,) float64 seconds, one for each row of `placements` (B, N); infinite where memory does not suffice.

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
        """`step_times`, sooner: those above `cutoff_s` (B,) may come back as infinite, the others are the same.

        Raises:
            InvalidValue: a placement that does not fit the problem, or not one cutoff for each.
        """
        batch, cutoff_s = self._unplanned(placements), np.ascontiguousarray(cutoff_s, dtype=np.float64)
        if cutoff_s.shape != (len(batch.devices),):
            raise InvalidValue("cutoff_s", cutoff_s.shape, f"shape {(len(batch.devices),)}", where="simulator")
        return self._evaluate(batch, priorities, cutoff_s)[0]

    def plan(self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None) -> Plan:
        """The placement `devices` (N,) with every order fixed.

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
        with self._evaluation.scratch() as (s, v):
            results = self._evaluation.here(s, v, batch, order)
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
        """The plans, checked once and laid out for `retime_batch`, here or on a problem with other costs.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        batch = stack_plans(self._problem, self._compiled, plans)
        with self._evaluation.scratch() as (s, _):
            for b, plan in enumerate(plans):
                load_plan(s, batch, b)
                wrong = check(self._compiled, s, batch.devices[b])
                if wrong >= 0 or s.state[TRANSFERS] != plan.num_transfers:
                    found = f"item {plan.sequence[wrong]} at place {wrong}" if wrong >= 0 else plan.num_transfers
                    expected = "every op and needed transfer once, after what it needs"
                    raise InvalidValue("sequence", found, expected, where="plan")
        return batch

    def retime_batch(self, batch: PlanBatch) -> list[Measurement]:
        """The step time and peak memory of exactly these plans, one after the other as `check_plans` laid them out."""
        return self._measurements(*self._evaluate(batch))

    def critical_paths(self, batch: PlanBatch) -> CriticalPaths:
        """A critical path of each plan of a batch: what its step time is the sum of, waits for launches aside."""
        p = self._compiled
        step_s, found = np.empty(0), []
        binding = np.empty(p.num_ops + p.max_transfers, dtype=np.int32)
        path = np.empty_like(binding)
        with self._evaluation.scratch() as (s, v):
            for b, (step_s, _) in enumerate(self._evaluation.one_by_one(s, v, batch, self._default_order)):
                length = critical_path(p, s, batch.devices[b], binding, path) if step_s[b] < np.inf else 0
                found.append(path[:length][::-1].copy())
        offsets = np.cumsum([0, *(len(one) for one in found)])
        return CriticalPaths(step_s, np.concatenate([np.zeros(0, dtype=np.int32), *found]), offsets)

    def critical_ops(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.int32]:
        """(C,) ops of a critical path of a placement (N,), the last first; for a transfer, the op whose tensor it is.

        Empty where memory does not suffice, and under the objective `throughput`, which is no path from start to end.

        Raises:
            InvalidValue: a placement or priorities that do not fit the problem.
        """
        p, batch, order = self._compiled, self._unplanned(devices), self._priority_order(priorities)
        binding = np.empty(p.num_ops + p.max_transfers, dtype=np.int32)
        path = np.empty_like(binding)
        with self._evaluation.scratch() as (s, v):
            if self._throughput or not self._evaluation.here(s, v, batch, order)[0][0] < np.inf:
                return path[:0]
            path = path[: critical_path(p, s, batch.devices[0], binding, path)]
            is_sent = path >= p.num_ops
            path[is_sent] = p.tensor_op[s.transfer_tensor[path[is_sent] - p.num_ops]]
        return path

    def timeline(self, plan: Plan) -> Timeline:
        """Start and end of every op and transfer of this plan, and allocated bytes over time.

        Raises:
            InvalidValue: a plan that does not fit the problem, or whose sequence cannot be followed.
        """
        batch = self.check_plans([plan])
        with self._evaluation.scratch() as (s, v):
            self._evaluation.here(s, v, batch, self._default_order)
            return simulated_timeline(self._compiled, s, plan)

    def _unplanned(self, placements: NDArray[np.int32]) -> PlanBatch:
        return unplanned(self._problem.check_placement(np.atleast_2d(placements)))

    def _evaluate(
        self,
        batch: PlanBatch,
        priorities: NDArray[np.float64] | None = None,
        cutoff_s: NDArray[np.float64] | None = None,
    ) -> Results:
        return self._evaluation.everywhere(batch, self._priority_order(priorities), cutoff_s)

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
        return [self._measurement(float(step_s[b]), peak_bytes[b]) for b in range(len(step_s))]

    def _measurement(self, step_s: float, peak_bytes: NDArray[np.int64]) -> Measurement:
        peak = tuple(peak_bytes[: self._compiled.num_devices].tolist())
        if step_s < np.inf:
            return Measurement("ok", step_s, (step_s,), peak)
        names = account_names(self._problem.host)
        capacity = self._compiled.capacity_bytes
        over = [
            f"{names[a]}: peak of {peak_bytes[a]} bytes is {peak_bytes[a] - capacity[a]} bytes over its {capacity[a]}"
            for a in np.flatnonzero(peak_bytes > capacity).tolist()
        ]
        return Measurement("oom", np.inf, (), peak, "; ".join(over))


def _order(priorities: NDArray[np.float64]) -> Order:
    """Place of each op in order of priority (ties by index), and the op at each place."""
    order = np.argsort(-priorities, kind="stable").astype(np.int32)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank, order
