"""Workers of other machines, here processes of this one: steps equal plain PyTorch's, and what is lost is named."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty_ops import faulty_graph
from machines import Machines, machines
from naive_plan import naive_plan, random_devices
from placed_steps import NUM_STEPS, run_eager
from rank_threads import rank_residents
from small_models import Case, mean_square, random
from torch import nn

from rlplace.errors import DeviceLost, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import group_ops
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.distributed import connect, torchrun_store
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.nodes import MOST_STRANGERS
from rlplace.measure.isolate import keeper as keeper_module
from rlplace.measure.isolate.fleet import Fleet
from rlplace.measure.isolate.isolated_runner import IsolatedRunner, packed_setup, profile_isolated
from rlplace.measure.isolate.keeper import Keeper
from rlplace.measure.isolate.messages import TimeLimits
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.race import RaceProtocol

GONE_WITHIN_S = 30.0
STRANGER = """
import contextlib, encodings.idna, hmac, json, os, socket, sys
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from torch.distributed import TCPStore

os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
word = store.get("rlplace/hello/1")
session, place, proof = json.loads(store.get("rlplace/welcome/" + word.decode()))
found = [word, session.encode(), bytes.fromhex(session), proof.encode(), bytes.fromhex(proof)]
with contextlib.suppress(OSError):
    found.append(open("/proc/" + place, "rb").read())
for secret in found:
    opened = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    try:
        connection = Connection(opened.detach())
        answer_challenge(connection, secret)
        print("let in")
    except (AuthenticationError, EOFError, OSError):
        print("refused")
"""
"""Behaves as root only until it has imported PyTorch, which may be of root alone."""


class NaivePlanner:
    """Plans that put each op where it is told."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph

    def plan(self, devices: np.ndarray) -> Plan:
        return naive_plan(self._graph, devices)

    def retime(self, plan: Plan) -> Measurement:
        return Measurement("ok", 1.0, peak_bytes=(0, 0))


def problem_of(graph: OpGraph, host: Host) -> Problem:
    op_time_s = np.where(graph.is_source, 0.0, 1.0)
    costs = Costs(np.repeat(op_time_s[:, None], host.num_devices, axis=1), "estimated")
    return Problem(graph, host, costs, group_ops(graph, op_time_s, 8))


def training(num_parts: int = 1) -> OpGraph:
    cut = {"micro_batches": num_parts, "loss": "accumulated"} if num_parts > 1 else {}
    return capture(case().model, case().inputs, case().loss_fn, "adam", **cut)


def case() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return Case(model, random(12, 8), mean_square)


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with machines() as made:
        yield made


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, task.read_text().split())
    return found


@pytest.fixture(scope="module")
def four() -> Iterator[Machines]:
    """Two machines of two ranks."""
    with machines(num_local=2) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("of", ["two", "four"])
