""""""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from plotly_figures import check
from run_files import HOSTILE, change, forget_files, hostile_run, run_data, trace_of, write_run

from rlplace.report.chrome_trace import Slice, Trace
from rlplace.report.html.run_data import RunData
from rlplace.report.html.step_sections import (
    MOST_NODES,
    OUTSIDE,
    memory_section,
    merged,
    module_groups,
    modules_section,
    text_color,
    thinned,
    timeline_section,
    tree,
)
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session


def trace(num_ops: int, modules: int = 3) -> Trace:
    names = [f"op{k}" for k in range(num_ops)]
    return Trace.of(trace_of(names, [f"m{k % modules}" for k in range(num_ops)], ["a", "b"]), "t")


def test_every_op_and_transfer_is_a_bar_of_its_lane(tmp_path: Path) -> None:
    section = timeline_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert "24 ops and 12 transfers" in section.lead
    (figure,) = section.figures
    by_phase, by_module = check(figure)
    assert [len(lane["x"]) for lane in by_phase["data"]] == [12, 12, 12]
    assert by_phase["layout"]["yaxis"]["ticktext"] == ["cpu:0", "cpu:1", "cpu:0→cpu:1"]
    first = by_phase["data"][0]
    assert (first["base"][:3], first["x"][0]) == ([0.0, 2.0, 4.0], 1.0)
    assert set(first["marker"]["color"]) == {0, 1, 2}
    assert set(by_phase["data"][2]["marker"]["color"]) == {3}
    assert len(set(by_module["data"][0]["marker"]["color"])) == 3
    assert "<b>op_0</b><br>aten.op.default<br>part0.layer0.conv<br>forward: 1.00 ms" in first["hovertext"][0]
    assert "cpu:0 → cpu:1, 1.00 KiB" in by_phase["data"][2]["hovertext"][0]
    assert "<td" in section.body


def test_on_a_narrow_page_all_of_the_timeline_is_in_view(tmp_path: Path) -> None:
    section = timeline_section(run_data(write_run(tmp_path)))
    assert section is not None
    assert "min-width" not in section.body
    assert '<p class="note minor">Drag to zoom' in section.body, "where a finger scrolls, nothing is dragged"


@pytest.mark.slow
def test_a_big_step_is_drawn_with_few_bars_and_nothing_is_lost() -> None:
    big = trace(10_000)
    bars = merged(big, most=2000)
    assert sum(map(len, bars.values())) <= 2000
    assert sum(bar.count for row in bars.values() for bar in row) == len(big.slices)
    busy = sum(bar.busy_s for row in bars.values() for bar in row)
    assert busy == pytest.approx(sum(one.seconds for one in big.slices))
    for row in bars.values():
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(row))


def test_long_ops_stay_apart_while_short_ones_are_merged() -> None:
    data = trace_of([f"op{k}" for k in range(400)], ["m"] * 400, ["a"])
    slices = [event for event in data["traceEvents"] if event["ph"] == "X"]
    for k, event in enumerate(slices):  # one op as long as all others together
        event["ts"], event["dur"] = (k * 10.0, 10.0) if k < 399 else (3990.0, 4000.0)
    bars = merged(Trace.of(data, "t"), most=50)[0]
    assert len(bars) <= 50
    assert (bars[-1].first.name, bars[-1].count) == ("op399", 1)


def test_phases_are_not_mixed_while_a_screen_could_tell() -> None:
    big = trace(3000, modules=1)
    bars = merged(big, most=4000)
    assert all(bar.count == 1 or bar.busy_s < big.step_s / 500 for row in bars.values() for bar in row)


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    section = timeline_section(run_data(hostile_run(tmp_path)))
    assert section is not None
    texts: list[Any] = []
    for shown in check(section.figures[0]):
        texts += [text for lane in shown["data"] for text in lane["hovertext"]]
        texts += shown["layout"]["yaxis"]["ticktext"]
    joined = " ".join(texts).replace("<b>", "").replace("</b>", "").replace("<br>", "")
    assert "<" not in joined
    assert HOSTILE[0].replace("<", "&lt;").replace(">", "&gt;") in joined
    assert "<img" not in section.body
    assert "<a " not in section.body


def test_a_run_without_a_trace_has_no_timeline(tmp_path: Path) -> None:
    forget_files(write_run(tmp_path))
    assert timeline_section(run_data(tmp_path)) is None


def modules_data(folder: Path) -> RunData:
    return run_data(folder)


def test_areas_are_seconds_and_add_up(tmp_path: Path) -> None:
    section = modules_section(modules_data(write_run(tmp_path)))
    assert section is not None
    (shown,) = check(section.figures[0])
    (drawn,) = shown["data"]
    assert drawn["values"][0] == pytest.approx(24.0)
    assert drawn["parents"][0] == ""
    assert len(set(drawn["ids"])) == len(drawn["ids"])
    for place, parent in enumerate(drawn["parents"]):
        inside = [value for value, of in zip(drawn["values"], drawn["parents"], strict=True) if of == str(place)]
        assert sum(inside) <= drawn["values"][place] + 1e-9, parent
    conv = drawn["labels"].index("conv")
    assert drawn["hovertext"][conv].startswith("<b>part0.layer0.conv</b><br>4 ops, 4.00 ms, 16.7% of all work")


