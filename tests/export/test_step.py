"""`to_step` trains exactly as plain PyTorch does, from the placement file that people keep.

`to_module`: what stands in for a model is one of its class, with its names, its signature and its state.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loops import HOST, Classifier, assert_same_state, batches, captured, classifier, module_of, placement_of, twin
from small_models import CASES, mean_square
from torch import nn

import rlplace
from rlplace import cuda
from rlplace.errors import CaptureError, FingerprintMismatch, InvalidValue, UnknownName, UserError
from rlplace.export import PlacedModule, matching_host, to_module
from rlplace.export.placed.placed_module import hf_device_map
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Host, Placement, Problem, Simulator
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import Plan
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


@pytest.mark.parametrize(
    ("word", "gangs"),
    [
        *((word, gangs) for word in ("auto", "cores:3", "cores:2x4", "cores:1x8") for gangs in (False, True)),
        *((word, False) for word in ("procs", "procs:3", "procs:2x4")),
    ],
)
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
@pytest.mark.parametrize(
    "word", ["auto", "cuda", "cuda/2", "cuda/16", "auto+cpu", "cuda+cpu", "cuda/4+cpu", "cuda-procs"]
)
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


def test_it_is_one_of_its_model_with_the_same_names() -> None:
    model = classifier()
    module, eager = module_of(model), twin(model)
    assert isinstance(module, Classifier)
    assert isinstance(module, PlacedModule)
    assert list(module.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in eager.named_modules()]
    other = twin(eager)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    module.load_state_dict(other.state_dict())
    ((x, _),) = batches(1)
    torch.testing.assert_close(module(x), other(x))
    eager.load_state_dict(module.state_dict())
    module.load_state_dict(twin(eager).state_dict(), assign=True)
    assert_same_state(module.state_dict(), eager.state_dict())
    module.eval()
    eager.eval()
    torch.testing.assert_close(module(x), eager(x))
    module.close()


def test_what_cannot_be_a_module_is_told() -> None:
    case = CASES["input_changed"]()
    module = module_of(case.model, capture(case.model, case.inputs, case.loss_fn))
    with pytest.raises(CaptureError, match="`forward` writes to input_1, expected inputs that stay as they are"):
        module(*case.inputs)
    with pytest.raises(InvalidValue, match="Take the original model"):
        copy.deepcopy(module)
    module.close()
    model = classifier()
    graph = captured(model, "sgd")
    with pytest.raises(InvalidValue, match="the model that the graph was captured from"):
        to_module(twin(model), graph, placement_of(graph), host=HOST)


def test_its_forward_has_the_signature_of_its_models() -> None:
    """By which Hugging Face's Trainer picks the columns of a batch."""
    model = classifier()
    module = module_of(model)
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(module).forward) == inspect.signature(type(model).forward)
    module.close()


def test_where_parameters_are_is_told_to_hugging_face_where_they_are_apart() -> None:
    model = classifier()
    module = module_of(model)
    assert not hasattr(module, "hf_device_map"), "cores are one device"
    module.close()
    places = {"up.weight": torch.device("cuda", 1), "down.weight": torch.device("cpu")}
    assert hf_device_map(places) == {"up.weight": 1, "down.weight": "cpu"}
