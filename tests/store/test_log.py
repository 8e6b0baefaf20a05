"""`StoreLog`: keeps and answers, and never stops a run, whatever becomes of its stores."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_host
from fake_measurer import chain_problem
from random_problems import plain_host
from stored import GRAPH, HOST, MACHINE, PLAN, REFERENCE, SESSION, foreign, key_of, outcome_of, row_of

from rlplace.errors import FileProblem
from rlplace.measure import Measurement, Simulator
from rlplace.measure.host_model import LearnedHost, Prior
from rlplace.store import Filter, MeasurementStore, MeasuringProcess, StoreLog, database, open_log
from rlplace.store.log import FAILURE_ANSWERS_S, check_store
from rlplace.store.store import ANSWERS_S


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(tmp_path: Path, said: list[str]) -> StoreLog:
    stores = [MeasurementStore.open(tmp_path / name) for name in ("run.db", "user.db")]
    return StoreLog(stores, SESSION, said.append)


def recall(log: StoreLog, reference: str) -> Measurement | None:
    return log.recall(key_of(), reference, PLAN, chain_problem(3))


def counts(folder: Path) -> list[int]:
    found = []
    for name in ("run.db", "user.db"):
        with MeasurementStore.read(folder / name) as store:
            found.append(store.count())
    return found


def test_what_is_measured_goes_into_every_store_and_answers(log: StoreLog, tmp_path: Path, said: list[str]) -> None:
    assert recall(log, REFERENCE) is None
    log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    assert recall(log, REFERENCE) == outcome_of()
    assert recall(log, "") is None
    assert recall(log, "34" * 8) is None
    log.close()
    log.close()
    assert counts(tmp_path) == [1, 1]
    assert said == []


def test_a_measurement_comes_back_with_the_timeline_of_its_own_traced_step(tmp_path: Path) -> None:
    problem = chain_problem(4)
    simulator, graph = Simulator(problem), problem.graph
    plan = simulator.plan(np.array([0, 1, 1, 0], dtype=np.int32))
    key = dataclasses.replace(key_of(plan), graph=graph.fingerprint)
    other, timeline = key_of(plan, graph=graph.fingerprint, protocol="untraced"), simulator.timeline(plan)
    timeline = dataclasses.replace(timeline, traced_op_s=1e-6)
    before = StoreLog([MeasurementStore.open(tmp_path / "user.db")], SESSION, print)
    before.keep(plan, outcome_of(plan, key=key, timeline=timeline), REFERENCE, is_whole=True)
    before.keep(plan, outcome_of(plan, key=other), REFERENCE, is_whole=True)
    before.keep_trace(problem, plan, timeline.slowed(2.0))  # of another visit
    before.close()
    log = StoreLog([MeasurementStore.open(tmp_path / "user.db")], SESSION, print)
    found = log.recall(key, REFERENCE, plan, problem)
    assert found is not None
    assert found.timeline is not None
    assert found.timeline.traced_op_s == 1e-6
    np.testing.assert_array_equal(found.timeline.op_start_s, timeline.op_start_s)
    np.testing.assert_allclose(found.timeline.op_end_s, timeline.op_end_s, rtol=1e-15)
    assert found.timeline.transfer_source.tolist() == timeline.transfer_source.tolist()
    untraced = log.recall(other, REFERENCE, plan, problem)
    assert untraced is not None
    assert untraced.timeline is None
    log.close()


@pytest.mark.parametrize(
    ("status", "age_s", "is_answered"),
    [
        ("ok", ANSWERS_S - 60, True),
        ("ok", ANSWERS_S + 60, False),
        ("oom", FAILURE_ANSWERS_S - 60, True),
        ("oom", FAILURE_ANSWERS_S + 60, False),
        ("timeout", 0.0, True),
    ],
)
def test_what_is_old_answers_no_more_and_failures_sooner(
    status: str, age_s: float, is_answered: bool, log: StoreLog, tmp_path: Path
) -> None:
    failed = {} if status == "ok" else {"status": status, "step_time_s": float("inf"), "samples_s": ()}
    with MeasurementStore.open(tmp_path / "user.db") as store:
        store.add(SESSION, PLAN, row_of(PLAN, 0.5, age_s=age_s, **failed))
    found = recall(log, REFERENCE)
    assert (found is not None) == is_answered
    assert found is None or found.status == status


def test_what_is_learned_is_kept_once_for_machines_like_this(log: StoreLog) -> None:
    host = core_host()
    learned = LearnedHost("cores", host.fingerprint, "profiled", Prior(), (), ())
    assert log.learned_hosts(host) == []
    log.keep_learned(GRAPH, learned)
    assert log.learned_hosts(host) == [learned]
    assert log.learned_hosts(core_host(3)) == []


def test_while_a_store_is_locked_it_waits_and_is_written_later(
    log: StoreLog, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shelf in log._shelves:
        shelf.store._connection.execute("PRAGMA busy_timeout = 20")
    other = sqlite3.connect(tmp_path / "user.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(3):
        log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    assert len(said) == 1
    assert "user.db: another process has kept it locked" in said[0]
    assert said[0].endswith("The run goes on.")
    assert recall(log, REFERENCE) == outcome_of()
    other.execute("ROLLBACK")
    log.close()
    assert counts(tmp_path) == [3, 3]
    assert len(said) == 1
    other.close()


def test_what_never_gets_into_a_store_is_said_in_the_end(log: StoreLog, tmp_path: Path, said: list[str]) -> None:
    log._shelves[1].store.close()
    log._shelves[1].store = MeasurementStore.read(tmp_path / "run.db")  # as where a disk became read-only
    for _ in range(2):
        log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    log.close()
    assert len(said) == 2
    assert "2 records of this run could not be kept" in said[1]
    with MeasurementStore.read(tmp_path / "run.db") as store:
        assert store.count() == 2


def test_a_store_that_breaks_meanwhile_answers_nothing_and_stops_nothing(
    log: StoreLog, tmp_path: Path, said: list[str]
) -> None:
    log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    for name in ("run.db", "user.db"):
        foreign(tmp_path / name, "UPDATE measurements SET samples_s = '[0]'")
    assert recall(log, REFERENCE) is None
    assert len(said) == 2
    assert "samples_s[0] is 0, expected more than 0" in said[0]
    log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    assert recall(log, REFERENCE) == outcome_of()


@pytest.mark.parametrize("sample_s", [0.0, float("inf")])
def test_a_measurement_that_nobody_could_read_again_is_not_kept_and_said(
    sample_s: float, log: StoreLog, said: list[str]
) -> None:
    log.keep(PLAN, dataclasses.replace(outcome_of(), samples_s=(sample_s,)), REFERENCE, is_whole=True)
    assert len(said) == 1
    assert f"samples_s[0] is {sample_s}" in said[0]


def test_an_error_that_quotes_bytes_is_kept(log: StoreLog, tmp_path: Path, said: list[str]) -> None:
    failed = dataclasses.replace(outcome_of(), status="error", samples_s=(), why="no file 'a\udcff'")
    log.keep(PLAN, failed, REFERENCE, is_whole=True)
    log.close()
    assert counts(tmp_path) == [1, 1]
    assert said == []


def test_the_runs_own_store_answers_also_what_a_busy_machine_measured(tmp_path: Path, said: list[str]) -> None:
    busy, later = (dataclasses.replace(SESSION, begun_s=begun_s, idle_share=0.1) for begun_s in (1.0, 2.0))
    with MeasurementStore.open(tmp_path / "measurements.db") as store:
        store.add(busy, PLAN, row_of())
        for log in (StoreLog([], later, said.append, store), StoreLog([store], later, said.append)):
            assert (recall(log, REFERENCE) is not None) == log._shelves[0].is_own


def logged(word: str, said: list[str], own: MeasurementStore | None = None) -> StoreLog | None:
    return open_log(word, core_host(), workload="nmt", versions="v", say=said.append, own=own)


def test_auto_is_in_the_users_cache_folder_and_off_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert logged("off", said) is None
    assert not (tmp_path / "cache").exists()
    log = logged("auto", said)
    assert log is not None
    log.close()
    assert (tmp_path / "cache" / "rlplace" / "measurements.db").is_file()
    assert open_log("auto", plain_host(2), workload="nmt", versions="v", say=said.append) is None
    assert said == []


def test_a_run_has_a_store_of_its_own_also_without_the_users(tmp_path: Path, said: list[str]) -> None:
    with MeasurementStore.open(tmp_path / "measurements.db") as store:
        log = logged("off", said, store)
        assert log is not None
        log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
        log.close()
        assert store.count() == 1, "its session closes it"
    with MeasurementStore.read(tmp_path / "measurements.db") as store:
        assert [row.workload for row in store.measurements()] == ["nmt"]


def test_if_the_users_own_is_broken_the_run_goes_on_and_a_named_one_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "rlplace" / "measurements.db"
    path.parent.mkdir()
    path.write_text("nothing of the kind " * 50)
    assert logged("auto", said) is None
    assert len(said) == 1
    assert "no database" in said[0]
    check_store("auto")
    check_store("off")
    for use in (check_store, lambda word: logged(word, said)):
        with pytest.raises(FileProblem, match="no database"):
            use(str(path))


def test_a_session_says_how_the_machine_was() -> None:
    session = MeasuringProcess.now("nmt", "cores", "v")
    assert session.machine != MACHINE
    assert len(session.machine) == 16
    assert session.idle_share is None or 0.0 <= session.idle_share <= 1.0
    assert session.load is None or session.load >= 0.0
    assert database.BUSY_S > 0


def test_what_is_dated_in_the_future_does_not_answer_for_ever(log: StoreLog, tmp_path: Path) -> None:
    """A clock that was a year ahead, and one that was an hour ahead when the machine was another."""
    with MeasurementStore.open(tmp_path / "user.db") as store:
        store.add(SESSION, PLAN, row_of(PLAN, 0.25, age_s=-365 * 86400.0))
        assert recall(log, REFERENCE) is None
        store.add(SESSION, PLAN, row_of(PLAN, 0.5, age_s=-3600.0))
        store.add(SESSION, PLAN, row_of(PLAN, 0.75))
        store.add(SESSION, PLAN, row_of(PLAN, 0.25, age_s=-365 * 86400.0))
    found = recall(log, REFERENCE)
    assert found is not None
    assert found.step_time_s == 0.75


def test_a_host_model_that_is_dated_in_the_future_teaches_nothing(
    log: StoreLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, now_s = core_host(), time.time()
    learned = LearnedHost("cores", host.fingerprint, "profiled", Prior(), (), ())
    with monkeypatch.context() as patch:
        patch.setattr("rlplace.store.store.time.time", lambda: now_s + 365 * 86400.0)
        log.keep_learned(GRAPH, learned)
    assert log.learned_hosts(host) == []


def test_a_session_that_another_process_pruned_goes_on(log: StoreLog, tmp_path: Path, said: list[str]) -> None:
    log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    with MeasurementStore.open(tmp_path / "user.db") as other:
        assert other.prune(Filter()) == 1
        other.add(
            dataclasses.replace(SESSION, workload="of others"), PLAN, row_of()
        )  # under the number of the one that is gone
    for _ in range(2):
        log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    log.keep_learned(GRAPH, LearnedHost("cores", HOST, "profiled", Prior(), (), ()))
    log.close()
    assert said == []
    assert counts(tmp_path) == [3, 3]
    with MeasurementStore.read(tmp_path / "user.db") as store:
        assert {row.workload for row in store.measurements()} == {SESSION.workload, "of others"}
        assert len(store.learned_hosts(HOST)) == 1
