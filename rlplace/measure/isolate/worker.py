"""The worker: holds a `HostRunner`, answers requests, and writes on its board what it is doing."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace import cuda
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Origin
from rlplace.measure.costs.costs import Costs
from rlplace.measure.costs.profile import profile_costs
from rlplace.measure.execute.device_threads import Worker as CoreWorker
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate import memory_watch
from rlplace.measure.isolate.memory_watch import Room
from rlplace.measure.isolate.messages import (
    MAKING_S,
    Ask,
    Board,
    Done,
    Fault,
    Profile,
    Race,
    Ready,
    Request,
    Said,
    Setup,
    Step,
    Trace,
    Unfit,
)
from rlplace.measure.isolate.packing import Section, Unpacked
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.timing.eager_step import EagerRecipe, Other, Recipe
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.outcomes import status_of
from rlplace.measure.timing.race import Timer
from rlplace.measure.timing.threads import one_thread_here, pin_current_thread

SETUP, ORIGIN = range(2)
"""Numbers of the packed parts."""


def main(ends: tuple[int, int, int, int, int], index: Section) -> None:
    """Runs a worker until its parent closes the connection.

    Args:
        ends: descriptors: of the messages, of a pipe that ends with the process that asks (`end_with`), of the packed
            parts, of the board, and of the file for stacks.
        index: of the packed parts.
    """
    for file in ends:  # a process that an op starts must not keep them open
        os.set_inheritable(file, False)
    messages, _, shared, board, stacks = ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; who asks decides
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    memory_watch.volunteer_to_die()
    connection: Connection[Any, Any] = Connection(messages)
    with (
        contextlib.ExitStack() as threads,
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),  # the parent is gone
    ):
        try:
            unpacked = Unpacked(shared, index)
            setup: Setup = unpacked.get(SETUP)
            pin_current_thread(setup.cores)
            setup.settings.apply()
            threads.enter_context(one_thread_here())
            worker = _Worker(setup, lambda: unpacked.get(ORIGIN), connection, Board.on(board))
            ready = Ready(worker.room_bytes())
        except Exception as error:
            connection.send(Unfit(f"{type(error).__name__}: {error}"))
            return
        connection.send(ready)
        worker.serve()


class _Worker:
    """One `HostRunner`, and what it is asked.

    Args:
        setup: the problem and the reference.
        origin: reads the user's model and loss, once they are needed.
        connection: to the process that asks.
        board: that it reads.
    """

    def __init__(
        self, setup: Setup, origin: Callable[[], Origin], connection: Connection[Any, Any], board: Board
    ) -> None:
        problem = dataclasses.replace(
            setup.problem, graph=dataclasses.replace(setup.problem.graph, program=setup.program)
        )
        self._problem, self._memory_limit_bytes = problem, setup.memory_limit_bytes
        self._origin, self._connection, self._board = origin, connection, board
        self._room = Room(board)
        self._has_gpus = any(device.backend == "cuda" for device in problem.host.devices)
        self._plans = _SentPlans(setup)
        self._graph: OpGraph | None = None
        self._steps: dict[str, Timer] = {}  # by fingerprint of the plan
        self._runner = HostRunner(
            problem,
            self._plans,
            reference=None if setup.reference is None else setup.reference.devices,
            step_timeout_s=2 * MAKING_S,  # who asks ends the worker before: a thread that hangs disturbs the others
            seed=setup.seed,
            watch=self._room,
            is_fatal=self._is_fatal,
        )

    def room_bytes(self) -> float:
        """What placements may take from now on; where there are no GPUs, allocations beyond it fail."""
        room = memory_watch.room_bytes(self._problem.host, self._memory_limit_bytes)
        if not self._has_gpus:
            self._room.limit(room)
        return room

    def serve(self) -> None:
        """Answers requests until the parent closes the connection.

        Raises:
            EOFError: it did.
        """
        while True:
            try:
                request: Request = self._connection.recv()
            except (EOFError, OSError):
                raise
            except Exception as error:  # what was sent cannot be read here
                self._board.reset()
                self._connection.send(self._fault(error))
                continue
            self._board.reset()
            try:
                self._connection.send(Done(self._answer(request)))
            except Exception as error:
                self._connection.send(self._fault(error))

    def _fault(self, error: Exception) -> Fault:
        return Fault(self._board.contender, status_of(error), str(error), is_usable=not self._is_fatal(error))

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Step):
            return self._step(request)
        self._steps = {}
        if isinstance(request, Profile):
            return self._profile(request)
        return self._race(request) if isinstance(request, Race) else self._trace(request)

    def _step(self, request: Step) -> float:
        self._room.begin(0)
        if request.plan.fingerprint not in self._steps:
            self._steps[request.plan.fingerprint] = self._runner.timer(request.plan)
        seconds = self._steps[request.plan.fingerprint]()
        self._room.end()
        return seconds

    def _race(self, request: Race) -> list[Measurement]:
        self._plans.learn(request.plans, request.peaks)
        others: list[Other] = [
            _asking(self._connection, k) if other is None else _WithModel(other, self._with_model)
            for k, other in enumerate(request.others)
        ]
        return self._runner.measure_plans(
            request.plans, protocol=request.protocol, others=others, deadline_s=request.deadline_s
        )

    def _trace(self, request: Trace) -> Any:
        self._plans.learn([request.plan], [request.peaks])
        return self._runner.trace(request.plan, num_steps=request.num_steps, warmup=request.warmup)

    def _profile(self, request: Profile) -> Costs:
        return profile_costs(
            self._problem.graph,
            self._problem.host,
            num_steps=request.num_steps,
            warmup=request.warmup,
            most_s=request.most_s,
            on_progress=lambda line: self._connection.send(Said(line)),
            watch=self._room,
        )

    def _is_fatal(self, error: Exception) -> bool:
        """Whether others cannot be measured here after it: the GPU is lost, or memory that the op may still hold."""
        if isinstance(error, _OutOfMemoryElsewhere):
            return False
        return cuda.is_lost(error) or (not self._has_gpus and cuda.is_out_of_memory(error))

    def _with_model(self) -> OpGraph:
        """The graph with the user's model."""
        if self._graph is None:
            graph = self._problem.graph
            program = dataclasses.replace(require_program(graph), origin=self._origin())
            self._graph = dataclasses.replace(graph, program=program)
        return self._graph


