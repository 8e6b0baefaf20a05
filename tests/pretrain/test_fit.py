"""`fit` and `held_out`: networks learn which components suit which problems."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.env.sequential import FIRST_WEIGHTS
from rlplace.policy.schedule_network import SUMMARY, Components, ScheduleNetwork
from rlplace.pretrain.pretraining import Table, fit, held_out


def table_of(seed: int, count: int) -> Table:
    """Component 0 is best where the first number of a summary is positive, component 1 elsewhere, 2 nowhere.

    The list schedule's end says the same, but for component 2, whose busiest link gives it away.
    """
    rng = np.random.default_rng(seed)
    summary = rng.normal(size=(count, len(SUMMARY))).astype(np.float32)
    is_first = summary[:, 0] > 0
    ratio = np.stack((np.where(is_first, 0.0, 0.4), np.where(is_first, 0.4, 0.0), np.full(count, 0.6)), axis=1)
    estimates = np.zeros((count, 3, 6))
    estimates[..., 0] = np.exp(np.where(np.arange(3) == 2, -0.2, ratio))
    estimates[:, 2, 2] = 2.0
    return Table(summary, ratio - 3.0, estimates)


def network() -> ScheduleNetwork:
    return ScheduleNetwork(Components.of(FIRST_WEIGHTS[:3]), 8)


def test_what_suits_a_problem_is_learned_from_others() -> None:
    before = held_out(network(), table_of(1, 40))
    after = held_out(fit(network(), table_of(0, 120), 200), table_of(1, 40))
    assert before["listed@1"] == after["listed@1"] == pytest.approx(np.exp(0.2), rel=0.1)
    assert after["gate@1"] < 1.06 < before["gate@1"]
    assert after["ranker@1"] < 1.02 < before["ranker@1"]
    assert after["gate@4"] == after["ranker@4"] == 1.0


def test_equal_tables_give_equal_networks() -> None:
    first, same = (fit(network(), table_of(0, 30), 20).state_dict() for _ in range(2))
    assert all(first[name].tolist() == same[name].tolist() for name in first)
    assert first["scenarios"].shape == (30, 3)
    assert first["scenarios"].mean(dim=1).numpy() == pytest.approx(np.zeros(30), abs=1e-6)
