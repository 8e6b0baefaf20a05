from __future__ import annotations

from typing import Any

from run_files import HOSTILE, rows_of

from rlplace.report.html.page import learned_host_section
from rlplace.report.html.run_data import decode_run

RESULT: dict[str, Any] = {"rows": rows_of()}
FACTOR = {"kind": "device", "name": "cpu:1", "log_mean": 0.0953, "log_deviation": 0.01, "prior_deviation": 0.1}


def test_lines_and_factors_the_surest_first() -> None:
    unsure = {**FACTOR, "name": "unsure", "log_mean": 0.001}
    section = learned_host_section(
        decode_run({}, RESULT, host_model={"lines": ["cpu:1 is slow"], "factors": [unsure, FACTOR]})
    )
    assert section is not None
    assert "<li>cpu:1 is slow</li>" in section.body
    assert section.body.index(">cpu:1<") < section.body.index(">unsure<")
    assert "1.1×" in section.body
    assert "1.08 to 1.12" in section.body
    assert "10%" in section.body


def test_nothing_learned_is_said_and_no_model_no_section() -> None:
    section = learned_host_section(decode_run({}, RESULT, host_model={"lines": [], "factors": []}))
    assert section is not None
    assert "as profiled" in section.body
    assert learned_host_section(decode_run({}, RESULT)) is None


def test_strange_factors_are_left_out_and_names_are_text() -> None:
    strange = [{**FACTOR, "log_mean": 1e6}, {**FACTOR, "log_deviation": 0.0}, {**FACTOR, "name": HOSTILE[0]}]
    section = learned_host_section(decode_run({}, RESULT, host_model={"lines": [HOSTILE[1]], "factors": strange}))
    assert section is not None
    assert "1 of 1 factors" in section.body
    assert "<script" not in section.body
