"""A captured step, run op by op, is the eager step: for small models of every trait (workloads: `test_catalog`)."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from small_models import (
    CASES,
    Case,
    Dropouts,
    Function,
    InPlace,
    Keywords,
    Model,
    mean_square,
    random,
    run_eager,
    step_graph,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.export import PlacedModel
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.capture import as_call, capture_module
from rlplace.graphs.capturing.trace import AsSlice, backward_ends
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph
from rlplace.graphs.optimizers import resolve_optimizer, torch_optimizer
from rlplace.measure.timing.eager_step import EagerStep
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
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.calls = max(model.calls, 1)
        model.cache = model.norm(x)
        return model.cache

    model, x = Model(forward, norm=nn.BatchNorm1d(4), calls=0), random(3, 4, dtype=torch.float32)
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


def test_outputs_keep_their_structure_and_plain_constants_in_inference() -> None:
    inputs = {"x": random(3, 4), "scale": 0.5, "extra": {"shift": random(4)}}
    model = Keywords()
    expected, result = model(**inputs), run_graph(capture(model, inputs)).result
    assert result.keys() == {"y", "pair"}
    assert isinstance(result["pair"], tuple)
    close(result["y"], expected["y"].detach(), 0.0)
    close(result["pair"][1], expected["pair"][1].detach(), 0.0)
    graph = capture(Function(lambda y: {"y": y, "size": y.shape[0], "none": None, "name": "out"}), random(3, 4))
    result = run_graph(graph).result
    assert {key: result[key] for key in ("size", "none", "name")} == {"size": 3, "none": None, "name": "out"}


def test_an_output_may_be_an_input_a_parameter_or_the_same_tensor_twice() -> None:
    def echo(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x, model.weight.t(), y, y, y[0]

    model, x = Model(echo, weight=nn.Parameter(random(2, 3))), random(3)
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
    assert any(getattr(call, "is_random", False) for call in graph.program.calls.values()) == (p > 0)


def test_no_alias_is_written_in_a_captured_step() -> None:
    """All writes are to parameters and buffers, by their own updates."""
    graph = capture(InPlace(), random(3, 4), mean_square, "sgd")
    assert writes(graph) == {"weight", "bias"}
    graph = step_graph("buffers", "sgd")
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


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (nn.Linear(4, 2), lambda y: y, "expected a scalar tensor"),
        (nn.Linear(4, 2), lambda y: 3.0, "the loss is float"),
        (nn.Linear(4, 2).requires_grad_(False), mean_square, "does not depend on any parameter"),
        (nn.Linear(4, 2), lambda y: torch.ones(()), "does not depend on any parameter"),
    ],
)
def test_a_step_without_a_meaning_says_why(model: nn.Module, loss_fn: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.ones(3, 4), loss_fn)


def test_a_whole_step_begins_at_its_loss_and_a_slice_at_its_part_of_it() -> None:
    loss = torch.ones((), requires_grad=True) * 3
    ends, seeds = backward_ends((loss, {"accuracy": 1.0}), [], None)
    assert ends == [loss]
    assert [seed.item() for seed in seeds] == [1.0]
    assert [seed.item() for seed in backward_ends(loss, [], AsSlice(weight=0.25))[1]] == [0.25]
    with pytest.raises(CaptureError, match="returned a tuple, expected the loss alone"):
        backward_ends((loss, 1.0), [], AsSlice(weight=0.25))


def test_without_a_loss_of_its_own_a_slice_begins_at_outputs_that_are_given() -> None:
    outputs = [torch.ones(2, requires_grad=True) * 2, torch.ones(2)]
    given = [torch.full((2,), 0.5)]
    ends, seeds = backward_ends(outputs, given, AsSlice(outputs=(0,)))
    assert ends == [outputs[0]]
    assert seeds is given


class Two(nn.Module):
    """Two outputs with a gradient, one without, and one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"rank": y.argsort(1), "y": y * z, "sum": y.sum(), "name": "two"}


def test_outputs_with_a_gradient_are_told_and_have_a_target_each() -> None:
    captured = capture_module(Two(), (random(3, 4), random(3, 4)), {}, has_backward=True)
    program = require_program(captured.graph)
    assert captured.with_gradient == (1, 2)
    targets = [source for source in program.sources.values() if source.kind == "target"]
    assert [tuple(source.value.shape) for source in targets] == [(3, 4), ()]
    assert set(program.gradients) == {"linear.weight", "linear.bias"}
    assert program.input_gradients == {}
    assert program.result["name"] == "two"


