"""Temperatures by hand; nonsense is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.errors import InvalidValue
from rlplace.search import AnnealSettings


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"hot": 0.1, "cold": 0.2}, "temperatures"),
        ({"cold": 0.0}, "temperatures"),
        ({"batch": 0}, "batch"),
        ({"critical_share": 1.5}, "critical_share"),
    ],
)
def test_nonsense_settings_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        AnnealSettings(**settings)


def test_many_moves_start_hotter_and_end_as_cold() -> None:
    few, many, most = (AnnealSettings().temperatures(100, moves) for moves in (0.1, 2.0, 1e6))
    assert few == (pytest.approx(1e-3), pytest.approx(1e-4))
    assert many == (pytest.approx(4e-3), pytest.approx(1e-4))
    assert most == (pytest.approx(1.6e-2), pytest.approx(1e-4))
    assert AnnealSettings(hot=0.3).temperatures(100, 1e6) == (0.3, pytest.approx(0.03))
