"""`anneal`: simulated annealing over groups with structured moves (Kirkpatrick et al. 1983), several chains at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem


@dataclass(frozen=True)
class AnnealConfig:
    """How long and how hot."""

    evaluations: int = 10_000
    """Placements to try, over all chains; the budget ends with whichever of this and `seconds` comes first."""
    seconds: float = float("inf")
    """Wall time."""
    num_chains: int = 8
    """Chains that run side by side; the worst half is replaced by the best half now and then."""
    hot: float = 0.03
    """Temperature at the start, as a share of the step time."""
    cold: float = 0.0005
    """Temperature at the end."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.evaluations < 1 or self.num_chains < 1 or not 0 < self.cold <= self.hot:
            raise InvalidValue(
                "anneal", (self.evaluations, self.num_chains, self.hot, self.cold),
                "evaluations >= 1, num_chains >= 1, 0 < cold <= hot",
            )  # fmt: skip


def anneal(
    problem: Problem, timer: StepTimer, start: NDArray[np.int32], config: AnnealConfig | None = None,
    *, on_round: Callable[[NDArray[np.int32], float], None] | None = None,
) -> tuple[NDArray[np.int32], float]:  # fmt: skip
    """The best placement of groups found, (G,) int32, and its step time.

    A move puts one group elsewhere, gives it the device of a neighbour, swaps two groups' devices, or moves a window of
    consecutive groups. Infeasible placements (infinite step time) are never accepted.

    Args:
        problem: what is placed.
        timer: gives step times.
        start: (G,) devices of groups.
        config: how long and how hot.
        on_round: told the best placement so far and its step time after every round.
    """
    config = config or AnnealConfig()
    generator = np.random.default_rng(config.seed)
    neighbours = _Neighbours(problem)
    chains = np.repeat(np.asarray(start, dtype=np.int32)[None], config.num_chains, axis=0)
    current_s = timer.step_times(problem.grouping.expand(chains))
    best, best_s = chains[0].copy(), float(current_s[0])
    begin, spent = time.monotonic(), config.num_chains
    rounds = 0
    while spent < config.evaluations and time.monotonic() - begin < config.seconds:
        elapsed = max(spent / config.evaluations, (time.monotonic() - begin) / config.seconds)
        temperature = config.hot * (config.cold / config.hot) ** min(elapsed, 1.0)
        moved = np.stack([neighbours.move(chain, generator) for chain in chains])
        moved_s = timer.step_times(problem.grouping.expand(moved))
        spent += config.num_chains
        chance = generator.random(config.num_chains)
        with np.errstate(invalid="ignore", over="ignore"):
            worse = (moved_s - current_s) / np.maximum(current_s, 1e-30)
            accepted = np.isfinite(moved_s) & (~np.isfinite(current_s) | (chance < np.exp(-worse / temperature)))
        chains[accepted], current_s[accepted] = moved[accepted], moved_s[accepted]
        leader = int(np.argmin(current_s))
        if current_s[leader] < best_s:
            best, best_s = chains[leader].copy(), float(current_s[leader])
        rounds += 1
        if rounds % 200 == 0 and config.num_chains > 1:
            order = np.argsort(current_s)
            half = config.num_chains // 2
            chains[order[-half:]], current_s[order[-half:]] = chains[order[:half]], current_s[order[:half]]
        if on_round is not None:
            on_round(best, best_s)
    return best, best_s


class _Neighbours:
    """The moves from one placement of groups to a near one."""

    def __init__(self, problem: Problem) -> None:
        graph, group = problem.graph, problem.grouping.op_group
        self._num_devices = problem.host.num_devices
        self._num_groups = problem.grouping.num_groups
        a, b = group[graph.tensor_op[graph.input_tensors]], group[graph.edge_op]
        self._pairs = np.unique(np.stack((a[a != b], b[a != b]), axis=1), axis=0)

    def move(self, chain: NDArray[np.int32], generator: np.random.Generator) -> NDArray[np.int32]:
        """A near placement, a new array."""
        moved = chain.copy()
        kind = generator.random()
        if kind < 0.4 and len(self._pairs):
            a, b = self._pairs[generator.integers(len(self._pairs))]
            if moved[a] != moved[b]:
                a, b = (a, b) if generator.random() < 0.5 else (b, a)
                moved[a] = moved[b]
                return moved
        if kind < 0.5:
            a, b = generator.integers(self._num_groups, size=2)
            moved[a], moved[b] = moved[b], moved[a]
            return moved
        if kind < 0.6:
            length = int(generator.integers(2, max(3, self._num_groups // 16)))
            first = int(generator.integers(self._num_groups))
            moved[first : first + length] = generator.integers(self._num_devices)
            return moved
        group = int(generator.integers(self._num_groups))
        moved[group] = (moved[group] + 1 + generator.integers(max(self._num_devices - 1, 1))) % self._num_devices
        return moved
