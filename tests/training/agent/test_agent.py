"""The switches of the agent: each changes what it proposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_models import learnable_problem
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.measure.host_model import HostModel, Prior
from rlplace.measure.measurement import Measurement
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget
from rlplace.training.agent import AgentConfig, proposals
from rlplace.training.agent import agent as agent_module
from rlplace.training.agent.agent import FREE, Agent
from rlplace.training.agent.proposals import AverageTimer, Proposer

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
    draw = HostModel.draw
    monkeypatch.setattr(HostModel, "draw", lambda self, generator: draws.append(1) or draw(self, generator))
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
    before = agent.evaluations
    plans = agent.propose(4, Budget(600))
    assert len({plan.fingerprint for plan in plans}) == 4
    assert [name for name, _ in asked[:4]] == ["AverageTimer", "Simulator", "Simulator", "Simulator"]
    assert asked[0][1] == pytest.approx(3 * asked[1][1])
    ((num_draws, num_candidates),) = compared
    assert num_draws == 16
    assert 4 < num_candidates <= 30 + 4
    assert 2000 <= agent.evaluations - before <= 3200  # 2400, and what relabelling takes
