"""The module of every op: modules called twice, functions outside of modules, recomputed forwards, constants."""

from __future__ import annotations

from typing import Any

import torch
from small_models import mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplace.graphs import BACKWARD, capture
from rlplace.graphs.opgraph import OpGraph


class Exponent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return Exponent.apply(self.linear(x)) + self.shift


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.inner(x)))


def modules_of(graph: OpGraph, target: str) -> list[tuple[bool, str]]:
    return [
        (bool(graph.phases[op] == BACKWARD), graph.modules[op])
        for op in range(graph.num_ops)
        if graph.targets[op] == target
    ]


def test_a_module_with_two_names_has_the_first_and_functions_belong_to_who_calls_them() -> None:
    graph = capture(Outer(), torch.ones(3, 4), mean_square, "sgd")
    assert modules_of(graph, "aten.addmm.default") == [(False, "inner.linear")] * 2
    assert modules_of(graph, "aten.tanh.default") == [(False, "")]
    assert modules_of(graph, "aten.tanh_backward.default") == [(True, "")]
    assert modules_of(graph, "aten.exp.default") == [(False, "inner")] * 2
    assert modules_of(graph, "aten.cos.default") == [(True, "inner")] * 2
    assert modules_of(graph, "constant") == [(False, "inner")]
    assert modules_of(graph, "update.sgd") == [(False, "inner.linear")] * 2


def test_sums_of_gradients_belong_to_the_parameter_that_they_are_of() -> None:
    graph = capture(Outer(), torch.ones(3, 4), mean_square, "sgd")
    sums = [module for is_backward, module in modules_of(graph, "aten.add.Tensor") if is_backward]
    assert sums == ["inner.linear"] * 2


def test_a_recomputed_forward_keeps_its_modules_and_is_backward() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, torch.sin(x), use_reentrant=False, preserve_rng_state=False))

    graph = capture(Recomputed(), torch.ones(3, 4), mean_square, "sgd")
    assert modules_of(graph, "aten.addmm.default") == [
        (False, "inner.linear"),
        (False, "head"),
        (True, "inner.linear"),
    ]
    assert modules_of(graph, "aten.cos.default") == [(True, "inner")]
    assert [name for name, target in zip(graph.names, graph.targets, strict=True) if target == "parameter"] == [
        "inner.linear.weight",
        "inner.linear.bias",
        "head.weight",
        "head.bias",
    ]
    assert graph.targets.count("constant") == 1  # `shift`, and no stale copy of a parameter
