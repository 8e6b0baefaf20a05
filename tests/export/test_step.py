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
from small_models import CASES
from torch import nn
from torch.nn import functional

from rlplace import cuda
from rlplace.errors import CaptureError, FingerprintMismatch, InvalidValue, UnknownName, UserError
from rlplace.export import PlacedModule, matching_host, to_module, to_step
from rlplace.export.placed.placed_module import hf_device_map
from rlplace.graphs import OpGraph, capture
from rlplace.measure import Placement
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.problem import Plan

Case = tuple[Classifier, OpGraph, Placement]


@pytest.fixture
def case() -> Case:
    """A model, its step, and a placement of it."""
    model = classifier()
    graph = captured(model, "adam")
    return model, graph, placement_of(graph)


@pytest.mark.parametrize("export", [to_step, to_module])
def test_arguments_of_other_kinds_are_told(export: Callable[..., object], case: Case) -> None:
    model, graph, placement = case
    for wrong, actual, expected in (
        ((graph, model, placement), "OpGraph", r"Module.*\(model, graph, placement\)"),
        ((model, placement, graph), "Placement", r"OpGraph.*\(model, graph, placement\)"),
        ((placement, graph, model), "Placement", r"Module.*\(model, graph, placement\)"),
        ((model, graph, np.zeros(graph.num_ops, dtype=np.int32)), "ndarray", r".*Placement\.of\(problem, Simulator"),
    ):
        with pytest.raises(InvalidValue, match=rf"type {actual}.*{expected}"):
            export(*wrong)


def test_habits_of_plain_loops_are_told_what_to_do_instead(case: Case, tmp_path: Path) -> None:
    (x, labels), *_ = batches(1)
    with to_step(*case, host=HOST) as step:
        for call in (step.train, step.eval):
            with pytest.raises(UserError, match=r"step\.evaluate\(x\).*to_module"):
                call()
        losses = step(x, targets=labels), step.backward(x, targets=labels)
        for loss in (*losses, copy.deepcopy(losses[0])):
            with pytest.raises(UserError, match=r"has run its backward already.*to_module"):
                loss.backward()
        assert type(loss) is torch.Tensor
        torch.save({"loss": loss}, tmp_path / "loss.pt")
        assert torch.equal(torch.load(tmp_path / "loss.pt")["loss"], loss)


def test_it_trains_for_many_steps_like_eager(case: Case) -> None:
    model, graph, placement = case
    eager, before = twin(model), twin(model).state_dict()
    optimizer = torch.optim.Adam(eager.parameters())
    with to_step(model, graph, placement, host=HOST) as step:
        for x, labels in batches(20):
            loss = step(x, targets=labels)
            optimizer.zero_grad()
            expected = functional.cross_entropy(eager(x), labels)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
        assert_same_state(step.state_dict(), eager.state_dict(), 1e-8)
        assert_same_state(dict(model.state_dict()), before, 0.0)  # the user's own
        step.copy_to(model)
        assert_same_state(dict(model.state_dict()), step.state_dict(), 0.0)


def test_mistakes_with_a_placed_step(case: Case) -> None:
    model, graph, placement = case
    (x, labels), *_ = batches(1)
    with to_step(model, graph, placement, host=HOST, other_shapes="refuse") as step:
        with pytest.raises(InvalidValue, match="shapes that it was captured with"):
            step(x[:3], targets=labels[:3])
        with pytest.raises(InvalidValue, match="inputs"):
            step(x, x, targets=labels)
        with pytest.raises(UnknownName, match=r"first\.weight"):
            step.load_state_dict({"first.weigth": torch.zeros(8, 6)})
    with pytest.raises(FingerprintMismatch, match=graph.fingerprint):
        to_step(model, captured(nn.Linear(6, 3).double(), "adam"), placement, host=HOST)


def test_placed_inference_returns_what_the_model_returns() -> None:
    model, ((x, _),) = classifier().eval(), batches(1)
    graph = capture(model, x)
    with to_step(model, graph, placement_of(graph), host=HOST) as step:
        torch.testing.assert_close(step(x), model(x).detach())


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
