"""`Host.detect` on machines of every kind, most of them made up: cores, GPUs, control groups."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from core_hosts import core_host
from fake_machine import GIB, Machine

from rlplace import cuda
from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.measure.hosts import control_groups, detect
from rlplace.measure.hosts.control_groups import allowed_cores, cpu_quota, memory_limit_bytes, ram_bytes
from rlplace.measure.hosts.detect import detect_host, gpu_host, usable_bytes
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import resolve_host


def machine(monkeypatch: pytest.MonkeyPatch, *, cores: tuple[int, ...] = (0, 1), num_gpus: int = 0) -> None:
    monkeypatch.setattr(detect, "allowed_cores", lambda: cores)
    monkeypatch.setattr(cuda, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(cuda, "gpu", lambda index: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))


def names(host: Host) -> list[str]:
    return [device.name for device in host.devices]


def test_cores_of_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=(2, 5))
    host = Host.detect()
    assert names(host) == ["cpu:0", "cpu:1"]
    assert [device.cores for device in host.devices] == [(2,), (5,)]
    assert {(d.kind, d.backend, d.memory_pool, d.dispatcher) for d in host.devices} == {
        ("cpu-core", "cpu", "ram", "interpreter")
    }
    assert not host.is_simulated
    assert (host.dispatch_order, host.run_ahead) == ("request", 1)
    assert {(r.source, r.destination, r.links, r.blocks_source, r.blocks_destination) for r in host.routes} == {
        ("cpu:0", "cpu:1", ("cpu:0->cpu:1",), False, True),
        ("cpu:1", "cpu:0", ("cpu:1->cpu:0",), False, True),
    }


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_at_most_four_cores_by_default(cores: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=tuple(range(cores)))
    assert detect_host().num_devices == expected


def test_devices_of_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=tuple(range(8)))
    host = detect_host("cores", 2, 3)
    assert [device.cores for device in host.devices] == [(0, 1, 2), (3, 4, 5)]
    assert {device.kind for device in host.devices} == {"cpu-3cores"}
    assert host.name == "cores:2x3"
    assert detect_host("cores", None, 3).num_devices == 2


@pytest.mark.parametrize(("devices", "cores"), [(3, 1), (1, 3), (2, 2), (0, 1), (1, -1)])
def test_more_cores_than_there_are_is_refused(devices: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    with pytest.raises(InvalidValue, match="at most 2 cores"):
        detect_host("cores", devices, cores)


@pytest.mark.parametrize("word", ["cores:9", "procs:9", "procs:9x2"])
def test_too_many_cores_are_told_in_the_words_that_asked_for_them(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    with pytest.raises(InvalidValue, match=f"host is '{word}', expected at most 2 cores"):
        resolve_host(word)


def test_a_gang_sees_the_memory_of_its_members_and_one_core_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    host = detect_host("cores", gangs=True)
    gang = host.device("cpu:0-1")
    assert (gang.members, gang.cores, gang.kind) == (("cpu:0", "cpu:1"), (0, 1), "cpu-gang-2")
    copies = {(route.source, route.destination) for route in host.routes if route.links}
    assert copies == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert len(host.routes) == 6
    machine(monkeypatch, cores=(0,))
    assert names(detect_host("cores", gangs=True)) == ["cpu:0"]


@pytest.mark.parametrize("word", ["cores:2", "cores:2x3"])
def test_cores_as_processes_are_the_same_devices_and_share_no_launcher(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cores=tuple(range(8)))
    threads, processes = resolve_host(word), resolve_host(word.replace("cores", "procs"))
    assert (threads.processes, processes.processes) == (False, True)
    assert processes.name == threads.name.replace("cores", "procs")
    assert [device.dispatcher for device in processes.devices] == ["cpu:0", "cpu:1"]
    shared = tuple(replace(device, dispatcher="interpreter") for device in processes.devices)
    assert shared == threads.devices
    assert processes.links == threads.links
    # the source copies into memory that both share; between threads the destination copies
    assert [(route.blocks_source, route.blocks_destination) for route in processes.routes] == [(True, False)] * 2
    assert processes.fingerprint != threads.fingerprint


def test_gangs_need_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    with pytest.raises(
        InvalidValue, match=r"devices is \['cpu:0-1'\], expected no gangs.*leave out `--gangs`, or use `cores`"
    ):
        detect_host("procs", gangs=True)


def test_gpus_as_processes_are_whole_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, num_gpus=2)
    host = detect_host("cuda-procs")
    assert (names(host), host.name, host.processes) == (["cuda:0", "cuda:1"], "cuda-procs", True)
    assert host.routes == detect_host("cuda").routes, "a copy keeps neither GPU from computing"
    for refused in ({"num_parts": 2}, {"with_cpu": True}):
        with pytest.raises(InvalidValue, match="one whole GPU a process"):
            detect_host("cuda-procs", **refused)
    machine(monkeypatch)
    with pytest.raises(InvalidValue, match=r"host is 'cuda-procs.*PyTorch sees no GPU here"):
        detect_host("cuda-procs")


def test_gpus_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, num_gpus=2)
    assert names(Host.detect()) == names(Host.detect("cuda")) == ["cuda:0", "cuda:1"]
    assert names(detect_host("cores")) == ["cpu:0", "cpu:1"], "asked for by name, cores it is"


@pytest.mark.parametrize("with_cpu", [False, True])
def test_without_gpus_there_are_cores_unless_gpus_were_asked_for(
    with_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    assert Host.detect(with_cpu=with_cpu) == Host.detect("cores")
    with pytest.raises(InvalidValue, match=r"host is 'cuda/3.*PyTorch sees no GPU here .*Use `cores`"):
        detect_host("cuda", num_parts=3, with_cpu=with_cpu)


@pytest.mark.parametrize("command", ["train", "measure", "simulate", "compare", "fidelity"])
def test_commands_say_in_one_line_that_there_is_no_gpu(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main([command, "nmt", "--host", "cuda/2+cpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert "host is 'cuda/2+cpu'" in said
    assert "Use `cores`" in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_this_machine() -> None:
    host = detect_host("cores")
    assert [device.cores for device in host.devices] == [(core,) for core in allowed_cores()[: host.num_devices]]
    assert 0 <= host.devices[0].memory_bytes - 0.95 * ram_bytes() < 1  # a step may fill all but a twentieth
    assert host.fingerprint == detect_host("cores").fingerprint != detect_host("cores", 1).fingerprint or (
        host.num_devices == 1
    )


def made_up(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_parts: int = 1, *, with_cpu: bool = False, num_cores: int = 16
) -> Host:
    monkeypatch.setattr(cuda, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, (7 << 30) - 1))
    cores = tuple(range(100, 100 + num_cores))
    return gpu_host("lab", num_parts=num_parts, with_cpu=with_cpu, cores=cores, ram_bytes=64 << 30)


def links(host: Host) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(route.source, route.destination): route.links for route in host.routes}


def test_whole_gpus_of_which_one_has_nowhere_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_up(monkeypatch, 2)
    assert [device.name for device in host.devices] == ["cuda:0", "cuda:1"]
    assert {(d.kind, d.backend, d.memory_bytes, d.memory_pool, d.context_bytes, d.cores) for d in host.devices} == {
        ("Some GPU", "cuda", usable_bytes(8 << 30), "", (1 << 30) + 1, ())
    }
    assert links(host) == {
        ("cuda:0", "cuda:1"): ("cuda:0 up", "cuda:1 down", "cuda:0->cuda:1"),
        ("cuda:1", "cuda:0"): ("cuda:1 up", "cuda:0 down", "cuda:1->cuda:0"),
    }
    assert host.corun_slowdown == ()
    assert (host.dispatch_order, host.run_ahead) == ("request", 1024)
    host = made_up(monkeypatch, 1)
    assert (host.routes, host.links) == ((), ())


def test_parts_share_memory_and_processors_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host = made_up(monkeypatch, 2, 2)
    names = ["cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"]
    assert [device.name for device in host.devices] == names
    assert [cuda.parse_name(name) for name in names] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(d.kind, d.memory_bytes, d.context_bytes) for d in host.devices} == {
        ("Some GPU 1/2", usable_bytes(8 << 30) // 2, (1 << 29) + 1)  # no byte of the context is forgotten
    }
    assert host.corun_slowdown == ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))
    ways = links(host)
    assert ways["cuda:0/0", "cuda:0/1"] == ("cuda:0/0->cuda:0/1",)
    assert ways["cuda:0/1", "cuda:1/0"] == ("cuda:0 up", "cuda:1 down", "cuda:0/1->cuda:1/0")
    inner, outer = (next(link for link in host.links if link.name == ways[pair][-1]) for pair in list(ways)[:2])
    assert inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s


@pytest.mark.parametrize("num_parts", [0, -1, 17])
def test_no_more_parts_than_there_are_streams_for(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match=rf"parts of a GPU is {num_parts}, expected 1 to 16"):
        made_up(monkeypatch, 1, num_parts)


@pytest.mark.parametrize(
    ("num_gpus", "num_parts", "num_cores", "num_launching"),
    [(1, 1, 8, 1), (2, 1, 8, 2), (2, 2, 16, 4), (8, 1, 8, 4), (1, 4, 3, 1), (1, 1, 2, 1), (1, 1, 1, 0)],
)
def test_the_cpu_leaves_cores_to_the_threads_that_launch(
    num_gpus: int, num_parts: int, num_cores: int, num_launching: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = made_up(monkeypatch, num_gpus, num_parts, with_cpu=True, num_cores=num_cores)
    *gpus, cpu = host.devices
    cores = tuple(range(100, 100 + num_cores))
    assert {device.cores for device in gpus} == {cores[:num_launching]}
    assert (cpu.name, cpu.cores, cpu.kind) == ("cpu", cores[num_launching:], f"cpu-{num_cores - num_launching}cores")
    assert (cpu.memory_bytes, cpu.memory_pool) == (usable_bytes(64 << 30), "ram")
    assert links(host)["cpu", gpus[0].name] == ("cpu up", "cuda:0 down", f"cpu->{gpus[0].name}")


def test_hosts_of_different_words_have_different_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [
        made_up(monkeypatch, 2, num_parts, with_cpu=with_cpu)
        for num_parts, with_cpu in itertools.product((1, 2, 4), (False, True))
    ]
    assert len({host.fingerprint for host in [*hosts, core_host(2), core_host(4)]}) == len(hosts) + 2


@pytest.fixture
def box(tmp_path: Path) -> Machine:
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
    box: Machine, files: dict[str, str], cores: float | None, limit_bytes: int | None
) -> None:
    box.write("proc/self/cgroup", "0::/pod/box")
    for path, text in files.items():
        box.write(f"sys/fs/cgroup/{path}", text)
    assert cpu_quota(box.folder) == cores
    assert memory_limit_bytes(box.folder) == limit_bytes


def test_limits_of_control_groups_of_version_1(box: Machine) -> None:
    box.write("proc/self/cgroup", GROUPS_V1)
    for folder, quota, limit in (("pod/box", "50000", str(2 * GIB)), ("pod", "-1", "9223372036854771712")):
        box.write(f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_quota_us", quota)
        box.write(f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_period_us", "100000")
        box.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
    assert cpu_quota(box.folder) == 0.5
    assert memory_limit_bytes(box.folder) == 2 * GIB


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", (2, 3, 5, 7)), ("150000 100000", (2,)), ("50000 100000", (2,)), ("300000 100000", (2, 3, 5))],
)
def test_a_quota_leaves_whole_cores_at_least_one(
    box: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, cores: tuple[int, ...]
) -> None:
    monkeypatch.setattr(control_groups, "usable_cores", lambda: (2, 3, 5, 7))
    box.write("sys/fs/cgroup/cpu.max", quota)
    assert allowed_cores(box.folder) == cores


def test_a_limit_of_memory_counts_where_it_is_less_than_the_machine_has(box: Machine) -> None:
    whole = ram_bytes(box.folder)
    box.write("sys/fs/cgroup/memory.max", str(4 * whole))
    assert ram_bytes(box.folder) == whole
    box.write("sys/fs/cgroup/memory.max", str(1 << 28))
    assert ram_bytes(box.folder) == 1 << 28


def test_a_host_that_is_detected_keeps_to_both(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "usable_cores", lambda: (2, 3, 5, 7))
    for name in ("allowed_cores", "ram_bytes"):
        monkeypatch.setattr(detect, name, functools.partial(getattr(control_groups, name), box.folder))
    box.write("sys/fs/cgroup/cpu.max", "290000 100000")
    box.write("sys/fs/cgroup/memory.max", "1000000000")
    host = detect_host("cores", gangs=True)
    assert [device.cores for device in host.devices] == [(2,), (3,), (2, 3)]
    assert {device.memory_bytes for device in host.devices} == {950_000_000}
