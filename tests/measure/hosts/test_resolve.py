"""HOST words: presets, files, this machine, and names that nothing answers to.

Hosts that this machine lacks a device of are refused in one message, before anything is captured or run.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from core_hosts import core_device, core_host
from micrographs import fork_join
from random_problems import problem_of

from rlplace import cuda
from rlplace.cli.main import main
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.measure import Device, Host, HostRunner, Link, Problem, Route, Simulator
from rlplace.measure.hosts import resolve
from rlplace.measure.hosts.host_file import Wiring, lay_routes, save_host
from rlplace.measure.hosts.resolve import HOST_WORDS, check_present, describe_hosts, list_presets, resolve_host
from rlplace.measure.timing.threads import usable_cores

HERE = Host("here", (Device("cpu:0", "cpu-core", "cpu", 1 << 30, cores=(0,)),))


@pytest.fixture
def detected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The calls of `detect_host`, which finds the host `HERE`."""
    calls = []

    def detect_host(
        kind: str,
        num_devices: int | None = None,
        cores_per_device: int | None = None,
        gangs: bool = False,
        num_parts: int | None = None,
        with_cpu: bool | None = None,
    ) -> Host:
        is_cpu = kind in ("cores", "procs", "nodes")
        assert (num_parts is None) == is_cpu
        calls.append((kind, *((num_devices, cores_per_device) if is_cpu else (num_parts, with_cpu)), gangs))
        return HERE

    module = ModuleType("rlplace.measure.hosts.detect")
    module.detect_host = detect_host  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlplace.measure.hosts.detect", module)
    return calls


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("auto", ("auto", 1, False)),
        ("auto+cpu", ("auto", 1, True)),
        ("cuda", ("cuda", 1, False)),
        ("cuda+cpu", ("cuda", 1, True)),
        ("cuda/1", ("cuda", 1, False)),
        ("cuda/4", ("cuda", 4, False)),
        ("cuda/12+cpu", ("cuda", 12, True)),
        ("cores", ("cores", None, None)),
        ("cores:3", ("cores", 3, None)),
        ("cores:2x4", ("cores", 2, 4)),
        ("procs", ("procs", None, None)),
        ("procs:3", ("procs", 3, None)),
        ("procs:2x4", ("procs", 2, 4)),
        ("cuda-procs", ("cuda-procs", 1, False)),
        ("cuda-procs+cpu", ("cuda-procs", 1, True)),
    ],
)
def test_words_for_this_machine(detected: list[object], word: str, call: tuple[object, ...]) -> None:
    assert resolve_host(word) is HERE
    assert resolve_host(word, gangs=True) is HERE
    assert detected == [(*call, False), (*call, True)]


@pytest.mark.parametrize("kind", ["cores", "procs"])
@pytest.mark.parametrize("end", [":", ":0", ":x", ":2x", ":2x0", ":-1", ":2x4x8", "/2", "+cpu"])
def test_malformed_cores(detected: list[object], kind: str, end: str) -> None:
    with pytest.raises(InvalidValue, match=f"host is '{re.escape(kind + end)}', expected {kind}, {kind}:DEVICES"):
        resolve_host(kind + end)
    assert detected == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("cores-procs", ""),
        ("cores-procs:2", ":2"),
        ("cores:2-procs", ":2"),
        ("cores:2x4-procs", ":2x4"),
        ("auto-procs", ""),
    ],
)
def test_threads_that_were_meant_as_processes(detected: list[object], word: str, meant: str) -> None:
    with pytest.raises(InvalidValue, match=f"host is '{word}', expected `procs{meant}`"):
        resolve_host(word)
    assert detected == []


@pytest.mark.parametrize(
    "word",
    [
        "cuda-procs/2",
        "cuda/2-procs",
        "cuda+cpu-procs",
        "auto/2-procs",
        "cuda:0",
        "cuda/",
        "cuda/0",
        "cuda/x",
        "cuda/-1",
        "cuda+gpu",
        "cuda/2+",
        "auto/2",
        "auto+gpus",
        "cuda:0/1",
    ],
)
def test_malformed_gpus(detected: list[object], word: str) -> None:
    with pytest.raises(
        InvalidValue,
        match=r"expected auto, cuda or cuda/PARTS \(PARTS from 1\), each with \+cpu .* CUDA_VISIBLE_DEVICES",
    ):
        resolve_host(word)
    assert detected == []


def test_every_word_for_this_machine_is_one(detected: list[object]) -> None:
    assert [resolve_host(word) for word in HOST_WORDS] == [HERE] * len(HOST_WORDS)


