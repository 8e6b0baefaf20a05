from __future__ import annotations

from pathlib import Path

import pytest
from plotly_figures import check
from run_files import hostile_run, trace_of, write_run

from rlplace.report.html.modules import MOST_NODES, modules_section, text_color, tree
from rlplace.report.html.run_data import RunData
from rlplace.report.html.trace import Trace
from rlplace.runs.report import read_run
from rlplace.session.folder import RunFolder


def data_of(folder: Path) -> RunData:
    return read_run(RunFolder.open(folder))


def test_areas_are_seconds_and_add_up(tmp_path: Path) -> None:
    section = modules_section(data_of(write_run(tmp_path)))
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
    section = modules_section(data_of(run))
    assert section is not None
    (drawn,) = check(section.figures[0])[0]["data"]
    assert len(drawn["ids"]) <= MOST_NODES + 1
    assert set(drawn["parents"]) - {""} <= set(drawn["ids"])


def test_text_can_be_read_on_every_colour() -> None:
    assert text_color("#FFFFFF") == text_color("#44AA99") == "#0D1317"
    assert text_color("#000000") == text_color("#882255") == "#FFFFFF"


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    section = modules_section(data_of(hostile_run(tmp_path)))
    assert section is not None
    (drawn,) = check(section.figures[0])[0]["data"]
    assert not any("<" in label for label in drawn["labels"])
    assert not any("<script" in text or "<a" in text for text in drawn["hovertext"])
    assert "<img" not in section.body
