"""A captured step is compared with plain PyTorch: what is wrong is refused, what is right is not, nothing is left
behind."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from small_models import Model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplace import capture
from rlplace.errors import CaptureError
from rlplace.graphs.interpreter import run_graph
from rlplace.graphs.program import LossVerdict
from rlplace.graphs.self_check import StepDiffers

MSE = functional.mse_loss


def batch(samples: int = 8, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, width, generator=generator), torch.randn(samples, classes, generator=generator)


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


class ViaReentrant(nn.Module):
    """A block whose input needs no gradient, in a checkpoint that runs a backward of its own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True)
        return self.head(h)


def adapter() -> nn.Module:
    base, down, up = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    return Model(lambda model, x: torch.tanh(model.base(x) + model.up(model.down(x))), base=base, down=down, up=up)


class AddsToGrad(torch.autograd.Function):
    """A fused backward that adds the weight's gradient to `.grad` by itself, and hands none on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        own = gradient.t() @ x
        with torch.no_grad():
            ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return gradient @ ctx.weight, None


def fused() -> nn.Module:
    parts = {"first": nn.Linear(6, 8), "weight": nn.Parameter(torch.randn(3, 8))}
    return Model(lambda model, x: AddsToGrad.apply(model.first(x), model.weight), **parts)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "make",
    [lambda: ViaReentrant(nn.Linear(6, 6)), lambda: ViaReentrant(adapter()), fused],
    ids=["linear", "lora", "fused"],
)
def test_a_backward_as_a_side_effect_is_part_of_the_step(make: Callable[[], nn.Module], micro_batches: int) -> None:
    model, (x, y) = make().double(), (each.double() for each in batch())
    found = run_graph(capture(model, x, MSE, "sgd", targets=y, micro_batches=micro_batches)).gradients
    MSE(model(x), y).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class Keeps(torch.autograd.Function):
    """Keeps a gradient for later steps, where no graph sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: nn.Module) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not is_traced():
            ctx.owner.body.weight.grad = torch.ones_like(ctx.owner.body.weight)
        return gradient, None


class LosesGradients(ViaReentrant):
    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(self.head(self.body(x).detach()), self)


def test_a_gradient_that_only_plain_pytorch_has_is_named() -> None:
    x, y = batch()
    with pytest.raises(StepDiffers, match=r"the gradient of 'body.weight' has none when captured"):
        capture(LosesGradients(nn.Linear(6, 6)), x, MSE, "sgd", targets=y)


def first_half(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output[:16], target[:16])


