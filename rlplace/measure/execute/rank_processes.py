"""Steps whose devices are processes of this machine: `RankCrew` runs them, `serve_rank` is the work of one process.

The first device is a thread of the process that runs steps. It tells the other processes by a signal in shared memory
what to run (`Arena`), and all else by messages: each is answered before the next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch

from rlplace import cuda
from rlplace.errors import RunnerError, refuse_if
from rlplace.graphs import OpGraph
from rlplace.measure.execute.device_threads import (
    Crew,
    Job,
    RankFailed,
    Report,
    Transport,
    Woken,
    Worker,
    as_device,
)
from rlplace.measure.execute.distributed import DistributedChannel, Wires, distributed_channels
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_programs import RankPrograms
from rlplace.measure.execute.residents import Resident, Residents
from rlplace.measure.execute.shared_memory import Arena, shared_channels, slot_offsets
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.problem import Plan
from rlplace.measure.timing.race import Watch

Told = tuple[str, str, bool]
"""An error: its message, the op, and whether memory was missing."""
MESSAGE = -1
"""The task of a rank that is to answer a message."""


class RankWorker(Worker):
    """The process of another device, as the worker of a crew."""

    def __init__(self, device: Device, rank: int, arena: Arena, link: Connection[Any, Any]) -> None:
        self.device, self.link = device, link
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

    def job(self, key: int) -> Job:
        """Starts its part of a step."""

        def start(step: int) -> None:
            self.is_busy = True
            self._arena.set_task(self._rank, key, step)
            self._go.release()

        return start

    def wait(self, timeout_s: float, is_hopeless: Callable[[], bool] = bool) -> bool:
        if not self.is_busy:
            return True
        has_ended = super().wait(timeout_s, is_hopeless)
        if has_ended and self._arena.has_failed(self._rank) and self._report is not None:
            self._report(_error(*self.link.recv()))
        return has_ended

    def ask(self, *message: Any) -> None:
        """Sends a message; `answer` must be called then.

        Raises:
            RunnerError: the last step has not ended there.
        """
        self._refuse_if_busy()
        with contextlib.suppress(ConnectionError):  # it is gone: see `answer`
            self.link.send(message)
        self._arena.set_task(self._rank, MESSAGE, 0)
        self._go.release()

    def answer(self) -> Any:
        """The answer to it, or an error."""
        try:
            is_done, result = self.link.recv()
        except (EOFError, ConnectionError):  # it is gone: whoever started both sees that, and ends this process, too
            threading.Event().wait()
        return result if is_done else _error(*result)

    def replacement(self) -> Worker:
        return self  # whoever started it ends it

    def stop(self) -> None:
        """Nothing: whoever started it ends it."""


def _error(message: str, op: str, is_out_of_memory: bool) -> RankFailed:
    error = RankFailed(message, op=op)
    error.__cause__ = MemoryError(message) if is_out_of_memory else None
    return error


def _told(error: BaseException) -> Told:
    message = str(error) if isinstance(error, RunnerError) else f"{type(error).__name__}: {error}"
    return message, getattr(error, "op", ""), cuda.is_out_of_memory(error)


class RankCrew(Crew):
    """The workers of a host whose devices are processes.

    Args:
        host: its devices.
        arena: shared by all of them.
        rank: the device whose part of each step this process runs.
        links: to the processes of the other devices, in order; none where another process runs steps.
        wires: of this rank, where tensors go over these; by default they go through slots in the arena.
    """

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
        self._arena, self._wires = arena, wires
        self.has_slots, self.sends_wait = wires is None, wires is not None
        self._others = [
            RankWorker(device, other, arena, link)
            for other, (device, link) in enumerate(zip(host.devices[1:], links), start=1)
        ]
        self.workers += self._others

    def channels(self, made: RankPrograms, host: Host, *, is_traced: bool = False) -> dict[int, Transport]:
        refuse_if(
            any(made.is_handover),
            "host",
            host.name,
            "a host on which every tensor is copied between devices",
            hint="Gangs need threads: use `cores`.",
        )
        if self._wires is not None:
            sent = distributed_channels(self._wires, made, self.here[0], self._arena.abort, is_traced=is_traced)
            return dict(sent)
        if self._others:
            self._arena.make_room(made.plan.num_transfers, slot_offsets(made.slots)[1])
        return dict(shared_channels(self._arena, made, self.here[0]))

    def load(self, key: int, plan: Plan, options: dict[str, Any]) -> None:
        self.ask("load", key, plan, options)

    def unload(self, key: int) -> None:
        if not any(worker.is_busy for worker in self._others):  # one that is stuck runs nothing any more
            self.ask("unload", key)

    def results(self, key: int) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for sent in self.ask("results", key):
            found |= {int(index): value for index, value in safetensors.torch.load(sent).items()}
        return found

    def job(self, device: int, key: int) -> Job:
        return self._others[device - 1].job(key) if self._others else lambda _: None

    def is_hopeless(self) -> bool:
        return self.sends_wait and self._arena.is_aborted

    def part(self, run: Job, channels: Mapping[int, Transport]) -> Job:
        if not self.sends_wait:
            return run
        sent = [channel for channel in channels.values() if isinstance(channel, DistributedChannel)]
        place = next((wire.place for wire in (self._wires or {}).values()), torch.device("cpu"))

        def whole(step: int) -> None:
            run(step)
            for channel in sent:
                channel.settle()
            # a receive whose sender has failed does not end
            while place.type == "cuda" and not cuda.is_done(cuda.current_stream(place)):
                if self._arena.is_aborted:
                    raise Woken

        return whole

    def ask(self, *message: Any) -> list[Any]:
        """The answers of all other processes.

        Raises:
            RankFailed: one of them failed.
        """
        for worker in self._others:
            worker.ask(*message)
        answers = [worker.answer() for worker in self._others]
        for error in answers:
            if isinstance(error, RankFailed):
                raise error
        return answers

    def settle(self) -> bool:
        if self.sends_wait:  # messages of the failed step are on the wires
            self.is_spent, self._is_settled = True, False
            return False
        if self._others and not any(worker.is_busy for worker in self.workers):
            self._arena.reset()
        return super().settle()


class RankResidents(Residents):
    """Residents of all processes, for the one that runs steps: each has those of its own device.

    Args:
        graph: with its program.
        host: its devices.
        crew: its processes.
        seed: of values that the graph does not hold.
    """

    def __init__(self, graph: OpGraph, host: Host, crew: RankCrew, *, seed: int = 0) -> None:
        super().__init__(graph, host, seed=seed, is_apart=True)
        self._crew = crew

    @property
    def made(self) -> frozenset[Resident]:
        return super().made.union(*self._crew.ask("made"))

    def keep_only(self, needed: Collection[Resident]) -> bool:
        self._crew.ask("keep_only", frozenset(needed))
        return super().keep_only(needed)

    def reset(self) -> None:
        self._crew.ask("reset")
        super().reset()


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
        arena: shared by all ranks.
        link: to the process that runs steps (`RankCrew`).
        seed: of values that the graph does not hold.
        watch: told, between steps, that one may begin.
        wires: as of `RankCrew`.
    """
    crew = RankCrew(host, arena, rank=rank, wires=wires)
    threading.current_thread().name = f"rlplace {host.devices[rank].name}"  # as of a device's thread
    served = _Rank(graph, host, crew, Residents(graph, host, seed=seed, is_apart=True))
    go, done = arena.task_signals(rank)
    with as_device(host.devices[rank], crew.streams):
        while True:
            go.acquire()
            key, step = arena.task(rank)
            if key != MESSAGE:
                try:
                    served.run(key, step)
                except Woken:
                    pass
                except BaseException as error:
                    arena.abort()
                    arena.set_failed(rank)
                    link.send(_told(error))
                done.release()
                if watch is not None:
                    watch.begin(rank)
                continue
            try:
                name, *given = link.recv()
            except EOFError:
                return
            try:
                link.send((True, getattr(served, name)(*given)))
            except Exception as error:
                link.send((False, _told(error)))


