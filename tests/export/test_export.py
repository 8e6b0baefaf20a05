"""A placed model trains exactly as plain PyTorch does, from the placement file that people keep."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import rlplace
from rlplace import cuda
from rlplace.cli.main import main
from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName
from rlplace.export import check_export, matching_host, script
from rlplace.export.seeded_draws import SeededDraws
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Placement, Problem, Simulator
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.plan import Plan
from rlplace.search.rules import baselines

TINY = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


def square(output: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


@pytest.mark.parametrize("export", [rlplace.export.to_step, rlplace.export.to_module])
def test_devices_of_ops_are_no_placement_yet(export: Callable[..., object]) -> None:
    net = Net()
    graph = capture(net, torch.randn(4, 6), lambda output: output.square().mean(), "sgd")
    with pytest.raises(InvalidValue, match=r"of type ndarray.*Placement\.of\(problem, Simulator"):
        export(net, graph, np.zeros(graph.num_ops, dtype=np.int32))


@pytest.fixture(scope="module")
def placed() -> tuple[Net, torch.Tensor, OpGraph, Problem, Placement]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    graph = capture(model, x, square, "adam")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=12)
    devices = baselines.random(problem, np.random.default_rng(1))[0]
    return model, x, graph, problem, Placement.of(problem, Simulator(problem).plan(devices), "random")


def test_it_trains_for_many_steps_like_eager(placed: tuple[Net, torch.Tensor, OpGraph, Problem, Placement]) -> None:
    model, _, graph, problem, placement = placed
    eager = copy.deepcopy(model)
    optimizer = torch.optim.Adam(eager.parameters())
    step = rlplace.export.to_step(model, graph, placement, host=problem.host)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        batch = torch.randn(5, 6, generator=generator)
        loss = step(batch)
        optimizer.zero_grad()
        expected = square(eager(batch))
        expected.backward()
        optimizer.step()
        assert float(loss) == pytest.approx(expected.item(), rel=1e-4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in step.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-3, atol=1e-4)
        assert torch.equal(before[name], model.state_dict()[name]), "the user's own model was touched"
    trained = copy.deepcopy(model)
    step.copy_to(trained)
    assert torch.equal(trained.first.weight, step.state_dict()["first.weight"])
    step.close()


def test_check_in_float64_is_exact_to_rounding(
    placed: tuple[Net, torch.Tensor, OpGraph, Problem, Placement],
) -> None:
    *_, graph, problem, placement = placed
    result = check_export(graph, problem.host, placement.plan)
    assert result.ok
    assert result.max_loss_rel_diff < 1e-12
    assert result.max_param_rel_diff < 1e-9
    assert set(result.to_dict()) >= {"schema", "max_loss_rel_diff", "max_param_rel_diff", "ok"}


def test_mistakes_with_a_placed_step(placed: tuple[Net, torch.Tensor, OpGraph, Problem, Placement]) -> None:
    model, x, graph, problem, placement = placed
    step = rlplace.export.to_step(model, graph, placement, host=problem.host, other_shapes="refuse")
    with pytest.raises(InvalidValue, match="shapes that it was captured with"):
        step(torch.randn(7, 6))
    with pytest.raises(InvalidValue, match="inputs"):
        step(x, x)
    with pytest.raises(UnknownName, match=r"first\.weight"):
        step.load_state_dict({"first.weigth": torch.zeros(8, 6)})
    step.close()
    other = capture(nn.Linear(6, 2), x, square, "adam")
    with pytest.raises(FingerprintMismatch, match=graph.fingerprint):
        rlplace.export.to_step(model, other, placement, host=problem.host)


def with_dropout(micro_batches: int = 1) -> tuple[OpGraph, Host, Plan]:
    """A step with two dropouts, all of its ops on the first core but for the last layer's."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.25))
    graph = capture(model, torch.randn(8, 6), square, "sgd", micro_batches=micro_batches)
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    devices = np.array([module == "2" for module in graph.modules], dtype=np.int32) % problem.host.num_devices
    return graph, problem.host, Simulator(problem).plan(problem.check_placement(together(graph, devices)))


