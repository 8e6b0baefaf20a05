"""A worker of several ranks: each fault costs its placement alone, names the rank and the op, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host, process_host
from faulty_ops import FAULTS, faulty_graph
from machines import machines
from naive_plan import naive_plan, random_devices
from numpy.typing import NDArray
from small_models import CASES

from rlplace.errors import InvalidValue
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host
from rlplace.measure.isolate import isolated_runner as wait_module
from rlplace.measure.isolate.isolated_runner import IsolatedRunner
from rlplace.measure.isolate.messages import TimeLimits
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.host_runner import HostRunner
from rlplace.measure.timing.race import RaceProtocol

PROTOCOL = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, hopeless=1e9)
PATIENT = TimeLimits(least_s=6.0, longest_s=30.0)
SMALL = 256 << 20


class NaivePlanner:
    """Plans that put each op where it is told."""

    def __init__(self, graph: OpGraph, num_devices: int = 2) -> None:
        self.graph, self.num_devices = graph, num_devices

    def plan(self, devices: NDArray[np.int32]) -> Plan:
        return naive_plan(self.graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return Measurement("ok", 1.0, peak_bytes=(0,) * self.num_devices)


def apart_host() -> Host:
    """Two cores that have no memory in common: gloo carries tensors between them, as between machines."""
    host = process_host(2)
    return replace(host, devices=tuple(replace(device, memory_pool="") for device in host.devices))


def problem_of(graph: OpGraph, host: Host | None = None) -> Problem:
    op_time_s, host = np.where(graph.is_source, 0.0, 1.0), host or process_host(2)
    costs = Costs(np.repeat(op_time_s[:, None], host.num_devices, axis=1), "estimated")
    return Problem(graph, host, costs, group_ops(graph, op_time_s, 8))


def runner_of(graph: OpGraph, host: Host | None = None, **options: object) -> IsolatedRunner:
    problem = problem_of(graph, host)
    return IsolatedRunner(problem, NaivePlanner(graph, problem.host.num_devices), limits=PATIENT, **options)


def training() -> OpGraph:
    torch.manual_seed(0)
    case = CASES["linear"]()
    return capture(case.model, case.inputs, case.loss_fn, "adam")


@contextlib.contextmanager
def host_with(way: str) -> Iterator[Host]:
    """Two devices between which tensors go through slots in shared memory, by gloo, or by gloo between machines."""
    if way == "machines":
        with machines() as made:
            yield made.host
    else:
        yield {"slots": process_host(2), "gloo": apart_host()}[way]


@pytest.fixture(scope="module", params=("slots", "gloo", "machines"))
def runner(request: pytest.FixtureRequest) -> Iterator[IsolatedRunner]:
    with host_with(request.param) as host, contextlib.closing(runner_of(training(), host)) as made:
        yield made


def mixed(runner: IsolatedRunner, seed: int = 0) -> Plan:
    graph, generator = runner._problem.graph, np.random.default_rng(seed)
    return naive_plan(graph, random_devices(graph, 2, generator), generator)


def pids(runner: IsolatedRunner) -> list[int]:
    assert runner._process is not None
    return [rank.pid for rank in runner._process.ranks]


def test_placements_are_raced_and_traced_and_plain_pytorch_beside_them(runner: IsolatedRunner) -> None:
    plans = [mixed(runner, seed) for seed in range(3)]
    protocol = RaceProtocol(warmup=1, min_rounds=2, max_rounds=2, hopeless=1e9, num_traced=2)
    *placed, eager, own = runner.measure_plans(
        plans, protocol=protocol, others=[EagerRecipe(num_threads=1), lambda: 7.0]
    )
    assert [outcome.status for outcome in placed] == ["ok"] * 3
    is_run = ~runner._problem.graph.is_source
    for outcome in placed:
        assert outcome.timeline is not None
        assert (outcome.timeline.op_end_s[is_run] > 0).all()
    assert eager.ok
    assert own.step_time_s == 7.0
    assert len(set(pids(runner))) == 2
    assert runner.num_started == 1


def test_every_rank_is_pinned_and_has_the_memory_limit(runner: IsolatedRunner) -> None:
    for pid in pids(runner):
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (data,) = [line for line in limits if line.startswith("Max data size")]
        assert data.split()[3] != "unlimited"


def test_a_timer_of_another_runner_runs_steps_of_the_fleet(runner: IsolatedRunner) -> None:
    timer = runner.timer(mixed(runner))
    assert timer() > 0
    assert runner.trace(mixed(runner), num_steps=2, warmup=1)[0].source == "measured"
    assert timer() > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_amid_a_race_is_named_and_the_plan_gets_another_try(
    runner: IsolatedRunner, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, wait_for = [], wait_module.wait_for
    monkeypatch.setattr(wait_module, "wait_for", lambda *given: faults.append(wait_for(*given)) or faults[-1])
    victims, before = pids(runner), runner.num_started
    board = runner._process.board  # type: ignore[union-attr]

    def kill_it() -> None:
        while board.contender != 0:
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(victims[rank], signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    long = RaceProtocol(warmup=1, min_rounds=20_000, max_rounds=20_000)
    (measured,) = runner.measure_plans([mixed(runner)], protocol=long, deadline_s=time.monotonic() + 8.0)
    killer.join()
    assert measured.ok
    assert runner.num_started == before + 1
    assert f"the worker of cpu:{rank} was ended from outside (SIGKILL) in this placement" in faults[0].why
    assert all(is_gone(pid) for pid in victims)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stopped_alone_is_named_and_the_fleet_replaced(
    runner: IsolatedRunner, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_module, "STOPPED_S", 0.5)
    faults, wait_for = [], wait_module.wait_for
    monkeypatch.setattr(wait_module, "wait_for", lambda *given: faults.append(wait_for(*given)) or faults[-1])
    before = runner.num_started
    os.kill(pids(runner)[rank], signal.SIGSTOP)
    (measured,) = runner.measure_plans([mixed(runner)], protocol=PROTOCOL)
    assert measured.ok
    assert f"the worker of cpu:{rank} was stopped" in faults[0].why
    assert runner.num_started == before + 1


def race_faults(kinds: Sequence[str], host: Host, around: Sequence[int] = (0,)) -> dict[str, Measurement]:
    """Faults on `cpu:1`, all else on ranks around it, and two harmless plans, in one race."""
    num_files, victim = len(os.listdir("/proc/self/fd")), host.device_index["cpu:1"]
    graph = faulty_graph()
    plans = {}
    for kind in kinds:
        devices = np.resize(np.array(around, dtype=np.int32), graph.num_ops)
        devices[1 + FAULTS.index(kind)] = victim
        plans[kind] = naive_plan(graph, devices)
    for name, last in (("first", 0), ("second", victim)):
        devices = np.resize(np.array(around, dtype=np.int32), graph.num_ops)
        devices[-1] = last
        plans[name] = naive_plan(graph, devices)
    reference = np.zeros(graph.num_ops, dtype=np.int32)
    runner = runner_of(graph, host, memory_limit_bytes=SMALL, reference=reference)
    try:
        found = runner.measure_plans(list(plans.values()), protocol=PROTOCOL)
        last = pids(runner)
    finally:
        runner.close()
    assert all(is_gone(pid) for pid in last)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files, "no file stays open"
    return dict(zip(plans, found, strict=True))


@pytest.fixture(scope="module")
def raced() -> dict[str, Measurement]:
    """Every fault."""
    return race_faults(FAULTS, process_host(2))


@pytest.mark.slow
def test_faults_among_four_ranks() -> None:
    found = race_faults(("raise", "hang", "allocate", "kill"), process_host(4), around=(0, 2, 3))
    statuses = {name: outcome.status for name, outcome in found.items()}
    faults = {"raise": "error", "hang": "timeout", "allocate": "oom", "kill": "error"}
    assert statuses == {**faults, "first": "ok", "second": "ok"}
    for kind in ("raise", "hang", "allocate"):
        assert f"op 'faulty_{FAULTS.index(kind)}' (" in found[kind].why
        assert "on cpu:1" in found[kind].why
    assert "the worker of cpu:1 was ended from outside (SIGKILL)" in found["kill"].why
    assert f"the transfer of op 'faulty_{FAULTS.index('kill')}'" in found["kill"].why


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo", "machines"])
def test_faults_of_ranks_without_a_memory_in_common(way: str) -> None:
    """Their messages are lost in a step that failed, so each fault costs the processes, but no other plan."""
    with host_with(way) as host:
        found = race_faults(("raise", "hang", "kill"), host)
    statuses = {name: outcome.status for name, outcome in found.items()}
    assert statuses == {"raise": "error", "hang": "timeout", "kill": "error", "first": "ok", "second": "ok"}
    assert "op 'faulty_4' (" in found["hang"].why
    assert "on cpu:1: ValueError: boom" in found["raise"].why
    assert "the worker of cpu:1 was ended from outside (SIGKILL)" in found["kill"].why


@pytest.mark.slow
@pytest.mark.parametrize("is_far", [False, True])
def test_faults_among_two_machines_of_two_ranks(is_far: bool) -> None:
    """`cpu:1` is beside `cpu:0`, or on the other machine: a rank there waits for it in shared memory."""
    with machines(num_local=2) as made:
        order = (0, 2, 1, 3) if is_far else (0, 1, 2, 3)
        named = [(made.host.devices[name], made.host.devices[rank]) for rank, name in enumerate(order)]
        devices = (replace(one, machine=at.machine, memory_pool=at.machine) for one, at in named)
        host, around = replace(made.host, devices=tuple(devices)), [0, 3, 3 - order.index(1)]
        found = race_faults(("raise", "hang", "kill"), host, around)
    statuses = {name: outcome.status for name, outcome in found.items()}
    assert statuses == {"raise": "error", "hang": "timeout", "kill": "error", "first": "ok", "second": "ok"}
    assert "op 'faulty_4' (" in found["hang"].why
    assert "on cpu:1" in found["hang"].why
    assert "on cpu:1: ValueError: boom" in found["raise"].why
    assert "the worker of cpu:1 was ended from outside (SIGKILL)" in found["kill"].why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("abort", "error", "the worker of cpu:1 died: SIGABRT"),
        ("segfault", "error", "the worker of cpu:1 died: SIGSEGV"),
        ("exit", "error", "the worker of cpu:1 died: exit code 3"),
        ("kill", "error", "the worker of cpu:1 was ended from outside"),
        ("hang", "timeout", "did not end within"),
        ("raise", "error", "boom"),
        ("nan", "error", "NaN"),
        ("allocate", "oom", "alloc"),
        ("map", "oom", "out of memory"),
    ],
)
def test_a_fault_of_a_rank_is_the_measurement_of_its_plan(
    raced: dict[str, Measurement], kind: str, status: str, words: str
) -> None:
    outcome = raced[kind]
    assert (outcome.status, outcome.step_time_s) == (status, math.inf)
    assert words in outcome.why
    index = FAULTS.index(kind)
    name = f"op 'faulty{f'_{index}' if index else ''}'"
    if kind in ("abort", "segfault", "hang", "raise", "allocate"):
        assert f"{name} (" in outcome.why
        assert "on cpu:1" in outcome.why
    if kind in ("kill", "exit"):  # no stack tells, but what the other rank waits for
        assert f"meanwhile in the transfer of {name}" in outcome.why


@pytest.mark.slow
def test_the_others_are_measured_as_if_no_rank_had_failed(raced: dict[str, Measurement]) -> None:
    for name in ("first", "second"):
        assert raced[name].ok, raced[name].why
        assert len(raced[name].samples_s) == PROTOCOL.max_rounds


def test_threads_of_one_process_refuse_a_host_of_processes() -> None:
    graph = training()
    with pytest.raises(InvalidValue, match="measure in this process: host is 'procs'"):
        HostRunner(problem_of(graph), NaivePlanner(graph))


def test_a_fleet_has_a_process_for_each_device_with_a_launcher_of_its_own() -> None:
    assert [len(wait_module.ranks(host)) for host in (core_host(2), process_host(2), process_host(4))] == [1, 2, 4]
