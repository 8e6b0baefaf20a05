"""Constants that the user holds may change between steps: a placed step sees what eager PyTorch sees, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from loops import HOST, apart, batches, module_of
from torch import Tensor, nn
from torch.nn import functional

from rlplace.errors import InvalidValue, RunnerError
from rlplace.export import PlacedModel
from rlplace.graphs import capture


class Distillation(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, output: Tensor, x: Tensor) -> Tensor:
        return functional.mse_loss(output, self.teacher(x))


class Tempered(nn.Module):
    """Constants in plain attributes, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.temperature = torch.tensor(2.0, dtype=torch.float64)
        self.masks = [torch.ones(3, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) / self.temperature * self.masks[0]
        return out


class ByNumber(Tempered):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) / self.temperature.item()
        return out


def placed(
    model: nn.Module, x: Tensor, loss_fn: Callable[..., Tensor], targets: Tensor, micro_batches: int = 1
) -> PlacedModel:
    graph = capture(model, x, loss_fn, "sgd", targets=targets, micro_batches=micro_batches, loss="accumulated")
    return PlacedModel(graph, HOST, apart(graph))


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def by_lerp(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for own, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            own.lerp_(theirs, 0.3)


def through_data(teacher: nn.Module, student: nn.Module) -> None:
    for own, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data.mul_(0.7).add_(theirs.data, alpha=0.3)


def by_other_data(teacher: nn.Module, student: nn.Module) -> None:
    for own, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data = own.data * 0.7 + theirs.data * 0.3


def by_assignment(teacher: nn.Module, student: nn.Module) -> None:
    teacher.load_state_dict({name: value * 0.5 for name, value in student.state_dict().items()}, assign=True)
    teacher.requires_grad_(False)


@pytest.mark.parametrize("is_closure", [False, True])
@pytest.mark.parametrize("average", [by_lerp, through_data, by_other_data, by_assignment])
def test_a_mean_teacher_that_follows_in_the_loop_is_that_of_eager(
    average: Callable[[nn.Module, nn.Module], None], is_closure: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    student, teacher = nn.Linear(4, 3, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
    teacher.requires_grad_(False)
    twin = copy.deepcopy(student)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    loss_fn = (lambda y, x: functional.mse_loss(y, teacher(x))) if is_closure else Distillation(teacher)
    with placed(student, x, loss_fn, x) as step:
        for batch in (x, x, x[:3], x):
            expected = eager_step(twin, optimizer, loss_fn(twin(batch), batch))
            torch.testing.assert_close(step(batch, targets=batch), expected)
            average(teacher, twin)


def scales(loss_fn: nn.CrossEntropyLoss) -> None:
    loss_fn.weight.mul_(torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64))


def replaces(loss_fn: nn.CrossEntropyLoss) -> None:
    loss_fn.weight = loss_fn.weight * torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("change", [scales, replaces])
def test_weights_of_classes_may_change_between_steps(
    change: Callable[[nn.CrossEntropyLoss], None], micro_batches: int
) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    model = nn.Linear(4, 3, dtype=torch.float64)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64))
    with placed(model, x, loss_fn, labels, micro_batches) as step:
        for _ in range(4):
            losses = [loss_fn(twin(x_), y_) for x_, y_ in zip(x.chunk(micro_batches), labels.chunk(micro_batches))]
            expected = eager_step(twin, optimizer, torch.stack(losses).mean())
            torch.testing.assert_close(step(x, targets=labels), expected)
            change(loss_fn)


def anneal(model: Tempered, number: int) -> None:
    if number % 2:
        model.temperature.fill_(0.5 + number)
    else:
        model.temperature = torch.tensor(3.0 + number, dtype=torch.float64)
    model.masks[0].mul_(2)


