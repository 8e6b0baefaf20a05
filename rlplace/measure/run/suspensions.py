"""`Suspensions`: whether this process was stopped for a while (Ctrl-Z, `docker pause`, a batch system)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOKS_EVERY_S = 0.1
"""How often whoever waits looks."""
GAP_S = 0.5
"""Looks that are further apart are a gap."""


class Suspensions:
    """Finds suspensions of this process, which no signal announces: clocks go on, and looks are far apart.

    A gap in which this process used its CPUs was none: a thread held the interpreter's lock.

    Attributes:
        seconds: of all that were found.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._looked_s, self._cpu_s = time.monotonic(), time.process_time()

    def look(self) -> float:
        """Seconds of the suspension since the last look; 0 where there was none."""
        with self._lock:
            now_s, cpu_s = time.monotonic(), time.process_time()
            gap_s, used_s = now_s - self._looked_s, cpu_s - self._cpu_s
            self._looked_s, self._cpu_s = now_s, cpu_s
            if gap_s <= GAP_S or used_s > gap_s / 2:
                return 0.0
            self.seconds += gap_s
            return gap_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, a thread looks, so that the caller may do anything else."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOKS_EVERY_S):
                self.look()

        self.look()
        thread = threading.Thread(target=watch, name="rlplace suspensions", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
