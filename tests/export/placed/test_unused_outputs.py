"""Parameters and inputs that only outputs outside of the loss read have no gradient, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import assert_same_state, module_of, twin
from torch import Tensor, nn

from rlplace.graphs import capture


class TwoHeads(nn.Module):
    """A shared body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), self.b(hidden)


class CutHeads(TwoHeads):
    """Beside the heads it returns what has no gradient: a detached output, and an integer one."""

    def forward(self, x: Tensor) -> Any:
        a, b = super().forward(x)
        return a.detach(), a, b.argmax(1), b


class TwoInputs(TwoHeads):
    """The second head reads an input of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.a(torch.tanh(self.body(x))), self.b(torch.tanh(self.body(x)) * y)


class Joined(TwoHeads):
    """Outputs whose gradients meet: halves of one tensor, and a tensor that both the pair and the sum read."""

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        first, second = self.a(hidden).split([1, 2], dim=1)
        return {"first": first, "second": second, "sum": first.sum() + self.b(hidden).sum()}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def draws(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, size, generator=generator, dtype=torch.float64) for size in sizes]


def tensors(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, dict) else output
    return [each for each in values if each.is_floating_point()]


def total(values: list[Tensor]) -> Tensor:
    return torch.stack([each.sum() for each in values]).sum()


def pair_of(make: Callable[[], nn.Module], *inputs: Tensor) -> tuple[Any, Any]:
    model = seeded(make)
    graph = capture(model, inputs, lambda output: total(tensors(output)), "adamw")
    return module_of(model, graph), twin(model)


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    assert [each is None for each in ours] == [each is None for each in theirs]
    torch.testing.assert_close(*[[each for each in found if each is not None] for found in (ours, theirs)])


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def test_heads_that_take_turns_train_as_in_eager_and_the_idle_one_stays() -> None:
    (x,) = draws(6)
    module, eager = pair_of(TwoHeads, x)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, eager)]
    for task in (1, 0, 0, 0):
        idle = (module.a, module.b)[1 - task].weight
        before = idle.detach().clone()
        for each, optimizer in zip((module, eager), optimizers, strict=True):
            optimizer.zero_grad()
            each(x)[task].pow(2).sum().backward()
            optimizer.step()
        assert idle.grad is None
        assert torch.equal(idle, before)
        assert module.body.weight.grad.abs().sum() > 0
        assert_same(gradients(module), gradients(eager))
    assert_same_state(module.state_dict(), eager.state_dict())
    module.close()


@pytest.mark.parametrize(
    ("make", "choices"),
    [
        (TwoHeads, [(0,), (1,), (0, 1)]),
        (CutHeads, [(1,), (2,), (0, 1), (0, 2), (1, 2)]),
        (Joined, [(0,), (1,), (2,), (0, 1), (1, 2)]),
    ],
)
def test_what_is_outside_of_the_loss_gives_no_gradient(
    make: Callable[[], nn.Module], choices: list[tuple[int, ...]]
) -> None:
    (x,) = draws(6)
    module, eager = pair_of(make, x)
    for chosen in choices:
        for each in (module, eager):
            each.zero_grad()
            outputs = tensors(each(x))
            total([outputs[k].pow(2) for k in chosen]).backward()
        assert_same(gradients(module), gradients(eager))
    assert module.num_graphs == 1
    module.close()


def test_an_input_has_a_gradient_from_the_outputs_that_read_it() -> None:
    x, y = draws(6, 8)
    module, eager = pair_of(TwoInputs, x, y)
    for task in (0, 1):
        found: list[list[Tensor | None]] = []
        for each in (module, eager):
            each.zero_grad()
            inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            each(*inputs)[task].pow(2).sum().backward()
            found.append([each.grad for each in inputs] + gradients(each))
        assert_same(*found)
        assert (found[0][1] is None) == (task == 0)
    module.close()


def test_forwards_that_wait_have_each_the_outputs_of_their_own_loss() -> None:
    one, other = draws(6, 6)
    module, eager = pair_of(TwoHeads, one)
    for each in (module, eager):
        (first, idle), (_, second) = each(one), each(other)
        first.sum().backward()
        assert each.b.weight.grad is None
        second.sum().backward()
        del idle
    assert_same(gradients(module), gradients(eager))
    for each in (module, eager):
        each.zero_grad()
        (each(one)[0].sum() * each(other)[0].sum()).backward()
        assert each.b.weight.grad is None
    assert_same(gradients(module), gradients(eager))
    module.close()


def test_autograd_grad_tells_what_was_not_used() -> None:
    (x,) = draws(6)
    module, eager = pair_of(TwoHeads, x)
    found = [
        torch.autograd.grad(each(x)[0].sum(), list(each.parameters()), allow_unused=True) for each in (module, eager)
    ]
    assert_same(list(found[0]), list(found[1]))
    assert found[0][-1] is None
    for each in (module, eager):
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(each(x)[0].sum(), list(each.parameters()))
    module.close()
