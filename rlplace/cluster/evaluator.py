"""`ClusterEvaluator`: an `Evaluator` whose searches measure on every node of a cluster that is like this machine.

`NodePool`: the nodes of a cluster as workers that measure, and this machine as the last of them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.cluster import Cluster, Node
from rlplace.cluster.measuring_node import FOREVER_S, Believed, Machine, MeasuringNode, pack
from rlplace.cluster.stale_synchronous import Ended, Job, Staleness, StaleSynchronous
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.isolate.choice import is_isolated
from rlplace.measure.isolate.packing import Section
from rlplace.measure.measurement import Measurement, MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.simulate.simulator import Simulator
from rlplace.say import counted


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


HERE = "this machine"
RESTARTS = 2
"""Times that Ray starts an actor again whose process ended while its node lives."""


@dataclass(eq=False)
class _Worker:
    """A node that measures.

    Attributes:
        name: as people are told.
        actor: Ray's handle.
        answer: to what it was asked last; None while it is idle.
        job: that it has; None while it is being prepared.
    """

    name: str
    actor: Any
    answer: Any
    job: Job | None = None


class NodePool:
    """The nodes of a cluster that are like this machine, each with an actor that has all of it, and this machine.

    This machine measures in the process that asks, last of all and while nothing else happens there: plans are never
    proposed while it measures. Its own CPUs are kept from other work of the cluster by an actor that does nothing.

    Args:
        cluster: whose nodes measure.
        sent: what `pack` gave; it travels to each node once.
        here: measures on this machine.
        clock: as of the jobs' deadlines.
        say: told who measures, and who does not and why.
    """

    def __init__(
        self,
        cluster: Cluster,
        sent: tuple[bytes, Section],
        here: Callable[[Job], Sequence[Measurement]],
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._ray, self._here, self._clock, self._say = cluster.ray, here, clock, say
        self._index, self._data = sent[1], self._ray.put(sent[0])
        self._done_here: list[Ended] = []
        nodes = [node for node in cluster.nodes if node.num_cpus >= 1]
        self._kept = [self._actor(_Idle, node).remote() for node in nodes if node.is_here]
        self._workers = [self._started(node) for node in nodes if not node.is_here]

    @property
    def num_alive(self) -> int:
        """Nodes that measure, or are being prepared, and this machine."""
        return len(self._workers) + 1

    def idle(self) -> Sequence[str]:
        """Nodes that are prepared and have no job; this machine comes last, as it measures while it is asked."""
        return [*(worker.name for worker in self._workers if worker.answer is None), HERE]

    def start(self, worker: str, job: Job) -> None:
        """Sends a job to a node; measures it, if that node is this machine."""
        if worker == HERE:
            self._done_here.append(Ended(job, self._here(job)))
            return
        found = next(each for each in self._workers if each.name == worker)
        left_s = min(max(job.deadline_s - self._clock(), 0.0), FOREVER_S)
        found.job, found.answer = job, found.actor.measure.remote(job.plans, job.protocol, left_s)

    def wait(self, timeout_s: float) -> Sequence[Ended]:
        """Jobs that have ended; takes in nodes that have become ready or were lost."""
        done, self._done_here = self._done_here, []
        asked = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        if asked:
            answers, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
            if not answers and not done:
                answers, _ = self._ray.wait(list(asked), num_returns=1, timeout=timeout_s)
            found = [self._taken(asked[answer]) for answer in answers]
            done += [ended for ended in found if ended is not None]
        return done

    def close(self) -> None:
        """Ends the actors, and with them what they run."""
        for actor in [*self._kept, *(worker.actor for worker in self._workers)]:
            self._end(actor)
        self._kept, self._workers, self._data = [], [], None

    def _started(self, node: Node) -> _Worker:
        actor = self._actor(MeasuringNode, node).remote()
        return _Worker(f"{node.name} ({node.id[:6]})", actor, actor.prepare.remote(self._data, self._index, sys.path))

    def _actor(self, kind: type, node: Node) -> Any:
        """An actor that has all of a node."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        affinity = strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        return self._ray.remote(kind).options(
            num_cpus=node.num_cpus, num_gpus=node.num_gpus, scheduling_strategy=affinity, max_restarts=RESTARTS
        )

    def _taken(self, worker: _Worker) -> Ended | None:
        """What a node answered: to a job, or to being prepared."""
        job, answer = worker.job, worker.answer
        worker.job = worker.answer = None
        try:
            value = self._ray.get(answer)
        except Exception as error:
            return self._lost(worker, job, error)
        if job is not None:
            return Ended(job, value)
        if value:
            self._drop(worker, f"does not measure: {value}")
        else:
            self._say(f"node {worker.name} measures too")
        return None

    def _lost(self, worker: _Worker, job: Job | None, error: Exception) -> Ended | None:
        """The end of a job whose node was lost, or could not go on; one that was only restarted is prepared again."""
        errors, why = self._ray.exceptions, f"node {worker.name}: {_words(error)}"
        if job is not None and isinstance(error, errors.RayActorError):
            worker.answer = worker.actor.prepare.remote(self._data, self._index, sys.path)
            self._say(f"node {worker.name} was lost while it measured; its plans are given to others")
        else:
            self._drop(worker, f"measures no more: {_words(error)}")
        return None if job is None else Ended(job, why=why)

    def _drop(self, worker: _Worker, what: str) -> None:
        self._workers.remove(worker)
        self._end(worker.actor)
        self._say(f"node {worker.name} {what} ({counted(self.num_alive, 'machine')} left)")

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            self._ray.kill(actor)


class _Idle:
    """Keeps a node's CPUs from others."""


def _words(error: Exception) -> str:
    """The cause of an error in a line: Ray's come with tracebacks."""
    cause = getattr(error, "cause", None)
    lines = str(cause if isinstance(cause, Exception) else error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
