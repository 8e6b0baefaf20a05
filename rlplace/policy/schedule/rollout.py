"""Episodes of the policy `schedule`: placements made group by group, and made again to see what was decided when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.env.sequential.batch import SequentialBatch, SequentialObservation

LOG_PROB_BARRED = -30.0
"""Log-probability of a device that memory bars, by an estimate: never drawn, but known placements may use it."""

Choose = Callable[[SequentialObservation], NDArray[np.int64]]
"""From what is seen to a device for each episode, (B,)."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """What was seen in B episodes of G decisions.

    Attributes:
        groups: (G, B) int64, which group was decided.
        features: (G, B, D, F) float32, of the partial schedule.
        mask: (G, B, D) bool, where the group might go.
        devices: (G, B) int64, where it went.
    """

    groups: Tensor
    features: Tensor
    mask: Tensor
    devices: Tensor


def roll(episodes: SequentialBatch, choose: Choose) -> NDArray[np.int32]:
    """(B, G) int32 devices of groups after every group was decided by `choose`."""
    episodes.reset()
    while not episodes.is_done:
        episodes.step(choose(episodes.observe()))
    return episodes.placed.copy()


def replay(episodes: SequentialBatch, group_devices: NDArray[np.integer]) -> Decisions:
    """What is seen on the way to placements (B, G), each group decided as they say (teacher forcing)."""
    forced = np.asarray(group_devices, dtype=np.int64)
    rows = np.arange(len(forced))
    groups, features, masks, devices = [], [], [], []

    def follow(seen: SequentialObservation) -> NDArray[np.int64]:
        chosen = forced[rows, seen.group]
        groups.append(seen.group.copy())
        features.append(seen.features.copy())
        masks.append(seen.mask.copy())
        devices.append(chosen)
        return chosen

    roll(episodes, follow)
    stacked = (torch.from_numpy(np.stack(parts)) for parts in (groups, features, masks, devices))
    return Decisions(*stacked)


def masked_log_probs(logits: Tensor, mask: Tensor, allowed: Tensor) -> Tensor:
    """(..., D) log-probabilities of devices.

    Args:
        logits: (..., D).
        mask: (..., D) bool, where memory suffices and pins allow it; one device at least.
        allowed: (..., D) bool, where pins allow it: what is barred beyond that has `LOG_PROB_BARRED`.
    """
    log_probs = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
    barred = torch.where(allowed, LOG_PROB_BARRED, -torch.inf)
    return torch.where(mask, log_probs, barred)
