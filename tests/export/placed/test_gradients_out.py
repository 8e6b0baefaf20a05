"""A placed step that leaves gradients does in a training loop what `loss.backward()` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from loops import HOST, apart, assert_same_state, batches, captured, classifier, gradients, placed, twin
from naive_plan import naive_plan
from placed_steps import alternating
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import InvalidValue
from rlplace.export import PlacedModel
from rlplace.graphs import capture

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "groups": lambda parameters: torch.optim.Adam(
        [
            {"params": [p for p in parameters if p.dim() == 1], "lr": 0.1},
            {"params": [p for p in parameters if p.dim() > 1]},
        ],
        lr=0.01,
    ),
}


class Lion(torch.optim.Optimizer):
    """A custom optimizer: the sign of a moving average."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    parameter.add_(average.sign(), alpha=-group["lr"])


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), labels)


@pytest.mark.parametrize("captured_optimizer", [None, "adam"])
@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), Lion], ids=[*OPTIMIZERS, "lion"])
def test_a_loop_with_clipping_accumulation_and_a_schedule_is_as_in_eager(
    make: Callable[[Iterable[Any]], torch.optim.Optimizer], captured_optimizer: str | None
) -> None:
    model = classifier()
    eager = twin(model)
    with placed(captured(model, captured_optimizer)) as step:
        ours, theirs = make(list(step.parameters())), make(list(eager.parameters()))
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (ours, theirs)]
        for number in range(5):
            ours.zero_grad()
            theirs.zero_grad()
            for x, labels in batches(2, seed=number):
                loss = step.backward(x, targets=labels, loss_scale=0.5)
                expected = loss_of(eager, x, labels)
                (expected * 0.5).backward()
                torch.testing.assert_close(loss, expected.detach())
            norms = [
                torch.nn.utils.clip_grad_norm_(each, 0.1) for each in (step.parameters(), list(eager.parameters()))
            ]
            torch.testing.assert_close(norms[0], norms[1])
            assert norms[0] > 0.1
            for each in (ours, theirs, *schedules):
                each.step()
        assert_same_state(step.state_dict(), eager.state_dict())
        assert step.num_steps == 10


def test_parameters_are_those_of_the_model_and_get_the_gradients_that_eager_gives() -> None:
    model = classifier()
    (x, labels), *_ = batches(1)
    step = placed(captured(model))
    assert [name for name, _ in step.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [p.requires_grad for p in step.parameters()] == [p.requires_grad for p in model.parameters()]
    step.backward(x, targets=labels)
    loss_of(model, x, labels).backward()
    found, expected = gradients(step.named_parameters()), gradients(model.named_parameters())
    assert {name for name, value in found.items() if value is None} == {
        *("frozen.weight", "frozen.bias", "unused.weight", "unused.bias")
    }
    for name, value in found.items():
        if value is not None:
            torch.testing.assert_close(value, expected[name])
    step.zero_grad()
    assert all(parameter.grad is None for parameter in step.parameters())
    step.close()


def test_gradients_are_tensors_of_their_own() -> None:
    """Two gradients that are one tensor in the graph, one that is a view, and the last step's."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.row = (nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (3, 4), (4,)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.one + self.other + self.row

    x = torch.ones(3, 4)
    step = placed(capture(Sum(), x, lambda y: (y**2).sum() / 2))
    step.backward(x)
    one, other, row = (parameter.grad for parameter in step.parameters())
    assert one is not None
    assert other is not None
    assert row is not None
    one.zero_()
    assert torch.equal(other, x)
    assert torch.equal(row, x.sum(0))
    kept = other.clone()
    step.zero_grad()
    step.backward(2 * x)
    assert torch.equal(other, kept), "a gradient that somebody holds was overwritten"
    other.mul_(2)  # an inference tensor would refuse
    step.close()


def test_a_step_that_updates_leaves_gradients_alone_and_the_other_way_round() -> None:
    model = classifier()
    (x, labels), (other, more) = batches(2)
    step = placed(captured(model, "sgd"))
    before = step.state_dict()
    step.backward(x, targets=labels)
    assert torch.equal(step.state_dict()["first.weight"], before["first.weight"])
    found = gradients(step.named_parameters())
    step(other, targets=more)
    assert not torch.equal(step.state_dict()["first.weight"], before["first.weight"])
    assert torch.equal(gradients(step.named_parameters())["first.weight"], found["first.weight"])
    step.close()


def test_a_parameter_that_is_frozen_on_the_way_gets_no_gradient() -> None:
    (x, labels), *_ = batches(1)
    step = placed(captured(classifier(), "sgd"))
    dict(step.named_parameters())["second.weight"].requires_grad_(False)
    step.backward(x, targets=labels)
    found = gradients(step.named_parameters())
    assert found["second.weight"] is None
    assert found["second.bias"] is not None
    step.close()


def test_hooks_of_placed_parameters_see_each_gradient_before_and_after_it_is_added() -> None:
    (x, labels), (other, more) = batches(2)
    model = classifier()
    with placed(captured(model)) as step:
        eager = twin(model)
        seen: dict[str, list[float]] = {"placed": [], "eager": []}
        for key, each in (("placed", step), ("eager", eager)):
            weight, bias = dict(each.named_parameters())["second.weight"], dict(each.named_parameters())["second.bias"]
            weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            weight.register_hook(lambda gradient, seen=seen[key]: seen.append(float(gradient.sum())))

            def halve(parameter: Tensor, seen: list[float] = seen[key]) -> None:
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
                seen.append(float(parameter.grad.sum()))

            bias.register_post_accumulate_grad_hook(halve)
        for inputs, targets in ((x, labels), (other, more)):
            step.backward(inputs, targets=targets)
            loss_of(eager, inputs, targets).backward()
        found, expected = gradients(step.named_parameters()), gradients(eager.named_parameters())
        for name, value in expected.items():
            if value is not None:
                torch.testing.assert_close(found[name], value, msg=name)
        assert len(seen["eager"]) == 4
        assert sorted(seen["placed"]) == pytest.approx(sorted(seen["eager"]))


def test_an_optimizer_may_step_in_hooks() -> None:
    model = classifier()
    with placed(captured(model)) as step:
        eager = twin(model)
        for each in (step, eager):
            for parameter in each.parameters():
                if parameter.requires_grad:
                    optimizer = torch.optim.SGD([parameter], lr=0.1)

                    def update(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                        optimizer.step()
                        optimizer.zero_grad()

                    parameter.register_post_accumulate_grad_hook(update)
        for x, labels in batches(3):
            step.backward(x, targets=labels)
            loss_of(eager, x, labels).backward()
        assert all(parameter.grad is None for parameter in step.parameters())
        assert_same_state(step.state_dict(), eager.state_dict())


def test_a_parameter_that_was_frozen_at_capture_has_no_gradient_to_leave() -> None:
    (x, labels), *_ = batches(1)
    step = placed(captured(classifier()))
    frozen = dict(step.named_parameters())["frozen.weight"]
    frozen.requires_grad_(True)
    with pytest.raises(InvalidValue, match=r"requires_grad of frozen\.weight is True.*Capture the model while"):
        step.backward(x, targets=labels)
    frozen.requires_grad_(False)
    step.backward(x, targets=labels)
    step.close()


def test_the_loss_is_scaled_before_the_backward() -> None:
    """In float16 gradients of 1e-8 are zero, unless the loss is scaled before the backward rounds them."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).float().sum() * 1e-8

    x = torch.ones(4, dtype=torch.float16)
    step = placed(capture(Tiny(), x, lambda loss: loss))
    step.backward(x)
    (weight,) = step.parameters()
    assert weight.grad is not None
    assert not weight.grad.any()
    step.zero_grad()
    loss = step.backward(x, loss_scale=torch.tensor(2.0**16))
    assert float(loss) == pytest.approx(4e-8)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((4,), 1e-8 * 2.0**16).half())
    step.close()


