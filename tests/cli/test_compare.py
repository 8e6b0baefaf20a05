"""`rlplace compare`: what it prints, what it saves, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from published_splits import load_split

from rlplace.cli.main import main
from rlplace.compare import CompareConfig
from rlplace.graphs.formats.published import load_dnn_partitioning
from rlplace.measure import Problem
from rlplace.measure.placement import load_placement
from rlplace.partitioning.objectives import MaxLoad
from rlplace.search.task import Task
from rlplace.session.calibrate import Known

TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"
PUBLISHED = {
    "maxSizePerFPGA": 100_000_000, "maxFPGAs": 2, "maxCPUs": 1,
    "nodes": [
        {"id": k, "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 40_000_000}
        for k in range(4)
    ],
    "edges": [{"sourceId": k, "destId": k + 1, "cost": 0.25} for k in range(3)],
}  # fmt: skip
"""A chain of four: two on each accelerator, cut once, is 2.25 ms; a device holds two at most."""


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compare", *arguments, "--json", "--quiet"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(PUBLISHED), encoding="utf-8")
    return path


def test_a_simulated_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    methods = "single,blocks,random,ddp"
    result = told(
        capsys,
        TINY,
        "--host",
        "4xV100-pcie",
        "--methods",
        methods,
        "--evaluations",
        "16",
        "--seeds",
        "2",
        "--save",
        str(tmp_path / "kept"),
        "--plot",
        str(tmp_path / "pictures" / "best.png"),
    )
    assert result["schema"] == 1
    height, width, _ = imread(tmp_path / "pictures" / "best.png").shape
    assert width > height > 500
    assert result["lower_bound_s"] > 0
    rows = {(row["method"], row["seed"]): row for row in result["rows"]}
    assert set(rows) == {("single", 0), ("blocks", 0), ("random", 0), ("random", 1), ("ddp", 0)}
    assert rows["random", 1]["evaluations"] == 16
    assert all(row["step_time_s"] >= result["lower_bound_s"] for row in rows.values() if row["placement"])
    assert not rows["ddp", 0]["placement"]
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == [f"{name}.placement.json" for name in ("blocks-0", "random-0", "random-1", "single-0")]
    assert load_placement(tmp_path / "kept" / "single-0.placement.json").method == "single"
    for row in (rows["single", 0], rows["random", 1]):
        evaluations, measured, seconds, step_time_s = row["history"][-1]
        assert evaluations <= row["evaluations"]
        assert (measured, step_time_s) == (0, row["step_time_s"])
        assert 0 < seconds <= row["plan_s"]
    assert rows["ddp", 0]["history"] == []


@pytest.mark.slow
def test_three_seeds_are_three_searches_of_one_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--host", "4xV100-pcie", "--methods", "random,eft", "--evaluations", "4")
    told_of = [told(capsys, TINY, *options, "--seed", str(seed)) for seed in range(3)]
    rows = [{row["method"]: row for row in result["rows"]} for result in told_of]
    assert [row["random"]["seed"] for row in rows] == [0, 1, 2]
    assert len({row["random"]["step_time_s"] for row in rows}) == 3
    assert len({row["eft"]["step_time_s"] for row in rows}) == 1
    assert [(result["seed"], result["workload_seed"]) for result in told_of] == [(0, 0), (1, 0), (2, 0)]
    other = told(capsys, TINY, *options, "--workload-seed", "7")
    assert (other["seed"], other["workload_seed"]) == (0, 7)
    assert [row["step_time_s"] for row in other["rows"]] == [row["step_time_s"] for row in told_of[0]["rows"]]


def test_a_published_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, published: Path) -> None:
    result = told(
        capsys, str(published), "--objective", "max-load", "--evaluations", "500", "--save", str(tmp_path / "kept")
    )
    assert result["lower_bound_s"] is None
    assert 0 < result["lower_bound_ms"] <= 2.25 * (1 + 1e-9)
    best = min(row["value_ms"] for row in result["rows"] if row["status"] == "ok")
    assert best == pytest.approx(2.25)
    assert all(row["step_time_s"] is None for row in result["rows"])
    record = load_dnn_partitioning(published)
    split = load_split(tmp_path / "kept" / "portfolio-0.split.json", record)
    assert MaxLoad(record).values_ms(split[None])[0] == pytest.approx(2.25)
    assert load_placement(tmp_path / "kept" / "portfolio-0.placement.json").devices.tolist() == split.tolist()


def test_a_published_file_can_also_be_simulated(capsys: pytest.CaptureFixture[str], published: Path) -> None:
    plot = published.with_name("chain.png")
    result = told(capsys, str(published), "--methods", "single,heft", "--evaluations", "5", "--plot", str(plot))
    assert imread(plot).size
    assert result["objective"] == "latency"
    assert {row["method"]: row["status"] for row in result["rows"]}["heft"] == "ok"


def test_pins_hold(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told(
        capsys,
        TINY,
        "--host",
        "4xV100-pcie",
        "--methods",
        "random",
        "--evaluations",
        "4",
        "--pin",
        "encoder.*=cuda:2",
        "--save",
        str(tmp_path),
    )
    placement = json.loads((tmp_path / "random-0.placement.json").read_text(encoding="utf-8"))
    assert 2 in placement["op_device"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nmt", "--methods", "aneal"], ["aneal", "anneal"]),
        (["nmt", "--true", "hard:0", "--measured", "4", "--trace"], ["benchmarks/hidden_truth.py"]),
        (["nmt", "--methods", " , "], ["methods"]),
        (["nmt", "--objective", "maxload"], ["maxload", "max-load"]),
        (["nmt", "--objective", "max-load", "--host", "4xV100-pcie"], ["max-load", "published"]),
        (["nmt", "--evaluations", "0"], ["evaluations"]),
        (["nmt", "--seconds", "-1"], ["seconds"]),
        (["nmt", "--seeds", "0"], ["seeds"]),
        (["nmt", "--host", "4xV100"], ["4xV100-pcie"]),
        (["nmt", "--host", "4xV100-pcie", "--plot", "best.svg"], ["best.svg", ".png"]),
        (["nmt", "--host", "4xV100-pcie", "--plot", "chain.json/best.png"], ["chain.json", "folder for pictures"]),
        (["chain.json", "--objective", "max-load", "--plot", "best.png"], ["plot", "max-load"]),
        (["nmt", "--host", "4xV100-pcie", "--measured", "4"], ["measured", "simulated"]),
        (["nmt", "--host", "cores", "--measured", "4", "--methods", "eft"], ["measured", "none without learned"]),
        (["nmt", "--host", "cores", "--measured", "4", "--cluster", "auto"], ["measured", "beside a cluster"]),
        (["no_such.json"], ["no_such.json", "no such"]),
        (["chain.json", "--host", "4xV100-pcie"], ["host", "carries its own"]),
        (["chain.json", "--objective", "max-load", "--methods", "cem"], ["cem"]),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(published.parent)
    assert main(["compare", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err


def test_micro_batches_are_not_chosen_for_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    """They are chosen by latency: what is best for that need not be for the other."""
    asked = [TINY, "--host", "4xV100-pcie", "--objective", "throughput", "--micro-batches", "auto"]
    assert main(["compare", *asked]) == 2
    assert "--micro-batches K" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "nowhere"], ["cluster", "nowhere", "HOST:PORT"]),
        (["--cluster", "127.0.0.1:1"], ["127.0.0.1:1", "ray start --head"]),
    ],
)
def test_a_cluster_that_is_not_there(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    assert main(["compare", TINY, "--host", "4xV100-pcie", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in words:
        assert word in said


def test_a_word_about_traces_that_has_no_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", TINY, "--host", "4xV100-pcie", "--no-trace"]) == 2
    assert "no_trace is True, expected False" in capsys.readouterr().err


def test_a_published_file_is_solved_here(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(published), "--objective", "max-load", "--cluster", "auto"]) == 2
    assert "off with such a file" in capsys.readouterr().err


def test_a_method_that_raises_is_a_row_and_exits_with_1_only_where_nothing_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(task: Task) -> None:
        raise ZeroDivisionError("no device is left")

    monkeypatch.setattr("rlplace.search.rules.baselines.solve_blocks", failing)
    command = (TINY, "--host", "4xV100-pcie", "--methods")
    single, blocks = told(capsys, *command, "single,blocks")["rows"]
    assert (single["status"], blocks["status"]) == ("ok", "error")
    assert "ZeroDivisionError" in blocks["why"]
    assert "Traceback" in blocks["traceback"]
    assert main(["compare", *command, "blocks", "--json"]) == 1
    output = capsys.readouterr()
    assert [row["status"] for row in json.loads(output.out)["rows"]] == ["error"]
    assert output.err.splitlines()[-1].startswith(
        "rlplace: failed: no method found a placement that runs; blocks: ZeroDivisionError: no device is left ("
    )
    assert "Traceback" not in output.err


def test_quiet_leaves_progress_out_and_the_table_unless_json_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", TINY, "--host", "4xV100-pcie", "--methods", "single", "--quiet"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "lower bound" in said.out
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("options", "asked"), [((), (4, True)), (("--no-trace",), (12, False))])
def test_on_this_machine_all_rows_get_the_same_traced_calibration(
    options: tuple[str, ...], asked: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    told: list[tuple[Problem, bool, Known | None]] = []

    class Stopped(Exception):
        """It is known what is asked for."""

    def calibrated(problem: Problem, count: int, *, is_traced: bool, **_: Any) -> tuple[Problem, Known]:
        seen.append((count, is_traced))
        return slow(problem), Known(problem, [], [])

    def slow(problem: Problem) -> Problem:
        costs = dataclasses.replace(problem.costs, op_time_s=problem.costs.op_time_s + 1.0)
        return dataclasses.replace(problem, costs=costs)

    def compare(problem: Problem, config: CompareConfig, *, known: Known | None, **_: Any) -> None:
        told.append((problem, config.is_traced, known))
        raise Stopped

    monkeypatch.setattr("rlplace.compare.run_compare.calibrated", calibrated)
    monkeypatch.setattr("rlplace.compare.run_compare.compare", compare)
    with pytest.raises(Stopped):
        main(["compare", TINY, "--host", "cores:1", "--in-process", "--methods", "single", *options])
    assert seen == [asked]
    ((problem, is_traced, known),) = told
    assert is_traced is asked[1]
    assert known is not None
    assert problem.costs.op_time_s.min() >= 1.0 > known.problem.costs.op_time_s.min()
