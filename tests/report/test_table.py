from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console

from rlplace.report import results_table
from rlplace.report.printed import NO_PLACEMENT_NOTE

ROWS: list[dict[str, object]] = [
    {"method": "single", "step_time_s": 0.2, "spread_s": 0.001, "placements": 2, "placement": True, "status": "ok"},
    {"method": "random", "step_time_s": None, "spread_s": None, "placements": 240, "placement": True, "status": "oom",
     "why": "cpu:0 lacks [2 GiB]"},
    {"method": "learned", "step_time_s": 0.126, "spread_s": 0.002, "placements": 2512, "placement": True,
     "status": "ok", "measured": 1024},
    {"method": "eager", "step_time_s": 0.1, "spread_s": 0.003, "placements": 0, "placement": False, "status": "ok"},
]  # fmt: skip


def printed(rows: Sequence[Mapping[str, object]], **options: str) -> list[list[str]]:
    """The table's lines, each as its columns, which two spaces or more keep apart."""
    console = Console(file=io.StringIO(), width=140)
    console.print(results_table(rows, **options))
    assert isinstance(console.file, io.StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines if line and line[0] != "─"]


def test_rows_are_sorted_and_the_rest_set_apart_with_a_note() -> None:
    lines = printed(ROWS, title="nmt")
    assert lines == [
        ["nmt"],
        ["method", "step, ms", "vs single", "placements", "notes"],
        ["learned ★", "126.00", "± 2.00", "0.63×", "2,512", "1,024 measured"],
        ["single", "200.00", "± 1.00", "1.00×", "2"],
        ["random", "–", "–", "240", "oom: cpu:0 lacks [2 GiB]"],
        ["eager †", "100.00", "± 3.00", "0.50×"],
        [NO_PLACEMENT_NOTE],
    ]


def test_the_winner_can_be_named() -> None:
    assert [line[0] for line in printed(ROWS, best="single")][1:3] == ["learned", "single ★"]


def test_without_single_or_any_success_there_is_neither_ratio_nor_winner() -> None:
    failed = {"method": "eft", "step_time_s": math.nan, "spread_s": 0.0, "placements": 1, "status": "timeout"}
    skipped = {"method": "blocks", "step_time_s": math.inf, "placements": 0, "status": "skipped", "why": "one device"}
    assert printed([failed, skipped])[1:] == [
        ["eft", "–", "–", "1", "timeout"],
        ["blocks", "–", "–", "skipped: one device"],
    ]
