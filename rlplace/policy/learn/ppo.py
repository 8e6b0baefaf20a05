"""`PlacerPPO`: Stable-Baselines3's PPO with a ratio for each group, and with self-imitation."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, GymEnv, Schedule
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from rlplace.env.one_shot import observation_space
from rlplace.errors import InvalidValue
from rlplace.policy.learn.elites import Elites
from rlplace.policy.learn.imitate import cloning_loss
from rlplace.policy.learn.rollout_buffer import PlacementRolloutBuffer
from rlplace.policy.placer.policy import PlacerPolicy


class PlacerPPO(PPO):
    """Proximal policy optimisation (Schulman et al. 2017) for placements of many groups at once.

    It differs from Stable-Baselines3's in four ways:

    - the surrogate is clipped for each group and averaged over groups, since the ratio of a whole placement, a product
      over hundreds of groups, explodes;
    - the advantage is the reward less the mean of the rollout (see `PlacementRolloutBuffer`);
    - a sample differs from the policy's mode in about `flips` groups (see `PlacerPolicy.set_flips`);
    - besides the surrogate, the policy clones the best placements that it has seen (self-imitation, Oh et al. 2018;
      with only this term it would be a cross-entropy method).

    The env may be exchanged by `set_env` for one that measures otherwise, also with another number of envs.

    Attributes:
        elites: the best placements seen on this env, which the policy clones.
    """

    policy: PlacerPolicy
    rollout_buffer: PlacementRolloutBuffer

    def __init__(
        self,
        policy: PlacerPolicy,
        env: VecEnv,
        learning_rate: float | Schedule = 3e-3,
        n_steps: int = 1,
        batch_size: int | None = None,
        n_epochs: int = 3,
        clip_range: float | Schedule = 0.2,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 1.0,
        target_kl: float | None = None,
        flips: float | Schedule = 2.0,
        elite_coef: float = 1.0,
        num_elites: int = 1,
        elite_smoothing: float = 0.02,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = 0,
    ) -> None:
        """A learner for `policy` on `env`.

        Args:
            policy: learns, in place.
            env: one-step episodes, `PlacementVecEnv` for one.
            learning_rate: of Adam.
            n_steps: steps of all envs a rollout.
            batch_size: placements a gradient step; by default the whole rollout.
            n_epochs: passes over a rollout.
            clip_range: how far the ratio of a group may leave 1.
            normalize_advantage: divide the advantages of a minibatch by their spread.
            ent_coef: weight of the mean entropy of a group.
            vf_coef: weight of the value's error.
            max_grad_norm: gradients are scaled down to this norm.
            target_kl: end a rollout's passes early when a group's mean divergence passes 1.5 times this.
            flips: groups in which a sample differs from the mode, on average.
            elite_coef: weight of cloning the best placements; 0 is plain PPO.
            num_elites: how many of the best to clone.
            elite_smoothing: label smoothing in cloning.
            stats_window_size: episodes that logged means are taken over.
            tensorboard_log: folder of TensorBoard logs.
            verbose: 1 prints a table each rollout.
            seed: of sampling and shuffling.

        Raises:
            InvalidValue: fewer than two placements a rollout, or an option out of range.
        """
        for name, value, least in (("n_epochs", n_epochs, 1), ("num_elites", num_elites, 1), ("n_steps", n_steps, 1)):
            if value < least:
                raise InvalidValue(name, value, f"at least {least}", where="PlacerPPO")
        if n_steps * env.num_envs < 2:
            raise InvalidValue("n_steps * num_envs", n_steps * env.num_envs, "at least 2", where="PlacerPPO")
        self._given_policy = policy
        self.flips = FloatSchedule(flips)
        self.elite_coef = elite_coef
        self.elite_smoothing = elite_smoothing
        self.elites = Elites(num_elites)
        super().__init__(
            PlacerPolicy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            batch_size=n_steps * env.num_envs if batch_size is None else batch_size,
            n_epochs=n_epochs,
            clip_range=clip_range,
            normalize_advantage=normalize_advantage,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            target_kl=target_kl,
            rollout_buffer_class=PlacementRolloutBuffer,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            seed=seed,
            device="cpu",
        )
        self._whole_rollout = batch_size is None
        self._logger = Logger(folder=None, output_formats=[])  # until `learn` makes one

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.clip_schedule = FloatSchedule(self.clip_range)
        self.policy = self._given_policy
        self.rollout_buffer = self._make_buffer(self.n_steps, self.n_envs)
        self.set_random_seed(self.seed)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seeds everything that this learner draws; with None, nothing."""
        super().set_random_seed(seed)
        if seed is not None:
            self.policy.generator.manual_seed(seed)
            self.rollout_buffer.rng = np.random.default_rng(seed)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Goes on with another env of the same spaces; what was best on the old one is forgotten."""
        env = self._wrap_env(env, self.verbose)
        if env.num_envs != self.n_envs:
            rng = self.rollout_buffer.rng
            self.n_envs = env.num_envs
            self.rollout_buffer = self._make_buffer(self.n_steps, env.num_envs)
            self.rollout_buffer.rng = rng
            if self._whole_rollout:
                self.batch_size = self.n_steps * env.num_envs
        super().set_env(env, force_reset=force_reset)
        self.elites.clear()

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Fills the buffer with placements around the mode; False when the callback ends training."""
        self.policy.set_flips(self.flips(self._current_progress_remaining))
        return bool(super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps))

    def learn_from(self, group_devices_BG: NDArray[np.integer], rewards_B: NDArray[np.floating]) -> None:
        """One update on placements (B, G) that were measured elsewhere, with their rewards (B,).

        They need not come from this policy: their log-probabilities are those of the policy as it is now. Afterwards
        samples differ from the mode in as many groups as during `learn`.
        """
        actions_BG = np.asarray(group_devices_BG, dtype=np.int64)
        buffer = self._make_buffer(len(actions_BG), 1)
        buffer.rng = self.rollout_buffer.rng
        observation = {"graph": np.zeros(1, dtype=np.int64)}
        with torch.no_grad():
            values_B1, log_prob_BG, _ = self.policy.evaluate_actions(
                {"graph": torch.zeros(len(actions_BG))}, torch.from_numpy(actions_BG)
            )
        for row, reward in enumerate(np.asarray(rewards_B, dtype=np.float32)):
            buffer.add(observation, actions_BG[row], reward, np.ones(1), values_B1[row], log_prob_BG[row : row + 1])
        buffer.compute_returns_and_advantage(values_B1, np.ones(1, dtype=np.bool_))
        self._update(buffer, len(actions_BG) if self._whole_rollout else self.batch_size)
        self.policy.set_flips(self.flips(self._current_progress_remaining))

    def train(self) -> None:
        """Updates the policy from the rollout, and logs."""
        self._update(self.rollout_buffer, self.batch_size)

    def _update(self, buffer: PlacementRolloutBuffer, batch_size: int) -> None:
        self.policy.set_training_mode(True)
        for group in self.policy.optimizer.param_groups:
            group["lr"] = self.lr_schedule(self._current_progress_remaining)
        clip_range = self.clip_schedule(self._current_progress_remaining)
        num_groups = self.policy.num_groups
        self.elites.add(buffer.actions.reshape(-1, num_groups), buffer.rewards.reshape(-1))
        elites_MG = torch.from_numpy(self.elites.group_devices.astype(np.int64))
        log: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.n_epochs):
            self._n_updates += 1
            if not all(self._step(samples, elites_MG, clip_range, log) for samples in buffer.get(batch_size)):
                break
        for name, values in log.items():
            self.logger.record(f"train/{name}", float(np.mean(values)))
        self.logger.record("train/temperature", float(self.policy.temperature))
        self.logger.record("train/best_reward", float(self.elites.rewards[0]))
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _step(
        self, samples: DictRolloutBufferSamples, elites_MG: Tensor, clip_range: float, log: dict[str, list[float]]
    ) -> bool:
        """Takes a gradient step; False, and no step, where the policy has gone too far from the one that sampled."""
        loss, approx_kl = self._loss(samples, elites_MG, clip_range, log)
        if self.target_kl is not None and approx_kl > 1.5 * self.target_kl:
            return False
        self.policy.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        return True

    def _loss(
        self, samples: DictRolloutBufferSamples, elites_MG: Tensor, clip_range: float, log: dict[str, list[float]]
    ) -> tuple[Tensor, float]:
        """The loss of a minibatch, and the mean divergence of a group from the policy that made it."""
        logits_GD = self.policy.logits()  # once, for the surrogate and for the elites
        distribution = self.policy.distribution(logits_GD, 1)
        log_prob_BG = distribution.group_log_prob(samples.actions)
        values_B1 = self.policy.predict_values(samples.observations)
        advantages_B = samples.advantages
        if self.normalize_advantage and len(advantages_B) > 1:
            advantages_B = (advantages_B - advantages_B.mean()) / (advantages_B.std() + 1e-8)
        log_ratio_BG = log_prob_BG - samples.old_log_prob
        policy_loss = clipped_group_loss(log_ratio_BG, advantages_B, clip_range)
        value_loss = F.mse_loss(samples.returns, values_B1.flatten())
        entropy = distribution.group_entropy().mean()
        elite_loss = cloning_loss(logits_GD, elites_MG, self.elite_smoothing).mean()
        loss = policy_loss - self.ent_coef * entropy + self.vf_coef * value_loss + self.elite_coef * elite_loss
        with torch.no_grad():
            approx_kl = float((log_ratio_BG.exp() - 1 - log_ratio_BG).mean())
            clip_fraction = float(((log_ratio_BG.exp() - 1).abs() > clip_range).float().mean())
        for name, value in (
            ("policy_gradient_loss", policy_loss.item()),
            ("value_loss", value_loss.item()),
            ("entropy", entropy.item()),
            ("elite_loss", elite_loss.item()),
            ("approx_kl", approx_kl),
            ("clip_fraction", clip_fraction),
            ("loss", loss.item()),
        ):
            log[name].append(value)
        return loss, approx_kl

    def _make_buffer(self, buffer_size: int, n_envs: int) -> PlacementRolloutBuffer:
        return PlacementRolloutBuffer(
            buffer_size, observation_space(), self.action_space, device=self.device, n_envs=n_envs
        )


def clipped_group_loss(log_ratio_BG: Tensor, advantages_B: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), each group's ratio by itself, as a loss."""
    ratio_BG = log_ratio_BG.exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BG = ratio_BG.clamp(1 - clip_range, 1 + clip_range)
    return -torch.min(advantages_B1 * ratio_BG, advantages_B1 * clipped_BG).mean()
