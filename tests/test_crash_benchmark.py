"""What `benchmarks/crash.py` would see: files that cannot be read, measurements that are gone, other answers."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from micrographs import fork_join
from run_files import forget, retable, rows_of, write_run
from run_folders import placed_run
from stored import SESSION, plan_of, row_of

from rlplace.files import write_json_atomic
from rlplace.measure import Problem, Simulator, load_placement, resolve_host
from rlplace.session.folder import RUN_FILES
from rlplace.store import MeasurementStore

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("crash_folder")


@pytest.fixture
def crash(folders: ModuleType) -> ModuleType:
    return importlib.import_module("crash")


def test_every_file_of_a_run_has_a_reader(folders: ModuleType) -> None:
    for name in RUN_FILES:
        assert name in folders.READERS or Path(name).suffix in folders.READERS, name


def test_a_file_that_was_cut_off_is_seen_and_what_a_kill_leaves_beside_is_none(
    folders: ModuleType, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    forget(run, "problem")
    (run / ".result.json.0123.partial").write_text("{")
    (run / ".rlplace.lock").write_text("process 1")
    assert folders.look(run, None).corrupt == ()
    assert folders.look(tmp_path / "nowhere", None) == folders.Found()
    (run / "timeline.json").write_text('{"traceEvents": [')
    (run / "timeline.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (run / "unheard.of").write_text("")
    found = folders.look(run, None).corrupt
    assert [words.partition(":")[0] for words in found] == ["timeline.json", "timeline.png", "unheard.of"]


def test_measurements_and_the_best_placement_are_what_was_known(folders: ModuleType, tmp_path: Path) -> None:
    graph, host = fork_join(2, 2, 100), resolve_host("2xK80")
    devices = (np.arange(graph.num_ops) % 2).astype(np.int32)
    run = placed_run(tmp_path / "run", "nmt@small", graph, host, devices).root
    assert math.isinf(folders.look(run, None).best)
    plan = load_placement(run / "placement.json").plan
    with MeasurementStore.open(run / "session.db") as store:
        for ratio in (0.5, 0.25, 0.75):
            store.add(SESSION, plan_of(0, 1), row_of(plan_of(0, 1), ratio))
    found = folders.look(run, None)
    assert len(found.rows) == 3
    assert math.isinf(found.best), "none of them is of the placement"
    with MeasurementStore.open(run / "session.db") as store:
        for ratio in (0.5, 0.25, 0.75):
            store.add(SESSION, plan, row_of(plan, ratio))
    assert folders.look(run, None).best == 0.5
    simulator = Simulator(Problem.estimate(graph, host), threads=1)
    assert folders.look(run, simulator).best == simulator.retime(plan).step_time_s


def test_what_was_lost_is_told(crash: ModuleType) -> None:
    tally, known = crash.Tally(), crash.Found(rows=frozenset({"a", "b"}), best=1.0)
    crash._compare(crash.SIMULATED, known, crash.Found(rows=frozenset({"a", "c"}), best=2.0), "here", tally)
    assert tally.wrong["lost"] == ["here: 1 of 2 measurements", "here: the placement takes 2.0 s, 1.0 s before"]
    crash._compare(crash.MEASURED, known, crash.Found(("a.json: broken",), known.rows, 2.0), "there", tally)
    assert tally.wrong["corrupt"] == ["there: a.json: broken"]
    assert len(tally.wrong["lost"]) == 2, "of a measured placement only the end counts"


def test_only_dates_and_durations_may_differ(folders: ModuleType, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    graph, host = fork_join(2, 1, 8), resolve_host("2xK80")
    placed = placed_run(tmp_path / "placed", "nmt", graph, host, np.zeros(graph.num_ops, dtype=np.int32)).root
    (placed / "placement.json").rename(run / "placement.json")
    rows, best = rows_of(), {"method": "portfolio", "step_time_s": 0.02}

    def answer(seconds: float, step_s: float, where: str) -> object:
        rows[0]["history"] = [[1, 0, seconds, step_s]]
        if where == "session":
            retable(run, rows)
        told = rows if where == "result" else rows_of()
        write_json_atomic(run / "result.json", {"rows": told, "best": best, "time": seconds, "durations": {}})
        return folders.answer(run)

    for where in ("result", "session"):
        before = answer(0.5, 0.03, where)
        assert answer(99.0, 0.03, where) == before
        assert answer(99.0, 0.04, where) != before
    assert folders.final_ratio(run) == pytest.approx(0.02 / 0.03)


def test_moments_are_drawn_over_the_time_in_which_there_is_something_to_lose(crash: ModuleType) -> None:
    straight = crash.Straight(5.0, 9.0, {}, None)
    moments = [straight.moment_s(np.random.default_rng([0, k])) for k in range(200)]
    assert 4.5 <= min(moments) < 4.7
    assert 8.8 < max(moments) <= 9.0
