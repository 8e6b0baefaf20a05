"""The page about resuming is run, so that it stays true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli.main import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "resuming.md"
SMALL = {
    "nmt": "nmt@layers=1,units=16,batch=4,steps=3,vocab=50",
    "cores": "2xK80",
    "2h": "0.3s",
    "3h": "0.6s",
    "+30m": "+0.3s",
}
"""What the page's words stand for here: a search of seconds, of a host that is simulated."""


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


@pytest.mark.slow
def test_the_pages_python_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python"), PAGE.name, "exec"), names)
    assert names["again"].placement.plan.fingerprint == names["result"].placement.plan.fingerprint


@pytest.mark.slow
def test_the_pages_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line[2:], comments=True)[1:] for line in block("console").splitlines()]
    said = []
    for words in commands[:4]:
        assert main([SMALL.get(word, word) for word in words]) == 0
        said.append(capsys.readouterr().err)
    assert "has come to its end" in said[1]
    assert "going on with" in said[2]
    assert "going on with" in said[3]
    assert main(commands[4]) == 2
    assert "no such run folder" in capsys.readouterr().err
