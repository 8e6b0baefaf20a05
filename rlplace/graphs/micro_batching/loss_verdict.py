"""`judge_loss`: whether the losses of micro-batches, or one loss of their joined outputs, are the loss of the batch.

Checked, not assumed: a few samples of the batch are computed whole and by slices, in float64 on a copy of the model,
with dropout that drops nothing and batch norm on fixed statistics, and loss and gradients are compared.

`mixing_ops`: the ops of a forward that give a sample something else when it stands in another batch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.errors import CaptureError, InvalidValue, UnknownName
from rlplace.graphs.capturing.constants import calls_told
from rlplace.graphs.capturing.portable import normalises_batch
from rlplace.graphs.capturing.trace import LossFn
from rlplace.graphs.capturing.untouched import untouched
from rlplace.graphs.micro_batching.loss_ways import NotComputable, Ways, Weights
from rlplace.graphs.micro_batching.slices import cut_words
from rlplace.graphs.micro_batching.trial import Pinned, TimeUp, Trial, has_values, rehearsal
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
        hint = "Inference has no loss: the outputs of micro-batches are joined."
        raise InvalidValue("loss", asked, "'auto' or 'joined' without a `loss_fn`", where="micro-batches", hint=hint)
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
        ways = Ways(trial, slicing, deadline, is_even=True)
        found = _right(ways, asked, has_loss=loss_fn is not None)
    if not isinstance(found, _Wrong):
        return found
    if found.right:
        hint = f"As {asked} losses: {found.separate or found.joined}."
        raise InvalidValue("loss", asked, f"{found.right!r}", where="micro-batches", hint=hint)
    if found.when_padded:
        raise CaptureError(
            f"micro-batches can have neither a loss each ({found.when_padded}) nor one together ({found.joined}). Hint:"
            f" {_OUTSIDE}; or `loss='separate'` (--loss separate) where no label is ever ignored; or {_INSTEAD}."
        )
    ops = _mixing(trial, ways, deadline, has_loss=loss_fn is not None)
    raise _refused(ops, found, cut_words(call[0], call[1], targets, slicing), ways, has_loss=loss_fn is not None)


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
                unless = ""
                if ways.counts_labels:
                    unless = ", as long as no label is ignored"
                elif not ways.separate_with_others(weights):
                    unless = f" ({ways.reason})"
                return _checked("separate", weights, f"{_MEANS[weights]}{unless}", ways)
            if ways.separate_when_padded(weights) and ways.separate_with_others(weights):
                untried = "; there was no time for all other values of labels and masks" if ways.left_untried else ""
                return _checked("separate", weights, f"{_MEANS[weights]}{untried}", ways)
            when_padded = ways.reason
    if ways.joined():
        if asked == "separate":
            return _Wrong(separate, "", right="joined")
        why = "the outputs of the micro-batches are joined"
        if has_loss:
            why += f" for one loss, that of the batch ({separate or when_padded or 'as asked for'})"
        return _checked("joined", "mean", why, ways)
    joined = ways.reason
    right = "separate" if has_loss and asked == "joined" and ways.separate() is not None else ""
    return _Wrong(separate, joined, when_padded, right)


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
            trial = Trial(model, call, loss_fn, targets, is_double=is_double)
        except Exception as error:  # of a `deepcopy` of the user's objects
            raise NotComputable(f"the model cannot be copied ({type(error).__name__}: {error})") from error
        try:
            return trial, Ways(trial, slicing, deadline, is_whole=is_whole)
        except NotComputable as problem:
            problems.append(problem)
    raise problems[0]


def _mixing(trial: Trial, ways: Ways, deadline: float, *, has_loss: bool) -> list[MixingOp]:
    """The ops that mix samples: in the model, else in the loss; none where it does not run on a slice."""
    for with_loss in (False, True)[: 1 + (has_loss and not ways.fails)]:
        try:
            found = mixing_ops(trial, ways.tensors, ways.slicing, deadline, with_loss=with_loss)
        except Exception:  # of the user's model; its message is among the reasons already
            return []
        if found:
            return found
    return []


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


aten = torch.ops.aten

MOST_NAMED = 3


@dataclass(frozen=True)
class MixingOp:
    """An op that mixes samples.

    Attributes:
        target: the ATen op.
        module: dotted path and class of the module that called it.
    """

    target: str
    module: str

    def __str__(self) -> str:
        return f"{self.target} in {self.module}"


def mixing_ops(
    trial: Trial, tensors: Sequence[Tensor], slicing: Slicing, deadline: float, *, with_loss: bool
) -> list[MixingOp]:
    """The first ops whose result for a slice is no slice of their result for the batch, though their arguments are.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.
        deadline: in the time of `time.monotonic`; what was not found by then is not.
        with_loss: whether to look at the loss too, not at the model alone.
    """
    size = max(1, slicing.batch // 2)  # code often differs for one sample
    halves = Slicing(slicing.dims, (slicing.batch - size, size))
    watch = _Watch(trial, slicing.batch, slicing.batch - size, size)

    def run(given: Sequence[Tensor]) -> None:
        pinned = Pinned(is_double=trial.is_double, deadline=deadline)
        with rehearsal(pinned, is_double=trial.is_double), torch.no_grad(), watch.calls(), watch:
            output = trial.output(given)
            if with_loss:
                trial.loss(output, given)

    run(halves.cut(tensors, 1))
    watch.is_whole = True
    with suppress(TimeUp, _Enough):
        run(tensors)
    return watch.found


_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""What they return is whatever lay there."""


