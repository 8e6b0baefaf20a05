"""`place`: capture, profile, learn and export in one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlplace.export.step import PlacedModel
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.program import OptimizerSpec
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.training import TrainConfig, train


def place(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    optimizer: str | OptimizerSpec | None = None,
    *,
    targets: Any = None,
    host: Host | None = None,
    budget_s: float = 60.0,
    seed: int = 0,
    grouping: str = "heavy-edge",
    constraints: Constraints | None = None,
) -> PlacedModel:
    """`model` as a callable that runs the best placement that was measured on this machine.

    Args:
        model: in the mode that it is to run in.
        inputs: a tensor, a tuple or a dict.
        loss_fn: makes it a training step.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        targets: a tensor or a tuple of tensors for `loss_fn(output, *targets)`, e.g. labels.
        host: of this machine; `Host.detect()` by default.
        budget_s: seconds of search.
        seed: of the search and of random ops.
        grouping: the rule that groups are made by.
        constraints: pins, exclusions and what stays together.
    """
    config = TrainConfig(budget_s=budget_s, seed=seed)  # refused before anything is measured
    graph = capture(model, inputs, loss_fn, optimizer, targets=targets)
    problem = Problem.profile(
        graph, Host.detect() if host is None else host, grouping=grouping, constraints=constraints
    )
    result = train(problem, config)
    return PlacedModel(graph, problem.host, result.placement.plan, seed=seed)
