from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Timeline
from rlplace.report.chrome_trace import chrome_trace, write_chrome_trace


def graph() -> OpGraph:
    """An input, a convolution, its backward, an addition of both, an update; tensors of 100 bytes."""
    targets = [
        "input",
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.add.Tensor",
        "update.adam",
    ]
    return op_graph([[], [0], [1], [1, 2], [2]], 100, targets=targets, phases=[0, 0, 1, 1, 2])


def host() -> Host:
    """Two devices over a root: a transfer holds the sender's link up and the receiver's link down."""
    devices = tuple(Device(f"gpu:{i}", "gpu", "simulated", 1 << 30) for i in range(2))
    links = tuple(Link(f"gpu:{i} {way}", 1e9) for i in range(2) for way in ("up", "down"))
    routes = tuple(Route(f"gpu:{i}", f"gpu:{j}", (f"gpu:{i} up", f"gpu:{j} down")) for i, j in ((0, 1), (1, 0)))
    return Host("pair", devices, links, routes)


def timeline() -> Timeline:
    """Convolution on device 0 until 2 ms, sent until 3; backward on device 1 until 5, sent back until 6; the rest."""
    return Timeline(
        op_device=np.array([0, 0, 1, 0, 1], dtype=np.int32),
        op_start_s=np.array([0.0, 0.0, 3e-3, 6e-3, 5e-3]),
        op_end_s=np.array([0.0, 2e-3, 5e-3, 8e-3, 6e-3]),
        transfer_tensor=np.array([1, 2], dtype=np.int32),
        transfer_source=np.array([0, 1], dtype=np.int32),
        transfer_destination=np.array([1, 0], dtype=np.int32),
        transfer_start_s=np.array([2e-3, 5e-3]),
        transfer_end_s=np.array([3e-3, 6e-3]),
        memory_time_s=np.array([0.0, 0.0, 2e-3, 3e-3, 3e-3]),
        memory_device=np.array([0, 1, 1, 0, 0], dtype=np.int32),
        memory_bytes=np.array([200, 0, 100, 100, 150]),
        source="measured",
    )


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def rows(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}


def test_every_slice_of_a_hand_worked_timeline() -> None:
    trace = chrome_trace({"measured": timeline()}, graph(), host())
    names = rows(trace)
    slices = [(names[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events(trace, "X")]
    assert slices == [
        ("gpu:0", "op1", "forward", 0.0, 2000.0),
        ("gpu:0", "op3", "backward", 6000.0, 2000.0),
        ("gpu:1", "op2", "backward", 3000.0, 2000.0),
        ("gpu:1", "op4", "update", 5000.0, 1000.0),
        ("gpu:0 up", "op1", "transfer", 2000.0, 1000.0),
        ("gpu:0 down", "op2", "transfer", 5000.0, 1000.0),
        ("gpu:1 up", "op2", "transfer", 5000.0, 1000.0),
        ("gpu:1 down", "op1", "transfer", 2000.0, 1000.0),
    ]
    assert events(trace, "X")[0]["args"] == {"target": "aten.convolution.default", "module": "", "bytes": 100}
    assert events(trace, "X")[4]["args"] == {
        "target": "aten.convolution.default",
        "module": "",
        "bytes": 100,
        "tensor": 1,
        "from": "gpu:0",
        "to": "gpu:1",
    }


def test_arrows_go_from_the_producer_over_the_transfer_to_the_first_reader() -> None:
    trace = chrome_trace({"measured": timeline()}, graph(), host())
    names = rows(trace)
    arrows = [(e["id"], e["ph"], names[e["tid"]], e["ts"]) for e in trace["traceEvents"] if e["ph"] in {"s", "t", "f"}]
    assert arrows == [
        (0, "s", "gpu:0", 1999.999),
        (0, "t", "gpu:0 up", 2000.0),
        (0, "f", "gpu:1", 3000.0),
        (1, "s", "gpu:1", 4999.999),
        (1, "t", "gpu:1 up", 5000.0),
        (1, "f", "gpu:0", 6000.0),
    ]
    assert all(e["bp"] == "e" for e in events(trace, "f"))


def test_memory_counters_show_the_level_after_all_changes_of_an_instant() -> None:
    trace = chrome_trace({"measured": timeline()}, graph(), host())
    assert [(e["name"], e["ts"], e["args"]) for e in events(trace, "C")] == [
        ("memory gpu:0", 0.0, {"bytes": 200}),
        ("memory gpu:0", 3000.0, {"bytes": 150}),
        ("memory gpu:1", 0.0, {"bytes": 0}),
        ("memory gpu:1", 2000.0, {"bytes": 100}),
    ]


def test_metadata_names_and_sorts_processes_and_rows() -> None:
    trace = chrome_trace({"measured": timeline(), "simulated": timeline()}, graph(), host())
    metadata = events(trace, "M")
    assert [(e["pid"], e["args"]["name"]) for e in metadata if e["name"] == "process_name"] == [
        (1, "measured"),
        (2, "simulated"),
    ]
    assert [e["args"]["labels"] for e in metadata if e["name"] == "process_labels"] == ["step 8.00 ms"] * 2
    first = [e for e in metadata if e["pid"] == 1]
    order = {e["tid"]: e["args"]["sort_index"] for e in first if e["name"] == "thread_sort_index"}
    assert [rows(trace)[tid] for tid in sorted(order, key=order.__getitem__)] == [
        "gpu:0",
        "gpu:1",
        "gpu:0 up",
        "gpu:0 down",
        "gpu:1 up",
        "gpu:1 down",
    ]
    assert len({(e["pid"], e["tid"]) for e in events(trace, "X")}) == len({e["tid"] for e in events(trace, "X")}) == 12
    assert sorted({e["id"] for e in events(trace, "s")}) == [0, 1, 2, 3]


def test_a_written_trace_loads_as_json_in_object_format(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "timeline.json", {"measured": timeline()}, graph(), host())
    trace = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))
    assert trace == chrome_trace({"measured": timeline()}, graph(), host())
    assert trace["otherData"]["graph_fingerprint"] == graph().fingerprint


