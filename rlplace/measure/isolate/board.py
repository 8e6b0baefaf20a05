"""`Board`: a page of shared memory on which a worker says what it is doing, so that it can be asked while it hangs.

Writing to it is a few stores: nobody is woken, so the step that is being timed is not disturbed.
"""

from __future__ import annotations

import mmap
import os
import time

from rlplace.measure.isolate.packing import shared_file

IDLE = -2
"""The contender of a worker that has run none since it was asked."""
_NUM_BYTES = mmap.PAGESIZE
_CONTENDER, _IS_AT_WORK, _IS_MADE, _BEGIN_NS, _FIRST_NS, _BEST_NS, _END_NS = range(7)


class Board:
    """What a worker is doing; the worker writes (it is a `Watch`), the process that waits for it reads.

    Times are of `time.monotonic`, which processes of one machine share.

    Args:
        file: descriptor of the page; a new page by default.

    Attributes:
        file: descriptor to inherit.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = shared_file(_NUM_BYTES) if file is None else file
        self._page = mmap.mmap(self.file, _NUM_BYTES)
        self._words = memoryview(self._page).cast("q")
        self._have_run: set[int] = set()
        if file is None:
            self.reset()

    def reset(self) -> None:
        """Forgets the contenders of the last race, not how long steps took."""
        self._have_run.clear()
        self._words[_CONTENDER], self._words[_IS_AT_WORK] = IDLE, False

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        words = self._words
        words[_IS_MADE], words[_CONTENDER] = is_made, contender
        words[_BEGIN_NS] = time.monotonic_ns()
        words[_IS_AT_WORK] = True

    def end(self) -> None:
        words = self._words
        words[_END_NS] = time.monotonic_ns()
        took_ns = words[_END_NS] - words[_BEGIN_NS]
        contender = words[_CONTENDER]
        if words[_IS_MADE] and contender in self._have_run:
            words[_BEST_NS] = min(words[_BEST_NS] or took_ns, took_ns)
        elif words[_IS_MADE]:
            self._have_run.add(contender)
            words[_FIRST_NS] = max(words[_FIRST_NS], took_ns)
        words[_IS_AT_WORK] = False

    @property
    def contender(self) -> int:
        """The contender that is at work, or was last; `IDLE` where none was since the worker was asked."""
        return int(self._words[_CONTENDER])

    @property
    def is_at_work(self) -> bool:
        """Whether its step has begun and not ended."""
        return bool(self._words[_IS_AT_WORK])

    @property
    def is_made(self) -> bool:
        """False while it is being made for the race."""
        return bool(self._words[_IS_MADE])

    @property
    def begin_s(self) -> float:
        """When its step began."""
        return float(self._words[_BEGIN_NS]) / 1e9

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return float(self._words[_END_NS]) / 1e9

    @property
    def first_s(self) -> float:
        """The longest first step of any contender so far: it loads the plan; 0 before one has ended."""
        return float(self._words[_FIRST_NS]) / 1e9

    @property
    def best_s(self) -> float:
        """The shortest later step so far; 0 before one has ended."""
        return float(self._words[_BEST_NS]) / 1e9

    def carry(self, other: Board) -> None:
        """Takes over how long steps took on `other`, the board of a worker that this one's replaces."""
        for word in (_FIRST_NS, _BEST_NS):
            self._words[word] = other._words[word]

    def close(self) -> None:
        """Gives the page back."""
        self._words.release()
        self._page.close()
        os.close(self.file)
