"""Databases of measurements: the tables of the user's store and of a run's session, word by word, and how they are
opened. An error is one line with the recommended action.

`Database.at` opens any database of a folder that somebody may have sent. Opening runs no code: no extension is loaded,
no schema is trusted, no other database can be attached, and a file that holds a view, a trigger or a table of others is
refused before anything else is read.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from rlplace.errors import FileProblem
from rlplace.files import open_plain, os_errors

BUSY_S = 5.0
"""How long another process that is writing is waited for."""
LARGEST_COPY = 1 << 30
"""Bytes of a database, with its write-ahead log, that is read: it is copied first."""
COMPANIONS = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database."""
LOCAL_FILE_SYSTEMS = (
    *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs"),
    *("jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"),
)
"""Their memory maps are shared by all processes that see them, as the write-ahead log needs."""
_LEAST_PAGE_BYTES = 512
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT = re.compile(r"^(?:\S+ ){4}(\S+) \S.*? - (\S+)", re.MULTILINE)
"""The mount point in a line of it, and the kind of file system."""
_RETRY_S = 0.05
_MOST_OPERATIONS = 1_000_000
"""Steps of SQLite's until the tables of a file are known; those of a store take some thousand."""
_MOST_SQL = 80
"""Letters of a statement that a file holds, in messages."""
_MOST_LETTERS = 160
"""Of SQLite's message on a damaged database."""
_WORDS = {
    **dict.fromkeys(
        (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
        "another process has kept it locked for {busy_s:g} s: try again when it is done, or {elsewhere}.",
    ),
    sqlite3.SQLITE_NOTADB: "no database, expected a store of measurements: move the file away, or {elsewhere}.",
    sqlite3.SQLITE_FULL: "the disk is full: free some space, or {elsewhere}.",
    **dict.fromkeys(
        (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM),
        "cannot be opened or written ({error}): make it and its folder writable, or {elsewhere}.",
    ),
    sqlite3.SQLITE_IOERR: (
        "the disk did not take or give what was asked ({error}): look for space on it, or {elsewhere}."
    ),
}
"""The meaning of an error of SQLite and the remedy, by its primary result code; for all others `_DAMAGED`."""
_DAMAGED = "the database is damaged ({error}): move it away (run folders keep their own), or {elsewhere}."
_WRITING = threading.RLock()
"""Threads of this process write one after another: a connection has one transaction at a time."""
_COPYING = threading.Lock()
"""SQLite's locks on a file end when its process closes any descriptor of it: nothing is opened while one is copied."""


VERSION = 2
"""Of both schemas (`user_version`)."""
_MEASURED = {
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
        timeline BLOB NOT NULL
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
_INDEXES = {
    "measurements_by_key": "CREATE INDEX measurements_by_key ON measurements (graph, host, plan)",
    "measurements_by_plan": "CREATE INDEX measurements_by_plan ON measurements (plan)",
    "measurements_by_session": "CREATE INDEX measurements_by_session ON measurements (session_id)",
    "traces_by_plan": "CREATE INDEX traces_by_plan ON traces (plan)",
    "traces_by_session": "CREATE INDEX traces_by_session ON traces (session_id)",
    "learned_hosts_by_host": "CREATE INDEX learned_hosts_by_host ON learned_hosts (host)",
    "learned_hosts_by_session": "CREATE INDEX learned_hosts_by_session ON learned_hosts (session_id)",
}
_KEPT = {
    "facts": """CREATE TABLE facts (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL
    ) STRICT""",
    "arrays": """CREATE TABLE arrays (
        name TEXT PRIMARY KEY,
        value BLOB NOT NULL
    ) STRICT""",
    "races": """CREATE TABLE races (
        id INTEGER PRIMARY KEY,
        method TEXT NOT NULL,
        is_final INTEGER NOT NULL,
        plans TEXT NOT NULL,
        outcomes TEXT NOT NULL
    ) STRICT""",
}


@dataclass(frozen=True)
class Schema:
    """The exact content of a database of ours, statement by statement.

    Attributes:
        what: the kind of file, for messages.
        application_id: in the header of the file; four letters.
        statements: by name of the table or index.
        elsewhere: the remedy where it cannot be used.
        largest_value: bytes of a value or a row.
    """

    what: str
    application_id: int
    statements: Mapping[str, str]
    elsewhere: str
    largest_value: int

    def check(self, connection: sqlite3.Connection, path: Path) -> None:
        """Refuses a database that holds anything but these tables: a view, a trigger, a table of others.

        Raises:
            FileProblem: it is the database of another program, of another version, or was tampered with.
        """
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != self.application_id:
            raise FileProblem(path, f"a database of another program, expected {self.what}: name another.")
        if version != VERSION:
            hint = "a newer rlplace wrote it: update rlplace" if version > VERSION else "an older rlplace wrote it"
            raise FileProblem(path, f"its schema is {version}, expected {VERSION}; {hint}, or {self.elsewhere}.")
        rows = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
        found = {(str(name), sql and " ".join(str(sql).split())) for name, sql in rows}
        found = {pair for pair in found if pair[1] or not pair[0].startswith("sqlite_autoindex_")}
        expected = {(name, " ".join(sql.split())) for name, sql in self.statements.items()}
        for pair in (*sorted(found - expected, key=str), *sorted(expected - found)):
            how = "it lacks" if pair in expected else "it holds"
            raise FileProblem(
                path, f"{how} {str(pair[1] or pair[0])[:_MOST_SQL]!r}, unlike {self.what}: do not use this file."
            )


STORE = Schema(
    "a store of measurements",
    0x726C706C,  # rlpl
    _MEASURED | _INDEXES,
    "name another with `--store PATH`, or `--store off`",
    64 << 20,
)
"""The user's store: step times of all runs on a machine."""
RUN = Schema("the session of a run", 0x726C7072, _MEASURED | _INDEXES | _KEPT, "start the run in another folder", 10**9)
"""The session of a run (`session.db`): the tables of a store, and three more for the run."""


class Database:
    """A database of ours with its connection, which ends with a `with`.

    Attributes:
        path: of the database, for messages.

    Args:
        connection: to the database.
        path: see there.
    """

    SCHEMAS: ClassVar[tuple[Schema, ...]]
    """What it may be; a new one is of the first."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        connection.row_factory = sqlite3.Row
        self.path, self._connection = path, connection

    @classmethod
    def at(cls, path: Path, *, is_writable: bool) -> Self:
        """The database at `path`, also in a folder that a stranger sent.

        For writing, it is made where there is none. A new one is in WAL mode on a local file system, so that readers
        and one writer never wait for each other. On any other it has a rollback journal, since several hosts may
        write: a write-ahead log needs memory that they share. For reading it is as it is now (`_connect_safely`).

        Raises:
            FileProblem: it cannot be made, read or written, is of another kind or version, is damaged, or is locked by
                another process.
        """
        with told(path, cls.SCHEMAS[0]):
            connection = _connect_safely(path, is_writable=is_writable)
            try:
                (_set_up if is_writable else _check)(connection, path, cls.SCHEMAS)
            except BaseException:
                connection.close()
                raise
        return cls(connection, path)

    @classmethod
    def in_memory(cls) -> Self:
        """A new database that ends with its connection."""
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        _create(connection, cls.SCHEMAS[0])
        return cls(connection, Path("session"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the content stays."""
        self._connection.close()

    def _selected(self, statement: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
        """The rows of a query."""
        with told(self.path, self.SCHEMAS[0]):
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """A transaction, or part of one that is under way."""
        with told(self.path, self.SCHEMAS[0]), transaction(self._connection):
            yield self._connection.execute


@contextmanager
def told(path: Path, schema: Schema) -> Iterator[None]:
    """While active, an error of SQLite becomes a `FileProblem` with the recommended action."""
    try:
        yield
    except sqlite3.Error as error:
        raise FileProblem(
            path, _WORDS.get(_code(error), _DAMAGED).format(error=error, elsewhere=schema.elsewhere, busy_s=BUSY_S)
        ) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Everything that is written while active, or nothing of it; within another one it is part of that."""
    with _WRITING:
        is_within: bool = connection.in_transaction
        if is_within:
            yield
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _connect_safely(path: Path, *, is_writable: bool) -> sqlite3.Connection:
    """A connection to a database in a folder that a stranger may have sent; its content is not checked."""
    # SQLite believes the files beside a database before anybody can look into it: a journal may name a further file
    # (its super-journal), which SQLite then removes. Hence links, pipes and hard links are refused there, and such
    # journals. To be read, the database and its write-ahead log are copied to a private folder: nothing is rolled back,
    # made or mapped in the stranger's. That does not hold against a process that changes the folder while it is opened
    # for writing: a folder that others can write into is no place for a database.
    for each in (path, *(_beside(path, ending) for ending in COMPANIONS)):
        _check_plain(each, is_written=is_writable or each != path)
    _check_journal(path, _beside(path, "-journal"))
    with _COPYING:
        if is_writable:
            # SQLite would read it all the same, and leave files of this user's that its owner cannot write
            if path.exists() and not os.access(path, os.W_OK):
                raise FileProblem(path, "cannot be written by this user: make it writable, or name another.")
            return _connect(path, "rwc")
        if _is_open_here(path):  # it was checked when it was opened, and its locks must outlive this reading
            return _connect(path, "ro")
        try:
            # SQLite goes on reading what is open: nothing is left to be removed later, also after `kill -9`
            with tempfile.TemporaryDirectory(prefix="rlplace-", ignore_cleanup_errors=True) as folder:
                copy = Path(folder) / "copy.db"
                _copy(path, copy)
                return _connect(copy, "ro")
        except OSError as error:
            raise FileProblem(
                path,
                f"cannot be copied to be read ({error.strerror or error}): free some space in the temporary folder, or "
                "set TMPDIR to another.",
            ) from error


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    address = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={mode}"
    connection = sqlite3.connect(address, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, STORE.largest_value)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "foreign_keys = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {setting}")
        # a list of tables may be a bomb itself: see `_check`
        connection.set_progress_handler(lambda: 1, _MOST_OPERATIONS)
        if mode == "ro":
            connection.execute("PRAGMA query_only = ON")
            _is_empty(connection)  # opens the write-ahead log, too
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path, schemas: Sequence[Schema]) -> None:
    """Refuses a database of none of the schemas, and pages that stand for more than the file holds."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    schema = next((each for each in schemas if each.application_id == application), schemas[0])
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, schema.largest_value)
    schema.check(connection, path)
    connection.set_progress_handler(None, 0)
    # Where the pages of a table lead to one page again and again, a small file stands for rows without end. The check
    # of SQLite's counts each page once, in time that grows with the file (0.4 s for 90 MB).
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        what = " ".join(str(found).split())[:_MOST_LETTERS]
        raise FileProblem(path, f"the database is damaged ({what}): move it away, or {schema.elsewhere}.")


def _set_up(connection: sqlite3.Connection, path: Path, schemas: Sequence[Schema]) -> None:
    mounts = ""
    with suppress(OSError):
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    is_shared = not is_local(path.parent, mounts)
    if is_shared:  # a write-ahead log of before is read without memory that other hosts would have to share
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    is_new = _is_empty(connection)
    if not is_new:  # a file of others is refused before anything in it changes
        _check(connection, path, schemas)
    connection.execute("PRAGMA auto_vacuum = FULL")  # before the first table: what is pruned gives its space back
    if is_shared:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        connection.execute("PRAGMA locking_mode = NORMAL")
    elif is_new:  # one that was on a network file system may be there again
        _use_wal(connection)
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")
    with transaction(connection):  # which also ends the exclusive lock
        if _is_empty(connection):
            _create(connection, schemas[0])
    if is_new:  # another process may have made it
        _check(connection, path, schemas)


def _create(connection: sqlite3.Connection, schema: Schema) -> None:
    """Makes the tables of an empty database; the caller begins and commits."""
    for statement in schema.statements.values():
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {schema.application_id}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is None


def is_local(folder: Path, mounts: str) -> bool:
    """Whether a folder is on a file system of this machine alone; where nothing is known of it, it is.

    Args:
        folder: that is there.
        mounts: as `/proc/self/mountinfo` of Linux says them; empty elsewhere.
    """
    real = os.path.realpath(folder)
    found = _MOUNT.findall(mounts)
    # spaces in a mount point are written in octal: proc(5)
    named = ((re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point), kind) for point, kind in found)
    around = [(len(point), kind) for point, kind in named if f"{real}/".startswith(f"{point.rstrip('/')}/")]
    # of two mounts at one place the later is seen
    return not around or sorted(around, key=lambda pair: pair[0])[-1][1] in LOCAL_FILE_SYSTEMS


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


def _check_plain(path: Path, *, is_written: bool) -> None:
    """Refuses all but plain files: SQLite would follow a link, and wait for ever at a pipe."""
    if not os.path.lexists(path):
        return
    with os_errors(path, "read"):
        found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise FileProblem(path, "a symbolic link, expected a regular file: name the file that it leads to.")
    if not stat.S_ISREG(found.st_mode):
        raise FileProblem(path, "not a regular file, expected a store of measurements: name another.")
    if is_written and found.st_nlink > 1:
        raise FileProblem(path, "a file with a second name (a hard link), which SQLite would write: copy the database.")


def _check_journal(path: Path, journal: Path) -> None:
    """Refuses a journal that names a super-journal, or that makes the database huge
    (https://sqlite.org/fileformat.html, "The Rollback Journal").

    A super-journal is named at the end: a page number, the name, its length, a checksum, and the magic of a journal.
    SQLite removes the file of that name, and writes such a journal only where databases are attached: none of ours.
    The header has the number of pages that the database had, and their size: SQLite restores this size.
    """
    header = _piece(journal, 0, 28)
    if header[:8] == _JOURNAL_MAGIC and len(header) == 28:
        num_pages, _, page_size = struct.unpack(">3I", header[16:])
        most = max(LARGEST_COPY, path.stat().st_size if path.exists() else 0)
        if num_pages * max(page_size, _LEAST_PAGE_BYTES) > most:
            raise FileProblem(
                journal,
                f"a journal of a database of {num_pages} pages, expected at most {most} bytes: do not use this folder.",
            )
    if _piece(journal, -len(_JOURNAL_MAGIC), len(_JOURNAL_MAGIC)) == _JOURNAL_MAGIC:
        raise FileProblem(
            journal,
            "a journal that names another file, which SQLite would remove, expected that of a store: do not use this "
            "folder.",
        )


def _piece(path: Path, start: int, size: int) -> bytes:
    """`size` bytes of a file, from the end where `start` is negative; empty where there is no such file."""
    with os_errors(path, "read"), suppress(FileNotFoundError), open_plain(path) as file:
        file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
        return file.read(size)
    return b""


def _is_open_here(path: Path) -> bool:
    """Whether a descriptor of this process leads to the file."""
    with suppress(OSError):
        wanted = path.stat()
        for entry in os.listdir("/dev/fd"):
            with suppress(OSError, ValueError):
                if os.path.samestat(os.stat(int(entry)), wanted):
                    return True
    return False


def _copy(path: Path, copy: Path) -> None:
    """Copies a database and its write-ahead log as they were at one moment; a journal never."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        before = _moment(path)
        if before is not None:
            left = LARGEST_COPY
            for ending in ("", "-wal"):
                left -= _copy_file(_beside(path, ending), _beside(copy, ending), left)
            if _moment(path) == before:
                return
        if time.monotonic() > deadline_s:
            raise FileProblem(
                path,
                "a write into it goes on or was cut off, expected one that is whole: try again; the next command that "
                f"writes into it mends it. Or read it without {path.name}-journal: move that away.",
            )
        time.sleep(_RETRY_S)


def _moment(path: Path) -> tuple[object, ...] | None:
    """Facts that differ once a database has changed, without appended frames of its log; None amid a transaction."""
    if _piece(_beside(path, "-journal"), 0, 1).strip(b"\0"):  # as SQLite sees that one is hot
        return None
    with os_errors(path, "read"):
        found = path.stat()
    header, log = _piece(path, 0, 100), _piece(_beside(path, "-wal"), 0, 32)
    return found.st_ino, found.st_size, found.st_mtime_ns, header, log


def _copy_file(path: Path, copy: Path, most: int) -> int:
    """Copies a file, as long as it is now; says how long that is."""
    try:
        file = open_plain(path)
    except FileNotFoundError:
        copy.unlink(missing_ok=True)
        return 0
    with file, copy.open("wb") as out:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileProblem(
                path,
                f"{size} bytes, expected at most {most}: `rlplace measurements prune --older-than 90d` makes your own "
                "smaller.",
            )
        shutil.copyfileobj(file, out)  # with frames that are appended to its log meanwhile, if there are any
    return size


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 where SQLite gave none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
