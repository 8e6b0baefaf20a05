"""Commands of `rlplace` that succeed, and that users got wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.cli.main import main


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The object that a command prints."""
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of an error that a command ends with."""
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("rlplace: error:")]
    return line
