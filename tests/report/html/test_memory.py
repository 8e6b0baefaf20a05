from __future__ import annotations

from pathlib import Path

import pytest
from plotly_figures import check
from run_files import change, write_run

from rlplace.report.html.memory import memory_section, thinned
from rlplace.report.html.run_data import RunData
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder


def data_of(folder: Path) -> RunData:
    return read_run(RunFolder.open(folder))


def test_a_line_a_device_and_the_capacity_apart(tmp_path: Path) -> None:
    section = memory_section(data_of(write_run(tmp_path)))
    assert section is not None
    close, far = check(section.figures[0])
    assert [line["name"] for line in close["data"]] == ["cpu:0", "cpu:1", "capacity"]
    assert max(close["data"][0]["y"]) == 16.0
    assert close["data"][2]["y"] == [1024.0, 1024.0]
    assert close["layout"]["yaxis"]["range"][1] < 20 < 1024 < far["layout"]["yaxis"]["range"][1]
    assert "share one memory of 1.00 GiB" in section.body
    assert "16.0 MiB" in section.body


def test_a_capacity_that_is_near_is_in_view_at_first(tmp_path: Path) -> None:
    device = {"name": "cpu:0", "memory_bytes": 20 << 20}
    change(write_run(tmp_path), "problem.json", host={"name": "small", "devices": [device]})
    section = memory_section(data_of(tmp_path))
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
    data = data_of(write_run(tmp_path))
    assert data.trace is not None
    assert data.trace.memory["cpu:0"][1] == pytest.approx((0.0005, 2 << 20))
    change(tmp_path, "timeline.json", traceEvents=[])
    assert memory_section(data_of(tmp_path)) is None
