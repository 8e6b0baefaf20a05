"""The comparison as people read it."""

from __future__ import annotations

import io

from rich.console import Console

from rlplace.compare.row import Comparison, Row
from rlplace.report.printed import compare_table


def shown(comparison: Comparison, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(compare_table(comparison.to_dict()))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line_of(lines: list[str], word: str) -> str:
    return next(line for line in lines if line.strip().startswith(word))


def heading(lines: list[str]) -> str:
    return " ".join(lines[1:3])


def test_the_fastest_placement_comes_first_and_wins() -> None:
    rows = (
        Row("single", 0, "ok", 0.004, evaluations=2, plan_s=0.1, peak_bytes=(1024, 0)),
        Row("anneal", 0, "ok", 0.002, evaluations=1000, plan_s=2.0, peak_bytes=(512, 512)),
        Row("cp-sat", 0, "skipped", why="ortools is not installed"),
        Row("ddp", 0, "ok", 0.001, is_placement=False),
    )
    lines = shown(Comparison("w", "h", "latency", rows, 0.0016, "critical path", {}))
    order = [line.split()[0] for line in lines if line.strip()][3:8]
    assert order == ["anneal", "single", "cp-sat", "ddp", "lower"]
    assert "★" in line_of(lines, "anneal")
    assert "+25.0%" in line_of(lines, "anneal")
    assert "1,000" in line_of(lines, "anneal")
    assert "skipped: ortools is not installed" in line_of(lines, "cp-sat")
    assert "†" in line_of(lines, "ddp")
    assert "1.60" in line_of(lines, "lower bound")
    assert any("critical path" in line for line in lines)


def test_seeds_and_measured_columns_only_where_there_are_any() -> None:
    rows = (Row("random", 0, "ok", 0.002, spread_s=1e-4, simulated_s=0.003), Row("random", 1, "ok", 0.0021))
    plain = shown(Comparison("w", "h", "latency", rows[:1], 0.001, "b", {}))
    measured = shown(Comparison("w", "h", "latency", rows, 0.001, "b", {}, is_measured=True))
    assert "seed" not in heading(plain)
    assert "simulated" not in heading(plain)
    assert "seed" in heading(measured)
    assert "± 0.10" in line_of(measured, "random")
    assert "3.00" in line_of(measured, "random")


def test_published_values_are_in_ms() -> None:
    rows = (Row("dp", 0, "ok", 0.25),)
    lines = shown(Comparison("w.json", "own", "max-load", rows, 0.2, "work", {}))
    assert "load, ms" in heading(lines)
    assert "250.00" in line_of(lines, "dp")
    assert "200.00" in line_of(lines, "lower bound")


def test_headings_and_reasons_stay_readable_in_80_columns() -> None:
    rows = (
        Row("critical-path", 0, "ok", 0.0125, evaluations=63133, plan_s=0.0983, peak_bytes=(761 * 2**20,)),
        Row("scotch", 0, "skipped", why="not installed"),
    )
    lines = shown(Comparison("w", "h", "latency", rows, 0.0119, "b", {}), width=80)
    assert "…" not in "".join(lines)
    assert all(word in heading(lines) for word in ("step, ms", "evaluations", "memory"))
    assert "skipped" in "\n".join(lines)


def test_of_equal_rows_the_winner_comes_first() -> None:
    rows = (Row("blocks", 0, "ok", 0.002), Row("anneal", 0, "ok", 0.002))
    lines = shown(Comparison("w", "h", "latency", rows, 0.001, "b", {}))
    assert "★" in next(line for line in lines if line.strip().startswith(("blocks", "anneal")))


def test_a_hidden_truth_is_named_beside_what_was_known() -> None:
    rows = (
        Row("portfolio", 3, "ok", 0.004, simulated_s=0.003, measured=16),
        Row("learned", 3, "error", why="no luck", measured=7),
    )
    lines = shown(Comparison("w", "h", "latency", rows, 0.002, "work", {}, truth="hard:3"))
    assert {"as", "known", "measured"} <= set(heading(lines).split())
    assert line_of(lines, "portfolio").split()[2:5] == ["4.00", "3.00", "16"]
    assert " 7 " in line_of(lines, "learned")
    assert any("truth: hard:3" in line for line in lines)
