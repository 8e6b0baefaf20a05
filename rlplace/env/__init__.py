"""Gymnasium environments over a `Problem` and a `Measurer`."""

from rlplace.env.features import GraphFeatures, graph_features
from rlplace.env.one_shot import OneShotEnv
from rlplace.env.problem_features import ProblemFeatures, problem_features
from rlplace.env.rewards import REWARD_NAMES, LogSpeedupReward, Reward, SqrtReward, make_reward
from rlplace.env.scoring import Scorer, Scores, single_device_s
from rlplace.env.sequential import (
    DECISION_FEATURES,
    MEMORY_MASKS,
    POTENTIALS,
    SequentialBatch,
    SequentialEnv,
    SequentialObservation,
    SequentialVecEnv,
)
from rlplace.env.vec import PlacementVecEnv

__all__ = [
    "DECISION_FEATURES",
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
