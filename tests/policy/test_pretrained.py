"""Weights that come with the package: they are there, small, and better than weights drawn at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_problems import plain_host

import rlplace
from rlplace.env.sequential import GROUPINGS, ListSchedules
from rlplace.errors import UnknownName
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy.base import pretrained_kinds, pretrained_path
from rlplace.policy.schedule import propose
from rlplace.policy.schedule_network import load_network


def test_shipped_weights_are_in_the_package_and_small() -> None:
    folder = Path(rlplace.__file__).parent / "policy" / "weights"
    assert pretrained_kinds()
    for kind in pretrained_kinds():
        path = pretrained_path(kind)
        assert path.parent == folder
        assert path.with_suffix(".json").is_file()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6


def test_a_kind_without_weights_is_told_those_with() -> None:
    with pytest.raises(UnknownName, match=r"schedule.*FILE\.safetensors"):
        pretrained_path("schedul")


def test_guesses_of_the_shipped_weights_beat_random_ones() -> None:
    """A mixture of experts on four devices: the first guess against the mean of weights drawn over all groupings."""
    graph = synthetic("mixture_of_experts", seed=11, layers=3, experts=6)
    times = np.random.default_rng(0).lognormal(0.0, 0.5, (graph.num_ops, 1)) * graph.flops[:, None] / 1e13
    host = plain_host(4, bandwidth_bytes_per_s=2e10, latency_s=1e-5)
    problem = Problem.grouped(graph, host, Costs(np.repeat(times, 4, axis=1), "estimated"))
    simulator = Simulator(problem, threads=1)
    weights = np.random.default_rng(0).uniform(0.0, 4.0, (8, 9)).tolist()
    drawn = ListSchedules(problem).place([(name, tuple(row)) for row in weights for name in GROUPINGS])
    random_s = np.exp(np.log(simulator.step_times(drawn)).mean())
    guessed_s = simulator.step_times(propose(problem, load_network(pretrained_path("schedule")), 4).devices)
    assert guessed_s[0] < random_s
    assert guessed_s.min() < 0.9 * random_s
