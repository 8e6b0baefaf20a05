"""Stable-Baselines3's logger, forwarded to a `Tracker`: PPO's losses, entropy and rewards."""

from __future__ import annotations

import numbers
from typing import Any

from stable_baselines3.common.logger import KVWriter, Logger

from rlplace.runs.tracking import Tracker


class TrackerWriter(KVWriter):
    """Forwards every number that SB3 logs; the tracker stays open, since it is not the logger's."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        values = {key: float(value) for key, value in key_values.items() if isinstance(value, numbers.Real)}
        self.tracker.log({**values, "train/num_timesteps": step})

    def close(self) -> None:
        pass


def sb3_logger(tracker: Tracker) -> Logger:
    """A logger for `model.set_logger` that prints nothing and writes to `tracker` alone."""
    return Logger(folder=None, output_formats=[TrackerWriter(tracker)])
