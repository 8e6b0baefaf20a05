"""What control groups leave of a machine, in files that are made up, and hosts that keep to it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from fake_machine import GIB, Machine

from rlplace.measure.hosts import control_groups, detect
from rlplace.measure.hosts.control_groups import allowed_cores, cpu_quota, memory_limit_bytes, ram_bytes
from rlplace.measure.hosts.detect import detect_host


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


GROUPS_V1 = "5:cpu,cpuacct:/pod/box\n4:memory:/pod/box\n1:name=systemd:/"


@pytest.mark.parametrize(
    ("files", "cores", "limit_bytes"),
    [
        ({}, None, None),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu.max": "150000 100000", "memory.max": str(4 * GIB)}, 1.5, 4 * GIB),
        ({"pod/box/cpu.max": "300000 100000", "pod/cpu.max": "200000 100000"}, 2.0, None),
        ({"pod/box/memory.max": "max", "pod/memory.max": str(8 * GIB)}, None, 8 * GIB),
        ({"other/cpu.max": "100000 100000"}, None, None),
    ],
)
def test_limits_of_control_groups_the_tightest_counts(
    machine: Machine, files: dict[str, str], cores: float | None, limit_bytes: int | None
) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box")
    for path, text in files.items():
        machine.write(f"sys/fs/cgroup/{path}", text)
    assert cpu_quota(machine.folder) == cores
    assert memory_limit_bytes(machine.folder) == limit_bytes


def test_limits_of_control_groups_of_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", GROUPS_V1)
    for folder, quota, limit in (("pod/box", "50000", str(2 * GIB)), ("pod", "-1", "9223372036854771712")):
        machine.write(f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_quota_us", quota)
        machine.write(f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_period_us", "100000")
        machine.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
    assert cpu_quota(machine.folder) == 0.5
    assert memory_limit_bytes(machine.folder) == 2 * GIB


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", (2, 3, 5, 7)), ("150000 100000", (2,)), ("50000 100000", (2,)), ("300000 100000", (2, 3, 5))],
)
def test_a_quota_leaves_whole_cores_at_least_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, cores: tuple[int, ...]
) -> None:
    monkeypatch.setattr(control_groups, "usable_cores", lambda: (2, 3, 5, 7))
    machine.write("sys/fs/cgroup/cpu.max", quota)
    assert allowed_cores(machine.folder) == cores


def test_a_limit_of_memory_counts_where_it_is_less_than_the_machine_has(machine: Machine) -> None:
    whole = ram_bytes(machine.folder)
    machine.write("sys/fs/cgroup/memory.max", str(4 * whole))
    assert ram_bytes(machine.folder) == whole
    machine.write("sys/fs/cgroup/memory.max", str(1 << 28))
    assert ram_bytes(machine.folder) == 1 << 28


def test_a_host_that_is_detected_keeps_to_both(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "usable_cores", lambda: (2, 3, 5, 7))
    for name in ("allowed_cores", "ram_bytes"):
        monkeypatch.setattr(detect, name, functools.partial(getattr(control_groups, name), machine.folder))
    machine.write("sys/fs/cgroup/cpu.max", "290000 100000")
    machine.write("sys/fs/cgroup/memory.max", "1000000000")
    host = detect_host("cores", gangs=True)
    assert [device.cores for device in host.devices] == [(2,), (3,), (2, 3)]
    assert {device.memory_bytes for device in host.devices} == {950_000_000}