def test_steps_over_machines_train_as_plain_pytorch(of: str, num_parts: int, request: pytest.FixtureRequest) -> None:
    made: Machines = request.getfixturevalue(of)
    graph, host, generator = training(num_parts), made.host, np.random.default_rng(num_parts)
    expected = run_eager(case(), "adam").losses
    with contextlib.closing(packed_setup(problem_of(graph, host))) as packed:
        fleet = Fleet(packed, host.devices, first=1)
    with contextlib.closing(fleet):
        prefix, interface = fleet.meeting
        wires = connect(host, 0, torchrun_store(prefix), interface=interface, is_sparse=True)
        assert {pair for pair in wires if 0 in pair} == set(wires)
        assert {sum(pair) // (host.num_devices // 2) for pair in wires} == {1}, "to the other machine"
        fleet.await_ready()
        crew = RankCrew(host, fleet.arena, links=fleet.links, wires=wires)
        for _ in range(3):
            plan = naive_plan(graph, random_devices(graph, host.num_devices, generator), generator)
            assert plan.num_transfers > 0
            residents = rank_residents(graph, host, crew)
            residents.reset()
            step = PlacedStep(graph, host, plan, residents, crew, is_traced=True)
            for number in range(NUM_STEPS):
                seconds = step.run(number)
                torch.testing.assert_close(step.result.reshape(()), expected[number], rtol=1e-10, atol=1e-10)
            timeline = step.timeline()
            runs = ~graph.is_source
            assert (timeline.op_end_s[runs] > 0).all()
            assert timeline.op_end_s.max() <= seconds + 1e-3, "one clock for all, but for how long an answer takes"
            step.unload()
        crew.stop()
    assert all(children_of(each.pid) == [] for each in made.others.values())


@pytest.mark.slow
def test_a_lost_machine_is_named_and_its_workers_are_gone() -> None:
    graph = training()
    with machines() as made:
        runner = IsolatedRunner(problem_of(graph, made.host), NaivePlanner(graph))
        with contextlib.closing(runner):
            assert runner._process is not None
            board, victim = runner._process.board, made.others[1]
            workers = [rank.pid for rank in runner._process.ranks]

            def kill_it() -> None:
                while board.contender != 0:
                    time.sleep(0.001)
                victim.kill()

            killer = threading.Thread(target=kill_it)
            killer.start()
            devices = random_devices(graph, 2, np.random.default_rng(0))
            long = RaceProtocol(warmup=1, min_rounds=10**6, max_rounds=10**6)
            (measured,) = runner.measure_plans([naive_plan(graph, devices)], protocol=long)
            killer.join()
            machine = made.nodes.facts[1].machine
            assert (measured.status, measured.step_time_s) == ("lost", math.inf)
            assert f"cpu:1 was lost: machine '{machine}' (127.0.0.1) does not answer" in measured.why
            until_s = time.monotonic() + GONE_WITHIN_S
            while not all(map(is_gone, workers)):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            (again,) = runner.measure_plans([naive_plan(graph, devices)], protocol=long)
            assert again.status == "lost"


@pytest.mark.slow
def test_a_machine_that_does_not_answer_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose network is down: its connections stay."""
    monkeypatch.setattr(keeper_module, "ANSWERS_WITHIN_S", 2.0)
    graph = training()
    with machines() as made:
        runner = IsolatedRunner(problem_of(graph, made.host), NaivePlanner(graph))
        try:
            os.kill(made.others[1].pid, signal.SIGSTOP)
            plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(0)))
            long = RaceProtocol(warmup=1, min_rounds=10**6, max_rounds=10**6)
            (measured,) = runner.measure_plans([plan], protocol=long)
        finally:
            runner.close()
            os.kill(made.others[1].pid, signal.SIGCONT)
    assert measured.status == "lost"
    assert "no answer within 2 s" in measured.why


@pytest.mark.slow
def test_time_in_which_a_machine_is_cut_off_is_no_placements(two: Machines) -> None:
    graph = training()
    limits = TimeLimits(least_s=3.0, longest_s=3.0)
    with contextlib.closing(IsolatedRunner(problem_of(graph, two.host), NaivePlanner(graph), limits=limits)) as runner:
        assert runner._process is not None
        board, pids = runner._process.board, (two.others[1].pid, runner._process.ranks[1].pid)

        def cut_it() -> None:
            while board.best_s == 0.0:
                time.sleep(0.001)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(8.0)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        cutter = threading.Thread(target=cut_it)
        cutter.start()
        plan = naive_plan(graph, random_devices(graph, 2, np.random.default_rng(0)))
        long = RaceProtocol(warmup=1, min_rounds=10**6, max_rounds=10**6)
        (measured,) = runner.measure_plans([plan], protocol=long, deadline_s=time.monotonic() + 16.0)
        cutter.join()
        assert measured.ok, measured.why
        assert runner.num_started == 1


def other_kind(host: Host) -> Host:
    first, second = host.devices
    return replace(host, devices=(first, replace(second, kind="other")))


@pytest.mark.slow
def test_ops_are_profiled_where_a_kind_of_device_is(two: Machines) -> None:
    graph, said = training(), list[str]()
    profile = {"num_steps": 3, "warmup": 1, "isolated": True}
    costs = profile_isolated(graph, other_kind(two.host), on_progress=said.append, **profile)  # type: ignore[arg-type]
    assert np.array_equal(costs.op_time_s > 0, np.repeat(~graph.is_source[:, None], 2, axis=1))
    assert costs.workspace_bytes is not None
    assert said == [
        f"profiling {graph.num_ops} ops on cpu:0 (cpu-core)",
        f"profiling {graph.num_ops} ops on cpu:1 (other)",
    ]
    with pytest.raises(RunnerError, match=r"the worker died: SIGABRT in profiling on cpu:1, op 'faulty'"):
        profile_isolated(faulty_graph(("abort",)), other_kind(two.host), **profile)  # type: ignore[arg-type]
    assert children_of(two.others[1].pid) == []


def test_a_stranger_starts_nothing_and_disturbs_nobody(two: Machines) -> None:
    keeper = Keeper(two.nodes.facts[1].machine, ["cpu:1"])
    port = int(two.nodes.store.get(f"port of the keeper/{two.nodes.facts[1].machine}"))
    with (
        socket.create_connection(("127.0.0.1", port)) as silent,
        socket.create_connection(("127.0.0.1", port)) as wrong,
    ):
        with contextlib.closing(Connection(os.dup(wrong.fileno()))) as connection, pytest.raises(AuthenticationError):
            answer_challenge(connection, b"a guess")
        assert keeper.ask("look") == []
        silent.sendall(b"\xff" * 64)
    assert keeper.ask("look") == []
    with pytest.raises(RunnerError, match="KeyError"):
        keeper.ask("stacks", 7)
    keeper.close()


def test_strangers_that_stay_keep_nobody_out(two: Machines) -> None:
    port = int(two.nodes.store.get(f"port of the keeper/{two.nodes.facts[1].machine}"))
    with contextlib.ExitStack() as idle:
        for _ in range(3 * MOST_STRANGERS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        keeper = Keeper(two.nodes.facts[1].machine, ["cpu:1"])
        assert keeper.ask("look") == []
        open_files = Path(f"/proc/{two.others[1].pid}/fd")
        until_s = time.monotonic() + GONE_WITHIN_S
        while len(list(open_files.iterdir())) > 2 * MOST_STRANGERS + 64:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        keeper.close()


def test_the_whole_proof_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "ANSWERS_WITHIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as slow:
        accepted, _ = server.accept()
        stopped = threading.Event()

        def dribble() -> None:
            with contextlib.suppress(OSError):
                while not stopped.wait(0.1):
                    slow.sendall(b"\0")

        threading.Thread(target=dribble, daemon=True).start()
        with pytest.raises((OSError, EOFError, AuthenticationError)):
            keeper_module._proved(accepted, b"secret", asks_first=True)
        stopped.set()


def test_a_keeper_unpacks_nothing_and_does_only_what_is_asked_for(two: Machines) -> None:
    keeper = Keeper(two.nodes.facts[1].machine, ["cpu:1"])
    for name in ("close", "__init__", "_keeping", "serve"):
        with pytest.raises(RunnerError, match="UnknownName"):
            keeper.ask(name)
    keeper._connection.send(Path("/"))  # pickled, as by one who knows the secret
    assert keeper.ask("look") is None
    assert keeper.lost is not None
    again = Keeper(two.nodes.facts[1].machine, ["cpu:1"])
    assert again.ask("look") == []
    again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_finds_no_secret_and_starts_nothing(two: Machines, tmp_path: Path) -> None:
    """It reads all that the store has for it, and tries everything that it found as the secret of the keeper."""
    port = int(two.nodes.store.get(f"port of the keeper/{two.nodes.facts[1].machine}"))
    (tmp_path / "stranger.py").write_text(STRANGER)
    tmp_path.chmod(0o755)
    words = [sys.executable, str(tmp_path / "stranger.py"), os.environ["MASTER_PORT"], str(port)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * len(done.stdout.split())
    assert len(done.stdout.split()) >= 4


def test_a_machine_that_cannot_be_reached_is_lost(two: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = str(free.getsockname()[1]).encode()
    monkeypatch.setattr(type(two.nodes.store), "get", lambda *_: closed)
    with pytest.raises(DeviceLost, match=r"cpu:1 was lost: machine .* \(127.0.0.1\) does not answer, .*refused"):
        Keeper(two.nodes.facts[1].machine, ["cpu:1"])
