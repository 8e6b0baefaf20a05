"""A run that is killed at any of its writes goes on, and ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_problems import random_graph
from run_files import change

from rlplace.errors import FileProblem, InvalidValue, RlplaceError
from rlplace.graphs import save_graph
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.session import session as session_module
from rlplace.session.folder import RUN_FILES, SESSION, RunFolder
from rlplace.session.session import Session
from rlplace.session.setup import Setup
from rlplace.store.database import transaction
from rlplace.training import SearchConfig, TrainConfig
from rlplace.training.outputs import Run
from rlplace.training.searches.search_all import search_all
from rlplace.training.train_and_resume import Shown, resume_training, run_training
from rlplace.workloads import parse_workload

HOST = "2xK80"
CONFIG = TrainConfig(evaluations=80, seed=5)
QUIET = Shown(is_quiet=True, is_table=False)
SAME = ("placement.json", "policy.safetensors", "problem.json")
"""Files that have the same bytes, whenever a run was stopped."""


class Killed(BaseException):
    """Stands for `kill -9`: nobody catches it."""


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    save_graph(random_graph(np.random.default_rng(1), 30), path)
    return path


def run(graph_file: Path, folder: Path, config: TrainConfig = CONFIG, **options: Any) -> dict[str, Any]:
    setup = Setup(spec=parse_workload(str(graph_file)), host=resolve_host(HOST), host_word=HOST)
    return run_training(setup, config, folder, overwrite=True, shown=QUIET, **options)


def go_on(graph_file: Path, folder: Path, **named: Any) -> dict[str, Any]:
    return resume_training(folder, workload=str(graph_file), **named, shown=QUIET)


@contextmanager
def stopped_at(count: int, error: BaseException) -> Iterator[list[int]]:
    """While active, the end of a write of this number raises; yields how many there were.

    A write is a file, or a transaction of the session, which is then rolled back.
    """
    calls, sync = [0], os.fsync

    def tick() -> None:
        calls[0] += 1
        if calls[0] == count:
            raise error

    def counted(descriptor: int) -> None:
        tick()
        sync(descriptor)

    @contextmanager
    def counted_transaction(connection: sqlite3.Connection) -> Iterator[None]:
        with transaction(connection):
            yield
            tick()

    os.fsync, session_module.transaction = counted, counted_transaction
    try:
        yield calls
    finally:
        os.fsync, session_module.transaction = sync, transaction


def found(folder: Path) -> dict[str, object]:
    """What a run came to, times that passed aside."""

    def timeless(history: list[list[float]]) -> list[list[float]]:
        return [[best[0], best[1], best[3]] for best in history]

    result, search = (json.loads((folder / name).read_text()) for name in ("result.json", "search.json"))
    rows = [row | {"history": timeless(row["history"])} for row in result["rows"]]
    methods = {
        name: (one["placements"], one["single_s"], timeless(one["history"])) for name, one in search["methods"].items()
    }
    learning = json.loads((folder / "learning.json").read_text())
    for figures in learning["policy"]:
        figures.pop("seconds")
    same = {name: (folder / name).read_bytes() for name in SAME}
    return {"rows": rows, "best": result["best"], "search": methods, "learning": learning, **same}


@pytest.fixture(scope="module")
def straight(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], int]:
    """What a run comes to that nobody stops, and how many calls end its writes."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with stopped_at(-1, Killed()) as calls:
        run(graph_file, folder)
    return found(folder), calls[0]


def can_go_on(folder: Path) -> bool:
    """Whether the run was stopped after its session had what was asked for."""
    if not (folder / SESSION).exists():
        return False
    with Session.read(folder) as session:
        return session.has("request")


def stop_and_go_on(graph_file: Path, folder: Path, calls: list[int]) -> None:
    """Runs, is killed at the first of these calls, goes on, is killed at the second, ..., and comes to its end."""
    for count in calls:
        start = go_on if can_go_on(folder) else run
        with stopped_at(count, Killed()), pytest.raises(Killed):
            start(graph_file, folder)
    if not can_go_on(folder):
        with pytest.raises(FileProblem, match="Start it again"):
            resume_training(folder, shown=QUIET)
        run(graph_file, folder)
    else:
        go_on(graph_file, folder)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_run_that_was_killed_ends_with_the_bits_of_a_straight_one(
    share: float, graph_file: Path, straight: tuple[dict[str, object], int], tmp_path: Path
) -> None:
    expected, total = straight
    stop_and_go_on(graph_file, tmp_path / "run", [1 + int(share * total)])
    assert found(tmp_path / "run") == expected
    assert {entry.name for entry in (tmp_path / "run").iterdir()} <= set(RUN_FILES)


@pytest.mark.slow
def test_wherever_it_is_killed(graph_file: Path, straight: tuple[dict[str, object], int], tmp_path: Path) -> None:
    expected, total = straight
    for count in range(1, total + 1):
        folder = tmp_path / f"run{count}"
        stop_and_go_on(graph_file, folder, [count])
        assert found(folder) == expected, f"killed at call {count} of {total}"


