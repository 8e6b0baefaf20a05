"""`StoreLog`: the `MeasurementLog` of a run: the user's store and the run's own, neither of which can stop it.

`store_path`: the database that `--store` names. `measuring`: measures on this machine alone (no other search measures
meanwhile), and keeps the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlplace.errors import FileProblem, UserError
from rlplace.files import cache_folder
from rlplace.locks import measuring_alone
from rlplace.measure import Host, Measurement, Plan, Problem, Timeline
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.measurement import MeasurementKey, MeasurementLog, versions_line
from rlplace.say import counted
from rlplace.store.rows import MeasuringProcess, StoredMeasurement
from rlplace.store.store import ANSWERS_S, DAY_S, MeasurementStore

FILE = "measurements.db"
"""The name of the store in the user's cache folder."""
RUN_FILE = "session.db"
"""The name of the session of a run, which holds the measurements of the run."""
AUTO, OFF = "auto", "off"
"""Words of `--store`: the user's own, and none."""
FAILURE_ANSWERS_S = DAY_S
"""The same of a failure, which may have had a passing reason: another process that held the memory."""
LEAST_IDLE = 0.75
"""Measurements of a busier machine are not reused and teach nothing: other work changes ratios, too."""
LATE_S = 5.0
"""So long before the next attempt after one that failed: a locked store must not hold up every measurement."""

Addition = Callable[[MeasurementStore], None]


@dataclass
class _Shelf:
    """One store of a log, with the records that wait for it.

    Attributes:
        store: where everything goes.
        is_own: whether it is the run's own, which answers the run in any case.
        waiting: additions that the store has not taken yet, in order.
        retry_s: when to try again, on `time.monotonic`.
        has_told: whether people know that it cannot be written.
    """

    store: MeasurementStore
    is_own: bool = False
    waiting: list[Addition] = field(default_factory=list)
    retry_s: float = 0.0
    has_told: bool = False


class StoreLog(MeasurementLog):
    """Writes the measurements of a process into one or two stores, and looks for answers in them.

    If a store is locked or full, everything is written later, at the latest on `close`. If this fails, a warning lists
    the missing measurements.

    Args:
        stores: the first that has an answer gives it.
        session: this process.
        say: told of failures to write.
        own: the run's own store, which answers the run in any case, and which the session of the run closes.
    """

    def __init__(
        self,
        stores: Iterable[MeasurementStore],
        session: MeasuringProcess,
        say: Callable[[str], None],
        own: MeasurementStore | None = None,
    ) -> None:
        self._shelves = [*([] if own is None else [_Shelf(own, is_own=True)]), *map(_Shelf, stores)]
        self._session, self._say = session, say

    def recall(self, key: MeasurementKey, reference: str, plan: Plan, problem: Problem) -> Measurement | None:
        """The latest measurement under the key that is young enough; failures are forgotten sooner.

        One that was timed beside a reference answers as a ratio to it, so without a reference nothing is answered.
        """
        if not reference:
            return None
        now_s = time.time()
        for shelf in self._shelves:
            try:
                found = shelf.store.find(
                    key, reference, self._session, now_s - ANSWERS_S, 0.0 if shelf.is_own else LEAST_IDLE
                )
                traced = [] if found is None else shelf.store.traces(plan, problem, found.taken_s)
            except UserError as error:
                self._tell(shelf, error)
                continue
            if found is not None and (found.status == "ok" or found.taken_s >= now_s - FAILURE_ANSWERS_S):
                return replace(found.measurement, timeline=next(iter(traced), None))
        return None

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Adds a measurement to every store, with the timeline of its traced step."""
        try:
            row = StoredMeasurement.of(plan, outcome, reference, is_whole=is_whole)
        except UserError as error:  # a record that could not be read again
            self._say(f"warning: a measurement is not kept: {error}")
            return
        self._add(lambda store: store.add(self._session, plan, row))
        if (traced := outcome.timeline) is not None:
            self._add(lambda store: store.add_trace(self._session, row.graph, row.host, plan, traced, row.taken_s))

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Adds a timeline to every store."""
        graph, host = problem.graph.fingerprint, problem.host.fingerprint
        self._add(lambda store: store.add_trace(self._session, graph, host, plan, timeline))

    def keep_learned(self, graph: str, learned: LearnedHost) -> None:
        """Adds the host model that was learned on the graph with this fingerprint to every store."""
        self._add(lambda store: store.add_learned(self._session, graph, learned))

    def learned_hosts(self, host: Host) -> list[LearnedHost]:
        """Host models that were learned on machines like this one, the latest first; nothing twice."""
        found: list[LearnedHost] = []
        for shelf in self._shelves:
            try:
                of_store = shelf.store.learned_hosts(host.fingerprint, self._session.machine, LEAST_IDLE)
            except UserError as error:
                self._tell(shelf, error)
            else:
                found += [learned for learned in of_store if learned not in found]
        return found

    def close(self) -> None:
        """Writes waiting records, reports those that could not be written, and ends the connections; once is enough."""
        for shelf in self._shelves:
            shelf.retry_s = 0.0
            self._write(shelf)
            if shelf.waiting:
                self._say(
                    f"warning: {counted(len(shelf.waiting), 'record')} of this run could not be kept in "
                    f"{shelf.store.path}; the run itself is not affected"
                )
            if not shelf.is_own:
                shelf.store.close()
        self._shelves = []

    def _add(self, addition: Addition) -> None:
        for shelf in self._shelves:
            shelf.waiting.append(addition)
            self._write(shelf)

    def _write(self, shelf: _Shelf) -> None:
        if time.monotonic() < shelf.retry_s:
            return
        try:
            while shelf.waiting:
                shelf.waiting[0](shelf.store)
                del shelf.waiting[0]
        except FileProblem as error:
            shelf.retry_s = time.monotonic() + LATE_S
            self._tell(shelf, error)

    def _tell(self, shelf: _Shelf, error: UserError) -> None:
        if not shelf.has_told:
            shelf.has_told = True
            self._say(f"warning: {error} The run goes on.")


