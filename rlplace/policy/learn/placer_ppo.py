"""`PlacerPPO`: `GroupPPO` behind the face of Stable-Baselines3's PPO, for a `PlacerPolicy` and an env."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv

from rlplace.env.problem_features import index_space
from rlplace.errors import InvalidValue
from rlplace.policy.config import PPOConfig
from rlplace.policy.learn.elites import Elites
from rlplace.policy.learn.ppo import GroupPPO
from rlplace.policy.placer import PlacerPolicy


class PlacerPPO(PPO):
    """Stable-Baselines3's PPO with its loop, callbacks and logs, of which every rollout is an update of `GroupPPO`.

    The env may be exchanged by `set_env` for one that measures otherwise, also with another number of envs.
    """

    policy: PlacerPolicy

    def __init__(
        self, policy: PlacerPolicy, env: VecEnv, config: PPOConfig | None = None, *, seed: int = 0, **options: Any
    ) -> None:
        """A learner for `policy`.

        Args:
            policy: learns, in place.
            env: one-step episodes: `PlacementVecEnv`.
            config: how; or give its fields as keywords.
            seed: of sampling and shuffling.
            options: fields of `PPOConfig`, over those of `config`.

        Raises:
            InvalidValue: fewer than two placements a rollout, or an option out of range.
        """
        self.config = dataclasses.replace(config or PPOConfig(), **options)
        num_placements = self.config.n_steps * env.num_envs
        if num_placements < 2:
            raise InvalidValue("n_steps * num_envs", num_placements, "at least 2", where="PlacerPPO")
        self._given_policy, self._learner = policy, GroupPPO(policy, self.config, seed=seed)
        super().__init__(
            PlacerPolicy,
            env,
            learning_rate=self.config.learning_rate,
            n_steps=self.config.n_steps,
            batch_size=num_placements,
            n_epochs=self.config.n_epochs,
            vf_coef=0.0,  # every episode starts in the same state: the mean of a rollout is the better baseline
            seed=seed,
            device="cpu",
        )
        self._logger = Logger(folder=None, output_formats=[])  # until `learn` makes one

    @property
    def elites(self) -> Elites:
        """The best placements seen on this env, which the policy clones."""
        return self._learner.elites

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.policy = self._given_policy
        self.rollout_buffer = self._make_buffer()
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

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Goes on with another env of the same spaces; what was best on the old one is forgotten."""
        env = self._wrap_env(env, self.verbose)
        if env.num_envs != self.n_envs:
            self.n_envs = env.num_envs
            self.rollout_buffer = self._make_buffer()
        super().set_env(env, force_reset=force_reset)
        self._learner.forget()

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements of groups, (G,) or (M, G), before learning from rewards."""
        self._learner.imitate(group_devices)

    def train(self) -> None:
        """Updates the policy from the rollout, and logs."""
        rows_BG = self.rollout_buffer.actions.reshape(-1, self.policy.num_groups)
        progress = 1.0 - self._current_progress_remaining
        for name, value in self._learner.update(
            rows_BG, self.rollout_buffer.rewards.ravel(), progress=progress
        ).items():
            self.logger.record(f"train/{name}", value)

    def _make_buffer(self) -> DictRolloutBuffer:
        return DictRolloutBuffer(self.n_steps, index_space(), self.action_space, device=self.device, n_envs=self.n_envs)
