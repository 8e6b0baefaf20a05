"""A stranger's database beside files that SQLite would believe: nothing of the user's is removed or written."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import asked
from fake_measurer import chain_problem
from stored import GRAPH, HOST, PLAN, SESSION, plan_of, row_of

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.host_model import Prior
from rlplace.measure.host_model.learned_host import LearnedFactor, LearnedHost
from rlplace.measure.simulate.simulator import Simulator
from rlplace.store import MeasurementStore, database

MAGIC = bytes.fromhex("d9d505f920a163d7")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store in a stranger's folder."""
    path = tmp_path / "sent" / "measurements.db"
    path.parent.mkdir()
    with MeasurementStore.open(path) as store:
        store.add(SESSION, PLAN, row_of())
    return path


def hot_journal(path: Path, super_journal: str = "", pages: int | None = None) -> Path:
    """A journal that SQLite rolls back, without a page; with the record of a super-journal, or of more pages."""
    page_size = struct.unpack(">H", path.read_bytes()[16:18])[0]
    header = MAGIC + struct.pack(">5I", 0, 7, pages or path.stat().st_size // page_size, 512, page_size)
    name, record = os.fsencode(super_journal), b""
    if name:
        record = struct.pack(">I", 2**30 // page_size + 1) + name + struct.pack(">2I", len(name), sum(name)) + MAGIC
    journal = path.with_name(path.name + "-journal")
    journal.write_bytes(header.ljust(512, b"\0") + record)
    return journal


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


COMMANDS = {
    "list": ("measurements", "list"),
    "export": ("measurements", "export"),
    "count": ("measurements", "prune", "--all", "--dry-run"),
    "prune": ("measurements", "prune", "--all"),
    "train": ("train", "rnnlm@layers=1,units=8,batch=2,steps=2,vocab=10", "--host", "cores", "--budget", "1s"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_journal_that_names_a_file_of_the_users_removes_nothing(
    command: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "thesis.tex"
    own.write_text("years of work")
    hot_journal(path, str(own))
    before = contents(path.parent)
    code, said = asked(*COMMANDS[command], "--store", str(path))
    assert code == 2
    assert "measurements.db-journal: a journal that names another file" in said
    assert own.read_text() == "years of work"
    assert contents(path.parent) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("pages", [2**32 - 1, 2**18 + 1])
def test_a_journal_of_a_huge_database_is_refused(
    pages: int, command: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would give the file that size, of terabytes."""
    monkeypatch.chdir(tmp_path)
    hot_journal(path, pages=pages)
    before = contents(path.parent)
    code, said = asked(*COMMANDS[command], "--store", str(path))
    assert code == 2
    assert f"measurements.db-journal: a journal of a database of {pages} pages" in said
    assert path.stat().st_size == len(before[path.name])
    assert contents(path.parent) == before


def test_a_store_in_a_folder_whose_name_is_no_unicode_is_opened(path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(path.parent) + b"\xff"))
    path.parent.rename(folder)
    with MeasurementStore.open(folder / path.name) as store:
        store.add(SESSION, PLAN, row_of())
    with MeasurementStore.read(folder / path.name) as store:
        assert store.count() == 2


def test_host_models_and_traces_are_read_up_to_a_length(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = LearnedHost(
        "cores", HOST, "profiled", Prior(), (LearnedFactor("device", "cpu:0", 0.1, 0.01, 0.1, prior_mean=0.02),), ("a",)
    )
    problem = chain_problem(3)
    simulator = Simulator(problem)
    plan = simulator.plan(np.array([0, 1, 1], dtype=np.int32))
    timeline = simulator.timeline(plan)
    with MeasurementStore.open(path) as store:
        for step in range(3):
            store.add_learned(SESSION, GRAPH, learned)
            later = replace(timeline, op_end_s=timeline.op_end_s + step)
            store.add_trace(SESSION, problem.graph.fingerprint, HOST, plan, later)
        assert len(store.learned_hosts()) == 3
        (length,) = store._connection.execute("SELECT max(length(model)) FROM learned_hosts").fetchone()
        monkeypatch.setattr("rlplace.store.store.MOST_MODEL_TEXT", 2 * length, raising=False)
        assert len(store.learned_hosts()) == 2
        monkeypatch.setattr("rlplace.store.store.MOST_TRACES", 2, raising=False)
        kept = store.traces(plan, problem)
        assert [trace.op_end_s[0] - timeline.op_end_s[0] for trace in kept] == pytest.approx([2, 1])
        for data in (zlib.compress(b"0" * (1 << 24)), zlib.compress(b"0" * 8), b"0"):
            store._connection.execute("UPDATE traces SET timeline = ?", (data,))
            with pytest.raises(InvalidValue, match="timeline"):
                store.traces(plan, problem)


def test_what_is_not_yet_in_the_database_is_read_and_the_folder_stays_as_it_is(path: Path, tmp_path: Path) -> None:
    with MeasurementStore.open(path) as store:
        store.add(SESSION, plan_of(0, 0), row_of(plan_of(0, 0)))
        left = tmp_path / "left" / path.name  # as where a run was killed
        left.parent.mkdir()
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{left}{ending}")
    left.with_name(f"{left.name}-shm").write_bytes(b"made by a stranger " * 2000)
    before = contents(left.parent)
    with MeasurementStore.read(left) as reader:
        assert contents(left.parent) == before
        assert reader.count() == 2
        assert len(list(reader.measurements())) == 2
    assert contents(left.parent) == before


def test_a_write_that_was_cut_off_is_not_read_and_the_next_write_mends_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    journal = hot_journal(path)
    with pytest.raises(FileProblem, match="was cut off"):
        MeasurementStore.read(path)
    with MeasurementStore.open(path) as store:
        assert store.count() == 1
    assert not journal.exists()
    with MeasurementStore.read(path) as reader:
        assert reader.count() == 1


@pytest.mark.parametrize("ending", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_what_is_no_plain_file_beside_it_is_refused(kind: str, ending: str, path: Path, tmp_path: Path) -> None:
    own, beside = tmp_path / "own", Path(f"{path}{ending}")
    own.write_text("mine")
    make = {"link": lambda: beside.symlink_to(own), "hard link": lambda: beside.hardlink_to(own)}
    make |= {"pipe": lambda: os.mkfifo(beside), "folder": beside.mkdir}
    make[kind]()
    for use in (MeasurementStore.open, MeasurementStore.read):
        with pytest.raises(FileProblem, match=f"measurements.db{ending}: "):
            use(path)
    assert own.read_text() == "mine"


def test_a_database_with_a_second_name_is_read_but_not_written(path: Path, tmp_path: Path) -> None:
    (tmp_path / "own.db").hardlink_to(path)
    before = path.read_bytes()
    with pytest.raises(FileProblem, match="a second name"):
        MeasurementStore.open(path)
    assert path.read_bytes() == before
    with MeasurementStore.read(path) as reader:
        assert reader.count() == 1


def make_bomb(path: Path, root: int, levels: int = 6) -> None:
    """Puts pages above the table at page `root` whose children are all one page: 500 ** levels times its rows."""
    data = bytearray(path.read_bytes())
    size = struct.unpack(">H", data[16:18])[0]
    data += data[(root - 1) * size : root * size]
    for level in range(levels):
        child, free = len(data) // size, size - 5 * 500
        page = bytearray(size)
        struct.pack_into(">BHHHBI", page, 0, 5, 0, 500, free, 0, child)
        for index in range(500):
            struct.pack_into(">H", page, 12 + 2 * index, free + 5 * (499 - index))
            struct.pack_into(">IB", page, free + 5 * (499 - index), child, min(index + 1, 127))
        if level < levels - 1:
            data += page
        else:
            data[(root - 1) * size : root * size] = page
    struct.pack_into(">I", data, 28, len(data) // size)
    path.write_bytes(data)


@pytest.mark.parametrize("table", ["measurements", "sessions", "learned_hosts"])
def test_pages_that_stand_for_rows_without_end_are_refused(table: str, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    connection.close()
    make_bomb(path, root)
    before = path.read_bytes()
    for use in (MeasurementStore.open, MeasurementStore.read):
        with pytest.raises(FileProblem, match="the database is damaged"):
            use(path)
    for command in ("export", "list"):
        code, said = asked("measurements", command, "--store", str(path))
        assert (code, "the database is damaged" in said) == (2, True)
    assert path.read_bytes() == before


def test_a_list_of_tables_without_end_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_MOST_OPERATIONS", 10)
    for use in (MeasurementStore.open, MeasurementStore.read):
        with pytest.raises(FileProblem, match="the database is damaged"):
            use(path)


def test_a_store_that_is_too_large_to_be_copied_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LARGEST_COPY", path.stat().st_size - 1)
    with pytest.raises(FileProblem, match="expected at most"):
        MeasurementStore.read(path)


def test_no_other_database_can_be_attached(path: Path, tmp_path: Path) -> None:
    for use in (MeasurementStore.open, MeasurementStore.read):
        with use(path) as store, pytest.raises(sqlite3.OperationalError, match="too many attached"):
            store._connection.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
    assert not (tmp_path / "other.db").exists()
