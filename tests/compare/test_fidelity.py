"""`rlplace fidelity` from end to end, on a model of a few ops; how good the figures are is for benchmarks/ to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.measure.timing.threads import usable_cores


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_every_figure_is_there_and_in_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "fidelity.png"
    arguments = [
        "fidelity",
        "nmt@layers=1,units=16,batch=4,steps=3,vocab=50",
        "--host",
        "cores:2",
        "--placements",
        "8",
        "--fit",
        "4",
        "--plot",
        str(plot),
        "--json",
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == 1
    for name in ("spearman", "spearman_best_quartile", "spearman_ceiling"):
        assert result[name] is None or -1.0 <= result[name] <= 1.0
    for name in ("median_abs_rel_error", "p90_abs_rel_error", "pick_regret", "peak_bytes_max_rel_error"):
        assert result[name] >= 0.0
    assert result["num_placements"] == 8
    assert len(result["simulated_s"]) == len(result["measured_s"]) == len(result["kinds"]) == 8
    assert result["calibration"]["num_fitted"] == 4
    assert isinstance(result["calibration"]["learned"], list)
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize("arguments", [["--placements", "3"], ["--fit", "1"]])
def test_too_few_placements_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelity", "nmt", "--host", "cores", *arguments]) == 2
    assert "placements" in capsys.readouterr().err
