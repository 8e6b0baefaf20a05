"""Frames of one size for one host, and charts in characters."""

from __future__ import annotations

import numpy as np
import pytest
from fake_measurer import chain_problem
from random_problems import random_problem

from rlplace.errors import InvalidValue
from rlplace.measure.plan import Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.timeline import TEXT_COLUMNS, timeline_frame, timeline_text


def timeline(problem: Problem, devices: list[int]) -> Timeline:
    simulator = Simulator(problem, threads=1)
    return simulator.timeline(simulator.plan(np.array(devices, dtype=np.int32)))


def test_frames_of_a_host_have_one_size_however_much_is_sent() -> None:
    problem = chain_problem(6, num_devices=3)
    frames = [
        timeline_frame(timeline(problem, devices), problem.graph, problem.host, "A step")
        for devices in ([0] * 6, [0, 1, 2, 0, 2, 1])
    ]
    assert frames[0].shape == frames[1].shape
    assert (frames[0].shape[1:], frames[0].dtype) == ((1050, 3), np.uint8)
    assert (frames[0][-1] == 255).all()
    assert (frames[0] != 255).any()


def test_no_chart_is_taller_than_its_frame() -> None:
    for seed in range(6):
        problem = random_problem(np.random.default_rng(seed), 12)
        assert timeline_frame(Timeline.empty(12), problem.graph, problem.host, "Empty").shape[1] == 1050


def test_text_has_a_lane_for_each_device_in_proportion() -> None:
    problem = chain_problem(3)
    title, first, second, last = timeline_text(
        timeline(problem, [0, 0, 1]), problem.graph, problem.host, "Three"
    ).splitlines()
    assert title == "Three"
    lanes = [line.split("|")[1] for line in (first, second)]
    assert [len(lane) for lane in lanes] == [TEXT_COLUMNS] * 2
    assert lanes[0].rstrip(".") == "#" * lanes[0].count("#")  # from the start, without a break
    assert lanes[0].count("#") == pytest.approx(2 * lanes[1].count("#"), abs=2)
    assert int(first.split()[-3]) == pytest.approx(2 * int(second.split()[-3]), abs=2)
    assert last.startswith("step 3")


def test_an_empty_timeline_is_idle() -> None:
    problem = chain_problem(3)
    lines = timeline_text(Timeline.empty(3), problem.graph, problem.host, "Nothing").splitlines()
    assert all(line.endswith("|   0 % busy") for line in lines[1:-1])


def test_a_timeline_of_another_graph_is_refused() -> None:
    problem = chain_problem(3)
    with pytest.raises(InvalidValue, match="3, one for each op"):
        timeline_frame(Timeline.empty(4), problem.graph, problem.host, "Other")
