"""`Elites`: the best placements seen so far.

`settle`: what a learner tells its policy after each update.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.policy.protocols import StartsSomewhere, Straying


class Elites:
    """The `capacity` distinct placements with the highest mean reward, best first.

    A placement that comes again counts with the mean of its rewards: on a host whose answers vary, one lucky answer
    does not stay on top.

    Example:
        >>> elites = Elites(capacity=2)
        >>> elites.add(np.array([[0, 1], [1, 1], [0, 0]]), np.array([-2.0, -1.0, -3.0]))
        >>> elites.group_devices.tolist(), elites.rewards.tolist()
        ([[1, 1], [0, 1]], [-1.0, -2.0])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def __len__(self) -> int:
        return len(self.rewards)

    def clear(self) -> None:
        """Forgets everything, as when rewards come to mean something else."""
        self.group_devices: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self.rewards: NDArray[np.float64] = np.zeros(0)
        self._counts: dict[bytes, int] = {}

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of the kept placements came, best first."""
        return np.array([self._counts[row.tobytes()] for row in self.group_devices], dtype=np.int64)

    def restore(
        self, group_devices: NDArray[np.int32], rewards: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> None:
        """Goes on from another one's `group_devices`, `rewards` and `counts`."""
        self.group_devices, self.rewards = np.array(group_devices, dtype=np.int32), np.array(rewards, dtype=np.float64)
        keys = (row.tobytes() for row in self.group_devices)
        self._counts = dict(zip(keys, counts.tolist(), strict=True))

    def add(self, group_devices_BG: NDArray[np.integer], rewards_B: NDArray[np.floating]) -> None:
        """Takes note of B placements (B, G) and their rewards (B,)."""
        mean = {row.tobytes(): reward for row, reward in zip(self.group_devices, self.rewards.tolist(), strict=True)}
        rows = np.ascontiguousarray(group_devices_BG, dtype=np.int32)
        for row, reward in zip(rows, np.asarray(rewards_B, dtype=np.float64).tolist(), strict=True):
            key = row.tobytes()
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            mean[key] = mean.get(key, 0.0) + (reward - mean.get(key, 0.0)) / count
        kept = sorted(mean, key=lambda key: -mean[key])[: self.capacity]
        self._counts = {key: self._counts[key] for key in kept}
        self.rewards = np.array([mean[key] for key in kept])
        self.group_devices = np.array([np.frombuffer(key, dtype=np.int32) for key in kept], dtype=np.int32)


def settle(policy: object, flips: float | None = None, elites: Elites | None = None) -> None:
    """Has the policy propose around the best placement seen, and stay near its best guess, where it can be told.

    Args:
        policy: any; one that is neither `StartsSomewhere` nor `Straying` is left alone.
        flips: groups in which samples differ from the best guess on average; None leaves that as it is.
        elites: the best placements seen.
    """
    if elites is not None and len(elites) and isinstance(policy, StartsSomewhere):
        policy.start_from(elites.group_devices[0])
    if flips is not None and isinstance(policy, Straying):
        policy.set_flips(flips)
