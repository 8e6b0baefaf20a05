"""`rlplace doctor`: what goes where, and its exit code."""

from __future__ import annotations

import json

import pytest

import rlplace
from rlplace.cli.main import main
from rlplace.doctor import Check, Finding, System

WIDE = "200"


def answering(*findings: Finding) -> tuple[Check, ...]:
    def look(system: System) -> tuple[Finding, ...]:
        return findings

    return (Check("made up", look),)


FINE = Finding("clock", "ok", "fast [enough]")
WARNING = Finding("load", "warn", "9.00 on 2 cores", "measure on an idle machine")
FAILURE = Finding("torch", "fail", "cannot be imported", "pip install 'torch>=2.9'")


def test_the_table_is_for_people_and_warnings_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlplace.doctor.CHECKS", answering(FINE, WARNING))
    monkeypatch.setenv("COLUMNS", WIDE)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    (clock,) = (line for line in lines if "clock" in line)
    (load,) = (line for line in lines if "load" in line)
    assert clock.split() == ["ok", "clock", "fast", "[enough]"]
    assert load.index("measure on an idle machine") > load.index("9.00 on 2 cores") > load.index("warn")
    assert lines[-1] == "2 findings: 0 failed, 1 warning"


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_a_failure_exits_with_1_and_is_still_shown(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlplace.doctor.CHECKS", answering(FINE, FAILURE))
    monkeypatch.setenv("COLUMNS", WIDE)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 1
    said = capsys.readouterr()
    assert "cannot be imported" in (said.out if "--json" in arguments else said.err)


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rlplace.doctor.CHECKS", answering(FINE, WARNING))
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert json.loads(said.out) == {
        "schema": 1,
        "rlplace": rlplace.__version__,
        "verdict": "warn",
        "checks": [
            {"name": "clock", "verdict": "ok", "found": "fast [enough]", "remedy": ""},
            {
                "name": "load",
                "verdict": "warn",
                "found": "9.00 on 2 cores",
                "remedy": "measure on an idle machine",
            },
        ],
    }
