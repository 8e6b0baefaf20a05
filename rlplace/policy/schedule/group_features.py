"""`group_features`: what the policy `schedule` sees of each group besides the partial schedule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.env.features import graph_features
from rlplace.measure.problem import Problem

STATIC = (
    "log_ops",
    "log_parameter_bytes",
    "log_output_bytes",
    "log_in_bytes",
    "log_out_bytes",
    "log_in_edges",
    "log_out_edges",
    "mean_position",
    "first_position",
    "path_before",
    "path_after",
    "criticality",
    "is_forward",
    "is_backward",
    "is_update",
)
"""Those of `graph_features` that are the same whichever way devices are numbered, and however many there are."""
GROUP_FEATURES = ("log_cost", *STATIC)
"""Names of the features; `log_cost` is of the mean cost over devices, in mean costs of a group."""


def group_features(problem: Problem) -> NDArray[np.float32]:
    """(G, 16) float32 `GROUP_FEATURES`; all but `log_cost` have mean 0 and variance 1 over the groups."""
    features = graph_features(problem)
    places = [features.names.index(name) for name in STATIC]
    log_cost = np.log1p(features.group_cost.mean(axis=1, keepdims=True))
    return np.concatenate((log_cost, features.node_features[:, places]), axis=1).astype(np.float32)
