"""`judge_loss`: whether the losses of micro-batches, or one loss of their joined outputs, are the loss of the batch.

Checked, not assumed: a few samples of the batch are computed whole and by slices, in float64 on a copy of the model,
with dropout that drops nothing and batch norm on fixed statistics, and loss and gradients are compared.

Mixing that their values hide, where an op saturates, shows in how the step depends on its samples (see `dependence`).

`Ways`: the step of a few samples, whole and by slices, and whether the slices make its loss and gradients.

The few samples that a check computes: cut from a user's batch, unevenly, and some with labels that do not count.

`join_outputs`: a model's results for the slices of a batch, put together again.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, RlplaceError, check_known, refuse_if
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.portable import normalises_batch
from rlplace.graphs.capturing.refusals import has_values
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.capturing.untouched import untouched
from rlplace.graphs.micro_batching.dependence import (
    Dependence,
    Labels,
    Of,
    Stepped,
    TimeUp,
    Trial,
    dependence,
    one_thread,
)
from rlplace.graphs.micro_batching.slices import changes, cut_words
from rlplace.graphs.program import CONSTANTS, LossKind, LossVerdict, Slicing, Weights, even_sizes, tensors_in

ASKED = ("auto", "separate", "joined", "accumulated")
"""How the loss of micro-batches can be asked for."""
MOST_PARAMETERS = 1 << 28
"""Larger models are not copied: in float64, with gradients of both ways, this many take 8 GiB."""

FLOPS_PER_PARAMETER = 1_000
"""Of a check, about: some hundred tokens, forward and backward."""
MOST_WORK = 60e9
"""Of a check: a minute of one idle core."""

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


def judge_loss(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    *,
    asked: str = "auto",
    most_work: float = MOST_WORK,
) -> LossVerdict:
    """Which loss of micro-batches is that of the batch.

    A loss that is right only while no label is ignored, or while a mask keeps all, is not taken unless it is asked for:
    the labels of the next batch may be padded.

    Args:
        model: in the mode of the step; it, its random states and its gradients stay as they are.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        loss_fn: takes the model's output and the targets; None for inference.
        targets: further arguments of the loss.
        slicing: how the batch is cut.
        asked: `auto`, or the kind that is wanted.
        most_work: of the check, in about nanoseconds of one idle core: no matter how busy the machine is.

    Raises:
        CaptureError: no loss of micro-batches is that of the batch; names the ops that mix samples.
        InvalidValue: the loss that was asked for is not right; says which is.
        UnknownName: no such kind.
    """
    check_known("loss of micro-batches", asked, ASKED)
    refuse_if(
        loss_fn is None and asked not in ("auto", "joined"),
        "loss",
        asked,
        "'auto' or 'joined' without a `loss_fn`",
        where="micro-batches",
        hint="Inference has no loss: the outputs of micro-batches are joined.",
    )
    if asked == "accumulated":
        why = "gradient accumulation over the micro-batches, weighted by their samples, as asked for"
        return LossVerdict("accumulated", "mean", True, why, normalises_batch(model))
    if slicing.num_micro_batches == 1:
        kind: LossKind = "joined" if asked == "joined" or loss_fn is None else "separate"
        return LossVerdict(kind, "mean", True, "one micro-batch is the whole batch", normalises_batch(model))
    try:
        if not has_values((*model.parameters(), *model.buffers(), *tensors_in((args, kwargs)), *targets)):
            raise NotComputable("its tensors are fake, without values")
        if (num_parameters := sum(parameter.numel() for parameter in model.parameters())) > MOST_PARAMETERS:
            raise NotComputable(f"its {num_parameters:,} parameters are too many to copy")
        with untouched(model, loss_fn), one_thread(num_parameters * FLOPS_PER_PARAMETER):
            return _judged(model, (args, kwargs), loss_fn, targets, slicing, asked, most_work)
    except (TimeUp, NotComputable) as problem:
        return unchecked(
            model,
            loss_fn,
            asked,
            str(problem) or f"the check would take longer than {most_work / 1e9:g} s of an idle core",
        )


def unchecked(model: torch.nn.Module, loss_fn: LossFn | None, asked: str, why: str) -> LossVerdict:
    """The verdict on a loss that cannot be checked.

    Args:
        model: in the mode of the step.
        loss_fn: None for inference.
        asked: `auto`, `separate` or `joined`.
        why: the obstacle to a check.
    """
    is_joined = asked == "joined" or loss_fn is None
    told = f"unchecked: {why}; {'joined outputs are' if is_joined else 'a mean over samples is'} assumed"
    return LossVerdict("joined" if is_joined else "separate", "mean", False, told, normalises_batch(model))


def _judged(
    model: torch.nn.Module,
    call: Any,
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    asked: str,
    most_work: float,
) -> LossVerdict:
    ways = _ways(model, call, loss_fn, targets, slicing, most_work)
    if ways.changed:
        raise changes(ways.changed, slicing)
    found = _right(ways, asked, has_loss=loss_fn is not None)
    if isinstance(found, _Wrong) and ways.fails and slicing.sizes[-1] > 1 and ways.slicing.sizes[-1] == 1:
        # a slice of one sample, which a `squeeze` makes none of, is not among those of the step
        ways = Ways(ways.trial, slicing, is_even=True)
        found = _right(ways, asked, has_loss=loss_fn is not None)
    if not isinstance(found, _Wrong):
        return found
    refuse_if(
        found.right,
        "loss",
        asked,
        f"{found.right!r}",
        where="micro-batches",
        hint=f"As {asked} losses: {found.separate or found.joined}.",
    )
    if ways.changed_buffer:  # which no other loss allows
        raise changes(ways.changed_buffer, slicing)
    if found.when_padded and (ways.is_loss_inside or not ways.dependence.is_mixed):
        raise CaptureError(
            f"micro-batches can have neither a loss each ({found.when_padded}) nor one together ({found.joined}). Hint:"
            f" {_OUTSIDE}; or {_unpadded(ways, slicing)}{_INSTEAD}."
        )
    raise _refused(
        () if ways.fails else ways.dependence.mixing,
        found,
        cut_words(call[0], call[1], targets, slicing),
        ways,
        has_loss=loss_fn is not None,
    )


def _unpadded(ways: Ways, slicing: Slicing) -> str:
    """Advice to ask for separate losses, if they make that of the whole batch: a few samples may hide that."""
    try:
        return (
            "`loss='separate'` (--loss separate) where no label is ever ignored; or "
            if Ways(ways.trial, slicing, is_whole=True).separate()
            else ""
        )
    except (NotComputable, TimeUp):
        return ""


@dataclass(frozen=True)
class _Wrong:
    """The requested loss is not right: why separate and joined losses are not, and the right one (`right`), if there is
    one."""

    separate: str
    joined: str
    when_padded: str = ""
    right: str = ""


def _right(ways: Ways, asked: str, *, has_loss: bool) -> LossVerdict | _Wrong:
    weights = ways.separate() if has_loss and asked != "joined" else None
    separate, when_padded = ways.reason, ""
    if weights is not None and asked == "separate":
        is_always = not ways.counts_labels and ways.separate_always()
        unless = ", as long as no label is ignored" if ways.counts_labels else f" ({ways.reason})"
        return _checked("separate", weights, f"{_MEANS[weights]}{'' if is_always else unless}", ways)
    if weights is not None:
        is_right = ways.separate_when_padded(weights)
        if is_right and ways.separate_always():
            return _checked("separate", weights, _MEANS[weights], ways)
        when_padded = ways.reason
        if is_right and not ways.dependence.is_known and not ways.joined():
            return _checked("separate", weights, f"{_MEANS[weights]} with this batch; {when_padded}", ways)
    if ways.joined():
        if asked == "separate":
            return _Wrong(separate, "", right="joined")
        for_what = f" for one loss, that of the batch ({separate or when_padded or 'as asked for'})" if has_loss else ""
        return _checked("joined", "mean", f"the outputs of the micro-batches are joined{for_what}", ways)
    joined = ways.reason
    is_separate = has_loss and asked == "joined" and ways.separate() is not None and not ways.dependence.is_mixed
    return _Wrong(separate, joined, when_padded, "separate" if is_separate else "")


def _checked(kind: LossKind, weights: Weights, why: str, ways: Ways) -> LossVerdict:
    if ways.normalises_batch:
        why += "; batch norm takes the statistics of each micro-batch, as gradient accumulation does"
    return LossVerdict(kind, weights, True, why, ways.normalises_batch)


def _ways(
    model: torch.nn.Module,
    call: Any,
    loss_fn: LossFn | None,
    targets: Sequence[torch.Tensor],
    slicing: Slicing,
    most_work: float,
) -> Ways:
    """The step of a few samples in float64.

    Where they do not run so, as they are (an op for float32 alone), or all samples (a shared tensor fits no fewer).
    """
    tensors = (*model.parameters(), *targets, *tensors_in(call))
    dtypes = {value.dtype for value in tensors if value.is_floating_point()}
    precisions = (True, False) if dtypes <= {torch.float32, torch.float64} else (True,)
    problems = []
    for is_whole, is_double in itertools.product((False, True), precisions):
        try:
            trial = Trial(model, call, loss_fn, targets, is_double=is_double, most_work=most_work)
        except Exception as error:  # of a `deepcopy` of the user's objects
            raise NotComputable(f"the model cannot be copied ({type(error).__name__}: {error})") from error
        try:
            return Ways(trial, slicing, is_whole=is_whole)
        except NotComputable as problem:
            problems.append(problem)
    raise problems[0]


def _refused(ops: Sequence[str], wrong: _Wrong, cut: str, ways: Ways, *, has_loss: bool) -> CaptureError:
    """The message where neither loss is right."""
    dims = "`batch_dims` (--batch-dims)"
    instead = _INSTEAD if has_loss else "micro_batches=1 keeps the batch whole"
    hint = f"if the batch is another dimension, say it with {dims}; else {instead}"
    if ways.is_loss_inside:
        hint = f"{_OUTSIDE}; {hint}"
    what = f"it cannot be cut so ({cut})"
    if any(op.startswith("aten.as_strided") for op in ops):
        hint = f"`as_strided` with an offset counts from the first sample of the batch: leave the offset out; {hint}"
    if ops:
        what, hint = f"samples of the batch are mixed by {', '.join(ops)}", f"{hint}. Now {cut}"
    elif ways.fails:
        what = f"it cannot be cut so: a slice of the batch fails, the whole batch runs ({cut})"
        hint = (
            f"take sizes from tensors (`x.shape[0]`), as a number that stands in the code fits one batch; {dims} says "
            f"which dimension of every tensor is the batch; fewer micro-batches make larger slices"
        )
    tried = {"separate losses": wrong.separate, "joined outputs": wrong.joined}
    if wrong.separate == wrong.joined:
        tried = {"separate losses and joined outputs": wrong.joined}
    told = "; ".join(f"{way}: {reason}" for way, reason in tried.items() if reason)
    return CaptureError(
        f"micro-batches do not make the step of the batch: {what}. Tried {told}. Hint: {hint}.",
        op=ops[0].partition(" in ")[0] if ops else "",
    )


class NotComputable(RlplaceError):
    """The step of a few samples could not be computed, or is not finite: nothing can be said of it."""


class Ways:
    """The whole step of a few samples, and the same by slices.

    Args:
        trial: the step.
        slicing: how its tensors are to be cut.
        is_whole: whether to take all samples and cut them as they are to be, not a few.
        is_even: whether slices have the same size.

    Attributes:
        tensors: inputs and targets of the few samples.
        slicing: how they are cut.
        normalises_batch: whether batch normalisation takes the statistics of the batch.
        changed: a parameter that the step writes to; "" without one.
        changed_buffer: likewise a buffer, other than running statistics of batch norm.
        counts_labels: whether a loss divides by how many labels are not ignored.
        reason: why the last way that was tried is not right; "" where it is.
        fails: whether the model failed on a slice.
        is_loss_inside: whether the model returns a scalar, its loss most likely; known once `joined` was tried.

    Raises:
        NotComputable: the step fails on them, or is not finite.
    """

    def __init__(self, trial: Trial, slicing: Slicing, *, is_whole: bool = False, is_even: bool = False) -> None:
        self.trial, self.tensors, self.slicing, self._all = trial, trial.tensors, slicing, slicing
        self.reason, self.fails, self.is_loss_inside = "", False, False
        try:
            if not is_whole:
                self.tensors, self.slicing = few_samples(trial.tensors, slicing, is_even=is_even)
            with trial.rehearsal() as pinned:
                self._whole = self.trial.step(self.tensors)
        except Exception as error:  # the model is the user's: whatever it raises
            raise NotComputable(f"it does not run on {self.slicing.batch} samples alone ({_said(error)})") from error
        if not self._whole.is_finite:
            raise NotComputable(f"its loss or a gradient is not finite for {self.slicing.batch} samples")
        self.normalises_batch = pinned.normalises_batch
        parameters = trial.model.named_parameters()
        self.changed = next((name for name, value in parameters if memory(value)[0] in pinned.written), "")
        self.changed_buffer = next(
            (
                f"{path}.{name}".lstrip(".")
                for path, module in trial.model.named_modules()
                for name, value in module.named_buffers(recurse=False)
                if memory(value)[0] in pinned.written and not isinstance(module, nn.modules.batchnorm._NormBase)
            ),
            "",
        )
        self.counts_labels = any(label.is_mean for label in pinned.labels)
        self._reads_class_weights = any(label.is_weighted for label in pinned.labels)

    def separate(self) -> Weights | None:
        """Weights with which the slices' own losses make the batch's: b_i / B (`mean`) or 1 (`sum`); None: neither."""
        if self._reads_class_weights:
            self.reason = "the loss divides by the weights of the classes that occur, other ones in every slice"
            return None
        weights = self._separate(self.tensors, self._whole)
        if weights is not None and not self._is_right_elsewhere(weights):
            self.reason = f"their {weights} is the loss of some samples, not of others"
            return None
        return weights

    def _is_right_elsewhere(self, weights: Weights) -> bool:
        """Whether slices also make the loss of the first samples: ops that saturate hide mixing of samples."""
        tensors, slicing = few_samples(self.trial.tensors, self._all, is_spread=False)
        if self.slicing.batch == self._all.batch or slicing != self.slicing:  # not the same sizes as before, or ...
            return True
        try:
            with self.trial.rehearsal():
                whole = self.trial.step(tensors)
        except Exception:  # ... whatever the model does not take
            return True
        is_right = not whole.is_finite or self._separate(tensors, whole, (weights,)) is not None or self.fails
        self.fails = False  # the first samples are an additional check: that a slice of them fails is no refusal
        return is_right

    def separate_when_padded(self, weights: Weights) -> bool:
        """Whether they do so too when some labels of a slice are ignored."""
        with self.trial.rehearsal():
            tensors, labels = padded(self.trial, self.tensors, self.slicing)
            if all(one is other for one, other in zip(tensors, self.tensors, strict=True)):
                return True
            whole = self.trial.step(tensors)
        if not whole.is_finite or self._separate(tensors, whole, (weights,)):
            return True
        ignored = sorted({label.ignore_index for label in labels if label.num_ignored})
        self.reason = (
            f"losses of slices make it only while no label is ignored (ignore_index={', '.join(map(str, ignored))}), "
            f"and labels of the next batch may be padded"
        )
        return False

    @functools.cached_property
    def dependence(self) -> Dependence:
        """How the step depends on its samples."""
        return dependence(self.trial, self.tensors, self.slicing)

    def separate_always(self) -> bool:
        """Whether the loss is a sum or mean over samples by its ops, not by their values on this batch."""
        found = self.dependence
        if not found.is_known:
            self.reason = "its ops are others for a slice than for the batch, so that other batches cannot be judged"
            return False
        if found.loss in (Of.NOTHING, Of.SUM):
            return True
        self.reason = (
            "losses of slices make it with this batch, but not by what it computes: "
            f"{', '.join(found.mixing)} takes samples together"
        )
        return False

    def joined(self) -> bool:
        """Whether one loss of the slices' joined outputs is the batch's."""
        self.reason = ""
        with self._caught(), self.trial.rehearsal():
            with torch.set_grad_enabled(self.trial.has_loss):
                whole = pytree.tree_leaves(self.trial.output(self.tensors))
            is_scalar = any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in whole)
            self.is_loss_inside = self.trial.has_loss and is_scalar
            with torch.set_grad_enabled(self.trial.has_loss):
                cut = (self.slicing.cut(self.tensors, index) for index in range(len(self.slicing.sizes)))
                outputs = [self.trial.output(tensors) for tensors in cut]
            joined = join_outputs(whole, [pytree.tree_leaves(output) for output in outputs], self.slicing)
            self.reason = joined.problem
            if not joined.leaves:
                return False
            output = pytree.tree_unflatten(joined.leaves, pytree.tree_structure(outputs[0]))
            step = self._with_loss(output, joined) if self.trial.has_loss else Stepped.of_output(output)
            if self._agree(self._whole, step):
                found = self.dependence
                is_mixed = found.is_known and any(each > Of.SAMPLES for each in found.outputs)
                self.reason = "an output of the model depends on all samples of the batch together" if is_mixed else ""
                return not is_mixed
            self.reason = joined.problem or "the loss of the slices' joined outputs is not that of the batch"
        return False

    def _with_loss(self, output: Any, joined: Joined) -> Stepped:
        """One loss of joined outputs; each slice goes on backward from its part of their gradient."""
        loss = self.trial.loss(output, self.tensors)
        starts = [start for parts in joined.parts for _, start in parts]
        seeds = iter(torch.autograd.grad(loss, starts, allow_unused=True))
        steps = [Stepped(loss.detach(), tuple(map(torch.zeros_like, self.trial.parameters)))]
        for parts in joined.parts:
            ends = [(end, seed) for (end, _), seed in zip(parts, seeds, strict=False) if seed is not None]
            if ends:
                steps.append(Stepped(loss.new_zeros(()), self.trial.gradients(*zip(*ends, strict=True))))
        return _summed(steps, [1.0] * len(steps))

    def _separate(
        self, tensors: Sequence[Tensor], whole: Stepped, kinds: Sequence[Weights] = ("mean", "sum")
    ) -> Weights | None:
        self.reason, slicing = "", self.slicing
        with self._caught(), self.trial.rehearsal():
            steps = [self.trial.step(slicing.cut(tensors, index)) for index in range(slicing.num_micro_batches)]
            for kind in kinds:
                if self._agree(whole, _summed(steps, slicing.weights(kind))):
                    return kind
            self.reason = "neither their sum nor their mean over samples is the loss of the batch"
        return None

    def _agree(self, expected: Stepped, found: Stepped) -> bool:
        rtol = 1e-6 if self.trial.is_double else 1e-3
        overall = sum(float(gradient.norm()) ** 2 for gradient in expected.gradients) ** 0.5
        return bool((found.loss - expected.loss).abs() <= rtol * (expected.loss.abs() + 1e-3)) and all(
            one.shape == other.shape and float((one - other).norm()) <= rtol * (float(one.norm()) + 1e-3 * overall)
            for one, other in zip(expected.gradients, found.gradients, strict=True)
        )

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """While active, an error of the user's model on a slice becomes the reason why a way is not right."""
        try:
            yield
        except Exception as error:
            self.reason, self.fails = f"the model does not run on a slice ({_said(error)})", True


