"""`Journal`: writes what a run has come to into its folder as it goes, for the process that goes on with it."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FileProblem
from rlplace.files import read_plain, write_bytes_atomic
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.search.task import Saveable
from rlplace.session.calibrate import Known
from rlplace.session.folder import RunFolder
from rlplace.training.config import TrainConfig
from rlplace.training.resume.kept import (
    KNOWN_HOSTS,
    LARGEST_BYTES,
    KeptOutcome,
    KeptProgress,
    KeptRace,
    KeptRow,
    KeptTable,
    decode,
    decode_hosts,
    encode,
    encode_hosts,
)
from rlplace.training.resume.kept_state import PlanOf, arrays_of, kept_method, state_of
from rlplace.training.resume.state import MethodState
from rlplace.training.table import Table

FILE = "progress.safetensors"
EVERY_S = 5.0
"""So long at least between two writes that nothing presses for ..."""
SHARE = 0.05
"""... and as long as keeps their share of the time below this."""
IRRELEVANT = ("budget_s", "total_s", "isolated", "track", "cluster", "store")
"""Fields of `TrainConfig` that may be others when a run goes on."""


class Journal:
    """What a run has come to, kept in its folder.

    Args:
        run: the folder; None keeps nothing.
        problem: as it was profiled or estimated.
        config: of the run.
        is_resumed: go on from what the folder holds, if it holds anything; otherwise that is replaced.
        plan_of: gives a plan that was measured by its fingerprint; None for one that is not known.
        clock: seconds that never go back.

    Raises:
        FileProblem: what the folder holds is malformed, or of another problem or configuration.
        InvalidValue, UnknownName: the same; names the field.
    """

    def __init__(
        self,
        run: RunFolder | None,
        problem: Problem,
        config: TrainConfig,
        *,
        is_resumed: bool = False,
        plan_of: PlanOf = lambda fingerprint: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._problem, self._clock = run, problem, clock
        self._kept, self._states = KeptProgress(_signature(problem, config)), dict[str, MethodState]()
        self._known: tuple[tuple[LearnedHost, ...], NDArray[np.generic]] | None = None
        self._next_s = clock() + EVERY_S
        if run is not None and is_resumed and run.has(FILE):
            self._load(run, plan_of)

    @property
    def is_resumed(self) -> bool:
        """Whether a method of the run had begun before."""
        return bool(self._states)

    @property
    def known_hosts(self) -> tuple[LearnedHost, ...] | None:
        """What was known about the host when the run began; None where it had not come so far."""
        return None if self._known is None else self._known[0]

    def keep_known_hosts(self, known: tuple[LearnedHost, ...]) -> None:
        """Keeps what is known about the host: it must be the same when the run goes on."""
        self._known = known, encode_hosts(known)
        self._write()

    @property
    def calibration(self) -> Sequence[tuple[str, Measurement]]:
        """What was measured to calibrate, in order, with the fingerprint of each plan; nothing where it was not."""
        kept = self._kept.calibration
        return () if kept is None else [(name, one.measurement) for name, one in zip(kept.plans, kept.outcomes)]

    def keep_calibration(self, known: Known) -> None:
        """Keeps what was measured to calibrate."""
        plans = tuple(plan.fingerprint for plan in known.plans)
        kept = KeptRace(plans, tuple(KeptOutcome.of(outcome) for outcome in known.outcomes))
        self._kept = dataclasses.replace(self._kept, calibration=kept)
        self._write()

    def of(self, method: str, budget: float) -> MethodState | None:
        """What a method has come to; None where it has not begun. With a larger budget it is not done any more."""
        state = self._states.get(method)
        if state is None or state.budget >= budget:
            return state
        return dataclasses.replace(state, is_searched=False, is_done=False)

    def spent_s(self, *, in_turn: bool) -> float:
        """Seconds that the methods have searched, one after another or side by side."""
        seconds = [state.seconds for state in self._states.values()]
        return sum(seconds) if in_turn else max(seconds, default=0.0)

    @property
    def is_due(self) -> bool:
        """Whether it is time to keep what nothing presses for."""
        return self._run is not None and self._clock() >= self._next_s

    def keep(self, method: str, state: MethodState) -> None:
        """Keeps what a method has come to.

        Raises:
            FileProblem: the file cannot be written, as for everything here that keeps something.
        """
        if self._run is None:
            return
        self._states[method] = state
        self._kept = dataclasses.replace(self._kept, methods=self._kept.methods | {method: kept_method(state)})
        self._write()

    def bests(self) -> dict[str, tuple[Plan, float]]:
        """The best plan of each method so far, and its step time over the reference's, which alone compares."""
        return {name: (state.plan, state.best_ratio) for name, state in self._states.items() if state.plan is not None}

    def table(self, plans: Mapping[str, Plan]) -> Table | None:
        """The final table of these plans, by method; None where it was not measured yet, or of others."""
        kept = self._kept.table
        if kept is None or kept.plans != {method: plan.fingerprint for method, plan in plans.items()}:
            return None
        return Table(tuple(row.to_dict() for row in kept.rows), kept.best, dict(plans))

    def keep_table(self, table: Table) -> None:
        """Keeps the final table."""
        plans = {method: plan.fingerprint for method, plan in table.plans.items()}
        rows = tuple(_kept_row(row) for row in table.rows)
        self._kept = dataclasses.replace(self._kept, table=KeptTable(plans, rows, table.best))
        self._write()

    def _write(self) -> None:
        if self._run is None:
            return
        begin_s = self._clock()
        arrays: dict[str, NDArray[np.generic]] = {} if self._known is None else {KNOWN_HOSTS: self._known[1]}
        for name, state in self._states.items():
            arrays |= arrays_of(name, state, self._problem.host.num_devices)
        write_bytes_atomic(self._run.path(FILE), encode(self._kept, arrays))
        took_s = self._clock() - begin_s
        self._next_s = self._clock() + max(EVERY_S, took_s / SHARE)

    def _load(self, run: RunFolder, plan_of: PlanOf) -> None:
        path = run.path(FILE)
        kept, arrays = read_progress(run)
        if kept.problem != self._kept.problem:
            raise FileProblem(
                path,
                "the progress of another problem, or with other options, than those that it is to go on with: start "
                "the run again in another folder.",
            )
        self._kept = kept
        if KNOWN_HOSTS in arrays:
            self._known = decode_hosts(arrays[KNOWN_HOSTS], f"{path}"), arrays[KNOWN_HOSTS]
        for name, method in kept.methods.items():
            self._states[name] = state_of(name, method, arrays, self._problem, plan_of, f"{path}: {name}")


