"""What is kept of a timeline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fake_measurer import chain_problem

from rlplace.measure import Simulator
from rlplace.store.rows import summarise


def test_ops_and_copies_are_added_up_by_type_and_device() -> None:
    problem = chain_problem(4)
    simulator = Simulator(problem)
    timeline = simulator.timeline(simulator.plan(np.array([0, 1, 1, 0], dtype=np.int32)))
    told = summarise(problem, timeline)
    assert told["step_s"] == timeline.op_end_s.max()
    assert [row[:3] for row in told["ops"]] == [["aten.op", "d0", 2], ["aten.op", "d1", 2]]
    assert [row[3] for row in told["ops"]] == pytest.approx([2.0, 2.0])
    assert [row[:4] for row in told["copies"]] == [["d0", "d1", 1, 1], ["d1", "d0", 1, 1]]
    unseen = dataclasses.replace(timeline, memory_time_s=np.zeros(0), memory_device=np.zeros(0, np.int32))
    unseen = dataclasses.replace(unseen, memory_bytes=np.zeros(0, np.int64))
    assert summarise(problem, unseen)["peak_bytes"] == []
