"""Ranks as threads of one process, or as torchrun starts them, and a model whose parts lie on all of them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from many_ranks import at_once, facts_of, nodes_of
from naive_plan import naive_plan, random_devices
from torch import Tensor, nn
from torch.nn import functional

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.nodes import Nodes
from rlplace.measure.problem import Plan
from rlplace.workloads.configs import Loss

Result = TypeVar("Result")


def in_ranks(count: int, work: Callable[[Nodes], Result]) -> list[Result]:
    """What `work` returns in each of some ranks, which run at once."""
    return at_once([partial(work, nodes) for nodes in nodes_of(facts_of(["here"] * count, cores=()))])


def launched(program: Path, num_ranks: int, *arguments: str) -> str:
    """What a program prints that torchrun starts, on the loopback interface."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(num_ranks), str(program), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class Reader(nn.Module):
    """Its head is tied to its words; it has a buffer that is kept, one that is not, and a layer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head, self.unused = nn.Linear(8, 11, bias=False), nn.Linear(2, 2)
        self.head.weight = self.words.weight
        self.shift: Tensor
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.scale: Tensor
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)

    def forward(self, rows: Tensor, late: Tensor) -> Tensor:
        x = self.words(rows) + self.shift
        out: Tensor = self.head((x + self.down(torch.tanh(self.up(x)))) * self.scale + late)
        return out


def reader() -> Reader:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Reader().double()


def reader_batches(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, late inputs and labels, of 6 samples."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(11, (6,), generator=generator),
            torch.randn(6, 8, generator=generator, dtype=torch.float64),
            torch.randint(11, (6,), generator=generator),
        )
        for _ in range(count)
    ]


def reader_graph(
    model: nn.Module, micro_batches: int = 1, optimizer: str | None = "adamw", loss: Loss = "auto"
) -> OpGraph:
    rows, late, labels = reader_batches(1)[0]
    cut: dict[str, Any] = {"micro_batches": micro_batches, "batch_dims": (0, 0, 0), "loss": loss}
    options = cut if micro_batches > 1 else {}
    return capture(model, (rows, late), functional.cross_entropy, optimizer, targets=labels, **options)


def scattered(graph: OpGraph, num_devices: int, seed: int = 0) -> Plan:
    """A plan that has every op anywhere."""
    generator = np.random.default_rng(seed)
    return naive_plan(graph, random_devices(graph, num_devices, generator), generator)


def eager(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = None,
) -> tuple[list[float], nn.Module]:
    """Losses of steps of plain PyTorch, and the model after them; a copy of the model, unless it has its optimizer."""
    if optimizer is None:
        model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for rows, late, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(rows, late), labels)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model
