"""What an error makes of a measurement, and what a race does."""

from __future__ import annotations

import numpy as np

from rlplace.errors import DeviceLost
from rlplace.measure.measurement import Measurement
from rlplace.measure.timing.outcomes import as_measurement, status_of
from rlplace.measure.timing.race import Lane


def test_the_status_that_an_error_gives() -> None:
    gone = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    assert status_of(gone) == status_of(DeviceLost(("cpu:1",), "gone")) == "lost"
    assert status_of(RuntimeError("CUDA out of memory")) == status_of(MemoryError("no room")) == "oom"
    assert status_of(TimeoutError("late")) == "timeout"
    assert status_of(ValueError("boom")) == "error"


def test_a_lane_becomes_its_median_beside_that_of_the_reference() -> None:
    lane = Lane([3.0, 1.0, 2.0], [5.0, 4.0, 9.0])
    assert as_measurement(lane, has_reference=True) == Measurement("ok", 2.0, (3.0, 1.0, 2.0), reference_s=5.0)
    assert as_measurement(lane, has_reference=False).reference_s == 0.0


def test_a_lane_that_was_stopped_keeps_its_samples_and_says_why() -> None:
    measured = as_measurement(Lane([3.0], [1.0], ValueError("boom")), has_reference=True)
    assert measured == Measurement("error", np.inf, (3.0,), why="boom")
