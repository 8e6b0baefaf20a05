"""`place`: capture, profile, learn and export in one call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rlplace.errors import FileProblem, FingerprintMismatch, refuse_if
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.graphs import Constraints, OpGraph, OptimizerSpec, SplitPlan, capture
from rlplace.graphs.capturing.trace import LossFn
from rlplace.measure import Costs, Host, Placement, Problem, load_placement, resolve_host, save_placement
from rlplace.measure.hosts.resolve import check_runs_here
from rlplace.measure.isolate.isolated_runner import profile_isolated
from rlplace.records import described
from rlplace.report.console import Progress, progress_of
from rlplace.say import Say
from rlplace.session.prepare import check_exact, chosen_problem
from rlplace.session.setup import AUTO, NO_SPLIT, BatchDims, CutOptions, Loss
from rlplace.training import TrainConfig, train
from rlplace.training.forecast import PROFILING_SHARE, within_rest


@torch.inference_mode(False)  # the search trains a policy, and the step its model
def place(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    optimizer: str | OptimizerSpec | None = None,
    *,
    targets: Any = None,
    host: Host | str | None = None,
    budget_s: float = 60.0,
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    grouping: str = "heavy-edge",
    constraints: Constraints | None = None,
    micro_batches: int | Literal["auto"] = 1,
    batch_dims: BatchDims | None = None,
    loss: Loss = "auto",
    exact: bool = False,
    split: SplitPlan | Literal["auto"] | None = None,
    frozen: Sequence[str] = (),
    check: bool = True,
    trace: bool = True,
    progress: Progress | bool | None = None,
) -> PlacedModel:
    """Returns `model` as a callable that runs the best placement measured on this machine.

    Its attributes hold the decisions: `table` (of the race), `num_micro_batches`, `op_order`, `verdict` (of the loss)
    and `step_time_s`.

    Args:
        model: the model, in the mode (`train` or `eval`) that the step will use.
        inputs: a tensor, a tuple or a dict.
        loss_fn: with a loss, the step is a training step.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        targets: a tensor or a tuple of tensors for `loss_fn(output, *targets)`, e.g. labels; a dict of them for
            `loss_fn(output, **targets)`.
        host: a host of this machine, or a HOST word for it (`auto`, `cores:2`, `procs:2`, `cuda`); `auto` by default.
        budget_s: seconds of the whole call: capture, profiling, calibration, search, final table and verdict. All parts
            shrink to fit, but each runs at least a few steps. The first call on a machine also compiles kernels, which
            takes about 20 seconds more.
        path: JSON file of the placement. If it exists, it is checked and used, without search and measurement; its
            step times and verdict, as they were measured, are printed again. If not, the placement that is found is
            written to it. Remove the file to search again.
        seed: of the search and of random ops.
        grouping: the rule of the groups.
        constraints: pins, exclusions, and ops that stay together.
        micro_batches: number of slices of the batch, each with its own copies of the model's ops. `auto` chooses the
            number, and the order of ops, by simulation. The placed model takes the whole batch and cuts it.
        batch_dims: the batch dimension of each input tensor, then of each target; None for a tensor that is not cut.
        loss: how the loss of the batch is computed from micro-batches; for `auto`, a check decides.
        exact: refuse micro-batches if the result differs from the step of the whole batch (batch norm, accumulated
            losses).
        split: which ops are split into shards, each placed by itself; None splits none, and `auto` chooses by
            simulation. For a placement from `path`, both are what the file says.
        frozen: attributes that the step may change, although placed steps do not change them; as in `capture`.
        check: whether the captured step is compared with plain PyTorch, as in `capture`: one step of both runs.
        trace: whether measured placements also run a traced step, from whose timeline the search learns.
        progress: called with the progress. True prints it to stderr, and False prints nothing. None prints it on a
            terminal, and elsewhere only the last line: the step times of the placement, of one device and of plain
            PyTorch.

    Raises:
        UserError: the model cannot be captured, its batch cannot be cut as asked, or the host is not of this machine.
        FingerprintMismatch: the placement in `path` was made for another graph or host.
        InvalidValue: the placement in `path` violates the constraints.
    """
    # All that is refused is refused before anything is captured or measured.
    config = TrainConfig(budget_s=budget_s, total_s=budget_s, seed=seed, is_traced=trace)  # refused before all else
    plan = None if split == AUTO else split
    refuse_if(
        not isinstance(plan, SplitPlan | None),
        "split",
        described(repr(split)),
        "a SplitPlan, `auto` or None",
        where="place",
        hint='For example `rlplace.SplitPlan(("attention", "mlp"), parts=2)`.',
    )
    asked = CutOptions(micro_batches, batch_dims, loss, exact, AUTO if split == AUTO else NO_SPLIT)
    where = resolve_host("auto" if host is None else host)
    check_runs_here(where)
    file = None if path is None else Path(path)
    if file is not None and not file.parent.is_dir():
        raise FileProblem(file, "cannot be written: there is no such folder. Make it first, or name another.")
    is_own, progress = not isinstance(progress, Progress), progress_of(progress)

    def graph_of(count: int, split: SplitPlan | None = plan) -> OpGraph:
        step = partial(
            capture, model, inputs, loss_fn, optimizer, targets=targets, frozen=frozen, split=split, check=check
        )
        cut: dict[str, Any] = {} if count == 1 else {"micro_batches": count, "batch_dims": batch_dims, "loss": loss}
        return check_exact(step(**cut), asked)

    # A placement that was found before is compared with what is captured now, and used as it is.
    if file is not None and file.exists():
        placement = load_placement(file)
        count = 1 if placement.cut is None else placement.cut.count
        graph = graph_of(count if asked.count == "auto" else asked.count, plan or placement.split)
        _check(placement, graph, where, constraints, file)
        verdict, op_order = placement.verdict, None if placement.cut is None else placement.cut.op_order
        before = "" if verdict is None else f". On {time.strftime('%Y-%m-%d', time.gmtime(verdict.time_s))}: {verdict}"
        progress.conclude(f"placed as {file} says: nothing was searched or measured{before}")
        step_s = None if verdict is None else verdict.step_s
        return PlacedModel(graph, where, placement.plan, seed=seed, op_order=op_order, step_time_s=step_s)

    # Else one is searched: captured and profiled for each number of micro-batches, then trained in what time is left.
    begin_s = time.monotonic()
    profiled_s = begin_s + PROFILING_SHARE * budget_s

    def problem_of(count: int, split: SplitPlan | None = plan) -> Problem:
        return Problem.profile(
            graph_of(count, split),
            where,
            grouping=grouping,
            constraints=constraints,
            progress=progress.say,
            profiler=partial(_profiled, profiled_s),
        )

    with progress if is_own else nullcontext():
        prepared = chosen_problem(asked, where, problem_of, seed=seed, say=progress.say)
        problem = prepared.problem
        result = train(problem, within_rest(config, begin_s), start=prepared.start, progress=progress)
        if file is not None:
            _save(result.placement, file)
        progress.conclude(result.summary)
    return PlacedModel(
        problem.graph,
        problem.host,
        result.placement.plan,
        seed=seed,
        op_order=problem.op_order,
        step_time_s=result.step_time_s,
        table=result.table,
    )


def _profiled(deadline_s: float, graph: OpGraph, host: Host, say: Say) -> Costs:
    return profile_isolated(graph, host, most_s=max(deadline_s - time.monotonic(), 0.0), on_progress=say)


def _check(placement: Placement, graph: OpGraph, host: Host, constraints: Constraints | None, file: Path) -> None:
    """Refuses a placement of another graph or host, or one that breaks the constraints."""
    try:
        placement.require(graph, host)
    except FingerprintMismatch as error:
        error.add_note(f"It is {file}: remove it to search again, or name another.")
        raise
    if constraints is not None:
        costs = Costs(np.zeros((graph.num_ops, host.num_devices)), "estimated")  # they decide nothing
        problem = Problem.grouped(graph, host, costs, grouping="none", constraints=constraints)
        problem.check_placement(placement.devices)


def _save(placement: Placement, file: Path) -> None:
    """Writes the placement that was found; where that fails, the placed model is worth more than its file."""
    try:
        save_placement(placement, file)
    except FileProblem as error:
        warnings.warn(f"the placement is not kept: {error}", RuntimeWarning, stacklevel=3)
