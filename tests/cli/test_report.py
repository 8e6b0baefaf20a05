"""`rlplace report`: the page of a run, and what `train` does where it cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import write_run

from rlplace.cli.main import main
from rlplace.runs import report

WORKLOAD = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


def train(run: Path) -> int:
    return main(
        ["train", WORKLOAD, "--host", "4xV100-pcie", "--budget", "0.5s", "--method", "anneal", "--run", str(run)]
    )


def test_it_writes_the_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write_run(tmp_path)), "--json"]) == 0
    out, err = capsys.readouterr()
    page = tmp_path / "report.html"
    assert json.loads(out) == {"schema": 1, "path": str(page), "bytes": page.stat().st_size}
    assert f"wrote {page}" in err


@pytest.mark.parametrize("make", ["nothing", "empty", "early"])
def test_a_mistake_is_one_clear_line(tmp_path: Path, make: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    if make == "empty":
        folder.mkdir()
    if make == "early":
        (write_run(folder) / "result.json").unlink()
    assert main(["report", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rlplace: error: ")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_every_run_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run) == 0
    assert "report.html" in capsys.readouterr().err.replace("\n", "")
    text = (run / "report.html").read_text(encoding="utf-8")
    for part in (
        "Simulated: no step of this run was measured",
        'id="timeline"',
        'id="learning"',
        'id="memory"',
        'id="modules"',
    ):
        assert part in text
    searches = json.loads((run / "search.json").read_text(encoding="utf-8"))["methods"]
    assert set(searches) == {"anneal", "portfolio"}
    assert searches["anneal"]["history"][-1][3] > 0
    assert searches["anneal"]["seconds"] > 0
    assert searches["anneal"]["tried"] == []


@pytest.mark.slow
def test_a_report_that_fails_costs_the_run_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: object) -> Path:
        raise ValueError("the paper is torn")

    monkeypatch.setattr(report, "write_report", fail)
    run = tmp_path / "run"
    assert train(run) == 0
    assert "no report.html: the paper is torn" in capsys.readouterr().err
    assert (run / "result.json").exists()
    assert not (run / "report.html").exists()
