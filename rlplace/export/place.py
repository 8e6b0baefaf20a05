"""`place`: capture, profile, learn and export in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import nn

from rlplace.export.placed.placed_model import PlacedModel
from rlplace.graphs.capturing.capture import capture
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.program import OptimizerSpec
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.report.progress import Progress, progress_of
from rlplace.runs.micro_batches import BatchDims, CutOptions, Loss
from rlplace.runs.prepared import chosen_problem
from rlplace.runs.setup import check_exact
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
    micro_batches: int | Literal["auto"] = 1,
    batch_dims: BatchDims | None = None,
    loss: Loss = "auto",
    exact: bool = False,
    frozen: Sequence[str] = (),
    progress: Progress | bool | None = None,
) -> PlacedModel:
    """`model` as a callable that runs the best placement that was measured on this machine.

    What was decided is read from it: `num_micro_batches`, `op_order`, `verdict` (of the loss) and `step_time_s`.

    Args:
        model: in the mode that it is to run in.
        inputs: a tensor, a tuple or a dict.
        loss_fn: makes it a training step.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        targets: a tensor or a tuple of tensors for `loss_fn(output, *targets)`, e.g. labels; a dict of them for
            `loss_fn(output, **targets)`.
        host: of this machine; `Host.detect()` by default.
        budget_s: seconds of search.
        seed: of the search and of random ops.
        grouping: the rule that groups are made by.
        constraints: pins, exclusions and what stays together.
        micro_batches: slices that the batch is cut into, each with its own copies of the model's ops; `auto` chooses
            their number, and the order of ops, by simulation. The placed model takes the whole batch and cuts it.
        batch_dims: the batch's dimension of each input tensor, then of each target, None for one that is not cut.
        loss: how micro-batches make the loss of the batch; found by a check where it is `auto`.
        exact: refuse micro-batches that do not make exactly the step of the whole batch: batch norm, and accumulated
            losses.
        frozen: attributes that the step may change although placed steps leave them as they are, as in `capture`.
        progress: told how it goes; True shows it on stderr, False shows nothing, and None shows it on a terminal only.

    Raises:
        UserError: the model cannot be captured, or its batch cannot be cut so.
    """
    config = TrainConfig(budget_s=budget_s, seed=seed)  # refused before anything is measured
    asked, where = CutOptions(micro_batches, batch_dims, loss, exact), Host.detect() if host is None else host

    is_own, progress = not isinstance(progress, Progress), progress_of(progress)
    say = progress.say

    def problem_of(count: int) -> Problem:
        step = partial(capture, model, inputs, loss_fn, optimizer, targets=targets, frozen=frozen)
        cut: dict[str, Any] = {} if count == 1 else {"micro_batches": count, "batch_dims": batch_dims, "loss": loss}
        graph = check_exact(step(**cut), asked)
        return Problem.profile(graph, where, grouping=grouping, constraints=constraints, progress=say)

    try:
        prepared = chosen_problem(asked, where, problem_of, seed=seed, say=say)
        problem = prepared.problem
        result = train(problem, config, start=prepared.start, progress=progress)
    finally:
        if is_own:
            progress.close()
    return PlacedModel(
        problem.graph,
        problem.host,
        result.placement.plan,
        seed=seed,
        op_order=problem.op_order,
        step_time_s=result.step_time_s,
    )
