"""Options are checked before anything runs."""

from __future__ import annotations

import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.training.config import TrainConfig


def test_defaults_are_valid() -> None:
    assert TrainConfig().reward == "log_speedup"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reward": "log_speedupp"}, UnknownName, "log_speedup"),
        ({"init": "etf"}, UnknownName, "eft"),
        ({"track": "onlin"}, UnknownName, "online"),
        ({"budget_s": -1.0}, InvalidValue, "budget_s"),
        ({"simulate_share": 1.5}, InvalidValue, "simulate_share"),
        ({"num_groups": 0}, InvalidValue, "num_groups"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainConfig(**options)  # type: ignore[arg-type]
