"""The comparison as people read it.

What `rlplace advise` prints.

What `rlplace explain` prints.

The figures of a graph as people see them.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host
from rich.console import Console

from rlplace.advice.verdict import WORDS, Figures, decide
from rlplace.compare.comparison import Comparison, Row
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.statistics import describe_graph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explain_step import explain
from rlplace.measure.explain.explanation import Alternative, Explanation
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report import results_table
from rlplace.report.console import (
    NO_PLACEMENT_NOTE,
    NOT_FASTEST_NOTE,
    advice_panel,
    compare_table,
    explanation_tables,
    graph_table,
)

ROWS: list[dict[str, object]] = [
    {"method": "single", "step_time_s": 0.2, "spread_s": 0.001, "placements": 2, "placement": True, "status": "ok"},
    {"method": "random", "step_time_s": None, "spread_s": None, "placements": 240, "placement": True, "status": "oom",
     "why": "cpu:0 lacks [2 GiB]"},
    {"method": "learned", "step_time_s": 0.126, "spread_s": 0.002, "placements": 2512, "placement": True,
     "status": "ok", "measured": 1024},
    {"method": "eager", "step_time_s": 0.1, "spread_s": 0.003, "placements": 0, "placement": False, "status": "ok"},
]  # fmt: skip


def printed(rows: Sequence[Mapping[str, object]], **options: str) -> list[list[str]]:
    """The table's lines, each as its columns, which two spaces or more keep apart."""
    console = Console(file=io.StringIO(), width=140)
    console.print(results_table(rows, **options))
    assert isinstance(console.file, io.StringIO)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines if line and line[0] != "─"]


def test_rows_are_sorted_and_the_rest_set_apart_with_a_note() -> None:
    lines = printed(ROWS, title="nmt")
    assert lines == [
        ["nmt"],
        ["method", "step, ms", "vs single", "placements", "notes"],
        ["learned ★", "126.00", "± 2.00", "0.63×", "2,512", "1,024 measured"],
        ["single", "200.00", "± 1.00", "1.00×", "2"],
        ["random", "–", "–", "240", "oom: cpu:0 lacks [2 GiB]"],
        ["eager †", "100.00", "± 3.00", "0.50×"],
        [NO_PLACEMENT_NOTE],
    ]


def test_the_winner_can_be_named() -> None:
    lines = printed(ROWS, best="single")
    assert [line[0] for line in lines][1:3] == ["learned", "single ★"]
    assert [NOT_FASTEST_NOTE] in lines
    assert [NOT_FASTEST_NOTE] not in printed(ROWS, best="learned")


@pytest.mark.parametrize("spread_s", [0.0, None])
def test_exact_times_have_no_spread(spread_s: float | None) -> None:
    lines = printed([{**row, "spread_s": spread_s} for row in ROWS])
    assert lines[1][:2] == ["learned ★", "126.00"]
    assert "±" not in str(lines)


def test_of_equal_rows_the_one_with_the_star_is_first() -> None:
    equal = [{**row, "step_time_s": 0.2} for row in ROWS if row["placement"]]
    lines = printed(equal, best="learned")
    assert lines[1][0] == "learned ★"
    assert [NOT_FASTEST_NOTE] not in lines


def test_without_single_or_any_success_there_is_neither_ratio_nor_winner() -> None:
    failed = {"method": "eft", "step_time_s": math.nan, "spread_s": 0.0, "placements": 1, "status": "timeout"}
    skipped = {"method": "blocks", "step_time_s": math.inf, "placements": 0, "status": "skipped", "why": "one device"}
    assert printed([failed, skipped])[1:] == [
        ["eft", "–", "–", "1", "timeout"],
        ["blocks", "–", "–", "skipped: one device"],
    ]


