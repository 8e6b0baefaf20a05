"""What a run that lost a device offers."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from core_hosts import core_device, core_host
from elastic_hosts import simulated_host

from rlplace.errors import DeviceLost, RunnerError
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.threads import usable_cores
from rlplace.report.console import make_progress
from rlplace.session.folder import RunFolder
from rlplace.session.setup import Setup
from rlplace.training import TrainConfig, train_and_resume
from rlplace.training.train_and_resume import Job, going_on, what_is_left
from rlplace.workloads import parse_workload


def asked(host: Host, workload: str = "nmt@small", **options: bool) -> Job:
    setup = Setup(spec=parse_workload(workload), host=host, host_word="cores", **options)
    return Job.of(setup, TrainConfig())


def offering(job: Job, folder: Path) -> AbstractContextManager[None]:
    return going_on(RunFolder(folder), job, make_progress(is_quiet=True))


def wide(count: int, width: int) -> Host:
    """So many devices of so many cores each."""
    host = core_host(count)
    devices = tuple(
        dataclasses.replace(device, cores=tuple(range(k * width, (k + 1) * width)))
        for k, device in enumerate(host.devices)
    )
    return dataclasses.replace(host, devices=devices)


@pytest.mark.parametrize(
    ("host", "left", "word"),
    [
        (wide(4, 1), (0, 1, 3), "cores:3"),
        (wide(2, 2), (0, 1, 2), "cores:1x2"),
        (wide(2, 2), (0,), "cores"),
        (core_host(2), (0, 1, 2, 3), "cores:2"),
        (wide(4, 2).as_processes("procs"), (0, 1, 2, 3), "procs:2x2"),
    ],
)
def test_cores_that_are_left_are_offered(
    host: Host, left: tuple[int, ...], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_and_resume, "usable_cores", lambda: left)
    assert what_is_left(host, "cores") == word


def test_gpus_are_whichever_are_left() -> None:
    host = simulated_host("fast")
    host = dataclasses.replace(host, devices=(dataclasses.replace(host.devices[0], backend="cuda"),))
    assert what_is_left(host, "cuda/2+cpu") == "cuda/2+cpu"
    assert what_is_left(host, "mine.json") == "auto"


def test_a_lost_device_comes_with_two_ways_to_go_on() -> None:
    host = wide(2, 1)
    with pytest.raises(DeviceLost) as told, offering(asked(host, gangs=True), Path("runs/my nmt")):
        raise DeviceLost(("cpu:1",), "this process may not use core 1 any more")
    said = str(told.value)
    assert said.startswith("cpu:1 was lost: this process may not use core 1 any more. ")
    word = what_is_left(host, "cores") + " --gangs"
    assert f"`rlplace train --resume 'runs/my nmt' --host {word}`" in said
    assert f"`rlplace place 'runs/my nmt' --host {word}`" in said
    assert told.value.devices == ("cpu:1",)


def test_of_machines_all_may_come_back_or_those_that_are_left_go_on() -> None:
    host = wide(2, 1)
    machines = (dataclasses.replace(each, machine=name) for each, name in zip(host.devices, "ab", strict=True))
    host = dataclasses.replace(host, devices=tuple(machines))
    with pytest.raises(DeviceLost) as told, offering(asked(host), Path("r")):
        raise DeviceLost(("cpu:1",), "machine 'b' does not answer")
    for command in ("train --resume r", "train --resume r --host nodes", "place r --host nodes"):
        assert f"`rlplace {command}`" in str(told.value)


def test_a_users_function_is_named_again() -> None:
    with pytest.raises(DeviceLost) as told, offering(asked(core_host(2), "mine:work"), Path("r")):
        raise DeviceLost(("cpu:1",), "gone")
    assert "`rlplace train mine:work --resume r --host cores" in str(told.value)
    assert "--workload mine:work`" in str(told.value)


def test_whatever_fails_while_a_core_is_gone_comes_of_that() -> None:
    missing = max(usable_cores()) + 1
    host = Host("cores", (core_device("cpu:0", cores=(missing,)),))
    with pytest.raises(DeviceLost, match=f"core {missing} any more") as told, offering(asked(host), Path("x")):
        raise RunnerError("OSError: [Errno 22] Invalid argument")
    assert isinstance(told.value.__cause__, RunnerError)


def test_other_errors_stay_what_they_are() -> None:
    for host in (core_host(2), simulated_host("fast")):
        with pytest.raises(RunnerError) as told, offering(asked(host), Path("x")):
            raise RunnerError("boom")
        assert told.value.args == RunnerError("boom").args
        assert told.value.__notes__ == ["To go on: rlplace train --resume x"]
