"""`to_step` trains exactly as plain PyTorch does, from the placement file that people keep."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import mean_square
from torch import nn

import rlplace
from rlplace import cuda
from rlplace.errors import FingerprintMismatch, InvalidValue, UnknownName, UserError
from rlplace.export import matching_host
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Placement, Problem, Simulator
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.plan import Plan
from rlplace.search.rules import baselines


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return out


@pytest.mark.parametrize("export", [rlplace.export.to_step, rlplace.export.to_module])
def test_devices_of_ops_are_no_placement_yet(export: Callable[..., object]) -> None:
    net = Net()
    graph = capture(net, torch.randn(4, 6), mean_square, "sgd")
    with pytest.raises(InvalidValue, match=r"of type ndarray.*Placement\.of\(problem, Simulator"):
        export(net, graph, np.zeros(graph.num_ops, dtype=np.int32))


@pytest.mark.parametrize("export", [rlplace.export.to_step, rlplace.export.to_module])
def test_arguments_in_another_order_are_told(
    export: Callable[..., object], placed: tuple[Net, torch.Tensor, OpGraph, Problem, Placement]
) -> None:
    model, _, graph, _, placement = placed
    for wrong, actual, expected in (
        ((graph, model, placement), "OpGraph", "Module"),
        ((model, placement, graph), "Placement", "OpGraph"),
        ((placement, graph, model), "Placement", "Module"),
    ):
        with pytest.raises(InvalidValue, match=rf"type {actual}.*type {expected}.*\(model, graph, placement\)"):
            export(*wrong)


def test_habits_of_plain_loops_are_told_what_to_do_instead(
    placed: tuple[Net, torch.Tensor, OpGraph, Problem, Placement], tmp_path: Path
) -> None:
    model, x, graph, problem, placement = placed
    with rlplace.export.to_step(model, graph, placement, host=problem.host) as step:
        for call in (step.train, step.eval):
            with pytest.raises(UserError, match=r"step\.evaluate\(x\).*to_module"):
                call()
        for loss in (step(x), step.backward(x), copy.deepcopy(step(x))):
            with pytest.raises(UserError, match=r"has run its backward already.*to_module"):
                loss.backward()
        assert type(loss) is torch.Tensor
        torch.save({"loss": loss}, tmp_path / "loss.pt")
        assert torch.equal(torch.load(tmp_path / "loss.pt")["loss"], loss)


@pytest.fixture(scope="module")
def placed() -> tuple[Net, torch.Tensor, OpGraph, Problem, Placement]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    graph = capture(model, x, mean_square, "adam")
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
        expected = mean_square(eager(batch))
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
    other = capture(nn.Linear(6, 2), x, mean_square, "adam")
    with pytest.raises(FingerprintMismatch, match=graph.fingerprint):
        rlplace.export.to_step(model, other, placement, host=problem.host)


def test_placed_inference_returns_what_the_model_returns() -> None:
    model, x = Net().eval(), torch.randn(3, 6)
    graph = capture(model, x)
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    plan = Simulator(problem).plan(baselines.round_robin(problem))
    step = rlplace.export.to_step(model, graph, Placement.of(problem, plan), host=problem.host)
    torch.testing.assert_close(step(x), model(x).detach())
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
