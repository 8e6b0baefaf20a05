"""`--granularity module`: what is placed are modules, whatever the command and the method."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlplace.cli.main import main
from rlplace.graphs.grouping.module_classes import ModuleClasses
from rlplace.measure.placement import load_placement
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build, without_memory

MODEL, HOST = "rnnlm@small,layers=2,steps=3,batch=4", "RTX4090+RTX3060"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["portfolio", "eft"])
def test_a_placement_keeps_modules_together(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    words = ["place", MODEL, "--host", HOST, "--granularity", "module", "--method", method, "--placement", str(out)]
    assert main([*words, "--evaluations", "300", "--exclude", "projection=cuda:0", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0
    with without_memory():
        graph = capture_workload(build(MODEL))
    placement = load_placement(out)
    placement.require_graph(graph)
    classes = ModuleClasses(graph)
    for number in range(classes.num_classes):
        assert len(set(placement.devices[classes.op_class == number].tolist())) == 1
    assert placement.devices[classes.op_class == classes.entry_class["projection"]].all(), "barred from the first"
    assert np.all(classes.op_class >= 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--granularity", "modul"], "unknown granularity 'modul': did you mean 'module'?"),
        (["--granularity", "module", "--grouping", "metis"], "leave `--grouping` out"),
        (["--granularity", "module", "--micro-batches", "2"], "leave `--micro-batches` out"),
        (["--grouping", "device-map", "--micro-batches", "auto"], "leave `--micro-batches` out"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", MODEL, "--host", HOST, *arguments]) == 2
    assert said in capsys.readouterr().err
