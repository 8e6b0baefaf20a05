"""`NodePool`: the nodes of a cluster as workers that measure, and this machine as the last of them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.cluster.cluster import Cluster, Node
from rlplace.cluster.measuring_node import FOREVER_S, MeasuringNode
from rlplace.cluster.stale_synchronous import Ended, Job
from rlplace.measure.isolate.packing import Section
from rlplace.measure.measurement import Measurement
from rlplace.say import counted

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
