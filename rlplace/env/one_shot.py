"""`OneShotEnv`: one action places all groups, and the episode is over.

Importing this module registers `rlplace/OneShot-v0`, which simulates, and `rlplace/OneShotMeasured-v0`, for a host that
runs the placements. `gymnasium.make("rlplace.env:rlplace/OneShot-v0", ...)` imports it first.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.actions import check_actions
from rlplace.env.graph_observation import GraphObservation
from rlplace.env.measurers import NUM_GROUPS, SharedMeasurer, find_measurer
from rlplace.env.placement_env import Observation, PlacementEnv
from rlplace.env.rewards import Reward
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

Action = NDArray[np.int64]


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """A device for each of G groups."""
    return spaces.MultiDiscrete(np.full(problem.grouping.num_groups, problem.host.num_devices))


class OneShotEnv(PlacementEnv[Action]):
    """Places all G groups of a problem at once, as in Mirhoseini et al. 2017.

    | space | |
    |---|---|
    | action | `MultiDiscrete`, (G,): the device of each group |
    | observation | `Dict`: `graph`, the index of the graph; or its features, see `GraphObservation` |
    | reward | of the step time, once |

    The info of a step has `step_time_s` (infinite where the placement failed), `status` and `placement`, (N,) int32. A
    group may be barred from some devices: `action_masks` says from which, and an action that has one there fails.
    """

    action_space: spaces.MultiDiscrete

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer | None = None,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        render_mode: str | None = None,
        *,
        problem: Problem | None = None,
        workload: str | None = None,
        host: str | Host = "auto",
        num_groups: int = NUM_GROUPS,
        workload_seed: int = 0,
        observation: str = "index",
    ) -> None:
        """An env over the problem of `measurer`, over `problem`, or over `workload` on `host`.

        Args:
            measurer: what measures placements; where it is not given, they are simulated or, if not `deterministic`,
                run on the problem's host.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: `human`, `rgb_array` or `ansi`; None draws nothing.
            problem: what is placed, instead of `measurer`.
            workload: a WORKLOAD word (`nmt@small`), instead of either.
            host: a HOST word (`4xV100-pcie`) or a host, for a workload.
            num_groups: groups to aim at, for a workload.
            workload_seed: of a workload's weights and inputs.
            observation: `index` or `graph`, see `GraphObservation`.

        Raises:
            UnknownName: no reward, render mode or observation has that name.
            InvalidValue: not exactly one of `measurer`, `problem` and `workload`.
            UserError: a workload or host that cannot be had.
        """
        found = find_measurer(measurer, problem, workload, host, num_groups, workload_seed, runs=not deterministic)
        super().__init__(found, reward, baseline_s, deterministic, render_mode)
        self._observation = GraphObservation(self.problem, observation)
        self.observation_space = self._observation.space
        self.action_space = action_space(self.problem)

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device, as sb3-contrib's maskable algorithms ask for it."""
        return self.problem.group_allowed.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` change nothing, as nothing here is random."""
        super().reset(seed=seed, options=options)
        return self._observation.one(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Measures the placement `action`, (G,), and ends the episode.

        Raises:
            InvalidValue: not (G,) integers that name devices, or a reward of the user's that is not finite.
        """
        devices = check_actions(action, self.action_space, "OneShotEnv")
        scores = self.scorer.score(devices[None])
        info = self._ended(float(scores.step_time_s[0]), scores.status[0], scores.placements[0])
        return self._observation.one(), float(scores.reward[0]), True, False, info


gym.register("rlplace/OneShot-v0", entry_point="rlplace.env.one_shot:OneShotEnv", kwargs={"deterministic": True})
gym.register(
    "rlplace/OneShotMeasured-v0",
    entry_point="rlplace.env.one_shot:OneShotEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)
