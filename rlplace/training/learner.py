"""`PolicySearch`: a policy that imitates, then learns from simulated and at last from measured placements."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from rlplace.env import PlacementVecEnv, make_reward
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import PlacerPPO, imitate, make_policy, save_policy
from rlplace.runs.folder import RunFolder
from rlplace.runs.tracking import Tracker
from rlplace.search.groups import majority_devices
from rlplace.training.candidates import Candidates
from rlplace.training.config import TrainConfig
from rlplace.training.sb3_writer import sb3_logger

SCREENED = 8
"""Samples simulated for each one that is measured."""


class PolicySearch:
    """A `Proposer` whose every placement is a sample or the mode of its policy.

    Args:
        problem: what is placed.
        simulator: what the policy learns from first.
        config: rewards, sizes and seed.
        teacher: (N,) placement to start from, or None.
        tracker: takes losses and entropy.
    """

    def __init__(
        self,
        problem: Problem,
        simulator: Simulator,
        config: TrainConfig,
        *,
        teacher: NDArray[np.int32] | None,
        tracker: Tracker,
    ) -> None:
        self._problem, self._simulator = problem, simulator
        # the learner knows step times as ratios to one device's: simulated and measured rewards then mean the same
        one = problem.nearest_groups(np.zeros((1, problem.grouping.num_groups), dtype=np.int32))
        single_s = float(simulator.step_times(problem.grouping.expand(one))[0])
        baseline_s = single_s if np.isfinite(single_s) else float(problem.costs.op_time_s[:, 0].sum())
        self._reward = make_reward(config.reward, baseline_s)
        self._baseline_s = baseline_s
        self._env = PlacementVecEnv(simulator, max(config.num_envs, 2), self._reward)
        self.policy = make_policy(problem, seed=config.seed)
        self._learner = PlacerPPO(self.policy, self._env, seed=config.seed)
        self._learner.set_logger(sb3_logger(tracker))
        self.init = "scratch" if teacher is None else f"imitate:{config.init}"
        if teacher is not None:
            imitate(self.policy, majority_devices(problem, teacher))
        self._is_measuring = False

    def simulate(self, candidates: Candidates, deadline_s: float, on_round: Callable[[], None]) -> None:
        """PPO on the simulator until `deadline_s`."""
        if time.monotonic() < deadline_s:
            self._learner.learn(10**12, callback=_Recorder(self._env, candidates, deadline_s, on_round))
        mode = self.policy.mode()[None]
        candidates.propose(mode, self._simulate(mode))

    def propose(self, count: int) -> NDArray[np.int32]:
        """(count, G) samples of the policy and its mode, the best of several by simulation."""
        rows = np.concatenate((self.policy.mode()[None], self.policy.sample(count * SCREENED)))
        rows = np.unique(rows, axis=0)
        order = np.argsort(self._simulate(rows), kind="stable")
        return rows[order[:count]]

    def learn(self, group_devices_BG: NDArray[np.int32], ratios: NDArray[np.float64]) -> None:
        """One PPO update on measured placements; the first one forgets the simulator's favourites."""
        if not self._is_measuring:
            self._learner.elites.clear()
            self._is_measuring = True
        self._learner.learn_from(group_devices_BG, self._reward(ratios * self._baseline_s))
        self._learner.logger.dump(self._learner.num_timesteps)

    def save(self, run: RunFolder) -> None:
        """Writes `policy.safetensors` and `policy.json`."""
        save_policy(self.policy, run.path("policy.safetensors"))

    def _simulate(self, rows: NDArray[np.int32]) -> NDArray[np.float64]:
        return self._simulator.step_times(self._problem.grouping.expand(rows))


class _Recorder(BaseCallback):
    """Notes every placement that PPO tries, and stops it in time."""

    def __init__(
        self, env: PlacementVecEnv, candidates: Candidates, deadline_s: float, on_round: Callable[[], None]
    ) -> None:
        super().__init__()
        self._env, self._candidates, self._deadline_s, self._on_round = env, candidates, deadline_s, on_round

    def _on_step(self) -> bool:
        scores = self._env.last_scores
        if scores is not None:
            self._candidates.propose(self.locals["actions"], scores.step_time_s)
        self._on_round()
        return time.monotonic() < self._deadline_s
