"""`Tables`: what the list scheduler's weights led to on training problems, simulated once and kept in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlplace.env.schedule_batch import ListSchedules, Pair
from rlplace.errors import FileProblem
from rlplace.files import write_bytes_atomic
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.schedule.network import problem_summary

if TYPE_CHECKING:
    from rlplace.cluster import Cluster

WORST = 3.0
"""Ratio to a problem's best from which on placements are equally bad, those that do not fit among them."""
_CHUNK = 64
Row = dict[str, NDArray[Any]]
"""One problem of a table, by the names of its fields."""


@dataclass(frozen=True, eq=False)
class Table:
    """P problems, and what M pairs of a grouping and weights led to on each.

    Attributes:
        summary: (P, 22) float32, of the problems.
        log_times: (P, M) float64, logs of simulated step times in seconds, infinite where memory does not suffice.
        estimates: (P, M, 6) float64, what was told of the placements without simulating them.
    """

    summary: NDArray[np.float32]
    log_times: NDArray[np.float64]
    estimates: NDArray[np.float64]

    @property
    def log_ratios(self) -> NDArray[np.float64]:
        """(P, M) float64: logs of step times over the problem's best, at most that of `WORST`."""
        best = self.log_times.min(axis=1, keepdims=True)
        ratios = np.where(np.isfinite(self.log_times), self.log_times - np.where(np.isfinite(best), best, 0.0), np.inf)
        return np.minimum(ratios, np.log(WORST))

    def rows(self, chosen: NDArray[np.integer]) -> Table:
        """The table of some of the problems."""
        return Table(self.summary[chosen], self.log_times[chosen], self.estimates[chosen])


class Tables:
    """A folder of tables, a file for each problem, so that work goes on where it was stopped.

    Args:
        folder: where they are.
        problem_of: the problem of a stage and a number.
        cluster: whose workers simulate, a problem each; this process does where there is none.
    """

    def __init__(self, folder: Path, problem_of: Callable[[int, int], Problem], cluster: Cluster | None = None) -> None:
        self._folder, self._problem_of = folder, problem_of
        self._map = _one_by_one if cluster is None else cluster.map

    def simulate(self, name: str, stage: int, count: int, pairs: Sequence[Pair], say: Callable[[str], None]) -> Table:
        """The table of `pairs` on the first `count` problems of a stage; what is in the folder is not done again.

        Args:
            name: of the table's files.
            stage: whose problems.
            count: of problems.
            pairs: names of groupings and weights.
            say: told how far it is, ten times.

        Raises:
            FileProblem: a file of the folder is malformed, or of other pairs.
            RunnerError: the cluster is lost.
        """
        paths = [self._folder / f"{name}-{number:05d}.safetensors" for number in range(count)]
        rows = {number: _read(path, len(pairs)) for number, path in enumerate(paths) if path.exists()}
        missing = [number for number in range(count) if number not in rows]
        for index, row in self._map(partial(_simulated, self._problem_of, stage, pairs), missing):
            write_bytes_atomic(paths[missing[index]], save(row))
            rows[missing[index]] = row
            if len(rows) % max(count // 10, 1) == 0:
                say(f"{name}: {len(rows):,} of {count:,} problems")
        keys = ("summary", "log_times", "estimates")
        return Table(*(np.stack([rows[number][key] for number in range(count)]) for key in keys))


def _one_by_one(function: Callable[[int], Row], items: Sequence[int]) -> Iterator[tuple[int, Row]]:
    for index, item in enumerate(items):
        yield index, function(item)


def _simulated(problem_of: Callable[[int, int], Problem], stage: int, pairs: Sequence[Pair], number: int) -> Row:
    with one_thread_here():
        return simulate_pairs(problem_of(stage, number), pairs)


def simulate_pairs(problem: Problem, pairs: Sequence[Pair]) -> Row:
    """A problem's row of a `Table`, by the names of its fields; equal placements are simulated once."""
    schedules, simulator = ListSchedules(problem), Simulator(problem, threads=1)
    times, estimates = np.empty(len(pairs)), []
    for first in range(0, len(pairs), _CHUNK):
        devices = schedules.place(pairs[first : first + _CHUNK])
        rows, place = np.unique(devices, axis=0, return_inverse=True)
        place = place.reshape(-1)
        times[first : first + _CHUNK] = simulator.step_times(np.ascontiguousarray(rows))[place]
        estimates.append(schedules.estimate(np.ascontiguousarray(rows))[place])
    return {
        "summary": problem_summary(problem),
        "log_times": np.log(np.maximum(times, 1e-300)),
        "estimates": np.concatenate(estimates),
    }


def _read(path: Path, count: int) -> Row:
    try:
        row = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise FileProblem(path, f"no table of simulated placements: {error}.") from error
    if row["log_times"].shape != (count,):
        raise FileProblem(path, f"a table of {row['log_times'].shape[0]} pairs, expected {count}: begin anew.")
    return dict(row)
