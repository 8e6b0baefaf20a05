"""`ClusterEvaluator`: an `Evaluator` whose searches measure on every node of a cluster that is like this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.believed import Believed
from rlplace.cluster.cluster import Cluster
from rlplace.cluster.machine import Machine
from rlplace.cluster.measuring_node import pack
from rlplace.cluster.node_pool import NodePool
from rlplace.cluster.stale_synchronous import Job, Staleness, StaleSynchronous
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.isolate.choice import is_isolated
from rlplace.measure.measurement import Measurement
from rlplace.measure.measurement_log import MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.simulate.simulator import Simulator


class ClusterEvaluator(Evaluator):
    """Measures the plans of searches on many machines; everything else on this one, in one race, as an `Evaluator`.

    Each node times the reference in turn with its plans. A measurement comes back as its ratio to that, times what the
    reference takes here, as those that the store answers: nodes may be of slightly different speed. What is kept of it
    is what the node measured, if that is believed there (`Plausibility`).

    Args:
        cluster: whose nodes measure.
        problem: what is placed, on a host of this machine, its graph with a program.
        simulator: plans.
        reference: (N,) placement that every measured plan is timed beside.
        seed: of random ops.
        log: keeps what is run, and answers what was run before.
        isolated: whether plans run in a worker process on each node.
        staleness: for what a search waits.
        say: told who measures, and who does not and why.

    Raises:
        RunnerError: the captured step cannot be sent to nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        problem: Problem,
        simulator: Simulator,
        reference: NDArray[np.int32],
        *,
        seed: int = 0,
        log: MeasurementLog | None = None,
        isolated: bool | None = None,
        staleness: Staleness | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(problem, simulator, reference, seed=seed, log=log, isolated=isolated)
        self._believed = Believed()
        try:
            driver, is_apart = Machine.here(), is_isolated(isolated)
            sent = pack(problem, reference, seed=seed, is_isolated=is_apart, driver=driver)
            self._pool = NodePool(cluster, sent, self._measure_here, clock=time.monotonic, say=say)
        except BaseException:
            super().close()
            raise
        self._exchange = StaleSynchronous(self._pool, staleness)

    @property
    def num_workers(self) -> int:
        """Machines that measure now, or may soon."""
        return self._pool.num_alive

    def measure_some(
        self, plans: Sequence[Plan], protocol: RaceProtocol, *, deadline_s: float = math.inf, is_all: bool = False
    ) -> list[tuple[Plan, Measurement]]:
        """Has plans measured for a search, and returns the measurements that have come (`StaleSynchronous.exchange`).

        The log may answer, as `measure_plans` says of `is_recalled`.

        Args:
            plans: exactly what runs.
            protocol: rounds of their races.
            deadline_s: on `time.monotonic`; races end after the round in which it passes.
            is_all: wait for everything that was asked for; then those of `plans` come last, in their order.

        Raises:
            RunnerError: nothing can be measured on this machine.
        """
        known = [self._recall(plan, protocol) for plan in plans]
        fresh = [plan for plan, before in zip(plans, known, strict=True) if before is None]
        came = self._exchange.exchange(fresh, protocol, deadline_s=deadline_s, is_all=is_all)
        ran = [(plan, self._kept(plan, outcome, protocol, deadline_s)) for plan, outcome in came]
        if len(fresh) == len(plans):
            return ran
        self._time_reference(protocol, deadline_s)
        recalled = [(plan, self._now(before)) for plan, before in zip(plans, known, strict=True) if before is not None]
        if not is_all:
            return [*ran, *recalled]
        asked, others = iter(ran[len(ran) - len(fresh) :]), iter(recalled)
        return [
            *ran[: len(ran) - len(fresh)],
            *(next(asked if before is None else others) for before in known),
        ]

    def close(self) -> None:
        """Ends the actors, and what runs here."""
        self._pool.close()
        super().close()

    def _measure_here(self, job: Job) -> list[Measurement]:
        log, self._log = self._log, self._believed  # what is handed out is kept, wherever it was measured
        try:
            return self._believed.marked(job.plans, self._run(list(job.plans), job.protocol, (), job.deadline_s))
        finally:
            self._log = log

    def _kept(self, plan: Plan, outcome: Measurement, protocol: RaceProtocol, deadline_s: float) -> Measurement:
        """A node's measurement as if it had been made here; the log keeps it as it was."""
        keyed = self._keyed(plan, outcome, repr(protocol))
        if self._log is not None and outcome.key is not None:
            is_late = time.monotonic() > deadline_s
            is_whole = not is_late or not outcome.ok or len(outcome.samples_s) >= protocol.min_rounds
            self._log.keep(plan, keyed, self._reference_name, is_whole=is_whole)
        if not outcome.ok or not outcome.reference_s > 0:
            return keyed
        if math.isnan(self._reference_s):
            self._reference_s = outcome.reference_s
        return self._now(keyed)
