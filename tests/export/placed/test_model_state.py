"""The parameters of a placed step are PyTorch's own: what is done to them holds from then on, or is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from loops import assert_same_state, batches, captured, classifier, placed, twin
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rlplace.errors import InvalidValue, UnknownName
from rlplace.export import PlacedModel


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), labels).backward()
    optimizer.step()


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        y: Tensor = model(x)
    model.train()
    return y


def shrink(model: nn.Module | PlacedModel) -> None:
    """Gives all parameters new memory."""
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


@pytest.mark.parametrize("is_captured", [False, True])
def test_steps_follow_parameters_to_other_memory(is_captured: bool) -> None:
    model = classifier()
    with placed(captured(model, "adam" if is_captured else None)) as step:
        eager = twin(model)
        theirs = torch.optim.Adam(eager.parameters(), lr=1e-3)
        ours = step.optimizer if is_captured else torch.optim.Adam(step.parameters(), lr=1e-3)
        for number, (x, labels) in enumerate([*batches(3), *batches(1, size=4)]):
            if is_captured:
                step(x, targets=labels)
            else:
                ours.zero_grad()
                step.backward(x, targets=labels)
                ours.step()
            eager_step(eager, theirs, x, labels)
            if number % 2:
                shrink(step)
                shrink(eager)
        assert_same_state(step.state_dict(), eager.state_dict())


def test_averaged_parameters_can_be_swapped_in_for_an_evaluation_and_out_again() -> None:
    model = classifier()
    with placed(captured(model)) as step:
        eager = twin(model)
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (step, eager))
        for x, labels in batches(3):
            ours.zero_grad()
            step.backward(x, targets=labels)
            ours.step()
            eager_step(eager, theirs, x, labels)
            kept = [[p.data for p in each.parameters()] for each in (step, eager)]
            for each in (step, eager):
                for parameter in each.parameters():
                    parameter.data = parameter.data * 0.5
            torch.testing.assert_close(step.evaluate(x), evaluated(eager, x))
            for each, held in zip((step, eager), kept, strict=True):
                for parameter, value in zip(each.parameters(), held, strict=True):
                    parameter.data = value
            torch.testing.assert_close(step.evaluate(x), evaluated(eager, x))
        assert_same_state(step.state_dict(), eager.state_dict())


def test_memory_of_another_layout_is_refused() -> None:
    (x, labels), *_ = batches(1)
    with placed(captured(classifier())) as step:
        weight = dict(step.named_parameters())["first.weight"]
        held = weight.data
        for other in (held.float(), held[:4], held.t().contiguous().t()):
            weight.data = other
            with pytest.raises(InvalidValue, match=r"data of first\.weight is .*as captured.*copy_"):
                step.backward(x, targets=labels)
        weight.data = held
        step.backward(x, targets=labels)


def test_the_captured_optimizer_refuses_what_its_updates_would_pass_by() -> None:
    (x, labels), *_ = batches(1)
    with placed(captured(classifier(), "sgd")) as step:
        parameters = dict(step.named_parameters())
        parameters["first.weight"].requires_grad_(False)
        with pytest.raises(InvalidValue, match=r"requires_grad of first\.weight is False.*step\.backward"):
            step(x, targets=labels)
        step.backward(x, targets=labels)
        parameters["first.weight"].requires_grad_(True)
        parameters["frozen.weight"].requires_grad_(True)
        with pytest.raises(InvalidValue, match=r"requires_grad of frozen\.weight is True"):
            step(x, targets=labels)
        parameters["frozen.weight"].requires_grad_(False)
        handle = parameters["second.bias"].register_hook(lambda gradient: gradient * 2)
        with pytest.raises(InvalidValue, match=r"hooks of second\.bias.*step\.backward"):
            step(x, targets=labels)
        handle.remove()
        step(x, targets=labels)


def test_other_shapes_are_captured_with_what_was_trained_at_first() -> None:
    (x, labels), *_ = batches(1, size=4)
    model = classifier()
    with placed(captured(model, "sgd")) as step:
        eager = twin(model)
        model.requires_grad_(False)  # the original is somebody's teacher now
        step(x, targets=labels)
        eager_step(eager, torch.optim.SGD(eager.parameters(), lr=1e-3), x, labels)
        assert_same_state(step.state_dict(), eager.state_dict())
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_placed_step_says_how_to_copy_it() -> None:
    with placed(captured(classifier())) as step:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidValue, match=r"copied or pickled.*`save`"):
                make(step)


def test_a_copy_to_another_model_writes_nothing() -> None:
    with placed(captured(classifier())) as step:
        other = twin(classifier())
        for parameter in other.parameters():
            parameter.data.zero_()
        other.second = nn.Linear(8, 4).double()
        with pytest.raises(InvalidValue, match=r"shape of second\.weight is \(4, 8\), expected \(3, 8\)"):
            step.copy_to(other)
        del other.second
        with pytest.raises(UnknownName, match=r"second\.weight"):
            step.copy_to(other)
        assert not any(parameter.any() for parameter in other.parameters())


class Tied(nn.Module):
    """A weight of two names, and a buffer that `state_dict` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x))) * self.scale
        return out


