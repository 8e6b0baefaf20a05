"""`SequentialBatch` on schedules that are worked out by hand, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host
from search_problems import barred, chain_problem, tight_problem

from rlplace.env import DECISION_FEATURES, SequentialBatch
from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem


def two_ops() -> Problem:
    """A reader of 100 bytes, which take a second: 1 or 2 seconds, then 2 or 1.5."""
    graph = op_graph([[], [0]], [100, 1])
    costs = Costs(np.array([[1.0, 2.0], [2.0, 1.5]]), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.arange(2)))


def rows(features: np.ndarray) -> dict[str, list[float]]:
    """Features of one episode by name, one figure a device."""
    return {name: features[:, index].tolist() for index, name in enumerate(DECISION_FEATURES)}


def test_every_feature_by_hand() -> None:
    batch = SequentialBatch(two_ops(), 1)
    unit = 6.5 / 4  # the mean cost of a group, and of the load of a device
    first = rows(batch.observe().features[0])
    nothing = (
        "cut_in",
        "cut_out",
        "twin",
        "module",
        "order",
        "micro",
        "wait",
        "busy",
        "backward",
        "micro_batch",
        "decided",
    )
    assert {name: first[name] for name in nothing} == {name: [0.0, 0.0] for name in nothing}
    assert first["finish"] == pytest.approx([0.0, 1.0 / unit])
    assert first["cost"] == first["load"] == pytest.approx([1.0 / unit, 2.0 / unit])
    # the step takes 2.5 seconds at least: 1 and 1.5
    assert first["delay"] == pytest.approx([0.0, 1.0 / unit])
    assert first["slowness"] == pytest.approx([1.0 / 1.5, 2.0 / 1.5])
    assert first["speed"] == pytest.approx([1.0, 3.0 / 3.5])
    assert first["rank"] == first["exact"] == first["allowed"] == [1.0, 1.0]
    assert first["memory"] == pytest.approx([0.0, 0.0], abs=1e-9)

    batch.step(np.array([0]))
    then = rows(batch.observe().features[0])
    # there at 1, or at 2 by a copy of a second
    assert then["finish"] == pytest.approx([0.0, 0.5 / unit])
    assert then["wait"] == pytest.approx([0.0, 2.0 / unit])
    assert then["cut_in"] == pytest.approx([0.0, 1.0 / unit])
    assert then["delay"] == pytest.approx([0.5 / unit, 1.0 / unit])
    assert then["load"] == pytest.approx([3.0 / unit, 1.5 / unit])
    assert then["module"] == then["order"] == then["micro"] == [0.0, 1.0]
    assert then["busy"] == [1.0, 0.0]
    assert then["decided"] == [0.5, 0.5]
    assert then["rank"] == pytest.approx([1.75 / 4.25] * 2)


def test_episodes_go_their_own_ways_in_step() -> None:
    batch = SequentialBatch(two_ops(), 3)
    assert batch.observe().group.tolist() == [0, 0, 0]
    assert (batch.is_done, batch.num_steps, batch.partial_s.tolist()) == (False, 0, [0.0] * 3)
    assert batch.bound_s.tolist() == [batch.least_s] * 3 == [2.5] * 3
    batch.step(np.array([0, 0, 1]))
    assert batch.partial_s.tolist() == [1.0, 1.0, 2.0]
    assert batch.bound_s.tolist() == [2.5, 2.5, 3.5]
    batch.step(np.array([0, 1, 1]))
    assert batch.is_done
    assert batch.placed.tolist() == [[0, 0], [0, 1], [1, 1]]
    assert batch.partial_s.tolist() == batch.bound_s.tolist() == [3.0, 3.5, 3.5]
    seen = batch.observe()
    assert (seen.group.tolist(), seen.features.any(), seen.mask.all()) == ([-1] * 3, False, True)
    batch.reset()
    assert (batch.is_done, batch.observe().group.tolist()) == (False, [0, 0, 0])


def test_a_group_that_is_chosen_early_waits_in_the_schedule() -> None:
    batch = SequentialBatch(two_ops(), 1)
    seen = rows(batch.observe(np.array([1])).features[0])
    # it cannot end before 1 + 2 or 1 + 1.5
    assert seen["exact"] == [0.0, 0.0]
    assert seen["finish"] == pytest.approx([0.5 / (6.5 / 4), 0.0])
    batch.step(np.array([1]), np.array([1]))
    assert (batch.partial_s[0], batch.observe().group.tolist()) == (0.0, [0])
    batch.step(np.array([0]))
    assert batch.partial_s.tolist() == [3.5]


def test_priorities_say_which_group_comes_next() -> None:
    batch = SequentialBatch(chain_problem(4, 2), 2, order=np.array([0.0, 2.0, 1.0, 2.0]))
    turns = []
    while not batch.is_done:
        turns.append(batch.observe().group.tolist())
        batch.step(np.array([0, 1]))
    assert turns == [[1, 1], [3, 3], [2, 2], [0, 0]]
    assert batch.observe().group.tolist() == [-1, -1]
    batch.reset()
    batch.step(np.array([0, 0]), np.array([1, 2]))
    assert batch.observe().group.tolist() == [3, 1]


def test_all_groups_can_be_looked_at() -> None:
    batch = SequentialBatch(barred(chain_problem(3, 2), {2: (1,)}), 2)
    batch.step(np.array([0, 1]))
    features, mask = batch.observe_all(1)
    assert mask.tolist() == [[False, False], [True, True], [False, True]]
    assert not features[0].any()
    alone = batch.observe(np.array([2, 2]))
    assert np.array_equal(features[2], alone.features[1])


def test_another_grouping_is_scheduled_by_its_own_groups() -> None:
    problem = chain_problem(4, 2)
    batch = SequentialBatch(problem, 1, Grouping(np.array([0, 1, 0, 1])))
    batch.step(np.array([0]))
    assert batch.partial_s.tolist() == [1.0]
    batch.step(np.array([0]))
    assert (batch.is_done, batch.partial_s.tolist()) == (True, [4.0])


def test_memory_masks_can_be_left_out() -> None:
    masks = []
    for memory_mask in ("resident", "none"):
        batch = SequentialBatch(tight_problem(2, 2), 1, memory_mask=memory_mask)
        batch.step(np.array([0]))
        masks.append(batch.observe().mask[0].tolist())
    assert masks == [[False, True], [True, True]]


def test_bad_use_is_named() -> None:
    problem = chain_problem(2, 2)
    with pytest.raises(InvalidValue, match="num_episodes"):
        SequentialBatch(problem, 0)
    for order in ([1.0], [1.0, np.nan]):
        with pytest.raises(InvalidValue, match="order"):
            SequentialBatch(problem, 1, order=np.array(order))
    batch = SequentialBatch(problem, 2)
    for devices in ([0], [0.0, 1.0], [0, 2], [-1, 0]):
        with pytest.raises(InvalidValue, match="device"):
            batch.step(np.array(devices))
    with pytest.raises(InvalidValue, match="group is 2"):
        batch.observe(np.array([0, 2]))
    batch.step(np.array([0, 0]))
    with pytest.raises(InvalidValue, match="undecided"):
        batch.step(np.array([0, 0]), np.array([1, 0]))
    batch.step(np.array([0, 0]))
    with pytest.raises(InvalidValue, match="reset"):
        batch.step(np.array([0, 0]))
