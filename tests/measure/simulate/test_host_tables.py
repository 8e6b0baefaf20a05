"""A host as arrays: kinds of route, the devices behind gangs, accounts of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_hosts import core_host
from random_problems import plain_host

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Host
from rlplace.measure.simulate.compiled_problem import (
    HANDOVER,
    JOB,
    QUEUED,
    account_limits,
    account_names,
    atoms_of,
    padded_routes,
    route_tables,
)


def with_members(host: Host, members: dict[str, tuple[str, ...]]) -> Host:
    return replace(host, devices=tuple(replace(d, members=members.get(d.name, ())) for d in host.devices))


def test_routes_are_copies_beside_ops_or_jobs_and_have_their_links_in_order() -> None:
    host = plain_host(2)
    index = {link.name: k for k, link in enumerate(host.links)}
    kinds, blocks_source, offsets, links = route_tables(host)
    assert kinds.tolist() == [0, QUEUED, QUEUED, 0]
    assert not blocks_source.any()
    assert offsets.tolist() == [0, 0, 2, 4, 4]
    assert links.tolist() == [index[name] for route in host.routes for name in route.links]
    first, second, third, fourth = links.tolist()
    assert padded_routes(offsets, links).tolist() == [0, 0, first, second, third, fourth, 0, 0]
    jobs = replace(host, routes=tuple(replace(r, blocks_source=True, blocks_destination=True) for r in host.routes))
    assert route_tables(jobs)[0].tolist() == [0, JOB, JOB, 0]
    assert route_tables(jobs)[1].tolist() == [0, 1, 1, 0]


def test_a_route_without_links_is_a_hand_over() -> None:
    kinds = route_tables(core_host(2, has_gang=True))[0].reshape(3, 3)
    assert kinds[2, :2].tolist() == kinds[:2, 2].tolist() == [HANDOVER, HANDOVER]


def test_short_routes_are_padded_with_their_first_link() -> None:
    assert padded_routes(np.array([0, 1, 3], np.int32), np.array([4, 5, 6], np.int32)).tolist() == [4, 4, 5, 6]


def test_a_gang_keeps_its_single_devices_busy_also_through_another_gang() -> None:
    host = with_members(plain_host(4), {"d2": ("d0", "d1"), "d3": ("d2",)})
    assert atoms_of(host).tolist() == [0b01, 0b10, 0b11, 0b11]


def test_gangs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UnknownName, match="d9"):
        atoms_of(with_members(plain_host(2), {"d1": ("d9",)}))
    with pytest.raises(InvalidValue, match="single devices"):
        atoms_of(with_members(plain_host(2), {"d1": ("d1",)}))


def test_devices_that_share_a_pool_have_an_account_more() -> None:
    host = plain_host(3)
    sizes = zip(host.devices, (10, 30, 20), ("", "ram", "ram"), strict=True)
    pooled = replace(host, devices=tuple(replace(d, memory_bytes=size, memory_pool=pool) for d, size, pool in sizes))
    assert account_names(pooled) == ("d0", "d1", "d2", "ram")
    pool, capacity = account_limits(pooled)
    assert (pool.tolist(), capacity.tolist()) == ([-1, 3, 3], [10, 30, 20, 20])
    alone = replace(pooled, devices=(*pooled.devices[:2], replace(pooled.devices[2], memory_pool="other")))
    assert account_names(alone) == ("d0", "d1", "d2"), "a pool of one is that one's memory"
