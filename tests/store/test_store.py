"""`MeasurementStore`: what goes in comes out, found by its key, from as many processes as there are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_measurer import chain_problem
from hypothesis import given
from hypothesis import strategies as st
from stored import GRAPH, HOST, MACHINE, PLAN, REFERENCE, SESSION, VERSIONS, key_of, outcome_of, plan_of, row_of

from rlplace.errors import FileProblem, UnknownName
from rlplace.measure.host_model import LearnedHost, Prior
from rlplace.measure.host_model.learned_host import LearnedFactor
from rlplace.measure.simulate.simulator import Simulator
from rlplace.store import Filter, MeasurementStore
from rlplace.store.store import ANSWERS_S

LEARNED = LearnedHost(
    "cores", HOST, "profiled", Prior(), (LearnedFactor("device", "cpu:0", 0.1, 0.01, 0.1, prior_mean=0.02),), ("a",)
)


@pytest.fixture
def store(tmp_path: Path) -> MeasurementStore:
    return MeasurementStore.open(tmp_path / "measurements.db")


def test_a_measurement_comes_back_as_it_went_in_with_what_its_session_says(store: MeasurementStore) -> None:
    row = row_of()
    store.add(SESSION, PLAN, row)
    (kept,) = MeasurementStore.read(store.path).measurements()
    facts = {"workload": "nmt@small", "host_name": "cores", "machine": MACHINE, "idle_share": 0.9}
    assert kept == dataclasses.replace(row, **facts)
    assert kept.measurement == outcome_of()
    assert kept.to_dict()["ratio"] == 0.5


@given(
    st.lists(st.floats(1e-9, 1e9), max_size=8),
    st.lists(st.integers(0, 2**62), max_size=4),
    st.text(max_size=20),
    st.floats(1e-9, 1e9),
)
def test_any_figures_and_words_come_back(samples: list[float], peaks: list[int], why: str, step_s: float) -> None:
    why = why.replace("\x00", "").encode("utf-8", "replace").decode()
    row = row_of(PLAN, step_s, samples_s=tuple(samples), peak_bytes=tuple(peaks), why=why)
    with MeasurementStore.in_memory() as memory:
        memory.add(SESSION, PLAN, row)
        (kept,) = memory.measurements()
    assert dataclasses.replace(kept, workload="", host_name="", machine="", idle_share=None) == row


def test_the_latest_whole_one_under_a_key_beside_the_same_reference_is_found(store: MeasurementStore) -> None:
    for row in (row_of(PLAN, 0.5, age_s=60), row_of(PLAN, 0.75, age_s=30), row_of(PLAN, 0.9, is_whole=False)):
        store.add(SESSION, PLAN, row)
    found = store.find(key_of(), REFERENCE, SESSION, 0.0)
    assert found is not None
    assert found.step_time_s == 0.75
    now_s = time.time()
    assert store.find(key_of(), REFERENCE, SESSION, now_s - 10) is None
    assert store.find(key_of(), "34" * 8, SESSION, 0.0) is None
    assert store.find(key_of(), REFERENCE, dataclasses.replace(SESSION, machine="34" * 8), 0.0) is None
    for changes in ({"graph": HOST}, {"host": GRAPH}, {"protocol": "other"}, {"versions": "newer"}):
        assert store.find(key_of(**changes), REFERENCE, SESSION, 0.0) is None
    assert store.find(key_of(plan_of(0, 0, 0)), REFERENCE, SESSION, 0.0) is None


def test_what_a_busy_machine_measured_answers_only_who_measured_it(store: MeasurementStore) -> None:
    busy, other = dataclasses.replace(SESSION, begun_s=1.0, idle_share=0.5), dataclasses.replace(SESSION, begun_s=2.0)
    store.add(busy, PLAN, row_of())
    store.add_learned(busy, GRAPH, LEARNED)
    for session, least_idle, is_found in ((busy, 0.75, True), (other, 0.75, False), (other, 0.5, True)):
        assert (store.find(key_of(), REFERENCE, session, 0.0, least_idle) is not None) == is_found
    assert store.learned_hosts(HOST, MACHINE, 0.75) == []
    assert store.learned_hosts(HOST, MACHINE, 0.5) == [LEARNED]


def test_a_failure_is_kept_with_its_cause(store: MeasurementStore) -> None:
    row = row_of(PLAN, 1.0, status="oom", step_time_s=float("inf"), samples_s=(), why="cuda:0 is full")
    store.add(SESSION, PLAN, row)
    found = store.find(key_of(), REFERENCE, SESSION, 0.0)
    assert found is not None
    assert (found.status, found.why, found.step_time_s) == ("oom", "cuda:0 is full", None)
    assert found.measurement.step_time_s == float("inf")


def test_a_plan_comes_back_with_its_orders(store: MeasurementStore) -> None:
    plan = dataclasses.replace(
        plan_of(0, 1, 0), transfer_tensor=np.array([0]), transfer_destination=np.array([1]), sequence=np.arange(4)
    )
    store.add(SESSION, plan, row_of(plan))
    kept = store.plan(plan.fingerprint)
    assert kept.fingerprint == plan.fingerprint
    assert kept.transfer_destination.tolist() == [1]
    with pytest.raises(FileProblem, match="no plan 00 was measured"):
        store.plan("00")


def test_what_was_learned_about_a_host_comes_back_by_host_and_machine(store: MeasurementStore) -> None:
    later = dataclasses.replace(LEARNED, lines=("b",))
    store.add_learned(SESSION, GRAPH, LEARNED)
    store.add_learned(SESSION, GRAPH, later)
    assert store.learned_hosts() == store.learned_hosts(HOST, MACHINE) == [later, LEARNED]
    assert store.learned_hosts(GRAPH) == []
    assert store.learned_hosts(HOST, GRAPH) == []


def test_a_trace_belongs_to_its_plan(store: MeasurementStore) -> None:
    problem = chain_problem(4)
    simulator, graph = Simulator(problem), problem.graph
    plan = simulator.plan(np.array([0, 1, 1, 0], dtype=np.int32))
    timeline = simulator.timeline(plan)
    assert len(timeline.transfer_tensor) == 2
    store.add_trace(SESSION, graph.fingerprint, HOST, plan, timeline)
    store.add_trace(SESSION, GRAPH, HOST, plan, timeline)
    (found,) = store.traces(plan, problem)
    for name in ("op_start_s", "op_end_s", "transfer_start_s", "transfer_end_s"):
        np.testing.assert_allclose(getattr(found, name), getattr(timeline, name), rtol=1e-6)
    for name in ("op_device", "transfer_tensor", "transfer_source", "transfer_destination"):
        assert getattr(found, name).tolist() == getattr(timeline, name).tolist()
    assert store.traces(simulator.plan(np.zeros(4, dtype=np.int32)), problem) == []
    old_s = time.time() - ANSWERS_S
    store.add_trace(SESSION, graph.fingerprint, HOST, plan, timeline, old_s + 60)
    assert len(store.traces(plan, problem)) == 2
    assert len(store.traces(plan, problem, old_s + 60)) == 1
    store.add_trace(SESSION, graph.fingerprint, HOST, plan, timeline, old_s - 60)  # it answers nothing any more
    assert len(store.traces(plan, problem)) == 2


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(), {"young", "old", "failed"}),
        (Filter(workload="nmt*"), {"young", "old"}),
        (Filter(workload="nmt"), set()),
        (Filter(graph="ab"), {"young", "old", "failed"}),
        (Filter(graph="abc"), set()),
        (Filter(host="co*"), {"young", "old"}),
        (Filter(host="cdcd"), {"young", "old", "failed"}),
        (Filter(status="timeout"), {"failed"}),
        (Filter(older_than_s=50), {"old"}),
        (Filter(newer_than_s=50), {"young", "failed"}),
        (Filter(workload="nmt*", newer_than_s=50), {"young"}),
    ],
)
def test_filters_choose_what_is_listed_counted_and_pruned(
    chosen: Filter, expected: set[str], store: MeasurementStore
) -> None:
    other = dataclasses.replace(SESSION, workload="bert", host_name="cuda")
    plans = {"young": plan_of(0, 0), "old": plan_of(0, 1), "failed": plan_of(1, 1)}
    names = {plan.fingerprint: name for name, plan in plans.items()}
    store.add(SESSION, plans["young"], row_of(plans["young"]))
    store.add(SESSION, plans["old"], row_of(plans["old"], age_s=100))
    failed = row_of(plans["failed"], 1.0, status="timeout", step_time_s=float("inf"))
    store.add(other, plans["failed"], failed)
    store.add_learned(SESSION, GRAPH, LEARNED)
    assert {names[row.plan] for row in store.measurements(chosen)} == expected
    assert store.count(chosen) == len(expected)
    assert store.prune(chosen) == len(expected)
    assert {names[row.plan] for row in store.measurements()} == set(plans) - expected
    for name in expected:
        with pytest.raises(FileProblem):
            store.plan(plans[name].fingerprint)
    assert store.learned_hosts() == ([] if chosen.is_empty else [LEARNED])


def test_a_mistyped_status_is_told() -> None:
    with pytest.raises(UnknownName, match="did you mean 'timeout'"):
        Filter(status="timout")


def test_pruning_gives_the_space_back_and_forgets_sessions_of_which_nothing_is_left(store: MeasurementStore) -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        plan = plan_of(*generator.integers(0, 4, 2000).tolist())
        store.add(SESSION, plan, row_of(plan))
    connection = store._connection
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = store.path.stat().st_size
    store.prune(Filter())
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert store.path.stat().st_size < before / 2
    assert connection.execute("SELECT count(*) FROM sessions").fetchone()[0] == 0


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from stored import SESSION, plan_of, row_of
from rlplace.store import MeasurementStore

name = int(sys.argv[3])
with MeasurementStore.open(sys.argv[1]) as store:
    for k in range(25):
        plan = plan_of(name, k)
        store.add(SESSION, plan, row_of(plan))
        store.add(SESSION, plan_of(9, 9), row_of(plan_of(9, 9)))
"""


