"""Schedules that textbooks work out: data parallelism by hand, GPipe's and 1F1B's bubbles and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layer_profiles import profile_problem
from random_problems import plain_host

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.hybrid import Field, solve_data_parallel
from rlplace.search.parallel.layouts import Layout, placement_of
from rlplace.search.parallel.micro_batch_orders import (
    backward_first_priorities,
    gpipe_priorities,
    most_under_way,
    one_f_one_b,
)
from rlplace.search.parallel.step_roles import step_roles
from rlplace.search.task import Task

F_S, B_S = 0.125, 0.25
"""Seconds of a stage's forward and backward: powers of two, so that sums of them are exact."""
HELD = 1000
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
    limit = most_under_way(chain, count)
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
    for priorities in (gpipe_priorities(problem), backward_first_priorities(problem)):
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
    gpipe = Simulator(problem, threads=1).plan_and_time(devices, gpipe_priorities(problem))[1]
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
