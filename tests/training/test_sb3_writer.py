from __future__ import annotations

import numpy as np

from rlplace.runs.tracking import NoTracker
from rlplace.training.sb3_writer import sb3_logger


class Notebook(NoTracker):
    def __init__(self) -> None:
        self.pages: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:  # type: ignore[override]
        self.pages.append(dict(values))


def test_numbers_that_sb3_logs_reach_the_tracker(capfd) -> None:  # type: ignore[no-untyped-def]
    tracker = Notebook()
    logger = sb3_logger(tracker)
    logger.record("train/value_loss", np.float32(0.5))
    logger.record("train/entropy_loss", -1.25)
    logger.record("train/note", "not a number")
    logger.record_mean("rollout/reward", 1.0)
    logger.record_mean("rollout/reward", 2.0)
    logger.dump(step=64)
    logger.close()
    assert tracker.pages == [
        {"train/value_loss": 0.5, "train/entropy_loss": -1.25, "rollout/reward": 1.5, "train/num_timesteps": 64}
    ]
    assert capfd.readouterr() == ("", "")
