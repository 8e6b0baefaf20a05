"""An eager loop and a placed one agree: schedule, clipping, small last batches, evaluation, a resume in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import HOST, apart, assert_same_state, batches, classifier
from tiny_workloads import TINY
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from rlplace.export import PlacedModel
from rlplace.graphs import capture
from rlplace.graphs.capturing.capture import as_call
from rlplace.workloads import build, parse_workload

NUM_BATCHES, EPOCH, TOLERANCE = 20, 5, 1e-5


@dataclass(frozen=True)
class Task:
    """A model, and its batches by (size, number): inputs and targets."""

    model: nn.Module
    batch: Callable[[int, int], tuple[Any, tuple[Tensor, ...]]]
    loss_fn: Callable[..., Tensor]


def own_model() -> Task:
    def batch(size: int, number: int) -> tuple[Any, tuple[Tensor, ...]]:
        ((x, labels),) = batches(1, size, seed=number)
        return x, (labels,)

    return Task(classifier(), batch, functional.cross_entropy)


def workload(name: str) -> Task:
    def built(size: int, number: int) -> Any:
        options = [each for each in TINY[name].split(",") if not each.startswith("batch=")]
        return build(parse_workload(f"{name}@{','.join([*options, f'batch={size}'])}"), seed=number)

    def batch(size: int, number: int) -> tuple[Any, tuple[Tensor, ...]]:
        return pytree.tree_map_only(Tensor, as_double, (built(size, number).inputs, ()))

    task = built(4, 0)
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Task(task.model.double(), batch, task.loss_fn)


def as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


TASKS = {"own": own_model, **{name: lambda name=name: workload(name) for name in ("nmt", "bert", "inception_v3")}}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_twenty_batches(name: str, tmp_path: Path) -> None:
    task = TASKS[name]()
    eager = copy.deepcopy(task.model)
    inputs, targets = task.batch(4, 0)
    graph = capture(task.model, inputs, task.loss_fn, targets=targets or None)
    step = PlacedModel(graph, HOST, apart(graph))
    # the epsilon keeps gradients that are zero but for rounding from being blown up to steps
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, eps=1e-3) for each in (step, eager)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for number in range(NUM_BATCHES):
        size = 2 if number % EPOCH == EPOCH - 1 else 4
        inputs, targets = task.batch(size, number)
        args, kwargs = as_call(inputs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = step.backward(*args, **kwargs, **({"targets": targets} if targets else {}))
        expected = task.loss_fn(eager(*args, **kwargs), *targets)
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=TOLERANCE)
        for parameters, optimizer in zip((step.parameters(), eager.parameters()), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        if size == 2:
            for schedule in schedules:
                schedule.step()
            ours = step.evaluate(*args, **kwargs)
            theirs = copy.deepcopy(eager).eval()(*args, **kwargs)
            for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        if number == NUM_BATCHES // 2:
            step.save(tmp_path / "state.safetensors")
            kept = copy.deepcopy((optimizers[0].state_dict(), schedules[0].state_dict()))
            step.close()
            step = PlacedModel(graph, HOST, apart(graph))
            step.load(tmp_path / "state.safetensors")
            optimizers[0] = torch.optim.AdamW(step.parameters(), lr=1e-3, eps=1e-3)
            schedules[0] = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
            optimizers[0].load_state_dict(kept[0])
            schedules[0].load_state_dict(kept[1])
    assert step.num_steps == NUM_BATCHES
    assert_same_state(step.state_dict(), eager.state_dict(), TOLERANCE)
    step.close()


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
