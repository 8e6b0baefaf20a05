"""What the one-shot envs show of the graph: its index, or its features as flat arrays that any network can read."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.problem_features import EDGE_FEATURES, LARGEST, problem_features
from rlplace.errors import UnknownName
from rlplace.measure.problem import Problem

OBSERVATIONS = ("index", "graph")


class GraphObservation:
    """The one observation of a problem: nothing about a graph changes from one episode to the next.

    With `index`, the default, it is `graph`, always 0: it only points to the graph, so that a rollout buffer need not
    keep a copy a step; the policy holds the features. With `graph` it is the features, float32 arrays made flat, for
    policies that read observations and know nothing else. They count in shares of the whole and in logarithms, so that
    they look alike on every problem:

    - `groups`, (G * F,): `NODE_FEATURES` of each group, then `PAIR_FEATURES` of it on each device;
    - `adjacency`, (G * G,): log(1 + x) of the seconds of what each group sends each other one, over the largest: 0..1;
    - `devices`, (D * 7,): `DEVICE_FEATURES` of each device.

    Attributes:
        space: of the observation of one env.
    """

    def __init__(self, problem: Problem, kind: str = "index") -> None:
        """The observation of `problem`.

        Args:
            problem: what is placed.
            kind: one of `OBSERVATIONS`.

        Raises:
            UnknownName: no observation has that name.
        """
        if kind not in OBSERVATIONS:
            raise UnknownName("observation", kind, OBSERVATIONS)
        self._arrays = _flat_features(problem) if kind == "graph" else {}
        self.space = index_space() if kind == "index" else _space_of(self._arrays)

    def one(self) -> dict[str, Any]:
        """What one env shows; new arrays every time."""
        return {name: array.copy() for name, array in self._arrays.items()} or {"graph": np.int64(0)}

    def batch(self, num_envs: int) -> dict[str, NDArray[Any]]:
        """What `num_envs` envs show, with a leading axis of envs; new arrays every time."""
        rows = {name: np.tile(array, (num_envs, 1)) for name, array in self._arrays.items()}
        return rows or {"graph": np.zeros(num_envs, dtype=np.int64)}


def index_space() -> spaces.Dict:
    """A dictionary with `graph`, the index of the graph to be placed: always 0."""
    return spaces.Dict({"graph": spaces.Discrete(1)})


def _space_of(arrays: dict[str, NDArray[np.float32]]) -> spaces.Dict:
    limits = {name: (0.0, 1.0) if name == "adjacency" else (-LARGEST, LARGEST) for name in arrays}
    return spaces.Dict({name: spaces.Box(*limits[name], arrays[name].shape, np.float32) for name in arrays})


def _flat_features(problem: Problem) -> dict[str, NDArray[np.float32]]:
    features = problem_features(problem)
    num_groups = features.num_groups
    groups = np.concatenate([features.nodes, features.pairs.reshape(num_groups, -1)], axis=1)
    adjacency = np.zeros((num_groups, num_groups), dtype=np.float32)
    sent = features.edges[:, EDGE_FEATURES.index("seconds")]
    adjacency[features.edge_source, features.edge_target] = sent / (float(sent.max(initial=0.0)) or 1.0)
    return {"groups": groups.reshape(-1), "adjacency": adjacency.reshape(-1), "devices": features.devices.reshape(-1)}
