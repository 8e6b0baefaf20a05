"""Attention on a GPU says what it says on the CPU, also with the forward on the one and the backward on the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_stages.subject import Subject, subject
from gpu_stages.verdict import Verdict
from rlplace.graphs import BACKWARD, capture
from rlplace.measure import Plan

RTOL, ATOL = 1e-3, 1e-4
NUM_STEPS = 3


class Attends(nn.Module):
    """Self-attention of 4 heads of 16 over (B, L, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y


def run(host_word: str) -> Verdict:
    torch.manual_seed(0)
    graph = capture(Attends(), torch.randn(4, 33, 64), lambda y: (y**2).mean(), "sgd")
    placed = subject(host_word, graph=graph)
    last = placed.host.num_devices - 1
    plans = {
        "all on the first": placed.plan_on(0),
        "backward on the last": placed.plan_of(_by_phase(placed, 0, last)),
        "backward on the first": placed.plan_of(_by_phase(placed, last, 0)),
    }
    expected = _losses(placed, placed.plan_on(last))
    found = {name: _losses(placed, plan) for name, plan in plans.items()}
    apart = {name: float((losses - expected).abs().max()) for name, losses in found.items()}
    wrong = [name for name, losses in found.items() if not torch.allclose(losses, expected, rtol=RTOL, atol=ATOL)]
    attention = sorted({target for target in graph.targets if "attention" in target})
    what = f"{', '.join(attention) or 'attention by its definition'} on {placed.host.devices[0].name}"
    against = f"as on {placed.host.devices[last].name}, within {RTOL} and {ATOL}, over {NUM_STEPS} steps"
    return Verdict.of(not wrong, f"{what}: {against}" + (f"; not {', '.join(wrong)}" if wrong else ""), apart=apart)


def _by_phase(placed: Subject, forward: int, backward: int) -> np.ndarray:
    """What lives together is with the forward."""
    graph = placed.graph
    is_backward = (graph.phases == BACKWARD) & (graph.colocation < 0)
    return np.where(is_backward, backward, forward).astype(np.int32)


def _losses(placed: Subject, plan: Plan) -> Tensor:
    with placed.loaded(plan) as step:
        losses = []
        for k in range(NUM_STEPS):
            step.run(k)
            losses.append(step.result.detach().cpu().clone())
    return torch.stack(losses)