def test_slices_that_overlap_on_one_link_get_rows_of_their_own() -> None:
    late = dataclasses.replace(
        timeline(),
        transfer_source=np.zeros(2, dtype=np.int32),
        transfer_destination=np.ones(2, dtype=np.int32),
        transfer_start_s=np.array([2e-3, 2.5e-3]),
        transfer_end_s=np.array([3e-3, 6e-3]),
    )
    trace = chrome_trace({"measured": late}, graph(), host())
    assert list(rows(trace).values()) == ["gpu:0", "gpu:1", "gpu:0 up", "gpu:0 up (2)", "gpu:1 down", "gpu:1 down (2)"]


def test_a_sent_parameter_has_an_arrow_from_its_transfer_and_a_hand_over_one_without_a_transfer() -> None:
    devices = (
        Device("cpu:0", "core", "cpu", 1),
        Device("cpu:1", "core", "cpu", 1),
        Device("cpu:0-1", "gang", "cpu", 1, members=("cpu:0", "cpu:1")),
    )
    wired, links = [], []
    for a in devices:
        for b in devices:
            if a is not b and not a.members and not b.members:
                links.append(Link(f"{a.name}>{b.name}", 1e9))
            if a is not b:
                wired.append(Route(a.name, b.name, () if a.members or b.members else (f"{a.name}>{b.name}",)))
    gang_host = Host("cores", devices, tuple(links), tuple(wired))
    small = op_graph([[], [0], [1]], 8, targets=["parameter", "aten.mul.Tensor", "aten.add.Tensor"])
    none = np.zeros(0)
    trace = chrome_trace(
        {
            "simulated": Timeline(
                np.array([0, 1, 2], dtype=np.int32),
                np.array([0.0, 1e-3, 2e-3]),
                np.array([0.0, 2e-3, 3e-3]),
                np.array([0, 1], dtype=np.int32),
                np.array([0, 1], dtype=np.int32),
                np.array([1, 2], dtype=np.int32),
                np.array([0.0, 2e-3]),
                np.array([1e-3, 2e-3]),
                none,
                none.astype(np.int32),
                none.astype(np.int64),
                "simulated",
            )
        },
        small,
        gang_host,
    )
    names = rows(trace)
    assert [(e["id"], e["ph"], names[e["tid"]]) for e in trace["traceEvents"] if e["ph"] in {"s", "t", "f"}] == [
        (0, "s", "cpu:0>cpu:1"),
        (0, "f", "cpu:1"),
        (1, "s", "cpu:1"),
        (1, "f", "cpu:0-1"),
    ]


def test_slices_of_a_row_never_overlap_and_arrows_lie_in_slices() -> None:
    rng = np.random.default_rng(0)
    n = 400
    chain = op_graph([[], *([i] for i in range(n - 1))], 10)
    ends = np.cumsum(rng.uniform(1e-7, 1e-3, n))
    device = rng.integers(0, 2, n).astype(np.int32)
    crossing = np.flatnonzero(device[1:] != device[:-1])
    starts = np.concatenate(([0.0], ends[:-1]))
    trace = chrome_trace(
        {
            "simulated": Timeline(
                device,
                starts,
                ends,
                crossing.astype(np.int32),
                device[crossing],
                device[crossing + 1],
                ends[crossing],
                ends[crossing],
                np.zeros(0),
                np.zeros(0, dtype=np.int32),
                np.zeros(0, dtype=np.int64),
                "simulated",
            )
        },
        chain,
        host(),
    )
    by_row: dict[int, list[tuple[int, int]]] = {}
    for event in events(trace, "X"):
        start = round(event["ts"] * 1e3)
        by_row.setdefault(event["tid"], []).append((start, start + round(event["dur"] * 1e3)))
    for slices in by_row.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(slices)))
    for event in trace["traceEvents"]:
        if event["ph"] in {"s", "t", "f"}:
            moment = round(event["ts"] * 1e3)
            assert any(start <= moment <= end for start, end in by_row[event["tid"]])


def test_a_timeline_of_another_graph_is_refused() -> None:
    with pytest.raises(InvalidValue, match="timeline 'measured': op_device is '5 entries', expected 2"):
        chrome_trace({"measured": timeline()}, op_graph([[], [0]]), host())


def test_slices_say_their_micro_batch_where_the_batch_is_cut() -> None:
    cut = dataclasses.replace(graph(), micro_batch=np.array([0, 0, 0, 1, -1]))
    slices = events(chrome_trace({"measured": timeline()}, cut, host()), "X")
    assert {event["cat"] for event in slices} == {
        "forward,micro-batch 0", "backward,micro-batch 0", "backward,micro-batch 1", "update", "transfer",
    }  # fmt: skip
    assert {event["args"].get("micro_batch") for event in slices} == {0, 1, None}
    plain = events(chrome_trace({"measured": timeline()}, graph(), host()), "X")
    assert all("micro_batch" not in event["args"] for event in plain)