def test_a_run_may_be_killed_again_and_again(
    graph_file: Path, straight: tuple[dict[str, object], int], tmp_path: Path
) -> None:
    expected, total = straight
    stop_and_go_on(graph_file, tmp_path / "run", [total // 3, 4, total // 2])
    assert found(tmp_path / "run") == expected


PROGRAM = """
import os, sys
from rlplace.cli.main import main
calls, sync = [0], os.fsync
def counted(descriptor):
    calls[0] += 1
    if calls[0] == int(sys.argv[1]):
        os._exit(9)
    sync(descriptor)
os.fsync = counted
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_process_that_is_gone_leaves_no_lock_and_no_half_file(
    graph_file: Path, straight: tuple[dict[str, object], int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = ["--host", HOST, "--evaluations", "80", "--seed", "5", "--run", str(folder), "--quiet"]
    command = [sys.executable, "-c", PROGRAM, str(straight[1] // 2 | 1), "train", str(graph_file), *flags]
    assert subprocess.run(command, check=False, timeout=900).returncode == 9
    (folder / ".result.json.0a0b0c0d.partial").write_text("{")
    go_on(graph_file, folder)
    assert found(folder) == straight[0]
    assert {entry.name for entry in folder.iterdir()} <= set(RUN_FILES)


def test_a_full_disk_is_said_in_a_line_and_the_run_goes_on_later(
    graph_file: Path, straight: tuple[dict[str, object], int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    full = OSError(28, "No space left on device")
    with stopped_at(straight[1] // 2, full), pytest.raises(FileProblem, match="No space left on device") as raised:
        run(graph_file, folder)
    assert raised.value.__notes__ == [f"To go on: rlplace train {graph_file} --resume {folder}"]
    go_on(graph_file, folder)
    assert found(folder) == straight[0]


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(
    graph_file: Path,
    straight: tuple[dict[str, object], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    setup = Setup(spec=parse_workload(str(graph_file)), host=resolve_host(HOST), host_word=HOST)
    with stopped_at(straight[1] // 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run_training(setup, CONFIG, folder)
    assert f"to go on: rlplace train {graph_file} --resume {folder}" in capsys.readouterr().err
    go_on(graph_file, folder)
    assert found(folder) == straight[0]


@pytest.mark.slow
def test_a_run_that_has_ended_stays_as_it_is(graph_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told = run(graph_file, folder)
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    assert resume_training(folder, shown=QUIET)["rows"] == told["rows"]
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before
    change(folder, "request", workload="no_such:function")
    assert resume_training(folder, shown=QUIET)["rows"] == told["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["portfolio", "anneal", "guided"])
def test_under_a_budget_of_time_it_goes_on_from_the_best_with_what_is_left(
    method: str, graph_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = TrainConfig(budget_s=0.4, search=SearchConfig(method=method))
    run(graph_file, folder, config)
    before = json.loads((folder / "result.json").read_text())
    told = go_on(graph_file, folder, budget_s=0.8)
    assert told["best"]["step_time_s"] <= before["best"]["step_time_s"]
    assert json.loads((folder / "config.json").read_text())["train"]["budget_s"] == 0.8
    for name in {method, "portfolio"}:
        old, new = (next(row for row in rows if row["method"] == name) for rows in (before["rows"], told["rows"]))
        assert new["placements"] >= old["placements"]
        assert new["history"][: len(old["history"])] == old["history"]
    assert resume_training(folder, shown=QUIET)["rows"] == told["rows"]
    with pytest.raises(InvalidValue, match=r"at least 0\.8 s.*--budget \+0\.1s"):
        go_on(graph_file, folder, budget_s=0.1)


@pytest.mark.slow
def test_more_time_for_a_run_with_a_limit_for_the_total_is_time_to_search(
    graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []

    def noted(made: Run, config: TrainConfig, *rest: Any) -> dict[str, Any]:
        budgets.append(config.budget_s)
        return search_all(made, config, *rest)

    monkeypatch.setattr("rlplace.training.phases.search_all", noted)
    run(graph_file, tmp_path / "run", TrainConfig(budget_s=30.0, total_s=1.0, search=SearchConfig(method="anneal")))
    told = go_on(graph_file, tmp_path / "run", more_s=5.0)
    spent_s = budgets[0]
    assert budgets[1] >= spent_s + 0.09, "a tenth of the limit at least"
    assert all(row["history"] for row in told["rows"] if row["method"] in ("anneal", "portfolio"))


def test_another_process_that_is_at_it_is_an_error(graph_file: Path, tmp_path: Path) -> None:
    with stopped_at(8, Killed()), pytest.raises(Killed):
        run(graph_file, tmp_path / "run")
    other = RunFolder.reopen(tmp_path / "run")
    with pytest.raises(FileProblem, match="still going on"):
        resume_training(tmp_path / "run", shown=QUIET)
    other.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"rlplace": "0.0.1"}}, "made with rlplace 0.0.1"),
        ({"host_fingerprint": "0123456789abcdef"}, "--host"),
        ({"host": "4xV100-pcie"}, "--host"),
        ({"workload": "no_such:function"}, "opened only if you name it"),
        ({"asked": 3}, "asked"),
        ({"default_size": "huge"}, "default_size"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_another_by_now_is_a_clear_error(
    changes: dict[str, object], message: str, graph_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with stopped_at(8, Killed()), pytest.raises(Killed):
        run(graph_file, folder)
    change(folder, "request", **changes)
    with pytest.raises(RlplaceError, match=message):
        resume_training(folder, workload=None if "workload" in changes else str(graph_file), shown=QUIET)
