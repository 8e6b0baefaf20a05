from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import change, write_run

from rlplace.errors import FileProblem, InvalidValue, UserError
from rlplace.report.report_run import read_run, write_report
from rlplace.session.folder import RUN_FILES, RunFolder


def test_the_report_lies_beside_what_it_was_made_from_and_is_replaced_whole(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path))
    assert path == tmp_path / "report.html"
    first = path.read_text(encoding="utf-8")
    change(tmp_path, "config.json", workload="another@small")
    assert write_report(RunFolder.open(tmp_path)) == path
    assert "another@small" in path.read_text(encoding="utf-8") != first
    assert {entry.name for entry in tmp_path.iterdir()} <= set(RUN_FILES)


def test_everything_that_the_run_kept_is_read(tmp_path: Path) -> None:
    data = read_run(RunFolder.open(write_run(tmp_path)))
    assert data.workload == "inception_v3@small"
    assert data.trace is not None
    assert data.explanation is not None
    assert data.host_lines == ("op_0 is slow",)
    assert set(data.searches) == {"learned", "portfolio"}
    assert [device.name for device in data.devices] == ["cpu:0", "cpu:1"]
    assert data.files == tuple(name for name in RUN_FILES if (tmp_path / name).exists())


def test_a_run_that_stopped_early_has_nothing_to_report(tmp_path: Path) -> None:
    (write_run(tmp_path) / "result.json").unlink()
    with pytest.raises(FileProblem, match="stopped before its table"):
        write_report(tmp_path)
    with pytest.raises(FileProblem, match="no such run folder"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["config", "result", "problem", "timeline", "search", "host_model", "explanation"])
def test_no_content_of_a_file_does_worse_than_a_clear_error(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path) / f"{name}.json"
    for text in ("", "[]", "{", '{"a": NaN}', "5", "[" * 100_000, "\udc80"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=rf"{name}\.json"):
            write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_field_of_another_type_names_its_file(tmp_path: Path) -> None:
    trace = json.loads((write_run(tmp_path) / "timeline.json").read_text(encoding="utf-8"))
    trace["traceEvents"][-1]["ts"] = "soon"
    change(tmp_path, "timeline.json", **trace)
    with pytest.raises(InvalidValue, match=r"timeline\.json: ts is 'soon'"):
        write_report(tmp_path)