def read_progress(run: RunFolder) -> tuple[KeptProgress, dict[str, NDArray[np.generic]]]:
    """What the progress file of a run holds.

    Raises:
        FileProblem: it is missing, too large, or no such file.
        InvalidValue, UnknownName: a record in it is malformed; names the field.
    """
    path = run.path(FILE)
    return decode(read_plain(path, largest_bytes=LARGEST_BYTES, holds="progress"), str(path))


def is_finished(run: RunFolder) -> bool:
    """Whether a run has come to its end.

    Raises:
        FileProblem, InvalidValue, UnknownName: as `read_progress`.
    """
    return run.has(FILE) and read_progress(run)[0].is_finished


def mark_finished(run: RunFolder, is_finished: bool = True) -> None:
    """Takes note that a run has come to its end, the last that is written of it; or that it goes on after all.

    Raises:
        FileProblem: the file is missing, malformed or cannot be written.
        InvalidValue, UnknownName: as `read_progress`.
    """
    kept, arrays = read_progress(run)
    write_bytes_atomic(run.path(FILE), encode(dataclasses.replace(kept, is_finished=is_finished), arrays))


def _signature(problem: Problem, config: TrainConfig) -> str:
    """16 hex digits over what has to be the same when a run goes on."""
    fixed = dataclasses.replace(config, **{name: getattr(TrainConfig(), name) for name in IRRELEVANT})
    digest = hashlib.sha256(f"{problem.graph.fingerprint} {problem.host.fingerprint} {fixed!r}".encode())
    digest.update(problem.costs.op_time_s.astype("<f8").tobytes() + problem.grouping.op_group.astype("<i4").tobytes())
    return digest.hexdigest()[:16]


def _kept_row(row: Mapping[str, Any]) -> KeptRow:
    known = {name: row[name] for name in KeptRow.__dataclass_fields__ if name in row}
    return KeptRow(**{**known, "history": tuple(tuple(best) for best in row.get("history", ()))})


class MethodJournal:
    """A journal, for one method.

    Args:
        journal: of the run.
        method: its name.
        keep_learned: writes what the method has learned into the run folder.
    """

    def __init__(self, journal: Journal, method: str, keep_learned: Callable[[Saveable], None]) -> None:
        self._journal, self._method, self.keep_learned = journal, method, keep_learned

    @property
    def is_due(self) -> bool:
        """Whether it is time to keep what nothing presses for."""
        return self._journal.is_due

    def keep(self, state: MethodState) -> None:
        """Keeps what the method has come to.

        Raises:
            FileProblem: the file cannot be written.
        """
        self._journal.keep(self._method, state)
