"""Locks and threads that carry clocks, and tell at once when all threads wait for each other.

The code under test uses a `threading.Lock` in two ways. As a signal, one side calls `release` and the other `acquire`,
in this order whatever the timing: what the one knows, the other learns. As a mutex (`with lock`) the order is chance
and proves nothing: no clock goes over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fake_gpus.machine import Machine
    from fake_gpus.vector_clocks import Clock


class FakeThreading:
    """What stands in for the module `threading` in the modules under test."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: set[FakeLock] = set()  # of those who wait with a time limit
        self._num_threads, self._num_waiting = 0, 0
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        """Stands in for `time.monotonic`: a wait that is given up has taken as long as it was to take."""
        return time.monotonic() + self.skipped_s

    perf_counter = staticmethod(time.perf_counter)
    get_ident = staticmethod(threading.get_ident)

    def Lock(self) -> FakeLock:
        return FakeLock(self._machine, self)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> threading.Thread:
        machine = self._machine

        def run() -> None:
            try:
                with machine.attached(name):
                    target()
            finally:
                with machine.mutex:
                    self._num_threads -= 1
                    self.look()

        with machine.mutex:
            self._num_threads += 1
        return threading.Thread(target=run, name=name, daemon=daemon)

    def begin(self, lock: FakeLock, *, is_timed: bool) -> None:
        """A thread begins to wait for `lock`."""
        self._num_waiting += 1
        if is_timed:
            self._waiting.add(lock)
        self.look()

    def end(self, lock: FakeLock) -> None:
        self._num_waiting -= 1
        self._waiting.discard(lock)

    def look(self) -> None:
        """Ends the waits that have a time limit if nobody is left to end any."""
        if self._waiting and self._num_waiting > self._num_threads:
            self._machine.order.blame("deadlock", "all threads wait for each other")
            for lock in self._waiting:
                lock.give_up()


class FakeLock:
    """A `threading.Lock` that is handed over directly to who waits for it."""

    def __init__(self, machine: Machine, threads: FakeThreading) -> None:
        self._machine, self._threads = machine, threads
        self._condition = threading.Condition(machine.mutex)
        self._is_locked = self._is_handed_over = self._is_given_up = False
        self._num_waiting = 0
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        with self._machine.mutex:
            taken = self._take(timeout)
            if taken:
                self._machine.host.tick()
                self._machine.host.learn(self._clock)
            return taken

    def release(self) -> None:
        with self._machine.mutex:
            if not self._is_locked or self._is_handed_over:
                raise RuntimeError("release unlocked lock")
            self._clock = dict(self._machine.host.clock)
            self._machine.host.tick()
            self._give()

    def __enter__(self) -> None:
        with self._machine.mutex:
            self._take(-1)

    def __exit__(self, *_: Any) -> None:
        with self._machine.mutex:
            self._give()

    def give_up(self) -> None:
        self._is_given_up = True
        self._condition.notify_all()

    def _take(self, timeout: float) -> bool:
        if not self._is_locked:
            self._is_locked = True
            return True
        self._num_waiting += 1
        self._threads.begin(self, is_timed=timeout >= 0)
        self._condition.wait_for(lambda: self._is_handed_over or self._is_given_up, timeout if timeout >= 0 else None)
        if self._is_given_up and not self._is_handed_over:
            self._threads.skipped_s += timeout
        is_taken, self._is_handed_over, self._is_given_up = self._is_handed_over, False, False
        if not is_taken:
            self._num_waiting -= 1
            self._threads.end(self)
        return is_taken

    def _give(self) -> None:
        if self._num_waiting:
            self._num_waiting -= 1
            self._threads.end(self)
            self._is_handed_over = True
            self._condition.notify_all()
        else:
            self._is_locked = False
