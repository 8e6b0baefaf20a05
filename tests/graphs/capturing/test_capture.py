"""A captured step, run op by op, is the eager step: for small models of every trait (workloads: `test_catalog`)."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from small_models import CASES, Dropouts, Function, InPlace, Keywords, mean_square, random, run_eager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.opgraph import OpGraph
from rlplace.workloads import build, parse_workload, without_memory

NMT = "nmt@layers=2,units=8,vocab=11,steps=3,batch=2"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_captured_equals_eager(name: str) -> None:
    case = CASES[name]()
    eager = run_eager(case)
    graph = capture(case.model, case.inputs, case.loss_fn, "sgd", targets=case.targets)
    step = run_graph(graph)
    close(step.result.reshape(()), eager.loss.reshape(()), case.atol)
    assert step.gradients.keys() == eager.gradients.keys()
    for parameter, gradient in eager.gradients.items():
        close(step.gradients[parameter], gradient, case.atol)
    assert step.state.keys() == eager.state.keys()
    for buffer, _ in case.model.named_buffers():
        close(step.state[buffer], eager.state[buffer], case.atol)


@pytest.mark.filterwarnings("ignore:hooks of modules")
def test_hooks_of_modules_and_of_gradients_are_part_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[0].register_forward_hook(lambda module, args, y: y * 3)
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 5,))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[0].bias.register_hook(lambda gradient: None)
    x = random(3, 4)
    step = run_graph(capture(model, x, mean_square, "sgd"))
    mean_square(model(x)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(step.gradients[name], parameter.grad, 1e-9)


def test_inference_of_a_workload_equals_eager() -> None:
    workload = build(parse_workload(NMT))
    graph = capture(workload.model, tuple(workload.inputs)[:2])
    expected = workload.model(*tuple(workload.inputs)[:2])
    result = run_graph(graph).result
    assert type(result) is type(expected)
    assert result.loss is None
    for actual, logits in zip(result.logits, expected.logits, strict=True):
        close(actual, logits.detach(), 1e-6)
    assert set(graph.phases.tolist()) == {0}


def test_capture_leaves_the_model_untouched() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = max(self.calls, 1)
            self.cache = self.norm(x)
            return self.cache

    model, x = Caching(), random(3, 4, dtype=torch.float32)
    before, state, seed = dict(vars(model)), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    capture(model, x, mean_square, "adam")
    assert vars(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), seed)
    assert torch.backends.mkldnn.enabled


def test_running_a_graph_leaves_the_model_and_the_inputs_untouched() -> None:
    case = CASES["input_changed"]()
    state, inputs = copy.deepcopy((case.model.state_dict(), case.inputs))
    graph = capture(case.model, case.inputs, case.loss_fn, "sgd")
    assert torch.equal(run_graph(graph).result, run_graph(graph).result)
    assert all(torch.equal(value, state[name]) for name, value in case.model.state_dict().items())
    assert all(torch.equal(value, kept) for value, kept in zip(case.inputs, inputs, strict=True))


def test_outputs_keep_their_structure_in_inference() -> None:
    inputs = {"x": random(3, 4), "scale": 0.5, "extra": {"shift": random(4)}}
    model = Keywords()
    expected, result = model(**inputs), run_graph(capture(model, inputs)).result
    assert result.keys() == {"y", "pair"}
    assert isinstance(result["pair"], tuple)
    close(result["y"], expected["y"].detach(), 0.0)
    close(result["pair"][1], expected["pair"][1].detach(), 0.0)


def test_plain_constants_among_the_outputs_stay() -> None:
    graph = capture(Function(lambda y: {"y": y, "size": y.shape[0], "none": None, "name": "out"}), random(3, 4))
    result = run_graph(graph).result
    assert {key: result[key] for key in ("size", "none", "name")} == {"size": 3, "none": None, "name": "out"}


def test_an_output_may_be_an_input_a_parameter_or_the_same_tensor_twice() -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return x, self.weight.t(), y, y, y[0]

    model, x = Echo(), random(3)
    graph = capture(model, x)
    result = run_graph(graph).result
    for actual, expected in zip(result, model(x), strict=True):
        close(actual, expected.detach(), 0.0)
    assert [graph.names[op] for op in graph.tensor_op[graph.output_tensors]] == ["weight", "input_0", "mul"]


def test_inputs_may_be_a_list_and_hold_plain_values() -> None:
    graph = capture(Function(lambda y, k, flag: y * k if flag else y), [random(3, 4), 3, True], mean_square)
    assert [name for name in graph.names if name.startswith("input")] == ["input_0"]


def test_fingerprints_are_stable_and_tell_shapes_dtypes_and_optimizers_apart() -> None:
    def fingerprint(x: torch.Tensor, optimizer: str | None = "sgd", width: int = 4) -> str:
        return capture(Function(torch.relu, width, x.dtype), x, mean_square, optimizer).fingerprint

    same = fingerprint(random(3, 4))
    assert fingerprint(random(3, 4, seed=5)) == same
    others = {
        fingerprint(random(2, 4)),
        fingerprint(random(3, 4), width=5),
        fingerprint(random(3, 4, dtype=torch.float32)),
        fingerprint(random(3, 4), "adam"),
        fingerprint(random(3, 4), None),
    }
    assert len(others | {same}) == 6


def test_a_model_of_fake_tensors_is_captured_like_a_real_one() -> None:
    def build_model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    with FakeTensorMode():
        model, x = build_model(), torch.randn(3, 4)
    real = capture(build_model(), torch.randn(3, 4), mean_square, "adam")
    assert capture(model, x, mean_square, "adam").fingerprint == real.fingerprint
    assert capture(model, torch.randn(3, 4), mean_square, "adam").fingerprint == real.fingerprint


def test_copies_of_fake_layers_are_captured_too() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = torch.ones(4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale + self.shift

    def build_model(layer: nn.Module) -> nn.Module:
        return nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer))

    real = capture(build_model(Layer()), torch.randn(3, 4), mean_square, "adam").fingerprint
    with warnings.catch_warnings(record=True) as seen, without_memory():
        fake, x = build_model(Layer()), torch.randn(3, 4)
    assert not seen
    assert capture(fake, x, mean_square, "adam").fingerprint == real
    with FakeTensorMode():  # a mode of the user's: every copy has its own
        fake, x = nn.Sequential(*(copy.deepcopy(nn.Linear(4, 4)) for _ in range(2))), torch.randn(3, 4)
    assert capture(fake, x, mean_square, "adam").num_ops


def test_without_an_optimizer_there_are_gradients_but_no_updates() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4), mean_square)
    assert not any(target.startswith("update") for target in graph.targets)
    assert graph.program is not None
    assert graph.program.is_training


def test_what_cannot_be_asked_for_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(InvalidValue, match="optimizer needs a loss"):
        capture(model, torch.ones(3, 4), optimizer="sgd")
    with pytest.raises(UnknownName, match="adam"):
        capture(model, torch.ones(3, 4), mean_square, "adamm")
    with pytest.raises(InvalidValue, match="tuple or a dict"):
        capture(model, "x")


def test_a_model_that_returns_something_else_is_told() -> None:
    with pytest.raises(CaptureError, match="expected tensors and plain constants"):
        capture(Function(lambda y: {"y": {1, 2}}, dtype=torch.float32), torch.ones(3, 4))


def test_as_call() -> None:
    x = torch.ones(1)
    assert as_call(x) == ((x,), {})
    assert as_call([x, 2]) == ((x, 2), {})
    assert as_call({"x": x}) == ((), {"x": x})


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_is_random_only_where_something_is_drawn(p: float) -> None:
    graph = capture(Dropouts(p), random(3, 4), mean_square)
    assert graph.program is not None
    assert any(getattr(call, "is_random", False) for call in graph.program.calls.values()) == (p > 0)


def test_no_alias_is_written_in_a_captured_step() -> None:
    """All writes are to parameters and buffers, by their own updates."""
    graph = capture(InPlace(), random(3, 4), mean_square, "sgd")
    assert writes(graph) == {"weight", "bias"}
    case = CASES["buffers"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "sgd")
    assert writes(graph) == {"weight", "bias", "mean", "count", "last", "rows"}


def writes(graph: OpGraph) -> set[str]:
    written = graph.tensor_op[graph.mutation_tensor]
    assert np.all(graph.is_resident[written])
    return {graph.names[op].rpartition(".")[2] for op in written}


@dataclass
class Answer:
    """No more than its attributes."""

    scores: Tensor
    seen: dict[str, Any]


class Locked:
    """More than its attributes: no copy of a lock is one."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.lock = scores, threading.Lock()


