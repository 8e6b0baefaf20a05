"""`rlplace hosts`: what it prints of a host is a host file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.measure.hosts.host_file import load_host
from rlplace.measure.hosts.resolve import HOST_WORDS, list_presets, resolve_host


@pytest.mark.parametrize("name", [*list_presets(), "cores", "cores:1"])
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
    listed = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert listed == [*HOST_WORDS, *list_presets()]
    assert main(["hosts", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["words"] == HOST_WORDS
    assert [row["name"] for row in printed["hosts"]] == list(list_presets())
