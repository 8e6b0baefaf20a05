"""The integer program of the published benchmark, against brute force over all placements of small workloads."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_brute_force import best_placement_ms
from random_published import random_workload, slow_max_load

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from published import by_integer_program


@given(st.integers(0, 100_000), st.integers(1, 2), st.integers(2, 6), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_integer_program_finds_the_optimum(seed: int, devices: int, num_nodes: int, training: bool) -> None:
    record = random_workload(seed, devices=devices, num_nodes=num_nodes, training=training)
    best = best_placement_ms(record, slow_max_load)
    row, bound_ms = by_integer_program(record, 60.0)
    assert row.status == ("optimal" if math.isfinite(best) else "infeasible")
    assert row.value_ms == pytest.approx(best, abs=1e-6)
    if math.isfinite(best):
        assert bound_ms == pytest.approx(best, abs=1e-3)
