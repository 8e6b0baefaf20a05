"""`dependence`: how the values of a step depend on the samples of its batch, op by op, whatever the values are.

A few samples can look as if nothing mixed them where an op saturates: `x.norm().clamp(min=20)` of small samples is 20,
and flooding, `(loss - b).abs() + b`, of a large loss is the loss. So each value is followed from the inputs on: by what
its op does, not by the number that came out. One run of a slice and one of the batch tell which dimension counts the
samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graphs.capturing.constants import calls_told, memory
from rlplace.graphs.micro_batching.trial import TimeUp, Trial
from rlplace.graphs.program import Slicing

MOST_NAMED = 3


class Of(IntEnum):
    """What a value is of the samples of a batch."""

    NOTHING = 0
    """No sample: parameters, constants, and what is computed of them."""
    SAMPLES = 1
    """A part for each sample, computed of that sample alone, along some dimension."""
    SUM = 2
    """A sum or a mean over samples of what each gives alone, times constants, plus constants."""
    MIXED = 3
    """Anything else."""


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


@dataclass(frozen=True)
class Dependence:
    """How a step depends on the samples of its batch.

    Attributes:
        outputs: of the tensors that the model returns.
        loss: of the loss; NOTHING without one.
        mixing: ops of the model that mix samples, or add them up; else those of the loss that do, or that make of a sum
            over samples what is no such sum.
        is_known: whether it could be told: a slice runs, calls the same ops as the batch, and there was time.
    """

    outputs: tuple[Of, ...]
    loss: Of
    mixing: tuple[MixingOp, ...]
    is_known: bool

    @property
    def has_apart(self) -> bool:
        """Whether every output is of samples one by one, or of none."""
        return all(each <= Of.SAMPLES for each in self.outputs)

    @property
    def is_mixed(self) -> bool:
        """Whether an output is known to be of all samples together, and no sum over them."""
        return self.is_known and Of.MIXED in self.outputs


def dependence(trial: Trial, tensors: Sequence[Tensor], slicing: Slicing) -> Dependence:
    """How the outputs and the loss of a step depend on its samples.

    Args:
        trial: the step.
        tensors: its inputs and targets.
        slicing: how they are cut.
    """
    size = max(1, slicing.batch // 2)  # code often differs for one sample
    halves = Slicing(slicing.dims, (slicing.batch - size, size))
    watch = _Watch(trial, slicing.batch, size)
    outputs: list[Of] = []
    in_model: list[MixingOp] = []
    loss, is_done = Of.NOTHING, False
    try:
        with trial.rehearsal(), torch.no_grad():
            of_slice, of_batch = halves.cut(tensors, 1), list(tensors)
            with watch.calls(), watch:
                output = trial.output(of_slice)
                if trial.has_loss:
                    trial.loss(output, of_slice)
            watch.begin_whole([tensor for tensor, dim in zip(of_batch, slicing.dims, strict=True) if dim is not None])
            with watch.calls(), watch:
                output = trial.output(of_batch)
                leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
                outputs = [watch.known.of(leaf) for leaf in leaves]
                in_model, watch.found = watch.found, []
                in_model += [watch.origin[id(leaf)] for leaf in leaves if id(leaf) in watch.origin]
                if trial.has_loss:
                    loss = watch.known.of(trial.loss(output, of_batch))
        is_done = watch.is_aligned
    except (Exception, TimeUp):  # of the user's model; the check of its values says so
        pass
    mixing = dict.fromkeys(in_model or watch.found)
    return Dependence(tuple(outputs), loss, tuple(mixing)[:MOST_NAMED], is_done)


_FACTORIES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full", "zero", "fill"),
}
"""Ops that read shapes of tensors, no values."""
_SUMS = {
    *("sum", "mean", "nansum", "count_nonzero", "trace", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm"),
    *("baddbmm", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"),
    *("multilabel_margin_loss_forward", "index_add", "scatter_add", "bincount", "embedding_dense_backward"),
}
"""Ops that add up, or average, what each sample gives, where they leave no dimension of samples."""
_LINEAR_IN_ALL = {"add", "sub", "rsub", "stack", "cat", "copy"}
_LINEAR_IN_FIRST = {
    *("neg", "sum", "mean", "clone", "_to_copy", "_unsafe_view", "repeat", "flip", "roll", "tril", "triu", "trace"),
    *("index", "index_select", "gather", "masked_fill", "constant_pad_nd", "div", "lift_fresh", "_reshape_copy"),
}
_LINEAR_IN_ONE = {"mul", "mm", "mv", "dot", "bmm"}
_OFFSETS = {"add", "sub", "rsub", "mul", "clone", "_to_copy", "_unsafe_view"}
"""Arithmetic of indices: positions in a flattened batch are of its samples, but other numbers in a slice."""


def _is_linear(name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], is_sum: list[bool]) -> bool:
    """Whether an op is linear in those of its tensors that are sums over samples, all others of no sample.

    Args:
        name: of the op, without its overload and the mark of an in-place form.
        func: the op.
        args: its positional arguments.
        kwargs: the others.
        is_sum: for each of its tensors.
    """
    if name in _LINEAR_IN_ALL or (name == "where" and not is_sum[0]):
        return True
    if name in _LINEAR_IN_ONE:
        return sum(is_sum) == 1
    is_exact = kwargs.get("rounding_mode") is None
    return (name in _LINEAR_IN_FIRST or func.is_view) and is_exact and is_sum[0] and not any(is_sum[1:])


@dataclass
class _Known:
    """Tensors of the batch whose dependence is known, kept so that an id stays the name of one."""

    by_id: dict[int, tuple[Tensor, Of]] = field(default_factory=dict)
    by_memory: dict[int, Of] = field(default_factory=dict)
    written: dict[int, Of] = field(default_factory=dict)

    def of(self, value: Tensor) -> Of:
        """What a value is of; of an unknown one that shows known memory: what that is of."""
        storage = memory(value)[0]
        own = self.by_id[id(value)][1] if id(value) in self.by_id else self.by_memory.get(storage, Of.NOTHING)
        return _joined(own, self.written.get(storage, Of.NOTHING))

    def note(self, value: Tensor, of: Of, *, is_written: bool) -> None:
        """Notes what a value is of; one that is written in place is so for all that show its memory."""
        storage = memory(value)[0]
        self.by_id[id(value)] = value, of
        self.by_memory[storage] = _joined(self.by_memory.get(storage, Of.NOTHING), of)
        if is_written:
            self.written[storage] = _joined(self.written.get(storage, Of.NOTHING), of)


def _joined(one: Of, other: Of) -> Of:
    return Of.MIXED if {one, other} == {Of.SAMPLES, Of.SUM} else max(one, other)


class _Watch(TorchDispatchMode):
    """Keeps what every op returns for a slice, then says of each op for the whole batch what its outputs are of.

    Attributes:
        found: the ops that mix samples, since it was emptied.
        is_aligned: whether the batch has run the ops of the slice so far.
        known: what the tensors of the batch are of.
        origin: by id of a sum over samples, the op that added up.
    """

    def __init__(self, trial: Trial, batch: int, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[MixingOp] = []
        self.is_aligned = True
        self._trial, self._cut, self._is_whole = trial, (batch, batch - size, size), False
        self._of_slice: dict[tuple[str, int], tuple[Any, list[Tensor]]] = {}
        self._counts: Counter[str] = Counter()
        self.known = _Known()
        self.origin: dict[int, MixingOp] = {}
        self._running: list[str] = []
        self._kept: list[Tensor] = []

    def begin_whole(self, samples: Sequence[Tensor]) -> None:
        """From here on ops are of the batch, of these tensors."""
        self._is_whole = True
        for tensor in samples:
            self.known.note(tensor, Of.SAMPLES, is_written=False)

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
        self.is_aligned &= not self._is_whole or self._counts.total() == len(self._of_slice)
        self._running.clear()
        self._counts.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        module = self._running[-1] if self._running else "the loss"
        place = (module, self._counts[module])
        self._counts[module] += 1
        outputs = _flat((result,))
        if not self._is_whole:
            self._of_slice[place] = func, [value.detach().clone() for value in outputs]
            self._kept += outputs  # as those of the batch are: PyTorch detaches what is new and kept elsewhere
            return result
        called, found = self._of_slice.get(place, (None, []))
        expected: list[Tensor | None] = [*found]
        if called is not func or len(expected) != len(outputs):  # a slice took another path there
            self.is_aligned, expected = False, [None] * len(outputs)
        self._judge(MixingOp(str(func), module), func, args, kwargs, list(zip(outputs, expected, strict=True)))
        return result

    def _judge(
        self,
        op: MixingOp,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[tuple[Tensor, Tensor | None]],
    ) -> None:
        inputs = _flat((*args, *kwargs.values()))
        of_inputs = [self.known.of(value) for value in inputs]
        packet = func.overloadpacket.__name__
        name = packet.removesuffix("_") if func._schema.is_mutable else packet
        sums = next((self.origin[id(value)] for value in inputs if id(value) in self.origin), op)
        for value, of_slice in outputs:
            of = self._of(name, func, args, kwargs, of_inputs, inputs, value, of_slice)
            if of is Of.MIXED and Of.MIXED not in of_inputs:
                named = sums if Of.SAMPLES in of_inputs else op  # `x - x.mean(0)`: the mean, not the difference
                if named not in self.found and value.numel():
                    self.found.append(named)
            if of is Of.SUM:
                self.origin[id(value)] = sums if Of.SUM in of_inputs else op
            self.known.note(value, of, is_written=any(value is each for each in inputs))

    def _of(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of_inputs: list[Of],
        inputs: list[Tensor],
        value: Tensor,
        of_slice: Tensor | None,
    ) -> Of:
        """What an output of an op is of."""
        kinds = set(of_inputs) - {Of.NOTHING}
        if not kinds or not value.numel():
            return Of.NOTHING
        if name in _FACTORIES:
            return Of.NOTHING if not any(value is each for each in inputs) else max(kinds)
        if kinds == {Of.SUM}:
            is_sum = [of is Of.SUM for of in of_inputs]
            rounds = any(each.is_floating_point() for each in inputs) and not value.is_floating_point()
            return Of.SUM if _is_linear(name, func, args, kwargs, is_sum) and not rounds else Of.MIXED
        if kinds != {Of.SAMPLES}:
            return Of.MIXED
        if of_slice is None:  # not known, and said so
            return Of.SAMPLES
        if of_slice.shape == value.shape:
            return Of.SUM if name in _SUMS else Of.MIXED
        is_offset = not value.is_floating_point() and (name in _OFFSETS or func.is_view)
        return Of.SAMPLES if is_offset or _is_slice(of_slice, value, *self._cut) else Of.MIXED


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
    shapes = ((before, batch, others // before) for before in range(1, others + 1) if others % before == 0)
    splits = (whole.reshape(*whole.shape[:dim], *shape, *whole.shape[dim + 1 :]) for shape in shapes)
    return any(_is_close(part, split.narrow(dim + 1, start, size).reshape(part.shape)) for split in splits)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    rtol = 1e-6 if one.dtype in (torch.float64, torch.complex128) else 1e-3
    atol = rtol * float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return bool(torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True).all())
