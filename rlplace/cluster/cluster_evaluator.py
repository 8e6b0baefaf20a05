"""`ClusterEvaluator`: an `Evaluator` whose searches measure on every node of a cluster that is like this machine.

`NodePool`: the nodes of a cluster as workers that measure, and this machine as the last of them.

`StaleSynchronous`: plans measured by many workers, of which learning waits for enough, and never for the slowest.

`MeasuringNode`: the actor on a node that measures plans there, with a runner of its own. `Machine`: the facts in which
two machines must agree before their step times are compared. `Believed`: which measurements of a node the driver may
keep: those that the node's own `Evaluator` believes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.cluster import Cluster, Node
from rlplace.errors import RlplaceError, RunnerError
from rlplace.graphs import Program
from rlplace.graphs.interpreter import require_program
from rlplace.locks import machine_id, measuring_alone
from rlplace.measure import Host, Measurement, Plan, Problem, RaceProtocol, Simulator, Timeline
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.isolate.isolated_runner import is_isolated
from rlplace.measure.isolate.messages import apply_settings, torch_settings
from rlplace.measure.isolate.packing import Packed, Section, Unpacked, shared_file, without_model
from rlplace.measure.measurement import MeasurementKey, MeasurementLog, versions_line
from rlplace.say import counted
from rlplace.store.rows import machine_facts


class ClusterEvaluator(Evaluator):
    """Measures the plans of searches on many machines; everything else on this one, in one race, as an `Evaluator`.

    Each node times the reference in turn with its plans. A measurement comes back as its ratio to that, times the
    reference's step time here, as a measurement from the store does: nodes may be of slightly different speed. The
    store keeps the node's own figures, if they are believed there (`Plausibility`).

    Args:
        cluster: whose nodes measure.
        problem: the problem to place, on a host of this machine, its graph with a program.
        simulator: plans.
        reference: (N,) placement that every measured plan is timed beside.
        seed: of random ops.
        log: keeps measurements, and answers for plans that were measured before.
        isolated: whether plans run in a worker process on each node.
        staleness: for which results a search waits.
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
            plans: exactly the plans that run.
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
        recalled = [
            (plan, before.beside(self._reference_s))
            for plan, before in zip(plans, known, strict=True)
            if before is not None
        ]
        if not is_all:
            return [*ran, *recalled]
        before, asked, others = ran[: len(ran) - len(fresh)], iter(ran[len(ran) - len(fresh) :]), iter(recalled)
        return [*before, *(next(asked if answer is None else others) for answer in known)]

    def close(self) -> None:
        """Ends the actors, and the runner on this machine."""
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
        return keyed.beside(self._reference_s)


HERE = "this machine"
RESTARTS = 2
"""Times that Ray starts an actor again whose process ended while its node lives."""


