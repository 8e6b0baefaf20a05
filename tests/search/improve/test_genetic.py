"""Keys and what they decode to, by hand."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlplace.search.improve.random_keys import decode, keys_of, population_size


def test_keys_are_cut_evenly_over_allowed_devices() -> None:
    allowed = np.array([[True, True, True, True], [False, True, False, True], [False, False, True, False]])
    keys = np.array([[0.0, 0.49, 0.99], [0.25, 0.5, 0.0], [0.99, 0.999, 0.5]])
    assert decode(keys, allowed).tolist() == [[0, 1, 2], [1, 3, 2], [3, 3, 2]]
    assert keys_of(np.array([[2, 3, 2]], dtype=np.int32), allowed).tolist() == [[0.625, 0.75, 0.5]]


@given(st.integers(0, 10_000))
def test_keys_of_placements_decode_to_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((7, 4)) < 0.5
    allowed[np.arange(7), rng.integers(0, 4, 7)] = True
    placements = decode(rng.random((5, 7)), allowed)
    assert allowed[np.arange(7), placements].all()
    assert np.array_equal(decode(keys_of(placements, allowed), allowed), placements)


def test_populations_grow_with_the_budget() -> None:
    assert [population_size(n) for n in (1, 400, 2500, 1e6, math.inf)] == [10, 40, 100, 200, 100]
