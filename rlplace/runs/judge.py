"""`judge_workload`: how micro-batches make the loss of a named workload, found on its small twin."""

from __future__ import annotations

from dataclasses import fields, replace

from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.capturing.micro.slices import BatchDims, plan_slices
from rlplace.graphs.capturing.micro.verdict import LossVerdict, judge_loss
from rlplace.workloads import CONFIGS, WorkloadSpec, build

_CUT = 2
"""Micro-batches of a twin: what mixes samples shows in two."""
_SMALLER = {"inception_v3": (("image_size", 75),)}
"""Options of twins whose `small` takes long in float64."""


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