def test_a_gradient_scaler_works() -> None:
    model = classifier(dtype=torch.float32)
    (x, labels), *_ = batches(1)
    x = x.float()
    step = placed(capture(model, x, functional.cross_entropy, targets=labels))
    eager = twin(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (step, eager))
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        step.backward(x, targets=labels, loss_scale=scaler.scale(torch.ones(())))
        scaler.unscale_(ours)
        torch.nn.utils.clip_grad_norm_(step.parameters(), 1.0)
        scaler.step(ours)
        scaler.update()
        loss_of(eager, x, labels).backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        theirs.step()
    assert_same_state(step.state_dict(), eager.state_dict(), 1e-5)
    step.close()


@pytest.mark.parametrize("loss", ["separate", "joined"])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_micro_batches_leave_the_gradients_of_the_batch(optimizer: str | None, loss: str) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(torch.tanh(self.first(x)))
            return out

    model = Deep().double()
    (x, labels), *_ = batches(1)
    graph = capture(model, x, functional.cross_entropy, optimizer, targets=labels, micro_batches=2, loss=loss)
    step = PlacedModel(graph, HOST, naive_plan(graph, alternating(graph, 2)))
    step.backward(x, targets=labels, loss_scale=3.0)
    (loss_of(model, x, labels) * 3).backward()
    for (name, found), expected in zip(step.named_parameters(), model.parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    step.close()


def test_an_inference_has_no_backward_and_mistakes_are_told() -> None:
    model = classifier()
    (x, labels), *_ = batches(1)
    step = placed(capture(model.eval(), x))
    with pytest.raises(InvalidValue, match="loss_fn is None, expected a step captured with a loss"):
        step.backward(x)
    with pytest.raises(InvalidValue, match=r"optimizer is None.*step\.parameters\(\)"):
        _ = step.optimizer
    step.close()
    step = placed(captured(model.train()))
    with pytest.raises(InvalidValue, match="loss_scale is inf"):
        step.backward(x, targets=labels, loss_scale=float("inf"))
    with pytest.raises(InvalidValue, match="targets is None"):
        step.backward(x)
    assert all(parameter.grad is None for parameter in step.parameters())
    assert apart(step._first.graph).num_transfers > 0
    step.close()
