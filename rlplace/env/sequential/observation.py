"""Observations and action spaces of the sequential envs: flat arrays of fixed shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.sequential.batch import SequentialObservation
from rlplace.search.schedule.decision_features import DECISION_FEATURES

LARGEST = 1e6
"""No feature is larger; what would be is cut off."""


def observation_space(num_groups: int, num_devices: int, *, choose_group: bool = False) -> spaces.Dict:
    """A dictionary with `group`, the group that is next, and `features`, flat float32.

    Features are log(1 + x) of `DECISION_FEATURES`, device after device: (D * F,). With `choose_group` they are those of
    every group, group after group: (G * D * F,), zeros for groups that are decided. After the last step all is 0.
    """
    count = num_devices * len(DECISION_FEATURES) * (num_groups if choose_group else 1)
    features = spaces.Box(0.0, float(np.log1p(LARGEST)), (count,), np.float32)
    return spaces.Dict({"group": spaces.Discrete(num_groups), "features": features})


def last_observation(space: spaces.Dict) -> dict[str, Any]:
    """What is seen after the last step: zeros."""
    return {"group": np.int64(0), "features": np.zeros(space["features"].shape or (), dtype=np.float32)}


def flat_features(features: NDArray[np.float32], *, is_batch: bool) -> NDArray[np.float32]:
    """A new array of log(1 + x) of `features`, all axes but that of a batch made one."""
    flat = np.clip(features.reshape(len(features), -1) if is_batch else features.reshape(-1), 0.0, LARGEST)
    return np.log1p(flat, out=flat)


def batch_observation(observation: SequentialObservation) -> dict[str, NDArray[Any]]:
    """The observations of B envs: `group` (B,) int64 and `features` (B, D * F) float32."""
    return {
        "group": np.maximum(observation.group, 0),
        "features": flat_features(observation.features, is_batch=True),
    }
