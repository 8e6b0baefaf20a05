"""`judge_loss`: whether the losses of micro-batches, or one loss of their joined outputs, are the loss of the batch.

Checked, not assumed: a few samples of the batch are computed whole and by slices, in float64 on a copy of the model,
with dropout that drops nothing and batch norm on fixed statistics, and loss and gradients are compared.

What their values hide, where an op saturates, is told by how the step depends on its samples (see `dependence`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs.capturing.portable import normalises_batch
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.capturing.untouched import untouched
from rlplace.graphs.micro_batching.dependence import MixingOp
from rlplace.graphs.micro_batching.loss_ways import NotComputable, Ways, Weights
from rlplace.graphs.micro_batching.slices import cut_words
from rlplace.graphs.micro_batching.trial import TimeUp, Trial, has_values
from rlplace.graphs.program import MicroBatches, Slicing

Kind = Literal["separate", "joined", "accumulated"]
ASKED = ("auto", "separate", "joined", "accumulated")
"""How the loss of micro-batches can be asked for."""
CHECK_S = 60.0
"""Seconds that a check takes at most."""
MOST_PARAMETERS = 1 << 28
"""Larger models are not copied: in float64, with gradients of both ways, this many take 8 GiB."""

_MEANS = {
    "mean": "the losses of the micro-batches, weighted by their samples, make that of the batch",
    "sum": "the losses of the micro-batches add up to that of the batch",
}
_OUTSIDE = (
    "return the model's outputs and compute the loss in `loss_fn(output, *targets)`, so that outputs can be joined"
)
_INSTEAD = (
    "`loss='accumulated'` (--loss accumulated) takes eager gradient accumulation over the micro-batches instead, which "
    "is another step; micro_batches=1 keeps the batch whole"
)


@dataclass(frozen=True)
class LossVerdict:
    """How micro-batches make the loss of their batch.

    Attributes:
        kind: `separate`: each has a loss of its own. `joined`: one loss of their joined outputs; of inference, the
            joined outputs alone. `accumulated`: as separate, by definition, whatever the loss of the whole batch is.
        weights: of separate losses: `mean`: samples of the micro-batch over those of the batch. `sum`: 1.
        is_checked: whether the loss and gradients of some samples were compared, or there was nothing to compare.
        why: a sentence for people.
        normalises_batch: whether the model has batch norm in training, whose statistics are then those of each
            micro-batch: the step is that of gradient accumulation.
    """

    kind: Kind
    weights: Weights
    is_checked: bool
    why: str
    normalises_batch: bool = False

    @classmethod
    def of(cls, micro: MicroBatches) -> LossVerdict:
        """The verdict by which a step was cut."""
        is_sum = micro.loss == "separate" and all(weight == 1 for weight in micro.weights)
        return cls(micro.loss, "sum" if is_sum else "mean", micro.is_checked, micro.why, micro.has_own_statistics)


def judge_loss(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    *,
    asked: str = "auto",
    check_s: float = CHECK_S,
) -> LossVerdict:
    """Which loss of micro-batches is that of the batch.

    A loss that is right only while no label is ignored, or while a mask keeps all, is not taken unless it is asked for:
    the labels of the next batch may be padded.

    Args:
        model: in the mode of the step; it, its random states and its gradients stay as they are.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        loss_fn: takes the model's output and the targets; None for inference.
        targets: what the loss takes besides.
        slicing: how the batch is cut.
        asked: `auto`, or the kind that is wanted.
        check_s: seconds that the check may take.

    Raises:
        CaptureError: no loss of micro-batches is that of the batch; names the ops that mix samples.
        InvalidValue: the loss that was asked for is not right; says which is.
        UnknownName: no such kind.
    """
    if asked not in ASKED:
        raise UnknownName("loss of micro-batches", asked, ASKED)
    if loss_fn is None and asked not in ("auto", "joined"):
        raise InvalidValue(
            "loss",
            asked,
            "'auto' or 'joined' without a `loss_fn`",
            where="micro-batches",
            hint="Inference has no loss: the outputs of micro-batches are joined.",
        )
    if asked == "accumulated":
        why = "gradient accumulation over the micro-batches, weighted by their samples, as asked for"
        return LossVerdict("accumulated", "mean", True, why, normalises_batch(model))
    assumed: Kind = "joined" if asked == "joined" or loss_fn is None else "separate"
    if slicing.num_micro_batches == 1:
        return LossVerdict(assumed, "mean", True, "one micro-batch is the whole batch", normalises_batch(model))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    try:
        if not has_values(model, (*tensors, *targets)):
            raise NotComputable("its tensors are fake, without values")
        if (num_parameters := sum(parameter.numel() for parameter in model.parameters())) > MOST_PARAMETERS:
            raise NotComputable(f"its {num_parameters:,} parameters are too many to copy")
        with untouched(model, loss_fn):
            return _judged(model, (args, kwargs), loss_fn, targets, slicing, asked, time.monotonic() + check_s)
    except TimeUp:
        why = f"the check took longer than {check_s:g} s"
    except NotComputable as problem:
        why = str(problem)
    return unchecked(model, loss_fn, asked, why)


def unchecked(model: torch.nn.Module, loss_fn: LossFn | None, asked: str, why: str) -> LossVerdict:
    """What is assumed of a loss that cannot be checked.

    Args:
        model: in the mode of the step.
        loss_fn: None for inference.
        asked: `auto`, `separate` or `joined`.
        why: what stands in the way of a check.
    """
    is_joined = asked == "joined" or loss_fn is None
    what = "joined outputs are" if is_joined else "a mean over samples is"
    why = f"unchecked: {why}; {what} assumed"
    return LossVerdict("joined" if is_joined else "separate", "mean", False, why, normalises_batch(model))


def _judged(
    model: torch.nn.Module,
    call: Any,
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    asked: str,
    deadline: float,
) -> LossVerdict:
    trial, ways = _ways(model, call, loss_fn, targets, slicing, deadline)
    found = _right(ways, asked, has_loss=loss_fn is not None)
    if isinstance(found, _Wrong) and ways.fails and slicing.sizes[-1] > 1 and ways.slicing.sizes[-1] == 1:
        # a slice of one sample, which a `squeeze` makes none of, is not among those of the step
        ways = Ways(trial, slicing, is_even=True)
        found = _right(ways, asked, has_loss=loss_fn is not None)
    if not isinstance(found, _Wrong):
        return found
    if found.right:
        raise InvalidValue(
            "loss",
            asked,
            f"{found.right!r}",
            where="micro-batches",
            hint=f"As {asked} losses: {found.separate or found.joined}.",
        )
    if found.when_padded and (ways.is_loss_inside or not ways.dependence.is_mixed):
        raise CaptureError(
            f"micro-batches can have neither a loss each ({found.when_padded}) nor one together ({found.joined}). Hint:"
            f" {_OUTSIDE}; or `loss='separate'` (--loss separate) where no label is ever ignored; or {_INSTEAD}."
        )
    raise _refused(
        () if ways.fails else ways.dependence.mixing,
        found,
        cut_words(call[0], call[1], targets, slicing),
        ways,
        has_loss=loss_fn is not None,
    )


@dataclass(frozen=True)
class _Wrong:
    """What was asked for is not right: why separate and joined losses are not, and what is (`right`), if anything."""

    separate: str
    joined: str
    when_padded: str = ""
    right: str = ""


def _right(ways: Ways, asked: str, *, has_loss: bool) -> LossVerdict | _Wrong:
    separate, when_padded = "", ""
    if has_loss and asked != "joined":
        weights = ways.separate()
        separate = ways.reason
        if weights is not None:
            if asked == "separate":
                unless = ", as long as no label is ignored"
                if not ways.counts_labels:
                    unless = "" if ways.separate_always() else f" ({ways.reason})"
                return _checked("separate", weights, f"{_MEANS[weights]}{unless}", ways)
            is_right = ways.separate_when_padded(weights)
            if is_right and ways.separate_always():
                return _checked("separate", weights, _MEANS[weights], ways)
            when_padded = ways.reason
            if is_right and not ways.dependence.is_known and not ways.joined():
                return _checked("separate", weights, f"{_MEANS[weights]} with this batch; {when_padded}", ways)
    if ways.joined():
        if asked == "separate":
            return _Wrong(separate, "", right="joined")
        why = "the outputs of the micro-batches are joined"
        if has_loss:
            why += f" for one loss, that of the batch ({separate or when_padded or 'as asked for'})"
        return _checked("joined", "mean", why, ways)
    joined = ways.reason
    is_separate = has_loss and asked == "joined" and ways.separate() is not None and not ways.dependence.is_mixed
    return _Wrong(separate, joined, when_padded, "separate" if is_separate else "")


def _checked(kind: Kind, weights: Weights, why: str, ways: Ways) -> LossVerdict:
    if ways.normalises_batch:
        why += "; batch norm takes the statistics of each micro-batch, as gradient accumulation does"
    return LossVerdict(kind, weights, True, why, ways.normalises_batch)


def _ways(
    model: torch.nn.Module,
    call: Any,
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    deadline: float,
) -> tuple[Trial, Ways]:
    """The step of a few samples in float64.

    Where they do not run so, as they are (an op for float32 alone), or all samples (a shared tensor fits no fewer).

    Raises:
        NotComputable: it runs in none of these ways; says why the first failed.
    """
    tensors = (*model.parameters(), *targets, *pytree.tree_leaves(call))
    dtypes = {value.dtype for value in tensors if isinstance(value, torch.Tensor) and value.is_floating_point()}
    precisions = (True, False) if dtypes <= {torch.float32, torch.float64} else (True,)
    problems = []
    for is_whole, is_double in itertools.product((False, True), precisions):
        try:
            trial = Trial(model, call, loss_fn, targets, is_double=is_double, deadline=deadline)
        except Exception as error:  # of a `deepcopy` of the user's objects
            raise NotComputable(f"the model cannot be copied ({type(error).__name__}: {error})") from error
        try:
            return trial, Ways(trial, slicing, is_whole=is_whole)
        except NotComputable as problem:
            problems.append(problem)
    raise problems[0]


def _refused(ops: Sequence[MixingOp], wrong: _Wrong, cut: str, ways: Ways, *, has_loss: bool) -> CaptureError:
    """What to say where neither loss is right.

    Args:
        ops: that mix samples.
        wrong: why neither is.
        cut: how the tensors are cut, in words.
        ways: that were tried last.
        has_loss: whether it is a training step.
    """
    dims = "`batch_dims` (--batch-dims)"
    instead = _INSTEAD if has_loss else "micro_batches=1 keeps the batch whole"
    hint = f"if the batch is another dimension, say it with {dims}; else {instead}"
    if ways.is_loss_inside:
        hint = f"{_OUTSIDE}; {hint}"
    what = f"it cannot be cut so ({cut})"
    if ops:
        what, hint = f"samples of the batch are mixed by {', '.join(map(str, ops))}", f"{hint}. Now {cut}"
    elif ways.fails:
        what = f"it cannot be cut so: a slice of the batch fails, the whole batch runs ({cut})"
        hint = f"{dims} says which dimension of every tensor is the batch; fewer micro-batches make larger slices"
    tried = [f"separate losses: {wrong.separate}"] if wrong.separate else []
    tried += [f"joined outputs: {wrong.joined}"] if wrong.joined else []
    if wrong.separate == wrong.joined:
        tried = [f"separate losses and joined outputs: {wrong.joined}"]
    return CaptureError(
        f"micro-batches do not make the step of the batch: {what}. Tried {'; '.join(tried)}. Hint: {hint}.",
        op=ops[0].target if ops else "",
    )
