"""The counts that `rlplace workloads` shows are those of the captured steps."""

from __future__ import annotations

import json

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.cli.main import main
from rlplace.files import read_json
from rlplace.graphs import capture
from rlplace.workloads import CATALOG, build, describe_workloads, parse_workload
from rlplace.workloads.catalog import COUNTS_PATH, op_counts


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_small_counts_are_true(name: str) -> None:
    with FakeTensorMode():
        workload = build(parse_workload(f"{name}@small"))
    graph = capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)
    counted = {"num_ops": graph.num_ops, "num_edges": graph.num_edges}
    assert op_counts()[name]["small"] == counted, f"run python scripts/count_workloads.py {name}"


def test_every_workload_is_counted_and_no_other() -> None:
    assert read_json(COUNTS_PATH)["workloads"].keys() == CATALOG.keys()
    for sizes in op_counts().values():
        assert 0 < sizes["small"]["num_ops"] <= sizes["paper"]["num_ops"]


def test_rows_hold_options_counts_and_what_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["name"]: row for row in describe_workloads()}
    assert rows.keys() == CATALOG.keys()
    assert rows["nmt"]["paper"]["units"] == 1024
    assert (rows["nmt"]["extra"], rows["nmt"]["is_installed"]) == (None, True)
    monkeypatch.setattr("rlplace.workloads.catalog.find_spec", lambda name: None)
    missing = {row["name"]: row["extra"] for row in describe_workloads() if not row["is_installed"]}
    assert missing == dict.fromkeys(
        ["bert", "clip", "gpt2", "llama", "mixtral", "resnet50", "t5", "vit", "whisper"], "zoo"
    )


def test_the_list_shows_options_that_can_be_given_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["workloads"]) == 0
    for line in capsys.readouterr().err.splitlines()[:-1]:
        name, size, *_, options = line.split()
        kind = CATALOG[name].config
        assert parse_workload(f"{name}@{options}").config() == (kind.small() if size == "small" else kind.paper())
    assert main(["workloads", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workloads"]) == len(CATALOG)
    monkeypatch.setattr("rlplace.workloads.catalog.find_spec", lambda name: None)
    assert main(["workloads"]) == 0
    assert "pip install 'rlplace[zoo]'" in capsys.readouterr().out
