"""The page about other devices is run, so that it stays true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_workloads import TEXTS

from rlplace.cli.main import main
from rlplace.errors import DeviceLost
from rlplace.measure.placement import load_placement

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "elastic.md").read_text(encoding="utf-8")
SHORTER = {"nmt@small": TEXTS["nmt"], "--budget 1m": "--evaluations 40", "--seconds 20": "--seconds 1"}
"""What the page says, and what is enough for a test."""


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


@pytest.mark.slow
def test_what_it_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("console").splitlines():
        command = line.removeprefix("$ rlplace ").partition(" # ")[0]
        for said, short in SHORTER.items():
            command = command.replace(said, short)
        assert main(shlex.split(command)) == 0, command
    assert load_placement("placement.json").device_names == tuple(f"cuda:{k}" for k in range(8))
    assert (tmp_path / "runs" / "nmt-8" / "placement.csv").is_file()
    assert (tmp_path / "runs" / "nmt-8xV100-dgx1" / "result.json").is_file()
    assert "added: " in capsys.readouterr().err
    names: dict[str, Any] = {}
    exec(compile(block("python"), "elastic.md", "exec"), names)
    assert names["found"].devices is not None
    assert len(names["again"].match.added) == 4


def test_the_offer_is_what_a_run_says() -> None:
    shown = " ".join(PAGE.rpartition("\n\n")[2].split())
    offer = (
        "What was measured is kept: go on with `rlplace train --resume runs/nmt --host cores:3`, or place at once, "
        "without measuring, with `rlplace place runs/nmt --host cores:3`."
    )
    lost = DeviceLost(("cpu:3",), "this process may not use core 3 any more", offer=offer)
    assert shown == f"rlplace: failed: {lost}"
