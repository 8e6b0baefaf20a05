"""Hosts that this machine lacks a device of are refused in one message, before anything is captured or run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_device, core_host
from micrographs import fork_join

from rlplace import cuda
from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, HostRunner, Link, Problem, Route, Simulator
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import check_present, resolve_host
from rlplace.measure.timing.threads import usable_cores


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
def test_a_gpu_that_pytorch_does_not_see_is_refused() -> None:
    check_present(gpus("cuda:0"))
    for name in ("cuda:1", "gpu", "cuda"):
        with pytest.raises(InvalidValue, match=rf"host 'lab': device is '{name}', expected .*\(cuda:0\)\. Use"):
            check_present(gpus("cuda:0", name))


@pytest.mark.usefixtures("_one_gpu")
def test_parts_of_a_gpu_are_here_if_it_is() -> None:
    check_present(gpus("cuda:0/0", "cuda:0/1"))
    with pytest.raises(InvalidValue, match=r"device is 'cuda:1/0', expected .*\(cuda:0\)"):
        check_present(gpus("cuda:0/0", "cuda:1/0"))


@pytest.mark.usefixtures("_one_gpu")
def test_a_gpu_that_is_whole_and_in_parts_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"device is 'cuda:0/1', expected no part of 'cuda:0', which is a device"):
        check_present(gpus("cuda:0", "cuda:0/1"))


@pytest.mark.usefixtures("_one_gpu")
def test_so_is_a_core_that_a_gpus_thread_may_not_use() -> None:
    (device,) = gpus("cuda:0").devices
    with pytest.raises(InvalidValue, match=r"cores of device 'cuda:0' is \[100000\]"):
        check_present(Host("lab", (dataclasses.replace(device, cores=(100_000,)),)))


def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    mine = usable_cores()[0]
    host = Host("lab", (core_device("cpu:0", cores=(mine, 100_000)),))
    with pytest.raises(InvalidValue, match=r"cores of device 'cpu:0' is \[100000\]"):
        check_present(host)


@pytest.mark.usefixtures("_no_gpu")
def test_neither_profiling_nor_a_runner_starts_without_the_devices() -> None:
    graph = fork_join(2, 2, 100)
    costs = Costs(np.ones((graph.num_ops, 2)), "profiled")
    problem = Problem(graph, gpus("cuda:0", "cuda:1"), costs, Grouping(np.arange(graph.num_ops)))
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
    monkeypatch.setattr("rlplace.session.steps.build", None)  # what makes the model: must not be reached
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
    assert "cuda:1" in capsys.readouterr().err
    check_present(
        dataclasses.replace(
            host, devices=tuple(dataclasses.replace(device, backend="simulated") for device in host.devices)
        )
    )
