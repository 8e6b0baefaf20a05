"""Labels are arguments: a tensor from outside of the model is refused by its name, a constant of the model stays."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Function, mean_square, random
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.constants import referenced

LABELS = torch.tensor([0, 5, 2])
TABLES = {"near": {"weights": [torch.rand(6, dtype=torch.float64)]}}
MEAN = np.arange(6.0)
Pair = namedtuple("Pair", "first second")


def refusal(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> CaptureError:
    with pytest.raises(CaptureError) as refused:
        capture(model or nn.Linear(4, 6, dtype=torch.float64), random(3, 4), loss_fn, "sgd")
    return refused.value


def says(refused: CaptureError, name: str) -> bool:
    return f"takes `{name}` (" in str(refused) and "loss_fn(output, *targets)" in str(refused)


def test_labels_in_a_closure_are_refused_with_their_name_the_line_and_what_to_do() -> None:
    batch = {"x": random(3, 4), "y": torch.tensor([0, 5, 2])}
    refused = refusal(lambda output: functional.cross_entropy(output, batch["y"]))
    assert says(refused, "batch['y']")
    assert "int64 (3,)" in str(refused)
    assert "targets=..." in str(refused)
    assert __file__ in refused.source
    assert 'functional.cross_entropy(output, batch["y"])' in refused.source


def with_global(output: Tensor) -> Tensor:
    return functional.cross_entropy(output, LABELS)


def calls_another(output: Tensor) -> Tensor:
    return with_global(output) * 2


def with_default(output: Tensor, weights: Tensor = TABLES["near"]["weights"][0]) -> Tensor:
    return (output * weights).sum()


class Trainer:
    """No module: what it holds changes from batch to batch."""

    def __init__(self) -> None:
        self.batches = [LABELS.clone()]

    def loss(self, output: Tensor) -> Tensor:
        return functional.cross_entropy(output, self.batches[0])

    def __call__(self, output: Tensor) -> Tensor:
        return self.loss(output)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (with_global, "LABELS"),
        (calls_another, "LABELS"),
        (lambda output: (output * TABLES["near"]["weights"][0]).sum(), "TABLES['near']['weights'][0]"),
        (with_default, "weights"),
        (functools.partial(functional.cross_entropy, target=LABELS), "target"),
        (functools.partial(lambda labels, output: functional.cross_entropy(output, labels), LABELS), "argument 0"),
        (Trainer().loss, "self.batches[0]"),
        (Trainer(), "batches[0]"),
        (lambda output: functional.cross_entropy(output, torch.tensor(LABELS.numpy())), "LABELS"),
        (lambda output: (output - torch.as_tensor(MEAN)).sum(), "MEAN"),
        (lambda output: (output - torch.from_numpy(MEAN)).sum(), "MEAN"),
        (lambda output: output.sum() * LABELS[1:].clone().sum(), "LABELS"),
        (lambda output: output.sum() * LABELS.tolist()[0], "LABELS"),
        (lambda output: torch.vmap(lambda row: row[LABELS])(output).sum(), "LABELS"),
        (lambda output: torch.stack([output.sum(), TABLES["near"]["weights"][0].sum()]).sum(), "TABLES['near']"),
    ],
)
def test_every_way_in_is_named(loss_fn: Callable[..., Any], name: str) -> None:
    assert f"takes `{name}" in str(refusal(loss_fn))


def test_a_tensor_without_a_name_is_shown_by_its_looks_and_line() -> None:
    made = iter([torch.ones(3, 6, dtype=torch.float64)] * 9)
    refused = refusal(lambda output: (output * next(made)).sum())
    assert "takes a tensor (float64 (3, 6))" in str(refused)
    assert "next(made)" in refused.source


def test_what_forward_takes_from_outside_is_refused_too() -> None:
    shift = random(6)
    assert says(refusal(mean_square, Function(lambda y: y + shift)), "shift")

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * TABLES["near"]["weights"][0]

    assert says(refusal(mean_square, Reads()), "TABLES['near']['weights'][0]")
    with pytest.raises(CaptureError, match=r"takes `shift`"):
        capture(Function(lambda y: y + shift), random(3, 4))


def test_labels_are_refused_where_the_model_is_of_fake_tensors() -> None:
    with FakeTensorMode():
        model, x, labels = nn.Linear(4, 6), torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(CaptureError, match=r"takes `labels` \(int64 \(3,\)\)"):
        capture(model, x, lambda output: functional.cross_entropy(output, labels), "sgd")
    graph = capture(model, x, functional.cross_entropy, "sgd", targets=labels)
    real = capture(nn.Linear(4, 6), torch.ones(3, 4), functional.cross_entropy, "sgd", targets=LABELS)
    assert graph.fingerprint == real.fingerprint


class Holder(nn.Module):
    """Constants in every kind of attribute, read whole or as views, in `forward` or as numbers."""

    table = torch.full((6,), 2.0, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, dtype=torch.float64)
        self.plain = random(6, seed=2)
        self.nested = [{"deep": (random(6, seed=3), Pair(random(6, seed=4), None))}]
        self.unregistered = [nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)]
        self.array = np.arange(6.0)
        self.scale = torch.tensor(2.5, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(2, 6, dtype=torch.float64))
        self.view = self.mask[0]

    def forward(self, x: Tensor) -> Tensor:
        deep = self.nested[0]["deep"]
        y = self.linear(x) * self.plain + deep[0] - deep[1].first.detach() * self.table
        y = self.unregistered[0](y) * self.scale.item() + torch.from_numpy(self.array) + torch.as_tensor(self.array)
        literal = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(6) + torch.as_tensor([1.0] * 6)
        y[[0, 2]] = 0.5
        return y * self.mask[0] * self.view.flip(0) + literal + torch.full((6,), 0.5)


class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [random(6, seed=5)]

    def forward(self, output: Tensor) -> Tensor:
        return (output * self.weights[0]).sum()

    def halved(self, output: Tensor) -> Tensor:
        return self(output) / 2


@pytest.mark.parametrize(
    "loss_fn",
    [
        WeightedLoss(),
        WeightedLoss().halved,
        lambda output, criterion=WeightedLoss(): criterion(output),  # noqa: B008
        functools.partial(WeightedLoss()),
        lambda output: torch.vmap(lambda row: row[torch.tensor([0, 2])])(output).sum(),
        lambda output: (output * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(6)).sum(),
    ],
)
def test_constants_of_modules_and_literals_stay(loss_fn: Callable[..., Any]) -> None:
    model, x = Holder(), random(3, 4)
    step = run_graph(capture(model, x, loss_fn, "sgd"))
    torch.testing.assert_close(step.result, loss_fn(model(x)).detach())


def test_a_tensor_that_shares_memory_with_the_models_own_is_its_own() -> None:
    model, x = Holder(), random(3, 4)
    row, plain = model.mask[0, 1:4], model.plain.view(2, 3)
    step = run_graph(capture(model, x, lambda y: (y[:, 1:4] * row + plain[0]).sum(), "sgd"))
    torch.testing.assert_close(step.result, (model(x)[:, 1:4] * row + plain[0]).sum().detach())


def test_an_input_that_the_loss_closes_over_is_the_input() -> None:
    x = random(3, 4)
    graph = capture(nn.Linear(4, 4, dtype=torch.float64), x, lambda output: mean_square(output - x), "sgd")
    assert graph.targets.count("input") == 1
    assert "constant" not in graph.targets


def test_numbers_read_from_what_changes_are_refused() -> None:
    model, x = Holder(), random(1, 4)
    with pytest.raises(CaptureError, match=r"takes `x` \(float64 \(1, 4\)\).*x.tolist"):
        capture(model, x, lambda output: output.sum() * x.tolist()[0][0])
    with pytest.raises(CaptureError, match=r"takes a tensor \(float64 \(6,\)\).*model.linear.bias.tolist"):
        capture(model, x, lambda output: output.sum() * model.linear.bias.tolist()[0])


def test_a_parameter_that_the_loss_reads_behind_the_models_back_would_lose_its_gradient() -> None:
    model = nn.Linear(4, 6, dtype=torch.float64)
    refused = refusal(lambda output: mean_square(output) + model.weight.square().sum(), model)
    assert "reads parameter 'weight'" in str(refused)
    assert "model.weight.square()" in refused.source
    model.requires_grad_(False)
    model.bias.requires_grad_(True)
    graph = capture(model, random(3, 4), lambda output: mean_square(output) + model.weight.square().sum(), "sgd")
    assert graph.names.count("weight") == 1


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor) -> Tensor:
        return mean_square(output * self.temperature)


def test_a_parameter_of_the_loss_would_never_be_updated() -> None:
    model, loss_fn = nn.Linear(4, 6, dtype=torch.float64), Tempered()
    refused = refusal(loss_fn, model)
    assert "`loss_fn.temperature` (), which" in str(refused)
    assert "requires_grad_(False)" in str(refused)
    assert "self.temperature" in refused.source
    assert "`criterion.temperature`" in str(refusal(lambda output, criterion=loss_fn: criterion(output), model))
    capture(model, random(3, 4), loss_fn.requires_grad_(False), "sgd")


def test_a_layer_that_is_not_registered_would_never_be_updated() -> None:
    hidden = [nn.Linear(6, 6, dtype=torch.float64)]
    model = Function(lambda y: hidden[0](y))
    model.layers = hidden
    assert "is no parameter of the model" in str(refusal(mean_square, model))


def test_a_teacher_that_gets_no_gradient_is_a_constant() -> None:
    model, teacher = (nn.Linear(4, 6, dtype=torch.float64) for _ in range(2))
    x = random(3, 4)

    def loss_fn(output: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return mean_square(output - wanted) + mean_square(output - teacher(x).detach())

    step = run_graph(capture(model, x, loss_fn, "sgd"))
    torch.testing.assert_close(step.result, loss_fn(model(x)).detach())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"targets": 3}, "targets"),
        ({"targets": {"y": LABELS}}, "loss_fn"),
        ({"targets": (LABELS, 3)}, "targets[1]"),
        ({"targets": LABELS, "loss_fn": None}, "loss_fn"),
        ({"loss_fn": functional.cross_entropy}, "loss_fn"),
        ({"targets": LABELS, "loss_fn": lambda output: output.sum()}, "loss_fn"),
        ({"targets": (LABELS, LABELS), "loss_fn": lambda output, y: output.sum()}, "loss_fn"),
        ({"inputs": {"targets": LABELS}, "targets": LABELS}, "targets"),
        ({"inputs": np.ones((3, 4)), "targets": LABELS}, "inputs"),
        ({"inputs": (np.ones((3, 4)),), "targets": LABELS}, "inputs"),
    ],
)
def test_targets_that_mean_nothing_are_refused(arguments: dict[str, Any], field: str) -> None:
    given = {"inputs": torch.ones(3, 4), "loss_fn": functional.cross_entropy, **arguments}
    with pytest.raises(InvalidValue) as refused:
        capture(nn.Linear(4, 6), **given)
    assert refused.value.field == field


class Odd:
    """An object with attributes of its own making, as those of C libraries and proxies are."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self

    def __call__(self) -> float:
        return 1.0


class Unbound(Odd):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nothing is bound to this proxy")


odd, unbound = Odd(), Unbound()
bias, weight = odd, unbound
"""Names of attributes that a model reads; the objects here are no part of it."""


def test_a_global_with_the_name_of_an_attribute_is_not_followed() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(random(6)), nn.Parameter(random(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (lambda y: y + self.bias)(x @ self.weight)

    names = {name for name, _ in referenced([Biased.forward])}
    assert names == set()
    capture(Biased(), random(3, 4), mean_square, "sgd")


def test_objects_that_cannot_be_looked_into_are_passed_by() -> None:
    class Holding(nn.Linear):
        held = (odd, unbound)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * odd() * unbound()

    def loss_fn(output: Tensor) -> Tensor:
        return output.sum() * odd() * unbound()

    capture(Holding(4, 6, dtype=torch.float64), random(3, 4), loss_fn, "sgd")
