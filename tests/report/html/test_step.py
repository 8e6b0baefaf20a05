""""""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_files import HOSTILE, change, forget_files, hostile_run, run_data, trace_of, write_run

from rlplace.report.chrome_trace import Trace
from rlplace.report.html.step_sections import (
    MOST_NODES,
    OTHERS,
    OUTSIDE,
    memory_section,
    modules_section,
    parts_of_model,
    timeline_section,
    tree,
)
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session


def test_every_op_and_transfer_is_a_bar_that_says_what_it_is(tmp_path: Path) -> None:
    section = timeline_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert "24 ops and 12 transfers" in section.lead
    by_phase, by_module = re.findall(r"<svg.*?</svg>", section.body, flags=re.DOTALL)
    for view in (by_phase, by_module):
        told = re.findall(r"<title>(.*?)</title>", view, flags=re.DOTALL)
        assert len(told) == 36
        assert "op_0\naten.op.default\npart0.layer0.conv\nforward: 1.00 ms, 0.00 to 1.00 ms" in told
        assert sum("cpu:0 → cpu:1, 1.00 KiB" in one for one in told) == 12
        assert [name for name in re.findall(r"<text[^>]*>(.*?)</text>", view) if name.startswith("cpu:")] == [
            *("cpu:0", "cpu:1", "cpu:0 → cpu:1")
        ]
    assert len(set(re.findall("fill: (#[0-9a-f]{6})", by_module))) > len(
        set(re.findall("fill: (#[0-9a-f]{6})", by_phase))
    )


def test_ids_are_unique_and_colours_are_the_pages(tmp_path: Path) -> None:
    section = timeline_section(run_data(write_run(tmp_path)))
    assert section is not None
    ids = re.findall(r' id="([^"]*)"', section.body)
    assert len(set(ids)) == len(ids)
    assert "var(--ink)" in section.body
    assert "font-family" not in section.body


def test_where_a_finger_scrolls_nothing_is_dragged(tmp_path: Path) -> None:
    section = timeline_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert '<p class="note minor">Drag to zoom' in section.body


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    section = timeline_section(run_data(hostile_run(tmp_path)))
    assert section is not None
    assert HOSTILE[0].replace("<", "&lt;").replace(">", "&gt;") in section.body
    assert not re.search("<(img|a|script)[ >]", section.body)


def test_a_run_without_a_trace_has_no_timeline(tmp_path: Path) -> None:
    forget_files(write_run(tmp_path))
    assert timeline_section(run_data(tmp_path)) is None


def test_modules_are_a_tree_the_longest_first(tmp_path: Path) -> None:
    names = [f"op{k}" for k in range(6)]
    run = write_run(tmp_path, names=names, modules=["a.x", "a.x", "a.y", "a.x", "b", ""])
    section = modules_section(run_data(run))
    assert section is not None
    lines = re.findall(r' title="(.*?)"><span>(.*?)</span>', section.body)
    assert [name for _, name in lines[:3]] == ["a", "x", "y"]
    assert {name for _, name in lines[3:]} == {"b", OUTSIDE}
    assert lines[0][0] == "cpu:0 50%, cpu:1 50%"
    assert lines[1][0] == "cpu:0 33%, cpu:1 67%"
    assert re.findall(r'<span class="number">(.*?)</span>', section.body)[:3] == ["4 ops", "4.00 ms", "66.7%"]
    assert section.body.count("<details>") == 1


def test_a_module_counts_its_seconds_by_device() -> None:
    both = Trace.of(trace_of(["a", "b", "c", "d"], ["x", "y", "x", "x"], ["d0", "d1"]), "t")
    root = tree(both)
    assert dict(root.children["y"].seconds) == pytest.approx({"d1": 0.001})
    assert dict(root.children["x"].seconds) == pytest.approx({"d0": 0.002, "d1": 0.001})
    assert root.num_ops == 4


def test_of_very_many_modules_the_longest_are_shown(tmp_path: Path) -> None:
    count = 2000
    data = trace_of([f"op{k}" for k in range(count)], [f"m{k}" for k in range(count)], ["cpu:0"])
    for k, event in enumerate(event for event in data["traceEvents"] if event["ph"] == "X"):
        event["dur"] = 1.0 + k
    with Session.open(RunFolder(write_run(tmp_path))) as session:
        session.keep_timeline(json.dumps(data))
    section = modules_section(run_data(tmp_path))
    assert section is not None
    shown = re.findall(r"<span>m(\d+)<", section.body)
    assert shown == [str(k) for k in range(count - 1, count - 1 - MOST_NODES, -1)]


def test_names_of_modules_are_shown_as_they_are(tmp_path: Path) -> None:
    section = modules_section(run_data(hostile_run(tmp_path)))
    assert section is not None
    assert not re.search("<(img|a|script)[ >]", section.body)


def ops(modules: list[str]) -> Trace:
    return Trace.of(trace_of([f"op{k}" for k in range(len(modules))], modules, ["d"]), "t")


def test_a_model_of_one_part_is_cut_deeper() -> None:
    inside = ops([f"model.layers.{k % 3}.mlp" for k in range(9)])
    parts = parts_of_model(inside)
    assert set(parts.colors) == {"model.layers.0", "model.layers.1", "model.layers.2", OTHERS, "transfer"}
    assert parts.part_of(inside.ops[1]) == "model.layers.1"


def test_the_longest_have_colours_and_the_rest_are_others() -> None:
    found = ops([*["big.x"] * 5, *["small.y"] * 2, *(f"m{k}" for k in range(9)), ""])
    parts = parts_of_model(found)
    assert list(parts.colors)[:2] == ["big", "small"]
    assert [parts.part_of(op) for op in found.ops].count(OTHERS) == 4
    assert len(parts.colors) == 8 + 2


def test_memory_has_a_line_a_device(tmp_path: Path) -> None:
    section = memory_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert "cpu:0: 16.0 MiB at 2.00 ms" in section.body
    assert "cpu:1, peak 16.0 MiB" in section.body
    assert "capacity 1.00 GiB" not in section.body, "far away"
    assert "share one memory of 1.00 GiB" in section.body


def test_a_capacity_that_is_near_is_in_view(tmp_path: Path) -> None:
    device = {"name": "cpu:0", "kind": "cpu-core", "backend": "cpu", "memory_bytes": 20 << 20}
    change(write_run(tmp_path), "host", name="small", devices=[device], links=[], routes=[])
    section = memory_section(run_data(tmp_path))
    assert section is not None
    assert "capacity 20.0 MiB" in section.body


def test_a_run_that_did_not_follow_memory_has_no_section(tmp_path: Path) -> None:
    data = run_data(write_run(tmp_path))
    assert data.trace is not None
    assert data.trace.memory["cpu:0"][1] == pytest.approx((0.0005, 2 << 20))
    with Session.open(RunFolder(tmp_path)) as session:
        session.keep_timeline(json.dumps({**trace_of(["op"], [""], ["cpu:0"]), "traceEvents": []}))
    assert memory_section(run_data(tmp_path)) is None
