"""`rlplace report`: the page of a run, and what `train` does where it cannot be written.

`rlplace explain`: of a run just made, of an older one, and of a stranger's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import change, forget, write_run

from rlplace.cli.main import main
from rlplace.measure.explain.explanation import load_explanation
from rlplace.report.html import page as report

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
        forget(write_run(folder), "table")
    assert main(["report", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rlplace: error: ")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.slow
def test_every_run_ends_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run) == 0
    assert "report.html" in capsys.readouterr().out.replace("\n", "")
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
    def fail(folder: object, session: object) -> Path:
        raise ValueError("the paper is torn")

    monkeypatch.setattr(report, "write_report", fail)
    run = tmp_path / "run"
    assert train(run) == 0
    assert "no report.html: the paper is torn" in capsys.readouterr().err
    assert (run / "result.json").exists()
    assert not (run / "report.html").exists()


EXPLAINED = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["train", EXPLAINED, "--host", "4xV100-pcie", "--budget", "0.5s", "--method", "anneal", "--quiet"]
    assert main([*words, "--run", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_a_run_explains_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    result = json.loads((run / "result.json").read_text())
    assert (told["schema"], told["kind"], told["method"]) == (1, "simulated", result["best"]["method"])
    assert told["step_time_s"] == result["best"]["step_time_s"]
    step_s = told["explained_s"]
    assert step_s == pytest.approx(told["step_time_s"])
    assert sum(part["end_s"] - part["start_s"] for part in told["path"]["parts"]) == pytest.approx(step_s, rel=1e-9)
    for device in told["devices"]:
        assert device["busy_s"] + device["transfer_s"] + device["idle_s"] == pytest.approx(step_s, rel=1e-9)
    single = next(row["step_time_s"] for row in result["rows"] if row["method"] == "single")
    assert [other["name"] for other in told["alternatives"]] == ["one device", "data parallel", "eager"]
    assert told["alternatives"][0]["step_time_s"] == single
    assert told["advice"]["sentence"]


def test_people_get_tables(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run), "--top", "3"]) == 0
    said = capsys.readouterr()
    assert "critical path" in said.out
    assert load_explanation(run / "explanation.json").advice.sentence.split(":")[0].split()[0] in said.out


def test_the_program_of_each_device_is_that_of_the_placement(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement = json.loads((run / "placement.json").read_text())
    used, ran = set(placement["op_device"]), 0
    for rank in range(4):
        assert main(["explain", str(run), "--rank", str(rank), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["rank"], told["device"]) == (rank, placement["devices"][rank])
        ops = [row["ops"] for row in told["program"] if row["kind"] in ("op", "updates")]
        assert bool(ops) <= (rank in used)
        ran += sum(map(len, ops))
        received = [row for row in told["program"] if row["kind"] == "receive"]
        assert len(received) == sum(device == rank for _, device in placement["transfers"])
        assert all(row["bytes"] <= told["slot_bytes"][row["slot"]] for row in received)
    assert 0 < ran < len(placement["op_device"]), "every op once, but for sources"
    assert main(["explain", str(run), "--rank", "0"]) == 0
    said = capsys.readouterr()
    assert f"rank 0: {placement['devices'][0]}" in said.out
    assert all(f" {kind} " in said.out for kind in ("op", "free")), "columns have room beside long lists of names"
    assert main(["explain", str(run), "--rank", "4"]) == 2
    assert "rank is 4" in capsys.readouterr().err


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_text("{}")
    assert main(["explain", str(older)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    change(write_run(tmp_path / "strange"), "explanation", graph_fingerprint=None)
    assert main(["explain", str(tmp_path / "strange")]) == 2
    assert "explanation: graph_fingerprint is" in capsys.readouterr().err
    forget(tmp_path / "strange", "explanation")
    assert main(["explain", str(tmp_path / "strange")]) == 2
    assert "this run has no explanation" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none")]) == 2
    assert "no such run folder" in capsys.readouterr().err
    assert main(["explain", str(run), "--top", "0"]) == 2
    assert "top is 0" in capsys.readouterr().err
