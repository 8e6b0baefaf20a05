"""`rlplace doctor`: what goes where, and its exit code.

`rlplace hosts`: what it prints of a host is a host file.

`rlplace workloads`: every named workload, for people and for programs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlplace
from rlplace.cli.main import main
from rlplace.doctor import Check, Finding, System
from rlplace.measure.hosts.host_file import load_host
from rlplace.measure.hosts.resolve import HOST_WORDS, list_presets, resolve_host

WIDE = "200"


def answering(*findings: Finding) -> tuple[Check, ...]:
    def look(system: System) -> tuple[Finding, ...]:
        return findings

    return (Check("made up", look),)


FINE = Finding("cores", "ok", "fast [enough]")
WARNING = Finding("load", "warn", "9.00 on 2 cores", "measure on an idle machine")
FAILURE = Finding("torch", "fail", "cannot be imported", "pip install 'torch>=2.9'")


def test_the_table_is_for_people_and_warnings_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlplace.doctor.CHECKS", answering(FINE, WARNING))
    monkeypatch.setenv("COLUMNS", WIDE)
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    (fine,) = (line for line in lines if "fast" in line)
    (load,) = (line for line in lines if "load" in line)
    assert fine.split() == ["ok", "cores", "fast", "[enough]"]
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
    assert "cannot be imported" in said.out


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
            {"name": "cores", "verdict": "ok", "found": "fast [enough]", "remedy": ""},
            {
                "name": "load",
                "verdict": "warn",
                "found": "9.00 on 2 cores",
                "remedy": "measure on an idle machine",
            },
        ],
    }


@pytest.mark.parametrize("name", [*list_presets(), "cores", "cores:1", "procs:1", "2xK80-procs"])
def test_what_json_prints_loads_again_as_the_same_host(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hosts", name, "--json"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "host.json"
    path.write_text(printed)
    assert load_host(path) == resolve_host(name)
    assert load_host(path).fingerprint == json.loads(printed)["fingerprint"]
    assert main(["hosts", str(path), "--json"]) == 0
    assert capsys.readouterr().out == printed


def test_a_host_that_was_edited_and_kept_its_fingerprint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hosts", "4xK80", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    facts["devices"][0]["kind"] = "Tesla V100"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(facts))
    assert main(["hosts", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"mine.json: fingerprint is '{facts['fingerprint']}', expected '" in said
    assert "remove the fingerprint" in said
    del facts["fingerprint"]
    path.write_text(json.dumps(facts))
    assert main(["hosts", str(path)]) == 0


@pytest.mark.parametrize("schema", [2, "1", True, None])
def test_a_host_of_another_schema_is_refused(
    schema: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**resolve_host("4xK80").to_dict(), "schema": schema}))
    assert main(["hosts", str(path)]) == 2
    assert "mine.json: schema is" in capsys.readouterr().err


def test_without_a_name_words_and_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*HOST_WORDS, *list_presets(), "PRESET-procs"]
    assert main(["hosts", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["words"] == HOST_WORDS
    assert [row["name"] for row in printed["hosts"]] == list(list_presets())


def test_people_and_programs_see_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["workloads"]]
    assert {"nmt", "inception_v3"} <= set(names)
    assert main(["workloads"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    shown = {line.split()[0] for line in said.out.splitlines() if " ops " in line}
    assert shown == set(names)
