"""What is told of a placement that went to another host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from elastic_hosts import simulated_host
from search_problems import chain_problem

from rlplace.training.elastic.carried import CarriedCosts, match_devices
from rlplace.training.elastic.placed_again import describe_costs, device_lines, move_lines, moves

OLD, NEW = simulated_host(*["fast"] * 3), simulated_host("fast", "fast")
MATCH = match_devices(OLD, NEW)


def test_what_moved_is_counted_by_pairs_of_devices() -> None:
    problem = dataclasses.replace(chain_problem(6, 2), host=NEW)
    before = np.array([0, 0, 1, 1, 2, 2], dtype=np.int32)
    after = np.array([0, 1, 1, 1, 0, 0], dtype=np.int32)
    moved = moves(problem, MATCH, before, after)
    assert (moved["num_ops"], moved["share"]) == (3, pytest.approx(0.5))
    assert [(pair["from"], pair["to"], pair["num_ops"]) for pair in moved["pairs"]] == [
        ("gpu:2", "gpu:0", 2),
        ("gpu:0", "gpu:1", 1),
    ]
    first, second, third = move_lines(moved, 6)
    assert first == "moved: 3 of 6 ops, 50% of the step's time"
    assert second == "  gpu:2 to gpu:0: 2 ops, 33%"
    assert third == "  gpu:0 to gpu:1: 1 op, 17%"


def test_many_pairs_are_not_all_told() -> None:
    pairs = [{"from": "a", "to": "b", "num_ops": 1, "share": 0.1}] * 9
    assert move_lines({"num_ops": 9, "share": 0.9, "pairs": pairs}, 10)[-1] == "  and between 3 more pairs of devices"
    assert move_lines({"num_ops": 0, "share": 0.0, "pairs": []}, 10) == ["no op moved"]


def test_devices_are_told_where_they_changed() -> None:
    assert device_lines(MATCH) == ["gone: gpu:2"]
    assert device_lines(match_devices(NEW, OLD)) == ["added: gpu:2"]
    renamed = match_devices(simulated_host("fast", "slow"), simulated_host("slow", "fast"))
    assert device_lines(renamed) == ["devices: gpu:0 is gpu:1 now, gpu:1 is gpu:0 now"]


def test_costs_are_told_by_kind() -> None:
    costs = chain_problem(2, 2).costs
    assert describe_costs(CarriedCosts(costs, ("fast",), ("slow",)), MATCH) == {
        "known": ["fast"],
        "estimated": ["slow"],
        "profiled": [],
    }
    assert describe_costs(None, MATCH)["profiled"] == ["fast"]
