"""HOST words: presets, files, this machine, and names that nothing answers to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import HOST_WORDS, describe_hosts, list_presets, resolve_host

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
        assert (num_parts is None) == (kind == "cores")
        calls.append((kind, *((num_devices, cores_per_device) if kind == "cores" else (num_parts, with_cpu)), gangs))
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
    ],
)
def test_words_for_this_machine(detected: list[object], word: str, call: tuple[object, ...]) -> None:
    assert resolve_host(word) is HERE
    assert resolve_host(word, gangs=True) is HERE
    assert detected == [(*call, False), (*call, True)]


@pytest.mark.parametrize(
    "word", ["cores:", "cores:0", "cores:x", "cores:2x", "cores:2x0", "cores:-1", "cores:2x4x8", "cores/2"]
)
def test_malformed_cores(detected: list[object], word: str) -> None:
    with pytest.raises(InvalidValue, match=f"host is '{word}', expected cores, cores:DEVICES"):
        resolve_host(word)
    assert detected == []


@pytest.mark.parametrize(
    "word", ["cuda:0", "cuda/", "cuda/0", "cuda/x", "cuda/-1", "cuda+gpu", "cuda/2+", "auto/2", "auto+gpus", "cuda:0/1"]
)
def test_malformed_gpus(detected: list[object], word: str) -> None:
    with pytest.raises(
        InvalidValue,
        match=r"expected auto, cuda or cuda/PARTS \(PARTS from 1\), each with \+cpu .* CUDA_VISIBLE_DEVICES",
    ):
        resolve_host(word)
    assert detected == []


def test_a_file_in_a_folder_called_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cuda").mkdir()
    save_host(HERE, tmp_path / "cuda" / "2.yaml")
    assert resolve_host("cuda/2.yaml") == HERE


def test_every_word_for_this_machine_is_one(detected: list[object]) -> None:
    assert [resolve_host(word) for word in HOST_WORDS] == [HERE] * len(HOST_WORDS)


def test_preset_and_file(tmp_path: Path) -> None:
    assert resolve_host("4xV100-pcie").num_devices == 4
    save_host(HERE, tmp_path / "mine.yaml")
    assert resolve_host(str(tmp_path / "mine.yaml")) == HERE


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