def test_inputs_have_gradients_where_they_are_wanted() -> None:
    x, z = random(3, 4), random(3, 4, seed=2)
    captured = capture_module(Two(), (x, z), {}, has_backward=True, differentiated=(1,))
    assert set(require_program(captured.graph).input_gradients) == {1}
    frozen = Two().requires_grad_(False)
    captured = capture_module(frozen, (x, z), {}, has_backward=True, differentiated=(0, 1))
    assert set(require_program(captured.graph).input_gradients) == {0, 1}
    assert not require_program(captured.graph).gradients


def test_without_a_backward_it_is_the_forward() -> None:
    for model, has_backward in ((Two(), False), (Two().requires_grad_(False), True)):
        captured = capture_module(model, (random(3, 4), random(3, 4)), {}, has_backward=has_backward)
        assert captured.with_gradient == ()
        assert not (captured.graph.phases == BACKWARD).any()


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "tied", "frozen_and_unused", "attention", "buffers"])
def test_it_has_the_forward_and_the_backward_of_the_step_with_a_loss(name: str) -> None:
    """Each op of the model's own is there once, by its target: what is placed for the one is placed for the other."""
    case: Case = CASES[name]()
    args, kwargs = as_call(case.inputs)
    step = capture(case.model, case.inputs, case.loss_fn)
    module = capture_module(case.model, args, kwargs, has_backward=True).graph

    def forward(graph: object) -> list[tuple[str, str]]:
        pairs = zip(graph.modules, graph.targets, graph.phases, strict=True)  # type: ignore[attr-defined]
        return [
            (path, target) for path, target, phase in pairs if phase == FORWARD and target not in ("input", "constant")
        ]

    found = forward(module)
    assert found == forward(step)[: len(found)]


def test_a_step_knows_its_gradients_and_where_its_backward_begins() -> None:
    case = CASES["frozen_and_unused"]()
    for optimizer in (None, "sgd"):
        graph = capture(case.model, case.inputs, case.loss_fn, optimizer)
        program = require_program(graph)
        assert set(program.gradients) == {"trained.weight", "trained.bias"}
        assert [graph.targets[op] for op in program.seeds] == ["aten.ones_like.default"]
        found = run_graph(graph).gradients
        output = case.loss_fn(case.model(case.inputs))
        expected = torch.autograd.grad(output, [case.model.trained.weight, case.model.trained.bias])  # type: ignore[union-attr]
        torch.testing.assert_close(found["trained.weight"], expected[0])
        torch.testing.assert_close(found["trained.bias"], expected[1])


def test_a_gradient_that_no_update_takes_is_made_where_its_parameter_lives() -> None:
    graph = step_graph("linear", None)
    program = require_program(graph)
    for name, gradient in program.gradients.items():
        parameter, producer = graph.names.index(name), int(graph.tensor_op[program.base(gradient)])
        assert graph.colocation[parameter] == graph.colocation[producer] >= 0


compiled = functools.partial(torch.compile, backend="eager")


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @compiled
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    return model


@compiled
def compiled_loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "method": Decorated,
    "method below": lambda: nn.Sequential(Decorated(), nn.Linear(4, 4)),
    "model": lambda: compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    "module": lambda: nn.Sequential(compiled(nn.Linear(4, 4)), nn.ReLU()),
    "in place": in_place,
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_compiled_is_captured_as_it_was_written(name: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    x, t, model = torch.randn(8, 4), torch.randn(8, 4), MODELS[name]()
    with torch.compiler.set_stance("force_eager"):
        expected = compiled_loss(model(x), t)
    graph = capture(model, x, compiled_loss, "sgd", targets=t, micro_batches=micro_batches, loss="joined")
    host = core_host(2)
    with PlacedModel(graph, host, naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))) as step:
        assert step(x, targets=t).item() == pytest.approx(expected.item(), rel=1e-5)
        before = copy.deepcopy(dict(model.named_parameters()))
        step.copy_to(model)
        assert all(not torch.equal(value, before[key]) for key, value in model.named_parameters() if value.any())
    eager = EagerStep(graph, host)
    eager()
    torch._dynamo.reset()


