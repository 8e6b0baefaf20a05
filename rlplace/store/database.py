"""Opening a store's database: for writing one's own, for reading anyone's; a failure is one line that says what to do.

Opening runs no code: no extension is loaded, what a schema says is not trusted, and a file that holds a view or a
trigger is refused before anything else is read.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from rlplace.errors import FileProblem
from rlplace.store import schema

BUSY_S = 5.0
"""How long another process that is writing is waited for."""
LARGEST_VALUE = 64 << 20
"""Bytes of a value or a row."""
COMPANIONS = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database."""
_RETRY_S = 0.05
_ELSEWHERE = "name another with `--store PATH`, or `--store off`"


def open_for_writing(path: Path) -> sqlite3.Connection:
    """A connection to the store at `path`, which is made where there is none.

    It is in WAL mode where the file system allows it, so that readers and one writer never wait for each other.

    Raises:
        FileProblem: it cannot be made or written, is no store, is of another version, or is locked by another process.
    """
    _check_file(path)
    with told(path):
        connection = _connect(path, "rwc")
        try:
            _set_up(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection to the store at `path`, which it cannot change.

    Raises:
        FileProblem: there is none, it cannot be read, is no store, or is of another version.
    """
    _check_file(path)
    if not path.exists():
        hint = "Searches on this machine keep what they measure in one; name it, or a run folder that has one."
        raise FileProblem(path, f"no such store. {hint}")
    # where nobody is writing, a database can be read without leaving files beside it, also on a read-only disk
    is_quiet = not any(_beside(path, ending).exists() for ending in COMPANIONS)
    with told(path):
        connection = _connect(path, "ro", "&immutable=1" if is_quiet else "")
        try:
            connection.execute("PRAGMA query_only = ON")
            schema.check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def told(path: Path) -> Iterator[None]:
    """While active, what SQLite raises becomes a `FileProblem` that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise FileProblem(path, _words(error)) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Everything that is written while active, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _connect(path: Path, mode: str, more: str = "") -> sqlite3.Connection:
    address = f"file:{quote(os.path.abspath(path))}?mode={mode}{more}"
    connection = sqlite3.connect(address, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "foreign_keys = ON", "mmap_size = 0"):
        connection.execute(f"PRAGMA {setting}")
    return connection


def _set_up(connection: sqlite3.Connection, path: Path) -> None:
    if not schema.is_empty(connection):  # a file of others is refused before anything in it changes
        schema.check(connection, path)
    connection.execute("PRAGMA auto_vacuum = FULL")  # before the first table: what is pruned gives its space back
    _use_wal(connection)
    connection.execute("PRAGMA synchronous = NORMAL")
    with transaction(connection):
        if schema.is_empty(connection):
            schema.create(connection)
    schema.check(connection, path)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Where two processes open a new store at once, one finds it locked without being made to wait."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _check_file(path: Path) -> None:
    """Refuses what is no plain file: SQLite would follow a link, and wait for ever at a pipe."""
    for each in (path, *(_beside(path, ending) for ending in COMPANIONS)):
        try:
            if each.is_symlink():
                raise FileProblem(each, "a symbolic link, expected a regular file: name the file that it leads to.")
            if each.exists() and not each.is_file():
                raise FileProblem(each, "not a regular file, expected a store of measurements: name another.")
        except (OSError, ValueError) as error:
            raise FileProblem(each, f"cannot be read: {error}.") from error


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _words(error: sqlite3.Error) -> str:
    code = _code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"another process has kept it locked for {BUSY_S:g} s: try again when it is done, or {_ELSEWHERE}."
    if code == sqlite3.SQLITE_NOTADB:
        return f"no database, expected a store of measurements: move the file away, or {_ELSEWHERE}."
    if code == sqlite3.SQLITE_FULL:
        return f"the disk is full: free some space, or {_ELSEWHERE}."
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"cannot be opened or written ({error}): make it and its folder writable, or {_ELSEWHERE}."
    if code == sqlite3.SQLITE_IOERR:
        return f"the disk did not take or give what was asked ({error}): look for space on it, or {_ELSEWHERE}."
    return f"the database is damaged ({error}): move it away (run folders keep their own), or {_ELSEWHERE}."


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 where SQLite gave none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
