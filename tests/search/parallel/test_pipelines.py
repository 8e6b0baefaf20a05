"""Pipelines whose stages may begin at some places only, against textbook schedules.

Schedules that textbooks work out: data parallelism by hand, GPipe's and 1F1B's bubbles and memory.
"""

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
from rlplace.graphs import BACKWARD, FORWARD
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.hybrid import Field, solve_data_parallel
from rlplace.search.parallel.layouts import Layout, placement_of, step_roles
from rlplace.search.parallel.pipelines import best_pipeline, most_under_way, one_f_one_b, phase_priorities
from rlplace.search.task import Task

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


F_S, B_S = 0.125, 0.25
"""Seconds of a stage's forward and backward: powers of two, so that sums of them are exact."""
"""Bytes that a stage keeps of a micro-batch until its backward."""


def pipeline(folder: Path, stages: int, micro_batches: int) -> tuple[Problem, np.ndarray]:
    """Equal stages of two layers each, a device each: the first keeps its output, the second sends nothing."""
    rows = [row for _ in range(stages) for row in ((62.5, 125, HELD, 0), (62.5, 125, 0, 0))]
    problem = profile_problem(folder, rows, micro_batches, stages)
    stage = [(int(module.partition(".")[0].removeprefix("node")) - 1) // 2 for module in problem.graph.modules]
    return problem, np.array(stage, dtype=np.int32)


def one_f_one_b_of(problem: Problem, devices: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Step time and peaks of 1F1B."""
    step = step_roles(problem.graph)
    count, stages = problem.graph.num_micro_batches, problem.host.num_devices
    chain = Layout(
        devices=np.arange(stages, dtype=np.int32)[:, None],
        role_stage=devices[np.unique(step.role, return_index=True)[1]],
        replica=np.zeros(count, dtype=np.int32),
    )
    assert np.array_equal(placement_of(problem, chain, step), devices)
    limit = most_under_way(chain)
    assert limit.tolist() == list(range(stages, 0, -1))
    done = Simulator(problem, threads=1).retime(one_f_one_b(problem, step, chain, devices, limit))
    return done.step_time_s, done.peak_bytes


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_gpipe_and_1f1b_have_their_textbook_bubble(stages: int, micro_batches: int, tmp_path: Path) -> None:
    """Huang et al. 2019: (p - 1) / (m + p - 1) of the step, with equal stages and nothing to send."""
    problem, devices = pipeline(tmp_path, stages, micro_batches)
    simulator = Simulator(problem, threads=1)
    work_s = micro_batches * (F_S + B_S)
    for priorities in (phase_priorities(problem, FORWARD), phase_priorities(problem, BACKWARD)):
        step_s = float(simulator.step_times(devices[None], priorities)[0])
        assert step_s == (micro_batches + stages - 1) * (F_S + B_S)
        assert (step_s - work_s) / step_s == (stages - 1) / (micro_batches + stages - 1)
    if micro_batches > 1:
        assert one_f_one_b_of(problem, devices)[0] == step_s


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 8), (4, 6), (4, 3)])
def test_1f1b_keeps_p_minus_s_micro_batches_where_gpipe_keeps_all(
    stages: int, micro_batches: int, tmp_path: Path
) -> None:
    problem, devices = pipeline(tmp_path, stages, micro_batches)
    gpipe = Simulator(problem, threads=1).plan_and_time(devices, phase_priorities(problem, FORWARD))[1]
    gradient = HELD  # of what the first layer gave: there while the stage's backward runs
    assert gpipe.peak_bytes == (micro_batches * HELD + gradient,) * stages
    peaks = one_f_one_b_of(problem, devices)[1]
    kept = [min(stages - stage, micro_batches) for stage in range(stages)]
    assert peaks == tuple(count * HELD + gradient for count in kept)


def test_data_parallelism_by_hand(tmp_path: Path) -> None:
    """Two layers of 1 s forward and 2 s backward on two devices, 100 bytes a second each way, two micro-batches.

    d0 owns l1 (200 bytes), d1 owns l0 (100). Each sends its parameter to the other at once: l0 is there at 1 s, l1 at
    2 s. d0 works from 1 s to 7 s (l0 forward, l1 forward, l1 backward, l0 backward); d1 runs l0 forward at 0 s, waits
    for l1 until 2 s, and is through at 7 s too. The gradient of l1 is sent from 5 s to 7 s, that of l0 from 7 s to 8 s.
    """
    problem = profile_problem(tmp_path, [(1000, 2000, 10, 100), (1000, 2000, 20, 200)], 2, plain_host(2))
    task = Task(problem, Simulator(problem, threads=1))
    solve_data_parallel(task)
    assert task.best_s == 8.0
    assert task.best_devices is not None
    assert task.best_plan is not None
    device = dict(zip(problem.graph.names, task.best_devices.tolist(), strict=True))
    for layer, owner in (("node1.l0", 1), ("node2.l1", 0)):
        assert [device[f"{layer}.{word}.{k}"] for word in ("forward", "backward") for k in (0, 1)] == [0, 1, 0, 1]
        assert [device[name] for name in (layer, f"{layer}.gradient", f"{layer}.update")] == [owner] * 3
    measured = Simulator(problem, threads=1).retime(task.best_plan)
    # d0 from 5 s: l1, copy of l0, its output, gradient to it, gradients of l1 (own and received) and of l0
    # d1 from 3 s: l0, copy of l1, both outputs, gradient to the first, gradient of l1
    assert measured.peak_bytes == (200 + 100 + 10 + 10 + 200 + 200 + 100, 100 + 200 + 10 + 20 + 10 + 200)
    timeline = Simulator(problem, threads=1).timeline(task.best_plan)
    start = dict(zip(problem.graph.names, timeline.op_start_s.tolist(), strict=True))
    assert [start[f"node1.l0.forward.{k}"] for k in (0, 1)] == [1.0, 0.0]
    assert [start[f"node2.l1.backward.{k}"] for k in (0, 1)] == [3.0, 3.0]
    assert [start[name] for name in ("node2.l1.gradient", "node1.l0.gradient")] == [7.0, 8.0]
    assert sorted(zip(timeline.transfer_start_s.tolist(), timeline.transfer_end_s.tolist(), strict=True)) == [
        (0.0, 1.0), (0.0, 2.0), (5.0, 7.0), (7.0, 8.0)
    ]  # fmt: skip


def test_the_field_keeps_its_orders_apart(tmp_path: Path) -> None:
    """A pipeline whose memory holds 1F1B's micro-batches, not GPipe's."""
    problem, devices = pipeline(tmp_path, 2, 8)
    host = plain_host(2)
    small = replace(host, devices=tuple(replace(device, memory_bytes=3 * HELD) for device in host.devices))
    tight = replace(problem, host=small)
    task = Task(tight, Simulator(tight, threads=1))
    field = Field(task)
    stage = devices[np.unique(field.step.role, return_index=True)[1]]
    chain = Layout(np.array([[0], [1]], dtype=np.int32), stage, np.zeros(8, dtype=np.int32))
    assert field.try_orders(chain, ("gpipe",)).step_s == np.inf
    assert field.try_orders(chain).order == "1f1b"
    assert task.best_s == 9 * (F_S + B_S)