def test_a_module_on_one_device_has_its_colour_and_one_on_two_a_blend() -> None:
    both = Trace.of(trace_of(["a", "b", "c", "d"], ["x", "y", "x", "x"], ["d0", "d1"]), "t")
    root = tree(both)
    assert dict(root.children["y"].seconds) == pytest.approx({"d1": 0.001})
    assert dict(root.children["x"].seconds) == pytest.approx({"d0": 0.002, "d1": 0.001})
    assert root.num_ops == 4


def test_a_model_of_very_many_modules_stays_drawable(tmp_path: Path) -> None:
    names = [f"op{k}" for k in range(4000)]
    run = write_run(tmp_path, names=names, modules=[f"m{k // 4}.{'x.' * 30}{k}" for k in range(4000)])
    section = modules_section(modules_data(run))
    assert section is not None
    (drawn,) = check(section.figures[0])[0]["data"]
    assert len(drawn["ids"]) <= MOST_NODES + 1
    assert set(drawn["parents"]) - {""} <= set(drawn["ids"])


def test_text_can_be_read_on_every_colour() -> None:
    assert text_color("#FFFFFF") == text_color("#44AA99") == "#0D1317"
    assert text_color("#000000") == text_color("#882255") == "#FFFFFF"


def test_names_of_modules_are_shown_as_they_are(tmp_path: Path) -> None:
    section = modules_section(modules_data(hostile_run(tmp_path)))
    assert section is not None
    (drawn,) = check(section.figures[0])[0]["data"]
    assert not any("<" in label for label in drawn["labels"])
    assert not any("<script" in text or "<a" in text for text in drawn["hovertext"])
    assert "<img" not in section.body


def ops(modules: list[str]) -> tuple[Slice, ...]:
    return Trace.of(trace_of([f"op{k}" for k in range(len(modules))], modules, ["d"]), "t").ops


def test_a_model_of_one_part_is_cut_deeper() -> None:
    inside = ops([f"model.layers.{k % 3}.mlp" for k in range(9)])
    groups = module_groups(inside)
    assert groups.depth == 3
    assert set(groups.names) == {"model.layers.0", "model.layers.1", "model.layers.2"}
    assert not groups.has_others
    assert groups.name_of(inside[1]) == "model.layers.1"
    assert groups.are_alike(inside[0], inside[0])
    assert not groups.are_alike(inside[0], inside[1])


def test_the_longest_have_names_and_the_rest_are_others() -> None:
    found = ops([*["big.x"] * 5, *["small.y"] * 2, "c", "d", "e", ""])
    groups = module_groups(found, most=2)
    assert groups.names == ("big", "small")
    assert groups.has_others
    assert groups.name_of(found[-1]) == OUTSIDE


def memory_data(folder: Path) -> RunData:
    return run_data(folder)


def test_a_line_a_device_and_the_capacity_apart(tmp_path: Path) -> None:
    section = memory_section(memory_data(write_run(tmp_path)))
    assert section is not None
    close, far = check(section.figures[0])
    assert [line["name"] for line in close["data"]] == ["cpu:0", "cpu:1", "capacity"]
    assert max(close["data"][0]["y"]) == 16.0
    assert close["data"][2]["y"] == [1024.0, 1024.0]
    assert close["layout"]["yaxis"]["range"][1] < 20 < 1024 < far["layout"]["yaxis"]["range"][1]
    assert "share one memory of 1.00 GiB" in section.body
    assert "16.0 MiB" in section.body


def test_a_capacity_that_is_near_is_in_view_at_first(tmp_path: Path) -> None:
    device = {"name": "cpu:0", "kind": "cpu-core", "backend": "cpu", "memory_bytes": 20 << 20}
    change(write_run(tmp_path), "host", name="small", devices=[device], links=[], routes=[])
    section = memory_section(memory_data(tmp_path))
    assert section is not None
    assert [variant.label for variant in section.figures[0].variants] == ["with the capacity", "fit"]
    assert "80%" in section.body


def test_thinning_keeps_the_peak_and_the_end() -> None:
    points = [(k / 1000, k * 7919 % 1009) for k in range(10_000)]
    fewer = thinned(points, 10.0, most=100)
    assert len(fewer) <= 102
    assert max(fewer, key=lambda point: point[1])[1] == max(value for _, value in points)
    assert fewer[-1] == points[-1]
    assert [time_s for time_s, _ in fewer] == sorted(time_s for time_s, _ in fewer)
    assert thinned(points[:5], 10.0) == points[:5]


def test_a_run_that_did_not_follow_memory_has_no_section(tmp_path: Path) -> None:
    data = memory_data(write_run(tmp_path))
    assert data.trace is not None
    assert data.trace.memory["cpu:0"][1] == pytest.approx((0.0005, 2 << 20))
    with Session.open(RunFolder(tmp_path)) as session:
        session.keep_timeline(json.dumps({**trace_of(["op"], [""], ["cpu:0"]), "traceEvents": []}))
    assert memory_section(memory_data(tmp_path)) is None
