"""The script for torchrun trains as plain PyTorch does, and its checkpoints go on anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from core_hosts import core_host
from numpy.typing import NDArray
from run_folders import placed_run
from spmd_ranks import eager, launched, reader, reader_batches, reader_graph, scattered
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from rlplace.cli.main import main
from rlplace.export import PlacedModel
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.session.folder import RunFolder
from rlplace.session.setup import WHOLE, CutOptions

WORK_NAME = "a_work_of_ranks"
WORK = """
import sys
sys.path.insert(0, {tests!r})
from torch.nn import functional
from spmd_ranks import reader, reader_batches

def work():
    rows, late, labels = reader_batches(1)[0]
    return reader(), (rows, late), functional.cross_entropy, "adamw", labels

def inference():
    return work()[:2]
"""
TWO_MACHINES = Path(__file__).resolve().parents[2] / "scripts" / "two_machines.py"
TOLERANCE = 1e-10


def run_of(
    path: Path, graph: OpGraph, host: Host, devices: NDArray[np.int32], cut: CutOptions = WHOLE, name: str = "work"
) -> RunFolder:
    return placed_run(path, f"a_work_of_ranks:{name}", graph, host, devices, cut=cut)


def exported(path: Path, num_ranks: int, micro_batches: int = 1) -> RunFolder:
    """A run with every op anywhere, with its script."""
    graph = reader_graph(reader(), micro_batches)
    cut = WHOLE if micro_batches == 1 else CutOptions(micro_batches, (0, 0, 0))
    run = run_of(path, graph, core_host(num_ranks), scattered(graph, num_ranks, seed=num_ranks).devices, cut)
    assert main(["export", str(run.root), "--format", "torchrun", "--workload", "a_work_of_ranks:work"]) == 0
    return run


def losses_of(run: RunFolder, num_ranks: int, *arguments: str) -> list[float]:
    return losses_in(launched(run.path("torchrun.py"), num_ranks, *arguments))


def losses_in(printed: str) -> list[float]:
    return [float(line.split()[1]) for line in printed.splitlines() if line[:1].isdigit()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_four_ranks_goes_on_with_two_on_cores_and_in_plain_pytorch(folder: Path) -> None:
    (batch,) = reader_batches(1)
    rows, late, labels = batch
    losses, trained = eager(reader(), [batch] * 8)
    kept = ("--checkpoints", str(folder / "kept"), "--steps")
    four = exported(folder / "four", 4, micro_batches=3)
    assert losses_of(four, 4, *kept, "2", "--every", "1") == pytest.approx(losses[:2], rel=TOLERANCE)
    two = exported(folder / "two", 2)
    assert losses_of(two, 2, *kept, "4", "--clip", "1e9") == pytest.approx(losses[2:4], rel=TOLERANCE)
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["1", "2", "4"]

    graph = reader_graph(reader(), micro_batches=3)
    with PlacedModel(graph, "cores", scattered(graph, 1)) as step:
        state = step.checkpoint()
        dcp.load(state, checkpoint_id=folder / "kept" / "4")
        step.restore(state)
        assert step.num_steps == 4
        found = [float(step(rows, late, targets=labels)) for _ in range(2)]
        dcp.save(step.checkpoint(), checkpoint_id=folder / "kept" / "6", no_dist=True)
    assert found == pytest.approx(losses[4:6], rel=TOLERANCE)

    model, flat = reader(), StateDictOptions(flatten_optimizer_state_dict=True)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.unused.requires_grad_(requires_grad=False)  # no gradient reaches it: it has no optimizer state
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=flat)}
    dcp.load(state, checkpoint_id=folder / "kept" / "6")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=flat)
    found, _ = eager(model, [batch] * 2, optimizer)
    assert found == pytest.approx(losses[6:], rel=TOLERANCE)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_two_machines_train_as_eager_does(folder: Path, micro_batches: int) -> None:
    run = exported(folder / "run", 2, micro_batches)
    words = ["--cores", "0", "0", "--limit", "300", "--", str(run.path("torchrun.py")), "--steps", "3"]
    command = [sys.executable, str(TWO_MACHINES), *words, "--checkpoints", str(folder / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    losses, trained = eager(reader(), reader_batches(1) * 3)
    assert losses_in(done.stdout) == pytest.approx(losses, rel=TOLERANCE)
    state = {"model": {name: torch.zeros_like(value) for name, value in trained.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "kept" / "3")
    torch.testing.assert_close(state["model"], dict(trained.state_dict()), rtol=TOLERANCE, atol=TOLERANCE)


def test_the_script_says_how_it_is_started(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(folder / "run", 2, micro_batches=3)
    text = run.path("torchrun.py").read_text()
    compile(text, "torchrun.py", "exec")
    assert "micro_batches=3, batch_dims=(0, 0, 0), loss='joined'" in text
    assert "The ranks are, in order: cpu:0, cpu:1." in text
    assert f"torchrun --nproc-per-node 2 {run.path('torchrun.py')}" in capsys.readouterr().err


def test_an_inference_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, late, _ = reader_batches(1)[0]
    graph = capture(reader(), (rows, late))
    run = run_of(folder / "run", graph, core_host(2), np.zeros(graph.num_ops, dtype=np.int32), name="inference")
    command = ["export", str(run.root), "--format", "torchrun", "--workload", "a_work_of_ranks:inference"]
    assert main(command) == 2
    assert "workload is 'an inference', expected a training step with an optimizer" in capsys.readouterr().err
    assert not run.path("torchrun.py").exists()


@pytest.mark.parametrize("is_used", [True, False])
def test_a_gang_is_no_process(folder: Path, capsys: pytest.CaptureFixture[str], is_used: bool) -> None:
    graph = reader_graph(reader())
    devices = np.full(graph.num_ops, 2 if is_used else 1, dtype=np.int32)
    run = run_of(folder / "run", graph, core_host(2, has_gang=True), devices)
    command = ["export", str(run.root), "--format", "torchrun", "--workload", "a_work_of_ranks:work"]
    assert main(command) == (2 if is_used else 0)
    said = capsys.readouterr().err
    assert ("devices is 'cpu:all', expected whole GPUs, or cores" in said) == is_used
    assert ("--nproc-per-node 2 " in said) != is_used
