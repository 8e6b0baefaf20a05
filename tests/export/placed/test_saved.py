"""A run that was killed goes on from its file as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import HOST, batches, captured, classifier, placed
from placed_steps import single
from torch import nn

from rlplace.errors import FileProblem
from rlplace.export import PlacedModel
from rlplace.graphs import OptimizerSpec

WORK = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from loops import batches, captured, classifier, placed

step = placed(captured(classifier(dropout=0.5), "adamw"), seed=7)
for number, (x, labels) in enumerate(batches(6)):
    step(x, targets=labels)
    step.lr = 0.01 / (number + 1)
    if number == 2:
        step.save({path!r})
        print("saved", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def train(step: PlacedModel, first: int, last: int) -> list[float]:
    losses = []
    for number, (x, labels) in list(enumerate(batches(6)))[first:last]:
        losses.append(float(step(x, targets=labels)))
        step.lr = 0.01 / (number + 1)
    return losses


def state_of(step: PlacedModel) -> dict[str, torch.Tensor]:
    moments = {
        f"{position} {key}": value
        for position, state in step.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    return {**step.state_dict(), **moments}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    code = WORK.format(tests=str(Path(__file__).parents[2]), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "saved\n", done.stderr
    assert done.returncode == -signal.SIGKILL
    graph = captured(classifier(dropout=0.5), "adamw")
    straight, resumed = placed(graph, seed=7), placed(graph, seed=7)
    losses = train(straight, 0, 6)
    resumed.load(path)
    assert resumed.num_steps == 3
    assert resumed.lr == 0.01 / 3
    assert train(resumed, 3, 6) == losses[3:]
    expected = state_of(straight)
    for name, value in state_of(resumed).items():
        assert torch.equal(value, expected[name]), name
    straight.close()
    resumed.close()


def test_another_placement_goes_on_too(tmp_path: Path) -> None:
    graph = captured(classifier(), "momentum")
    one, other = placed(graph), PlacedModel(graph, HOST, single(graph))
    train(one, 0, 3)
    one.save(tmp_path / "s.safetensors")
    other.load(tmp_path / "s.safetensors")
    assert train(other, 3, 6) == train(one, 3, 6)
    one.close()
    other.close()


def test_what_schedulers_set_is_kept(tmp_path: Path) -> None:
    graph = captured(classifier(), OptimizerSpec("adam", lr=0.1))
    one, other = placed(graph), placed(graph)
    one.optimizer.param_groups[0]["lr"] = 0.025
    one.save(tmp_path / "s.safetensors")
    other.optimizer.param_groups[0]["lr"] = 0.3
    other.load(tmp_path / "s.safetensors")
    assert other.optimizer.param_groups[0]["lr"] == other.lr == 0.025
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "of a step with optimizer adam, this one has sgd"),
        ({"optimizer": None}, "of a step with optimizer adam, this one has None"),
        ({"seed": 1}, "of a step with seed 0, this one has 1"),
        ({"dtype": torch.float32}, r"model\.first\.weight is torch\.float64 \(8, 6\), here torch\.float32"),
    ],
)
def test_another_step_is_refused_and_nothing_changes(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = tmp_path / "s.safetensors"
    with placed(captured(classifier(), "adam")) as step:
        step.save(path)
    model = classifier(dtype=options.get("dtype", torch.float64))
    if options.get("dtype") is not None:
        from rlplace.graphs import capture

        (x, labels), *_ = batches(1)
        graph = capture(model, x.float(), torch.nn.functional.cross_entropy, "adam", targets=labels)
    else:
        graph = captured(model, options.get("optimizer", "adam"))
    with placed(graph, seed=options.get("seed", 0)) as other:
        before = other.state_dict()
        with pytest.raises(FileProblem, match=message):
            other.load(path)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_no_file_and_another_file_are_told(tmp_path: Path) -> None:
    with placed(captured(classifier(), "adam")) as step:
        with pytest.raises(FileProblem, match="cannot be read"):
            step.load(tmp_path / "none")
        (tmp_path / "text").write_text("no tensors", encoding="utf-8")
        with pytest.raises(FileProblem, match="cannot be read"):
            step.load(tmp_path / "text")
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, tmp_path / "other")
        with pytest.raises(FileProblem, match=r"no state of a placed step of schema 2: `step\.save"):
            step.load(tmp_path / "other")


def test_a_file_of_torch_save_is_refused_with_what_it_is_for(tmp_path: Path) -> None:
    torch.save(classifier().state_dict(), tmp_path / "eager.pt")
    with placed(captured(classifier())) as step, pytest.raises(FileProblem, match=r"load_state_dict\(torch\.load"):
        step.load(tmp_path / "eager.pt")


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_file_of_draws_by_ops_is_refused_where_the_step_draws(p: float, tmp_path: Path) -> None:
    import json

    from safetensors import safe_open
    from safetensors.torch import save_file

    graph = captured(nn.Sequential(classifier(), nn.Dropout(p)), "adam")
    with placed(graph) as step:
        step.save(tmp_path / "now")
        counts = step.checkpoint()["rlplace"]
    with safe_open(tmp_path / "now", framework="pt") as file:
        told = json.loads(file.metadata()["rlplace"]) | {"schema": 1, "num_steps": 3}
        save_file({key: file.get_tensor(key) for key in file.keys()}, tmp_path / "old", {"rlplace": json.dumps(told)})  # noqa: SIM118
    with placed(graph) as step:
        if p:
            with pytest.raises(FileProblem, match="random ops drew other numbers"):
                step.load(tmp_path / "old")
            with pytest.raises(FileProblem, match="random ops drew other numbers"):
                step.restore({**step.checkpoint(), "rlplace": {"num_steps": counts["num_steps"]}})
        else:
            step.load(tmp_path / "old")
            assert step.num_steps == 3
            step.restore({**step.checkpoint(), "rlplace": {"num_steps": counts["num_steps"]}})
            assert step.num_steps == 0