def test_tensors_in_plain_attributes_may_change_between_steps_and_calls_of_a_module() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    model = Tempered()
    twin, module = copy.deepcopy(model), module_of(copied := copy.deepcopy(model), capture(copied, x))
    with placed(model, x, functional.cross_entropy, labels) as step:
        for number in range(4):
            torch.testing.assert_close(step.evaluate(x), twin(x).detach())
            torch.testing.assert_close(module(x), twin(x))
            for each in (model, module, twin):
                anneal(each, number)
    output = module(x).exp()
    module.temperature.fill_(7.0)
    with pytest.raises(RunnerError, match="modified in place between forward and backward"):
        output.sum().backward()
    module.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_constant_that_was_read_as_a_number_must_stay(is_replaced: bool) -> None:
    x, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    model = ByNumber()
    with placed(model, x, functional.cross_entropy, labels) as step:
        step(x, targets=labels)
        if is_replaced:
            model.temperature = torch.tensor(3.0)
        else:
            model.temperature.fill_(3.0)
        with pytest.raises(InvalidValue, match=r"temperature is 'changed since the capture'.*capture again"):
            step(x, targets=labels)


class Held(nn.Module):
    """A loss with constants in every place that a module has."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 3, dtype=torch.float64).requires_grad_(False)
        self.listed, self.named = [torch.ones(3, dtype=torch.float64)], {"w": torch.ones(3, dtype=torch.float64)}
        self.plain = torch.ones(3, dtype=torch.float64)
        self.pair = torch.ones(3, dtype=torch.float64), 2

    def forward(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wanted = self.teacher(x).detach()
        weights = self.listed[0] * self.named["w"] * self.plain * self.pair[0]
        return (weights * (output - wanted) ** 2).mean()


def fresh() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def set_entry(loss: Held) -> None:
    loss.listed[0] = fresh()


def set_item(loss: Held) -> None:
    loss.named["w"] = fresh()


def set_attribute(loss: Held) -> None:
    loss.plain = fresh()


def set_tuple(loss: Held) -> None:
    loss.pair = fresh(), 2


def set_list(loss: Held) -> None:
    loss.listed = [fresh()]


def set_dict(loss: Held) -> None:
    loss.named = {"w": fresh()}


def set_module(loss: Held) -> None:
    loss.teacher = nn.Linear(6, 3, dtype=torch.float64)


def set_shape(loss: Held) -> None:
    loss.plain = fresh()[:1]


def drop(loss: Held) -> None:
    loss.listed.clear()


@pytest.mark.parametrize("change", [set_entry, set_item, set_attribute])
def test_constants_that_are_replaced_are_those_of_the_next_step(change: Callable[[Held], None]) -> None:
    (x, _), *_ = batches(1)
    model, loss = nn.Linear(6, 3, dtype=torch.float64), Held()
    with placed(model, x, loss, x) as step:
        before = step.backward(x, targets=x)
        old = loss.listed[0], loss.named["w"], loss.plain
        change(loss)
        torch.testing.assert_close(step.backward(x, targets=x), loss(model(x), x).detach())
        loss.listed[0], loss.named["w"], loss.plain = old
        torch.testing.assert_close(step.backward(x, targets=x), before)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((set_list, "listed"), (set_dict, "named"), (set_module, "teacher"), (set_shape, "plain")),
        *((drop, "listed[0]"), (set_tuple, "pair")),
    ],
)
def test_constants_that_cannot_be_followed_are_refused_by_name(change: Callable[[Held], None], name: str) -> None:
    (x, _), *_ = batches(1)
    loss = Held()
    with placed(nn.Linear(6, 3, dtype=torch.float64), x, loss, x) as step:
        step.backward(x, targets=x)
        change(loss)
        with pytest.raises(InvalidValue, match="replaced since the capture") as refused:
            step.backward(x, targets=x)
        assert refused.value.field == name


def test_a_teacher_of_a_closure_that_is_another_one_is_refused() -> None:
    (x, _), *_ = batches(1)
    teacher = nn.Linear(6, 3, dtype=torch.float64)

    def loss_fn(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (output - teacher(x).detach()).square().mean()

    with placed(nn.Linear(6, 3, dtype=torch.float64), x, loss_fn, x) as step:
        step.backward(x, targets=x)
        teacher = nn.Linear(6, 3, dtype=torch.float64)
        with pytest.raises(InvalidValue, match="teacher is 'replaced since the capture'"):
            step.backward(x, targets=x)