class _Rank:
    """One device: what the other process may ask for, by name."""

    def __init__(self, graph: OpGraph, host: Host, crew: RankCrew, residents: Residents) -> None:
        self._graph, self._host, self._crew, self._residents = graph, host, crew, residents
        self._steps: dict[int, PlacedStep] = {}

    def run(self, key: int, step: int) -> None:
        self._steps[key].run_part(self._crew.here[0], step)

    def load(self, key: int, plan: Plan, options: dict[str, Any]) -> None:
        step = PlacedStep(self._graph, self._host, plan, self._residents, self._crew, **options)
        step.load()
        self._steps[key] = step

    def unload(self, key: int) -> None:
        if key in self._steps:
            self._steps.pop(key).unload()

    def results(self, key: int) -> bytes:
        # as bytes: a connection would send tensors by files of other processes
        made = self._steps[key].own_results
        return safetensors.torch.save({str(index): value.clone().contiguous() for index, value in made.items()})

    def marks(self, key: int) -> tuple[dict[int, float], dict[int, float]]:
        return self._steps[key].own_marks

    def made(self) -> frozenset[Resident]:
        return self._residents.made

    def keep_only(self, needed: Collection[Resident]) -> bool:
        return self._residents.keep_only(needed)

    def reset(self) -> None:
        self._residents.reset()
