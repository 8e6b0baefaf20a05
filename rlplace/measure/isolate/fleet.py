"""`Fleet`: the processes of a worker, one for each of its ranks, which run steps together.

Who asks speaks to the first one alone, which tells the others what to run. It looks at all of them, and all end when
one does. Those of other machines are started, looked at and ended there, by keepers.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from rlplace.errors import DeviceLost, RunnerError
from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.hosts.host import Device
from rlplace.measure.hosts.nodes import is_here, join
from rlplace.measure.isolate.keeper import FarWorker, Keeper
from rlplace.measure.isolate.messages import Board
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.worker import Link, Meeting, WorkerProcess


class Fleet:
    """One or more processes of a worker.

    Args:
        packed: the setup of all of them.
        devices: of each rank; only the first may be alone on another machine.
        first: the first rank that it starts; 1 where this process is rank 0.

    Attributes:
        ranks: its processes.
        arena: shared with them, where this process is rank 0.
        links: to them, then.
        store: descriptor of a file where the ranks find each other, then.
        meeting: where its ranks find each other; empty on one machine.
        limit_bytes: memory that they may hold together, placements included; infinite until they are ready. Of several
            machines, this is about the fullest.
        held_bytes: their memory at the last look; what two of them share counts twice.

    Raises:
        OSError: there is no memory for the tensors, or no process can be started.
        RunnerError: this system has no signals between processes, or the first of several is not on this machine.
        DeviceLost: another machine does not answer.
    """

    arena: Arena
    meeting: Meeting
    store: int

    def __init__(self, packed: Packed, devices: Sequence[Device], *, first: int = 0) -> None:
        self.ranks: list[WorkerProcess] = []
        self.links: list[Connection[Any, Any]] = []
        self.limit_bytes, self.held_bytes, self._room_bytes = float("inf"), 0, 0.0
        self._limits: dict[str, float] = {}  # by machine
        self._machines = [device.machine for device in devices[first:]]
        self._keepers: dict[str, Keeper] = {}  # by machine, of others
        self._gone: int | None = None
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as failed:
            failed.callback(self.close)
            far: dict[str, list[str]] = defaultdict(list)
            for device in devices:
                if not is_here(device):
                    far[device.machine].append(device.name)
            if len(devices) > 1 and devices[0].machine in far:
                raise RunnerError(f"{devices[0].name}, the first device, is not on the machine of rank 0")
            for machine, there in far.items():
                self._keepers[machine] = Keeper(machine, there)
            prefix = f"rlplace/fleet/{uuid4().hex}"
            self.meeting = (prefix, join().interface) if far else ()
            links: list[Link] = [()]
            names: list[Sequence[str]] = [()]  # of connections of ranks on other machines, to the first
            if len(devices) > 1:
                arena = sent.enter_context(contextlib.closing(Arena.new(len(devices))))
                store = os.memfd_create("rlplace")  # a file of which a killed process leaves nothing
                sent.callback(os.close, store)
                to_first: list[int] = []
                for rank, device in enumerate(devices[1:], start=1):
                    if device.machine in far:
                        connection, name = self._keepers[device.machine].connect()
                        to_first.append(sent.enter_context(connection).fileno())
                        names.append([name])
                        links.append(())
                    else:
                        ours, theirs = (sent.enter_context(each).fileno() for each in socket.socketpair())
                        to_first.append(ours)
                        names.append([])
                        links.append((rank, arena.file, store, theirs))
                links[0] = (0, arena.file, store, *to_first)
            for rank, device in enumerate(devices[first:], start=first):
                if device.machine in far:
                    keeper = self._keepers[device.machine]
                    self.ranks.append(FarWorker(keeper, packed, rank, names[rank], prefix))
                else:
                    self.ranks.append(WorkerProcess(packed, links[rank], meeting=self.meeting))
                if len(devices) > 1:
                    self.ranks[-1].name = f"the worker of {device.name}"
            if first:
                file, self.store, *own = map(os.dup, links[0][1:])
                self.arena, self.links = Arena(file), [Connection(end) for end in own]
            failed.pop_all()

    @property
    def board(self) -> Board:
        """Where the first rank says what it does."""
        return self.ranks[0].board

    @property
    def connection(self) -> Connection[Any, Any]:
        """To the first rank."""
        return self.ranks[0].connection

    @property
    def pid(self) -> int:
        """Of the first rank."""
        return self.ranks[0].pid

    def await_ready(self) -> None:
        """Waits until it can be asked.

        Raises:
            CannotIsolate: one cannot read its setup, or it ended.
        """
        for rank in self.ranks:
            rank.await_ready(self._look)
        for keeper in self._keepers.values():
            keeper.look()
        firsts = {machine: self.ranks[self._machines.index(machine)] for machine in self._machines}
        room_bytes = {machine: first.limit_bytes - first.held_bytes for machine, first in firsts.items()}
        self._limits = {machine: held + room_bytes[machine] for machine, held in self._held().items()}
        self._room_bytes = min(room_bytes.values())
        self.look_at_memory()

    def look_at_memory(self) -> bool:
        """Whether it holds more than it may, on any machine."""
        held = self._held()
        fullest = max(held, key=lambda machine: held[machine] - self._limits.get(machine, float("inf")))
        self.held_bytes, self.limit_bytes = held[fullest], self._limits.get(fullest, float("inf"))
        return self.held_bytes > self.limit_bytes

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = defaultdict(int)
        for rank, machine in zip(self.ranks, self._machines, strict=True):
            held[machine] += rank.look_at_memory()
        return held

    def write_stacks(self) -> None:
        """Makes every process that is there write the stacks of its threads."""
        gone = self._first_gone(is_ending=True)
        for index, rank in enumerate(self.ranks):
            if index != gone and not rank.has_ended:
                rank.write_stacks()

    def stacks(self) -> list[str]:
        """The stacks of each process."""
        return [rank.stacks() for rank in self.ranks]

    def ran_out_of_memory(self) -> bool:
        """Whether it was ended for want of memory: near its limit when last looked at, or by the kernel's count."""
        return self.held_bytes > self.limit_bytes - 0.2 * self._room_bytes or self.ranks[self.gone].has_lost_siblings()

    @property
    def gone(self) -> int:
        """The rank that ended first, by itself or from outside; else the first one."""
        return self._gone or 0

    @property
    def has_ended(self) -> bool:
        """Whether any of them is gone."""
        return self._first_gone() is not None

    @property
    def lost(self) -> DeviceLost | None:
        """The error that says which machine does not answer any more, if one does not."""
        return next((keeper.lost for keeper in self._keepers.values() if keeper.lost is not None), None)

    @property
    def is_cut(self) -> bool:
        """Whether a machine does not answer, perhaps for a moment."""
        return any(keeper.is_cut for keeper in self._keepers.values())

    @property
    def stopped(self) -> int | None:
        """The first rank that a signal stopped, and none has continued."""
        return next((index for index, rank in enumerate(self.ranks) if rank.is_stopped), None)

    def end(self) -> None:
        """Ends all of them at once, and waits until they are gone."""
        self._first_gone(is_ending=True)
        for rank in self.ranks:
            rank.end()

    def close(self) -> None:
        """Ends all of them and lets go of everything."""
        for rank in self.ranks:
            rank.close()
        for keeper in self._keepers.values():
            keeper.close()
        for each in self.links:
            each.close()
        if self.links:
            self.arena.close()
            os.close(self.store)

    def _look(self) -> None:
        """Sees that all are there: one that starts waits for the others."""
        if (gone := self._first_gone()) is None:
            return
        if (lost := self.lost) is not None:
            raise lost
        self.ranks[gone].await_ready()
        raise self.ranks[gone].ended_early()

    def _first_gone(self, *, is_ending: bool = False) -> int | None:
        """The rank that was seen to end first; one on its way out may count only if nothing is asked any more."""
        if self._gone is None:
            ended = (k for k, rank in enumerate(self.ranks) if rank.has_ended or (is_ending and rank.has_closed()))
            self._gone = next(ended, None)
        return self._gone