@dataclass(eq=False)
class _Worker:
    """A node that measures.

    Attributes:
        name: of the node, for messages.
        actor: Ray's handle.
        answer: to the last request; None while it is idle.
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
        sent: the bytes that `pack` returned; it travels to each node once.
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
        self._done_here: list[Job] = []
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
            job.outcomes = self._here(job)
            self._done_here.append(job)
            return
        found = next(each for each in self._workers if each.name == worker)
        left_s = min(max(job.deadline_s - self._clock(), 0.0), FOREVER_S)
        found.job, found.answer = job, found.actor.measure.remote(job.plans, job.protocol, left_s)

    def wait(self, timeout_s: float) -> Sequence[Job]:
        """Jobs that have ended, each told once; takes in nodes that have become ready or were lost.

        It returns as soon as a job has ended, or after so many seconds.
        """
        done, self._done_here = self._done_here, []
        asked = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        if asked:
            answers, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
            if not answers and not done:
                answers, _ = self._ray.wait(list(asked), num_returns=1, timeout=timeout_s)
            done += filter(None, [self._taken(asked[answer]) for answer in answers])
        return done

    def close(self) -> None:
        """Ends the actors, and with them their runners."""
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

    def _taken(self, worker: _Worker) -> Job | None:
        """The job that a node has ended; None where it was being prepared."""
        job, answer = worker.job, worker.answer
        worker.job = worker.answer = None
        try:
            value = self._ray.get(answer)
        except Exception as error:
            self._lost(worker, job, error)
            return job
        if job is not None:
            job.outcomes = value
        elif value:
            self._drop(worker, f"does not measure: {value}")
        else:
            self._say(f"node {worker.name} measures too")
        return job

    def _lost(self, worker: _Worker, job: Job | None, error: Exception) -> None:
        """Drops a node that was lost, or could not go on; one that was only restarted is prepared again."""
        cause = getattr(error, "cause", None)  # errors of Ray come with tracebacks
        lines = str(cause if isinstance(cause, Exception) else error).strip().splitlines()
        why = lines[0] if lines else type(error).__name__
        if job is not None:
            job.why = f"node {worker.name}: {why}"
        if job is not None and isinstance(error, self._ray.exceptions.RayActorError):
            worker.answer = worker.actor.prepare.remote(self._data, self._index, sys.path)
            self._say(f"node {worker.name} was lost while it measured; its plans are given to others")
        else:
            self._drop(worker, f"measures no more: {why}")

    def _drop(self, worker: _Worker, what: str) -> None:
        self._workers.remove(worker)
        self._end(worker.actor)
        self._say(f"node {worker.name} {what} ({counted(self.num_alive, 'machine')} left)")

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            self._ray.kill(actor)


class _Idle:
    """Keeps a node's CPUs from others."""


MOST_LOST = 2
"""Workers that may be lost with a plan before it is the plan's fault."""
LOOKS_EVERY_S = 1.0
"""Longest wait between two looks at who is late."""


@dataclass(frozen=True)
class Staleness:
    """When a batch returns, and when a worker is taken to stand still.

    The bound is that of stale synchronous parallel learning (Ho et al. 2013, NeurIPS, section 2), with batches for its
    clocks: nothing is proposed while a plan of more than `bound` batches ago is still being measured.
    """

    bound: int = 1
    """Batches that may be begun while a plan is measured; 0 waits for every plan of a batch."""
    enough: float = 0.5
    """Share of a batch's plans whose results are enough to go on."""
    grace: float = 0.5
    """Once there are enough, the others get this share of the time that those took."""
    slow_factor: float = 4.0
    """A plan that takes so many times as long as the longest one before it is given to another worker too."""
    slow_least_s: float = 30.0
    """And at least so many seconds."""
    slow_first_s: float = 600.0
    """The same, before any plan has been measured."""


@dataclass(eq=False)
class Job:
    """Plans that one worker measures in one race.

    Attributes:
        places: of the plans among all that were ever asked for.
        plans: the plans to measure.
        protocol: of the race.
        deadline_s: on `time.monotonic` of this process; the race ends after the round in which it passes.
        begin_s: when a worker began with it.
        outcomes: once it has ended, a measurement for each plan; empty where the worker was lost.
        why: how the worker was lost.
    """

    places: tuple[int, ...]
    plans: tuple[Plan, ...]
    protocol: RaceProtocol
    deadline_s: float
    begin_s: float = math.nan
    outcomes: Sequence[Measurement] = ()
    why: str = ""


@dataclass(eq=False)
class _Asked:
    """A plan that was asked for.

    Attributes:
        plan: the plan.
        round: the batch that it came with.
        outcome: the measurement; None before.
        num_lost: workers that were lost with it alone.
        is_told: whether the outcome was handed out.
    """

    plan: Plan
    round: int
    outcome: Measurement | None = None
    num_lost: int = 0
    is_told: bool = False


