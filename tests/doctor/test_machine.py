"""The doctor's checks on machines that are made up: GPUs, cores, memory, threads and timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_machine import GIB, TOPOLOGY, Machine, fake_torch, only

from rlplace.doctor import Finding

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_gpu_is_one_line_and_ok(machine: Machine) -> None:
    for cuda, build in ((None, "CPU build"), ("12.8", "CUDA 12.8 build")):
        finding = only(machine.look("cuda", import_torch=lambda cuda=cuda: fake_torch(cuda=cuda)))
        assert (finding.verdict, finding.remedy) == ("ok", "")
        assert finding.found == f"no GPU ({build}): the CPU's cores serve as devices"


@pytest.mark.parametrize(
    ("torch", "environ", "found", "remedy"),
    [
        (fake_torch(), {}, "driver 550.54.15, but PyTorch (CPU build) sees no GPU", "https://pytorch.org"),
        (fake_torch(cuda="12.8"), {"CUDA_VISIBLE_DEVICES": ""}, "sees no GPU", "CUDA_VISIBLE_DEVICES is ''"),
        (fake_torch(cuda="12.8", says="driver\n too old"), {}, "sees no GPU: driver too old", "update the driver"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_warning(
    machine: Machine, torch: Any, environ: dict[str, str], found: str, remedy: str
) -> None:
    machine.write("proc/driver/nvidia/version", DRIVER)
    finding = only(machine.look("cuda", import_torch=lambda: torch, environ=environ))
    assert finding.verdict == "warn"
    assert found in finding.found
    assert remedy in finding.remedy


def test_one_gpu_has_no_pairs(machine: Machine) -> None:
    machine.write("proc/driver/nvidia/version", DRIVER)
    cuda, gpu = machine.look("cuda", import_torch=lambda: fake_torch(1, cuda="12.8"))
    assert cuda == Finding("cuda", "ok", "1 GPU, CUDA 12.8 build, driver 550.54.15")
    assert gpu == Finding("cuda:0", "ok", "NVIDIA H100, 80.0 GiB, compute capability 9.0")


def test_peer_access_is_told_by_route(machine: Machine) -> None:
    both = machine.look("cuda", import_torch=lambda: fake_torch(2, cuda="12.8", peers={(0, 1), (1, 0)}))
    assert [finding.name for finding in both] == ["cuda", "cuda:0", "cuda:1", "peer access"]
    assert (both[-1].verdict, both[-1].found) == ("ok", "between all of 2 GPUs")
    one_way = machine.look("cuda", import_torch=lambda: fake_torch(2, cuda="12.8", peers={(0, 1)}))[-1]
    assert one_way.verdict == "warn"
    assert "1 of 2 routes (cuda:1 to cuda:0)" in one_way.found
    none = machine.look("cuda", import_torch=lambda: fake_torch(3, cuda="12.8"))[-1]
    assert "6 of 6 routes" in none.found
    assert "and 2 more" in none.found


@pytest.mark.parametrize(
    ("architectures", "verdict"),
    [(["sm_80", "sm_90"], "ok"), (["sm_90a"], "ok"), (["compute_80"], "ok"), (["sm_80", "sm_100"], "fail")],
)
def test_a_gpu_without_kernels_in_this_torch_fails(machine: Machine, architectures: list[str], verdict: str) -> None:
    torch = fake_torch(1, cuda="12.8", architectures=architectures)
    assert machine.look("cuda", import_torch=lambda: torch)[1].verdict == verdict


def test_one_usable_core_is_a_warning(machine: Machine) -> None:
    assert only(machine.look("cores")).found == "4 of 4 logical cores may be used"
    finding = only(machine.look("cores", usable_cores=lambda: (3,)))
    assert finding.verdict == "warn"
    assert finding.found.startswith("1 of 4 logical cores")


def test_limits_are_warnings_that_say_what_to_do(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/cpu.max", "250000 100000")
    machine.write("sys/fs/cgroup/memory.max", str(4 * GIB))
    cores, memory = only(machine.look("cores")), only(machine.look("memory"))
    assert (cores.verdict, memory.verdict) == ("warn", "warn")
    assert "the time of 2.5" in cores.found
    assert "2 of the cores" in cores.remedy
    assert memory.found == "8.00 GiB available of 16.0 GiB; a control group allows 4.00 GiB"


@pytest.mark.parametrize(
    ("siblings", "verdict", "words"),
    [
        (["0", "1", "2", "3"], "ok", "4 logical cores are of 4 physical ones"),
        (["0-1", "0-1", "2-3", "2-3"], "warn", "0 and 1, 2 and 3"),
        (["0,2", "1,3", "0,2", "1,3"], "warn", "0 and 2, 1 and 3"),
        (["0-3", "0-3", "0-3", "0-3"], "warn", "of 1 physical ones"),
    ],
)
def test_devices_that_are_hyper_threads_of_one_core(
    machine: Machine, siblings: list[str], verdict: str, words: str
) -> None:
    for core, text in enumerate(siblings):
        machine.write(TOPOLOGY.format(core), text)
    finding = only(machine.look("hyper-threads"))
    assert finding.verdict == verdict
    assert words in finding.found


def test_the_cores_to_use_are_one_of_each_pair_that_may_be_used(machine: Machine) -> None:
    for core, text in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        machine.write(TOPOLOGY.format(core), text)
    assert "taskset -c 1,2 " in only(machine.look("hyper-threads", usable_cores=lambda: (1, 2, 3))).remedy


@pytest.mark.parametrize(("load", "verdict"), [("0.90", "ok"), ("1.10", "warn")])
def test_a_busy_machine_is_a_warning(machine: Machine, load: str, verdict: str) -> None:
    machine.write("proc/loadavg", f"{load} 0.00 0.00 1/1 1")
    assert only(machine.look("load")).verdict == verdict


def test_little_memory_is_a_warning(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 1048576 kB")
    assert only(machine.look("memory")).verdict == "warn"


@pytest.mark.parametrize(
    ("environ", "threads", "verdict", "remedy"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1, "ok", ""),
        ({"OMP_NUM_THREADS": "16"}, 16, "warn", "set OMP_NUM_THREADS to 4"),
        ({"OMP_PROC_BIND": "true"}, 4, "warn", "unset OMP_PROC_BIND"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 4, "warn", "unset OMP_WAIT_POLICY"),
        ({"OMP_WAIT_POLICY": "active"}, 4, "ok", ""),
        ({"GOMP_SPINCOUNT": "0"}, 4, "warn", "sleep between ops"),
        ({"GOMP_SPINCOUNT": "100000", "OMP_WAIT_POLICY": "passive"}, 4, "ok", ""),
    ],
)
def test_threads_that_share_cores_or_are_bound_to_them_or_sleep(
    machine: Machine, environ: dict[str, str], threads: int, verdict: str, remedy: str
) -> None:
    finding = only(machine.look("threads", environ=environ, import_torch=lambda: fake_torch(threads=threads)))
    assert finding.verdict == verdict
    assert remedy in finding.remedy
    assert all(f"{name} {value}" in finding.found for name, value in environ.items())


def test_timing_that_is_interrupted_is_a_warning(machine: Machine) -> None:
    often = only(machine.look("timing", op_times_s=lambda torch: [1e-3] * 80 + [2e-3] * 20))
    assert often.verdict == "warn"
    assert "80 % of times within 100%" in often.found
    seldom = only(machine.look("timing", op_times_s=lambda torch: [1e-3] * 95 + [21e-3] * 5))
    assert seldom.verdict == "warn"
    assert "50% of the time was lost" in seldom.found