def test_presets_and_files_also_in_a_folder_called_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_host("4xV100-pcie").num_devices == 4
    save_host(HERE, tmp_path / "mine.yaml")
    assert resolve_host(str(tmp_path / "mine.yaml")) == HERE
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cuda").mkdir()
    save_host(HERE, tmp_path / "cuda" / "2.yaml")
    assert resolve_host("cuda/2.yaml") == HERE


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_as_processes_differs_in_its_launchers_alone(name: str) -> None:
    threads, processes = resolve_host(name), resolve_host(f"{name}-procs")
    assert processes.name == f"{name}-procs"
    assert [device.dispatcher for device in processes.devices] == [device.name for device in threads.devices]
    assert processes.fingerprint != threads.fingerprint
    back = dataclasses.replace(processes, name=name, processes=False, devices=threads.devices)
    assert back == threads


def test_a_step_runs_over_processes_of_cores_or_of_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    check_present(resolve_host("procs"))
    check_present(resolve_host("2x8xA100-ib-procs"))
    monkeypatch.setattr(cuda, "num_gpus", lambda: 1)
    gpu, core = Device("cuda:0", "a GPU", "cuda", 1 << 30), resolve_host("procs:1").devices[0]
    check_present(Host("gpu", (gpu,), processes=True))
    parts = [dataclasses.replace(gpu, name=f"cuda:0/{part}") for part in range(2)]
    for devices in ((gpu, core), parts):
        names = tuple(each.name for each in devices)
        links, routes = lay_routes([Wiring("pcie", 1e10, 1e-6, ports=names)], names, "test")
        with pytest.raises(InvalidValue, match="over processes of cores, or of whole GPUs"):
            check_present(Host("mixed", tuple(devices), links, routes, processes=True))


def test_processes_have_a_core_each_and_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    host = resolve_host("procs:1")
    core = host.devices[0]
    twins = tuple(dataclasses.replace(core, name=f"cpu:{k}", dispatcher="") for k in range(127))
    links, routes = lay_routes([Wiring("ram", 1e10, ports=("cpu:*",))], [each.name for each in twins], "test")
    stranger = Host("stranger", twins, links, routes, processes=True)
    with pytest.raises(InvalidValue, match=rf"cores is \[{core.cores[0]}\], expected no core of two processes"):
        check_present(stranger)
    unpinned = dataclasses.replace(stranger, devices=tuple(dataclasses.replace(each, cores=()) for each in twins))
    monkeypatch.setattr(resolve, "free_bytes", lambda: 126 * resolve.PROCESS_BYTES)
    with pytest.raises(InvalidValue, match=r"devices is 127 processes, which take .* free memory"):
        check_present(unpinned)
    monkeypatch.setattr(resolve, "free_bytes", lambda: 127 * resolve.PROCESS_BYTES)
    check_present(unpinned)
    check_present(dataclasses.replace(stranger, processes=False))  # threads cost little

    # the processes that torchrun started are there: those beside them are not
    started = dataclasses.replace(twins[0], name="a/cpu:0", machine="a")
    names = ["a/cpu:0", *(each.name for each in twins[1:])]
    links, routes = lay_routes([Wiring("ram", 1e10, ports=("*cpu:*",))], names, "test")
    beside = Host("beside", (started, *twins[1:]), links, routes, processes=True)
    monkeypatch.setattr(resolve, "check_machines", lambda *_, **__: None)
    with pytest.raises(InvalidValue, match="no core of two processes"):
        check_present(beside)


def test_sends_wait_between_processes_without_a_memory_in_common() -> None:
    words = ("procs:2", "cores:2", "4xV100-pcie-procs", "4xV100-pcie", "procs:1")
    assert [resolve_host(word).sends_wait for word in words] == [False, False, True, False, False]
    assert [resolve_host(word).is_wired for word in words] == [False, False, True, False, False]


