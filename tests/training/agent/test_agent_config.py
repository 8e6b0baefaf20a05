"""How the agent explores: the configuration is checked, and shares budgets out as it says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlplace.errors import InvalidValue
from rlplace.training.agent import AgentConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", 0),
        ("evaluations", 0),
        ("later_evaluations", 0),
        ("early", 0),
        ("pool", 0),
        ("scratch_share", -0.1),
        ("scratch_share", math.nan),
        ("mean_share", 1.1),
        ("compared_share", 1.1),
        ("averaged", 0),
        ("most_compared", 0),
        ("draws", -1),
        ("mean_weight", 0.0),
        ("first_weight", math.inf),
        ("known_batch", 0),
        ("known_share", 0.0),
        ("known_share", 1.0),
    ],
)
def test_a_configuration_is_checked(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        AgentConfig(**{name: value})  # type: ignore[arg-type]


def test_budgets_are_shared_out_by_what_is_left_to_learn() -> None:
    config = AgentConfig(evaluations=900, later_evaluations=400, early=16, first_weight=1.0)
    assert config.whole_evaluations(16) == 16 * 900
    assert config.whole_evaluations(20) == 16 * 900 + 4 * 400
    assert sum(config.share(place, 20) for place in range(20)) == pytest.approx(1.0)
    assert config.share(0, 20) / config.share(19, 20) == pytest.approx(2.25)
    first = replace(config, first_weight=2.0)
    assert first.whole_evaluations(20) == 20 * 900 + 4 * 400
    assert first.whole_evaluations(2) == 4 * 900
    assert first.share(3, 20) / first.share(4, 20) == pytest.approx(2.0)
    assert sum(first.share(place, 20) for place in range(20)) == pytest.approx(1.0)
    assert AgentConfig().whole_evaluations(16) == 40_000


@pytest.mark.parametrize(
    ("switches", "evaluations", "count"),
    [
        ({}, 16 * 24 / 0.2 - 1, 0),
        ({}, 16 * 24 / 0.2 + 1, 24),
        ({}, 1e6, 64),
        ({}, math.inf, 64),
        ({"draws": 0}, 1e6, 0),
        ({"is_thompson": False}, 1e6, 0),
    ],
)
def test_candidates_are_compared_where_a_batch_has_the_placements_for_it(
    switches: dict[str, int], evaluations: float, count: int
) -> None:
    assert AgentConfig(**switches).num_compared(evaluations) == count  # type: ignore[arg-type]