class _Enough(Exception):
    """As many ops are found as an error names."""


class _Watch(TorchDispatchMode):
    """Keeps what every op returns for a slice, then compares it with what it returns for the whole batch."""

    def __init__(self, trial: Trial, batch: int, start: int, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_whole = False
        self.found: list[MixingOp] = []
        self._trial, self._cut = trial, (batch, start, size)
        self._of_slice: dict[tuple[str, int], tuple[Any, list[Tensor]]] = {}
        self._counts: Counter[str] = Counter()
        self._mixed: dict[int, Tensor] = {}
        self._running: list[str] = []

    @contextmanager
    def calls(self) -> Iterator[None]:
        """While active, the watch knows which module runs."""

        def enter(path: str, module: nn.Module) -> None:
            self._running.append(f"{path or 'the root'} ({type(module).__name__})")

        def leave() -> None:
            if self._running:
                self._running.pop()

        with calls_told(self._trial.model, enter, leave):
            yield
        self._running.clear()
        self._counts.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNFILLED:
            return result
        outputs = [value for value in _flat((result,)) if value.is_floating_point()]
        module = self._running[-1] if self._running else "the loss"
        place = (module, self._counts[module])
        self._counts[module] += 1
        if not self.is_whole:
            self._of_slice[place] = func, [value.detach().clone() for value in outputs]
        elif place in self._of_slice and self._of_slice[place][0] is func:  # else a slice took another path there
            inputs = _flat((*args, *(kwargs or {}).values()))
            self._compare(MixingOp(str(func), module), inputs, outputs, self._of_slice[place][1])
        return result

    def _compare(self, op: MixingOp, inputs: list[Tensor], outputs: list[Tensor], expected: list[Tensor]) -> None:
        is_mixed = any(id(value) in self._mixed for value in inputs)
        is_same = all(_is_slice(part, whole, *self._cut) for part, whole in zip(expected, outputs, strict=False))
        if is_same or not inputs:  # what a step makes of nothing (positions, zeros) is no sample
            return
        self._mixed.update({id(value): value for value in outputs})
        if not is_mixed and op not in self.found:
            self.found.append(op)
            if len(self.found) == MOST_NAMED:
                raise _Enough


def _flat(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _flat(value)
    return found


def _is_slice(part: Tensor, whole: Tensor, batch: int, start: int, size: int) -> bool:
    """Whether `part` is what belongs to `size` of `batch` samples in `whole`, whichever dimension counts them.

    A dimension may hold the samples among others, before or behind them, as in (B * tokens) or (heads * B).
    """
    if part.dim() != whole.dim():
        return False
    scaled = [dim for dim in range(part.dim()) if part.shape[dim] != whole.shape[dim]]
    if not scaled:
        return _is_close(part, whole)
    dim = scaled[0]
    others, left = divmod(whole.shape[dim], batch)
    if len(scaled) > 1 or left or part.shape[dim] != others * size:
        return False
    for before in range(1, others + 1):
        if others % before == 0:
            split = whole.reshape(*whole.shape[:dim], before, batch, others // before, *whole.shape[dim + 1 :])
            if _is_close(part, split.narrow(dim + 1, start, size).reshape(part.shape)):
                return True
    return False


def _is_close(one: Tensor, other: Tensor) -> bool:
    rtol = 1e-6 if one.dtype is torch.float64 else 1e-3
    return bool(torch.isclose(one, other, rtol=rtol, atol=rtol * 1e-3, equal_nan=True).all())
