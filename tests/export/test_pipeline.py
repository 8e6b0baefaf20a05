"""The script trains in several processes as the whole model does in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from core_hosts import core_host
from pipelined_models import SequenceFirst, Skipping, sequences, sequences_loss, skipping_batch, skipping_loss
from run_files import change
from run_folders import placed_run
from safetensors.torch import load_file
from torch import nn

from rlplace.cli.main import main
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.session.setup import CutOptions
from rlplace.workloads import build

WORK_NAME = "a_pipelined_work"
WORK = """
import sys
sys.path.insert(0, {tests!r})
import torch
from pipelined_models import SequenceFirst, Skipping, sequences, sequences_loss, skipping_batch, skipping_loss

def work():
    late, rows, labels = skipping_batch()
    return Skipping(), (late, rows), skipping_loss, "momentum", labels

def contrastive():
    late, rows, labels = skipping_batch()
    return Skipping(), (late, rows), lambda output: (output @ output.T).logsumexp(1).mean(), "sgd"

def odd():
    late, rows, labels = skipping_batch(batch=7)
    return Skipping(), (late, rows), skipping_loss, "sgd", labels

def inference():
    return Skipping(), skipping_batch()[:2]

def sequence_first():
    tokens, labels = sequences()
    return SequenceFirst(), tokens, sequences_loss, "sgd", labels
"""


def seeded() -> Skipping:
    torch.manual_seed(0)
    return Skipping()


def run_of(folder: Path, graph: OpGraph, workload: str, num_devices: int = 2) -> RunFolder:
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    return placed_run(folder / "run", workload, graph, core_host(num_devices), devices)


def skipping_run(folder: Path, num_devices: int = 2) -> RunFolder:
    late, rows, labels = skipping_batch()
    graph = capture(seeded(), (late, rows), skipping_loss, "momentum", targets=labels)
    return run_of(folder, graph, "a_pipelined_work:work", num_devices)


def launched(run: RunFolder, num_stages: int, *, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the model's state after them."""
    save = run.root / "trained"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_stages)]
    command += [str(run.path("pipeline.py")), "--steps", str(steps), "--save", str(save)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:1].isdigit()]
    files = sorted(save.glob("*.safetensors"))
    assert len(files) == num_stages
    state: dict[str, torch.Tensor] = {}
    for path in files:
        for name, value in load_file(path).items():
            torch.testing.assert_close(state.setdefault(name, value), value)  # copies stay alike
    return losses, state


