from __future__ import annotations

from typing import Any

import pytest
from run_files import rows_of

from rlplace.errors import InvalidValue
from rlplace.report.html.run_data import decode_run

RESULT: dict[str, Any] = {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True, "time": 5.0}


def test_what_a_run_always_has_is_enough() -> None:
    data = decode_run({"workload": "w"}, RESULT)
    assert (data.kind, data.time_s, data.best) == ("measured", 5.0, "portfolio")
    assert data.best_row is not None
    assert data.best_row.step_s == 0.02
    assert data.step_s("single") == 0.03
    assert data.step_s("blocks") is None
    assert data.step_s("no such row") is None
    assert data.trace is data.host_lines is data.explanation is None


def test_fields_that_a_report_does_not_know_do_not_matter() -> None:
    rows = [{**row, "of_a_later_version": {"x": 1}} for row in rows_of()]
    assert len(decode_run({}, {**RESULT, "rows": rows}).rows) == len(rows)


def test_a_run_without_a_best_row_has_none() -> None:
    data = decode_run({}, {"rows": rows_of(), "best": {"method": "", "step_time_s": None}})
    assert data.best_row is None
    assert data.kind == "simulated"


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"result": {"rows": 5}}, "result.json: rows"),
        ({"result": {"rows": [7]}}, "result.json: rows"),
        ({"result": {"rows": [{"step_time_s": 1.0}]}}, "result.json: method"),
        ({"result": {"rows": [{"method": "m", "step_time_s": "fast"}]}}, "result.json: step_time_s"),
        ({"result": {"best": "portfolio"}}, "result.json: best"),
        ({"problem": {"graph": {"num_ops": "many"}}}, "problem.json: num_ops"),
        ({"problem": {"host": {"devices": [{"name": 4}]}}}, "problem.json: name"),
        ({"search": {"methods": {"m": {"history": [["x"]]}}}}, "search.json: history"),
        ({"host_model": {"lines": "slow"}}, "host_model.json: lines"),
        ({"trace": {"traceEvents": {}}}, "timeline.json: traceEvents"),
    ],
)
def test_a_malformed_field_is_named_with_its_file(files: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        decode_run({}, **{"result": RESULT, **files})
    assert str(caught.value).startswith(where)
