"""How long a contender may take, from what is known of the others."""

from __future__ import annotations

import math

import pytest

from rlplace.measure.isolate.messages import TimeLimits
from rlplace.measure.timing.race import RaceProtocol

LIMITS = TimeLimits(longest_s=100.0, least_s=1.0, num_best=10.0, num_first=2.0)


@pytest.mark.parametrize(
    ("hopeless", "best_s", "first_s", "limit_s"),
    [
        (1.5, 0.0, 0.0, 100.0),
        (1.5, 0.0, 3.0, 100.0),
        (1.5, 0.5, 3.0, 11.0),
        (1.5, 0.001, 0.01, 1.0),
        (1.5, 50.0, 3.0, 100.0),
        (20.0, 0.5, 3.0, 26.0),
        (math.inf, 0.5, 3.0, 100.0),
    ],
    ids=["nothing known", "no step known", "several steps and loading", "never less", "never more", "patient", "all"],
)
def test_a_limit(hopeless: float, best_s: float, first_s: float, limit_s: float) -> None:
    assert LIMITS.limit_s(RaceProtocol(hopeless=hopeless), best_s, first_s) == limit_s
