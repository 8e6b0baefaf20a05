from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from micrographs import op_graph
from run_files import trace_of

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Timeline
from rlplace.report.chrome_trace import Lane, Trace, chrome_trace, covered_s


def test_what_chrome_trace_writes_is_read_back() -> None:
    host = Host(
        "two",
        (Device("a", "core", "cpu", 1 << 30), Device("b", "core", "cpu", 1 << 30)),
        (Link("a->b", 1e9), Link("b->a", 1e9)),
        (Route("a", "b", ("a->b",)), Route("b", "a", ("b->a",))),
    )
    graph = dataclasses.replace(op_graph([[], [0], [1]], 8, phases=[0, 1, 2]), modules=("m.x", "m.y", ""))
    timeline = Timeline(
        np.array([0, 1, 1], dtype=np.int32),
        np.array([0.0, 0.2, 0.5]),
        np.array([0.1, 0.5, 0.75]),
        *(np.array([value], dtype=np.int32) for value in (0, 0, 1)),
        np.array([0.1]),
        np.array([0.2]),
        np.array([0.0, 0.3, 0.3]),
        np.array([0, 1, 1], dtype=np.int32),
        np.array([5, 7, 9]),
        "simulated",
    )
    trace = Trace.of(chrome_trace({"simulated": timeline}, graph, host), "timeline.json")
    assert trace.kind == "simulated"
    assert trace.lanes == (Lane("a", True), Lane("b", True), Lane("a->b", False))
    assert [(op.name, op.kind, trace.device_of(op), op.module) for op in trace.ops] == [
        ("op0", "forward", "a", "m.x"),
        ("op1", "backward", "b", "m.y"),
        ("op2", "update", "b", ""),
    ]
    (sent,) = [one for one in trace.slices if one.kind == "transfer"]
    assert (sent.ends, sent.num_bytes, sent.lane) == (("a", "b"), 8, 2)
    assert sent.seconds == pytest.approx(0.1)
    assert trace.step_s == pytest.approx(0.75)
    assert trace.memory == {"a": ((0.0, 5),), "b": ((0.3, 9),)}


def test_only_the_first_process_counts_and_micro_batches_are_known() -> None:
    data = trace_of(["a"], ["m"], ["d"])
    data["traceEvents"] += trace_of(["x", "y"], ["m", "m"], ["d"])["traceEvents"]
    for event in data["traceEvents"][-8:]:
        event["pid"] = 2
    op = next(event for event in data["traceEvents"] if event["ph"] == "X")
    op["cat"], op["args"]["micro_batch"] = "backward,micro-batch 3", 3
    trace = Trace.of(data, "t")
    assert (trace.ops[0].kind, trace.ops[0].micro_batch) == ("backward", 3)
    assert len({one.name for one in trace.ops} & {"a"}) == 1


def test_a_further_row_of_a_device_is_its_own() -> None:
    assert Lane("cpu:0 (2)", True).owner == "cpu:0"
    assert Lane("odd (x)", True).owner == "odd (x)"


def test_what_overlaps_counts_once() -> None:
    trace = Trace.of(trace_of(["a", "b", "c"], ["", "", ""], ["d"]), "t")
    longer = [dataclasses.replace(one, end_s=one.end_s + 0.0005) for one in trace.ops]
    assert covered_s(longer) == pytest.approx(0.0035)


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (5, "traceEvents"),
        ({"ph": "X", "ts": -1, "dur": 1, "cat": "forward"}, "ts"),
        ({"ph": "X", "ts": 0, "dur": "1", "cat": "forward"}, "dur"),
        ({"ph": "X", "ts": 0, "dur": 1e300, "cat": "forward"}, "dur"),
        ({"ph": "X", "ts": 0, "dur": 1, "cat": 7}, "cat"),
        ({"ph": "X", "ts": 0, "dur": 1, "cat": "forward", "name": ["x"]}, "name"),
        ({"ph": "X", "ts": 0, "dur": 1, "cat": "forward", "args": {"module": {}}}, "module"),
        ({"ph": "X", "ts": 0, "dur": 1, "cat": "forward", "args": 4}, "args"),
        ({"ph": "C", "name": "memory d", "ts": 0, "args": {"bytes": True}}, "bytes"),
    ],
)
def test_a_malformed_event_is_named(event: Any, field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        Trace.of({"traceEvents": [event]}, "timeline.json")
    with pytest.raises(InvalidValue, match="traceEvents"):
        Trace.of({}, "timeline.json")
