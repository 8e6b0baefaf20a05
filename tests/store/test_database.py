"""Databases that are broken, foreign, hostile, locked or on a full disk: one clear line, and no code of theirs runs."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stored import PLAN, SESSION, foreign, plan_of, row_of

from rlplace.errors import FileProblem, UserError
from rlplace.measure.problem import Plan
from rlplace.store import MeasurementStore, database

Maker = Callable[[Path], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.db"


def made(path: Path, *changes: str) -> Path:
    """A store with a measurement, changed by statements."""
    with MeasurementStore.open(path) as store:
        store.add(SESSION, PLAN, row_of())
    return foreign(path, *changes)


def truncated(path: Path) -> None:
    made(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


FAULTS: dict[str, tuple[Maker, str]] = {
    "text": (lambda path: path.write_text("not a database at all, " * 100), "no database, expected a store"),
    "truncated": (truncated, "damaged|no database"),
    "of others": (lambda path: foreign(path, "CREATE TABLE bookmarks (url TEXT)"), "a database of another program"),
    "newer": (lambda path: made(path, "PRAGMA user_version = 3"), "its schema is 3, expected 2; a newer rlplace"),
    "older": (lambda path: made(path, "PRAGMA user_version = 1"), "its schema is 1, expected 2; an older rlplace"),
    "trigger": (
        lambda path: made(path, "CREATE TRIGGER t AFTER INSERT ON sessions BEGIN DELETE FROM plans; END"),
        "it holds .CREATE TRIGGER t AFTER INSERT ON sessions",
    ),
    "view": (
        lambda path: made(path, "DROP TABLE traces", "CREATE VIEW traces AS SELECT 1 AS plan"),
        "it holds .CREATE VIEW traces AS SELECT 1 AS plan., unlike a store of measurements",
    ),
    "other table": (lambda path: made(path, "CREATE TABLE more (x)"), "it holds .CREATE TABLE more"),
    "other columns": (
        lambda path: made(path, "ALTER TABLE sessions ADD COLUMN extra TEXT"),
        "it .* .CREATE TABLE sessions .*, unlike a store of measurements",
    ),
    "lacking": (lambda path: made(path, "DROP TABLE learned_hosts"), "it lacks .CREATE"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "pipe": (lambda path: os.mkfifo(path), "not a regular file"),
    "link": (lambda path: path.symlink_to(made(path.with_name("other.db"))), "a symbolic link"),
    "linked journal": (
        lambda path: (made(path), Path(f"{path}-wal").symlink_to("/etc/hostname")),
        "measurements.db-wal: a symbolic link",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_store_is_refused_in_one_line_and_left_as_it_is(fault: str, path: Path) -> None:
    make, words = FAULTS[fault]
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    for use in (MeasurementStore.read, MeasurementStore.open):
        with pytest.raises(FileProblem, match=words) as caught, use(path) as store:
            list(store.measurements())
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    assert before == (path.read_bytes() if path.is_file() else b"")


def test_reading_a_store_that_is_not_there_says_so_and_makes_none(path: Path) -> None:
    with pytest.raises(FileProblem, match="no such store"):
        MeasurementStore.read(path)
    assert not path.exists()


def test_a_path_is_a_path_whatever_letters_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=memory#x%20.db"
    made(path)
    with MeasurementStore.read(path) as store:
        assert store.count() == 1
    assert path.is_file()


def test_no_extension_can_be_loaded_and_the_schema_is_not_trusted(path: Path) -> None:
    connection = MeasurementStore.open(path)._connection
    with pytest.raises(sqlite3.OperationalError, match="not authorized"):
        connection.execute("SELECT load_extension('x')")
    assert connection.execute("PRAGMA trusted_schema").fetchone()[0] == 0
    assert MeasurementStore.read(path)._connection.execute("PRAGMA query_only").fetchone()[0] == 1


BAD_VALUES = [
    ("samples_s", "'[1e999]'", "samples_s"),
    ("samples_s", f"'{'[' * 5000}'", "samples_s"),
    ("samples_s", "'[-1.0]'", r"samples_s\[0\] is -1.0, expected more than 0"),
    ("samples_s", "'{}'", "samples_s is a mapping"),
    ("peak_bytes", f"'[{10**30}]'", "peak_bytes"),
    ("peak_bytes", "'[\"x\"]'", r"peak_bytes\[0\]"),
    ("step_time_s", "NULL", "step_time_s is None"),
    ("step_time_s", "1e308 * 10", "step_time_s"),
    ("step_time_s", "-1.0", "step_time_s"),
    ("taken_s", "1e300", "taken_s"),
    ("plan", "'../../etc/passwd'", "plan is '../../etc/passwd'"),
    ("is_whole", "7", "is_whole is 7"),
    ("reference_s", "-0.5", "reference_s"),
]


@pytest.mark.parametrize(("column", "value", "words"), BAD_VALUES)
def test_a_value_that_no_measurement_has_is_told_by_its_row_and_column(
    column: str, value: str, words: str, path: Path
) -> None:
    made(path, "PRAGMA foreign_keys = OFF", f"UPDATE measurements SET {column} = {value}")
    with pytest.raises(UserError, match=words) as caught, MeasurementStore.read(path) as store:
        list(store.measurements())
    assert "measurement 1" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("devices = x'ffff'", "devices is 'no compressed bytes"),
        ("devices = x'00'", "devices is 'bytes that are cut off"),
        ("num_ops = 99999999999", "num_ops is 99999999999, expected 3"),
        ("fingerprint = 'ff'", "fingerprint is 'ff'"),
    ],
)
def test_a_plan_that_is_not_what_its_fingerprint_says_is_refused(change: str, words: str, path: Path) -> None:
    made(path, "PRAGMA foreign_keys = OFF", f"UPDATE plans SET {change}")
    with pytest.raises(UserError, match=words), MeasurementStore.read(path) as store:
        store.plan("ff" if "fingerprint" in change else PLAN.fingerprint)


def test_a_plan_that_would_unpack_to_gigabytes_is_not_unpacked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zlib

    bomb = zlib.compress(bytes(4_000_000), 9)
    assert len(bomb) < 10_000
    made(path, "PRAGMA foreign_keys = OFF", f"UPDATE plans SET devices = x'{bomb.hex()}'")
    monkeypatch.setattr("rlplace.store.rows.LARGEST_OPS", 1000)
    with pytest.raises(UserError, match="bytes that are cut off, or too many"), MeasurementStore.read(path) as store:
        store.plan(PLAN.fingerprint)


def test_a_store_that_another_process_keeps_locked_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(path)
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(FileProblem, match="has kept it locked"), MeasurementStore.open(path) as store:
        store.add(SESSION, PLAN, row_of())
    other.execute("ROLLBACK")
    with MeasurementStore.open(path) as store:
        assert store.count() == 1
    other.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_store_can_be_read_and_not_written(path: Path) -> None:
    made(path)
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with MeasurementStore.read(path) as store:
            assert store.count() == 1
        with pytest.raises(FileProblem, match="writable"), MeasurementStore.open(path) as store:
            store.add(SESSION, PLAN, row_of())
    finally:
        path.parent.chmod(0o700)


PRUNE = """
import os, sys
from rlplace.errors import FileProblem
from rlplace.store import Filter, MeasurementStore
os.setgroups([])
os.setgid(65534)
os.setuid(65534)  # who may be barred from this Python: all of it is imported by now
try:
    with MeasurementStore.open(sys.argv[1]) as store:
        store.prune(Filter())
