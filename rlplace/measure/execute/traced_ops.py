"""What tracing an op costs on each device (`tracing_costs`), and which ops are traced where all would cost too much."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import OpGraph
from rlplace.measure.execute.device_threads import Clock, Crew, Job, clock_of
from rlplace.measure.execute.launch_code import marked
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan

MOST_SHARE = 0.05
"""Of a step: where tracing every op would take more, some ops are traced."""
NUM_MARKED, REPEATS = 200, 5
"""Ops without content that are traced to see what it costs, and how often; medians count."""
LONGEST_S = 60.0


@dataclass(frozen=True)
class TracingCosts:
    """Seconds that tracing an op costs, by device.

    Attributes:
        thread_s: (D,) for both marks, on the device's thread.
        recorded_s: (D,) the part that is in an op's duration: on a GPU what lies between two events without an op, on a
            core all of it, as an op there begins at the end of the one before (`host_model.traced_steps.as_modelled`).
    """

    thread_s: NDArray[np.float64]
    recorded_s: NDArray[np.float64]

    def added_s(self, graph: OpGraph, plan: Plan) -> float:
        """The mean of `recorded_s` over the ops of a plan."""
        runs = ~graph.is_source
        return float(self.recorded_s[plan.devices[runs]].mean()) if runs.any() else 0.0

    def traced(
        self, graph: OpGraph, plan: Plan, step_s: float, generator: np.random.Generator
    ) -> frozenset[int] | None:
        """Items of `plan` to trace so that it takes at most `MOST_SHARE` of the step; None where all may be traced.

        Args:
            graph: of the plan.
            plan: that is traced.
            step_s: its step time.
            generator: chooses ops.
        """
        received = np.bincount(plan.transfer_destination, minlength=len(self.thread_s))
        with np.errstate(divide="ignore"):
            most = np.minimum(MOST_SHARE * step_s / self.thread_s, float(graph.num_ops + plan.num_transfers)) - received
        return sampled_items(graph, plan, most.astype(np.int64), generator)


def tracing_costs(host: Host, crew: Crew) -> TracingCosts:
    """Costs of tracing on each device: ops without content, marked on its thread by the lines of a traced step.

    Devices of other processes, cores as the first one is, have its costs.

    Args:
        host: of this machine.
        crew: its threads.

    Raises:
        RunnerError: the clock of a device failed.
    """
    lines = (f"    {line}" for k in range(NUM_MARKED) for line in marked(k, k, []))
    code = compile("\n".join(["def run():", *lines, ""]), "<marks alone>", "exec")
    found = np.zeros((host.num_devices, REPEATS, 2))
    for device in crew.here:
        described = host.devices[device]
        clock = clock_of(described)
        names: dict[str, Any] = {"clock": clock.mark, "B": [None] * NUM_MARKED, "E": [None] * NUM_MARKED}
        exec(code, names)
        jobs: list[Job] = [_nothing] * host.num_devices
        jobs[device] = _timed(clock, names, found[device, :, 0])
        for repeat in range(REPEATS):
            crew.run(jobs, repeat, on_error=lambda: None, deadline_s=LONGEST_S)
            found[device, repeat, 0] /= NUM_MARKED
            between = [clock.seconds(e) - clock.seconds(b) for b, e in zip(names["B"], names["E"], strict=True)]
            found[device, repeat, 1] = found[device, repeat, 0] if described.backend == "cpu" else np.median(between)
    for device in set(range(host.num_devices)).difference(crew.here):
        found[device] = found[crew.here[0]]
    return TracingCosts(*np.median(found, axis=1).T)


def _timed(clock: Clock, names: dict[str, Any], seconds: NDArray[np.float64]) -> Job:
    def job(repeat: int) -> None:
        clock.start()
        begin_s = time.perf_counter()
        names["run"]()
        seconds[repeat] = time.perf_counter() - begin_s

    return job


def _nothing(_: int) -> None:
    """The job of a device that has none."""


def sampled_items(
    graph: OpGraph, plan: Plan, most: Sequence[int] | NDArray[np.int64], generator: np.random.Generator
) -> frozenset[int] | None:
    """Items of a plan (op i, or N + k) of which no device has more ops than it may; None for all items.

    All transfers are among them, and of each signature on each device one op, where these alone are too many, too. The
    others are drawn.

    Args:
        graph: of the plan.
        plan: where ops are.
        most: (D,) ops.
        generator: of the draws.
    """
    n, runs, is_whole = graph.num_ops, ~graph.is_source, True
    signature = np.unique(graph.signatures, return_inverse=True)[1]
    items = [np.arange(n, n + plan.num_transfers)]
    for device, at_most in enumerate(most):
        ops = np.flatnonzero(runs & (plan.devices == device))
        if len(ops) > at_most:
            is_whole = False
            ops = generator.permutation(ops)
            first = np.unique(signature[ops], return_index=True)[1]
            others = np.delete(ops, first)
            ops = np.concatenate([ops[first], others[: max(int(at_most) - len(first), 0)]])
        items.append(ops)
    return None if is_whole else frozenset(np.concatenate(items).tolist())
