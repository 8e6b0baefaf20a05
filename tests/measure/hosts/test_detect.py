"""`Host.detect` on machines of every kind, most of them made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlplace import cuda
from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.measure.hosts import detect
from rlplace.measure.hosts.control_groups import allowed_cores, ram_bytes
from rlplace.measure.hosts.detect import detect_host
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


def test_a_gang_sees_the_memory_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    host = detect_host("cores", gangs=True)
    gang = host.device("cpu:0-1")
    assert (gang.members, gang.cores, gang.kind) == (("cpu:0", "cpu:1"), (0, 1), "cpu-gang-2")
    copies = {(route.source, route.destination) for route in host.routes if route.links}
    assert copies == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert len(host.routes) == 6


def test_one_core_makes_no_gang(monkeypatch: pytest.MonkeyPatch) -> None:
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
