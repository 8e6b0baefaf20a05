"""`judge_twin`: how micro-batches make the loss of a workload that was built without values, found on a twin with them.

The twin of a named workload is its small size; that of a user's function is what the function returns once more.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import UserError
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.micro_batching.loss_verdict import LossVerdict, judge_loss, unchecked
from rlplace.graphs.micro_batching.slices import BatchDims, plan_slices
from rlplace.graphs.micro_batching.trial import has_values
from rlplace.runs.micro_batches import CutOptions
from rlplace.workloads import CONFIGS, Workload, WorkloadSpec, build

_CUT = 2
"""Micro-batches of a twin: what mixes samples shows in two."""
_SMALLER = {"inception_v3": (("image_size", 75),)}
"""Options of twins whose `small` takes long in float64."""

MOST_BYTES = 256 * 10**6
"""Parameters, buffers and inputs of a user's function that is called again: larger ones are not."""


def judge_twin(spec: WorkloadSpec, built: Workload, count: int, asked: CutOptions, seed: int) -> LossVerdict | None:
    """How micro-batches make the loss of a workload that was built without values; None where it has values.

    Args:
        spec: a name, several as one, or a user's function.
        built: without values.
        count: micro-batches.
        asked: the user's dimensions and loss, over those that the workload declares.
        seed: of the twin's weights and inputs.

    Raises:
        UserError: the workload cannot be cut, or not so; or what it is built from is not installed.
    """
    if has_values(built.model, _tensors(built)):
        return None
    if spec.is_function:
        return _judge_function(spec, built, count, asked, seed)
    verdict = judge_workload(spec, asked=asked.loss, batch_dims=asked.batch_dims)
    why = f"{verdict.why} (found on its small size)" if verdict.is_checked else verdict.why
    return replace(verdict, why=why)


def _judge_function(spec: WorkloadSpec, built: Workload, count: int, asked: CutOptions, seed: int) -> LossVerdict:
    """Calls the function again, this time with memory for what it makes, where that is little."""
    twin = built
    why = f"its parameters and inputs take {_num_bytes(built) / 1e6:,.0f} MB"
    if asked.loss == "accumulated":
        why = ""  # nothing is to be checked
    elif _num_bytes(built) <= MOST_BYTES:
        try:
            twin, why = build(spec, seed=seed), ""
        except UserError as error:
            why = f"called once more, {error}"
    args, kwargs = as_call(twin.inputs)
    given = (twin.model, args, kwargs, twin.loss_fn, twin.targets)
    slicing = plan_slices(*given, count, asked.batch_dims)
    return (
        unchecked(twin.model, twin.loss_fn, asked.loss, why) if why else judge_loss(*given, slicing, asked=asked.loss)
    )


def _tensors(workload: Workload) -> list[torch.Tensor]:
    return [*pytree.tree_leaves(workload.inputs), *workload.targets]


def _num_bytes(workload: Workload) -> int:
    held = (*workload.model.parameters(), *workload.model.buffers(), *_tensors(workload))
    return sum(tensor.nbytes for tensor in held)


def judge_workload(spec: WorkloadSpec, *, asked: str = "auto", batch_dims: BatchDims | None = None) -> LossVerdict:
    """How micro-batches make the loss of a workload, whose own size is too large to compute or has no values.

    Its twin `@small` is computed: the same code, with four samples.

    Args:
        spec: a named workload, or several as one.
        asked: the kind of loss that is wanted; `auto` is the workload's own.
        batch_dims: as in `capture`; None is the workload's own.

    Raises:
        UserError: the workload cannot be cut, or not so; or what it is built from is not installed.
    """
    workload = build(_twin(spec))
    args, kwargs = as_call(workload.inputs)
    given = (workload.model, args, kwargs, workload.loss_fn, workload.targets)
    slicing = plan_slices(*given, _CUT, workload.batch_dims if batch_dims is None else batch_dims)
    return judge_loss(*given, slicing, asked=workload.loss if asked == "auto" else asked)


def _twin(spec: WorkloadSpec) -> WorkloadSpec:
    if spec.is_multi:
        return replace(spec, parts=tuple(replace(part, spec=_twin(part.spec)) for part in spec.parts))
    has_batch = any(field.name == "batch" for field in fields(CONFIGS[spec.name]))
    options = (("batch", 2 * _CUT),) if has_batch else ()
    return WorkloadSpec(spec.name, (*options, *_SMALLER.get(spec.name, ())), "small")