def _summed(steps: Sequence[Stepped], weights: Sequence[float]) -> Stepped:
    """The sum of steps, each times its weight."""
    columns = zip(*((step.loss, *step.gradients) for step in steps), strict=True)
    loss, *gradients = (functools.reduce(operator.add, map(operator.mul, weights, column)) for column in columns)
    return Stepped(loss, tuple(gradients))


def _said(error: BaseException) -> str:
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first[:200]}"


MOST_SLICES = 3
"""Slices of a check: mixing of samples shows with two slices, a mean of means with uneven ones."""


def few_samples(
    tensors: Sequence[Tensor], slicing: Slicing, *, is_even: bool = False, is_spread: bool = True
) -> tuple[list[Tensor], Slicing]:
    """A few samples of a batch, at most two a slice, and how to cut them.

    They are from all over it: it may be sorted, by length for one, and padded at its end alone. Sizes differ, so that a
    mean of means is told from a mean, and are above 1 where those of the batch are and there is room. A tensor whose
    samples are all alike, as in `torch.ones(8, 16)`, gets others in their range: if they were alike, they would hide
    ops that mix them.

    Args:
        tensors: inputs and targets.
        slicing: how they are to be cut.
        is_even: whether sizes are the same instead, where they can be.
        is_spread: else they are the first.
    """
    count = min(slicing.num_micro_batches, MOST_SLICES)
    batch = min(slicing.batch, 2 * count)
    if count > 2 and (batch == count or slicing.sizes[-1] > 1):
        count -= 1
    sizes = [*even_sizes(batch, count)]
    if sizes[0] == sizes[-1] > 1 and not is_even:
        sizes[0] += 1
        sizes[-1] -= 1
    generator = torch.Generator().manual_seed(0)
    taken = torch.arange(batch) * slicing.batch // batch if is_spread else torch.arange(batch)
    cut = [
        tensor if dim is None else _varied(tensor.index_select(dim, taken), dim, generator)
        for tensor, dim in zip(tensors, slicing.dims, strict=True)
    ]
    return cut, Slicing(slicing.dims, tuple(sizes))


