"""The parts of a run: summed, in words, as files keep them."""

from __future__ import annotations

import pytest

from rlplace.session.calibrate import cut_words
from rlplace.training.forecast import LEAST_LIMIT_S, Durations, Stopwatch, limit_s


def test_parts_that_are_not_there_are_left_out() -> None:
    durations = Durations(profiling_s=4.6, calibration_s=0.2, search_s=150.0, table_s=31.0)
    assert str(durations) == "profiling 0:05, search 2:30, table 0:31"
    assert durations.total_s == pytest.approx(185.8)
    assert durations.to_dict() == {
        "profiling_s": 4.6,
        "calibration_s": 0.2,
        "heuristics_s": 0.0,
        "search_s": 150.0,
        "table_s": 31.0,
        "total_s": durations.total_s,
    }
    assert str(Durations(search_s=0.1)) == "search 0:00"


def test_a_stopwatch_times_one_part_after_the_other() -> None:
    times = iter([10.0, 12.5, 12.5, 20.0])
    watch = Stopwatch(lambda: next(times))
    assert [watch.lap_s(), watch.lap_s(), watch.lap_s()] == [2.5, 0.0, 7.5]


def test_what_surrounds_a_search_takes_no_longer_than_it_but_has_some_time_in_any_case() -> None:
    assert [limit_s(budget_s) for budget_s in (8.0, 300.0)] == [LEAST_LIMIT_S, 300.0]
    words = "the machine is slow: the final table was cut short, after 3 of 25 rounds"
    assert cut_words("the final table", 3, 25) == words
