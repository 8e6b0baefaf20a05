"""The page about the host model is run from top to bottom, so that it stays true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlplace.measure.host_model import load_priors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "host-model.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


def words(line: str) -> str:
    """The line without its figures, which are the machine's."""
    return re.sub(r"[\d.]+", "#", line)


def test_the_pages_python_runs_and_learns_what_was_hidden() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python"), PAGE.name, "exec"), names)
    assert [words(line) for line in names["lines"]] == [words(line) for line in block("text").splitlines()]
    assert names["after"] < 0.05 * names["before"]
    scales, posterior = names["scales"], names["posterior"]
    assert len(scales) == 32
    for place in (scales.bandwidth_at[0], scales.overhead_at):
        assert abs(posterior.mean[place] - names["hidden"][place]) < 1.96 * posterior.deviation[place]
    assert names["maybe"].host.links[0].bandwidth_bytes_per_s < 1e9


def test_the_figure_that_the_page_shows_is_the_one_that_ships() -> None:
    shown = json.loads(f"{{{block('json')}}}")["device"]
    figure = load_priors().estimated["device"]
    assert shown["value"] == figure.value
    assert figure.source.startswith(shown["source"].removesuffix("..."))
