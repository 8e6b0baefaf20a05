"""Steps whose devices are processes: `RankCrew` runs them, `serve_rank` is the work of one process.

The first device is a thread of the process that runs steps. It tells the other processes by a signal what to run: in
shared memory (`Arena`), or over the network to those of other machines (`LinkTasks`). All else goes by messages: each
is answered before the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch

from rlplace import cuda
from rlplace.errors import RunnerError, refuse_if
from rlplace.graphs import OpGraph, OptimizerSpec
from rlplace.measure.execute.device_threads import (
    Asked,
    Crew,
    Held,
    Job,
    RankFailed,
    Report,
    Transport,
    Woken,
    Worker,
    as_device,
)
from rlplace.measure.execute.distributed import Wires, distributed_channels, over_wires
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_programs import RankPrograms
from rlplace.measure.execute.residents import GradientsOut, Resident, Residents
from rlplace.measure.execute.shared_heap import Layout, SharedHeap
from rlplace.measure.execute.shared_memory import Arena, Signal, shared_channels, slot_offsets
from rlplace.measure.execute.two_part_step import TwoPartStep
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.problem import Plan
from rlplace.measure.timing.race import LOOKS_EVERY_S, Watch

Told = tuple[str, str, bool]
"""An error: its message, the op, and whether memory was missing."""
MESSAGE = -1
"""The task of a rank that is to answer a message; also the number of what it says without being asked."""


class LinkSignal(NamedTuple):
    """A signal by messages, as a semaphore has it: one side releases it, the other takes it."""

    release: Callable[[], None]
    acquire: Callable[..., bool]


class LinkTasks:
    """The tasks of a rank on another machine, as `Arena` has them: each side has one of these.

    Args:
        link: between the rank and the process that runs steps.
        lost: called there when the rank is gone.
    """

    def __init__(self, link: Connection[Any, Any], lost: Callable[[], NoReturn] | None = None) -> None:
        self._link, self._lost = link, lost
        self._task = MESSAGE, 0
        self._is_running = self._has_failed = False

    def task_signals(self, _: int) -> tuple[Signal, Signal]:
        return LinkSignal(self._start, self._await_start), LinkSignal(self._end, self._await_end)

    def set_task(self, _: int, key: int, step: int) -> None:
        self._task, self._is_running, self._has_failed = (key, step), key != MESSAGE, False

    def task(self, _: int) -> tuple[int, int]:
        return self._task

    def set_failed(self, _: int) -> None:
        self._has_failed = True

    def has_failed(self, _: int) -> bool:
        self._look(0.0)
        return self._has_failed

    def _start(self) -> None:
        with contextlib.suppress(OSError):  # it is gone: see `_look`
            self._link.send(self._task)

    def _await_start(self) -> bool:
        self._task, self._has_failed = self._link.recv(), False
        return True

    def _end(self) -> None:
        self._link.send((_ENDED, self._has_failed))

    def _await_end(self, *, timeout: float) -> bool:
        self._look(timeout)
        return not self._is_running

    def _look(self, timeout_s: float) -> None:
        """Waits for the end of its part; Ctrl-C may have left answers unread before it."""
        until_s = time.monotonic() + timeout_s
        try:
            while self._is_running and self._link.poll(max(until_s - time.monotonic(), 0.0)):
                what, *told = self._link.recv()
                if what == _ENDED:
                    self._is_running, self._has_failed = False, told[0]
        except (EOFError, OSError):
            assert self._lost is not None
            self._lost()


_ENDED = "ended"
"""In the place of the number of an answer."""


class RankWorker(Worker):
    """The process of another device, as the worker of a crew."""

    def __init__(
        self, device: Device, rank: int, arena: Arena | LinkTasks, link: Connection[Any, Any], crew: RankCrew
    ) -> None:
        self.device, self._link, self._crew = device, link, crew
        self.is_busy, self.suspended_s = False, 0.0
        self._rank, self._arena = rank, arena
        self._go, self._done = arena.task_signals(rank)
        self._report: Report | None = None

    @property
    def is_calling(self) -> bool:
        return False

    def start(self, job: Job, step: int, report: Report) -> None:
        """Starts a step there; `report` is called in `wait`."""
        self._refuse_if_busy()
        self._report = report
        job(step)

    def begin(self, task: int, step: int) -> None:
        """Starts its part of a step."""
        self.is_busy = True
        self._arena.set_task(self._rank, task, step)
        self._go.release()

    def wait(self, timeout_s: float, is_hopeless: Callable[[], bool] = bool) -> bool:
        if not self.is_busy:
            return True
        has_ended = super().wait(0.0 if self._crew.why else timeout_s, is_hopeless)
        report, self._report = self._report, None if has_ended else self._report  # it holds the step
        if has_ended and self._arena.has_failed(self._rank) and report is not None:
            report(_error(*self._said(MESSAGE)))
        return has_ended

    @property
    def has_failed(self) -> bool:
        """Whether its part of the step that runs has ended with an error."""
        return self.is_busy and self._arena.has_failed(self._rank)

    def clock_s(self) -> float:
        """How much more its clock shows than the one here, as its quickest answer tells (Cristian 1989); 0 on this
        machine."""
        if isinstance(self._arena, Arena):
            return 0.0
        found: list[tuple[float, float]] = []
        for _ in range(_NUM_ASKED):
            begin_s = time.perf_counter()
            there_s, end_s = self._crew.ask_one(self, "now_s"), time.perf_counter()
            found.append((end_s - begin_s, there_s - (begin_s + end_s) / 2))
        return min(found)[1]

    def ask(self, packed: bytes) -> None:
        """Sends a message; `answer` must be called then."""
        self._arena.set_task(self._rank, MESSAGE, 0)
        self._go.release()
        with contextlib.suppress(OSError):  # it is gone: see `answer`
            self._link.send_bytes(packed)

    def answer(self, number: int) -> Any:
        """The answer to the message of this number, or an error."""
        is_done, result = self._said(number)
        return result if is_done else _error(*result)

    def _said(self, number: int) -> Any:
        """What it says with this number; Ctrl-C may have left other things unread."""
        said: tuple[Any, ...] = (None,)
        try:
            while said[0] != number:
                while not self._link.poll(LOOKS_EVERY_S):
                    self._crew.watch()
                said = self._link.recv()
        except (EOFError, OSError):
            self._crew.lost()
        return said[1:]

    def stop(self) -> None:
        """Nothing: whoever started it ends it."""


def _error(message: str, op: str, is_out_of_memory: bool) -> RankFailed:
    error = RankFailed(message, op=op)
    error.__cause__ = MemoryError(message) if is_out_of_memory else None
    return error


def _told(error: BaseException) -> Told:
    message = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
    return message, getattr(error, "op", ""), cuda.is_out_of_memory(error)


_NUM_ASKED = 8
"""Times that another machine is asked what its clock shows."""


class RankCrew(Crew):
    """The workers of a host whose devices are processes.

    Args:
        host: its devices.
        arena: shared by those of this machine.
        rank: the device whose part of each step this process runs.
        links: to the processes of the other devices, in order; none where another process runs steps.
        wires: of this rank, to others with which it has no memory in common; by default there are none. All other
            tensors go through slots in the arena.

    Attributes:
        why: nothing can run any more, as a process is gone; else empty.
    """

    heap: SharedHeap
    why = ""

    def __init__(
        self,
        host: Host,
        arena: Arena,
        *,
        rank: int = 0,
        links: Sequence[Connection[Any, Any]] = (),
        wires: Wires | None = None,
    ) -> None:
        super().__init__(host.devices[:1] if links else ())
        self.here = (rank,)
        self._arena, self._wires, self.heap = arena, wires, arena.heap
        self.has_slots, self.is_wired = wires is None or host.is_wired, wires is not None
        self.sends_wait = any(wire.stream is not None for wire in (wires or {}).values())
        self._layouts: dict[tuple[int, int], Layout] = {}  # by step and index, of results that others make
        self._told = b""  # what they follow
        self._num_asked = 0
        self._others = [
            RankWorker(device, other, _tasks(host, other, arena, link, self.lost), link, self)
            for other, (device, link) in enumerate(zip(host.devices[1:], links), start=1)
        ]
        self._has_far = any(is_far(host, other) for other in range(1, host.num_devices))
        self.workers += self._others

    def channels(self, made: RankPrograms, host: Host, *, is_traced: bool = False) -> dict[int, Transport]:
        refuse_if(
            any(made.is_handover),
            "host",
            host.name,
            "a host on which every tensor is copied between devices",
            hint="Gangs need threads: use `cores`.",
        )
        channels: dict[int, Transport] = {}
        if self._wires is not None:
            sent = distributed_channels(self._wires, made, self.here[0], self._arena.abort, is_traced=is_traced)
            channels.update(sent)
        if self.has_slots:
            slots = made.slots_beside(self.here[0], host)
            # on other machines every rank makes the same room, before any of them answers that it has loaded the step
            if self._others or is_far(host, self.here[0]):
                self._arena.make_room(made.plan.num_transfers, slot_offsets(slots)[1])
            channels.update(shared_channels(self._arena, made, slots, self.here[0]))
        return channels

    def look(self) -> None:
        super().look()
        self.watch()

    def watch(self) -> None:
        """Raises if a rank has died. Does nothing here: `isolated_runner.wait_for` watches all ranks.

        Raises:
            RunnerError: one is gone.
        """

    def lost(self) -> NoReturn:
        """Called when the connection of a rank closes: waits until the parent ends this process; `OwnCrew` raises."""
        threading.Event().wait()
        raise AssertionError

    def number_of(self, graph: OpGraph) -> int:
        """The number by which they know a graph: they have one."""
        return 0

    def load(self, key: int, graph: OpGraph, plan: Plan, options: dict[str, Any], held: Held) -> None:
        if self._others:
            self.ask("load", key, self.number_of(graph), plan, options, held)

    def unload(self, key: int) -> None:
        if not any(worker.is_busy for worker in self._others):  # one that is stuck runs nothing any more
            self.ask("unload", key)

    def follow(self, spec: OptimizerSpec | None, asked: Asked) -> None:
        told = self.heap.packed((spec, asked))
        if told != self._told:
            self.ask("follow", told)
            self._told = told

    def results(self, key: int, makers: Mapping[int, int], made: Sequence[Any]) -> dict[int, torch.Tensor]:
        indices = [index for index, maker in makers.items() if maker not in self.here]
        if not indices:
            return {}
        if self._has_far:
            told = {index: each for found in self.ask("copies", key, indices) for index, each in found.items()}
            return {index: layout.tensor(memory, 0) for index, (layout, memory) in told.items()}
        if unknown := [index for index in indices if (key, index) not in self._layouts]:
            for found in self.ask("layouts", key, unknown):
                self._layouts |= {(key, index): layout for index, layout in found.items()}
        copies = {index: self.heap.empty(self._layouts[key, index]) for index in indices}
        self.ask("results", key, copies)
        return copies

    def marks(self, key: int) -> list[tuple[dict[int, float], dict[int, float]]]:
        told = self.ask("marks", key)
        ahead_s = [worker.clock_s() for worker in self._others]
        return [
            tuple({item: at_s - by_s for item, at_s in known.items()} for known in both)  # type: ignore[misc]
            for both, by_s in zip(told, ahead_s, strict=True)
        ]

    def job(self, device: int, key: int, part: int = 0) -> Job:
        return partial(self._others[device - 1].begin, 2 * key + part) if self._others else lambda _: None

    def is_hopeless(self) -> bool:
        self.watch()
        return self.is_wired and (self._arena.is_aborted or any(worker.has_failed for worker in self._others))

    def part(self, run: Job, channels: Mapping[int, Transport]) -> Job:
        if not self.is_wired:
            return run
        run_all = over_wires(run, channels)
        place = next((wire.place for wire in (self._wires or {}).values()), torch.device("cpu"))

        def whole(step: int) -> None:
            run_all(step)
            # a receive whose sender has failed does not end
            while place.type == "cuda" and not cuda.is_done(cuda.current_stream(place)):
                if self._arena.is_aborted:
                    raise Woken

        return whole

    def ask(self, *message: Any) -> list[Any]:
        """The answers of all other processes.

        Raises:
            RankFailed: one of them failed.
            RunnerError: one is gone, or the last step has not ended there.
        """
        self.look()
        for worker in self._others:  # before any of them is sent anything
            worker.wait(0.0)  # a step that was late may have ended since
            worker._refuse_if_busy()
        self._num_asked += 1
        packed = self.heap.packed((self._num_asked, *message))
        for worker in self._others:
            worker.ask(packed)
        answers = [worker.answer(self._num_asked) for worker in self._others]
        for error in answers:
            if isinstance(error, RankFailed):
                raise error
        return answers

    def ask_one(self, worker: RankWorker, *message: Any) -> Any:
        """The answer of one other process."""
        self._num_asked += 1
        worker.ask(self.heap.packed((self._num_asked, *message)))
        return worker.answer(self._num_asked)

    def settle(self) -> bool:
        if self.is_wired:  # messages of the failed step are on the wires
            self.is_spent, self._is_settled = True, False
            return False
        have_ended = [not worker.is_busy or worker.wait(0.0) for worker in self.workers]  # of all: each is asked
        self._is_settled = all(have_ended)
        if not self._is_settled:
            return False
        self._arena.reset()
        return super().settle()

    def _leave_behind(self, stuck: list[Worker]) -> None:
        """Leaves none: the signals that it waits for are those of all steps."""


def is_far(host: Host, rank: int) -> bool:
    """Whether a rank is on another machine than the process that runs steps."""
    return host.devices[rank].machine != host.devices[0].machine


def _tasks(
    host: Host, rank: int, arena: Arena, link: Connection[Any, Any], lost: Callable[[], NoReturn] | None = None
) -> Arena | LinkTasks:
    return LinkTasks(link, lost) if is_far(host, rank) else arena


def serve_rank(
    graph: OpGraph,
    host: Host,
    rank: int,
    arena: Arena,
    link: Connection[Any, Any],
    *,
    seed: int = 0,
    watch: Watch | None = None,
    wires: Wires | None = None,
) -> None:
    """Runs the parts of steps that belong to a device, on the calling thread, until the other process is gone.

    Args:
        graph: with its program.
        host: with that device.
        rank: its index.
        arena: shared by all ranks of its machine.
        link: to the process that runs steps (`RankCrew`).
        seed: of values that the graph does not hold.
        watch: told, between steps, that one may begin.
        wires: as of `RankCrew`.
    """
    crew = RankCrew(host, arena, rank=rank, wires=wires)
    threading.current_thread().name = f"rlplace {host.devices[rank].name}"  # as of a device's thread
    served = _Rank(graph, host, crew, seed)
    tasks = _tasks(host, rank, arena, link)
    go, done = tasks.task_signals(rank)
    with as_device(host.devices[rank], crew.streams), contextlib.suppress(EOFError, ConnectionError, TimeoutError):
        while True:
            go.acquire()
            key, step = tasks.task(rank)
            if key != MESSAGE:
                failure: Told | None = None
                try:
                    served.run(key, step)
                except Woken:
                    pass
                except BaseException as error:
                    failure = _told(error)
                    arena.abort()
                    tasks.set_failed(rank)
                done.release()
                if failure is not None:
                    link.send((MESSAGE, *failure))
                if watch is not None:
                    watch.begin(rank)
                continue
            number, name, *given = arena.heap.unpacked(link.recv_bytes())
            try:
                link.send((number, True, getattr(served, name)(*given)))
            except Exception as error:
                link.send((number, False, _told(error)))


class _Rank:
    """One device: what the other process may ask for, by name."""

    def __init__(self, graph: OpGraph, host: Host, crew: RankCrew, seed: int) -> None:
        self._host, self._crew, self._here, self._seed = host, crew, crew.here[0], seed
        self._graphs: list[tuple[OpGraph, Residents]] = []
        self._with(graph)
        self._gradients = GradientsOut()
        self._steps: dict[int, PlacedStep] = {}
        self._kept: dict[tuple[int, int], tuple[Any, ...]] = {}  # by step and its number, for its second part

    def run(self, task: int, number: int) -> None:
        key, part = divmod(task, 2)
        kept = self._steps[key].run_part(part, number, self._kept.pop((key, number), ()))
        if kept:
            self._kept[key, number] = kept

    def add_graph(self, packed: bytes) -> None:
        graph, program = self._crew.heap.unpacked(packed)
        self._with(dataclasses.replace(graph, program=program))

    def load(self, key: int, graph_number: int, plan: Plan, options: dict[str, Any], held: Held) -> None:
        graph, residents = self._graphs[graph_number]
        for op, value in held.items():
            if plan.devices[op] == self._here:
                residents.adopt(op, self._here, value)
        kind = PlacedStep if options["second"] is None else TwoPartStep
        gradients = self._gradients if options.pop("hands_out") else None
        step = kind(graph, self._host, plan, residents, self._crew, gradients=gradients, **options)
        step.load()
        self._steps[key] = step

    def unload(self, key: int) -> None:
        if key in self._steps:
            self._steps.pop(key).unload()

    def follow(self, told: bytes) -> None:
        spec, self._gradients.asked = self._crew.heap.unpacked(told)
        for _, residents in self._graphs if spec is not None else ():
            residents.set_options(spec)

    def give(self, key: int, given: Mapping[int, torch.Tensor], dropped: Sequence[int]) -> None:
        for number in dropped:
            self._kept.pop((key, number), None)
        step = self._steps[key]
        assert isinstance(step, TwoPartStep)
        step.take(given)

    def layouts(self, key: int, indices: Sequence[int]) -> dict[int, Layout]:
        own = self._steps[key].own_results
        return {index: Layout.of_copy(own[index]) for index in indices if index in own}

    def results(self, key: int, into: Mapping[int, torch.Tensor]) -> None:
        step = self._steps[key]
        own = {index: value for index, value in step.own_results.items() if index in into}
        for index, value in own.items():
            into[index].copy_(value)
        if isinstance(step, TwoPartStep):
            step.drop_results(own)

    def copies(self, key: int, indices: Sequence[int]) -> dict[int, tuple[Layout, bytearray]]:
        """Of `results`, the bytes, for a process that has no memory in common with this one."""
        made = {}
        for index, value in self._steps[key].own_results.items():
            if index in indices:
                layout = Layout.of_copy(value)
                made[index] = layout, bytearray(max(layout.extent * layout.dtype.itemsize, 1))
                layout.tensor(made[index][1], 0).copy_(value)
        return made

    def marks(self, key: int) -> tuple[dict[int, float], dict[int, float]]:
        return self._steps[key].own_marks

    def now_s(self) -> float:
        return time.perf_counter()

    def made(self) -> frozenset[Resident]:
        return self._graphs[0][1].made

    def keep_only(self, needed: Collection[Resident]) -> bool:
        return self._graphs[0][1].keep_only(needed)

    def reset(self) -> None:
        self._graphs[0][1].reset()

    def _with(self, graph: OpGraph) -> None:
        self._graphs.append((graph, Residents(graph, self._host, seed=self._seed, is_apart=True)))
