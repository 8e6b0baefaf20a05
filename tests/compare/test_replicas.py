"""Data parallelism: shares of a batch, and real replicas."""

from __future__ import annotations

import pytest

from rlplace.compare.replicas import ReplicaTeam, with_batch_share
from rlplace.errors import InvalidValue, RunnerError
from rlplace.measure.hosts.host import Device
from rlplace.workloads import WorkloadSpec, parse_workload

CORE = Device("cpu", "cpu-core", "cpu", 1 << 30)
"""Pinned nowhere."""
TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"


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