def test_a_compiled_model_has_the_names_of_its_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    ours, theirs = (capture(each, torch.ones(2, 4), lambda y: y.sum(), "sgd") for each in (compiled(model), model))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.names == theirs.names


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.last(torch.relu(self.norm(self.first(x))))
            return torch.softmax(self.batch_norm(y), -1)


class Parts(nn.Module):
    """A part in bfloat16, a part in float32, and a weight that both names of one module share."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
        self.tied = nn.Sequential(nn.Linear(8, 8, bias=False))
        self.tied[0].weight = self.high.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.high(self.low(x.bfloat16()).float())))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def float_mean_square(y: Tensor) -> Tensor:
    return (y.float() ** 2).mean()


def autocast_loss(y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(y, y).float().mean()


PRECISIONS: dict[str, tuple[Callable[[], nn.Module], torch.dtype, Callable[[Tensor], Tensor]]] = {
    "autocast": (Autocast, torch.float32, float_mean_square),
    "autocast around the loss": (plain, torch.float32, autocast_loss),
    "bfloat16": (lambda: plain().bfloat16(), torch.bfloat16, float_mean_square),
    "float16": (lambda: plain().half(), torch.float16, float_mean_square),
    "parts": (Parts, torch.float32, float_mean_square),
}


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_equals_eager_to_the_bit(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    make, dtype, loss_fn = PRECISIONS[name]
    model, x = make(), random(6, 8).to(dtype)
    graph = capture(model, x, loss_fn, optimizer)
    assert "bfloat16" in graph.tensor_dtypes or dtype is torch.float16
    step, eager = run_graph(graph), copy.deepcopy(model)
    spec = resolve_optimizer(optimizer)
    assert spec is not None
    updater = torch_optimizer(spec, list(eager.parameters()))
    loss = loss_fn(eager(x))
    loss.backward()
    assert torch.equal(step.result, loss.detach())
    for parameter, value in eager.named_parameters():
        assert value.grad is not None
        assert torch.equal(step.gradients[parameter], value.grad)
    updater.step()
    for key, value in (*eager.named_parameters(), *eager.named_buffers()):
        assert torch.equal(step.state[key], value.detach())
        assert step.state[key].dtype == value.dtype


def test_a_shared_weight_has_one_parameter_one_update_and_its_gradients_summed() -> None:
    graph = capture(Parts(), random(6, 8, dtype=torch.float32), float_mean_square, "adam")
    names = [name for name, target in zip(graph.names, graph.targets, strict=True) if target == "parameter"]
    assert names == ["low.weight", "low.bias", "high.weight", "high.bias"]
    assert [name for name in graph.names if name.startswith("update_")] == [f"update_{name}" for name in names]
    state = {name: int(bytes_) for name, bytes_ in zip(graph.names, graph.state_bytes, strict=True) if bytes_}
    assert state["update_low.weight"] == 2 * 64 * 2 + 4
    assert state["update_high.weight"] == 2 * 64 * 4 + 4


def test_a_capture_inside_of_autocast_holds_its_casts() -> None:
    torch.manual_seed(0)
    model, x = plain(), random(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        graph, expected = capture(model, x), model(x)
    assert "aten._to_copy.default" in graph.targets
    assert torch.equal(run_graph(graph).result, expected.detach())


def test_what_was_active_around_the_capture_is_remembered() -> None:
    model, x = plain(), random(6, 8, dtype=torch.float32)
    assert require_program(capture(model, x)).origin.autocast is None
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(model, x)
        with torch.autocast("cpu", enabled=False):
            assert require_program(capture(model, x)).origin.autocast is None
    assert require_program(graph).origin.autocast == torch.bfloat16


def test_autocast_of_a_gpu_around_a_model_on_the_cpu_is_refused_rather_than_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda kind: kind == "cuda"
    )  # without a GPU it cannot be turned on
    with pytest.raises(
        CaptureError, match=r'`torch.autocast\("cuda"\)` is active .* use `torch.autocast\("cpu", dtype'
    ):
        capture(plain(), random(6, 8, dtype=torch.float32))
