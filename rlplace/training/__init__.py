"""Training: from a problem to the best placement that was measured, and the folder that keeps it."""

from rlplace.training.config import TrainConfig
from rlplace.training.train import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "train"]
