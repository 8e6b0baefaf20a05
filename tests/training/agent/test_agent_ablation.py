"""The switches of the agent: each changes what it says, and a configuration is checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_models import learnable_problem
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.errors import InvalidValue
from rlplace.measure.host_model import Posterior, Prior
from rlplace.measure.measurement import Measurement
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget
from rlplace.training.agent import AgentConfig, proposals
from rlplace.training.agent import agent as agent_module
from rlplace.training.agent.agent import FREE, Agent
from rlplace.training.agent.batches import AverageTimer
from rlplace.training.agent.proposals import Proposer

PROBLEM = learnable_problem(plain_host(3, 100.0, 0.05), 20)
EACH = Budget(60)


def agent_with(**switches: bool) -> Agent:
    return Agent(PROBLEM, seed=0, config=AgentConfig(**switches), prior=Prior(overhead_s=0.1))  # type: ignore[arg-type]


def taught(agent: Agent) -> Agent:
    """After four plans that took a second each."""
    plans = agent.propose(4, EACH)
    agent.learn(plans, [Measurement("ok", 20.0)] * len(plans))
    return agent


def test_without_a_prior_every_factor_is_nearly_free() -> None:
    given, freed = agent_with(), agent_with(is_prior=False)
    np.testing.assert_allclose(freed.posterior.scales.deviation, FREE * given.posterior.scales.deviation)


def test_without_draws_every_plan_is_searched_under_the_most_probable_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    draw = Posterior.draw
    monkeypatch.setattr(Posterior, "draw", lambda self, generator: draws.append(1) or draw(self, generator))
    taught(agent_with(is_thompson=False)).propose(4, EACH)
    assert len(draws) == 0
    taught(agent_with()).propose(4, EACH)
    assert len(draws) == 3
    draws.clear()
    agent_with().propose(4, EACH)
    assert not draws  # nothing was measured: the prior's most probable factors


def test_without_permutations_nothing_is_relabelled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("permuted", "shuffled"):
        real = getattr(proposals, name)
        monkeypatch.setattr(proposals, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k))
    taught(agent_with(is_permuted=False)).propose(4, EACH)
    assert calls == []
    taught(agent_with()).propose(4, EACH)
    assert set(calls) == {"permuted", "shuffled"}


def test_switches_change_what_is_proposed() -> None:
    every = [
        [plan.fingerprint for plan in taught(agent_with(**switches)).propose(4, EACH)]
        for switches in ({}, {"is_prior": False}, {"is_thompson": False}, {"is_permuted": False})
    ]
    assert len({tuple(plans) for plans in every}) == 4


def test_the_first_plans_use_every_kind_of_device_and_the_best_comes_first() -> None:
    proposer = Proposer(PROBLEM, np.random.default_rng(0), AgentConfig())
    simulator = Simulator(PROBLEM, threads=1)
    placements = np.array(proposer.first(simulator, 4, Budget(200)))
    times_s = simulator.step_times(placements)
    assert len(placements) == 4
    assert times_s.argmin() == 0
    assert (placements[1] == placements[1][0]).all()  # all on one device of the only kind
    assert proposer.evaluations >= 200


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


def test_compared_candidates_come_from_averages_draws_and_what_was_found_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, float]] = []
    compared: list[tuple[int, int]] = []
    search, choose = Proposer.next, agent_module.choose_batch

    def next_(self: Proposer, simulator: Simulator | AverageTimer, budget: Budget, *args: Any, **words: Any) -> Any:
        asked.append((type(simulator).__name__, budget.evaluations))
        return search(self, simulator, budget, *args, **words)

    def choose_(log_s: NDArray[np.float64], best: float, count: int) -> list[int]:
        compared.append(log_s.shape)
        return choose(log_s, best, count)

    agent = taught(agent_with())
    monkeypatch.setattr(Proposer, "next", next_)
    monkeypatch.setattr(agent_module, "choose_batch", choose_)
    before = agent.num_simulated
    plans = agent.propose(4, Budget(600))
    assert len({plan.fingerprint for plan in plans}) == 4
    assert [name for name, _ in asked[:4]] == ["AverageTimer", "Simulator", "Simulator", "Simulator"]
    assert asked[0][1] == pytest.approx(3 * asked[1][1])
    ((num_draws, num_candidates),) = compared
    assert num_draws == 16
    assert 4 < num_candidates <= 30 + 4
    assert 2000 <= agent.num_simulated - before <= 3200  # 2400, and what relabelling takes
