"""`SequentialEnv`: an action places one group; the episode is over when all are placed.

Importing this module registers `rlplace/Sequential-v0`, which simulates, and `rlplace/SequentialMeasured-v0`, for a
host that runs the placements. `gymnasium.make("rlplace.env:rlplace/Sequential-v0", ...)` imports it first.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.actions import check_actions
from rlplace.env.measurers import NUM_GROUPS, SharedMeasurer, find_measurer
from rlplace.env.placement_env import Observation, PlacementEnv
from rlplace.env.rewards import Reward, rewards_of
from rlplace.env.sequential.batch import SequentialBatch
from rlplace.env.sequential.observation import batch_observation, flat_features, last_observation, observation_space
from rlplace.env.sequential.potential import Shaping
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem


class SequentialEnv(PlacementEnv[np.int64]):
    """Places one of G groups a step on one of D devices, over the schedule of those placed so far.

    | space | |
    |---|---|
    | action | `Discrete(D)`: the device of the next group; with `choose_group` `Discrete(G * D)`: group * D + device |
    | observation | `Dict`: `group`, the group that is next, and `features` of each device for it |
    | reward | differences of a potential, which add up to what `OneShotEnv` gives for the same placement |

    Groups come in the order of their first ops, or by `order`; a group that is chosen earlier waits in the schedule.
    The info of the last step is that of a step of `OneShotEnv`; before it is empty.

    `action_masks` says where a group may be: where its pins allow it, and it fits into memory. An action against either
    does not end the episode: in the end the placement is judged as in `OneShotEnv`, where a broken pin fails. A group
    that is chosen twice ends the episode at once, with the reward of a failure.
    """

    action_space: spaces.Discrete

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer | None = None,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        potential: str = "bound",
        choose_group: bool = False,
        order: NDArray[np.floating] | None = None,
        memory_mask: str = "resident",
        render_mode: str | None = None,
        *,
        problem: Problem | None = None,
        workload: str | None = None,
        host: str | Host = "auto",
        num_groups: int = NUM_GROUPS,
        workload_seed: int = 0,
    ) -> None:
        """An env over the problem of `measurer`, over `problem`, or over `workload` on `host`.

        Args:
            measurer: what measures placements; where it is not given, they are simulated or, if not `deterministic`,
                run on the problem's host.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            potential: one of `POTENTIALS`; with `none` all rewards but the last are 0.
            choose_group: whether an action says which group is placed, too.
            order: (G,) priorities of groups, higher first; the order of their first ops by default.
            memory_mask: one of `MEMORY_MASKS`: what of a group has to fit on a device.
            render_mode: `human`, `rgb_array` or `ansi`; None draws nothing.
            problem: what is placed, instead of `measurer`.
            workload: a WORKLOAD word (`nmt@small`), instead of either.
            host: a HOST word (`4xV100-pcie`) or a host, for a workload.
            num_groups: groups to aim at, for a workload.
            workload_seed: of a workload's weights and inputs.

        Raises:
            UnknownName: no reward, potential, mask or render mode has that name.
            InvalidValue: not exactly one of `measurer`, `problem` and `workload`, or not one finite number a group in
                `order`.
            UserError: a workload or host that cannot be had.
        """
        found = find_measurer(measurer, problem, workload, host, num_groups, workload_seed, runs=not deterministic)
        super().__init__(found, reward, baseline_s, deterministic, render_mode)
        self._shaping = Shaping(potential, self.scorer.reward, 1)
        self._batch = SequentialBatch(self.problem, 1, order=order, memory_mask=memory_mask)
        self._chooses_group = choose_group
        self._is_over = False
        num_devices = self._batch.num_devices
        self._num_actions = num_devices * (self._batch.num_groups if choose_group else 1)
        space = observation_space(self._batch.num_groups, num_devices, choose_group=choose_group)
        self._last_observation = last_observation(space)
        self.observation_space = space
        self.action_space = spaces.Discrete(self._num_actions)

    def action_masks(self) -> NDArray[np.bool_]:
        """(D,) or (G * D,) bool: whether each action is allowed now; never all False, True everywhere after the end."""
        if self._is_over:
            return np.ones(self._num_actions, dtype=np.bool_)
        seen = self._batch.observe_all(0)[1] if self._chooses_group else self._batch.observe().mask.copy()
        return seen.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` change nothing, as nothing here is random."""
        super().reset(seed=seed, options=options)
        self._batch.reset()
        self._shaping.reset()
        self._is_over = False
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Places a group; the last one's placement is measured, and ends the episode.

        Raises:
            InvalidValue: the action is no integer of the space, the episode is over, or a reward of the user's is not
                finite.
        """
        if self._is_over:
            raise InvalidValue("step", "after the end", "reset first", where="SequentialEnv")
        devices = check_actions(action, self.action_space, "SequentialEnv").reshape(-1)
        groups: NDArray[np.integer] | None = None
        if self._chooses_group:
            groups, devices = np.divmod(devices, self._batch.num_devices)
            if self._batch.placed[0, groups[0]] >= 0:
                return self._end(np.full(1, np.inf), "error", self.problem.grouping.expand(self._batch.placed[0]))
        self._batch.step(devices, groups)
        if not self._batch.is_done:
            return self._observe(), float(self._shaping.step(self._batch)[0]), False, False, {}
        scores = self.scorer.score(self._batch.placed)
        return self._end(scores.step_time_s, scores.status[0], scores.placements[0])

    def _end(
        self, step_time_s: NDArray[np.float64], status: str, placement: NDArray[np.int32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._is_over = True
        reward = self._shaping.finish(rewards_of(self.scorer.reward, step_time_s))
        info = self._ended(float(step_time_s[0]), status, placement)
        return self._observe(), float(reward[0]), True, False, info

    def _observe(self) -> Observation:
        if self._is_over:
            return self._last_observation | {"features": self._last_observation["features"].copy()}
        seen = batch_observation(self._batch.observe())
        if self._chooses_group:
            seen["features"] = flat_features(self._batch.observe_all(0)[0], is_batch=False)[None]
        return {name: rows[0] for name, rows in seen.items()}


gym.register(
    "rlplace/Sequential-v0", entry_point="rlplace.env.sequential.env:SequentialEnv", kwargs={"deterministic": True}
)
gym.register(
    "rlplace/SequentialMeasured-v0",
    entry_point="rlplace.env.sequential.env:SequentialEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)
