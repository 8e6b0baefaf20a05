"""`Reinforce`: its gradient, baseline and failing signal by hand, and what it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem
from numpy.typing import NDArray
from search_problems import barred, brute_force_s, fork_problem

from rlplace.env.rewards import make_reward
from rlplace.errors import InvalidValue
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import LEARNERS, POLICIES, LearnConfig, Reinforce, ReinforceConfig, Seq2SeqConfig
from rlplace.policy.seq2seq import Seq2SeqPolicy, seq2seq_inputs

SMALL = Seq2SeqConfig(hidden=16, type_embedding=4, device_embedding=4, attention=4)
ROWS = np.array([[0, 1], [1, 1], [0, 0]])


class TablePolicy(torch.nn.Module):
    """Two groups on two devices, each by itself: a logit for each."""

    num_groups, num_devices = 2, 2

    def __init__(self) -> None:
        super().__init__()
        self.table_GD = torch.nn.Parameter(torch.tensor([[0.3, -0.2], [0.1, 0.7]], dtype=torch.float64))

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        return np.zeros((num_samples, 2), dtype=np.int32)

    def mode(self) -> NDArray[np.int32]:
        return np.zeros(2, dtype=np.int32)

    def log_prob(self, group_devices: NDArray[np.integer]) -> torch.Tensor:
        return torch.log_softmax(self.table_GD, -1)[np.arange(2), group_devices].sum(-1)

    def save(self, path: Path) -> None:
        pass


def gradient_by_hand(rows: NDArray[np.integer], advantages: list[float]) -> NDArray[np.float64]:
    """Of the loss, by logit: -mean of A (1[device] - p)."""
    p = torch.softmax(TablePolicy().table_GD.detach(), -1).numpy()
    chosen = np.eye(2)[rows]  # (B, G, D)
    return -np.mean(np.array(advantages)[:, None, None] * (chosen - p), axis=0)


def test_the_gradient_is_the_analytic_one() -> None:
    policy = TablePolicy()
    learner = Reinforce(policy)
    rewards = np.array([1.0, -0.5, 0.1])
    figures = learner.update(ROWS, rewards)
    by_hand = gradient_by_hand(ROWS, (rewards - 0.2).tolist())  # the first baseline is the batch's mean
    assert policy.table_GD.grad is not None
    assert policy.table_GD.grad.numpy() == pytest.approx(by_hand, rel=1e-6)
    assert figures["gradient_norm"] == pytest.approx(np.linalg.norm(by_hand))


def test_gradients_are_scaled_down_to_the_norm() -> None:
    policy = TablePolicy()
    Reinforce(policy, ReinforceConfig(max_grad_norm=0.25)).update(ROWS, np.array([40.0, -60.0, 0.0]))
    assert policy.table_GD.grad is not None
    assert policy.table_GD.grad.norm().item() == pytest.approx(0.25, rel=1e-4)


def test_the_baseline_is_a_moving_average_and_starts_anew_when_told() -> None:
    learner = Reinforce(TablePolicy(), ReinforceConfig(baseline_decay=0.75))
    for rewards, baseline in (([1.0, 3.0], 2.0), ([6.0, 6.0], 3.0), ([-1.0, -1.0], 2.0)):
        figures = learner.update(ROWS[:2], np.array(rewards))
        assert learner.baseline == figures["baseline"] == pytest.approx(baseline)
    learner.forget()
    assert learner.update(ROWS[:2], np.array([8.0, 10.0]))["baseline"] == 9.0


def test_the_baseline_of_an_update_is_the_one_before_it() -> None:
    policy, rewards = TablePolicy(), np.array([1.0, 1.0, 1.0])
    learner = Reinforce(policy, ReinforceConfig(learning_rate=1e-12))
    learner.update(ROWS, rewards * 0.25)
    learner.update(ROWS, rewards)
    assert policy.table_GD.grad is not None
    assert policy.table_GD.grad.numpy() == pytest.approx(gradient_by_hand(ROWS, [0.75] * 3), abs=1e-9)


def test_failures_teach_by_their_signal_at_first_and_nothing_later() -> None:
    rewards, ran = np.array([-0.2, -0.4, -3.0]), np.array([True, True, False])
    policy = TablePolicy()
    learner = Reinforce(policy, ReinforceConfig(failing_until=0.5))
    figures = learner.update(ROWS, rewards, progress=0.4, ran=ran)
    assert policy.table_GD.grad is not None
    assert policy.table_GD.grad.numpy() == pytest.approx(gradient_by_hand(ROWS, [1.0, 0.8, -1.8]), rel=1e-6)
    assert figures["failed"] == pytest.approx(1 / 3)
    assert learner.baseline == pytest.approx(-1.2)

    policy = TablePolicy()
    learner = Reinforce(policy, ReinforceConfig(failing_until=0.5))
    learner.update(ROWS, rewards, progress=0.5, ran=ran)
    assert policy.table_GD.grad is not None
    assert policy.table_GD.grad.numpy() == pytest.approx(gradient_by_hand(ROWS[:2], [0.1, -0.1]), rel=1e-6)
    assert learner.baseline == pytest.approx(-0.3)


def test_a_late_batch_of_failures_changes_nothing() -> None:
    policy = TablePolicy()
    learner = Reinforce(policy)
    before = policy.table_GD.detach().clone()
    figures = learner.update(ROWS, np.full(3, -5.0), progress=1.0, ran=np.zeros(3, dtype=np.bool_))
    assert torch.equal(policy.table_GD, before)
    assert learner.baseline is None
    assert figures == {"mean_reward": -5.0, "failed": 1.0}


def test_the_entropy_bonus_keeps_devices_as_likely() -> None:
    policy = Seq2SeqPolicy(seq2seq_inputs(chain_problem(3)), SMALL)
    torch.nn.init.normal_(policy.network.device_net.weight, generator=torch.Generator().manual_seed(0))
    learner = Reinforce(policy, ReinforceConfig(ent_coef=1.0))
    rows = policy.sample(4, np.random.default_rng(0))
    entropies = [learner.update(rows, np.zeros(4))["entropy"] for _ in range(20)]
    assert entropies[-1] > entropies[0] + 0.01
    for option in ("ent_coef", "elite_coef"):
        with pytest.raises(InvalidValue, match=option):
            Reinforce(TablePolicy(), ReinforceConfig(**{option: 0.1}))


def test_the_best_placement_pulls_where_asked() -> None:
    best = np.array([[0, 1, 0]])
    log_probs = []
    for elite_coef in (0.0, 1.0):
        policy = Seq2SeqPolicy(seq2seq_inputs(chain_problem(3)), SMALL)
        learner = Reinforce(policy, ReinforceConfig(elite_coef=elite_coef))
        for _ in range(40):  # equal rewards: nothing else pulls
            figures = learner.update(best, np.ones(1))
        log_probs.append(policy.log_prob(best).item())
    assert log_probs[0] == pytest.approx(3 * np.log(0.5))
    assert log_probs[1] > np.log(0.5)
    assert figures["elite_loss"] > 0


def test_a_policy_is_told_how_far_to_stray() -> None:
    policy = POLICIES["placer"](chain_problem(6), LearnConfig(), 0)
    learner = Reinforce(policy, ReinforceConfig(flips=0.5))
    for _ in range(30):
        learner.update(np.zeros((1, 6), dtype=np.int32), np.ones(1))
        learner.update(np.ones((1, 6), dtype=np.int32), np.zeros(1))
    assert (policy.sample(400) != policy.mode()).sum(axis=1).mean() == pytest.approx(0.5, abs=0.15)


def test_a_policy_is_told_how_much_noise_to_sample_with() -> None:
    policy = Seq2SeqPolicy(seq2seq_inputs(chain_problem(3)), SMALL)
    learner = Reinforce(policy, ReinforceConfig(logit_noise=0.5, noise_until=0.6))
    rows = policy.sample(4)
    assert policy.logit_noise == 0.5
    for progress, noise in ((0.59, 0.5), (0.6, 0.0)):
        learner.update(rows, np.zeros(4), progress=progress)
        assert policy.logit_noise == noise


def test_imitation_makes_a_placement_the_mode() -> None:
    policy = Seq2SeqPolicy(seq2seq_inputs(barred(chain_problem(6, 3), {2: (0, 1)})), SMALL)
    learner = Reinforce(policy)
    learner.imitate(np.array([2, 0, 1, 1, 0, 2]))
    assert policy.mode().tolist() == [2, 0, 1, 1, 0, 2]
    with pytest.raises(InvalidValue, match="probability"):
        learner.imitate(np.array([2, 0, 2, 1, 0, 2]))


def learn(policy: Seq2SeqPolicy, problem: Problem, simulator: Simulator, *, num_updates: int) -> None:
    learner, reward = Reinforce(policy, ReinforceConfig(learning_rate=1e-3)), make_reward("sqrt", 10.0)
    for update in range(num_updates):
        rows = policy.sample(16)
        step_s = simulator.step_times(problem.grouping.expand(rows))
        learner.update(rows, reward(step_s), progress=update / num_updates, ran=np.isfinite(step_s))


@pytest.mark.slow
@pytest.mark.parametrize("problem", [fork_problem(0), fork_problem(2, 3)], ids=["two devices", "three devices"])
def test_seq2seq_learns_a_tiny_problem_to_its_optimum(problem: Problem) -> None:
    policy, simulator = Seq2SeqPolicy(seq2seq_inputs(problem), SMALL, seed=0), Simulator(problem, threads=1)
    learn(policy, problem, simulator, num_updates=300)
    found_s = simulator.step_times(problem.grouping.expand(policy.mode()[None]))[0]
    assert found_s == pytest.approx(brute_force_s(problem), rel=1e-12)


def test_placer_learns_by_it_too() -> None:
    measurer = TimingMeasurer(chain_problem(6), wanted=[0, 1, 1, 0, 0, 1])
    config = LearnConfig(policy="placer", learner="reinforce")
    policy = POLICIES["placer"](measurer.problem, config, 0)
    learner = LEARNERS["reinforce"](policy, config, 0)
    for _ in range(60):
        rows = policy.sample(16)
        learner.update(rows, -np.sqrt(measurer.step_times(rows)))
    assert policy.mode().tolist() == [0, 1, 1, 0, 0, 1]


def test_a_policy_without_parameters_is_refused() -> None:
    class Coin:
        num_groups, num_devices = 2, 2
        sample = log_prob = mode = save = None

    with pytest.raises(InvalidValue, match=r"Coin.*parameters"):
        Reinforce(Coin())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"max_grad_norm": -1.0},
        {"baseline_decay": 1.0},
        {"failing_until": 1.5},
        {"noise_until": -0.1},
        {"logit_noise": -1.0},
        {"ent_coef": -1.0},
        {"elite_coef": -1.0},
        {"flips": 0.0},
    ],
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(options))):
        ReinforceConfig(**options)
