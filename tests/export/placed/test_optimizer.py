"""Options of a captured optimizer change between steps; as PyTorch's own it takes schedulers and `load_state_dict`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from loops import assert_same_state, batches, captured, classifier, placed, twin
from torch.nn import functional

from rlplace.errors import InvalidValue, UnknownName
from rlplace.export.placed.model_state import OPTIONS
from rlplace.graphs import OptimizerSpec
from rlplace.graphs.optimizers import OPTIMIZERS, torch_optimizer

SPECS = {
    "sgd": OptimizerSpec("sgd", lr=0.1),
    "momentum": OptimizerSpec("momentum", lr=0.1, momentum=0.9),
    "adam": OptimizerSpec("adam", lr=0.1),
    "adamw": OptimizerSpec("adamw", lr=0.1, weight_decay=0.1),
}
OTHER: dict[str, Any] = {"lr": 0.03, "betas": (0.5, 0.7), "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.2}


def eager_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), labels).backward()
    optimizer.step()


def with_twin(spec: OptimizerSpec) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    """A model to be placed, one that runs eagerly, and its optimizer."""
    model = classifier()
    eager = twin(model)
    return model, eager, torch_optimizer(spec, list(eager.parameters()))


def test_every_optimizer_says_what_may_change() -> None:
    assert OPTIONS.keys() == OPTIMIZERS.keys() == SPECS.keys()


@pytest.mark.parametrize("name", SPECS)
def test_every_option_that_is_set_is_that_of_the_next_step(name: str) -> None:
    model, eager, optimizer = with_twin(SPECS[name])
    with placed(captured(model, SPECS[name])) as step:
        for number, (x, labels) in enumerate(batches(len(OPTIONS[name]) + 1)):
            step(x, targets=labels)
            eager_step(eager, optimizer, x, labels)
            if number < len(OPTIONS[name]):
                option = OPTIONS[name][number]
                setattr(step, option, OTHER[option])
                optimizer.param_groups[0][option] = OTHER[option]
                assert getattr(step, option) == OTHER[option]
        assert_same_state(step.state_dict(), eager.state_dict())


@pytest.mark.parametrize("name", SPECS)
def test_schedulers_step_its_options(name: str) -> None:
    model, eager, optimizer = with_twin(SPECS[name])
    with placed(captured(model, SPECS[name])) as step:
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in (step.optimizer, optimizer)
        ]
        for x, labels in batches(4):
            step(x, targets=labels)
            eager_step(eager, optimizer, x, labels)
            for schedule in schedules:
                schedule.step()
        assert step.lr == pytest.approx(0.1 * 0.5**4)
        assert_same_state(step.state_dict(), eager.state_dict())
        step.lr = 0.02
        assert step.optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("name", SPECS)
def test_state_goes_to_eager_and_comes_back(name: str) -> None:
    model, eager, optimizer = with_twin(SPECS[name])
    with placed(captured(model, SPECS[name])) as step:
        for x, labels in batches(3):
            eager_step(eager, optimizer, x, labels)
        step.load_state_dict(eager.state_dict())
        step.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step.optimizer.load_state_dict(step.optimizer.state_dict())  # of tensors that it holds itself
        for x, labels in batches(3, seed=4):
            eager_step(eager, optimizer, x, labels)
            step(x, targets=labels)
        assert_same_state(step.state_dict(), eager.state_dict())
        eager.load_state_dict(step.state_dict())
        optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
        for x, labels in batches(3, seed=5):
            eager_step(eager, optimizer, x, labels)
            step(x, targets=labels)
        assert_same_state(step.state_dict(), eager.state_dict())


@pytest.mark.parametrize("name", SPECS)
def test_captured_steps_and_those_of_its_optimizer_have_one_state(name: str) -> None:
    model, eager, optimizer = with_twin(SPECS[name])
    with placed(captured(model, SPECS[name])) as step:
        for number, (x, labels) in enumerate(batches(6)):
            eager_step(eager, optimizer, x, labels)
            if number % 2:
                step.optimizer.zero_grad()
                step.backward(x, targets=labels)
                step.optimizer.step()
            else:
                step(x, targets=labels)
        assert_same_state(step.state_dict(), eager.state_dict())


def test_mistakes_with_options() -> None:
    step = placed(captured(classifier(), "adam"))
    for name, value, message in (
        ("lr", -1.0, "lr is -1.0, expected a finite number >= 0"),
        ("lr", math.nan, "lr is nan"),
        ("lr", "fast", "lr is 'fast'"),
        ("lr", True, "lr is True"),
        ("betas", 0.9, r"betas is 0.9, expected two numbers in \[0, 1\)"),
        ("betas", (0.9, 1.0), "betas is"),
    ):
        with pytest.raises(InvalidValue, match=message):
            setattr(step, name, value)
    with pytest.raises(UnknownName, match="unknown option of adam 'momentum'"):
        step.momentum = 0.9
    with pytest.raises(UnknownName, match="unknown option of adam 'momentum'"):
        _ = step.momentum
    with pytest.raises(UnknownName, match=r"unknown attribute of a placed step 'learning_rate'.*Only these may be set"):
        step.learning_rate = 0.1  # type: ignore[attr-defined]
    assert step.lr == 1e-3
    step.optimizer.param_groups[0]["amsgrad"] = True
    (x, labels), *_ = batches(1)
    with pytest.raises(InvalidValue, match=r"amsgrad is True, expected False, as captured.*step\.backward"):
        step(x, targets=labels)
    step.close()
    step = placed(captured(classifier()))
    with pytest.raises(InvalidValue, match="optimizer is None"):
        step.lr = 0.1
    step.close()


@pytest.mark.parametrize("name", SPECS)
def test_no_option_of_a_group_is_ignored(name: str) -> None:
    """What plain PyTorch's optimizer reads is followed or refused; only how it computes may be any."""
    (x, labels), *_ = batches(1)
    other: dict[str, Any] = {**OTHER, "dampening": 0.5, "params": []}
    with placed(captured(classifier(), SPECS[name])) as step:
        (group,) = step.optimizer.param_groups
        unread = {"foreach", "fused", "capturable", "differentiable"}
        for option in group.keys() - unread:
            before = group[option]
            group[option] = other.get(option, not before)
            if option in OPTIONS[name]:
                step(x, targets=labels)
                assert getattr(step, option) == other[option]
            else:
                with pytest.raises(InvalidValue, match=f"{option} is"):
                    step(x, targets=labels)
            group[option] = before
        step(x, targets=labels)


