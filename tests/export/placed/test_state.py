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
