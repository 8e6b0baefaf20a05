"""What memory there is left, from the files in which the system says so.

What a worker's room does before a step, worked by hand for a process that is told what it holds.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from core_hosts import core_host

from rlplace.measure.isolate import memory_watch
from rlplace.measure.isolate.memory_watch import Room

GIB = 1 << 30
KIB = 1024


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 100 GiB with 40 to spare; its files can be changed."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {100 * GIB // KIB} kB\nMemAvailable: {40 * GIB // KIB} kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/jobs/mine\n")
    monkeypatch.setattr(memory_watch, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory_watch, "_CGROUPS", tmp_path / "groups")
    return tmp_path


def test_the_least_of_machine_host_and_wish_counts(system: Path) -> None:
    host = core_host(2)  # one pool of 16 GiB
    assert memory_watch.room_bytes(host) == 16 * GIB
    assert memory_watch.room_bytes(host, asked=GIB) == GIB
    (system / "proc" / "meminfo").write_text(f"MemTotal: {100 * GIB // KIB} kB\nMemAvailable: {9 * GIB // KIB} kB\n")
    assert memory_watch.room_bytes(host) == 4 * GIB, "without the reserve of 5 %"
    (system / "proc" / "meminfo").write_text(f"MemTotal: {100 * GIB // KIB} kB\nMemAvailable: {4 * GIB // KIB} kB\n")
    assert memory_watch.room_bytes(host) == 0.0


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/jobs/mine", "jobs/mine", ("memory.max", "memory.current")),
        ("0::/", ".", ("memory.max", "memory.current")),
        ("9:memory:/mine", "memory/mine", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        ("9:memory:/elsewhere", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
        ("0::/slurm/job_7/step_0", "slurm/job_7", ("memory.max", "memory.current")),
        ("9:memory:/slurm/job_7/step_0", "memory/slurm/job_7", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_control_group_limits_too(system: Path, line: str, folder: str, names: tuple[str, str]) -> None:
    (system / "proc" / "self" / "cgroup").write_text(f"3:cpu:/other\n{line}\n")
    group = system / "groups" / folder
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{10 * GIB}\n")
    (group / names[1]).write_text(f"{4 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    assert memory_watch.room_bytes(core_host(1)) == pytest.approx((10 - 4 + 1 - 0.5) * GIB)
    (group / names[0]).write_text("max\n")
    assert memory_watch.room_bytes(core_host(1)) == 16 * GIB


def test_kills_are_counted(system: Path) -> None:
    assert memory_watch.num_killed() == 0
    (system / "groups" / "jobs" / "mine").mkdir(parents=True)
    (system / "groups" / "jobs" / "mine" / "memory.events").write_text("low 0\nmax 9\noom 4\noom_kill 3\n")
    assert memory_watch.num_killed() == 3


def test_a_system_that_says_nothing_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_watch, "_PROC", tmp_path)
    monkeypatch.setattr(memory_watch, "_CGROUPS", tmp_path)
    assert memory_watch._available_bytes() == math.inf
    assert memory_watch.resident_bytes(os.getpid()) == 0
    memory_watch.volunteer_to_die()
    memory_watch.limit_data(GIB)
    memory_watch.limit_data(math.inf)


def test_this_process_holds_something() -> None:
    assert memory_watch.resident_bytes(os.getpid()) > 1 << 20


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