def shown_comparison(comparison: Comparison, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(compare_table(comparison.to_dict()))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def compared_line(lines: list[str], word: str) -> str:
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
    lines = shown_comparison(Comparison("w", "h", "latency", rows, 0.0016, "critical path", {}))
    order = [line.split()[0] for line in lines if line.strip()][3:8]
    assert order == ["anneal", "single", "cp-sat", "ddp", "lower"]
    assert "★" in compared_line(lines, "anneal")
    assert "+25.0%" in compared_line(lines, "anneal")
    assert "1,000" in compared_line(lines, "anneal")
    assert "skipped: ortools is not installed" in compared_line(lines, "cp-sat")
    assert "†" in compared_line(lines, "ddp")
    assert "1.60" in compared_line(lines, "lower bound")
    assert any("critical path" in line for line in lines)


def test_seeds_and_measured_columns_only_where_there_are_any() -> None:
    rows = (Row("random", 0, "ok", 0.002, spread_s=1e-4, simulated_s=0.003), Row("random", 1, "ok", 0.0021))
    plain = shown_comparison(Comparison("w", "h", "latency", rows[:1], 0.001, "b", {}))
    measured = shown_comparison(Comparison("w", "h", "latency", rows, 0.001, "b", {}, is_measured=True))
    assert "seed" not in heading(plain)
    assert "simulated" not in heading(plain)
    assert "seed" in heading(measured)
    assert "± 0.10" in compared_line(measured, "random")
    assert "3.00" in compared_line(measured, "random")


def test_published_values_are_in_ms() -> None:
    rows = (Row("dp", 0, "ok", 0.25),)
    lines = shown_comparison(Comparison("w.json", "own", "max-load", rows, 0.2, "work", {}))
    assert "load, ms" in heading(lines)
    assert "250.00" in compared_line(lines, "dp")
    assert "200.00" in compared_line(lines, "lower bound")


def test_headings_and_reasons_stay_readable_in_80_columns() -> None:
    rows = (
        Row("critical-path", 0, "ok", 0.0125, evaluations=63133, plan_s=0.0983, peak_bytes=(761 * 2**20,)),
        Row("scotch", 0, "skipped", why="not installed"),
    )
    lines = shown_comparison(Comparison("w", "h", "latency", rows, 0.0119, "b", {}), width=80)
    assert "…" not in "".join(lines)
    assert all(word in heading(lines) for word in ("step, ms", "evaluations", "memory"))
    assert "skipped" in "\n".join(lines)


def test_of_equal_rows_the_winner_comes_first() -> None:
    rows = (Row("blocks", 0, "ok", 0.002), Row("anneal", 0, "ok", 0.002))
    lines = shown_comparison(Comparison("w", "h", "latency", rows, 0.001, "b", {}))
    assert "★" in next(line for line in lines if line.strip().startswith(("blocks", "anneal")))


def test_a_hidden_truth_is_named_beside_what_was_known() -> None:
    rows = (
        Row("portfolio", 3, "ok", 0.004, simulated_s=0.003, measured=16),
        Row("learned", 3, "error", why="no luck", measured=7),
    )
    lines = shown_comparison(Comparison("w", "h", "latency", rows, 0.002, "work", {}, truth="hard:3"))
    assert {"as", "known", "measured"} <= set(heading(lines).split())
    assert compared_line(lines, "portfolio").split()[2:5] == ["4.00", "3.00", "16"]
    assert " 7 " in compared_line(lines, "learned")
    assert any("truth: hard:3" in line for line in lines)


FIGURES = Figures(
    kind="simulated",
    costs="estimated",
    bound_s=0.4,
    bound="total work",
    single_s=1.0,
    single_device="cuda:0",
    single_bytes=3 << 30,
    single_capacity_bytes=16 << 30,
    placed_s=0.6,
    num_placements=2000,
    split_s=0.9,
    eager_why="the host is simulated",
)


def advised(figures: Figures) -> list[str]:
    told = decide(figures).to_dict() | {"capture_s": 1.5, "seconds": 20.0}
    console = Console(file=StringIO(), width=120, force_terminal=False)
    console.print(advice_panel(told, WORDS[told["verdict"]]))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_verdict_comes_first_and_what_to_do_last() -> None:
    lines = [" ".join(line.split()) for line in advised(FIGURES)]
    assert lines[0] == "place: the best of 2,000 placements takes 600 ms a step, one device 1.00 s"
    assert lines[1:] == [
        "expected step 0.40 to 0.60 of what one device takes",
        "eager PyTorch – (the host is simulated)",
        "one device 1.00 s on cuda:0, 3.00 GiB of 16.0 GiB",
        "best placement 600 ms",
        "even split 900 ms at best (estimated)",
        "bound 400 ms (total work)",
        "step times simulated, op times estimated",
        "it took 1.50 s to capture, 20.0 s from there",
        "next rlplace.train(problem)",
    ]


def test_what_cannot_be_had_is_a_dash() -> None:
    lines = [" ".join(line.split()) for line in advised(replace(FIGURES, single_s=None, counts=(1, 4), cut_count=4))]
    assert "expected step – (nothing else can run the step)" in lines
    assert "one device – (does not fit) on cuda:0, 3.00 GiB of 16.0 GiB" in lines
    assert "4 micro-batches – (not faster, or does not fit)" in lines


def test_a_placement_that_one_device_beats_is_not_called_the_best() -> None:
    lines = [
        " ".join(line.split()) for line in advised(replace(FIGURES, kind="measured", single_s=0.169, placed_s=0.202))
    ]
    assert not any(line.startswith("best") for line in lines)
    assert "searched placement 202 ms" in lines


ALTERNATIVES = [
    Alternative("one device", 4.0, "simulated"),
    Alternative("eager", None, "simulated", "the host is [simulated]"),
]


def explained(**host_options: object) -> Explanation:
    graph = replace(op_graph([[], [0], [0], [1, 2]], 100), modules=("stem", "left", "", "head"))
    problem = Problem(graph, plain_host(2, **host_options), Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))  # type: ignore[arg-type]
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 1, 0], dtype=np.int32))
    return explain(problem, plan, simulator.timeline(plan), method="hand", alternatives=ALTERNATIVES)


def shown(explanation: Explanation, top: int = 12, width: int = 140) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(explanation_tables(explanation, top))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line_of(lines: list[str], words: str) -> list[str]:
    return next(line for line in lines if words in line).split()


def test_what_was_learned_about_the_host_is_shown_line_by_line() -> None:
    lines = shown(replace(explained(), learned=("d0 is 4 % slower", "[d1] is 2 % faster")))
    place = lines.index("learned about the host:")
    assert lines[place + 1 : place + 3] == ["d0 is 4 % slower", "[d1] is 2 % faster"]


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


OTHERS: dict[str, Any] = {
    "workload": "toy", "is_file": False, "capture_s": 1.0, "num_groups": 2, "grouping": "none", "costs_host": "host",
    "costs_source": "estimated", "critical_path_s": 1.0, "single_device": "gpu:0", "single_device_s": 1.0,
}  # fmt: skip


def shown_graph(graph: OpGraph) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(graph_table(asdict(describe_graph(graph)) | OTHERS | {"notes": []}))
    return captured.get()


def test_a_batch_that_is_cut_has_a_line() -> None:
    graph = op_graph([[], [0], [], [2], [1, 3]])
    cut = dataclasses.replace(graph, micro_batch=np.array([0, 0, 1, 1, -1]))
    assert "2 of about 2 ops each; 1 shared by all" in shown_graph(cut)
    assert "micro-batches" not in shown_graph(graph)
