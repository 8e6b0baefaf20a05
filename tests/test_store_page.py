"""The page about the store is run, so that it stays true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from stored import PLAN, SESSION, row_of

from rlplace.cli.main import main
from rlplace.store import MeasurementStore

PAGE = Path(__file__).resolve().parent.parent / "docs" / "store.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


@pytest.mark.slow
def test_the_pages_python_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python"), PAGE.name, "exec"), names)
    assert names["count"] == 0
    assert {kind for kind, _ in names["knowledge"].factors} & {"bandwidth", "op type", "overhead"}
    assert names["timer"].num_measured <= 8
    assert names["answer"].plan is not None


def test_the_pages_commands_about_measurements_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "cache" / "rlplace", tmp_path / "runs" / "nmt"):
        folder.mkdir(parents=True)
        with MeasurementStore.open(folder / "measurements.db") as store:
            store.add(SESSION, PLAN, row_of())
    commands = [line.removeprefix("$ rlplace ").split(" # ")[0] for line in block("console").splitlines()]
    run = [shlex.split(command) for command in commands if command.startswith("measurements")]
    assert len(run) == 5
    for words in run:
        assert main(words) == 0, words
    assert (tmp_path / "steps.csv").read_text().count("\n") == 2
    assert '"count": 1' in capsys.readouterr().out