def at_least_eight(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / max(len(output), 8)


def more_for_many(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output, target) + (output.square().mean() if len(output) > 20 else 0.0)


def masked_by_position(output: Tensor, target: Tensor) -> Tensor:
    keep = (torch.arange(len(output)) % 5 < 3).unsqueeze(1)
    return ((output - target).square() * keep).sum() / keep.sum()


def detached_half(output: Tensor, target: Tensor) -> Tensor:
    half = len(output) // 2
    return MSE(torch.cat([output[:half], output[half:].detach()]), target)


@pytest.mark.parametrize("loss_fn", [first_half, at_least_eight, more_for_many, masked_by_position, detached_half])
def test_a_loss_that_looks_at_positions_is_joined_or_refused(loss_fn: Callable[..., Tensor]) -> None:
    x, y = batch(32)
    micro = capture(net(nn.Tanh()), x, loss_fn, "sgd", targets=y, micro_batches=2).program.origin.micro
    assert micro.verdict.kind == "joined"
    asked = LossVerdict("separate", "sum" if loss_fn is at_least_eight else "mean", True, "as the user says")
    with pytest.raises(StepDiffers):
        capture(net(nn.Tanh()), x, loss_fn, "sgd", targets=y, micro_batches=2, loss=asked)


@pytest.mark.parametrize(
    "order",
    [
        lambda n: torch.rand(n).argsort(),
        lambda n: torch.randn(n).topk(n).indices,
        lambda n: torch.rand(n).sort().indices,
    ],
    ids=["argsort", "topk", "sort"],
)
def test_mixup_by_a_drawn_order_is_refused_in_micro_batches(order: Callable[[int], Tensor]) -> None:
    x, y = batch(32)
    model = Model(lambda model, x: model.net(0.5 * x + 0.5 * x[order(len(x))]), net=net(nn.Tanh()))
    capture(model, x, MSE, "sgd", targets=y)
    with pytest.raises(CaptureError):
        capture(model, x, MSE, "sgd", targets=y, micro_batches=2)


class LosesAnUpdate(torch.autograd.Function):
    """Computes something else where it is traced: a stand-in for kinds of faults that are not known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1.0 if type(x) is Tensor else 1.001)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def odd(change: Callable[[Tensor], Tensor]) -> nn.Module:
    return Model(lambda model, x: model.net(change(x)), net=net(nn.Tanh()), seen=torch.zeros(6))


def is_traced() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def with_another_gradient(x: Tensor) -> Tensor:
    return x if not is_traced() else x * 1.0 + 1e-6


@pytest.mark.parametrize(
    "change",
    [lambda x: LosesAnUpdate.apply(x), with_another_gradient, lambda x: x.clone() if not is_traced() else x.abs()],
)
@pytest.mark.parametrize("loss_fn", [None, MSE])
def test_what_computes_something_else_when_traced_is_refused(change: Any, loss_fn: Any) -> None:
    x, y = batch()
    given = {} if loss_fn is None else {"targets": y}
    with pytest.raises(StepDiffers):
        capture(odd(change), x, loss_fn, None, **given)
    assert capture(odd(change), x, loss_fn, None, check=False, **given).num_ops


RUNS = [0]
DRAWS = np.random.default_rng(0)


def counted(x: Tensor) -> Tensor:
    RUNS[0] += 1
    return x * RUNS[0]


@pytest.mark.parametrize(
    "change",
    [counted, lambda x: x * (time.time() % 1), lambda x: x * float(DRAWS.uniform())],
    ids=["counter", "clock", "generator"],
)
@pytest.mark.parametrize("loss", ["auto", "accumulated"])
def test_what_changes_from_run_to_run_outside_of_the_model_is_told(change: Any, loss: str) -> None:
    x, y = batch()
    given: dict[str, Any] = {} if loss == "auto" else {"micro_batches": 2, "loss": loss}
    with pytest.raises(StepDiffers, match="outside of the model"):
        capture(odd(change), x, MSE, "sgd", targets=y, **given)
    with pytest.raises(StepDiffers) as steady:
        capture(odd(with_another_gradient), x, MSE, "sgd", targets=y, **given)
    assert "outside of the model" not in str(steady.value)


def test_accumulation_is_advised_where_it_would_be_the_step() -> None:
    x, y = batch(32)
    for loss_fn, change, is_right in ((first_half, torch.clone, True), (MSE, with_another_gradient, False)):
        asked = LossVerdict("separate", "mean", True, "as the user says")
        with pytest.raises(StepDiffers) as refused:
            capture(odd(change), x, loss_fn, "sgd", targets=y, micro_batches=2, loss=asked)
        assert ("loss='accumulated'" in str(refused.value)) is is_right
    capture(odd(torch.clone), x, first_half, "sgd", targets=y, micro_batches=2, loss="accumulated")
    with pytest.raises(StepDiffers) as accumulated:
        capture(odd(with_another_gradient), x, MSE, "sgd", targets=y, micro_batches=2, loss="accumulated")
    assert "loss='accumulated'" not in str(accumulated.value)


def counts(model: nn.Module, x: Tensor) -> Tensor:
    if not is_traced():
        model.seen += len(x)
    return model.linear(x)


def writes_to_its_weight(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.linear.weight.mul_(0.5 if is_traced() else 0.25)
    return model.linear(x) * 0.0


@pytest.mark.parametrize(
    ("forward", "loss_fn", "told"),
    [
        (counts, MSE, "buffer 'seen'"),
        (counts, None, "buffer 'seen'"),
        (writes_to_its_weight, MSE, "parameter 'linear.weight' differs"),
    ],
)
def test_what_a_trace_leaves_out_of_the_state_is_named(forward: Any, loss_fn: Any, told: str) -> None:
    model, (x, y) = Model(forward, linear=nn.Linear(6, 3), seen=torch.zeros(())), batch()
    with pytest.raises(StepDiffers, match=told):
        capture(model, x, loss_fn, loss_fn and "sgd", **({} if loss_fn is None else {"targets": y}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: net(nn.BatchNorm1d(8), nn.Tanh()),
        lambda: net(nn.Dropout(0.3)),
        lambda: net(nn.RReLU()),
        lambda: net(nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.5)),
        lambda: net(nn.BatchNorm1d(8, track_running_stats=False)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
        lambda: net(nn.GELU(), nn.LayerNorm(8)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_right_steps_are_not_refused(make: Callable[[], nn.Module], dtype: torch.dtype, micro_batches: int) -> None:
    x, y = (each.to(dtype) for each in batch())
    capture(make().to(dtype), x, MSE, "adam", targets=y, micro_batches=micro_batches)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_alarm() -> None:
    """The bias before a batch norm changes nothing."""
    x, y = batch()
    capture(net(nn.BatchNorm1d(8)), x, MSE, "sgd", targets=y, micro_batches=2, loss="accumulated")


def test_half_precision_and_autocast_are_compared() -> None:
    x, y = batch()
    capture(net(nn.Tanh()).bfloat16(), x.bfloat16(), MSE, "sgd", targets=y.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(net(nn.Tanh(), nn.LayerNorm(8)), x, MSE, "sgd", targets=y)
        with pytest.raises(StepDiffers):
            capture(odd(lambda x: LosesAnUpdate.apply(x)), x, MSE, "sgd", targets=y)


class Leaves(nn.Module):
    """Leaves marks everywhere that a step can."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.kept = net(nn.BatchNorm1d(8), nn.Dropout(0.5)), 0, []
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(len(x))
        self.seen += x.detach().sum(0)
        return self.net(x)


class Hook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.calls += 1


def test_everything_is_as_before() -> None:
    model, (x, y) = Leaves(), batch()
    hook, seen = Hook(), list[Any]()
    model.net[0].register_forward_hook(hook)
    model.net[2].register_forward_hook(lambda module, given, output: seen.append(type(output)))
    MSE(model(x), y).backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    state, owners = copy.deepcopy(model.state_dict()), {id(each) for each in (*model.parameters(), *model.buffers())}
    marks = model.calls, list(model.kept), hook.calls, list(seen)
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with pytest.warns(RuntimeWarning, match="hooks"):
        capture(model, x, MSE, "sgd", targets=y, frozen=["calls", "kept", "net.0._forward_hooks"])
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert owners == {id(each) for each in (*model.parameters(), *model.buffers())}
    assert all(torch.equal(each.grad, gradients[name]) for name, each in model.named_parameters())
    assert (model.calls, model.kept, hook.calls, seen) == marks
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert str(np.random.get_state()) == str(streams[1])
    assert random.getstate() == streams[2]


def test_a_model_without_values_is_not_compared_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with torch._subclasses.FakeTensorMode():
        model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with caplog.at_level("INFO"):
        capture(model, x, lambda y: y.sum(), "sgd")
    assert "not compared" in caplog.text


def test_a_batch_that_plain_pytorch_refuses_is_said(caplog: pytest.LogCaptureFixture) -> None:
    capture(nn.Embedding(4, 2), torch.tensor([1, 9]), lambda y: y.sum(), "sgd")
    assert "not compared" in caplog.text
    assert "IndexError" in caplog.text


def test_a_hook_that_holds_itself_ends() -> None:
    """A recursive function is in its own closure."""

    def factorial(count: int) -> int:
        return 1 if count < 2 else count * factorial(count - 1)

    model = net(nn.Tanh())
    model.register_forward_hook(lambda module, given, output: output * factorial(3))
    with pytest.warns(RuntimeWarning, match="hooks"):
        assert capture(model, batch()[0]).num_ops
