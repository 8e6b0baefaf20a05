"""What is kept of many proposals, by hand."""

from __future__ import annotations

import numpy as np

from rlplace.measure.measurement import Measurement
from rlplace.training.candidates import Candidates


def rows(*values: int) -> np.ndarray:
    return np.array([[value, 0] for value in values], dtype=np.int32)


def ok(step_time_s: float, reference_s: float = 2.0) -> Measurement:
    return Measurement("ok", step_time_s, (step_time_s,), reference_s=reference_s)


def test_the_best_simulated_are_kept_once_each() -> None:
    kept = Candidates(capacity=2)
    kept.propose(rows(0, 1, 2, 1), np.array([3.0, 1.0, 2.0, 1.0]))
    assert [c.group_devices[0] for c in kept.next_to_measure(5)] == [1, 2]
    kept.propose(rows(3, 4), np.array([0.5, 9.0]))
    assert [c.group_devices[0] for c in kept.next_to_measure(5)] == [3, 1]
    assert kept.num_proposed == 6


def test_measured_ones_are_ranked_by_the_median_of_their_ratios_and_never_measured_first_again() -> None:
    kept = Candidates(capacity=4)
    kept.propose(rows(0, 1, 2), np.array([1.0, 2.0, 3.0]))
    batch = kept.next_to_measure(2)
    kept.record(batch, [ok(4.0), ok(1.0)])
    assert [c.group_devices[0] for c in kept.best_measured(5)] == [1, 0]
    assert [c.group_devices[0] for c in kept.next_to_measure(5)] == [2]
    kept.record(batch[:1], [ok(0.2)])
    assert kept.best_measured(1)[0].ratio == 0.5
    kept.record(batch[:1], [ok(0.2)])  # ratios 2.0, 0.1, 0.1
    assert kept.best_measured(1)[0].group_devices[0] == 0
    assert kept.num_measured == 4


def test_a_failed_measurement_counts_as_infinitely_slow() -> None:
    kept = Candidates()
    kept.propose(rows(0, 1), np.array([1.0, 2.0]))
    kept.record(kept.next_to_measure(2), [Measurement("error", float("inf"), why="no"), ok(5.0)])
    assert [c.group_devices[0] for c in kept.best_measured(2)] == [1, 0]
    assert kept.best_measured(2)[1].ratio == float("inf")
