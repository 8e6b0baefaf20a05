"""Explanations: whole, kept as files, and read from strangers' files with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host, problem_of

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.measure.explain.explain_step import explain
from rlplace.measure.explain.explanation import Alternative, Explanation, load_explanation, save_explanation
from rlplace.measure.simulate.simulator import Simulator


def explained(**options: Any) -> Explanation:
    graph = op_graph([[], [0], [0], [1, 2]], 100)
    host = plain_host(2)
    problem = problem_of(graph, host)
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 1, 0], dtype=np.int32))
    return explain(problem, plan, simulator.timeline(plan), method="hand", **options)


def test_an_explanation_by_hand() -> None:
    found = explained(alternatives=[Alternative("one device", 4.0, "simulated")])
    # op 0 until 1, copied until 2, op 2 until 3, copied until 4, op 3 until 5; op 1 beside
    assert (found.step_time_s, found.explained_s, found.kind) == (5.0, 5.0, "simulated")
    assert (found.num_ops, found.num_transfers, found.transfer_bytes) == (4, 2, 200)
    assert (found.path.op_s, found.path.transfer_s, found.path.wait_s) == (3.0, 2.0, 0.0)
    assert [share.busy_s for share in found.devices] == [3.0, 1.0]
    assert [cut.is_critical for cut in found.cuts] == [True, True]
    assert [max(curve.num_bytes) for curve in found.memory] == [share.peak_bytes for share in found.devices]
    assert found.bound_s == 4.0
    assert found.advice.rule == "one-device"


def test_the_median_of_a_run_may_differ_from_the_step_that_is_explained() -> None:
    found = explained(step_time_s=6.0)
    assert (found.step_time_s, found.explained_s, found.path.seconds) == (6.0, 5.0, 5.0)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    found, path = explained(), tmp_path / "explanation.json"
    save_explanation(found, path)
    assert load_explanation(path) == found


def changed(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(explained().to_dict()))
    for at, value in changes.items():
        *parents, last = at.split("__")
        place: Any = data
        for name in parents:
            place = place[int(name) if name.isdecimal() else name]
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"strange.json: schema is 2, expected 1"),
        ({"step_time_s": -1.0}, "step_time_s is -1.0"),
        ({"step_time_s": "fast"}, "step_time_s is 'fast', expected a number"),
        ({"devices": {}}, "devices is a mapping of 0 fields, expected a list"),
        ({"devices": []}, "devices is a list of 0 values"),
        ({"devices__0__busy_s": None}, r"devices\[0\].busy_s is empty"),
        ({"path__parts__1__end_s": 0.0}, r"path.parts\[1\].end_s is 0.0"),
        ({"memory__0__num_bytes": [1]}, r"memory\[0\].num_bytes is '1 values'"),
        ({"cuts__0__seconds": -2.0}, r"cuts\[0\].seconds is -2.0"),
        ({"alternatives": [{"name": "x", "step_time_s": -3.0, "kind": "measured"}]}, r"alternatives\[0\].step_time_s"),
    ],
)
def test_a_strangers_file_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Explanation.from_dict(changed(**changes), "strange.json")


def test_an_unknown_field_or_kind_is_named() -> None:
    with pytest.raises(UnknownName, match="'stepp_time_s': did you mean 'step_time_s'"):
        Explanation.from_dict(changed(stepp_time_s=1.0), "strange.json")
    with pytest.raises(UnknownName, match=r"kind in strange\.json 'guessed'"):
        Explanation.from_dict(changed(kind="guessed"), "strange.json")


def test_a_file_that_is_not_there_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="Expected an explanation, as `rlplace train` leaves it"):
        load_explanation(tmp_path / "explanation.json")
