"""What `torch.compile` made is captured as what it was made of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan
from torch import Tensor, nn

from rlplace.export import PlacedModel
from rlplace.graphs import capture
from rlplace.measure.timing.eager_step import EagerStep

compiled = functools.partial(torch.compile, backend="eager")


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @compiled
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).relu()
        return y


def in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    return model


@compiled
def compiled_loss(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "method": Decorated,
    "method below": lambda: nn.Sequential(Decorated(), nn.Linear(4, 4)),
    "model": lambda: compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    "module": lambda: nn.Sequential(compiled(nn.Linear(4, 4)), nn.ReLU()),
    "in place": in_place,
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_compiled_is_captured_as_it_was_written(name: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    x, t, model = torch.randn(8, 4), torch.randn(8, 4), MODELS[name]()
    with torch.compiler.set_stance("force_eager"):
        expected = compiled_loss(model(x), t)
    graph = capture(model, x, compiled_loss, "sgd", targets=t, micro_batches=micro_batches, loss="joined")
    host = core_host(2)
    with PlacedModel(graph, host, naive_plan(graph, np.zeros(graph.num_ops, dtype=np.int32))) as step:
        assert step(x, targets=t).item() == pytest.approx(expected.item(), rel=1e-5)
        before = copy.deepcopy(dict(model.named_parameters()))
        step.copy_to(model)
        assert all(not torch.equal(value, before[key]) for key, value in model.named_parameters() if value.any())
    eager = EagerStep(graph, host)
    eager()
    torch._dynamo.reset()


def test_a_compiled_model_has_the_names_of_its_original() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    ours, theirs = (capture(each, torch.ones(2, 4), lambda y: y.sum(), "sgd") for each in (compiled(model), model))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.names == theirs.names
