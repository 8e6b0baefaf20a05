"""Processes that train with their parts of one batch, as the rows of a comparison do, and what the whole gives."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pipelined_models import Skipping, skipping_batch, skipping_loss
from torch import nn

from rlplace.compare.replicas import KINDS, join_replicas
from rlplace.measure.hosts.host import Device
from rlplace.workloads import Workload

Job = tuple[str, str, dict[str, Any]]
"""A kind of process, a workload of this module, and options of the kind."""
STEPS = 4
WITHIN_S = 800.0


class Unrolled(nn.Module):
    """Cells that run again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.cells = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state = [self.words(rows)] * 2
        for _ in range(3):
            x = self.words(rows)
            for k, cell in enumerate(self.cells):
                x = state[k] = cell(x, state[k])
        output: torch.Tensor = self.head(x)
        return output


def work_of(name: str) -> Workload:
    """The whole workload, in float64."""
    torch.manual_seed(0)
    late, rows, labels = skipping_batch()
    if name == "unrolled":
        return Workload(name, Unrolled().double(), (rows,), nn.functional.cross_entropy, "adam", (labels,))
    return Workload(name, Skipping().double(), (late.double(), rows), skipping_loss, "momentum", (labels,))


def whole_losses(name: str) -> list[float]:
    """Of plain PyTorch in one process."""
    work = work_of(name)
    parameters, losses = work.model.parameters(), []
    optimizer = torch.optim.Adam(parameters) if work.optimizer == "adam" else torch.optim.SGD(parameters, 1e-3, 0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        assert work.loss_fn is not None
        loss = work.loss_fn(work.model(*work.inputs), *work.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of_ranks(folder: Path, jobs: Sequence[Job], count: int = 2) -> list[list[list[float]]]:
    """Of each job the losses of each process; none of one that has no loss."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_train, args=(folder, rank, count, jobs)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WITHIN_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * count
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return [list(losses) for losses in zip(*of_ranks, strict=True)]


def _train(folder: Path, rank: int, count: int, jobs: Sequence[Job]) -> None:
    device = Device(f"cpu:{rank}", "cpu-core", "cpu", 1 << 30)
    join_replicas(device, rank, count, init_method=f"file://{folder}/meeting")
    found = []
    for kind, name, options in jobs:
        work = work_of(name)
        if kind != "pipeline":
            inputs, targets = ([each.chunk(count)[rank] for each in part] for part in (work.inputs, work.targets))
            work = dataclasses.replace(work, inputs=tuple(inputs), targets=tuple(targets))
        step = KINDS[kind](work, device, **options)
        losses = [step() for _ in range(STEPS)]
        found.append([loss.item() for loss in losses if loss is not None])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
