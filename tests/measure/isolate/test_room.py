"""What a worker's room does before a step, worked by hand for a process that is told what it holds."""

from __future__ import annotations

import pytest

from rlplace.measure.isolate import memory_watch
from rlplace.measure.isolate.memory_watch import Room


class Process:
    """What the process holds, how much of that is free, and what it is told; also the watch that the room tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.free = 1000, 0
        self.said: list[object] = []
        monkeypatch.setattr(memory_watch, "resident_bytes", lambda _: self.held)
        monkeypatch.setattr(memory_watch, "limit_data", lambda num_bytes: self.said.append(num_bytes))
        monkeypatch.setattr(memory_watch, "give_back_freed", self._give_back)

    def _give_back(self) -> None:
        self.held, self.free = self.held - self.free, 0
        self.said.append("given back")

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        self.said.append((contender, is_made))

    def end(self) -> None:
        self.said.append("end")


@pytest.mark.parametrize(
    ("held", "free", "said"),
    [
        (1000, 0, [100.0]),
        (1050, 40, [50.0]),  # half of the room: what was freed is kept for the next step
        (1060, 50, ["given back", 90.0]),
        (1060, 0, ["given back", 40.0]),
        (1300, 100, ["given back", 0.0]),
        (900, 0, [200.0]),  # less than when it began
    ],
)
def test_a_step_may_take_what_is_left(
    monkeypatch: pytest.MonkeyPatch, held: int, free: int, said: list[object]
) -> None:
    process = Process(monkeypatch)
    room = Room(process)
    room.limit(100.0)
    assert process.said == [100.0]
    process.held, process.free, process.said = held, free, []
    room.begin(3, is_made=False)
    room.end()
    assert process.said == [*said, (3, False), "end"]


def test_without_a_limit_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room = Room(process)
    room.begin(0)
    assert process.said == [(0, True)]