@pytest.mark.slow
def test_two_processes_make_and_write_one_store_at_once(tmp_path: Path) -> None:
    path, tests = tmp_path / "measurements.db", str(Path(__file__).parent.parent)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), tests, str(name)]) for name in (1, 2)]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    with MeasurementStore.read(path) as store:
        assert store.count() == 100
        assert len({row.plan for row in store.measurements()}) == 51
    assert [file.name for file in tmp_path.iterdir()] == ["measurements.db"]


def test_reading_what_somebody_writes_sees_it(store: MeasurementStore) -> None:
    store.add(SESSION, PLAN, row_of())
    with MeasurementStore.read(store.path) as reader:
        assert reader.count() == 1
        with pytest.raises(FileProblem, match="cannot be opened or written"):
            reader.add(SESSION, PLAN, row_of())
    assert VERSIONS in next(store.measurements()).versions


ENDLESS = """
import sys
sys.path.insert(0, sys.argv[2])
from stored import SESSION, plan_of, row_of
from rlplace.store import MeasurementStore

store = MeasurementStore.open(sys.argv[1])
for k in range(10**6):
    plan = plan_of(*range(k, k + 100))
    store.add(SESSION, plan, row_of(plan))
    print(k, flush=True)
"""


@pytest.mark.slow
def test_what_was_kept_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    path, tests = tmp_path / "measurements.db", str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", ENDLESS, str(path), tests]
    for round_ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            told = 0
            while told < 20 + 17 * round_:
                told = int(writer.stdout.readline()) + 1
            writer.kill()
        with MeasurementStore.read(path) as reader:
            kept = reader.count()
            assert kept >= told
            assert len(list(reader.measurements())) == kept
        with MeasurementStore.open(path) as store:
            store.prune(Filter())
