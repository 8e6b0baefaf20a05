"""What is kept of many placements, by hand."""

from __future__ import annotations

import numpy as np

from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan
from rlplace.training.searches.racing_host import Candidates


def rows(*values: int) -> np.ndarray:
    return np.array([[value, 0] for value in values], dtype=np.int32)


def plans(*values: int, rank: int = 0) -> list[Plan]:
    return [plan_of(row, rank) for row in rows(*values)]


def plan_of(devices: np.ndarray, rank: int = 0) -> Plan:
    """One plan of a placement, another for each rank: only the order differs."""
    none = np.zeros(0, dtype=np.int32)
    return Plan(devices, none, none, np.roll(np.arange(len(devices)), rank))


def firsts(kept: Candidates, count: int) -> list[int]:
    return [int(devices[0]) for devices in kept.next_to_measure(count)]


def ok(step_time_s: float, reference_s: float = 2.0) -> Measurement:
    return Measurement("ok", step_time_s, (step_time_s,), reference_s=reference_s)


def test_the_best_simulated_are_kept_once_each() -> None:
    kept = Candidates(capacity=2)
    kept.note(rows(0, 1, 2, 1), np.array([3.0, 1.0, 2.0, 1.0]))
    assert firsts(kept, 5) == [1, 2]
    kept.note(rows(3, 4), np.array([0.5, 9.0]))
    assert firsts(kept, 5) == [3, 1]


def test_measured_ones_are_ranked_by_the_median_of_their_ratios_and_never_measured_first_again() -> None:
    kept = Candidates(capacity=4)
    kept.note(rows(0, 1, 2), np.array([1.0, 2.0, 3.0]))
    kept.record(plans(0, 1), [ok(4.0), ok(1.0)])
    assert [c.plan.devices[0] for c in kept.best_measured(5)] == [1, 0]
    assert firsts(kept, 5) == [2]
    kept.record(plans(0), [ok(0.2)])
    assert kept.best_measured(1)[0].ratio == 0.5
    kept.record(plans(0), [ok(0.2)])  # ratios 2.0, 0.1, 0.1
    assert kept.best_measured(1)[0].plan.devices[0] == 0
    assert kept.num_measured == 4
    kept.note(rows(0), np.array([0.1]))  # measured before: not fresh again
    assert firsts(kept, 5) == [2]


def test_a_failed_measurement_counts_as_infinitely_slow() -> None:
    kept = Candidates()
    kept.record(plans(0, 1), [Measurement("error", float("inf"), why="no"), ok(5.0)])
    assert [c.plan.devices[0] for c in kept.best_measured(2)] == [1, 0]
    assert kept.best_measured(2)[1].ratio == float("inf")


def test_a_batch_is_of_placements_unlike_each_other_while_there_are_any() -> None:
    """Of 200 ops, one is less than a hundredth: near twins of the best wait until nothing else is left."""
    kept, base = Candidates(), np.zeros((4, 200), dtype=np.int32)
    base[1, 0] = base[2, 1] = 1  # twins of the first
    base[3, :50] = 1
    kept.note(base, np.array([1.0, 1.1, 1.2, 5.0]))
    assert np.array_equal(kept.next_to_measure(3), base[[0, 3, 1]])
    kept.record([plan_of(base[0])], [ok(1.0)])
    assert np.array_equal(kept.next_to_measure(1), base[[3]])


def test_plans_of_one_placement_are_told_apart_by_their_orders() -> None:
    kept = Candidates()
    kept.note(rows(0, 1), np.array([1.0, 2.0]))
    kept.record(plans(0), [ok(4.0)])
    kept.record(plans(0, rank=1), [ok(2.0)])
    best, other = kept.best_measured(2)
    assert (best.ratio, other.ratio) == (1.0, 2.0)
    assert best.plan is not None
    assert best.plan.fingerprint == plans(0, rank=1)[0].fingerprint
    assert firsts(kept, 5) == [1]
