from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rlplace.errors import FileProblem, UnknownName
from rlplace.files import read_json
from rlplace.session.folder import RUN_FILES, RunFolder


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "demo")
    assert folder.root.is_dir()
    folder.write_json("config.json", {"seed": 0})
    assert read_json(tmp_path / "runs" / "demo" / "config.json") == {"seed": 0}


def test_an_empty_folder_is_taken_and_one_with_anything_in_it_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileProblem, match=r"not empty \(notes\.txt\): name another, or pass --overwrite") as caught:
        RunFolder.create(tmp_path)
    assert caught.value.path == str(tmp_path)


def test_overwrite_removes_what_rlplace_wrote_and_nothing_else(tmp_path: Path) -> None:
    for name in (*RUN_FILES, "session.db-wal", ".result.json.12ab.partial"):
        (tmp_path / name).write_text("old")
    for name in ("notes.txt", "my.json", ".hidden.partial"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "wandb").mkdir()
    RunFolder.create(tmp_path, overwrite=True).close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".hidden.partial", "my.json", "notes.txt", "wandb"]


def test_overwrite_follows_no_link_and_removes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").symlink_to(tmp_path / "elsewhere.json")
    RunFolder.create(run, overwrite=True)
    assert (tmp_path / "elsewhere.json").read_text() == "mine"
    (run / "config.json").write_text("old")
    (run / "step.py").mkdir()
    with pytest.raises(FileProblem, match="a folder is where a file of the run would go"):
        RunFolder.create(run, overwrite=True)
    assert (run / "config.json").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(FileProblem, match=r"this is a file|cannot be made a run folder"):
            RunFolder.create(path, overwrite=True)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_json("result.json", {"rows": []})

    def fail(source: object, target: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(FileProblem, match="Input/output error"):
        folder.write_json("result.json", {"rows": [1]})
    assert read_json(folder.path("result.json")) == {"rows": []}
    folder.close()
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_json("result.json", {"rows": [{"step_time_s": math.inf, "spread_s": math.nan}]})
    assert json.loads(folder.path("result.json").read_text()) == {"rows": [{"step_time_s": None, "spread_s": None}]}


def test_only_files_of_a_run_have_a_path(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(UnknownName, match=r"did you mean 'result\.json'"):
        folder.path("results.json")
    with pytest.raises(UnknownName):
        folder.write_json("../result.json", {})
    assert not folder.has("result.json")
    folder.write_json("result.json", {})
    assert folder.has("result.json")


def test_opening_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "file").write_text("")
    for name, message in (
        ("demos", r"no such run folder. Did you mean 'demo'\?"),
        ("file", "not a folder"),
        ("demo", "it has no session.db"),
        ("none/demo", "There is no folder"),
    ):
        with pytest.raises(FileProblem, match=message):
            RunFolder.open(tmp_path / name)


def test_a_folder_that_is_being_written_is_refused_also_with_overwrite(tmp_path: Path) -> None:
    running = RunFolder.create(tmp_path)
    running.write_json("config.json", {"seed": 0})
    for overwrite in (False, True):
        for attempt in (RunFolder.check, RunFolder.create):
            with pytest.raises(
                FileProblem, match=rf"still going on writes into this folder \(process {os.getpid()} on"
            ):
                attempt(tmp_path, overwrite)
    assert read_json(running.path("config.json")) == {"seed": 0}
    assert read_json(tmp_path / "config.json") == {"seed": 0}
    running.close()
    RunFolder.create(tmp_path, overwrite=True).close()
    assert os.listdir(tmp_path) == []


def test_a_run_that_came_and_went_since_the_first_look_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("theirs")
    monkeypatch.setattr(RunFolder, "check", lambda path, overwrite: None)
    with pytest.raises(FileProblem, match="not empty"):
        RunFolder.create(tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
