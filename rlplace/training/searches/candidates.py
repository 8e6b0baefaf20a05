"""`Candidates`: the placements that a search came up with, and what the host said of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.search.winners import choose_diverse


@dataclass
class Candidate:
    """One placement.

    Attributes:
        devices: (N,) int32, of ops.
        simulated_s: simulated step time.
        plan: as it was measured; None before that.
        ratios: measured step time over the reference's, one for each race that it ran in.
    """

    devices: NDArray[np.int32]
    simulated_s: float = float("inf")
    plan: Plan | None = None
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the measured ratios; infinite before the first."""
        return float(np.median(self.ratios)) if self.ratios else float("inf")


class Candidates:
    """Distinct placements: the best `capacity` simulated ones, and every measured plan.

    Attributes:
        num_measured: placements that were measured, each as often as it was.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._fresh: dict[bytes, Candidate] = {}
        self._measured: dict[str, Candidate] = {}
        self._ran: set[bytes] = set()
        self._worst_s = float("inf")
        self.num_measured = 0

    def note(self, devices: NDArray[np.int32], simulated_s: NDArray[np.float64]) -> None:
        """Takes note of placements (B, N) and their simulated step times (B,); keeps the best."""
        for row in np.flatnonzero(simulated_s < self._worst_s).tolist():
            key = devices[row].tobytes()
            if key not in self._fresh and key not in self._ran:
                self._fresh[key] = Candidate(np.array(devices[row], dtype=np.int32), float(simulated_s[row]))
        if len(self._fresh) >= 2 * self._capacity:  # sorted now and then: a search scores thousands a second
            self._prune()

    def next_to_measure(self, count: int) -> list[Candidate]:
        """The `count` best simulated placements that were never measured, unlike each other if possible."""
        self._prune()
        fresh = list(self._fresh.values())
        devices = np.array([candidate.devices for candidate in fresh])
        simulated_s = np.array([candidate.simulated_s for candidate in fresh])
        seen = [candidate.devices for candidate in self._measured.values()]
        return [fresh[row] for row in choose_diverse(devices, simulated_s, count, seen)]

    def fresh(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The placements (C, N) that may be measured next, the best first, and their simulated step times (C,)."""
        self._prune()
        fresh = list(self._fresh.values())
        num_ops = len(fresh[0].devices) if fresh else 0
        devices = np.array([candidate.devices for candidate in fresh], dtype=np.int32).reshape(len(fresh), num_ops)
        return devices, np.array([candidate.simulated_s for candidate in fresh])

    def best_measured(self, count: int) -> list[Candidate]:
        """The `count` plans with the lowest measured ratio."""
        return sorted(self._measured.values(), key=lambda candidate: candidate.ratio)[:count]

    def record(self, plans: Sequence[Plan], measurements: Iterable[Measurement]) -> None:
        """Adds what the host said of plans; a failed one counts as infinitely slow."""
        for plan, measurement in zip(plans, measurements, strict=True):
            self.num_measured += 1
            devices = plan.devices.tobytes()
            fresh = self._fresh.pop(devices, None)
            simulated_s = math.inf if fresh is None else fresh.simulated_s
            known = self._measured.setdefault(plan.fingerprint, Candidate(plan.devices, simulated_s, plan))
            known.ratios.append(measurement.ratio)
            self._ran.add(devices)

    def _prune(self) -> None:
        kept = sorted(self._fresh.items(), key=lambda item: item[1].simulated_s)[: self._capacity]
        self._fresh = dict(kept)
        if len(kept) == self._capacity:
            self._worst_s = kept[-1][1].simulated_s
