"""The benchmark that races the agent's plan: a race ends where its interval is narrow, and what it tells."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_measurer import chain_problem

from rlplace.measure import Measurement, Plan, RaceProtocol, Simulator
from rlplace.measure.problem import single_device_plan

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PROBLEM = chain_problem(3)
PLANS = [single_device_plan(PROBLEM.graph, device) for device in (0, 1)]


@pytest.fixture
def agent_race(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("agent_race")
    monkeypatch.setattr(found, "Evaluator", Noisy)
    monkeypatch.setattr(found, "idle_share", lambda: 1.0)
    return found


class Noisy:
    """Steps of a second, half a second for the second plan; each is off by a lognormal of 0.1."""

    def __init__(self, problem: object, simulator: Simulator, *, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def measure_plans(self, plans: Sequence[Plan], protocol: RaceProtocol) -> list[Measurement]:
        times_s = np.exp(0.1 * self._generator.standard_normal((len(plans), protocol.max_rounds)))
        times_s[1] /= 2
        return [Measurement("ok", float(np.median(row)), tuple(row.tolist())) for row in times_s]

    def close(self) -> None:
        """It holds nothing."""


def test_a_race_ends_where_its_interval_is_narrow_enough(agent_race: ModuleType) -> None:
    wide, narrow, never = (agent_race.final(PROBLEM, PLANS, 0, half) for half in (0.1, 0.02, 1e-6))
    # a ratio of two is off by 0.14, so half of the interval is 0.02 after (1.96 * 0.14 / 0.02)^2 = 190 rounds
    assert (wide["rounds"], never["rounds"]) == (60, agent_race.MOST_ROUNDS)
    assert narrow["rounds"] in (180, 240)
    assert np.log(narrow["high"] / narrow["low"]) / 2 <= 0.02
    assert never["low"] < 0.5 < never["high"]
    assert never["single_ms"] == pytest.approx(1000, rel=0.02)
    assert never["learned_ms"] == pytest.approx(500, rel=0.02)


def test_the_agent_learns_from_traced_steps(agent_race: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def searched(method: str, problem: object, budget: object, seed: int, options: dict[str, Any]) -> None:
        asked.append(options)

    monkeypatch.setattr(agent_race, "searched", searched)
    known = agent_race.Known(PROBLEM, PLANS, [Measurement("ok", 1.0), Measurement("ok", 2.0)])
    for is_wrong in (False, True):
        agent_race.learned(known, 10.0, 0, is_wrong=is_wrong)
    assert [options["is_traced"] for options in asked] == [True, True]
    assert asked[0]["prior"].device < asked[1]["prior"].device
