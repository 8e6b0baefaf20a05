"""`MeasurementStore`: one database of measurements, read and written.

`Filter`: which measurements are meant.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field

from rlplace.errors import FileProblem, check_known
from rlplace.files import jsonable
from rlplace.measure import Plan, Problem, Timeline
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.measurement import MeasurementKey, Status
from rlplace.records import Number, read_record, record
from rlplace.store.database import RUN, STORE, Database, told
from rlplace.store.rows import (
    ARRAYS,
    LISTS,
    MeasuringProcess,
    StoredMeasurement,
    decode_measurement,
    decode_plan,
    decode_timeline,
    encode_array,
    encode_timeline,
)

DAY_S = 86400.0
AHEAD_S = DAY_S
"""Rows dated so far ahead answer nothing: a clock was wrong, and it would never grow old."""
ANSWERS_S = 30 * DAY_S
"""For so long a step time that was measured answers for another one; so long its timeline is kept."""
MOST_TRACES = 100
MOST_MODEL_TEXT = 64 << 20
"""Characters of host models that are read at once; they take up to sixteen times as much in memory."""
_OF_SESSION = ("workload", "host_name", "machine", "idle_share", "load", "clock_hz")
_OWN = tuple(name for name in StoredMeasurement.__dataclass_fields__ if name not in _OF_SESSION)
_JOINED = "measurements m JOIN sessions s ON s.id = m.session_id"
_SELECT = f"""SELECT m.id AS number, {", ".join(f"m.{name}" for name in _OWN)}, {
    ", ".join(f"s.{name}" for name in _OF_SESSION)
} FROM {_JOINED}"""


class MeasurementStore(Database):
    """Measurements, their plans, and learned host models.

    Any number of processes may use one at once.

    Attributes:
        path: of the database.

    Args:
        connection: to the database.
        path: of it.
    """

    SCHEMAS = (STORE, RUN)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MeasurementStore:
        """The store at `path` for writing, made where there is none.

        Raises:
            FileProblem: it cannot be written, is no store, is of another version, or is locked by another process.
        """
        return cls.at(Path(path), is_writable=True)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> MeasurementStore:
        """The store at `path` as it is now, which nothing here can change; safe for files of strangers.

        Raises:
            FileProblem: it is missing, cannot be read, is no store, or is of another version.
        """
        if not os.path.lexists(path):
            raise FileProblem(
                path,
                "no such store. Searches on this machine keep what they measure in one; name it, or a run folder that "
                "has one.",
            )
        return cls.at(Path(path), is_writable=False)

    def __repr__(self) -> str:
        return f"MeasurementStore({str(self.path)!r})"

    def add(self, process: MeasuringProcess, plan: Plan, row: StoredMeasurement) -> None:
        """Keeps a measurement of a plan that a process made, both or neither.

        Raises:
            FileProblem: the database cannot be written, as for everything below that writes.
        """
        columns = {name: getattr(row, name) for name in _OWN}
        self._add("measurements", process, columns | {name: json.dumps(columns[name]) for name in LISTS}, plan)

    def add_plan(self, plan: Plan) -> None:
        """Keeps a plan; once is enough. The caller begins and commits."""
        columns = {
            "fingerprint": plan.fingerprint,
            "num_ops": len(plan.devices),
            **{name: encode_array(getattr(plan, name)) for name in ARRAYS},
        }
        self._connection.execute(_insert("plans", columns, "OR IGNORE "), columns)

    def add_trace(
        self,
        process: MeasuringProcess,
        graph: str,
        host: str,
        plan: Plan,
        timeline: Timeline,
        taken_s: float | None = None,
    ) -> None:
        """Keeps the timeline of a step of a plan, and forgets those older than `ANSWERS_S`: they answer no more.

        Args:
            process: that measured.
            graph: fingerprint.
            host: fingerprint.
            plan: that ran.
            timeline: of the step.
            taken_s: when its measurement was taken, if it belongs to one; now by default.
        """
        self._add(
            "traces",
            process,
            {
                "taken_s": time.time() if taken_s is None else taken_s,
                "graph": graph,
                "host": host,
                "plan": plan.fingerprint,
                "timeline": encode_timeline(timeline),
            },
            plan,
        )
        with self._writing() as execute:
            execute("DELETE FROM traces WHERE taken_s < ?", (time.time() - ANSWERS_S,))

    def add_learned(self, process: MeasuringProcess, graph: str, learned: LearnedHost) -> None:
        """Keeps the host model that a search learned."""
        self._add(
            "learned_hosts",
            process,
            {
                "taken_s": time.time(),
                "graph": graph,
                "host": learned.host_fingerprint,
                "model": json.dumps(jsonable(asdict(learned)), allow_nan=False),
            },
        )

    def find(
        self, key: MeasurementKey, reference: str, session: MeasuringProcess, since_s: float, least_idle: float = 0.0
    ) -> StoredMeasurement | None:
        """The latest whole measurement under a key, beside the same reference, on a machine like this.

        The latest is the one that was added last, at any time of the clock; rows dated `AHEAD_S` ahead are left out.

        Args:
            key: the plan, the protocol and the versions.
            reference: fingerprint of the reference placement.
            session: that asks: its machine counts, and its own measurements do in any case.
            since_s: the oldest that will do, in seconds since 1970.
            least_idle: share of the processor's time that must have been idle before, if that is known.

        Raises:
            FileProblem, InvalidValue, UnknownName: the database cannot be read, or a row is malformed.
        """
        condition = """m.graph = :graph AND m.host = :host AND m.plan = :plan AND m.protocol = :protocol
            AND m.versions = :versions AND m.reference = :reference AND s.machine = :machine
            AND (coalesce(s.idle_share, 1.0) >= :least_idle OR s.begun_s = :begun_s)
            AND m.taken_s BETWEEN :since_s AND :until_s AND m.is_whole = 1 ORDER BY m.id DESC LIMIT 1"""
        values = {
            **asdict(key),
            "reference": reference,
            "since_s": since_s,
            "until_s": time.time() + AHEAD_S,
            "least_idle": least_idle,
            "machine": session.machine,
            "begun_s": session.begun_s,
        }
        return next(self._rows(condition, values), None)

    def measurements(self, chosen: Filter | None = None) -> Iterator[StoredMeasurement]:
        """The measurements that a filter means, the last added first.

        Raises:
            FileProblem, InvalidValue, UnknownName: as `find`; names the row and the column.
        """
        condition, values = (chosen or Filter()).sql()
        yield from self._rows(f"{condition} ORDER BY m.id DESC", values)

    def count(self, chosen: Filter | None = None) -> int:
        """How many measurements a filter means."""
        condition, values = (chosen or Filter()).sql()
        return int(self._selected(f"SELECT count(*) FROM {_JOINED} WHERE {condition}", values)[0][0])

    def plan(self, fingerprint: str) -> Plan:
        """A plan that was measured; whether it fits a graph is for the reader to check.

        Raises:
            FileProblem: there is none with this fingerprint.
            InvalidValue: the kept plan has another fingerprint.
        """
        columns = ", ".join(("fingerprint", "num_ops", *ARRAYS))
        rows = self._selected(f"SELECT {columns} FROM plans WHERE fingerprint = ?", (fingerprint,))
        if not rows:
            raise FileProblem(self.path, f"no plan {fingerprint} was measured.")
        return decode_plan(dict(rows[0]), f"{self.path}: plan {fingerprint}")

    def traces(self, plan: Plan, problem: Problem, taken_s: float | None = None) -> list[Timeline]:
        """Timelines of the last `MOST_TRACES` traced steps of a plan, the last added first.

        Args:
            plan: that ran.
            problem: whose graph was placed.
            taken_s: of the measurement that they belong to; all by default.

        Raises:
            FileProblem: the database cannot be read.
            InvalidValue: one of them is malformed.
        """
        rows = self._selected(
            f"""SELECT * FROM traces WHERE plan = ? AND graph = ? AND taken_s = coalesce(?, taken_s)
            ORDER BY id DESC LIMIT {MOST_TRACES}""",
            (plan.fingerprint, problem.graph.fingerprint, taken_s),
        )
        where = f"{self.path}: trace of {plan.fingerprint}"
        return [decode_timeline(row["timeline"], plan, problem, where) for row in rows]

    def learned_hosts(self, host: str = "", machine: str = "", least_idle: float = 0.0) -> list[LearnedHost]:
        """Host models that searches learned, the last added first; rows dated `AHEAD_S` ahead are left out.

        Of models that are longer than `MOST_MODEL_TEXT` altogether, the last ones.

        Args:
            host: fingerprint; every host where it is empty.
            machine: as `machine_key` gives it; every machine where it is empty.
            least_idle: as of `find`.

        Raises:
            FileProblem, InvalidValue, UnknownName: the database cannot be read, or a host model is malformed.
        """
        statement = """SELECT l.id AS number, l.model FROM learned_hosts l JOIN sessions s ON s.id = l.session_id
            WHERE :host IN ('', l.host) AND :machine IN ('', s.machine)
            AND coalesce(s.idle_share, 1.0) >= :least_idle AND l.taken_s <= :until_s ORDER BY l.id DESC"""
        values = {"host": host, "machine": machine, "least_idle": least_idle, "until_s": time.time() + AHEAD_S}
        found, left = [], MOST_MODEL_TEXT
        with told(self.path, STORE):
            for row in self._connection.execute(statement, values):  # one text at a time
                left -= len(str(row["model"]))
                if left < 0:
                    break
                found.append(read_record(LearnedHost, str(row["model"]), f"{self.path}: host model {row['number']}"))
        return found

    def prune(self, chosen: Filter) -> int:
        """Forgets the measurements that a filter means, and then plans, traces and sessions that nothing is left of.

        Host models stay, unless everything is to go.

        Returns:
            How many measurements.
        """
        condition, values = chosen.sql()
        with self._writing() as execute:
            gone = execute(
                f"DELETE FROM measurements WHERE id IN (SELECT m.id FROM {_JOINED} WHERE {condition})", values
            ).rowcount
            if chosen.is_empty:
                execute("DELETE FROM learned_hosts")
            execute("DELETE FROM traces WHERE plan NOT IN (SELECT plan FROM measurements)")
            # the races of a run name plans, too
            if not execute("SELECT 1 FROM sqlite_schema WHERE name = 'races'").fetchone():
                execute("DELETE FROM plans WHERE fingerprint NOT IN (SELECT plan FROM measurements)")
            execute(
                """DELETE FROM sessions WHERE id NOT IN (SELECT session_id FROM measurements)
                AND id NOT IN (SELECT session_id FROM learned_hosts)
                AND id NOT IN (SELECT session_id FROM traces)"""
            )
        return gone

    def _add(
        self, table: str, process: MeasuringProcess, columns: Mapping[str, object], plan: Plan | None = None
    ) -> None:
        """Inserts a row of a process, and the plan that it is of; both or neither."""
        with self._writing() as execute:
            row = {**columns, "session_id": self._session(process)}
            if plan is not None:
                self.add_plan(plan)
            execute(_insert(table, row), row)

    def _rows(self, condition: str, values: Mapping[str, object]) -> Iterator[StoredMeasurement]:
        with told(self.path, STORE):
            for row in map(dict, self._connection.execute(f"{_SELECT} WHERE {condition}", values)):
                yield decode_measurement(row, f"{self.path}: measurement {row['number']}")

    def _session(self, process: MeasuringProcess) -> int:
        """The number of the row of a process, which is made anew where another process has pruned it."""
        columns = asdict(process)
        same = " AND ".join(f"{name} IS :{name}" for name in columns)
        row = self._connection.execute(f"SELECT id FROM sessions WHERE {same}", columns).fetchone()
        return int(row[0] if row else self._connection.execute(_insert("sessions", columns), columns).lastrowid or 0)


def _insert(table: str, columns: Mapping[str, object], how: str = "") -> str:
    names = ", ".join(columns)
    return f"INSERT {how}INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in columns)})"


STATUSES = tuple(status for status in get_args(Status) if status != "lost")
"""Those that are kept: where a device was lost, nothing was measured."""

_CONDITIONS = {
    "workload": "s.workload GLOB :workload",
    "graph": "substr(m.graph, 1, length(:graph)) = :graph",
    "host": "(substr(m.host, 1, length(:host)) = :host OR s.host_name GLOB :host)",
    "status": "m.status = :status",
    "before": "m.taken_s <= :before",
    "after": "m.taken_s >= :after",
}


@record(frozen=True)
class Filter:
    """Measurements that are all of this; empty fields match everything.

    Raises:
        UnknownName: no such status.
        InvalidValue: an age below 0.
    """

    workload: str = ""
    """A pattern of the workload's name, such as `nmt*`."""
    graph: str = ""
    """How the graph's fingerprint begins."""
    host: str = ""
    """How the host's fingerprint begins, or a pattern of its name."""
    status: str = ""
    older_than_s: Annotated[Number, Field(ge=0)] | None = None
    """Taken at least so many seconds ago."""
    newer_than_s: Annotated[Number, Field(ge=0)] | None = None
    """Taken at most so many seconds ago."""

    def __post_init__(self) -> None:
        if self.status:
            check_known("status", self.status, STATUSES)

    @property
    def is_empty(self) -> bool:
        """Whether every measurement is meant."""
        return all(getattr(self, field.name) in ("", None) for field in fields(self))

    def sql(self) -> tuple[str, dict[str, object]]:
        """A condition on `measurements m` and `sessions s`, and the values in it."""
        now_s = time.time()
        values: dict[str, object] = {
            "workload": self.workload,
            "graph": self.graph,
            "host": self.host,
            "status": self.status,
            "before": None if self.older_than_s is None else now_s - self.older_than_s,
            "after": None if self.newer_than_s is None else now_s - self.newer_than_s,
        }
        given = {name: value for name, value in values.items() if value not in ("", None)}
        return " AND ".join(["1", *(_CONDITIONS[name] for name in given)]), given
