"""The doctor under torchrun: which machine reaches which, and versions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from many_ranks import at_once, facts_of, nodes_of

from rlplace.doctor import Finding, System, machines
from rlplace.doctor.machines import check_machines, look_at_machines
from rlplace.measure.hosts.nodes import Nodes
from rlplace.measure.profiling import machine_links
from rlplace.measure.profiling.machine_links import Figures

LINKS = {("a", "b"): Figures(1e-4, 1e8, 1e8)}


def findings(ranks: list[Nodes], monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    monkeypatch.setattr(machines, "under_torchrun", lambda: True)
    monkeypatch.setattr(machines, "join", lambda: ranks[0])
    monkeypatch.setattr(machine_links, "measured_links", lambda _: LINKS)
    jobs = [lambda: list(check_machines(System())), *(partial(look_at_machines, each) for each in ranks[1:])]
    return {finding.name: finding for finding in at_once(jobs)[0]}


def test_machines_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(nodes_of(facts_of(["a", "a", "b"])), monkeypatch)
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(
        ("machines", "versions", "reach", "link a to b"), "ok"
    )
    assert found["machines"].found == "a: 2 ranks, lo 127.0.0.1, b: 1 rank, lo 127.0.0.1"


def test_a_machine_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = facts_of(["a", "b"])
    ranks = nodes_of((one, replace(other, address="127.0.0.2")))
    ranks[1] = replace(ranks[1], address="127.0.0.3")  # where it listens, which the others do not know
    found = findings(ranks, monkeypatch)
    assert found["reach"].verdict == "fail"
    assert "a cannot reach b (127.0.0.2:" in found["reach"].found
    assert "GLOO_SOCKET_IFNAME" in found["reach"].remedy
    assert "link a to b" not in found, "what cannot be measured is not looked at"


def test_versions_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = facts_of(["a", "b"])
    found = findings(nodes_of((one, replace(other, versions={"torch": "2.8"}))), monkeypatch)
    assert found["versions"].verdict == "fail"
    assert found["versions"].found == "torch: a has 2.9, b has 2.8"
