"""Bars that are joined where a screen could not tell them apart."""

from __future__ import annotations

import itertools

import pytest
from run_files import trace_of

from rlplace.report.chrome_trace import Trace
from rlplace.report.lanes import PHASES, Row, join, joined, rows_of, words_of


def trace(num_ops: int) -> Trace:
    return Trace.of(trace_of([f"op{k}" for k in range(num_ops)], ["m"] * num_ops, ["a", "b"]), "t")


def test_neighbours_of_one_phase_are_joined_up_to_a_grain() -> None:
    first, second, third = (one for one in trace(12).ops if one.lane == 0 and one.start_s < 5e-3)  # 1 ms each, 2 apart
    assert joined([first, second, third], 0.9e-3) == [first, second, third]
    (pair, last) = joined([third, first, second], 1.1e-3)
    assert (pair.start_s, pair.end_s) == (first.start_s, second.end_s)
    assert words_of(pair).startswith("2 ops, the longest: op0\naten.op.default\nm\nforward: ")
    assert last.kind == "backward"


@pytest.mark.parametrize("most", [50, 2000])
def test_a_big_step_has_few_bars_and_covers_what_it_did(most: int) -> None:
    big = trace(3000)
    rows = rows_of(big, ())
    spans = [(row.items[0].start_s, row.items[-1].end_s) for row in rows]
    join(rows, big.step_s, most)
    assert sum(len(row.items) for row in rows) <= most
    assert [(row.items[0].start_s, row.items[-1].end_s) for row in rows] == spans
    for row in rows:
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(row.items))


def test_long_ops_stay_apart_while_short_ones_are_joined() -> None:
    data = trace_of([f"op{k}" for k in range(400)], ["m"] * 400, ["a"])
    slices = [event for event in data["traceEvents"] if event["ph"] == "X"]
    for k, event in enumerate(slices):  # one op as long as all others together
        event["ts"], event["dur"] = (k * 10.0, 10.0) if k < 399 else (3990.0, 4000.0)
    step = Trace.of(data, "t")
    row = Row("a", True, list(step.ops))
    join([row], step.step_s, 50)
    assert len(row.items) <= 50
    assert row.items[-1] == step.ops[-1]


def test_a_kind_without_a_colour_has_that_of_others() -> None:
    (op, *_) = trace(2).ops
    assert PHASES.color(op) == PHASES.colors["forward"]
    data = trace_of(["a"], [""], ["d"])
    data["traceEvents"][2]["cat"] = "strange"
    assert PHASES.color(Trace.of(data, "t").ops[0]) not in PHASES.colors.values()
