"""`Candidates`: the placements that a method proposed, with what the simulator and the host said of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement


@dataclass
class Candidate:
    """One placement of groups.

    Attributes:
        group_devices: (G,) int32.
        simulated_s: simulated step time.
        ratios: measured step time over the reference's, one for each race that it ran in.
    """

    group_devices: NDArray[np.int32]
    simulated_s: float = float("inf")
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the measured ratios; infinite before the first."""
        return float(np.median(self.ratios)) if self.ratios else float("inf")


class Candidates:
    """Distinct placements of groups, the best `capacity` simulated ones and every measured one."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._known: dict[bytes, Candidate] = {}
        self.num_proposed = 0
        self.num_measured = 0

    def propose(self, group_devices_BG: NDArray[np.integer], simulated_s: NDArray[np.float64]) -> None:
        """Takes note of B proposals and their simulated step times; keeps the best."""
        self.num_proposed += len(group_devices_BG)
        worst = self._worst_kept_s()
        for row in np.flatnonzero(simulated_s < worst):
            devices = np.ascontiguousarray(group_devices_BG[row], dtype=np.int32)
            self._known.setdefault(devices.tobytes(), Candidate(devices, float(simulated_s[row])))
        self._prune()

    def next_to_measure(self, count: int) -> list[Candidate]:
        """The `count` best simulated placements that were never measured."""
        fresh = [candidate for candidate in self._known.values() if not candidate.ratios]
        return sorted(fresh, key=lambda candidate: candidate.simulated_s)[:count]

    def best_measured(self, count: int) -> list[Candidate]:
        """The `count` placements with the lowest measured ratio."""
        measured = [candidate for candidate in self._known.values() if candidate.ratios]
        return sorted(measured, key=lambda candidate: candidate.ratio)[:count]

    def record(self, candidates: Iterable[Candidate], measurements: Iterable[Measurement]) -> None:
        """Adds what the host said; a failed placement counts as infinitely slow."""
        for candidate, measurement in zip(candidates, measurements, strict=True):
            self.num_measured += 1
            kept = self._known.setdefault(candidate.group_devices.tobytes(), candidate)
            reference_s = measurement.reference_s or 1.0
            kept.ratios.append(measurement.step_time_s / reference_s if measurement.ok else float("inf"))

    def _worst_kept_s(self) -> float:
        fresh = [candidate.simulated_s for candidate in self._known.values() if not candidate.ratios]
        return max(fresh) if len(fresh) >= self._capacity else float("inf")

    def _prune(self) -> None:
        fresh = [(key, candidate) for key, candidate in self._known.items() if not candidate.ratios]
        fresh.sort(key=lambda item: item[1].simulated_s)
        for key, _ in fresh[self._capacity :]:
            del self._known[key]
