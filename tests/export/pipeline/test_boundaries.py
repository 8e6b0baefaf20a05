"""Which modules a stage may begin with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pipelined_models import Skipping, skipping_batch, skipping_loss
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.export.pipeline.plan import boundaries, check_split, places_of
from rlplace.export.pipeline.stages import WholeStep
from rlplace.graphs import capture
from rlplace.search.parallel.layouts import step_roles


def skipping() -> WholeStep:
    return WholeStep(Skipping(), skipping_loss, None, 1)


def test_modules_that_run_once_and_not_first() -> None:
    found = boundaries(skipping(), skipping_batch())
    assert found[:2] == ["model.gate", "model.blocks.0"]
    assert "model.words" not in found, "it is the first"
    assert "model.twice" not in found, "it runs twice"
    assert "model.blocks.0.norm" not in found, "the block begins with it"
    assert [path for path in found if path.count(".") == 2] == [f"model.blocks.{index}" for index in range(4)]


def test_places_ascend_in_the_order_of_the_model() -> None:
    late, rows, labels = skipping_batch()
    graph = capture(Skipping(), (late, rows), skipping_loss, "sgd", targets=labels, micro_batches=2, loss="separate")
    step = step_roles(graph)
    kept, places = places_of(graph, step, boundaries(skipping(), skipping_batch()))
    assert [path for path in kept if path.count(".") == 2] == [f"model.blocks.{index}" for index in range(4)]
    assert np.all(np.diff(places) > 0)
    at = dict(zip(kept, places.tolist(), strict=True))
    inside = [
        int(place)
        for place, module, phase in zip(step.op_position, graph.modules, graph.phases, strict=True)
        if module.startswith("blocks.2") and phase == 0
    ]
    assert at["model.blocks.2"] <= min(inside)
    assert max(inside) < at["model.blocks.3"]


def test_shared_parameters_are_named() -> None:
    step = skipping()
    shared = check_split(step, skipping_batch(), ["model.blocks.1"])
    assert {name.partition(".")[0] for name in shared} == {"words", "twice"}
    assert not step.get_submodule("model.blocks.1")._forward_pre_hooks, "a copy was split"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if x.sum() > 0 else self.first(x)


def test_what_cannot_be_traced_is_refused_with_the_reason() -> None:
    step = WholeStep(Branching(), torch.sum, None, 0)
    with pytest.raises(
        InvalidValue, match=r"model is 'Branching', expected one that `torch\.export` can trace"
    ) as said:
        boundaries(step, [torch.ones(2, 4)])
    assert "It cannot trace it: " in str(said.value)
    assert len(str(said.value).splitlines()) == 1
