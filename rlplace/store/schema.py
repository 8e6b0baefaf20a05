"""What a store's database holds: its tables, word by word, and a check that a file holds nothing else."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rlplace.errors import FileProblem

APPLICATION_ID = 0x726C706C
"""`rlpl`, in the header of the file."""
VERSION = 1
"""Of the schema, in the header of the file (`user_version`)."""

TABLES = {
    "sessions": """CREATE TABLE sessions (
        id INTEGER PRIMARY KEY,
        begun_s REAL NOT NULL,
        workload TEXT NOT NULL,
        machine TEXT NOT NULL,
        host_name TEXT NOT NULL,
        versions TEXT NOT NULL,
        idle_share REAL,
        load REAL,
        clock_hz REAL
    ) STRICT""",
    "plans": """CREATE TABLE plans (
        fingerprint TEXT PRIMARY KEY,
        num_ops INTEGER NOT NULL,
        devices BLOB NOT NULL,
        transfer_tensor BLOB NOT NULL,
        transfer_destination BLOB NOT NULL,
        sequence BLOB NOT NULL
    ) STRICT""",
    "measurements": """CREATE TABLE measurements (
        id INTEGER PRIMARY KEY,
        session_id INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
        taken_s REAL NOT NULL,
        graph TEXT NOT NULL,
        host TEXT NOT NULL,
        plan TEXT NOT NULL REFERENCES plans (fingerprint),
        protocol TEXT NOT NULL,
        versions TEXT NOT NULL,
        reference TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('ok', 'oom', 'error', 'timeout')),
        why TEXT NOT NULL,
        step_time_s REAL,
        reference_s REAL NOT NULL,
        samples_s TEXT NOT NULL,
        peak_bytes TEXT NOT NULL,
        is_whole INTEGER NOT NULL
    ) STRICT""",
    "traces": """CREATE TABLE traces (
        id INTEGER PRIMARY KEY,
        session_id INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
        taken_s REAL NOT NULL,
        graph TEXT NOT NULL,
        host TEXT NOT NULL,
        plan TEXT NOT NULL REFERENCES plans (fingerprint),
        summary TEXT NOT NULL
    ) STRICT""",
    "learned_hosts": """CREATE TABLE learned_hosts (
        id INTEGER PRIMARY KEY,
        session_id INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
        taken_s REAL NOT NULL,
        graph TEXT NOT NULL,
        host TEXT NOT NULL,
        model TEXT NOT NULL
    ) STRICT""",
}
INDEXES = {
    "measurements_by_key": "CREATE INDEX measurements_by_key ON measurements (graph, host, plan)",
    "measurements_by_plan": "CREATE INDEX measurements_by_plan ON measurements (plan)",
    "measurements_by_session": "CREATE INDEX measurements_by_session ON measurements (session_id)",
    "traces_by_plan": "CREATE INDEX traces_by_plan ON traces (plan)",
    "traces_by_session": "CREATE INDEX traces_by_session ON traces (session_id)",
    "learned_hosts_by_host": "CREATE INDEX learned_hosts_by_host ON learned_hosts (host)",
    "learned_hosts_by_session": "CREATE INDEX learned_hosts_by_session ON learned_hosts (session_id)",
}


def create(connection: sqlite3.Connection) -> None:
    """Makes the tables of an empty database; the caller begins and commits."""
    for statement in (*TABLES.values(), *INDEXES.values()):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database holds nothing yet."""
    (count,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return bool(count == 0)


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Nothing, if the database holds the tables of a store and nothing else: no view, no trigger, no table of others.

    Raises:
        FileProblem: it is the database of another program, of another version, or was tampered with.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise FileProblem(
            path, "a database of another program, expected measurements that rlplace keeps: name another."
        )
    if version != VERSION:
        hint = "a newer rlplace wrote it: update rlplace" if version > VERSION else "rlplace never wrote this one"
        raise FileProblem(path, f"its schema is {version}, expected {VERSION}; {hint}, or name another.")
    expected = {
        **{(name, "table"): _words(sql) for name, sql in TABLES.items()},
        **{(name, "index"): _words(sql) for name, sql in INDEXES.items()},
    }
    found: dict[tuple[str, str], str] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_schema"):
        if not (sql is None and str(name).startswith("sqlite_autoindex_")):
            found[str(name), str(kind)] = _words(str(sql))
    for (name, kind), sql in found.items():
        if (name, kind) not in expected:
            raise FileProblem(path, f"it holds a {kind} {name[:40]!r}, which no store has: do not use this file.")
        if sql != expected[name, kind]:
            raise FileProblem(path, f"its {kind} {name!r} is not as a store has it: do not use this file.")
    if missing := sorted(name for name, kind in expected if (name, kind) not in found):
        raise FileProblem(path, f"it lacks {missing[0]!r}, which every store has: do not use this file.")


def _words(sql: str) -> str:
    """The statement, spaces aside."""
    return " ".join(sql.split())
