"""What `rlplace explain` prints."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
from micrographs import op_graph
from random_problems import plain_host
from rich.console import Console

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import explain
from rlplace.measure.explain.explanation import Alternative, Explanation
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.printed import explanation_tables

OTHERS = [
    Alternative("one device", 4.0, "simulated"),
    Alternative("eager", None, "simulated", "the host is [simulated]"),
]


def explained(**host_options: object) -> Explanation:
    graph = replace(op_graph([[], [0], [0], [1, 2]], 100), modules=("stem", "left", "", "head"))
    problem = Problem(graph, plain_host(2, **host_options), Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))  # type: ignore[arg-type]
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 1, 0], dtype=np.int32))
    return explain(problem, plan, simulator.timeline(plan), method="hand", alternatives=OTHERS)


def shown(explanation: Explanation, top: int = 12, width: int = 140) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(explanation_tables(explanation, top))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line_of(lines: list[str], words: str) -> list[str]:
    return next(line for line in lines if words in line).split()


def test_everything_is_shown_and_the_advice_is_last() -> None:
    lines = shown(explained())
    text = "\n".join(lines)
    assert "the placement of hand, 5000.00 ms a step simulated" in text
    assert line_of(lines, " d0  ")[:5] == ["d0", "3", "60%", "20%", "20%"]
    assert "critical path: ops 60%, copies 40%, waits 0%" in text
    assert line_of(lines, "(the model itself)")[-2:] == ["1000.00", "20%"]
    assert line_of(lines, "copies d0 → d1")[-3:] == ["1", "1000.00", "20%"]
    assert "costliest copies, of 2 with 200 B" in text
    assert line_of(lines, "d0: op0 in stem")[-1] == "yes"
    assert line_of(lines, " one device ")[2:] == ["4000.00", "0.80×", "simulated"]
    assert "the host is [simulated]" in text
    assert lines[-1].startswith("One device is as good")


def test_modules_beyond_the_top_are_summed_up() -> None:
    lines = shown(explained(), top=1)
    assert line_of(lines, "2 more") == ["2", "more", "2", "2000.00", "40%"]


def test_waits_have_a_line_where_there_are_any() -> None:
    assert not any(line.strip().startswith("waits") for line in shown(explained()))
    assert any(line.strip().startswith("waits") for line in shown(explained(dispatch_s=1.0)))


def test_a_narrow_terminal_loses_nothing() -> None:
    text = "".join("".join(shown(explained(), width=60)).split())
    assert "onedeviceisasgood" in text.lower()


def test_without_copies_there_is_no_table_of_them() -> None:
    text = "\n".join(shown(replace(explained(), cuts=(), num_transfers=0)))
    assert "costliest copies" not in text
    assert "what else it would cost" in text


def test_what_was_disturbed_is_said_below_the_headline() -> None:
    quiet = explained()
    assert quiet.disturbed == ""
    lines = shown(replace(quiet, kind="measured", spread_s=1.5, disturbed="Disturbed while it was measured: so."))
    assert "5000.00 ± 1500.00 ms a step measured" in " ".join(lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("Disturbed while"))
    assert at < next(number for number, line in enumerate(lines) if "devices" in line)