def store_path(word: str) -> Path | None:
    """The database that `--store WORD` names: a file, or that of a run folder; None for `off`.

    Raises:
        FileProblem: `auto`, and the user's folders are not known.
    """
    if word == OFF:
        return None
    if word == AUTO:
        return cache_folder() / FILE
    path = Path(word)
    if not path.is_dir():
        return path
    return path / RUN_FILE if (path / RUN_FILE).exists() else path / FILE


def check_store(word: str) -> None:
    """Whether `--store WORD` can be written, so that a mistake is refused before anything is measured.

    Raises:
        FileProblem: a store was named that cannot be opened; that the user's own cannot is no mistake of theirs.
    """
    path = store_path(word)
    if path is not None and word != AUTO:
        MeasurementStore.open(path).close()


def open_log(
    word: str,
    host: Host,
    *,
    workload: str,
    versions: str,
    say: Callable[[str], None],
    own: MeasurementStore | None = None,
) -> StoreLog | None:
    """The log of a run on a host of this machine; None where nothing is to be kept.

    Args:
        word: of `--store`: `auto`, `off` or a path.
        host: that is measured; simulated step times are not kept.
        workload: its name.
        versions: that measurements are made with.
        say: told of failures to write.
        own: the store of the run, which is written for any `word`.

    Raises:
        FileProblem: a store was named that cannot be opened. If the user's own cannot, it is said, and measuring goes
            on without.
    """
    if host.is_simulated:
        return None
    stores: list[MeasurementStore] = []
    try:
        if (path := store_path(word)) is not None:
            if word == AUTO:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            stores.append(MeasurementStore.open(path))
    except (FileProblem, OSError) as error:
        if word != AUTO:
            raise
        say(f"warning: {error} Nothing is kept there.")
    return StoreLog(stores, MeasuringProcess.now(workload, host.name, versions), say, own) if stores or own else None


@contextmanager
def measuring(
    host: Host,
    store: str,
    *,
    workload: str,
    say: Callable[[str], None],
    run: Path | None = None,
    own: MeasurementStore | None = None,
    is_waiting: bool = True,
) -> Iterator[StoreLog | None]:
    """While active, no other process measures on this machine, and the yielded log keeps measurements.

    Args:
        host: that is measured; on a simulated one nothing is held and nothing kept.
        store: `auto`, `off` or a file.
        workload: its name, for the store.
        say: told which process it waits for, and of failures to write.
        run: the run folder, for others that wait.
        own: the store of the run.
        is_waiting: wait for another search that measures here, instead of giving up.

    Raises:
        FileProblem: a store was named that cannot be opened.
        RunnerError: another search measures here, and waiting was not asked for.
    """
    with measuring_alone(host, say=say, run=run, is_waiting=is_waiting):
        log = open_log(store, host, workload=workload, versions=versions_line(), say=say, own=own)
        with nullcontext() if log is None else closing(log):
            yield log
