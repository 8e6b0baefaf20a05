import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from micrographs import op_graph
from random_problems import plain_host
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples

from rlplace.env import PlacementVecEnv
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import PlacerArchitecture, PlacerPPO, imitate, make_policy
from rlplace.policy.learn.ppo import clipped_group_loss

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


def test_each_groups_ratio_is_clipped_by_itself():
    ratio_BG = np.array([[1.5, 1.0, 0.5], [1.5, 0.9, 0.5]])
    advantages = np.array([2.0, -1.0])
    # clip range 0.2. Better than average: min(A r, A clip(r)); worse: the larger loss
    by_hand = [
        [2.0 * 1.2, 2.0 * 1.0, 2.0 * 0.5],
        [-1.5, -0.9, -0.8],
    ]
    loss = clipped_group_loss(torch.tensor(ratio_BG).log(), torch.tensor(advantages), 0.2)
    assert loss.item() == pytest.approx(-np.mean(by_hand))


def test_clipped_groups_get_no_gradient_and_the_others_do():
    log_ratio_BG = torch.tensor([[math.log(1.5), math.log(1.1)]], requires_grad=True)
    clipped_group_loss(log_ratio_BG, torch.tensor([1.0]), 0.2).backward()
    # the ratio of the whole placement, 1.65, would be clipped and teach neither
    assert log_ratio_BG.grad.tolist()[0] == pytest.approx([0.0, -1.1 / 2])


def test_an_update_minimises_the_stated_loss():
    measurer = CountingMeasurer(chain_problem(3), wanted=[0, 1, 1])
    model = learner(measurer, elite_coef=0.5, elite_smoothing=0.1, ent_coef=0.01)
    torch.nn.init.normal_(model.policy.table_GD, std=0.1, generator=torch.Generator().manual_seed(0))
    actions_BG, elites_MG = np.array([[0, 1, 1], [0, 0, 0]]), np.array([[0, 1, 1]])
    samples = DictRolloutBufferSamples(
        observations={"graph": torch.zeros(2)},
        actions=torch.from_numpy(actions_BG),
        old_values=torch.zeros(2),
        old_log_prob=torch.full((2, 3), math.log(0.4)),
        advantages=torch.tensor([1.0, -1.0]),
        returns=torch.tensor([1.0, -1.0]),
    )
    loss, _ = model._loss(samples, torch.from_numpy(elites_MG), 0.2, defaultdict(list))

    probabilities_GD = torch.softmax(model.policy.logits(), dim=-1).detach().numpy()
    surrogate, elite, entropy = [], [], []
    for placement, advantage in zip(
        actions_BG, [2**-0.5, -(2**-0.5)], strict=True
    ):  # +-1 over their deviation, sqrt(2)
        for group, device in enumerate(placement):
            ratio = probabilities_GD[group, device] / 0.4
            surrogate.append(min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.2)))
    for group, device in enumerate(elites_MG[0]):
        log_p = np.log(probabilities_GD[group])
        elite.append(-(0.9 * log_p[device] + 0.1 * log_p.mean()))
        entropy.append(-(probabilities_GD[group] * log_p).sum())
    by_hand = -np.mean(surrogate) + 0.5 * np.mean(elite) - 0.01 * np.mean(entropy)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


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


def test_it_learns_from_placements_that_were_measured_elsewhere():
    model = learner(TimingMeasurer(chain_problem(4), wanted=[0] * 4))
    placements = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 1]])
    for _ in range(40):
        figures = model.update(placements, np.array([0.5, -1.0, -0.2]))
    assert model.policy.mode().tolist() == [1, 0, 1, 0]
    assert figures["best_reward"] == 0.5
    assert model.elites.group_devices.tolist() == [[1, 0, 1, 0]]


def test_updates_need_no_env_and_follow_the_schedules_to_their_end():
    policy = make_policy(chain_problem(4), SMALL, seed=0)
    model = PlacerPPO(policy, learning_rate=1e-2, seed=0)
    model.lr_schedule = lambda remaining: 1e-2 * remaining
    placements, rewards = np.array([[1, 0, 1, 0], [0, 1, 0, 1]]), np.array([1.0, -1.0])
    model.update(placements, rewards, progress=0.25)
    assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(7.5e-3)
    before = policy.logits().detach().clone()
    model.update(placements, rewards, progress=1.0)
    assert torch.equal(policy.logits(), before)  # nothing is learned at a rate of 0


def test_nothing_is_learned_of_the_value_of_the_one_state():
    policy = make_policy(chain_problem(3), SMALL)
    assert not policy.predict_values({"graph": torch.zeros(5)}).any()
    assert "value" not in dict(policy.named_parameters())


def test_learning_stops_when_the_divergence_passes_its_target():
    model = learner(TimingMeasurer(chain_problem(6), wanted=[1] * 6), target_kl=1e-9, n_epochs=8)
    model.learn(16)
    assert model._n_updates == 2  # the first pass cannot diverge, the second is given up


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
