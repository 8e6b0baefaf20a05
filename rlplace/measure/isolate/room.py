"""`Room`: keeps what placements hold in a worker within its limit, whatever the allocator keeps for itself."""

from __future__ import annotations

import math
import os

from rlplace.measure.isolate import memory_watch
from rlplace.measure.run.race import Watch


class Room:
    """A watch that, before each step, gives back what was freed and has allocations beyond the limit fail.

    Freed memory is kept for the next step (`keep_freed_memory`), and glibc finds no use for many of the holes: a step
    that holds 192 MB at most was seen to leave a heap of about 800 MB behind. So the limit is not of what the
    process ever took: once half of it is held when a step begins, what is free goes back to the system first, and the
    step may take what the limit leaves beside what is still held.

    Args:
        watch: told of every step, after that.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._most = math.inf
        self._held_before = 0

    def limit(self, num_bytes: float) -> None:
        """From now on placements may take so many bytes beside what the process holds now; without this, any."""
        self._held_before = memory_watch.resident_bytes(os.getpid())
        self._most = self._held_before + num_bytes
        memory_watch.limit_data(num_bytes)

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        if not math.isinf(self._most):
            self._renew()
        self._watch.begin(contender, is_made=is_made)

    def end(self) -> None:
        self._watch.end()

    def _renew(self) -> None:
        held = memory_watch.resident_bytes(os.getpid())
        if held > (self._held_before + self._most) / 2:
            memory_watch.give_back_freed()
            held = memory_watch.resident_bytes(os.getpid())
        memory_watch.limit_data(max(self._most - held, 0.0))
