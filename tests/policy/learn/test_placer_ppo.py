"""`PlacerPPO`: what Stable-Baselines3's PPO does, with our update."""

import itertools
import math

import numpy as np
import pytest
import torch
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from micrographs import op_graph
from random_problems import plain_host
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger

from rlplace.env import PlacementVecEnv
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import PlacerArchitecture, PlacerPPO, imitate, make_policy

SMALL = PlacerArchitecture(hidden=8, num_layers=1)


def learner(measurer, num_envs=16, *, seed=0, reward="log_speedup", **options):
    env = PlacementVecEnv(measurer, num_envs, reward)
    return PlacerPPO(make_policy(measurer.problem, SMALL, seed=seed), env, seed=seed, **options)


def branches_problem(seed):
    """Two groups of branches of uneven costs between a fork and a join, on two devices with slow links."""
    rng = np.random.default_rng(seed)
    graph = op_graph([[], [0], [0], [0], [0], [1, 2], [3, 4], [5, 6]], rng.integers(10, 60, 8).tolist())
    costs = Costs(rng.uniform(0.5, 3.0, (8, 2)), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.arange(8)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_best_of_all_placements(seed):
    problem = branches_problem(seed)
    simulator = Simulator(problem, threads=1)
    every = np.array(list(itertools.product(range(2), repeat=8)), dtype=np.int32)
    best_s = simulator.step_times(every).min()
    model = learner(simulator, seed=seed)
    model.learn(16 * 150)
    found_s = simulator.step_times(problem.grouping.expand(model.policy.mode()[None]))[0]
    assert found_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.slow
def test_plain_ppo_learns_too():
    measurer = TimingMeasurer(chain_problem(8), wanted=[0, 1, 1, 0, 1, 0, 0, 1])
    model = learner(measurer, elite_coef=0.0)
    model.learn(16 * 150)
    assert model.policy.mode().tolist() == measurer.wanted.tolist()


def test_it_improves_on_the_placement_that_it_imitated():
    measurer = TimingMeasurer(chain_problem(12, num_devices=3), wanted=[0, 1, 2] * 4)
    model = learner(measurer, flips=1.0)
    imitate(model.policy, np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 1, 1]))
    model.learn(16 * 60)
    assert model.policy.mode().tolist() == measurer.wanted.tolist()


def test_failures_are_learned_from():
    measurer = TimingMeasurer(chain_problem(3), wanted=[0, 1, 1], failing=[0, 1, 0])
    model = learner(measurer)
    model.learn(16 * 60)
    assert model.policy.mode().tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"n_steps": 2, "batch_size": 8}])
def test_two_seeded_runs_agree_to_the_bit(options):
    def run():
        torch.randn(3)  # other users of the global generators must not matter
        model = learner(Simulator(branches_problem(0), threads=1), seed=4, **options)
        model.learn(320)
        return model.policy

    first, again = run(), run()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert np.array_equal(first.sample(9), again.sample(9))


def test_seeds_differ():
    def run(seed):
        model = learner(TimingMeasurer(chain_problem(6), wanted=[1] * 6), seed=seed)
        model.learn(32)
        return model.policy.logits()

    assert not torch.equal(run(0), run(1))


@pytest.mark.slow
def test_the_env_can_be_exchanged_for_one_of_another_width():
    simulated = TimingMeasurer(chain_problem(4), wanted=[0, 0, 1, 1])
    measured = CountingMeasurer(chain_problem(4), wanted=[0, 1, 1, 1])
    model = learner(simulated)
    model.learn(16 * 40)
    assert model.policy.mode().tolist() == [0, 0, 1, 1]
    model.set_env(PlacementVecEnv(measured, 4, deterministic=False))
    assert len(model.elites) == 0
    model.learn(4 * 60, reset_num_timesteps=False)
    assert model.policy.mode().tolist() == [0, 1, 1, 1]
    assert all(len(batch) <= 4 for batch in measured.batches)


def test_nothing_is_learned_of_the_value_of_the_one_state():
    policy = make_policy(chain_problem(3), SMALL)
    assert not policy.predict_values({"graph": torch.zeros(5)}).any()
    assert "value" not in dict(policy.named_parameters())


def test_a_callback_sees_every_placement_and_can_stop():
    class Stop(BaseCallback):
        def _on_step(self):
            seen.append((self.locals["actions"].copy(), [info["step_time_s"] for info in self.locals["infos"]]))
            return len(seen) < 3

    seen = []
    measurer = TimingMeasurer(chain_problem(4), wanted=[0, 1, 0, 1])
    learner(measurer).learn(16 * 100, callback=Stop())
    assert len(seen) == 3
    for actions_BG, step_time_s in seen:
        assert step_time_s == (1.0 + (actions_BG != measurer.wanted).sum(axis=1)).tolist()


def test_losses_are_logged():
    class Keep(KVWriter):
        def write(self, key_values, key_excluded, step=0):
            kept.update(key_values)

        def close(self):
            pass

    kept = {}
    model = learner(TimingMeasurer(chain_problem(4), wanted=[0, 1, 0, 1]))
    model.set_logger(Logger(folder=None, output_formats=[Keep()]))
    model.learn(16 * 3)
    for name in ("policy_gradient_loss", "entropy", "elite_loss", "approx_kl", "clip_fraction"):
        assert math.isfinite(kept[f"train/{name}"])
    assert math.isfinite(kept["rollout/ep_rew_mean"])


@pytest.mark.parametrize("options", [{"n_epochs": 0}, {"num_elites": 0}, {"n_steps": 0}, {"num_envs": 1}])
def test_bad_options_are_named(options):
    with pytest.raises(InvalidValue):
        learner(TimingMeasurer(chain_problem(2), wanted=[0, 0]), **options)
