"""Environments that place one group a step, over the partial schedule of those placed so far."""

from rlplace.env.sequential.batch import SequentialBatch, SequentialObservation
from rlplace.env.sequential.env import SequentialEnv
from rlplace.env.sequential.potential import POTENTIALS
from rlplace.env.sequential.vec import SequentialVecEnv
from rlplace.search.schedule.decision_features import DECISION_FEATURES, FEATURE_NOTES
from rlplace.search.schedule.schedule_bounds import MEMORY_MASKS

__all__ = [
    "DECISION_FEATURES",
    "FEATURE_NOTES",
    "MEMORY_MASKS",
    "POTENTIALS",
    "SequentialBatch",
    "SequentialEnv",
    "SequentialObservation",
    "SequentialVecEnv",
]
