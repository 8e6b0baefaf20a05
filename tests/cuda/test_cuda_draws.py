"""Draws that are made again on another kind of device: a GPU and a CPU make different numbers of one seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_gpus.gpu_plans import gpu_host
from fake_gpus.plan_runs import machine_installed, plain
from naive_plan import naive_plan
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rlplace import cuda
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.graphs import OptimizerSpec, capture
from rlplace.graphs.interpreter import require_program


class OfGpu:
    """A generator that makes other numbers of a seed than that of the CPU."""

    def __init__(self, own: torch.Generator) -> None:
        self.get_state, self.set_state, self._own = own.get_state, own.set_state, own

    def manual_seed(self, seed: int) -> None:
        self._own.manual_seed(seed ^ 1)


class Products(nn.Module):
    """The loss is the product of w and its gradient, if what is recomputed draws what the forward has drawn."""

    def __init__(self, is_seeded: bool) -> None:
        super().__init__()
        self.w, self.is_seeded = nn.Parameter(torch.randn(6, 5)), is_seeded

    def forward(self, x: Tensor) -> Tensor:
        if self.is_seeded:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                return (x @ self.w) * torch.rand(8, 5)
        return checkpoint(lambda h: functional.dropout(h, 0.5), x @ self.w, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
@pytest.mark.parametrize("is_seeded", [False, True])
def test_one_draw_is_the_same_on_devices_of_several_kinds(
    names: tuple[str, str], is_seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Products(is_seeded), torch.randn(8, 6)
    graph = capture(model, x, lambda output: output.sum(), OptimizerSpec("sgd", lr=1.0))
    last = max(op for ops in require_program(graph).draws.values() for op in ops)
    plan = naive_plan(graph, (np.arange(graph.num_ops) == last).astype(np.int32))
    with machine_installed() as machine:
        of_kind = cuda.generator

        def generator(place: torch.device) -> Any:
            own = of_kind(place)
            return own if place.type == "cpu" else OfGpu(own)

        monkeypatch.setattr(cuda, "generator", generator)
        placed = PlacedModel(graph, gpu_host(names), plan)
        try:
            loss, w = plain(placed(x)), plain(placed.state_dict()["w"])
        finally:
            placed.close()
            monkeypatch.undo()
        assert not machine.order.violations
    before = model.w.detach()
    assert float((before * (before - w)).sum()) == pytest.approx(float(loss), rel=1e-3, abs=1e-3)
    if is_seeded and "cpu" in names:
        torch.manual_seed(7)
        assert float(loss) == pytest.approx(float(((x @ before) * torch.rand(8, 5)).sum()), rel=1e-3, abs=1e-3)
