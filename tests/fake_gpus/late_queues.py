"""Queues of streams that run as late as events and waiting hosts allow, or in some other order that streams permit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Literal

from fake_gpus.vector_clocks import EventActor, StreamActor

Policy = Literal["now", "lazy", "compute", "copies", "random"]
"""What runs before it must: all at its launch; nothing; what streams to compute on have; those for copies; any."""
Work = Callable[[], object]
POLICIES: tuple[Policy, ...] = ("lazy", "compute", "copies", "random")


class FakeStream:
    """A stream of a GPU and what was launched on it but has not run."""

    def __init__(self, actor: StreamActor, gpu: int, *, is_urgent: bool) -> None:
        self.actor, self.gpu, self.is_urgent = actor, gpu, is_urgent
        self.queue: deque[Work | Position] = deque()
        self.num_launched = self.num_done = 0

    def __repr__(self) -> str:
        return self.actor.name


class Position:
    """The end of what was launched on a stream so far."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream, self.count = stream, stream.num_launched

    @property
    def is_done(self) -> bool:
        return self.stream.num_done >= self.count


class FakeEvent:
    """An event: what it proves, and where in its stream's queue it stands."""

    def __init__(self, name: str, *, is_timed: bool) -> None:
        self.actor = EventActor(name, is_timed)
        self.position: Position | None = None


class Queues:
    """All streams' queues.

    Args:
        policy: what runs before it must.
        seed: of the random one.

    Attributes:
        failures: what ops raised that were launched long before.
    """

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.policy = policy
        self.failures: list[Exception] = []
        self._busy: dict[FakeStream, None] = {}
        self._random = random.Random(seed)

    @property
    def is_late(self) -> bool:
        return self.policy != "now"

    def launch(self, stream: FakeStream, work: Work) -> None:
        if not self.is_late:
            work()
            return
        self._push(stream, work)

    def wait(self, stream: FakeStream, position: Position | None) -> None:
        """What is launched on `stream` from now on runs after `position`."""
        if self.is_late and position is not None and not position.is_done:
            self._push(stream, position)

    def complete(self, position: Position) -> None:
        """Runs what `position` needs."""
        stream = position.stream
        while not position.is_done:
            head = stream.queue[0]
            if isinstance(head, Position) and not head.is_done:
                self.complete(head)
            else:
                self._run_head(stream)

    def complete_all(self) -> None:
        while self._busy:
            self.complete(Position(next(iter(self._busy))))

    def _push(self, stream: FakeStream, entry: Work | Position) -> None:
        stream.queue.append(entry)
        stream.num_launched += 1
        self._busy[stream] = None
        self._advance()

    def _advance(self) -> None:
        if self.policy == "random":
            for _ in range(self._random.choice((0, 0, 0, 1, 8))):
                ready = [stream for stream in self._busy if self._is_ready(stream)]
                if not ready:
                    return
                self._run_head(self._random.choice(ready))
        elif self.policy != "lazy":
            is_urgent = self.policy == "copies"
            for stream in [each for each in self._busy if each.is_urgent == is_urgent]:
                while stream.queue and self._is_ready(stream):
                    self._run_head(stream)

    @staticmethod
    def _is_ready(stream: FakeStream) -> bool:
        head = stream.queue[0]
        return not isinstance(head, Position) or head.is_done

    def _run_head(self, stream: FakeStream) -> None:
        entry = stream.queue.popleft()
        if not isinstance(entry, Position):
            try:
                entry()
            except Exception as error:  # an index without a value, say: whoever launched it is long gone
                self.failures.append(error)
        stream.num_done += 1
        if not stream.queue:
            self._busy.pop(stream, None)