def test_momentum_that_a_scheduler_sets_is_refused_without_a_state_for_it() -> None:
    (x, labels), *_ = batches(1)
    for name, cycles in (("sgd", True), ("sgd", False), ("momentum", True)):
        model, eager, optimizer = with_twin(SPECS[name])
        with placed(captured(model, SPECS[name])) as step:
            if name == "sgd" and cycles:
                torch.optim.lr_scheduler.CyclicLR(step.optimizer, 0.01, 0.1)
                with pytest.raises(InvalidValue, match=r'momentum is .*optimizer="momentum".*cycle_momentum=False'):
                    step(x, targets=labels)
                continue
            schedulers = [
                torch.optim.lr_scheduler.CyclicLR(each, 0.01, 0.1, 2, cycle_momentum=cycles)
                for each in (step.optimizer, optimizer)
            ]
            for x, labels in batches(4):
                step(x, targets=labels)
                eager_step(eager, optimizer, x, labels)
                for scheduler in schedulers:
                    scheduler.step()
            assert_same_state(step.state_dict(), eager.state_dict())


def test_several_groups_are_refused_by_the_captured_step() -> None:
    (x, labels), *_ = batches(1)
    step = placed(captured(classifier(), "sgd"))
    step.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InvalidValue, match="param_groups is '2 groups', expected one"):
        step(x, targets=labels)
    step.close()


def test_specs_train_as_the_optimizer_that_they_name() -> None:
    """Weight decay of AdamW, momentum of `momentum` and of SGD with one; none where it is 0."""
    cases: list[tuple[OptimizerSpec, type[torch.optim.Optimizer], dict[str, float]]] = [
        (OptimizerSpec("adamw", lr=0.1), torch.optim.AdamW, {}),
        (OptimizerSpec("momentum", lr=0.1), torch.optim.SGD, {"momentum": 0.9}),
        (OptimizerSpec("sgd", lr=0.1, momentum=0.8), torch.optim.SGD, {"momentum": 0.8}),
        (OptimizerSpec("momentum", lr=0.1, momentum=0.0), torch.optim.SGD, {}),
    ]
    for spec, plain, options in cases:
        model = classifier()
        eager = twin(model)
        optimizer: Any = plain(eager.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        with placed(captured(model, spec)) as step:
            for x, labels in batches(3):
                step(x, targets=labels)
                eager_step(eager, optimizer, x, labels)
            assert_same_state(step.state_dict(), eager.state_dict())


def test_a_momentum_of_zero_is_plain_sgd_for_a_while() -> None:
    model = classifier()
    eager = twin(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    with placed(captured(model, OptimizerSpec("momentum", lr=0.1))) as step:
        for (x, labels), momentum in zip(batches(4), (0.9, 0.0, 0.0, 0.5), strict=True):
            step.momentum = optimizer.param_groups[0]["momentum"] = momentum
            step(x, targets=labels)
            eager_step(eager, optimizer, x, labels)
        assert_same_state(step.state_dict(), eager.state_dict())