def trained(model: nn.Module, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    late, rows, labels = skipping_batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = skipping_loss(model(late, rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "steps"), [(2, 1), (3, 3)])
def test_processes_train_as_one_does(
    folder: Path, num_stages: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = skipping_run(folder, num_stages)
    command = ["export", str(run.root), "--format", "pipeline", "--workload", "a_pipelined_work:work", "--json"]
    assert main(command) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert (figures["schema"], figures["format"], figures["costs"]) == (1, "pipeline", "profiled")
    assert figures["schedule"] in ("gpipe", "1f1b")
    assert figures["num_micro_batches"] in (2, 4, 8)
    assert figures["ratio"] == pytest.approx(figures["step_s"] / figures["placement_step_s"])
    assert {one["device"] for one in figures["stages"]} <= {f"cpu:{index}" for index in range(num_stages)}
    assert "of the run's placement of ops" in said.err
    assert f"--nproc-per-node {len(figures['stages'])} {run.path('pipeline.py')}" in said.err
    losses, state = launched(run, len(figures["stages"]), steps=steps)
    expected_losses, expected = trained(seeded(), steps)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_named_workload_whose_head_is_tied(folder: Path) -> None:
    name = "gpt2@layers=2,width=16,heads=2,batch=4,tokens=6,vocab=19"
    work = build(name)
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    run = run_of(folder, graph, name)
    assert main(["export", str(run.root), "--format", "pipeline"]) == 0
    losses, _ = launched(run, 2, steps=3)
    optimizer, expected = torch.optim.Adam(work.model.parameters(), lr=1e-3), []
    assert isinstance(work.inputs, dict)
    assert work.loss_fn is not None
    for _ in range(3):
        optimizer.zero_grad()
        loss = work.loss_fn(work.model(**work.inputs))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-4)


def test_an_inference_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = capture(seeded(), skipping_batch()[:2])
    run = run_of(folder, graph, "a_pipelined_work:inference")
    workload = ["--workload", "a_pipelined_work:inference"]
    assert main(["export", str(run.root), "--format", "pipeline", *workload]) == 2
    said = capsys.readouterr().err
    assert "workload is 'an inference', expected a training step with an optimizer" in said
    assert not run.path("pipeline.py").exists()


@pytest.mark.slow
def test_a_loss_that_micro_batches_do_not_make_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = capture(seeded(), skipping_batch()[:2], lambda output: (output @ output.T).logsumexp(1).mean(), "sgd")
    run = run_of(folder, graph, "a_pipelined_work:contrastive")
    assert main(["export", str(run.root), "--format", "pipeline", "--workload", "a_pipelined_work:contrastive"]) == 2
    said = capsys.readouterr().err
    assert "loss is 'not made of those of micro-batches'" in said
    assert "--loss accumulated" in said


@pytest.mark.slow
def test_a_batch_in_another_dimension_is_that_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, (tokens, labels) = SequenceFirst(), sequences()
    workload = ["--format", "pipeline", "--workload", "a_pipelined_work:sequence_first"]
    whole = capture(model, tokens, sequences_loss, "sgd", targets=labels)
    run = run_of(folder, whole, "a_pipelined_work:sequence_first")
    assert main(["export", str(run.root), *workload]) == 2
    said = capsys.readouterr().err
    assert "so export one of `rlplace train WORKLOAD --micro-batches K` with `--batch-dims`" in said
    # as it says
    cut = CutOptions(2, (1, 1))
    graph = capture(model, tokens, sequences_loss, "sgd", targets=labels, micro_batches=2, batch_dims=cut.batch_dims)
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    run = placed_run(folder / "cut", "a_pipelined_work:sequence_first", graph, core_host(2), devices, cut=cut)
    assert main(["export", str(run.root), *workload]) == 0
    assert "DIMS = (1, 1)" in run.path("pipeline.py").read_text()
    losses, state = launched(run, 2, steps=2)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = sequences_loss(model(tokens), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_batch_that_cannot_be_cut_evenly_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late, rows, labels = skipping_batch(batch=7)
    graph = capture(seeded(), (late, rows), skipping_loss, "sgd", targets=labels)
    run = run_of(folder, graph, "a_pipelined_work:odd")
    assert main(["export", str(run.root), "--format", "pipeline", "--workload", "a_pipelined_work:odd"]) == 2
    assert "expected one that is cut into equal micro-batches, e.g. 2, 3, 4, 6, 8" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_pinned_is_said_not_to_be_followed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = skipping_run(folder)
    with Session.open(run) as session:
        arrays = session._arrays("problem")
        groups = int(session.op_group.max()) + 1
        session._keep_arrays("problem", {**arrays, "allowed": np.ones((groups, session.host.num_devices), np.bool_)})
    assert main(["export", str(run.root), "--format", "pipeline", "--workload", "a_pipelined_work:work"]) == 0
    assert "are not followed by stages" in capsys.readouterr().err


def test_an_unrolled_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "rnnlm@layers=2,units=8,vocab=11,steps=3,batch=4"
    work = build(name)
    run = run_of(folder, capture(work.model, work.inputs, work.loss_fn, work.optimizer), name)
    assert main(["export", str(run.root), "--format", "pipeline"]) == 2
    said = capsys.readouterr().err
    assert "model is 'RNNLM', expected one with modules that run once and not first" in said


def test_one_device_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = skipping_run(folder, 1)
    command = ["export", str(run.root), "--format", "pipeline", "--workload", "a_pipelined_work:work"]
    assert main(command) == 2
    assert "devices is 'cpu:0', expected two or more" in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulated_host_gives_estimated_stages_on_gpus(folder: Path) -> None:
    """A simulated host of two GPUs: estimated, and the script names GPUs."""
    from rlplace.measure import resolve_host

    name = "vit@layers=2,width=12,heads=2,batch=4,image_size=32,patch_size=16,classes=3"
    work = build(name)
    graph = capture(work.model, work.inputs, work.loss_fn, work.optimizer)
    devices = np.zeros(graph.num_ops, dtype=np.int32)
    run = placed_run(folder / "run", name, graph, resolve_host("4xV100-pcie"), devices)
    change(run.root, "request", default_size="paper")
    assert main(["export", str(run.root), "--format", "pipeline"]) == 0
    text = run.path("pipeline.py").read_text()
    assert 'DEVICES = ("cuda:0", "cuda:1"' in text.replace("'", '"')
    compile(text, "pipeline.py", "exec")
