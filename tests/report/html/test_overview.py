from __future__ import annotations

from pathlib import Path
from typing import Any

from run_files import HOSTILE, hostile_run, rows_of, write_run

from rlplace.report.html.page import overview, sentence
from rlplace.report.html.run_data import decode_run
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder

RESULT: dict[str, Any] = {"rows": rows_of(), "best": {"method": "portfolio"}, "measured": True}


def test_the_result_is_a_sentence() -> None:
    assert sentence(decode_run({}, RESULT)) == (
        "The best placement, found by portfolio, takes 20.00 ms a step, measured: 0.67 of the best single device's "
        "time and 0.80 of eager PyTorch's."
    )
    assert sentence(decode_run({}, {"rows": []})) == "No placement ran to its end."


def test_where_eager_is_faster_it_says_so() -> None:
    rows = rows_of()
    rows[-1]["step_time_s"] = 0.01
    assert sentence(decode_run({}, {**RESULT, "rows": rows})).endswith("use eager.")


def test_the_head_shows_what_where_and_when(tmp_path: Path) -> None:
    head = overview(read_run(RunFolder.open(write_run(tmp_path))))
    for part in ("inception_v3@small", "20.00 ms", "0.67×", "16.0 MiB", "2 × cpu-core", "2027-01-15", "torch 2"):
        assert part in head
    assert "Simulated" not in head


def test_a_simulated_run_says_so_and_a_strange_time_is_left_out() -> None:
    head = overview(decode_run({"versions": [1]}, {**RESULT, "measured": False, "time": 1e18}))
    assert "no step of this run was measured" in head
    assert "finished" not in head


def test_a_hostile_workload_is_text(tmp_path: Path) -> None:
    head = overview(read_run(RunFolder.open(hostile_run(tmp_path))))
    assert "<script" not in head
    assert HOSTILE[0].replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;") in head
