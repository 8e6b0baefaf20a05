"""`rlplace workloads`: every named workload, for people and for programs."""

from __future__ import annotations

import json

import pytest

from rlplace.cli.main import main


def test_people_and_programs_see_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["workloads"]]
    assert {"nmt", "inception_v3"} <= set(names)
    assert main(["workloads"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    shown = {line.split()[0] for line in said.err.splitlines() if " ops " in line}
    assert shown == set(names)