def test_objects_that_are_their_attributes_are_made_anew_by_each_step() -> None:
    model = Function(
        lambda y: Answer(y + 1, {"twice": [y * 2], "name": "run", "inner": Answer(y, {})}), dtype=torch.float32
    )
    x = torch.ones(3, 4)
    graph, expected = capture(model, x), model(x)
    first, second = run_graph(graph).result, run_graph(graph).result
    assert type(first) is Answer
    assert (first is not second, first.seen is not second.seen, first.seen["name"]) == (True, True, "run")
    found = (first.scores, first.seen["twice"][0], first.seen["inner"].scores)
    torch.testing.assert_close(found, (expected.scores, expected.seen["twice"][0], expected.seen["inner"].scores))


def test_objects_that_are_more_than_their_attributes_are_refused() -> None:
    module = nn.Linear(2, 2)
    for returned in (Locked, lambda y: [y, module], lambda y: lambda: y, lambda y: slice(0, 2)):
        with pytest.raises(CaptureError, match="expected tensors and plain constants"):
            capture(Function(returned, dtype=torch.float32), torch.ones(3, 4))


def test_what_a_kernel_lays_out_otherwise_than_its_fake_twin_is_copied() -> None:
    weight = nn.Linear(4, 6)

    def loss(y: Tensor) -> Tensor:
        rows = functional.softplus(y).transpose(1, 2).contiguous()  # whose gradient is transposed
        return (rows * torch.arange(5.0)).square().sum()

    x = torch.randn(2, 5, 4)
    step = run_graph(capture(weight, x, loss))
    expected = loss(weight(x))
    expected.backward()
    torch.testing.assert_close(step.result, expected.detach())
    torch.testing.assert_close(step.gradients["weight"], weight.weight.grad)
