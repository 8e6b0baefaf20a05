"""Who is told how it goes: by default people at a terminal, else as asked."""

from __future__ import annotations

import sys

import pytest

from rlplace.report.console import Progress, progress_of
from rlplace.say import is_shown, sayer


@pytest.mark.parametrize(
    ("asked", "is_terminal", "shown"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_it_is_shown_on_a_terminal_or_as_asked(
    asked: bool | None,
    is_terminal: bool,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert is_shown(asked) == shown
    sayer(asked)("profiling 3 ops")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == ("profiling 3 ops\n" if shown else "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with progress_of(asked) as progress:
        progress.say("searching")
    assert ("searching" in capsys.readouterr().err) == shown


def test_what_is_given_is_told() -> None:
    told: list[str] = []
    sayer(told.append)("a line")
    assert told == ["a line"]
    own = Progress(is_quiet=True)
    assert progress_of(own) is own
