"""Which placements are taken, by hand."""

from __future__ import annotations

import numpy as np

from rlplace.search.diversity import LEAST_DIFFERENCE, choose_diverse


def placements(*moved: int, num_ops: int = 200) -> np.ndarray:
    """One placement for each number: so many of its first ops are on device 1, the others on device 0."""
    rows = np.zeros((len(moved), num_ops), dtype=np.int32)
    for row, count in zip(rows, moved, strict=True):
        row[:count] = 1
    return rows


def test_rows_unlike_all_before_them_are_taken_by_rank() -> None:
    """Of 200 ops, 2 are a hundredth: enough."""
    assert LEAST_DIFFERENCE == 0.01
    assert choose_diverse(placements(0, 1, 2, 4), np.array([4.0, 3.0, 2.0, 1.0]), 2) == [3, 2]
    assert choose_diverse(placements(0, 1, 2, 4), np.array([4.0, 3.0, 2.0, 1.0]), 3) == [3, 2, 0]  # 1 is a twin of 2


def test_too_few_are_filled_up_by_rank() -> None:
    assert choose_diverse(placements(0, 1, 1, 50), np.array([1.0, 1.2, 1.1, 9.0]), 4) == [0, 3, 2, 1]
    assert choose_diverse(placements(0, 1), np.array([1.0, 2.0]), 5) == [0, 1]


def test_what_was_seen_counts_as_taken() -> None:
    rows, times = placements(0, 1, 50), np.array([1.0, 2.0, 3.0])
    assert choose_diverse(rows, times, 1, seen=placements(0)) == [2]
    assert choose_diverse(rows, times, 2, seen=[*placements(0, 50)]) == [0, 1]  # nothing new: by rank


def test_equal_step_times_rank_by_index_and_infinite_ones_last() -> None:
    assert choose_diverse(placements(0, 20, 40), np.array([np.inf, 1.0, 1.0]), 3) == [1, 2, 0]


def test_of_nothing_nothing_is_taken() -> None:
    assert choose_diverse(np.empty((0, 4), dtype=np.int32), np.empty(0), 3) == []
    assert choose_diverse(placements(0), np.array([1.0]), 0) == []