def padded(trial: Trial, tensors: Sequence[Tensor], slicing: Slicing) -> tuple[list[Tensor], list[Labels]]:
    """The same samples with labels of the first slice set to the `ignore_index` of the losses that read them.

    A tensor of integers holds labels if such a change reaches a loss of negative log-likelihood; where the step fails
    on it (an embedding reads the tensor too), labels cannot be ignored so.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.

    Returns:
        the tensors, and the values that the losses read of them; the same as before where no loss reads labels.
    """
    draws = np.random.default_rng(1)  # none of torch, which a check has return constants
    found, now = list(tensors), _labels(trial, tensors)
    for position, (tensor, dim) in enumerate(zip(tensors, slicing.dims, strict=True)):
        if dim is None or tensor.dtype not in (torch.int64, torch.uint8):
            continue
        in_range = torch.iinfo(tensor.dtype)
        for ignored in sorted({label.ignore_index for label in now}):
            for share in (0.5, 1.0) if in_range.min <= ignored <= in_range.max else ():
                other = _with_value(tensor, dim, slicing.sizes[0], ignored, share, draws)
                changed = [*found[:position], other, *found[position + 1 :]]
                try:
                    read = _labels(trial, changed)
                except (IndexError, RuntimeError, ValueError):  # whatever else reads them
                    continue
                if sum(each.num_ignored for each in read) > sum(each.num_ignored for each in now):
                    found, now = changed, read
                    break
    return found, now


