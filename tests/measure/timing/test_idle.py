"""`idle_share`: from the machine's own counters, here made up."""

from __future__ import annotations

import math

import pytest

from rlplace.measure.timing import race as idle
from rlplace.measure.timing.race import idle_share


def test_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[10, 0, 10, 100, 0, 0, 0, 0], [40, 0, 20, 150, 10, 0, 0, 0]])
    monkeypatch.setattr(idle, "_cpu_times", lambda: next(times))
    assert idle_share(0.0) == 0.6

    def unknown() -> list[int]:
        raise OSError

    monkeypatch.setattr(idle, "_cpu_times", unknown)
    assert math.isnan(idle_share(0.0))