except FileProblem as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("is_foreign", [False, True])
def test_who_may_not_write_a_store_leaves_nothing_beside_it(is_foreign: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "measurements.db"
        made(path, *(["CREATE TABLE theirs (a)"] if is_foreign else []))
        Path(folder).chmod(0o777)
        path.chmod(0o666 if is_foreign else 0o644)
        command = [sys.executable, "-c", PRUNE, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith(f"{path}: ")
        assert [entry.name for entry in Path(folder).iterdir()] == [path.name]


def fill(store: MeasurementStore, plans: Iterator[Plan]) -> None:
    for plan in plans:
        store.add(SESSION, plan, row_of(plan))


@pytest.fixture
def small_disk(path: Path) -> Iterator[None]:
    """No file of this process may grow beyond what the store has now, as on a disk that is full."""
    made(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_nothing_that_was_kept_is_lost(path: Path, small_disk: None) -> None:
    plans = iter([plan_of(*range(k, k + 50)) for k in range(2000)])
    with MeasurementStore.open(path) as store:
        with pytest.raises(FileProblem, match=r"full|the disk did not take"):
            fill(store, plans)
        kept = store.count()
    with MeasurementStore.read(path) as store:
        assert store.count() == kept >= 1
        assert all(row.measurement.ok for row in store.measurements())


def test_the_schema_is_what_a_new_store_has(path: Path) -> None:
    connection = MeasurementStore.open(path)._connection
    database.STORE.check(connection, path)
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert connection.execute("PRAGMA foreign_keys").fetchone()[0] == 1


MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/a\\040b rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt rw - ext4 /dev/sdc1 rw
33 32 0:42 / /mnt rw master:2 - fuse.sshfs server:/ rw
34 22 0:43 / /vendor rw - some_cluster_fs none rw
cut off
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/srv/runs", True),
        ("/homes", True),
        ("/home", False),
        ("/home/ann/.cache", False),
        ("/home/a b/.cache", True),
        ("/mnt/x", False),
        ("/vendor", False),
    ],
)
def test_what_a_file_system_is_is_read_from_the_mounts(folder: str, expected: bool) -> None:
    assert database.is_local(Path(folder), MOUNTS) == expected
    assert database.is_local(Path(folder), "")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if every folder were on a network file system."""
    (tmp_path / "mounts").write_text("30 1 0:40 / / rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(database, "_MOUNTS", tmp_path / "mounts")
    return monkeypatch


def mode_of(store: MeasurementStore) -> str:
    return str(store._connection.execute("PRAGMA journal_mode").fetchone()[0])


def test_on_a_network_file_system_several_hosts_use_a_rollback_journal(path: Path, network: pytest.MonkeyPatch) -> None:
    stores = [MeasurementStore.open(path) for _ in range(2)]
    assert [mode_of(store) for store in stores] == ["delete", "delete"]
    for store in stores:
        store.add(SESSION, PLAN, row_of())
    with MeasurementStore.read(path) as reader:
        assert reader.count() == 2
    for store in stores:
        store.close()
    assert not any(Path(f"{path}{ending}").exists() for ending in database.COMPANIONS)
    network.undo()
    with MeasurementStore.open(path) as store:  # a server of these files sees them on a disk of its own
        assert (mode_of(store), store.count()) == ("delete", 2)


def test_a_store_of_before_gives_its_log_up_on_a_network_file_system_once_nobody_uses_it(
    path: Path, tmp_path: Path, network: pytest.MonkeyPatch
) -> None:
    monkeypatch, mounts = network, database._MOUNTS
    monkeypatch.setattr(database, "_MOUNTS", tmp_path / "none")
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with MeasurementStore.open(path) as other:
        other.add(SESSION, PLAN, row_of())
        monkeypatch.setattr(database, "_MOUNTS", mounts)
        with pytest.raises(FileProblem, match="has kept it locked"):
            MeasurementStore.open(path)
    with MeasurementStore.open(path) as store:
        assert (mode_of(store), store.count()) == ("delete", 1)


OPENS_AND_CLOSES = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1])
other.execute("SELECT count(*) FROM plans").fetchone()
other.close()
"""


def test_reading_in_the_process_that_writes_keeps_its_locks(path: Path) -> None:
    """Where they ended, the next process to close the database would remove the log that is still written into."""
    with MeasurementStore.open(path) as store:
        store.add(SESSION, PLAN, row_of())
        with MeasurementStore.read(path) as reader:
            assert reader.count() == 1
        subprocess.run([sys.executable, "-c", OPENS_AND_CLOSES, str(path)], check=True)
        assert Path(f"{path}-wal").exists()
