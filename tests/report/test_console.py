"""What people see holds nothing that a terminal would act on."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
from rich.table import Table

from rlplace.report.console import CleanConsole, Progress, progress_of, results_table, targets_table
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tell(progress: Progress, placements: int, best_s: float, left_s: float) -> None:
    progress.update(placements=placements, best_s=best_s, single_s=0.2, left_s=left_s, budget_s=60.0)


def test_off_a_terminal_it_prints_a_line_every_ten_seconds_and_the_last_state() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        progress.say("capturing nmt [small]")
        tell(progress, 0, math.inf, 60.0)
        for second in range(1, 25):
            clock.now_s = 100.0 + second
            tell(progress, 100 * second, 0.1, 60.0 - second)
    assert stream.getvalue().splitlines() == [
        "capturing nmt [small]",
        "search: 0 placements · 1:00 left",
        "search: 1,000 placements · best 0.50 of one device's time (100 ms) · 0:50 left",
        "search: 2,000 placements · best 0.50 of one device's time (100 ms) · 0:40 left",
        "search: 2,400 placements · best 0.50 of one device's time (100 ms) · 0:36 left",
    ]


def test_off_a_terminal_no_line_is_printed_twice_in_a_row() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        tell(progress, 7, 0.1, 0.04)
        clock.now_s += 11.0
        tell(progress, 7, 0.1, 0.03)  # shown as the same: the time is nearly up
        tell(progress, 7, 0.1, 0.0)
        progress.say("search: portfolio")
        tell(progress, 8, 0.1, 0.0)
    assert stream.getvalue().splitlines() == [
        "search: 7 placements · best 0.50 of one device's time (100 ms) · 0:00 left",
        "search: portfolio",
        "search: 8 placements · best 0.50 of one device's time (100 ms) · 0:00 left",
    ]


def test_closing_twice_prints_nothing_more() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock())
    tell(progress, 1, 0.1, 1.0)
    progress.close()
    before = stream.getvalue()
    progress.close()
    assert stream.getvalue() == before


def test_on_a_terminal_it_draws_a_bar_and_gives_the_cursor_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        tell(progress, 10, 0.1, 30.0)
        clock.now_s += 0.1
        tell(progress, 20, 0.05, 29.0)
        assert "20 placements" not in stream.getvalue()
        progress.say("above")
    shown = stream.getvalue()
    assert "━" in shown
    assert "10 placements · best 0.50 of one device's time (100 ms) · 0:30 left" in shown
    assert "20 placements · best 0.25 of one device's time (50.0 ms) · 0:29 left" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [80, 100])
def test_on_a_narrow_terminal_no_word_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with Progress(stream=stream, clock=Clock()) as progress:
        progress.update(
            placements=1_234_567, measured=150, best_s=0.28, single_s=0.2, left_s=30, budget_s=60, method="portfolio"
        )
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"\r|\n", stream.getvalue())]
    assert max(map(len, lines)) <= columns
    shown = " ".join(" ".join(lines).split())
    assert "…" not in shown
    assert (
        "1,234,567 placements, 150 measured · best 1.40 of one device's time, slower (280 ms now) · 0:30 left" in shown
    )


def test_the_best_never_rises_where_the_machine_slows_down() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        for best_s, single_s in ((0.1, 0.2), (0.3, 0.6)):
            clock.now_s += 11.0
            progress.update(
                placements=9, measured=2, best_s=best_s, single_s=single_s, left_s=clock.now_s, budget_s=900.0
            )
    bests = re.findall(r"best (\S+) of one device's time \((\d+) ms now\)", stream.getvalue())
    assert bests == [("0.50", "100"), ("0.50", "300")]


@pytest.mark.parametrize(("asked", "is_said"), [(None, True), (True, True), (False, False)])
def test_the_last_line_is_said_off_a_terminal_too(
    asked: bool | None, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = progress_of(asked)
    progress.say("on the way")
    progress.conclude("placed 1 ms")
    out, said = capsys.readouterr()
    assert (out, "placed 1 ms\n" in said, "on the way" in said) == ("", is_said, asked is True)


def test_quiet_shows_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(is_quiet=True, stream=stream) as progress:
            progress.say("capturing")
            tell(progress, 1, 0.1, 1.0)
        assert stream.getvalue() == ""


def test_stderr_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.say("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_name_between_colons_is_no_emoji() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, clock=Clock()) as progress:
        progress.say("mymodels:llama: 566 ops")
    assert stream.getvalue() == "mymodels:llama: 566 ops\n"