class StaleSynchronous:
    """Sends plans to workers, and hands out the results that have come.

    A batch of plans is cut into a job for each worker. `exchange` returns once

    1. every plan of more than `bound` batches ago has its measurement,
    2. `enough` of the batch's number of measurements have come, of this batch or of earlier ones, and
    3. the others had their grace, or have all come.

    Later measurements are handed out by a later call: every plan is handed out once, also where its worker is lost.
    The plans of a lost worker are given to others, one by one, so that a plan that ends every worker which runs it ends
    `MOST_LOST` more and is an `error`. A worker that takes too long is not asked again before it has answered, and its
    plans are given to others too: the first measurement counts.

    Args:
        workers: who measures.
        staleness: when a batch returns.
        clock: seconds that never go back.
    """

    def __init__(
        self, workers: NodePool, staleness: Staleness | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers, self._staleness, self._clock = workers, staleness or Staleness(), clock
        self._asked: list[_Asked] = []
        self._waiting: list[Job] = []  # jobs without a worker
        self._running: list[Job] = []
        self._longest_s, self._round = 0.0, 0

    @property
    def num_pending(self) -> int:
        """Plans that were asked for, and have no measurement yet."""
        return sum(asked.outcome is None for asked in self._asked)

    def exchange(
        self, plans: Sequence[Plan], protocol: RaceProtocol, *, deadline_s: float = math.inf, is_all: bool = False
    ) -> list[tuple[Plan, Measurement]]:
        """Asks for plans, and returns the measurements that have come since the last call.

        Args:
            plans: to be measured.
            protocol: of their races.
            deadline_s: on `time.monotonic`; races end after the round in which it passes.
            is_all: wait for everything that was asked for.

        Returns:
            Plans with their measurements, in the order in which they were asked for. With `is_all` those of `plans` are
            all there, at the end.

        Raises:
            RunnerError: no worker is left.
        """
        self._round += 1
        self._cut(plans, protocol, deadline_s)
        num_enough = math.ceil(self._staleness.enough * len(plans))
        begin_s, enough_s = self._clock(), math.inf
        while True:
            self._repeat_late()
            self._hand_out()
            came = [asked for asked in self._asked if asked.outcome is not None and not asked.is_told]
            now_s = self._clock()
            if len(came) >= num_enough:
                enough_s = min(enough_s, begin_s + (now_s - begin_s) * (1.0 + self._staleness.grace))
            pending = [asked.round for asked in self._asked if asked.outcome is None]
            is_fresh = all(begun > self._round - self._staleness.bound for begun in pending)
            if not pending or (not is_all and is_fresh and now_s >= enough_s):
                break
            if not self._workers.num_alive:
                raise RunnerError("no machine of the cluster is left to measure on")
            # until a worker is late, or the others had their grace: then there is something to decide
            waits_s = (moment_s - now_s for moment_s in (enough_s, *map(self._late_s, self._running)))
            self._take(self._workers.wait(min([LOOKS_EVERY_S, *(wait_s for wait_s in waits_s if wait_s > 0)])))
        for asked in came:
            asked.is_told = True
        return [(asked.plan, asked.outcome) for asked in came if asked.outcome is not None]

    def _cut(self, plans: Sequence[Plan], protocol: RaceProtocol, deadline_s: float) -> None:
        """Puts a job for each worker into the queue."""
        first = len(self._asked)
        self._asked += [_Asked(plan, self._round) for plan in plans]
        size = max(math.ceil(len(plans) / max(self._workers.num_alive, 1)), 1)
        for begin in range(0, len(plans), size):
            part = tuple(plans[begin : begin + size])
            places = tuple(range(first + begin, first + begin + len(part)))
            self._waiting.append(Job(places, part, protocol, deadline_s))

    def _hand_out(self) -> None:
        """Gives jobs, without the plans that have been measured meanwhile, to workers that have none."""
        left = ([place for place in job.places if self._asked[place].outcome is None] for job in self._waiting)
        jobs = [self._job(places, job) for places, job in zip(left, self._waiting, strict=True) if places]
        idle = self._workers.idle()
        self._waiting = jobs[len(idle) :]
        for worker, job in zip(idle, jobs, strict=False):
            job.begin_s = self._clock()
            self._running.append(job)
            self._workers.start(worker, job)

    def _job(self, places: Sequence[int], like: Job) -> Job:
        return Job(tuple(places), tuple(self._asked[place].plan for place in places), like.protocol, like.deadline_s)

    def _repeat_late(self) -> None:
        """Sends plans that take too long on every node that has them to other nodes."""
        now_s = self._clock()
        late = [job for job in self._running if now_s >= self._late_s(job)]
        busy = {place for job in [*self._waiting, *self._running] if job not in late for place in job.places}
        for job in late:
            for place in job.places:
                if self._asked[place].outcome is None and place not in busy:
                    self._waiting.append(self._job([place], job))
                    busy.add(place)

    def _late_s(self, job: Job) -> float:
        """When the worker that has a job is late."""
        staleness, longest_s = self._staleness, self._longest_s * len(job.plans)
        limit_s = max(staleness.slow_least_s, staleness.slow_factor * longest_s)
        return job.begin_s + (limit_s if longest_s else staleness.slow_first_s)

    def _take(self, ended: Sequence[Job]) -> None:
        """Takes in the ends of jobs."""
        for job in ended:
            self._running.remove(job)
            if not job.outcomes:
                self._lose(job)
                continue
            self._longest_s = max(self._longest_s, (self._clock() - job.begin_s) / len(job.plans))  # of one plan
            for place, outcome in zip(job.places, job.outcomes, strict=True):
                self._asked[place].outcome = self._asked[place].outcome or outcome

    def _lose(self, ended: Job) -> None:
        """Gives the plans of a lost worker to others, unless they are to blame."""
        for place in ended.places:
            asked = self._asked[place]
            if asked.outcome is not None:
                continue
            asked.num_lost += len(ended.places) == 1  # of several plans, the faulty one is not known
            if asked.num_lost >= MOST_LOST:
                why = f"{asked.num_lost} workers were lost while they measured it: {ended.why}"
                asked.outcome = Measurement("error", math.inf, why=why)
            elif not any(place in job.places for job in [*self._waiting, *self._running]):
                self._waiting.insert(0, self._job([place], ended))


FOREVER_S = 1e12
"""Seconds that stand for no deadline."""


@dataclass(frozen=True)
class Sent:
    """The data that a node needs before its first request; it travels packed, its tensors beside it.

    Attributes:
        problem: the problem that is measured; its graph travels without its program.
        program: of its graph, without the user's model.
        reference: (N,) placement that every plan is timed beside.
        seed: of random ops.
        settings: of PyTorch in the process that sends the requests.
        is_isolated: whether plans run in a worker process on the node.
        driver: the machine that sends the requests.
    """

    problem: Problem
    program: Program
    reference: NDArray[np.int32]
    seed: int
    settings: tuple[object, ...]
    is_isolated: bool
    driver: Machine


def pack(
    problem: Problem, reference: NDArray[np.int32], *, seed: int, is_isolated: bool, driver: Machine
) -> tuple[bytes, Section]:
    """The argument of `MeasuringNode.prepare`: all bytes, and where their index is.

    Raises:
        RunnerError: a part of the captured step belongs to this process alone, or memory does not suffice.
    """
    program = require_program(problem.graph)
    program = dataclasses.replace(program, origin=without_model(program.origin))
    sent = Sent(problem, program, reference, seed, torch_settings(), is_isolated, driver)
    try:
        with contextlib.closing(Packed()) as packed:
            packed.add(sent)
            with mmap.mmap(packed.seal(), sum(packed.index), access=mmap.ACCESS_READ) as memory:
                return bytes(memory), packed.index
    except Exception as error:
        raise RunnerError(f"the captured step cannot be sent to nodes: {type(error).__name__}: {error}") from error


class MeasuringNode:
    """Measures plans on the machine that it runs on, one race after the other; a Ray actor.

    It holds the machine's lock (`measuring_alone`) until it ends, except on the machine that asks, which holds it.
    """

    def __init__(self) -> None:
        self._evaluator: Evaluator | None = None
        self._believed = Believed()
        self._held = contextlib.ExitStack()

    def prepare(self, data: bytes, index: Section, path: Sequence[str]) -> str:
        """Makes the node ready for `measure`; the reason why it cannot measure for the driver, empty where it can.

        Args:
            data: the bytes that `pack` returned.
            index: the place of their index, which `pack` returned.
            path: import path of the driver; folders that this machine has too are searched last.
        """
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        try:
            sent: Sent = _unpacked(data, index)
            if found := sent.driver.differences(Machine.here()):
                return "; ".join(found)
            check_present(sent.problem.host)
            apply_settings(sent.settings)
            if not Machine.here().is_same(sent.driver):
                self._held.enter_context(measuring_alone(sent.problem.host, say=lambda line: None, is_waiting=False))
            graph = dataclasses.replace(sent.problem.graph, program=sent.program)
            problem = dataclasses.replace(sent.problem, graph=graph)
            simulator, log = Simulator(problem, threads=1), self._believed
            self._evaluator = Evaluator(
                problem, simulator, sent.reference, seed=sent.seed, log=log, isolated=sent.is_isolated
            )
        except RlplaceError as error:
            self._held.close()
            return str(error)
        return ""

    def measure(self, plans: Sequence[Plan], protocol: RaceProtocol, left_s: float) -> list[Measurement]:
        """A measurement for each plan, all in one race beside the reference; one that is not believed has no key.

        Args:
            plans: exactly the plan that runs.
            protocol: rounds of the race.
            left_s: seconds after which it ends, with the round that is running then.

        Raises:
            RunnerError: the reference failed, or nothing can be measured here any more.
        """
        if self._evaluator is None:
            raise RunnerError("the node is not prepared")
        outcomes = self._evaluator.measure_plans(plans, protocol, deadline_s=time.monotonic() + left_s)
        return self._believed.marked(plans, outcomes)


def _unpacked(data: bytes, index: Section) -> Sent:
    """The object that was packed; its tensors are private to this process."""
    try:
        with open(shared_file(len(data)), "r+b") as file:
            file.write(data)
            file.flush()
            sent: Sent = Unpacked(file.fileno(), index).get(0)
            return sent
    except Exception as error:
        raise RunnerError(f"the captured step cannot be read here: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Machine:
    """A machine, described for other machines.

    Attributes:
        name: the host name.
        start: an id of the start of the system, which tells machines of one name apart.
        versions: of rlplace, PyTorch and Python.
        facts: processor, number of cores and memory, by name.
        host: the devices of the machine.
        fingerprint: of that host.
    """

    name: str
    start: str
    versions: str
    facts: tuple[tuple[str, str], ...]
    host: str
    fingerprint: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        host = Host.detect()
        return cls(socket.gethostname(), machine_id(), versions_line(), machine_facts(), repr(host), host.fingerprint)

    def is_same(self, other: Machine) -> bool:
        """Whether the two are one machine, and one container of it."""
        return (self.name, self.start) == (other.name, other.start)

    def differences(self, other: Machine) -> list[str]:
        """The facts in which `other` differs from this machine, each as text."""
        found = [] if self.versions == other.versions else [f"{other.versions}, here {self.versions}"]
        theirs = dict(other.facts)
        found += [f"{name} {theirs.get(name)}, here {fact}" for name, fact in self.facts if theirs.get(name) != fact]
        if self.fingerprint != other.fingerprint:
            found.append(f"devices {other.host} [{other.fingerprint}], here {self.host} [{self.fingerprint}]")
        return found


class Believed(MeasurementLog):
    """A log that recalls nothing and keeps only the names of plans: those whose figures an `Evaluator` believes."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def recall(self, key: MeasurementKey, reference: str, plan: Plan, problem: Problem) -> Measurement | None:
        """Nothing: the driver has asked its own log before."""
        return None

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Takes note of the plan."""
        self._told.add(plan.fingerprint)

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Does nothing."""

    def marked(self, plans: Sequence[Plan], outcomes: Sequence[Measurement]) -> list[Measurement]:
        """The outcomes of a race; those that were not believed without a key. Then it forgets its reference."""
        told, self._told = self._told, set()
        return [
            outcome if plan.fingerprint in told else dataclasses.replace(outcome, key=None)
            for plan, outcome in zip(plans, outcomes, strict=True)
        ]