class _WithModel(Recipe):
    """A recipe that is given the graph with the user's model, which is read only if a race needs it."""

    def __init__(self, recipe: EagerRecipe, graph: Callable[[], OpGraph]) -> None:
        self._recipe, self._graph = recipe, graph

    def timer(self, graph: OpGraph, host: Host, widest: CoreWorker | None) -> Timer:
        return self._recipe.timer(self._graph(), host, widest)


class _OutOfMemoryElsewhere(MemoryError):
    """A timer ran out of memory that is not this process's."""


class _SentPlans:
    """The planner of a worker: it plans nothing, and knows of each plan what it was told."""

    def __init__(self, setup: Setup) -> None:
        self._reference = setup.reference
        self._peaks: dict[str, tuple[int, ...]] = {}
        if setup.reference is not None:
            self.learn([setup.reference], [setup.reference_peaks])

    def learn(self, plans: Sequence[Plan], peaks: Sequence[Sequence[int]]) -> None:
        """Keeps (D,) peaks of each plan."""
        self._peaks.update((plan.fingerprint, tuple(each)) for plan, each in zip(plans, peaks, strict=True))

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        """The reference's plan."""
        assert self._reference is not None
        return self._reference

    def retime(self, plan: Plan) -> Measurement:
        """A measurement of which only the peaks are known."""
        return Measurement("ok", 0.0, peak_bytes=self._peaks[plan.fingerprint])


def _asking(connection: Connection[Any, Any], other: int) -> Timer:
    """A timer that has the process that asks run one of its own."""

    def timer() -> float:
        connection.send(Ask(other))
        answer = connection.recv()
        if isinstance(answer, float):
            return answer
        error = answer.as_error()
        raise _OutOfMemoryElsewhere(str(error)) if isinstance(error, MemoryError) else error

    return timer
