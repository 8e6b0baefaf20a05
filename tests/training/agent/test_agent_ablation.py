"""The switches of the agent: each changes what it says, and a configuration is checked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_models import learnable_problem
from random_problems import plain_host

from rlplace.errors import InvalidValue
from rlplace.measure.host_model import Posterior, Prior
from rlplace.measure.measurement import Measurement
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget
from rlplace.training.agent import AgentConfig, proposals
from rlplace.training.agent.agent import FREE, Agent
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
    for name in ("permuted", "permutations_of"):
        real = getattr(proposals, name)
        monkeypatch.setattr(proposals, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k))
    taught(agent_with(is_permuted=False)).propose(4, EACH)
    assert calls == []
    taught(agent_with()).propose(4, EACH)
    assert set(calls) == {"permuted", "permutations_of"}


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
    ],
)
def test_a_configuration_is_checked(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        AgentConfig(**{name: value})  # type: ignore[arg-type]


def test_budgets_are_shared_out_by_what_is_left_to_learn() -> None:
    config = AgentConfig(evaluations=900, later_evaluations=400, early=16)
    assert config.whole_evaluations(16) == 16 * 900
    assert config.whole_evaluations(20) == 16 * 900 + 4 * 400
    assert sum(config.share(place, 20) for place in range(20)) == pytest.approx(1.0)
    assert config.share(0, 20) / config.share(19, 20) == pytest.approx(2.25)
