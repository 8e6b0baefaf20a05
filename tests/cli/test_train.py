"""`rlplace train`: how ops are grouped and where they may be, the run folder, and a model that cannot be captured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from micrographs import fork_join

from rlplace.cli.main import main
from rlplace.graphs.formats import save_graph
from rlplace.measure.host_model.scales import load_priors, save_priors
from rlplace.session.session import Session
from rlplace.training.elastic.placed_again import read_known
from rlplace.training.train_and_resume import reopen

WORKLOAD = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


def train(run: Path, *flags: str) -> int:
    return main(["train", WORKLOAD, "--host", "4xV100-pcie", "--budget", "0.5s", "--run", str(run), "--quiet", *flags])


def test_flags_reach_the_placement_and_the_record(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = "--grouping colocation --groups 9 --acyclic --pin encoder=cuda:1 --pin decoder.embedding=cuda:* "
    flags += "--exclude projection=cuda:0 --together decoder.attention.combine,projection --seed 5 --workload-seed 7"
    assert train(run, *flags.split()) == 0
    config, problem, placement = (
        json.loads((run / f"{name}.json").read_text()) for name in ("config", "problem", "placement")
    )
    assert (config["train"]["seed"], config["workload_seed"]) == (5, 7)
    assert "seed=7" in (run / "step.py").read_text()
    assert read_known(run).session.request.workload_seed == 7
    with Session.read(run) as session:
        assert reopen(session)[0].request.workload_seed == 7
    assert config["train"]["grouping"] == "colocation"
    assert config["train"]["constraints"] == {
        "pins": [["encoder", "cuda:1"], ["decoder.embedding", "cuda:*"]],
        "exclusions": [["projection", "cuda:0"]],
        "together": [["decoder.attention.combine", "projection"]],
    }
    assert problem["grouping"]["rule"] == "colocation:9"
    assert "gradient" in problem["grouping"]["dropped"]
    devices = np.array(placement["op_device"])
    names = problem["graph"]["names"]
    of = {name: devices[index] for index, name in enumerate(names)}
    assert of["encoder.layers.0.gates.weight"] == of["update_encoder.embedding.weight"] == 1
    assert of["projection.weight"] == of["update_decoder.attention.combine.weight"] != 0
    allowed = np.array(problem["allowed"])
    assert allowed[problem["grouping"]["op_group"], devices].all()


@pytest.mark.slow
def test_the_run_folder_shows_how_the_searches_went(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "--method", "anneal") == 0
    height, width, _ = imread(run / "best_so_far.png").shape
    assert width > height > 500
    rows = {row["method"]: row for row in json.loads((run / "result.json").read_text())["rows"]}
    for name in ("single", "heft", "anneal", "portfolio"):
        assert rows[name]["history"][-1][3] == pytest.approx(rows[name]["step_time_s"], rel=1e-12)
        assert rows[name]["history"][-1][0] <= rows[name]["placements"]


@pytest.mark.slow
def test_the_record_says_which_priors_were_expected(tmp_path: Path) -> None:
    priors = tmp_path / "priors.json"
    save_priors(load_priors(), priors)
    assert train(tmp_path / "run", "--method", "anneal", "--priors", str(priors)) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["search"]["priors"] == str(priors)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grouping", "modul"], "did you mean 'module'"),
        (["--pin", "encoder"], "expected PATTERN=DEVICE"),
        (["--pin", "encoder=cuda:7"], "unknown device 'cuda:7'"),
        (["--exclude", "encodr=cuda:1"], "Did you mean encoder"),
        (["--pin", "encoder=cuda:1", "--exclude", "encoder=cuda:1"], "rule out every device"),
    ],
)
def test_mistakes_are_named_and_leave_no_folder(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_existing_run_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    assert main(["train", "nmt", "--host", "cores", "--run", str(tmp_path / "run")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "run" / "precious.txt").read_text() == "mine"


def test_a_model_that_cannot_be_captured_names_op_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_branchy_model.py").write_text(
        "import torch\n"
        "class Branchy(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n"
        "def work():\n"
        "    return Branchy(), torch.ones(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a_branchy_model:work", "--host", "cores", "--run", "r", "--budget", "1s"]) == 2
    said = capsys.readouterr().err
    assert "a_branchy_model.py:4" in said
    assert "_local_scalar_dense" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_quiet_leaves_progress_out_and_the_table_unless_json_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "text", "--method", "anneal") == 0
    said = capsys.readouterr()
    assert "vs single" in said.out.splitlines()[1]
    assert "\nbest: " in said.out
    assert said.err == ""
    assert train(tmp_path / "json", "--method", "anneal", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["schema"] == 1
    assert said.err == ""


@pytest.mark.slow
def test_a_budget_with_a_plus_is_so_much_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def budget_s() -> float:
        return float(json.loads((run / "config.json").read_text())["asked"]["train"]["budget_s"])

    run, graph = tmp_path / "run", str(tmp_path / "graph.json")
    save_graph(fork_join(2, 3, 100), graph)
    start = ["train", graph, "--host", "2xK80", "--method", "portfolio", "--quiet", "--budget"]
    assert main([*start, "0.5s", "--run", str(run)]) == 0
    rows = json.loads((run / "result.json").read_text())["rows"]
    again = ["train", graph, "--resume", str(run), "--quiet", "--budget"]
    assert main([*again, "0.25s"]) == 2
    assert "--budget +0.25s" in capsys.readouterr().err
    assert main([*again, "+0.25s"]) == 0
    assert budget_s() == 0.75
    more = json.loads((run / "result.json").read_text())["rows"]
    placements = ({row["method"]: row["placements"] for row in each}["portfolio"] for each in (rows, more))
    assert next(placements) < next(placements)
    assert main([*again, "+1s", "--host", "4xV100-pcie"]) == 2
    assert main([*start, "+1s", "--run", str(tmp_path / "new")]) == 2
    assert main([*again, "+"]) == 2
    assert budget_s() == 0.75
