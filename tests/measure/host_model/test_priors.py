"""The priors that ship, and files of others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micrographs import fork_join

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, Problem
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model import Prior, Scales, load_priors, prior_of, save_priors
from rlplace.measure.host_model.scales import FIGURES, SHIPPED


def problem(source: CostSource) -> Problem:
    graph = fork_join(2, 2, 100)
    host = Host("one", (Device("d0", "k", "simulated", 1 << 30),))
    return Problem(graph, host, Costs(np.full((graph.num_ops, 1), 1e-3), source), Grouping(np.arange(graph.num_ops)))


def shipped() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return facts


def test_costs_decide_which_figures_hold() -> None:
    estimated, profiled = (prior_of(problem(source)) for source in ("estimated", "profiled"))  # type: ignore[arg-type]
    assert estimated == Prior(0.5, 0.12, 0.6, 0.3, 5e-6, 1.0, 5e-6, 0.0, 0.05, 0.0)
    assert profiled == Prior(0.15, 0.1, 0.4, 0.7, 3e-6, 1.0, 5e-6, 1.0, 0.15, 1.0)
    assert prior_of(problem("given")) == estimated
    deviations = {item.kind: item.deviation for item in Scales(problem("profiled"), profiled).items}
    assert deviations == {"op type": 0.15, "device": 0.1, "overhead": 1.0}


def test_the_file_that_ships_says_where_every_figure_comes_from() -> None:
    priors = load_priors()
    for figures in (priors.estimated, priors.profiled):
        assert list(figures) == list(FIGURES)
        assert all(len(figure.source) > 15 for figure in figures.values())


def test_what_is_saved_loads_as_equal(tmp_path: Path) -> None:
    priors = load_priors()
    wider = {**priors.profiled, "device": dataclasses.replace(priors.profiled["device"], value=0.25)}
    changed = dataclasses.replace(priors, profiled=wider)
    save_priors(changed, tmp_path / "priors.json")
    assert load_priors(tmp_path / "priors.json") == changed
    assert prior_of(problem("profiled"), tmp_path / "priors.json").device == 0.25
    save_priors(priors, tmp_path / "same.json")
    assert (tmp_path / "same.json").read_text(encoding="utf-8") == SHIPPED.read_text(encoding="utf-8")


def without(section: str, name: str) -> dict[str, Any]:
    facts = shipped()
    del facts[section][name]
    return facts


def changed(section: str, name: str, figure: object) -> dict[str, Any]:
    facts = shipped()
    facts[section][name] = figure
    return facts


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ([], InvalidValue, "priors is a list of 0 values, expected a mapping"),
        ({"estimated": {}}, InvalidValue, "profiled is missing"),
        ({**shipped(), "schema": 2}, InvalidValue, "schema is 2, expected 1"),
        ({**shipped(), "measured": {}}, UnknownName, "unknown field .* 'measured'"),
        (without("profiled", "corun"), InvalidValue, r"profiled\.corun is missing, expected a value and its source"),
        (changed("profiled", "op_types", {"value": 1, "source": "a"}), UnknownName, "did you mean 'op_type'"),
        (
            changed("estimated", "device", {"value": -1, "source": "a"}),
            InvalidValue,
            r"device\.value is -1, expected",
        ),
        (changed("estimated", "device", {"value": "1", "source": "a"}), InvalidValue, r"device\.value is '1'"),
        (changed("estimated", "device", {"value": 1.0}), InvalidValue, r"device\.source is missing"),
        (changed("estimated", "device", {"value": 1.0, "source": " "}), InvalidValue, "one line that says where"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_what_it_is(
    facts: object, error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(facts))
    with pytest.raises(error, match=words):
        load_priors(path)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"no such file\. Name a file that `benchmarks/fit_priors.py` wrote"):
        load_priors(tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text("value: 1")
    with pytest.raises(FileProblem, match="not valid JSON"):
        load_priors(tmp_path / "mine.json")
