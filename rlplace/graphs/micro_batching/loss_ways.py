"""`Ways`: the step of a few samples, whole and by slices, and whether the slices make its loss and gradients.

The few samples that a check computes: cut from a user's batch, unevenly, and some with labels that do not count.

`join_outputs`: what a model returns for the slices of a batch, put together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlplace.errors import RlplaceError
from rlplace.graphs.micro_batching.dependence import Dependence, Of, dependence
from rlplace.graphs.micro_batching.trial import Labels, Stepped, Trial
from rlplace.graphs.program import Slicing, even_sizes

Weights = Literal["mean", "sum"]


class NotComputable(RlplaceError):
    """The step of a few samples could not be computed, or is not finite: nothing can be said of it."""


class Ways:
    """The whole step of a few samples, and what its slices make of it.

    Args:
        trial: the step.
        slicing: how its tensors are to be cut.
        is_whole: whether to take all samples and cut them as they are to be, not a few.
        is_even: whether slices have the same size.

    Attributes:
        tensors: inputs and targets of the few samples.
        slicing: how they are cut.
        normalises_batch: whether batch normalisation takes the statistics of the batch.
        counts_labels: whether a loss divides by how many labels are not ignored.
        reason: why the last way that was tried is not right; "" where it is.
        fails: whether the model failed on a slice.
        is_loss_inside: whether the model returns a scalar, its loss most likely; known once `joined` was tried.

    Raises:
        NotComputable: the step fails on them, or is not finite.
    """

    def __init__(self, trial: Trial, slicing: Slicing, *, is_whole: bool = False, is_even: bool = False) -> None:
        self._trial, self.tensors, self.slicing = trial, trial.tensors, slicing
        self.reason, self.fails, self.is_loss_inside = "", False, False
        try:
            if not is_whole:
                self.tensors, self.slicing = few_samples(trial.tensors, slicing, is_even=is_even)
            with trial.rehearsal() as pinned:
                self._whole = self._step(self.tensors)
        except Exception as error:  # the model is the user's: whatever it raises
            raise NotComputable(f"it does not run on {self.slicing.batch} samples alone ({_said(error)})") from error
        if not self._whole.is_finite:
            raise NotComputable(f"its loss or a gradient is not finite for {self.slicing.batch} samples")
        self.normalises_batch = pinned.normalises_batch
        self.counts_labels = any(label.is_mean for label in pinned.labels)
        self._reads_class_weights = any(label.is_weighted for label in pinned.labels)

    def separate(self) -> Weights | None:
        """Weights with which the slices' own losses make the batch's: b_i / B (`mean`) or 1 (`sum`); None: neither."""
        if self._reads_class_weights:
            self.reason = "the loss divides by the weights of the classes that occur, other ones in every slice"
            return None
        return self._separate(self.tensors, self._whole)

    def separate_when_padded(self, weights: Weights) -> bool:
        """Whether they do so too when some labels of a slice are ignored."""
        with self._trial.rehearsal():
            tensors, labels = padded(self._trial, self.tensors, self.slicing)
            if all(one is other for one, other in zip(tensors, self.tensors, strict=True)):
                return True
            whole = self._step(tensors)
        if not whole.is_finite or self._separate(tensors, whole, (weights,)):
            return True
        ignored = sorted({label.ignore_index for label in labels if label.num_ignored})
        self.reason = (
            f"losses of slices make it only while no label is ignored (ignore_index={', '.join(map(str, ignored))}), "
            f"and labels of the next batch may be padded"
        )
        return False

    @cached_property
    def dependence(self) -> Dependence:
        """How the step depends on its samples."""
        return dependence(self._trial, self.tensors, self.slicing)

    def separate_always(self) -> bool:
        """Whether the loss is a sum or mean over samples by what its ops are, not by their values on this batch."""
        found = self.dependence
        if not found.is_known:
            self.reason = "its ops are others for a slice than for the batch, so that other batches cannot be judged"
            return False
        if found.loss in (Of.NOTHING, Of.SUM):
            return True
        ops = ", ".join(map(str, found.mixing))
        self.reason = (
            f"losses of slices make it with this batch, but not by what it computes: {ops} takes samples together"
        )
        return False

    def joined(self) -> bool:
        """Whether one loss of the slices' joined outputs is the batch's."""
        self.reason = ""
        with self._caught(), self._trial.rehearsal():
            with torch.no_grad():
                whole = pytree.tree_leaves(self._trial.output(self.tensors))
            is_scalar = any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in whole)
            self.is_loss_inside = self._trial.has_loss and is_scalar
            with torch.set_grad_enabled(self._trial.has_loss):
                cut = (self.slicing.cut(self.tensors, index) for index in range(len(self.slicing.sizes)))
                outputs = [self._trial.output(tensors) for tensors in cut]
            joined = join_outputs(whole, [pytree.tree_leaves(output) for output in outputs], self.slicing)
            self.reason = joined.problem
            if not joined.leaves:
                return False
            output = pytree.tree_unflatten(joined.leaves, pytree.tree_structure(outputs[0]))
            step = self._with_loss(output, joined) if self._trial.has_loss else _of_output(output)
            if self._agree(self._whole, step):
                is_apart = not self.dependence.is_known or self.dependence.has_apart
                self.reason = "" if is_apart else "an output of the model depends on all samples of the batch together"
                return is_apart
            self.reason = joined.problem or "the loss of the slices' joined outputs is not that of the batch"
        return False

    def _with_loss(self, output: Any, joined: Joined) -> Stepped:
        """One loss of joined outputs; each slice goes on backward from its part of their gradient."""
        loss = self._trial.loss(output, self.tensors)
        starts = [start for parts in joined.parts for _, start in parts]
        seeds = iter(torch.autograd.grad(loss, starts, allow_unused=True))
        total = Stepped(loss.detach(), ())
        for parts in joined.parts:
            ends = [(end, seed) for (end, _), seed in zip(parts, seeds, strict=False) if seed is not None]
            if ends:
                own = Stepped(loss.new_zeros(()), self._trial.gradients(*zip(*ends, strict=True)))
                total = _added(total, own) if total.gradients else Stepped(total.loss, own.gradients)
        return total

    def _separate(
        self, tensors: Sequence[Tensor], whole: Stepped, kinds: Sequence[Weights] = ("mean", "sum")
    ) -> Weights | None:
        self.reason = ""
        slicing = self.slicing
        with self._caught(), self._trial.rehearsal():
            sums: dict[Weights, Stepped] = {}
            for index, size in enumerate(slicing.sizes):
                step = self._step(slicing.cut(tensors, index))
                for kind in kinds:
                    weight = size / slicing.batch if kind == "mean" else 1.0
                    part = Stepped(weight * step.loss, tuple(weight * each for each in step.gradients))
                    sums[kind] = part if index == 0 else _added(sums[kind], part)
            for kind in kinds:
                if self._agree(whole, sums[kind]):
                    return kind
            self.reason = "neither their sum nor their mean over samples is the loss of the batch"
        return None

    def _step(self, tensors: Sequence[Tensor]) -> Stepped:
        if self._trial.has_loss:
            return self._trial.step(tensors)
        with torch.no_grad():
            return _of_output(self._trial.output(tensors))

    def _agree(self, expected: Stepped, found: Stepped) -> bool:
        rtol = 1e-6 if self._trial.is_double else 1e-3
        overall = sum(float(gradient.norm()) ** 2 for gradient in expected.gradients) ** 0.5
        return bool((found.loss - expected.loss).abs() <= rtol * (expected.loss.abs() + 1e-3)) and all(
            one.shape == other.shape and float((one - other).norm()) <= rtol * (float(one.norm()) + 1e-3 * overall)
            for one, other in zip(expected.gradients, found.gradients, strict=True)
        )

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """While active, what the user's model raises on a slice becomes the reason why a way is not right."""
        try:
            yield
        except Exception as error:
            self.reason, self.fails = f"the model does not run on a slice ({_said(error)})", True


