"""Plans of `parallelize_module`: what they split and what they leave whole; they train as the whole model does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from megatron_model import loss_of_words, megatron, words_and_labels
from run_folders import placed_run
from spmd_ranks import launched
from torch import nn
from torch.nn.functional import mse_loss

from rlplace.cli.main import main
from rlplace.export.dtensor import module_plan
from rlplace.graphs import SplitPlan, capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.session.folder import RunFolder
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.workloads import build

TESTS = str(Path(__file__).resolve().parents[1])
WORK_NAME = "a_split_work"
WORK = """
import sys
sys.path.insert(0, {tests!r})
from megatron_model import loss_of_words, megatron, words_and_labels

def work(num_heads=None):
    rows, labels = words_and_labels()
    return megatron(num_heads), (rows,), loss_of_words, "adamw", labels

def own_heads():
    return work(4)

def inference():
    return work()[:2]
"""
COLUMNS, ROWS = "ColwiseParallel()", "RowwiseParallel()"
HEAD, WORDS = "ColwiseParallel(use_local_output=False)", "RowwiseParallel(input_layouts=Replicate())"
CLASSES = ("vocabulary", "attention", "mlp")
PLAN = dict.fromkeys(("query", "key", "value", "up"), COLUMNS) | {
    "out": ROWS,
    "down": ROWS,
    "words": WORDS,
    "head": HEAD,
}
TOLERANCE = 1e-10


def plan_of(workload: str, parts: int = 2) -> tuple[dict[str, str], dict[str, str]]:
    work = build(workload)
    split = SplitPlan(CLASSES, parts)
    return module_plan(capture(work.model, work.inputs, work.loss_fn, work.optimizer, split=split))


def plan_of_layers(model: nn.Module, width: int = 8) -> tuple[dict[str, str], dict[str, str]]:
    x = torch.zeros(3, width)
    return module_plan(capture(model, x, mse_loss, "sgd", targets=model(x).detach(), split=SplitPlan(("mlp",))))


def test_an_mlp_is_split_by_columns_and_then_by_rows() -> None:
    styles, left = plan_of_layers(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    assert styles == {"0": COLUMNS, "2": ROWS}
    assert left == {}


def test_a_width_that_is_not_even_stays_whole() -> None:
    styles, left = plan_of_layers(nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)))
    assert styles == {}
    assert left.keys() == {"0.weight", "0.bias", "2.weight"}
    assert set(left.values()) == {"its shards are not even, or of several pieces, as those of a fused projection"}


class Scaled(nn.Module):
    """Every head of a hidden width is scaled by the same parameter, as by the norms of queries in some models."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 4, 4) * self.scale).flatten(1)


@pytest.mark.parametrize("is_root", [True, False])
def test_a_layer_whose_shards_share_a_parameter_stays_whole(is_root: bool) -> None:
    """Each rank would have a part of its gradient, and nobody would add them."""
    layer = nn.Sequential(nn.Linear(8, 16), Scaled(), nn.Linear(16, 8))
    styles, left = plan_of_layers(layer if is_root else nn.Sequential(layer, nn.Tanh()))
    assert styles == {}
    assert set(left.values()) == {"shards between its layers read values that are not split"}


def test_a_module_that_is_there_twice_has_its_style_once() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    styles, left = plan_of_layers(nn.Sequential(layer, layer))
    assert styles == {"0.0": COLUMNS, "0.2": ROWS}
    assert left == {}


