"""Ranks that find each other through a store, do jobs in fresh processes, and the host of their devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from many_ranks import at_once, facts_of, nodes_of
from torch.distributed import HashStore

from rlplace.errors import InvalidValue, RunnerError, UnknownName
from rlplace.measure import resolve_host
from rlplace.measure.hosts import fresh_ranks, nodes
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.hosts.fresh_ranks import FreshRanks, serve
from rlplace.measure.hosts.host_file import host_from_dict, host_to_dict
from rlplace.measure.hosts.nodes import VARIABLES, Nodes, interfaces, is_here
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.hosts.signed_store import SECRET

TWO = nodes_host(facts_of(["a", "b"]))


@pytest.fixture(autouse=True)
def without_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "")
    monkeypatch.delenv(SECRET)


def under(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
    for name, value in zip(VARIABLES, (rank, 2, 0, 1, "127.0.0.1", 29400), strict=True):
        monkeypatch.setenv(name, str(value))


def test_without_torchrun_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidValue, match=r"RANK, WORLD_SIZE.*torchrun --nnodes 2"):
        resolve_host("nodes")
    with pytest.raises(InvalidValue, match=r"'nodes', expected a host of this machine alone.*torchrun"):
        check_present(TWO)


def test_ranks_meet_although_the_store_holds_words_of_a_session_before() -> None:
    store = HashStore()
    for rank in (1, 2):
        store.set(f"rlplace/hello/{rank}", f"old word of {rank}")

    def last() -> Any:
        found = nodes._await_welcome(store, 2)
        return found, nodes._gather(store, 2, 3, "facts", 2)

    jobs = [
        lambda: (nodes._welcome_all(store, 3), nodes._gather(store, 0, 3, "facts", 0)),
        lambda: (nodes._await_welcome(store, 1), nodes._gather(store, 1, 3, "facts", 1)),
        last,
    ]
    results = at_once(jobs)
    assert {gathered == [0, 1, 2] for _, gathered in results} == {True}
    (session,) = {name for (name, _), _ in results}
    (secret,) = {key for (_, key), _ in results}
    assert len(secret) == 64
    again = at_once([partial(nodes._welcome_all, store, 2), partial(nodes._await_welcome, store, 1)])
    assert again[0] == again[1] != (session, secret)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "COMES_WITHIN_S", 0.1)
    with pytest.raises(RunnerError, match=r"of 3 ranks, these did not come within 0.1 s: 1, 2"):
        nodes._welcome_all(HashStore(), 3)


def test_the_interface_is_that_of_the_route_or_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert interfaces()["lo"] == "127.0.0.1"
    assert nodes._interface_to("127.0.0.1") == ("lo", "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo,eth9")
    assert nodes._interface_to("192.0.2.1") == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wan7")
    with pytest.raises(InvalidValue, match=r"GLOO_SOCKET_IFNAME is 'wan7', expected an interface.*lo"):
        nodes._interface_to("127.0.0.1")


def test_each_rank_is_a_device_of_its_machine_whose_memory_it_shares() -> None:
    host = nodes_host(facts_of(["a", "a", "b"]))
    assert [device.name for device in host.devices] == ["a/cpu:0", "a/cpu:1", "b/cpu:0"]
    assert [device.local_name for device in host.devices] == ["cpu:0", "cpu:1", "cpu:0"]
    assert [device.cores for device in host.devices] == [(0,), (1,), (0,)]
    assert host.shares_memory.tolist() == [[False, True, False], [True, False, False], [False] * 3]
    assert host.processes
    assert host.is_wired
    assert not host.sends_wait, "gloo does not wait"
    links = {(route.source, route.destination): route.links for route in host.routes}
    assert links["a/cpu:1", "b/cpu:0"] == ("a up", "b down", "a/cpu:1->b/cpu:0")
    assert links["b/cpu:0", "a/cpu:0"] == ("b up", "a down", "b/cpu:0->a/cpu:0")
    assert links["a/cpu:0", "a/cpu:1"] == ("a/cpu:0->a/cpu:1",)
    assert {device.kind for device in host.devices} == {"cpu-core"}
    host = nodes_host(facts_of(["a", "a"]))
    assert not host.is_wired
    assert all(route.blocks_source for route in host.routes), "the source copies into memory that both share"


def test_unlike_machines_are_profiled_each() -> None:
    one, other = facts_of(["a", "b"])
    kinds = [device.kind for device in nodes_host((one, replace(other, cpu="Another"))).devices]
    assert kinds == ["cpu-core of Some CPU", "cpu-core of Another"]


def test_gpus_are_used_where_every_rank_has_one() -> None:
    one, other = facts_of(["a", "b"], gpu="Some GPU", gpu_bytes=1000, gpu_free_bytes=900)
    (device, _) = nodes_host((one, other)).devices
    assert (device.name, device.local_name, device.kind) == ("a/cuda:0", "cuda:0", "Some GPU")
    assert (device.memory_bytes, device.context_bytes) == (950, 100)
    assert nodes_host((one, replace(other, gpu=""))).devices[0].backend == "cpu"


def test_the_fingerprint_knows_machines_and_not_their_addresses() -> None:
    moved = nodes_host(facts_of(["a", "b"], address="10.0.0.7"))
    renamed = replace(TWO, devices=(TWO.devices[0], replace(TWO.devices[1], machine="c")))
    assert moved.fingerprint == TWO.fingerprint
    assert renamed.fingerprint != TWO.fingerprint
    assert host_from_dict(host_to_dict(TWO), "a file") == TWO


def test_a_host_is_checked_against_the_machines_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch)
    check_present(TWO)  # a worker, which has not joined, may run its part
    here, there = TWO.devices
    assert not is_here(there)
    monkeypatch.setattr(nodes, "_JOINED", nodes_of(facts_of(["a", "c"]))[:1])
    assert is_here(here)
    assert not is_here(there)
    with pytest.raises(UnknownName, match=r"machine in devices of host 'nodes' 'b'.*Known: a, c"):
        check_present(TWO)
    monkeypatch.setattr(nodes, "_JOINED", nodes_of(facts_of(["a", "b"]))[:1])
    check_present(replace(TWO, devices=(here, replace(there, cores=(4000,)))))  # of another machine
    crowd = nodes_host(facts_of(["a"] * 3 + ["b"]))
    with pytest.raises(InvalidValue, match=r"number of devices on machine 'a' is 3, expected at most 1"):
        check_present(crowd)
    with pytest.raises(InvalidValue, match=r"cores of device 'a/cpu:0' is \[4000\]"):
        check_present(replace(TWO, devices=(replace(here, cores=(4000,)), there)))


JOB = """
import sys
def main(answers, word, fails=False):
    print("from a library")
    for line in sys.stdin:
        print(f'"{line.strip()} {word}"', file=answers, flush=True)
    if fails:
        raise SystemExit(3)
