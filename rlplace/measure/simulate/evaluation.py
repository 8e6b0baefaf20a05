"""`Evaluation`: the simulator's kernels on batches of plans, on every thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.kernel_batch import evaluate
from rlplace.measure.simulate.kernel_events import EventScratch, new_event_scratch
from rlplace.measure.simulate.plan_batch import PlanBatch
from rlplace.measure.simulate.scratch import Scratch, new_scratch

Results = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Step times (B,) in seconds, infinite where memory does not suffice, and peaks (B, accounts) in bytes."""
Order = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Place of each op in order of priority, and the op at each place."""


class Evaluation:
    """Evaluates batches on one compiled problem; the same to the bit, whatever the threads.

    Args:
        compiled: the problem.
        is_throughput: seconds per step of a full pipeline instead of one step from start to end.
        threads: batches are cut for so many.
    """

    def __init__(self, compiled: Compiled, *, is_throughput: bool, threads: int) -> None:
        self._compiled, self._is_throughput, self._threads = compiled, is_throughput, threads
        self._idle: SimpleQueue[tuple[Scratch, EventScratch]] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    @contextmanager
    def scratch(self) -> Iterator[tuple[Scratch, EventScratch]]:
        """Working memory that no other thread uses."""
        try:
            pair = self._idle.get_nowait()
        except Empty:
            pair = new_scratch(self._compiled), new_event_scratch(self._compiled)
        try:
            yield pair
        finally:
            self._idle.put(pair)

    def everywhere(self, batch: PlanBatch, order: Order, cutoff_s: NDArray[np.float64] | None = None) -> Results:
        """The results of a batch, on every thread.

        Args:
            batch: B plans, or placements that are still to be planned.
            order: in which placements are planned.
            cutoff_s: (B,) step times above may come back as infinite.
        """
        count = len(batch.devices)
        if self._threads == 1 or count < 2:
            with self.scratch() as (s, v):
                return self.here(s, v, batch, order, cutoff_s)
        cutoffs, results = _cutoffs(cutoff_s, count), self._new_results(count)
        size = max(1, count // (4 * self._threads))

        def run(first: int) -> None:
            with self.scratch() as (s, v):
                self._run(s, v, batch, first, min(first + size, count), order, cutoffs, results)

        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="rlplace-simulator")
            self._pool_process = os.getpid()
        list(self._pool.map(run, range(0, count, size)))
        return results

    def here(
        self,
        s: Scratch,
        v: EventScratch,
        batch: PlanBatch,
        order: Order,
        cutoff_s: NDArray[np.float64] | None = None,
    ) -> Results:
        """As `everywhere`, on this thread, in its working memory, which then holds the last plan with its times."""
        count = len(batch.devices)
        results = self._new_results(count)
        self._run(s, v, batch, 0, count, order, _cutoffs(cutoff_s, count), results)
        return results

    def one_by_one(self, s: Scratch, v: EventScratch, batch: PlanBatch, order: Order) -> Iterator[Results]:
        """After each plan of a batch, while working memory holds it with its times, the results up to it."""
        count = len(batch.devices)
        cutoffs, results = _cutoffs(None, count), self._new_results(count)
        for b in range(count):
            self._run(s, v, batch, b, b + 1, order, cutoffs, results)
            yield results

    def _run(
        self,
        s: Scratch,
        v: EventScratch,
        batch: PlanBatch,
        first: int,
        last: int,
        order: Order,
        cutoffs: NDArray[np.float64],
        results: Results,
    ) -> None:
        evaluate(self._compiled, s, v, self._is_throughput, batch, first, last, *order, cutoffs, *results)

    def _new_results(self, count: int) -> Results:
        return np.empty(count), np.empty((count, self._compiled.num_accounts), dtype=np.int64)


def _cutoffs(cutoff_s: NDArray[np.float64] | None, count: int) -> NDArray[np.float64]:
    return np.full(count, np.inf) if cutoff_s is None else cutoff_s