def _of_output(output: Any) -> Stepped:
    """What inference computes, as a step without a loss."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return Stepped(torch.zeros(()), tuple(leaf.double() for leaf in leaves if not leaf.is_complex()))


def _added(one: Stepped, other: Stepped) -> Stepped:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return Stepped(one.loss + other.loss, tuple(first + second for first, second in pairs))


def _said(error: BaseException) -> str:
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {message[:200]}"


MOST_SLICES = 3
"""Slices of a check: what mixes samples shows in two, a mean of means in uneven ones."""


def few_samples(tensors: Sequence[Tensor], slicing: Slicing, *, is_even: bool = False) -> tuple[list[Tensor], Slicing]:
    """A few samples of a batch, at most two a slice, and how to cut them.

    They are from all over it: it may be sorted, by length for one, and padded at its end alone. Sizes differ, so that a
    mean of means is told from a mean, and are above 1 where those of the batch are and there is room. A tensor whose
    samples are all alike, as in `torch.ones(8, 16)`, gets others in their range: alike, they would hide what mixes
    them.

    Args:
        tensors: inputs and targets.
        slicing: how they are to be cut.
        is_even: whether sizes are the same instead, where they can be.
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
    taken = torch.arange(batch) * slicing.batch // batch
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
        the tensors, and what the losses read of them; the same as before where no loss reads labels.
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
                if other is None:
                    continue
                changed = [*found[:position], other, *found[position + 1 :]]
                try:
                    read = _labels(trial, changed)
                except (IndexError, RuntimeError, ValueError):  # whatever else reads them
                    continue
                if _num_ignored(read) > _num_ignored(now):
                    found, now = changed, read
                    break
    return found, now