def together(graph: OpGraph, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """Every co-location class where the first of its ops is."""
    first: dict[int, int] = {}
    for op, label in enumerate(graph.colocation.tolist()):
        if label >= 0:
            devices[op] = first.setdefault(label, int(devices[op]))
    return devices


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_dropout_is_checked_with_the_draws_of_the_placed_step(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = with_dropout(micro_batches)
    checked = check_export(*step, num_steps=3)
    assert checked.ok
    assert checked.num_random_ops == checked.to_dict()["num_random_ops"] == 2 * micro_batches
    monkeypatch.setattr("rlplace.export.check.SeededDraws", partial(SeededDraws, seed=1))
    assert not check_export(*step, num_steps=3).ok


def test_random_ops_that_plain_pytorch_runs_otherwise_are_refused() -> None:
    graph, _, _ = with_dropout()
    draws = SeededDraws(graph, torch.device("cpu"))
    with pytest.raises(InvalidValue, match=r"model is 'randn in plain PyTorch'.*`model.eval\(\)`"), draws.of_step(0):
        torch.randn(3)
    with pytest.raises(InvalidValue, match=r"model is '0 random ops in plain PyTorch', expected 2"), draws.of_step(0):
        torch.ones(3)


def test_models_that_compute_parts_in_float32_are_checked_in_float64_throughout() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            scale = y.to(torch.float32).pow(2).mean(-1, keepdim=True).rsqrt().to(y.dtype)
            bias = torch.arange(8, dtype=torch.float32, device=y.device)
            return torch.softmax(y.float() * scale + bias, dim=-1, dtype=torch.float32).log()

    graph = capture(Careful(), torch.randn(5, 6), square, "adam")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    result = check_export(graph, problem.host, Simulator(problem).plan(baselines.single(problem, 0)))
    assert result.max_loss_rel_diff < 1e-12
    assert result.max_param_rel_diff < 1e-9


def test_placed_inference_returns_what_the_model_returns() -> None:
    model, x = Net().eval(), torch.randn(3, 6)
    graph = capture(model, x)
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    plan = Simulator(problem).plan(baselines.round_robin(problem))
    step = rlplace.export.to_step(model, graph, Placement.of(problem, plan), host=problem.host)
    torch.testing.assert_close(step(x), model(x).detach())
    step.close()


@pytest.mark.parametrize("progress", [None, True])
def test_place_does_it_all_in_one_call(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    step = rlplace.place(model, x, square, "sgd", budget_s=1.0, progress=progress)
    said = capsys.readouterr().err
    assert [line in said for line in ("profiling ", "about 0:", "measuring the final table")] == [bool(progress)] * 3
    assert repr(step).startswith("PlacedModel(OpGraph(")
    assert float(step(x)) == pytest.approx(square(model(x)).item(), rel=1e-5)
    step.close()


@pytest.mark.parametrize("word", ["auto", "cores:3", "cores:2x4", "cores:1x8"])
@pytest.mark.parametrize("gangs", [False, True])
def test_the_host_of_a_placement_is_found_again_however_its_cores_were_shared_out(
    word: str, gangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    host = resolve_host(word, gangs=gangs)
    names = tuple(device.name for device in host.devices)
    plan = Plan(*(np.zeros(0, dtype=np.int32) for _ in range(4)))
    assert matching_host(Placement(plan, "graph", host.fingerprint, names)) == host
    with pytest.raises(FingerprintMismatch, match="another"):
        matching_host(Placement(plan, "graph", "another", names))


def test_a_step_with_casts_cannot_be_checked_in_float64() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(Net(), torch.ones(5, 6), square, "sgd")
    plan = Plan(np.zeros(graph.num_ops, dtype=np.int32), *(np.zeros(0, dtype=np.int32) for _ in range(3)))
    with pytest.raises(InvalidValue, match="captured under autocast"):
        check_export(graph, Host.detect("cores"), plan)


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
@pytest.mark.parametrize("word", ["auto", "cuda", "cuda/2", "cuda/16", "auto+cpu", "cuda+cpu", "cuda/4+cpu"])
def test_the_host_of_a_placement_is_found_again_among_gpus(
    word: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cuda, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))
    host = resolve_host(word)
    names = tuple(device.name for device in host.devices)
    plan = Plan(*(np.zeros(0, dtype=np.int32) for _ in range(4)))
    found = matching_host(Placement(plan, "graph", host.fingerprint, names))
    assert found == dataclasses.replace(host, name=found.name)  # `auto` is `cuda` where there are GPUs
    cores = resolve_host("cores")
    assert matching_host(Placement(plan, "graph", cores.fingerprint, ("a",) * cores.num_devices)) == cores


def test_the_script_is_short_and_valid() -> None:
    text = script("nmt@small", default_size="small", seed=3)
    compile(text, "step.py", "exec")
    assert len(text.splitlines()) <= 28


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["train", TINY, "--host", "cores", "--budget", "4s", "--run", str(folder), "--json"]
    assert main([*arguments, "--groups", "40"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == 1
    rows = {row["method"]: row for row in printed["rows"]}
    assert list(rows) == [
        *("single", "blocks", "round-robin", "expert", "eft", "heft"),
        *("learned", "portfolio", "eager"),
    ]
    assert rows["learned"]["measured"] >= rows["portfolio"]["measured"] > 0
    assert rows["eager"]["placement"] is False
    assert all(row["status"] == "ok" and row["step_time_s"] > 0 and row["spread_s"] >= 0 for row in printed["rows"])
    placed_rows = [row for row in printed["rows"] if row["placement"]]
    assert printed["best"]["step_time_s"] == min(row["step_time_s"] for row in placed_rows)
    kept = json.loads((folder / "result.json").read_text())
    assert {key: kept[key] for key in printed} == printed
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "problem.json",
        "result.json",
        "placement.json",
        "host_model.json",
        "timeline.json",
        "timeline.png",
        "best_so_far.png",
        "search.json",
        "explanation.json",
        "report.html",
        "step.py",
    }
    assert main(["export", str(folder), "--check", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"]
    assert checked["max_loss_rel_diff"] <= 1e-5
    assert checked["max_param_rel_diff"] <= 1e-4
    assert main(["export", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].endswith("step.py")
    done = subprocess.run(
        [sys.executable, str(folder / "step.py")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1].removeprefix("tensor(").rstrip(")")) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    for command in ("simulate", "measure"):
        arguments = [command, TINY, "--host", "cores", "--placement", str(folder / "placement.json"), "--json"]
        assert main(arguments) == 0
        timed = json.loads(capsys.readouterr().out)
        assert timed["status"] == "ok"
        assert timed["step_time_s"] > 0
        assert timed["lower_bound_s"] > 0
        if command == "simulate":  # what is measured may be under a bound from costs that a busier minute gave
            assert timed["lower_bound_s"] <= timed["step_time_s"] * (1 + 1e-9)
        assert len(timed["peak_bytes"]) == Host.detect("cores").num_devices
    assert (
        main(["simulate", "nmt@layers=1,units=8", "--host", "cores", "--placement", str(folder / "placement.json")])
        == 2
    )
    assert "made for another graph" in capsys.readouterr().err
    assert main(["train", TINY, "--run", str(folder)]) == 2


@pytest.mark.slow
def test_a_users_function_is_imported_only_if_passed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_users_model.py").write_text(
        "import torch\ndef work():\n    return torch.nn.Linear(4, 2), torch.ones(3, 4), lambda y: y.sum(), 'sgd'\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a_users_model:work", "--host", "cores", "--budget", "1s", "--run", "r", "--quiet"]) == 0
    assert main(["export", "r", "--check"]) == 2
    assert "--workload a_users_model:work" in capsys.readouterr().err
    assert main(["export", "r", "--check", "--workload", "a_users_model:work"]) == 0


@pytest.mark.slow
def test_a_simulated_host_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", TINY, "--host", "2xK80", "--budget", "2s", "--run", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert "simulated" in said.err
    rows = {row["method"]: row for row in json.loads(said.out)["rows"]}
    assert rows["eager"]["status"] == "skipped"
    assert "simulated" in rows["eager"]["why"]
    assert rows["policy"]["status"] == "ok"
