"""`rlplace report` of a run's session."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from run_files import change, forget, run_data, trace_of, write_run

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.report.html.page import write_report
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.session import Session


def test_the_report_lies_beside_what_it_was_made_from_and_is_replaced_whole(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path))
    assert path == tmp_path / "report.html"
    first = path.read_text(encoding="utf-8")
    change(tmp_path, "request", workload="another@small")
    assert write_report(RunFolder.open(tmp_path)) == path
    assert "another@small" in path.read_text(encoding="utf-8") != first
    assert {entry.name for entry in tmp_path.iterdir()} <= set(RUN_FILES)


def test_everything_that_the_run_kept_is_read(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path))
    assert data.workload == "inception_v3@small"
    assert data.trace is not None
    assert data.explanation is not None
    assert data.learned is not None
    assert data.learned.lines == ("op_0 is slow",)
    assert set(data.searches) == {"learned", "portfolio"}
    assert [device.name for device in data.devices] == ["cpu:0", "cpu:1"]
    assert (data.step_s("single"), data.step_s("blocks"), data.step_s("no such row")) == (0.03, None, None)
    assert "result.json" in write_report(tmp_path).read_text(encoding="utf-8")


def test_outputs_are_not_read(tmp_path: Path) -> None:
    for name in ("config.json", "result.json", "problem.json", "timeline.json", "explanation.json"):
        (write_run(tmp_path / name) / name).write_text("{")
        assert write_report(tmp_path / name).exists()


def test_a_run_that_stopped_early_has_nothing_to_report(tmp_path: Path) -> None:
    forget(write_run(tmp_path), "table")
    with pytest.raises(FileProblem, match="stopped before its table"):
        write_report(tmp_path)
    with pytest.raises(FileProblem, match="no such run folder"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["request", "table", "ending", "problem", "host", "explanation", "method/learned"])
def test_no_content_of_a_record_does_worse_than_a_clear_error(tmp_path: Path, name: str) -> None:
    write_run(tmp_path)
    for text in ("", "[]", "{", '{"a": NaN}', "5", "[" * 100_000):
        with sqlite3.connect(tmp_path / "session.db") as database:
            database.execute("UPDATE facts SET value = ? WHERE name = ?", (text, name))
        database.close()
        with pytest.raises(UserError, match=rf"session\.db: {name}"):
            write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_field_of_another_type_names_its_place(tmp_path: Path) -> None:
    trace = trace_of(["op"], [""], ["cpu:0"])
    trace["traceEvents"][-1]["ts"] = "soon"
    with Session.open(RunFolder(write_run(tmp_path))) as session:
        session.keep_timeline(json.dumps(trace))
    with pytest.raises(InvalidValue, match=r"timeline: ts is 'soon'"):
        write_report(tmp_path)