def _labels(trial: Trial, tensors: Sequence[Tensor]) -> list[Labels]:
    """What the losses of one step read."""
    with trial.rehearsal() as pinned, torch.no_grad():
        trial.loss(trial.output(tensors), tensors)
    return pinned.labels


def _num_ignored(labels: Sequence[Labels]) -> int:
    return sum(label.num_ignored for label in labels)


def _varied(tensor: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """The tensor, or others in its range where all its samples are alike."""
    if tensor.shape[dim] < 2 or tensor.numel() == 0 or tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    if bool((tensor != tensor.narrow(dim, 0, 1)).any()):
        return tensor
    if not tensor.is_floating_point():
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    return tensor * (1 - noise / 2) if bool(tensor.any()) else noise / 2


def _with_value(
    tensor: Tensor, dim: int, size: int, value: int, share: float, draws: np.random.Generator
) -> Tensor | None:
    """A copy with `value` in a share of the elements of the first samples that have another; None where none has."""
    changed = tensor.clone()
    first = changed.narrow(dim, 0, size)
    others = torch.nonzero(first != value)
    if not len(others):
        return None
    count = max(round(share * len(others)), 1)
    chosen = others[torch.from_numpy(np.sort(draws.permutation(len(others))[:count]))]
    first[tuple(chosen.T)] = value
    return changed


@dataclass(frozen=True)
class Joined:
    """Outputs of slices put together.

    Attributes:
        leaves: what the model would return for the batch, flat; empty where its outputs cannot be joined.
        parts: for each slice, its outputs that require a gradient: as the model returned them, and the same values,
            from which what is joined is computed.
        problem: why they cannot be joined, or what makes it doubtful that their loss is that of the batch; else "".
    """

    leaves: list[Any]
    parts: list[list[tuple[Tensor, Tensor]]]
    problem: str = ""


def join_outputs(whole: Sequence[Any], outputs: Sequence[Sequence[Any]], slicing: Slicing) -> Joined:
    """The outputs of slices, put together in the dimension that grows with the batch.

    An output of the same shape for every batch is that of the first slice.

    Args:
        whole: outputs of the batch, flat: their shapes say what grows.
        outputs: those of each slice.
        slicing: how the batch is cut.
    """
    leaves: list[Any] = []
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in outputs]
    problem, has_grown = "", False
    for expected, *found in zip(whole, *outputs, strict=True):
        if not isinstance(expected, Tensor):
            if not isinstance(expected, (bool, int, float, str, type(None))):
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
        used = []
        for own, value in zip(parts, found if dims else found[:1], strict=False):
            start = value.detach()
            if value.requires_grad:
                own.append((value, start.requires_grad_()))
            used.append(start)
        leaves.append(torch.cat(used, dims[0]) if dims else used[0])
        has_grown |= bool(dims)
    if not has_grown:
        is_scalar = all(leaf.dim() == 0 for leaf in leaves if isinstance(leaf, Tensor))
        return Joined([], [], f"the model's output is {'already a scalar' if is_scalar else 'the same for any batch'}")
    return Joined(leaves, parts, problem)