def test_llama_is_split_as_megatron_does() -> None:
    styles, left = plan_of("llama@small,layers=1,vocab=101")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    columns = [f"{attention}.{name}_proj" for name in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    rows = [f"{attention}.o_proj", f"{mlp}.down_proj"]
    assert styles == dict.fromkeys(columns, COLUMNS) | dict.fromkeys(rows, ROWS) | {"lm_head": HEAD}
    assert left == {}


@pytest.mark.parametrize(("kv_heads", "parts"), [(1, 2), (2, 4)])  # of 8 heads
def test_fewer_key_heads_than_shards_leave_attention_whole(kv_heads: int, parts: int) -> None:
    styles, left = plan_of(f"llama@small,layers=1,heads=8,kv_heads={kv_heads},vocab=101", parts)
    assert {name.removeprefix("model.layers.0.mlp.") for name in styles} == {
        *("gate_proj", "up_proj", "down_proj", "lm_head")
    }
    assert left.keys() == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo"}


def test_layers_of_gpt2_are_no_linear_ones_and_its_tied_vocabulary_is_split() -> None:
    styles, left = plan_of("gpt2@small,layers=1,vocab=101")
    assert styles == {"transformer.wte": WORDS, "lm_head": HEAD}
    block = "transformer.h.0"
    layers = [f"{block}.attn.c_attn", f"{block}.attn.c_proj", f"{block}.mlp.c_fc", f"{block}.mlp.c_proj"]
    assert left.keys() == {f"{layer}.weight" for layer in layers} | {f"{layer}.bias" for layer in layers[::2]}
    assert set(left.values()) == {"no style for this split of Conv1D"}


def step(split: SplitPlan | None, num_heads: int | None = None, **cut: Any) -> OpGraph:
    rows, labels = words_and_labels()
    return capture(megatron(num_heads), (rows,), loss_of_words, "adamw", targets=labels, split=split, **cut)


def run_of(
    folder: Path, graph: OpGraph, cut: CutOptions, name: str = "work", devices: tuple[int, ...] = (0, 1)
) -> RunFolder:
    """A run with shard j on the j-th of some devices, and all else on the first of the host."""
    placed = np.where(graph.shard < 0, 0, np.array(devices, dtype=np.int32)[graph.shard]).astype(np.int32)
    together = np.where(graph.colocation < 0, -1 - np.arange(graph.num_ops), graph.colocation)
    _, first, own = np.unique(together, return_index=True, return_inverse=True)
    return placed_run(folder / "run", f"a_split_work:{name}", graph, core_host(2), placed[first][own], cut=cut)


def exported(run: RunFolder, name: str = "work") -> int:
    return main(["export", str(run.root), "--format", "dtensor", "--workload", f"a_split_work:{name}", "--json"])


SPLIT = CutOptions(split=",".join(CLASSES))
GRADIENTS = """
import os
import runpy
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[2])
from megatron_model import loss_of_words, megatron, words_and_labels

names = runpy.run_path(sys.argv[1])
dist.init_process_group("gloo")
expected, model = megatron(), megatron()
rows, labels = words_and_labels()
whole = loss_of_words(expected(rows), labels)
whole.backward()
names["parallel"](model, names["init_device_mesh"]("cpu", (2,)))
assert model.head.weight is model.words.weight
with names["loss_parallel"]():
    loss = loss_of_words(model(rows), labels)
    loss.backward()
exact = dict(rtol=1e-10, atol=1e-12)
torch.testing.assert_close(names["whole"](loss), whole.detach(), **exact)
shards = []
for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
    torch.testing.assert_close(names["whole"](one.grad), other.grad, **exact)
    if isinstance(one, names["DTensor"]) and one.to_local().numel() < one.numel():
        shards.append(name)
if dist.get_rank() == 0:
    print(*sorted(shards))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # as the script itself ends
"""


@pytest.mark.slow
def test_two_processes_train_as_one_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(folder, step(SplitPlan(CLASSES)), SPLIT)
    assert exported(run) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert figures["plan"] == PLAN
    assert figures["left"] == {}
    assert figures["ranks"] == ["cpu:0", "cpu:1"]
    assert figures["moved_share"] == pytest.approx(0.0, abs=1e-12)
    assert f"torchrun --nproc-per-node 2 {run.path('dtensor.py')}" in said.err

    (folder / "gradients.py").write_text(GRADIENTS, encoding="utf-8")
    cut = {f"{layer}.weight" for layer in PLAN if layer != "head"}
    cut |= {f"{layer}.bias" for layer, style in PLAN.items() if style == COLUMNS}
    assert launched(folder / "gradients.py", 2, str(run.path("dtensor.py")), TESTS).split() == sorted(cut)

    printed = launched(run.path("dtensor.py"), 2, "--steps", "3")
    model, (rows, labels) = megatron(), words_and_labels()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of_words(model(rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = [float(line.split()[1]) for line in printed.splitlines() if line[:1].isdigit()]
    assert found == pytest.approx(losses, rel=TOLERANCE)


def test_the_script_of_a_host_with_more_accelerators_says_what_to_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(folder, step(SplitPlan(CLASSES)), SPLIT)
    assert exported(run) == 0
    names = runpy.run_path(str(run.path("dtensor.py")))
    names["main"].__globals__["DEVICES"] = ("cuda:0", "cuda:1")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="names 2 accelerators, this machine has 1: change DEVICES"):
        names["main"](1, True)


@pytest.mark.slow
def test_the_script_stops_where_the_code_of_a_layer_does_not_know_of_shards(folder: Path) -> None:
    """Of heads that a view counts, a shard has as many, of half the width: nothing else would notice."""
    run = run_of(folder, step(SplitPlan(CLASSES), 4), SPLIT, "own_heads")
    assert exported(run, "own_heads") == 0
    with pytest.raises(AssertionError, match="are not those of the whole model"):
        launched(run.path("dtensor.py"), 2)


def test_a_step_that_sums_in_chunks_has_the_same_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = step(SplitPlan(CLASSES, reduce="chunks"))
    run = run_of(folder, graph, CutOptions(split=",".join(CLASSES), split_parts="2/chunks"))
    assert exported(run) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == PLAN


def test_shards_elsewhere_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = step(SplitPlan(CLASSES))
    placed = np.maximum(graph.shard, 0).astype(np.int32)
    shards = np.flatnonzero(graph.shard == 1)
    free = [op for op in shards if graph.colocation[op] < 0]
    placed[free[0]] = 0
    run = placed_run(folder / "run", "a_split_work:work", graph, core_host(2), placed, cut=SPLIT)
    assert exported(run) == 0
    said = capsys.readouterr()
    of_shards = int((graph.shard >= 0).sum())  # ops that take equally long
    assert json.loads(said.out)["moved_share"] == pytest.approx(1 / of_shards)
    assert "of the time of shards is elsewhere in the placement" in said.err


def test_shards_of_a_layer_may_have_changed_places(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = step(SplitPlan(CLASSES))
    is_turned = np.array([module in ("up", "down") for module in graph.modules])
    placed = np.where(is_turned, 1 - graph.shard, graph.shard)
    placed = np.where(graph.shard < 0, 0, placed).astype(np.int32)
    run = placed_run(folder / "run", "a_split_work:work", graph, core_host(2), placed, cut=SPLIT)
    assert exported(run) == 0
    assert json.loads(capsys.readouterr().out)["moved_share"] == pytest.approx(0.0, abs=1e-12)


def test_a_placement_on_one_device_has_the_same_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(folder, step(SplitPlan(CLASSES)), SPLIT, devices=(1, 1))
    assert exported(run) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ranks"] == ["cpu:0", "cpu:1"]
    assert figures["moved_share"] == pytest.approx(0.5)


def test_updates_in_parts_are_left_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(folder, step(SplitPlan(("mlp", "updates"))), CutOptions(split="mlp,updates"))
    assert exported(run) == 0
    said = capsys.readouterr()
    figures = json.loads(said.out)
    assert figures["plan"] == {"up": COLUMNS, "down": ROWS}
    assert figures["left"].keys() >= {"query.weight", "key.weight", "value.weight", "out.weight"}
    assert set(figures["left"].values()) == {"no style for updates"}
    assert "(no style for updates)" in said.err


@pytest.mark.parametrize(
    ("split", "cut", "devices", "expected"),
    [
        (SplitPlan(("updates",)), CutOptions(split="updates"), (0, 1), "split is 'updates', expected some of"),
        (None, WHOLE, (0, 1), "split is 'none', expected some of vocabulary,attention,mlp"),
        (SplitPlan(("mlp",), (3, 1)), CutOptions(split="mlp", split_parts="3:1"), (0, 1), "expected even shares"),
        (
            SplitPlan(("mlp",), 3),
            CutOptions(split="mlp", split_parts="3"),
            (0, 1, 1),
            "expected 3 devices of one machine",
        ),
    ],
)
def test_what_no_plan_can_say_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    split: SplitPlan | None,
    cut: CutOptions,
    devices: tuple[int, ...],
    expected: str,
) -> None:
    run = run_of(folder, step(split), cut, devices=devices)
    assert exported(run) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not run.path("dtensor.py").exists()


def test_micro_batches_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut: dict[str, Any] = {"micro_batches": 2, "batch_dims": (0, 0), "loss": "separate"}
    run = run_of(folder, step(SplitPlan(("mlp",)), **cut), CutOptions(2, (0, 0), "separate", split="mlp"))
    assert exported(run) == 2
    assert "micro_batches is 2, expected 1" in " ".join(capsys.readouterr().err.split())


def test_an_inference_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = capture(megatron(), words_and_labels()[:1], split=SplitPlan(("mlp",)))
    run = run_of(folder, graph, CutOptions(split="mlp"), "inference")
    assert exported(run, "inference") == 2
    assert "expected a training step with an optimizer" in " ".join(capsys.readouterr().err.split())
