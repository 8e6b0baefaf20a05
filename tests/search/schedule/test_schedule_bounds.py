"""What is known of every schedule before it begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem
from schedule_stepper import Stepper
from search_problems import barred, chain_problem, fork_problem, tight_problem

from rlplace.errors import UnknownName
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.schedule.list_schedule import host_resources


def test_longest_paths_take_the_least_times_that_pins_allow() -> None:
    problem = fork_problem(seed=0)
    problem = replace(problem, costs=replace(problem.costs, op_time_s=np.array([[1.0, 2.0]] * 6)))
    free, tied = Stepper(problem).bounds, Stepper(barred(problem, {0: (1,)})).bounds
    # ops 1, 2 and 3 read 0, and 4 and 5 read them
    assert free.least_end_s.tolist() == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert free.least_after_s.tolist() == [2.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert (free.least_s, tied.least_s) == (3.0, 4.0)
    assert free.first_op.tolist() == list(range(6))
    assert free.speed.tolist() == [1.0, 0.5]
    assert free.rank[0] == 1.0


def test_pools_are_one_memory() -> None:
    problem = chain_problem(2, 3)
    sizes, pools = (50, 40, 60), ("ram", "", "ram")
    devices = tuple(
        replace(device, context_bytes=10, memory_bytes=size, memory_pool=pool)
        for device, size, pool in zip(problem.host.devices, sizes, pools, strict=True)
    )
    resources = host_resources(replace(problem, host=replace(problem.host, devices=devices)))
    assert resources.account.tolist() == [3, 1, 3]
    assert (resources.room_bytes[1], resources.room_bytes[3]) == (30.0, 30.0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000))
def test_what_lacks_room_for_what_is_resident_does_not_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 16)
    placement = problem.draw_groups(rng, 1)[0]
    filled = Stepper(problem).place(placement, np.arange(16)).filled[0]
    if (filled > Stepper(problem).layout.host.room_bytes).any():
        assert np.isinf(Simulator(problem, threads=1).step_times(placement[None])).all()


def test_a_mistyped_mask_is_named() -> None:
    with pytest.raises(UnknownName, match="resident"):
        Stepper(tight_problem(2, 2), memory_mask="residents")
