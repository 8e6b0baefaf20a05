"""The page about parallelism is run from top to bottom, and its commands are read, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli.main import main
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import OP_ORDERS
from rlplace.session.setup import LOSSES
from rlplace.training.method_choice import METHODS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parallelism.md"
TEXT = PAGE.read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL)
    return [line.split()[1:] for block in blocks for line in block.splitlines() if line.startswith("$ rlplace ")]


@pytest.mark.slow
def test_the_pages_python_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(code) >= 2
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["graph"].num_micro_batches == 4
    assert float(names["loss"]) > 0
    assert names["chosen"].num_micro_batches in (1, 2, 4)


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:4]))
def test_the_pages_commands_have_these_options_methods_and_hosts(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([words[1], "--help-all"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    given = dict(zip(words, [*words[1:], ""], strict=True))
    for word in words:
        assert not word.startswith("--") or re.search(rf"{word}\b", shown), word
    if "--methods" in given:
        assert set(given["--methods"].split(",")) <= set(METHODS)
    if "--host" in given:
        resolve_host(given["--host"])


def test_the_page_lists_every_order_of_ops_and_every_loss() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", TEXT, flags=re.MULTILINE)
    assert (*rows, "auto") == (*OP_ORDERS, "loss", *LOSSES[1:], LOSSES[0])
