"""Own loops over processes: equal to those of threads to the bit; a process that is gone is named; none stays."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_hosts import core_host, process_host
from loops import apart, batches, captured, classifier
from torch import Tensor
from torch.nn import functional

from rlplace.errors import RunnerError
from rlplace.export import PlacedModel, to_module
from rlplace.graphs import OpGraph
from rlplace.measure import Host, Placement
from rlplace.measure.isolate.own_ranks import OwnRanks

Loop = Callable[[OpGraph, Host, Path], list[Tensor]]


def captured_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """The captured optimizer, a schedule of it, evaluations; a file goes to a second model, which continues."""
    seen = []
    with PlacedModel(graph, host, apart(graph)) as step, PlacedModel(graph, host, apart(graph)) as other:
        schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        for number in range(3):
            seen += [step(x, targets=labels) for x, labels in batches(2, seed=number)]
            schedule.step()
            seen.append(step.evaluate(batches(1, size=3)[0][0]))
        step.save(path)
        other.load(path)
        for each in (step, other):
            seen += [each(x, targets=labels) for x, labels in batches(2)]
        seen += other.state_dict().values()
    return seen


def own_optimizer_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """Accumulated gradients, clipped over all ranks; parameters with other memory; gradients of one's own."""
    seen = []
    with PlacedModel(graph, host, apart(graph)) as step:
        parameters = [each for each in step.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for number in range(4):
            optimizer.zero_grad()
            if number == 2:
                torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters) * 2, parameters)
                parameters[0].grad = torch.ones_like(parameters[0])
            seen += [step.backward(x, targets=labels, loss_scale=0.5) for x, labels in batches(2, seed=number)]
            seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1))
            seen += [each.grad.clone() for each in parameters if each.grad is not None]
            optimizer.step()
        seen += step.state_dict().values()
    return seen


def module_loop(graph: OpGraph, host: Host, path: Path) -> list[Tensor]:
    """Two forwards wait for their backwards, one never has any; evaluations; tensors that were assigned."""
    names = tuple(device.name for device in host.devices)
    placement = Placement(apart(graph), graph.fingerprint, host.fingerprint, names)
    module, seen = to_module(model_of(graph), graph, placement, host=host), []
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        losses = [functional.cross_entropy(module(x), labels) for x, labels in batches(2, seed=number)]
        module(batches(1)[0][0])
        gc.collect()
        for loss in reversed(losses):
            loss.backward()
        seen += [loss.detach() for loss in losses]
        seen.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
        module.eval()
        with torch.no_grad():
            seen.append(module(batches(1, size=3)[0][0]))
        module.train()
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()}, assign=True)
    seen.append(module(batches(1)[0][0]).detach())
    module.close()
    return [*seen, *module.state_dict().values()]


def model_of(graph: OpGraph) -> Any:
    assert graph.program is not None
    return graph.program.origin.model


@pytest.mark.parametrize("loop", [captured_loop, own_optimizer_loop, module_loop])
def test_a_loop_is_that_of_threads_to_the_bit(loop: Loop, tmp_path: Path) -> None:
    found = [
        loop(captured(classifier(dropout=0.5), "adam"), host, tmp_path / host.name)
        for host in (core_host(2), process_host(2))
    ]
    assert len(found[0]) == len(found[1])
    for threads, ranks in zip(*found, strict=True):
        assert torch.equal(threads, ranks)


def test_a_process_that_is_gone_is_named_and_the_state_stays(tmp_path: Path) -> None:
    graph, ((x, labels),) = captured(classifier(), "adam"), batches(1)
    step = PlacedModel(graph, process_host(2), apart(graph))
    step(x, targets=labels)
    before = step.state_dict()
    (victim,) = pids(step)
    os.kill(victim, signal.SIGKILL)
    words = r"the process of cpu:1 was ended from outside \(SIGKILL\)"
    with pytest.raises(RunnerError, match=f"{words}.*op '"):
        step(x, targets=labels)
    with pytest.raises(RunnerError, match=words):
        step.evaluate(x)
    assert before.keys() == step.state_dict().keys()
    step.save(tmp_path / "state")
    step.close()
    step.close()
    assert not Path(f"/proc/{victim}").exists()


def test_no_process_stays_without_its_model() -> None:
    graph = captured(classifier())
    step = PlacedModel(graph, process_host(2), apart(graph))
    (there,) = pids(step)
    assert Path(f"/proc/{there}").exists()
    del step
    gc.collect()
    assert not Path(f"/proc/{there}").exists()


def pids(step: PlacedModel) -> list[int]:
    ranks = step._crew._lookout  # type: ignore[attr-defined]
    assert isinstance(ranks, OwnRanks)
    return [rank.pid for rank in ranks.fleet.ranks]
