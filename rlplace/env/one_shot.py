"""`OneShotEnv`: one action places all groups, and the episode is over.

Importing this module registers `rlplace/OneShot-v0`, for a measurer that always gives the same answer (the simulator),
and `rlplace/OneShotMeasured-v0`, for a host that runs the placements: `gymnasium.make(name, measurer=measurer)`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.placement_env import Observation, PlacementEnv, SharedMeasurer
from rlplace.env.rewards import Reward
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

Action = NDArray[np.int64]


def observation_space() -> spaces.Dict:
    """A dictionary with `graph`, the index of the graph to be placed.

    What there is to know of a graph never changes, so the observation only points to it: the policy holds the features,
    and a rollout buffer need not keep a copy a step.
    """
    return spaces.Dict({"graph": spaces.Discrete(1)})


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """A device for each of G groups."""
    return spaces.MultiDiscrete(np.full(problem.grouping.num_groups, problem.host.num_devices))


class OneShotEnv(PlacementEnv[Action]):
    """Places all G groups of a problem at once, as in Mirhoseini et al. 2017.

    | space | |
    |---|---|
    | action | `MultiDiscrete`, (G,): the device of each group |
    | observation | `Dict`: `graph`, the index of the graph |
    | reward | of the step time, once |

    The info of a step has `step_time_s` (infinite where the placement failed), `status` and `placement`, (N,) int32. A
    group may be barred from some devices: `action_masks` says from which, and an action that has one there fails.
    """

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        render_mode: str | None = None,
    ) -> None:
        """An env over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: None; there is nothing to see.

        Raises:
            UnknownName: no reward has that name.
            InvalidValue: `render_mode` is not None.
        """
        super().__init__(measurer, reward, baseline_s, deterministic, render_mode)
        self.observation_space = observation_space()
        self.action_space = action_space(self.problem)

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device, as sb3-contrib's maskable algorithms ask for it."""
        return self.problem.group_allowed.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` change nothing, as nothing here is random."""
        super().reset(seed=seed, options=options)
        return self._observe(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Measures the placement `action`, (G,), and ends the episode."""
        scores = self.scorer.score(np.asarray(action)[None])
        info = {
            "step_time_s": float(scores.step_time_s[0]),
            "status": scores.status[0],
            "placement": scores.placements[0],
        }
        return self._observe(), float(scores.reward[0]), True, False, info

    def _observe(self) -> Observation:
        return {"graph": np.int64(0)}


gym.register("rlplace/OneShot-v0", entry_point="rlplace.env.one_shot:OneShotEnv", kwargs={"deterministic": True})
gym.register(
    "rlplace/OneShotMeasured-v0",
    entry_point="rlplace.env.one_shot:OneShotEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)
