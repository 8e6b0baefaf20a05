"""Which device of a new host stands for which of the old one."""

from __future__ import annotations

import dataclasses

from core_hosts import core_host
from elastic_hosts import simulated_host, without

from rlplace.training.elastic.carried import GONE, match_devices


def test_a_host_is_matched_to_itself() -> None:
    host = simulated_host("fast", "slow", "fast")
    match = match_devices(host, host)
    assert match.to == (0, 1, 2)
    assert (match.gone, match.added) == ((), ())
    assert match.links == {link.name: (link.name,) for link in host.links}
    assert match.same_links == {link.name: link.name for link in host.links}


def test_the_last_device_that_has_no_name_and_no_kind_to_go_to_is_gone() -> None:
    host = simulated_host(*["fast"] * 4)
    match = match_devices(host, without(host, "gpu:1"))
    assert match.to == (0, GONE, 1, 2)
    assert match.gone == ("gpu:1",)


def test_more_devices_are_added() -> None:
    match = match_devices(simulated_host("fast", "fast"), simulated_host(*["fast"] * 3))
    assert match.to == (0, 1)
    assert match.added == ("gpu:2",)


def test_a_kind_counts_more_than_a_name_alone() -> None:
    match = match_devices(simulated_host("fast", "slow"), simulated_host("slow", "fast"))
    assert match.to == (1, 0)
    assert match.renamed == {"gpu:0": "gpu:1", "gpu:1": "gpu:0"}


def test_a_name_counts_where_no_kind_is_left() -> None:
    match = match_devices(simulated_host("fast", "fast"), simulated_host("slow", "slow", "fast"))
    assert match.to == (2, 1)


def test_a_gang_stands_for_no_core() -> None:
    match = match_devices(core_host(2, has_gang=True), core_host(3))
    assert match.to == (0, 1, GONE)
    assert match.gone == ("cpu:all",)


def test_links_of_new_devices_are_like_those_between_devices_of_their_kinds() -> None:
    old = core_host(2)
    match = match_devices(old, core_host(3))
    assert match.links["cpu:0->cpu:1"] == ("cpu:0->cpu:1",)
    assert match.same_links == {link.name: link.name for link in old.links}
    assert set(match.links["cpu:2->cpu:0"]) == {"cpu:0->cpu:1", "cpu:1->cpu:0"}
    other = core_host(3)
    other = dataclasses.replace(other, devices=tuple(dataclasses.replace(d, kind="other") for d in other.devices))
    assert set(match_devices(old, other).links.values()) == {()}