"""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Nodes]]:
    (tmp_path / "job_of_a_test.py").write_text(JOB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(fresh_ranks.JOBS, "echo", "from job_of_a_test import main")
    ranks = nodes_of(facts_of(["a", "b"]))
    yield ranks
    ranks[0].end()


def test_the_first_rank_is_told_and_answers(two: list[Nodes]) -> None:
    serve(two[1])
    with contextlib.closing(FreshRanks(two[0], "echo", {"word": "back"})) as ranks:
        for word in ("there", "again"):
            ranks.tell(word)
            assert ranks.answer(60.0) == f"{word} back"


def test_a_rank_that_is_gone_is_named(two: list[Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_ranks, "LOST_AFTER_S", 0.5)
    with (
        contextlib.closing(FreshRanks(two[0], "echo", {"word": "back"})) as ranks,
        pytest.raises(RunnerError, match=r"rank 1 on 'b' gave no sign for 0.5 s"),
    ):
        ranks.answer(60.0)


def test_a_rank_that_fails_is_named(two: list[Nodes]) -> None:
    serve(two[1])
    with (
        contextlib.closing(FreshRanks(two[0], "echo", {"word": "back", "unknown": 1})) as ranks,
        pytest.raises(RunnerError, match=r"the echo of (b|rank 0) failed: TypeError: .*'unknown'"),
    ):
        ranks.answer(60.0)
