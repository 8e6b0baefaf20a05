"""Data parallelism: shares of a batch, the ring by hand, and real replicas."""

from __future__ import annotations

import pytest

from rlplace.compare.replicas import ReplicaTeam, ring_all_reduce_s, with_batch_share
from rlplace.errors import InvalidValue, RunnerError
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.workloads import WorkloadSpec, parse_workload

CORE = Device("cpu", "cpu-core", "cpu", 1 << 30)
"""Pinned nowhere."""
TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"


def full_mesh(count: int, *, shared: bool) -> Host:
    """Every pair by its own link of 10 bytes/s and 1 s of latency, or all by one bus."""
    names = [f"d:{k}" for k in range(count)]
    devices = tuple(Device(name, "d", "simulated", 1 << 30) for name in names)
    pairs = [(a, b) for a in names for b in names if a != b]
    links = (Link("bus", 10.0, 1.0),) if shared else tuple(Link(f"{a}>{b}", 10.0, 1.0) for a, b in pairs)
    return Host("mesh", devices, links, tuple(Route(a, b, ("bus" if shared else f"{a}>{b}",)) for a, b in pairs))


def test_a_ring_by_hand() -> None:
    # 4 devices, 80 bytes: 6 rounds, each 1 s of latency and 20 bytes at 10 bytes/s; on one bus four hops share it
    assert ring_all_reduce_s(full_mesh(4, shared=False), [0, 1, 2, 3], 80.0) == pytest.approx(6 * (1 + 2))
    assert ring_all_reduce_s(full_mesh(4, shared=True), [0, 1, 2, 3], 80.0) == pytest.approx(6 * (1 + 8))
    assert ring_all_reduce_s(full_mesh(2, shared=False), [0, 1], 80.0) == pytest.approx(2 * (1 + 4))
    assert ring_all_reduce_s(full_mesh(2, shared=False), [1], 80.0) == 0.0


def test_a_share_of_the_batch() -> None:
    share = with_batch_share(parse_workload(TINY), 2, "small")
    assert dict(share.options)["batch"] == 2
    assert share.config().units == 8  # type: ignore[union-attr]
    assert with_batch_share(parse_workload("nmt"), 4, "paper").config().batch == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(("text", "words"), [("nmt@batch=3", "multiple of 2"), ("some.module:function", "batch")])
def test_what_cannot_be_shared_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        with_batch_share(parse_workload(text), 2, "small")


@pytest.mark.slow
def test_replicas_step_together() -> None:
    team = ReplicaTeam(parse_workload(TINY), [CORE, CORE], default_size="small", seed=0)
    try:
        assert all(team() > 0 for _ in range(3))
    finally:
        team.close()


@pytest.mark.slow
def test_a_replica_that_cannot_start_says_why() -> None:
    with pytest.raises(RunnerError, match="no_such_module"):
        ReplicaTeam(WorkloadSpec("no_such_module:f"), [CORE], default_size="small", seed=0)