def _labels(trial: Trial, tensors: Sequence[Tensor]) -> list[Labels]:
    """The values that the losses of one step read."""
    with trial.rehearsal() as pinned:  # a loss may take gradients of its own
        trial.loss(trial.output(tensors), tensors)
    return pinned.labels


def _varied(tensor: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """The tensor, or others in its range where all its samples are alike."""
    has_no_range = tensor.numel() == 0 or tensor.dtype is torch.bool or tensor.is_complex()
    if tensor.shape[dim] < 2 or has_no_range or bool((tensor != tensor.narrow(dim, 0, 1)).any()):
        return tensor
    if not tensor.is_floating_point():
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return tensor * (1 - noise / 2) if bool(tensor.any()) else noise / 2


def _with_value(tensor: Tensor, dim: int, size: int, value: int, share: float, draws: np.random.Generator) -> Tensor:
    """A copy with `value` in a share of the elements of the first samples that have another."""
    changed = tensor.clone()
    first = changed.narrow(dim, 0, size)
    others = torch.nonzero(first != value)
    count = max(round(share * len(others)), 1)
    chosen = others[torch.from_numpy(np.sort(draws.permutation(len(others))[:count]))]
    first[tuple(chosen.T)] = value
    return changed


@dataclass(frozen=True)
class Joined:
    """Outputs of slices put together.

    Attributes:
        leaves: the model's results for the batch, flat; empty where its outputs cannot be joined.
        parts: for each slice, its outputs that require a gradient: as the model returned them, and the same values,
            from which the joined result is computed.
        problem: why they cannot be joined, or a reason to doubt that their loss is that of the batch; else "".
    """

    leaves: list[Any]
    parts: list[list[tuple[Tensor, Tensor]]]
    problem: str = ""


def join_outputs(whole: Sequence[Any], outputs: Sequence[Sequence[Any]], slicing: Slicing) -> Joined:
    """The outputs of slices, put together in the dimension that grows with the batch.

    An output of the same shape for every batch is that of the first slice.

    Args:
        whole: outputs of the batch, flat: their shapes show the growing dimensions.
        outputs: those of each slice.
        slicing: how the batch is cut.
    """
    leaves: list[Any] = []
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in outputs]
    problem, has_grown = "", False
    for expected, *found in zip(whole, *outputs, strict=True):
        if not isinstance(expected, Tensor):
            if not isinstance(expected, CONSTANTS):
                return Joined([], [], f"an output is a {type(expected).__name__}, which cannot be joined")
            leaves.append(found[0])
            continue
        dims = [dim for dim, length in enumerate(expected.shape) if found[0].shape[dim] != length]
        if len(dims) > 1 or (dims and sum(part.shape[dims[0]] for part in found) != expected.shape[dims[0]]):
            shapes = f"{tuple(expected.shape)} for {slicing.batch} samples and {tuple(found[0].shape)} for"
            return Joined([], [], f"an output is of shape {shapes} {slicing.sizes[0]}, which cannot be joined")
        if not dims and not torch.equal(found[0], found[1]):
            what = "already a scalar" if expected.dim() == 0 else f"of shape {tuple(expected.shape)} for any batch"
            problem = f"an output of the model is {what}, and another for every slice"
        used = [end.detach().requires_grad_(end.requires_grad) for end in (found if dims else found[:1])]
        for own, end, start in zip(parts, found, used, strict=False):
            own += [(end, start)] if end.requires_grad else []
        leaves.append(torch.cat(used, dims[0]) if dims else used[0])
        has_grown |= bool(dims)
    if not has_grown:
        is_scalar = all(leaf.dim() == 0 for leaf in leaves if isinstance(leaf, Tensor))
        return Joined([], [], f"the model's output is {'already a scalar' if is_scalar else 'the same for any batch'}")
    return Joined(leaves, parts, problem)
