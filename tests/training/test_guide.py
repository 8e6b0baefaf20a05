"""A policy as a guide: what it suggests, what it is taught, and the methods and options that use it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem
from random_problems import plain_host, random_problem
from search_problems import barred, brute_force_s, fork_problem

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.host_model import Prior
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import TrueTimer, Truth, true_problem
from rlplace.policy import LearnConfig, Policy
from rlplace.policy.options import GuideConfig
from rlplace.search.methods import find
from rlplace.search.task import Budget
from rlplace.training import SearchConfig, TrainConfig
from rlplace.training.agent import AgentConfig, learn_host
from rlplace.training.method_choice import METHODS, check_names
from rlplace.training.policy_methods import PolicyGuide
from rlplace.training.run import train

PROBLEM = random_problem(np.random.default_rng(4), 30, plain_host(3))
MOVING = LearnConfig(guided=GuideConfig(starts=0.1, moves=0.5))


def taught(config: LearnConfig = MOVING) -> tuple[PolicyGuide, np.ndarray]:
    guide = PolicyGuide(PROBLEM, config, seed=1)
    devices = PROBLEM.grouping.expand(PROBLEM.draw_groups(np.random.default_rng(0), 1)[0])
    guide.imitate(devices)
    return guide, devices


def test_an_untaught_policy_has_no_starts_and_a_taught_one_begins_with_what_it_was_taught() -> None:
    assert PolicyGuide(PROBLEM, MOVING, seed=1).starts(5).shape == (0, PROBLEM.graph.num_ops)
    guide, devices = taught()
    starts = guide.starts(5)
    assert starts.shape == (5, PROBLEM.graph.num_ops)
    assert np.array_equal(starts[0], devices)
    assert guide.starts(1).shape == (1, PROBLEM.graph.num_ops)


def test_a_move_flips_what_a_sample_has_otherwise_than_the_mode_and_leaves_the_rest() -> None:
    guide, devices = taught()
    other = devices.copy()
    ops = np.flatnonzero(PROBLEM.grouping.op_group == 0)  # elsewhere than where the policy would have it
    other[ops] = (other[ops] + 1) % PROBLEM.host.num_devices
    moved = guide.moves(other, 200)
    assert moved.shape == (200, PROBLEM.graph.num_ops)
    changed = moved != other
    assert 0 < changed.any(axis=1).mean() <= 1.0
    back = (moved[:, ops] == devices[ops]).all(axis=1)
    assert not back.any()  # a move back to the mode is no flip of the policy's
    assert not np.array_equal(guide.moves(other, 50), guide.moves(other, 50))  # each draws anew


def test_a_policy_that_knows_list_schedules_gives_these_instead_of_samples() -> None:
    guide, _ = taught()
    assert guide.schedules(7) == ()
    pairs = (("own", (1.0,) * 9), ("roles", (0.5,) * 9))

    class Knowing:
        def schedules(self, count: int) -> tuple[tuple[str, tuple[float, ...]], ...]:
            return pairs[:count]

    guide.policy = Knowing()  # type: ignore[assignment]
    assert guide.schedules(7) == pairs
    assert guide.schedules(1) == pairs[:1]
    assert len(guide.starts(7)) == 0


def test_imitation_can_be_left_out() -> None:
    guide, devices = taught(replace(MOVING, imitate=False))
    before = guide.policy.mode()
    guide.imitate(devices)
    assert np.array_equal(guide.policy.mode(), before)
    assert len(guide.starts(3)) == 0


def test_what_was_taught_last_is_not_taught_again() -> None:
    guide, devices = taught()
    weights = [parameter.detach().clone() for parameter in guide.policy.parameters()]  # type: ignore[attr-defined]
    guide.imitate(devices)
    assert all((old == new).all() for old, new in zip(weights, guide.policy.parameters(), strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_the_guided_portfolio_finds_the_optimum_within_its_budget_and_returns_the_policy(seed: int) -> None:
    problem = barred(fork_problem(seed, 2), {1: (0,)})
    found = find(problem, "guided", Simulator(problem, threads=1), Budget(400), seed=seed, config=MOVING)
    assert found.step_time_s == brute_force_s(problem)
    assert found.evaluations <= 400
    assert isinstance(found.learned, Policy)
    assert np.array_equal(problem.grouping.expand(found.learned.mode()), found.devices)  # it was taught what was found


def test_a_seed_finds_the_same_and_the_guides_moves_are_tried() -> None:
    def run(config: LearnConfig) -> tuple[list[int], float]:
        found = find(PROBLEM, "guided", Simulator(PROBLEM, threads=1), Budget(300), seed=3, config=config)
        assert found.devices is not None
        return found.devices.tolist(), [best.evaluations for best in found.history][-1]

    assert run(MOVING) == run(MOVING)
    assert METHODS["guided"].home == "rlplace.training.policy_methods:search_guided"


@pytest.mark.slow
def test_the_agent_takes_a_guide() -> None:
    problem = learnable_problem(plain_host(3, 100.0, 0.05), 20)
    guide = PolicyGuide(problem, MOVING, seed=0)

    def learn(guide: PolicyGuide | None) -> float:
        timer = TrueTimer(true_problem(problem, Truth("hard", 0)), 0)
        few = AgentConfig(evaluations=60, later_evaluations=40)
        result = learn_host(
            problem, timer, Budget(measurements=8), seed=1, config=few, prior=Prior(overhead_s=0.1), guide=guide
        )
        assert timer.num_measured <= 8
        return result.history[-1].best_s

    assert np.isfinite(learn(guide))
    assert len(guide.starts(1)) == 1  # its searches taught it
    assert learn(None) == learn(None)


def test_one_option_turns_it_on() -> None:
    on = TrainConfig(search=SearchConfig(guide="placer"))
    assert TrainConfig().guide is None
    assert on.guide == LearnConfig(policy="placer")
    check_names(on)
    check_names(TrainConfig(search=SearchConfig(method="guided", guide="placer")))
    with pytest.raises(UnknownName, match="plaser"):
        check_names(TrainConfig(search=SearchConfig(guide="plaser")))
    with pytest.raises(InvalidValue, match="anneal"):
        check_names(TrainConfig(search=SearchConfig(method="anneal", guide="placer")))
    for name in ("starts", "moves"):
        with pytest.raises(InvalidValue, match=name):
            GuideConfig(**{name: 1.5})


@pytest.mark.slow
def test_training_on_a_simulated_host_with_a_guide_sets_it_beside_the_portfolio() -> None:
    result = train(PROBLEM, budget_s=1.0, search=SearchConfig(guide="placer"))
    assert {"guided", "portfolio"} <= {row["method"] for row in result.table.rows}