def test_the_cpu_is_asked_for_as_cores() -> None:
    with pytest.raises(InvalidValue, match="host is 'cpu', expected `cores`"):
        resolve_host("cpu")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("4xV100pcie", "4xV100-pcie"),
        ("core", "cores"),
        ("8xV100-dgx", "8xV100-dgx1"),
        ("Auto", "auto"),
        ("cdua", "cuda"),
    ],
)
def test_unknown_hosts_get_the_nearest(word: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown host '{word}': did you mean '{nearest}'") as caught:
        resolve_host(word)
    assert {*HOST_WORDS, *list_presets()} <= set(caught.value.known)


@pytest.mark.parametrize("word", ["missing.yaml", "hosts/missing", "presets/4xV100-pcie.yml"])
def test_missing_files(word: str) -> None:
    with pytest.raises(FileProblem):
        resolve_host(word)


def test_describes_every_preset() -> None:
    rows = {row["name"]: row for row in describe_hosts()}
    assert tuple(rows) == list_presets()
    assert rows["cpu+4xA100"] == {
        "name": "cpu+4xA100",
        "num_devices": 5,
        "kinds": {"AMD EPYC 7742 64-Core Processor": 1, "NVIDIA A100-SXM4-40GB": 4},
        "memory_bytes": [512 << 30, *[40335 << 20] * 4],
        "num_links": 20,
        "slowest_route_bytes_per_s": 24e9,
        "fastest_route_bytes_per_s": 90e9,
        "simulated": True,
    }


def test_importing_loads_neither_torch_nor_numba() -> None:
    code = "import sys; from rlplace.measure.hosts.resolve import describe_hosts as run; run(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numba"} & set(result.stdout.split())


def gpus(*names: str) -> Host:
    devices = tuple(Device(name, "A GPU", "cuda", 1 << 30) for name in names)
    pairs = [(a, b) for a in names for b in names if a != b]
    return Host("lab", devices, (Link("bus", 1e9),), tuple(Route(a, b, ("bus",)) for a, b in pairs))


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_gpus", lambda: 1)


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_gpus", lambda: 0)


def test_what_is_here_or_simulated_is_taken() -> None:
    check_present(core_host(2))
    check_present(resolve_host("cores"))
    check_present(resolve_host("4xV100-pcie"))


@pytest.mark.usefixtures("_one_gpu")
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("cuda:0", "cuda:1"), r"host 'lab': device is 'cuda:1', expected .*\(cuda:0\)\. Use"),
        (("cuda:0", "gpu"), r"host 'lab': device is 'gpu', expected .*\(cuda:0\)\. Use"),
        (("cuda:0", "cuda"), r"host 'lab': device is 'cuda', expected .*\(cuda:0\)\. Use"),
        (("cuda:0/0", "cuda:1/0"), r"device is 'cuda:1/0', expected .*\(cuda:0\)"),
        (("cuda:0", "cuda:0/1"), r"device is 'cuda:0/1', expected no part of 'cuda:0', which is a device"),
    ],
)
def test_gpus_that_are_not_here_or_overlap_are_refused(names: tuple[str, ...], told: str) -> None:
    check_present(gpus("cuda:0"))
    check_present(gpus("cuda:0/0", "cuda:0/1"))
    with pytest.raises(InvalidValue, match=told):
        check_present(gpus(*names))


@pytest.mark.usefixtures("_one_gpu")
def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    gpu = dataclasses.replace(gpus("cuda:0").devices[0], cores=(100_000,))
    for device in (core_device("cpu:0", cores=(usable_cores()[0], 100_000)), gpu):
        with pytest.raises(InvalidValue, match=rf"cores of device '{device.name}' is \[100000\]"):
            check_present(Host("lab", (device,)))


@pytest.mark.usefixtures("_no_gpu")
def test_neither_profiling_nor_a_runner_starts_without_the_devices() -> None:
    graph = fork_join(2, 2, 100)
    problem = problem_of(graph, gpus("cuda:0", "cuda:1"), source="profiled")
    with pytest.raises(InvalidValue, match="PyTorch sees none here"):
        Problem.profile(graph, problem.host)
    with pytest.raises(InvalidValue, match="PyTorch sees none here"):
        HostRunner(problem, Simulator(problem))


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("command", ["train", "measure", "simulate", "compare", "fidelity"])
def test_commands_say_so_before_anything_is_captured(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplace.session.prepare.build", None)  # what makes the model: must not be reached
    save_host(gpus("cuda:0", "cuda:1"), tmp_path / "lab.json")
    assert main([command, "nmt", "--host", "lab.json"]) == 2
    said = capsys.readouterr().err
    assert "host 'lab': device is 'cuda:0', expected a CUDA device of this machine (PyTorch sees none here)" in said
    assert [path.name for path in tmp_path.iterdir()] == ["lab.json"]


@pytest.mark.usefixtures("_no_gpu")
def test_such_a_host_can_be_looked_at_and_simulated_once_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = gpus("cuda:0", "cuda:1")
    save_host(host, tmp_path / "lab.json")
    assert main(["hosts", str(tmp_path / "lab.json")]) == 0
    assert "cuda:1" in capsys.readouterr().out
    check_present(
        dataclasses.replace(
            host, devices=tuple(dataclasses.replace(device, backend="simulated") for device in host.devices)
        )
    )
