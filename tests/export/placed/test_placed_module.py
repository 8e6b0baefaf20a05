"""A placed module runs what its model runs: forward and backward, in any mode, for any arguments."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import assert_same_state, batches, captured, classifier, module_of, placed, twin
from small_models import CASES, Case
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError, InvalidValue, RunnerError, UserError
from rlplace.graphs import capture
from rlplace.graphs.capturing.capture import as_call

WRITES_TO_INPUTS = {"input_changed"}


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """A placed module, and the model eagerly."""
    model = classifier()
    module = module_of(model)
    yield module, twin(model)
    module.close()


def test_it_trains_as_its_model_in_a_plain_loop(pair: tuple[Any, Any]) -> None:
    module, eager = pair
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in pair]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]
    for number, size in enumerate((5, 5, 2, 5, 3)):
        losses = []
        for each, optimizer, schedule in zip(pair, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            for x, labels in batches(2, size, seed=number):
                loss = functional.cross_entropy(each(x), labels, label_smoothing=0.1)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    assert_same_state(module.state_dict(), eager.state_dict())
    assert module.num_graphs == 3


def test_modes_are_followed_dropout_among_them(pair: tuple[Any, Any]) -> None:
    del pair
    model = classifier(dropout=0.5)
    module = module_of(model)
    ((x, _),) = batches(1)
    module.eval()
    expected = twin(model).eval()(x)
    torch.testing.assert_close(module(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected.detach())
        assert not module(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(module(x).clone(), expected.detach())
    assert module.num_graphs == 2
    module.train()
    outputs = [module(x) for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1])
    assert module.num_graphs == 3
    module.dropout.eval()
    assert_close_to = twin(model).train()
    assert_close_to.dropout.eval()
    torch.testing.assert_close(module(x), assert_close_to(x))
    assert model.training
    assert model.dropout.training
    module.close()


def test_dropout_of_the_backward_is_that_of_its_forward() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)).double()
    ((x, _),) = batches(1)
    graph = capture(model, x, lambda y: y.sum(), "sgd")
    module = module_of(model, graph)
    outputs = [module(x) for _ in range(3)]
    for output in reversed(outputs):
        module.zero_grad()
        output.sum().backward()
        kept = (output != 0).double() * 2
        torch.testing.assert_close(module[0].bias.grad, kept.sum(0))
    module.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in WRITES_TO_INPUTS])
def test_every_small_model_gives_what_it_gives_in_eager(name: str) -> None:
    case: Case = CASES[name]()
    args, kwargs = as_call(case.inputs)
    graph = capture(case.model, case.inputs, case.loss_fn, targets=case.targets or None)
    eager = copy.deepcopy(case.model)
    module = module_of(case.model, graph)
    for _ in range(2):
        losses = [case.loss_fn(each(*args, **kwargs), *case.targets) for each in (module, eager)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*[loss.detach() for loss in losses], rtol=case.atol, atol=case.atol)
    for (parameter_name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), parameter_name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=case.atol, atol=case.atol, msg=parameter_name)
    assert_same_state(module.state_dict(), eager.state_dict(), case.atol)
    module.close()


def test_inputs_have_gradients_and_it_is_a_part_of_a_larger_model(pair: tuple[Any, Any]) -> None:
    module, eager = pair
    before = nn.Linear(6, 6).double()
    ((x, labels),) = batches(1)
    x.requires_grad_(True)
    found = []
    for each in (module, eager):
        before.zero_grad()
        x.grad = None
        functional.cross_entropy(each(before(x)) * 2, labels).backward()
        found.append((x.grad, before.weight.grad, each.first.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_around_a_module_that_is_traced_meanwhile_is_told(pair: tuple[Any, Any]) -> None:
    """The recomputation would call the module within its own capture of a new shape: that is said, by its own error."""
    module, eager = pair
    (x, _), *_ = batches(1)
    one, two = (x[:3].clone().requires_grad_() for _ in range(2))
    with pytest.raises(UserError, match=r"^a placed model was called within a call of itself"):
        checkpoint(module, one, use_reentrant=False).sum().backward()
    for each, given in ((module, one), (eager, two)):
        checkpoint(each, given, use_reentrant=True).sum().backward()
    torch.testing.assert_close(one.grad, two.grad)


def test_two_forwards_wait_for_one_backward(pair: tuple[Any, Any]) -> None:
    module, eager = pair
    (one, _), (other, _) = batches(2)
    for each in (module, eager):
        (each(one) * each(other)).sum().backward()
    torch.testing.assert_close(module.first.weight.grad, eager.first.weight.grad)
    torch.testing.assert_close(module.second.bias.grad, eager.second.bias.grad)


def test_freezing_and_unfreezing_is_followed(pair: tuple[Any, Any]) -> None:
    ((x, labels),) = batches(1)
    for is_trained in (False, True):
        for each in pair:
            each.zero_grad()
            each.frozen.requires_grad_(is_trained)
            each.first.requires_grad_(not is_trained)
            functional.cross_entropy(each(x), labels).backward()
        for ours, theirs in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_other_arguments_are_other_graphs_and_keywords_come_in_any_order() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3).double()

        def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor) -> dict[str, Any]:
            y = self.linear(x) * scale + shift
            return {"y": y, "pair": (y, y.argmax(1)), "scale": scale}

    model = Scaled()
    ((x, _),) = batches(1)
    shift = torch.ones(3, dtype=torch.float64)
    graph = capture(model, {"x": x, "shift": shift}, lambda output: output["y"].sum())
    module = module_of(model, graph)
    first = module(x, shift=shift, scale=2.0)
    again = module(x, scale=2.0, shift=shift)
    other = module(x, scale=3.0, shift=shift)
    assert module.num_graphs == 2
    expected = model(x, shift=shift, scale=2.0)
    torch.testing.assert_close(first["y"], expected["y"])
    torch.testing.assert_close(first["pair"], expected["pair"])
    assert (again["scale"], other["scale"]) == (2.0, 3.0)
    torch.testing.assert_close(other["y"], model(x, shift=shift, scale=3.0)["y"])
    first["y"].add_(1)  # what is handed out is nobody else's
    torch.testing.assert_close(first["pair"][0], expected["y"])
    module.close()


def test_what_a_call_holds_is_freed_with_its_output(pair: tuple[Any, Any]) -> None:
    module, _ = pair
    ((x, labels),) = batches(1)
    functional.cross_entropy(module(x), labels).backward()
    gc.disable()
    try:
        output = module(x)
        gone = weakref.ref(output.grad_fn)
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_what_autograd_would_refuse_is_refused(pair: tuple[Any, Any]) -> None:
    module, _ = pair
    ((x, labels),) = batches(1)
    loss = functional.cross_entropy(module(x), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RunnerError, match="a second time"):
        loss.backward()
    loss = functional.cross_entropy(module(x), labels)
    with torch.no_grad():
        module.first.weight.add_(1)
    with pytest.raises(RunnerError, match="modified in place between forward and backward"):
        loss.backward()
    loss = functional.cross_entropy(module(x), labels)
    loss.backward()


def test_a_backward_that_reads_what_the_forward_changed_is_told() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.weight * self.scale * x
            self.scale = x.detach().sum(0)
            return y

    model = Replaces()
    module = module_of(model, capture(model, torch.ones(3, 4), lambda y: y.sum()))
    with pytest.raises(CaptureError, match=r"reads scale as it was before `forward` changed it.*`scale\.clone\(\)`"):
        module(torch.ones(3, 4))
    module.close()


def test_a_placement_of_micro_batches_is_one_of_the_module_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    ((x, labels),) = batches(1, 4)
    module = module_of(model, capture(model, x, functional.cross_entropy, "sgd", targets=labels, micro_batches=2))
    functional.cross_entropy(module(x), labels).backward()
    functional.cross_entropy(model(x), labels).backward()
    torch.testing.assert_close(module[0].weight.grad, model[0].weight.grad)
    module.close()


def test_autocast_around_a_call_is_followed() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.ones(4, 6)
    module = module_of(model, capture(model, x, lambda y: y.sum(), "sgd"))
    for is_enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
            ours, theirs = module(x), model(x)
        assert ours.dtype == theirs.dtype == (torch.bfloat16 if is_enabled else torch.float32)
        torch.testing.assert_close(ours, theirs)
        for each, output in ((module, ours), (model, theirs)):
            each.zero_grad()
            output.float().sum().backward()
        torch.testing.assert_close(module[0].weight.grad, model[0].weight.grad)
    assert module.num_graphs == 2
    module.close()


def test_parameters_that_were_moved_elsewhere_are_told() -> None:
    module = module_of(classifier())
    ((x, _),) = batches(1)
    module.first.weight = nn.Parameter(torch.empty(8, 6, device="meta", dtype=torch.float64))
    with pytest.raises(InvalidValue, match=r"first\.weight is 'on meta', expected on cpu, as placed"):
        module(x)
    module.close()


def test_gradients_of_gradients_are_refused(pair: tuple[Any, Any]) -> None:
    module, eager = pair
    ((x, _),) = batches(1)
    x.requires_grad_(True)
    output = module(x).sum()
    with pytest.raises(UserError, match=r"create_graph=True.* unplaced"):
        torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.functional.hessian(lambda value: module(value).sum(), x.detach())
    (ours,) = torch.autograd.grad(output, x)  # what was refused has freed nothing
    (theirs,) = torch.autograd.grad(eager(x).sum(), x)
    torch.testing.assert_close(ours, theirs)
    for is_reentrant in (False, True):
        for each in pair:
            checkpoint(each, x, use_reentrant=is_reentrant).sum().backward()
    torch.testing.assert_close(module.first.weight.grad, eager.first.weight.grad)


CHANGES: dict[str, Callable[[Any], object]] = {
    "second is 'replaced'": lambda module: setattr(module, "second", nn.Linear(8, 7).double()),
    "more is 'new'": lambda module: module.add_module("more", nn.Linear(3, 3)),
    "dropout is 'gone'": lambda module: delattr(module, "dropout"),
    "second.bias is 'gone'": lambda module: setattr(module.second, "bias", None),
    "first.bias is 'new'": lambda module: setattr(module.first, "bias", nn.Parameter(torch.ones(8))),
    "first.parametrizations is 'new'": lambda module: nn.utils.parametrizations.weight_norm(module.first),
    "hooks of norm is 'changed'": lambda module: module.norm.register_forward_hook(lambda *given: None),
    "hooks of first is 'changed'": lambda module: module.first.register_full_backward_hook(lambda *given: None),
    r"first.weight is 'float16 \(8, 6\)', expected float64 \(8, 6\), as placed": lambda module: module.half(),
    r"first.weight is 'float64 \(1, 6\)', expected float64": lambda module: setattr(
        module.first, "weight", nn.Parameter(torch.ones(1, 6, dtype=torch.float64))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("message", CHANGES)
@pytest.mark.parametrize("was_called", [False, True])
def test_changes_of_what_was_captured_are_refused_by_name(
    pair: tuple[Any, Any], message: str, was_called: bool
) -> None:
    module, _ = pair
    ((x, _),) = batches(1)
    if was_called:
        module(x)
    CHANGES[message](module)
    with pytest.raises(InvalidValue, match=message):
        module(x)


def test_changes_that_are_taken_back_are_none(pair: tuple[Any, Any]) -> None:
    module, eager = pair
    ((x, _),) = batches(1)
    module.norm.register_forward_hook(lambda *given: None).remove()
    first = module.first
    del module.first
    module.first = first
    module.register_forward_hook(lambda each, given, output: output * 2)  # of the module itself: around each call
    torch.testing.assert_close(module(x), eager(x) * 2)


def test_weights_that_were_untied_are_told() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[1].weight = model[0].weight
    ((x, _),) = batches(1)
    module = module_of(model, capture(model, x, lambda y: y.sum(), "sgd"))
    torch.testing.assert_close(module(x), model(x))
    module[1].weight = nn.Parameter(module[0].weight.detach() * 2)
    with pytest.raises(InvalidValue, match=r"1\.weight is 'untied'"):
        module(x)
    module.close()


def test_an_input_without_data_is_told(pair: tuple[Any, Any]) -> None:
    module, _ = pair
    ((x, labels),) = batches(1)
    with pytest.raises(InvalidValue, match="tensor 0 of the call is meta"):
        module(x.to("meta"))
    with placed(captured(classifier())) as step:
        with pytest.raises(InvalidValue, match="tensor 0 of the call is meta"):
            step.backward(x.to("meta"), targets=labels)
        with pytest.raises(InvalidValue, match="tensor 1 of the call is meta"):
            step.backward(x, targets=labels.to("meta"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_and_forward_mode_are_refused(pair: tuple[Any, Any]) -> None:
    module, _ = pair
    ((x, _),) = batches(1)

    def tangent() -> Tensor | None:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    calls: list[Callable[[], object]] = [
        tangent,
        lambda: torch.func.jvp(module, (x,), (x,)),
        lambda: torch.func.vmap(module)(x[:, None]),
        lambda: torch.func.grad(lambda x: module(x).sum())(x),
    ]
    for call in calls:
        with pytest.raises(UserError, match="forward-mode AD cannot transform: call the model itself"):
            call()
    with forward_ad.dual_level():
        module(x)


def test_a_module_made_and_first_called_under_inference_mode_trains_afterwards() -> None:
    model = classifier()
    ((x, labels),) = batches(1)
    with torch.inference_mode():
        module = module_of(model)
        module(x)
    eager = twin(model)
    eager(x)
    for each in (module, eager):
        functional.cross_entropy(each(x), labels).backward()
    torch.testing.assert_close(module.first.weight.grad, eager.first.weight.grad)
    module.close()
