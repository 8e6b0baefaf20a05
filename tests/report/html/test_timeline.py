from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from plotly_figures import check
from run_files import HOSTILE, hostile_run, trace_of, write_run

from rlplace.report.html import figure as figure_module
from rlplace.report.html.run_data import RunData
from rlplace.report.html.timeline import merged, timeline_section
from rlplace.report.html.trace import Trace
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder


def data_of(folder: Path) -> RunData:
    return read_run(RunFolder.open(folder))


def trace(num_ops: int, modules: int = 3) -> Trace:
    names = [f"op{k}" for k in range(num_ops)]
    return Trace.of(trace_of(names, [f"m{k % modules}" for k in range(num_ops)], ["a", "b"]), "t")


def test_every_op_and_transfer_is_a_bar_of_its_lane(tmp_path: Path) -> None:
    section = timeline_section(data_of(write_run(tmp_path)))
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


def test_on_a_narrow_page_the_timeline_is_scrolled_instead_of_cut(tmp_path: Path) -> None:
    section = timeline_section(data_of(write_run(tmp_path)))
    assert section is not None
    box = re.search(r'<div class="wide"><div class="plot"[^>]*min-width:(\d+)px', section.body)
    assert box is not None
    assert int(box[1]) > 390
    style = Path(figure_module.__file__).with_name("style.css").read_text(encoding="utf-8")
    assert re.search(r"^\.wide \{[^}]*overflow-x: auto", style, re.MULTILINE)


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
    section = timeline_section(data_of(hostile_run(tmp_path)))
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
    (write_run(tmp_path) / "timeline.json").unlink()
    assert timeline_section(data_of(tmp_path)) is None
