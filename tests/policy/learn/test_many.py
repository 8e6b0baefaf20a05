import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem
from search_problems import brute_force_s, fork_problem

from rlplace.errors import InvalidValue
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import GnnConfig, GnnPolicy, PPOConfig, learn_many

SMALL = GnnConfig(hidden=16)


def shared(problems, seed=0):
    first = GnnPolicy(problems[0], SMALL, seed=seed)
    return [first, *(GnnPolicy(problem, SMALL, seed=seed, network=first.network) for problem in problems[1:])]


def score(measurer):
    return lambda rows: -np.log(measurer.step_times(rows))


@pytest.mark.slow
def test_one_network_learns_the_best_placements_of_two_problems():
    problems = [fork_problem(0), fork_problem(1, num_devices=3)]
    policies = shared(problems)
    simulators = [Simulator(problem, threads=1) for problem in problems]
    learn_many(policies, [score(simulator) for simulator in simulators], PPOConfig(flips=1.5), num_rounds=100)
    for problem, simulator, policy in zip(problems, simulators, policies, strict=True):
        assert simulator.step_times(policy.mode()[None])[0] == pytest.approx(brute_force_s(problem), rel=1e-9)


def test_problems_take_turns_and_runs_agree_to_the_bit():
    def run():
        told = []
        policies = shared([chain_problem(3), chain_problem(4, num_devices=3)])
        measurers = [TimingMeasurer(chain_problem(3), [0, 1, 0]), TimingMeasurer(chain_problem(4, 3), [2, 0, 1, 0])]
        learn_many(policies, list(map(score, measurers)), num_rounds=4, on_update=lambda *one: told.append(one))
        return policies[0].network.state_dict(), [index for index, _ in told]

    (first, turns), (again, _) = run(), run()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [sorted(turns[i : i + 2]) for i in range(0, 8, 2)] == [[0, 1]] * 4


def test_rewards_of_one_problem_say_nothing_of_the_other():
    """A constant added to the rewards of a problem changes nothing."""

    def run(offset):
        policies = shared([chain_problem(3), chain_problem(4)])
        scores = [score(TimingMeasurer(chain_problem(n), wanted)) for n, wanted in ((3, [0, 1, 0]), (4, [0, 1, 1, 0]))]
        learn_many(policies, [scores[0], lambda rows: scores[1](rows) + offset], num_rounds=3)
        return policies[0].logits()

    assert torch.allclose(run(0.0), run(64.0), atol=1e-4)


def test_networks_of_their_own_are_refused():
    policies = [GnnPolicy(chain_problem(3), SMALL), GnnPolicy(chain_problem(3), SMALL)]
    with pytest.raises(InvalidValue, match="one network"):
        learn_many(policies, [len, len], num_rounds=1)
    with pytest.raises(InvalidValue, match="one for each of 1 policies"):
        learn_many(policies[:1], [], num_rounds=1)
