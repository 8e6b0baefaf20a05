"""`PlacerPPO`: Stable-Baselines3's PPO with a ratio for each group, and with self-imitation."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, GymEnv
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlplace.env.one_shot import observation_space
from rlplace.errors import InvalidValue
from rlplace.policy.config import PPOConfig
from rlplace.policy.learn.elites import Elites
from rlplace.policy.learn.imitate import cloning_loss, imitate
from rlplace.policy.learn.rollout_buffer import PlacementRolloutBuffer
from rlplace.policy.learn.state import (
    LearnerState,
    elites_state,
    load_elites_state,
    load_optimizer_state,
    load_policy_state,
    optimizer_state,
    policy_state,
)
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
        env: VecEnv | None = None,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """A learner for `policy`.

        Args:
            policy: learns, in place.
            env: one-step episodes, `PlacementVecEnv` for one; `learn` needs it, `update` does not.
            config: how; or give its fields as keywords.
            seed: of sampling and shuffling.
            options: fields of `PPOConfig`, over those of `config`.

        Raises:
            InvalidValue: fewer than two placements a rollout, or an option out of range.
        """
        config = dataclasses.replace(config or PPOConfig(), **options)
        if env is not None and config.n_steps * env.num_envs < 2:
            raise InvalidValue("n_steps * num_envs", config.n_steps * env.num_envs, "at least 2", where="PlacerPPO")
        self._given_policy = policy
        self.flips = FloatSchedule(config.flips)
        self.elite_coef, self.elite_smoothing = config.elite_coef, config.elite_smoothing
        self.elites = Elites(config.num_elites)
        num_envs = 1 if env is None else env.num_envs
        self._whole_rollout = config.batch_size is None
        super().__init__(
            PlacerPolicy,
            env,  # type: ignore[arg-type]  # None until `set_env`: `update` needs no env
            learning_rate=config.learning_rate,
            n_steps=config.n_steps,
            batch_size=max(config.n_steps * num_envs, 2) if config.batch_size is None else config.batch_size,
            n_epochs=config.n_epochs,
            clip_range=config.clip_range,
            normalize_advantage=config.normalize_advantage,
            ent_coef=config.ent_coef,
            vf_coef=0.0,  # every episode starts in the same state: the mean of a rollout is the better baseline
            max_grad_norm=config.max_grad_norm,
            target_kl=config.target_kl,
            rollout_buffer_class=PlacementRolloutBuffer,
            seed=seed,
            device="cpu",
        )
        self._logger = Logger(folder=None, output_formats=[])  # until `learn` makes one

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        if self.env is None:  # Stable-Baselines3 takes all of this from the env
            given = self._given_policy
            self.n_envs, self.observation_space, self.action_space = 1, given.observation_space, given.action_space
        self.clip_schedule = FloatSchedule(self.clip_range)
        self.policy = self._given_policy
        self.rollout_buffer = self._make_buffer(self.n_steps, self.n_envs)
        self.set_random_seed(self.seed)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seeds everything that this learner draws; with None, nothing.

        The global generators of Python, NumPy and PyTorch, which Stable-Baselines3 seeds too, belong to the user.
        """
        if seed is not None:
            self.action_space.seed(seed)
            if self.env is not None:
                self.env.seed(seed)
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

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements of groups, (G,) or (M, G), before learning from rewards."""
        imitate(self.policy, group_devices)
        self.policy.set_flips(self.flips(self._current_progress_remaining))

    def forget(self) -> None:
        """Forgets the best placements seen, as when rewards come to mean something else."""
        self.elites.clear()

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """One update on placements (B, G) with their rewards (B,); its losses, entropy and so on by name.

        They need not come from this policy: their log-probabilities are those of the policy as it is now. Afterwards
        samples differ from the mode in as many groups as during `learn`.

        Args:
            group_devices: devices of groups.
            rewards: of each placement.
            progress: share of learning that is done, 0 to 1, for what changes over time.
        """
        actions_BG = np.asarray(group_devices, dtype=np.int64)
        self._current_progress_remaining = 1.0 - progress
        buffer = self._make_buffer(len(actions_BG), 1)
        buffer.rng = self.rollout_buffer.rng
        observation = {"graph": np.zeros(1, dtype=np.int64)}
        with torch.no_grad():
            values_B1, log_prob_BG, _ = self.policy.evaluate_actions(
                {"graph": torch.zeros(len(actions_BG))}, torch.from_numpy(actions_BG)
            )
        for row, reward in enumerate(np.asarray(rewards, dtype=np.float32)):
            buffer.add(observation, actions_BG[row], reward, np.ones(1), values_B1[row], log_prob_BG[row : row + 1])
        buffer.compute_returns_and_advantage(values_B1, np.ones(1, dtype=np.bool_))
        figures = self._update(buffer, len(actions_BG) if self._whole_rollout else self.batch_size)
        self.policy.set_flips(self.flips(self._current_progress_remaining))
        return figures

    def state(self) -> LearnerState:
        """All that it and its policy need to go on with `update`; an env is no part of it."""
        facts = {"shuffling": self.rollout_buffer.rng.bit_generator.state, "n_updates": self._n_updates}
        state = LearnerState({}, facts).with_part("policy", policy_state(self.policy))
        state = state.with_part("optimizer", optimizer_state(self.policy.optimizer))
        return state.with_part("elites", elites_state(self.elites))

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options.

        Raises:
            KeyError, RuntimeError, ValueError: it is of another policy.
        """
        load_policy_state(self.policy, state.part("policy"))
        load_optimizer_state(self.policy.optimizer, state.part("optimizer"))
        load_elites_state(self.elites, state.part("elites"))
        self.rollout_buffer.rng.bit_generator.state = state.facts["shuffling"]
        self._n_updates = state.facts["n_updates"]

    def train(self) -> None:
        """Updates the policy from the rollout, and logs."""
        self._update(self.rollout_buffer, self.batch_size)

    def _update(self, buffer: PlacementRolloutBuffer, batch_size: int) -> dict[str, float]:
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
        figures = {name: float(np.mean(values)) for name, values in log.items()}
        figures |= {
            "temperature": float(self.policy.temperature),
            "best_reward": float(self.elites.rewards[0]),
            "n_updates": float(self._n_updates),
        }
        for name, value in figures.items():
            self.logger.record(f"train/{name}", value)
        return figures

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
        advantages_B = samples.advantages
        if self.normalize_advantage and len(advantages_B) > 1:
            advantages_B = (advantages_B - advantages_B.mean()) / (advantages_B.std() + 1e-8)
        log_ratio_BG = log_prob_BG - samples.old_log_prob
        policy_loss = clipped_group_loss(log_ratio_BG, advantages_B, clip_range)
        entropy = distribution.group_entropy().mean()
        elite_loss = cloning_loss(logits_GD, elites_MG, self.elite_smoothing).mean()
        loss = policy_loss - self.ent_coef * entropy + self.elite_coef * elite_loss
        with torch.no_grad():
            approx_kl = float((log_ratio_BG.exp() - 1 - log_ratio_BG).mean())
            clip_fraction = float(((log_ratio_BG.exp() - 1).abs() > clip_range).float().mean())
        for name, value in (
            ("policy_gradient_loss", policy_loss.item()),
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
