"""`fit`: the gate and the ranker of `ScheduleNetwork`, from what its components led to on training problems."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.policy.schedule.network import ScheduleNetwork
from rlplace.training.pretrain.tables import Table

LEARNING_RATE, WEIGHT_DECAY = 3e-3, 1e-2
SHARPNESS = 12.0
"""How sharply the better of two components is preferred where their regret is learned: e-fold for 8 %."""
REGRET = 2.0
"""Weight of the regret beside the squared error."""
ABSOLUTE = 0.05
"""Weight of what a problem's placements are missed by all alike, which changes no order."""
MOST_SCENARIOS = 256
LEAST_SPREAD = 1e-3


def fit(network: ScheduleNetwork, table: Table, steps: int) -> ScheduleNetwork:
    """`network`, its gate, ranker and scenarios learned from a table whose columns are its components.

    Both are regressions of log step times, and policies at once: the expected step time of a softmax over components
    is lowered along its exact gradient, as every component was simulated on every problem.

    Args:
        network: learns, in place.
        table: (P, C); problems that no component fits on teach nothing.
        steps: gradient steps (Adam with weight decay; Loshchilov and Hutter 2019) of each.
    """
    table = table.rows(np.flatnonzero(np.isfinite(table.log_times).any(axis=1)))
    if not len(table.summary):
        return network
    summary = torch.from_numpy(table.summary)
    with torch.no_grad():
        network.summary_mean.copy_(summary.mean(dim=0))
        network.summary_scale.copy_(summary.std(dim=0, correction=0).clamp(min=LEAST_SPREAD))
    ratios = torch.from_numpy(table.log_ratios).float()
    _start_at(network.gate, ratios.mean(dim=0))
    _descend(network.gate, steps, lambda: _loss(network.component_scores(summary), ratios))
    estimates, wide = torch.from_numpy(table.estimates), summary[:, None].expand(-1, ratios.shape[1], -1)
    times = torch.from_numpy(capped_log_times(table)).float()
    _descend(network.ranker, steps, lambda: _loss(network.log_times(estimates, wide), times, ABSOLUTE))
    with torch.no_grad():
        missed = times - network.log_times(estimates, wide)
        missed -= missed.mean(dim=1, keepdim=True)
        network.scenarios = missed[:: max(-(-len(missed) // MOST_SCENARIOS), 1)].contiguous()
    return network


def capped_log_times(table: Table) -> NDArray[np.float64]:
    """(P, C) log step times, none worse than `WORST` times the problem's best; on each, something must fit."""
    return np.asarray(table.log_times.min(axis=1, keepdims=True) + table.log_ratios)


def _loss(scores: Tensor, times: Tensor, absolute: float = 0.0) -> Tensor:
    """Squared error within each problem, and the regret of a softmax over its components."""
    missed = scores - times
    common = missed.mean(dim=1, keepdim=True)
    share = torch.softmax(-SHARPNESS * scores, dim=1)
    regret = (share * (times - times.min(dim=1, keepdim=True).values)).sum(dim=1)
    loss: Tensor = ((missed - common) ** 2).mean() + REGRET * regret.mean() + absolute * (common**2).mean()
    return loss


def _start_at(net: nn.Sequential, values: Tensor) -> None:
    """Lets a network say `values`, whatever it sees."""
    last = net[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.bias.copy_(values)


def _descend(net: nn.Module, steps: int, loss_of: Callable[[], Tensor]) -> None:
    """Takes gradient steps that become shorter and shorter along half a cosine."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
