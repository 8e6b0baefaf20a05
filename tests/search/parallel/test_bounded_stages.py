"""Pipelines whose stages may begin at some places only, against textbook schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_profiles import profile_problem
from random_problems import plain_host

import rlplace
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.parallel.bounded_stages import best_pipeline
from rlplace.search.parallel.step_roles import step_roles

LAYER_S = 0.1875
"""Seconds of a layer, forward and backward."""
HELD = 1000
"""Bytes that a layer with activations keeps of a micro-batch until its backward."""


def layers(folder: Path, count: int, micro_batches: int, num_devices: int = 2) -> Problem:
    """Equal layers; every second one sends nothing."""
    rows = [(62.5, 125, 0 if index % 2 else HELD, 0) for index in range(count)]
    return profile_problem(folder, rows, micro_batches, num_devices)


def test_equal_layers_are_cut_in_the_middle_with_the_textbook_bubble(tmp_path: Path) -> None:
    problem = layers(tmp_path, 4, 4)
    found = best_pipeline(problem, np.array([1, 2, 3]))
    assert found is not None
    assert (found.chosen, found.devices) == ((1,), (0, 1))
    assert found.step_s == (4 + 2 - 1) * 2 * LAYER_S
    assert found.work_s == pytest.approx((4 * 2 * LAYER_S,) * 2)


def test_a_stage_begins_nowhere_else(tmp_path: Path) -> None:
    problem = layers(tmp_path, 4, 4)
    found = best_pipeline(problem, np.array([1, 3]))
    assert found is not None
    assert sorted(found.work_s) == pytest.approx([4 * LAYER_S, 12 * LAYER_S])
    assert found.step_s > 12 * LAYER_S


def test_more_stages_where_they_are_faster(tmp_path: Path) -> None:
    problem = layers(tmp_path, 6, 8, num_devices=3)
    found = best_pipeline(problem, np.array([2, 4]))
    assert found is not None
    assert (len(found.devices), found.step_s) == (3, (8 + 3 - 1) * 2 * LAYER_S)
    two = best_pipeline(problem, np.array([2, 4]), devices=[2, 0])
    assert two is not None
    assert set(two.devices) == {0, 2}
    assert found.step_s < two.step_s


def test_places_are_moved_where_the_chain_alone_does_not_tell(tmp_path: Path) -> None:
    """Every other cut, and every device order, is no faster than what is found."""
    rows = [(50.0 * (1 + index % 3), 100.0 * (1 + index % 3), 40, 0) for index in range(7)]
    problem = profile_problem(tmp_path, rows, 4, 2)
    every = [best_pipeline(problem, np.array([place])) for place in range(1, 7)]
    found = best_pipeline(problem, np.arange(1, 7))
    assert found is not None
    assert found.step_s == min(one.step_s for one in every if one is not None)


def test_the_schedule_is_that_which_fits(tmp_path: Path) -> None:
    problem = layers(tmp_path, 4, 8)
    host = plain_host(2)
    small = replace(host, devices=tuple(replace(device, memory_bytes=3 * HELD) for device in host.devices))
    found = best_pipeline(replace(problem, host=small), np.array([2]))
    assert found is not None
    assert found.schedule == "1f1b"
    none = replace(host, devices=tuple(replace(device, memory_bytes=HELD // 2) for device in host.devices))
    assert best_pipeline(replace(problem, host=none), np.array([2])) is None


def test_1f1b_needs_as_many_micro_batches_as_stages(tmp_path: Path) -> None:
    found = best_pipeline(layers(tmp_path, 6, 2, num_devices=3), np.array([2, 4]))
    assert found is not None
    assert found.schedule == "gpipe" or len(found.devices) == 2


@pytest.mark.parametrize("places", [[], [0, 1], [2, 2], [3, 1], [4]])
def test_wrong_places_are_refused(places: list[int], tmp_path: Path) -> None:
    problem = layers(tmp_path, 4, 2)
    assert step_roles(problem.graph).num_positions == 4
    with pytest.raises(InvalidValue, match=r"pipeline: places is .*expected ascending places of 1\.\.3"):
        best_pipeline(problem, np.array(places, dtype=np.int64))


class Branches(torch.nn.Module):
    """Two branches that nothing but their sum connects."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def test_a_branch_waits_for_what_its_stage_is_handed() -> None:
    """Side by side, as the simulator has them, two branches would take half of what a pipeline of them takes."""
    x, count = torch.randn(4, 4), 2
    graph = rlplace.capture(Branches(), x, lambda output: output.square().mean(), "sgd", micro_batches=count)
    costs = Costs(np.repeat((graph.micro_batch >= 0)[:, None], 2, axis=1).astype(float), "estimated")
    problem = Problem(graph, plain_host(2), costs, Grouping(np.arange(graph.num_ops, dtype=np.int32)))
    step = step_roles(graph)
    begin = step.op_position[[module.startswith("right") for module in graph.modules]].min()
    found = best_pipeline(problem, np.array([begin]), devices=[0, 1], step=step)
    assert found is not None
    counted = (graph.micro_batch >= 0) & ~graph.is_source
    first_s, second_s = (float(np.sum(counted & ((step.op_position >= begin) == late))) for late in (False, True))
    assert found.step_s >= first_s / count + second_s
