"""`Fleet`: the processes of a worker, one for each of its ranks, which run steps together.

Who asks speaks to the first one alone, which tells the others what to run. It looks at all of them, and all end when
one does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from rlplace.measure.execute.shared_memory import Arena
from rlplace.measure.isolate.messages import Board
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.worker import WorkerProcess


class Fleet:
    """One or more processes of a worker.

    Args:
        packed: the setup of all of them.
        num_ranks: how many they are.
        first: the first rank that it starts; 1 where this process is rank 0.

    Attributes:
        ranks: its processes.
        arena: shared with them, where this process is rank 0.
        links: to them, then.
        store: descriptor of a file where the ranks find each other, then.
        limit_bytes: memory that they may hold together, placements included; infinite until they are ready.
        held_bytes: their memory at the last look; what two of them share counts twice.

    Raises:
        OSError: there is no memory for the tensors, or no process can be started.
        RunnerError: this system has no signals between processes.
    """

    arena: Arena
    store: int

    def __init__(self, packed: Packed, num_ranks: int = 1, *, first: int = 0) -> None:
        self.ranks: list[WorkerProcess] = []
        self.links: list[Connection[Any, Any]] = []
        self.limit_bytes, self.held_bytes, self._room_bytes = float("inf"), 0, 0.0
        self._gone: int | None = None
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as failed:
            failed.callback(self.close)
            links: list[tuple[int, ...]] = [()]
            if num_ranks > 1:
                arena = sent.enter_context(contextlib.closing(Arena.new(num_ranks)))
                pairs = [socket.socketpair() for _ in range(1, num_ranks)]
                ends = [[sent.enter_context(each).fileno() for each in pair] for pair in pairs]
                store = os.memfd_create("rlplace")  # a file of which a killed process leaves nothing
                sent.callback(os.close, store)
                links = [(0, arena.file, store, *(ours for ours, _ in ends))]
                links += [(rank, arena.file, store, theirs) for rank, (_, theirs) in enumerate(ends, start=1)]
            for link in links[first:]:
                self.ranks.append(WorkerProcess(packed, link))
            if first:
                file, self.store, *ours = map(os.dup, links[0][1:])
                self.arena, self.links = Arena(file), [Connection(end) for end in ours]
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
            rank.await_ready()
        self._room_bytes = self.ranks[0].limit_bytes - self.ranks[0].held_bytes
        self.look_at_memory()
        self.limit_bytes = self.held_bytes + self._room_bytes

    def look_at_memory(self) -> bool:
        """Whether it holds more than it may."""
        self.held_bytes = sum(rank.look_at_memory() for rank in self.ranks)
        return self.held_bytes > self.limit_bytes

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
        return self.held_bytes > self.limit_bytes - 0.2 * self._room_bytes or self.ranks[0].has_lost_siblings()

    @property
    def gone(self) -> int:
        """The rank that ended first, by itself or from outside; else the first one."""
        return self._gone or 0

    @property
    def has_ended(self) -> bool:
        """Whether any of them is gone."""
        return self._first_gone() is not None

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
        for each in self.links:
            each.close()
        if self.links:
            self.arena.close()
            os.close(self.store)

    def _first_gone(self, *, is_ending: bool = False) -> int | None:
        """The rank that was seen to end first; one on its way out may count only if nothing is asked any more."""
        if self._gone is None:
            ended = (k for k, rank in enumerate(self.ranks) if rank.has_ended or (is_ending and rank.has_closed()))
            self._gone = next(ended, None)
        return self._gone
