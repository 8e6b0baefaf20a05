"""What people see holds nothing that a terminal would act on."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table

from rlplace.report.console import CleanConsole, Progress
from rlplace.report.printed import results_table, targets_table
from rlplace.say import sayer

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\u202e"
ROW = {"method": f"single{HOSTILE}", "step_time_s": 1.0, "spread_s": 0.1, "placements": 1, "why": HOSTILE}
TARGET = {"target": f"aten.mm{HOSTILE}", "num_ops": 1, "cost_s": 1.0, "share": 1.0, "flops": 1.0, "bytes_moved": 8}


@pytest.mark.parametrize("table", [results_table([ROW, ROW | {"method": "single"}]), targets_table([TARGET], "host")])
def test_a_table_is_shown_clean(table: Table) -> None:
    stream = io.StringIO()
    CleanConsole(file=stream, width=200).print(table)
    said = stream.getvalue()
    assert "PWNED" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


def test_colours_stay() -> None:
    stream = io.StringIO()
    CleanConsole(file=stream, force_terminal=True, color_system="standard", highlight=False).print(
        f"[bold]bold[/]{HOSTILE}"
    )
    assert stream.getvalue() == "\x1b[1mbold\x1b[0m�]0;PWNED�[2J�\n"


def test_lines_of_progress_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    sayer(True)(HOSTILE)
    progress = Progress(stream=sys.stderr)
    progress.say(HOSTILE)
    progress.conclude(f"{HOSTILE}\nend")
    said = capsys.readouterr().err
    assert said.count("PWNED") == 3
    assert len(said.splitlines()) == 4
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