def test_the_state_of_a_step_is_loaded_by_the_model_and_back() -> None:
    model, other = Tied().double(), Tied().double()
    with placed(captured(model, "adam")) as step:
        ((x, labels),) = batches(1)
        step(x, targets=labels)
        assert step.state_dict().keys() == model.state_dict().keys()
        other.load_state_dict(step.state_dict())
        torch.testing.assert_close(step.evaluate(x), other(x).detach())
        shrink(other)
        step.load_state_dict(other.state_dict())
        torch.testing.assert_close(step.evaluate(x), other(x).detach())


class WritesToParameters(nn.Module):
    def __init__(self, is_foreach: bool) -> None:
        super().__init__()
        self.linear, self.is_foreach = nn.Linear(6, 3), is_foreach
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.is_foreach:
                torch._foreach_mul_([self.linear.weight, self.linear.bias, self.scale], 0.9)
            else:
                self.linear.weight.copy_(functional.normalize(self.linear.weight))
                self.linear.bias.mul_(0.5)
        out: Tensor = self.linear(x) * self.scale
        return out


@pytest.mark.parametrize("is_foreach", [False, True])
def test_parameters_that_forward_writes_in_place_are_part_of_the_step(is_foreach: bool) -> None:
    model = WritesToParameters(is_foreach).double()
    eager = twin(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-3)
    with placed(captured(model, "sgd")) as step:
        for x, labels in [*batches(3), *batches(2, size=4)]:
            step(x, targets=labels)
            eager_step(eager, optimizer, x, labels)
        assert_same_state(step.state_dict(), eager.state_dict())


def test_steps_under_inference_mode_are_those_outside_of_it() -> None:
    model = classifier()
    eager = twin(model)
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-3)
    with torch.inference_mode():
        step = placed(captured(model, "adam"))
    given = [*batches(2), *batches(2, size=4), *batches(2, size=3)]
    with step:
        for number, (x, labels) in enumerate(given):
            with torch.inference_mode(number % 2 == 0):  # each shape is seen under it first
                step(x.clone(), targets=labels)
                evaluation = step.evaluate(x)
            eager_step(eager, optimizer, x, labels)
            torch.testing.assert_close(evaluation.clone(), evaluated(eager, x))
        assert_same_state(step.state_dict(), eager.state_dict())
        step.backward(x, targets=labels)
        assert not any(each.grad.is_inference() for each in step.parameters() if each.grad is not None)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_complex_parameters_are_updated_as_eager_updates_them(name: str) -> None:
    torch.manual_seed(0)
    model = Complex()
    eager = twin(model)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer = (
        torch.optim.SGD(eager.parameters(), lr=1e-3, momentum=0.9)
        if name == "momentum"
        else kinds[name](eager.parameters(), lr=1e-3)
    )
    with placed(captured(model, name)) as step:
        for number, (x, labels) in enumerate(batches(4)):
            if number == 2:
                step.zero_grad()
                step.backward(x, targets=labels)
                step.optimizer.step()
            else:
                step(x, targets=labels)
            eager_step(eager, optimizer, x, labels)
        assert_same_state(step.state_dict(), eager.state_dict())


class Defaults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None, scale: float = 1.0) -> Tensor:
        out: Tensor = self.linear(x) * scale
        return out if extra is None else out + extra


def test_arguments_may_be_given_by_name_and_with_their_defaults() -> None:
    model = Defaults().double()
    ((x, labels),) = batches(1)
    with placed(captured(model)) as step:
        expected = step.evaluate(x)
        for given in ({"x": x, "extra": None}, {"x": x, "scale": 1.0}, {"x": x}):
            assert torch.equal(step.evaluate(**given), expected)
            step.backward(**given, targets=labels)
        assert torch.equal(step.evaluate(x, None, 1.0), expected)
        for other in ({"x": x, "extra": expected}, {"x": x, "scale": 2.0}):
            with pytest.raises(InvalidValue, match="as captured"):
                step.evaluate(**other)
