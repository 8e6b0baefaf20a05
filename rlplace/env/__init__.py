"""Gymnasium environments over a `Problem` and a `Measurer`.

`placement_env` has the base, and the env that places all groups in one action; `sequential` places one group a step
over partial schedules. `rewards` turns step times into rewards, and `problem_features` holds the observations of
policies.
"""

from rlplace.env.placement_env import OneShotEnv, PlacementVecEnv
from rlplace.env.problem_features import GraphFeatures, ProblemFeatures, graph_features, problem_features
from rlplace.env.rewards import (
    REWARD_NAMES,
    LogSpeedupReward,
    Reward,
    Scorer,
    Scores,
    SqrtReward,
    make_reward,
    single_device_s,
)
from rlplace.env.sequential import (
    POTENTIALS,
    SequentialBatch,
    SequentialEnv,
    SequentialObservation,
    SequentialVecEnv,
)
from rlplace.search.schedule.partial_schedule import DECISION_FEATURES, FEATURE_NOTES, MEMORY_MASKS

__all__ = [
    "DECISION_FEATURES",
    "FEATURE_NOTES",
    "MEMORY_MASKS",
    "POTENTIALS",
    "REWARD_NAMES",
    "GraphFeatures",
    "LogSpeedupReward",
    "OneShotEnv",
    "PlacementVecEnv",
    "ProblemFeatures",
    "Reward",
    "Scorer",
    "Scores",
    "SequentialBatch",
    "SequentialEnv",
    "SequentialObservation",
    "SequentialVecEnv",
    "SqrtReward",
    "graph_features",
    "make_reward",
    "problem_features",
    "single_device_s",
]
