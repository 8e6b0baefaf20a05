"""`Ways`: the step of a few samples, whole and by slices, and whether the slices make its loss and gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlplace.errors import RlplaceError
from rlplace.graphs.capturing.micro.other_values import other_values
from rlplace.graphs.capturing.micro.pinned import Pinned, TimeUp
from rlplace.graphs.capturing.micro.samples import few_samples, padded
from rlplace.graphs.capturing.micro.trial import Stepped, Trial, rehearsal
from rlplace.graphs.capturing.micro.trial_outputs import Joined, join_outputs
from rlplace.graphs.slicing import Slicing

Weights = Literal["mean", "sum"]
SHARE_OF_OTHERS = 0.25
"""Part of what is left of a check's time that other values of labels and masks may take."""


class NotComputable(RlplaceError):
    """The step of a few samples could not be computed, or is not finite: nothing can be said of it."""


class Ways:
    """The whole step of a few samples, and what its slices make of it.

    Args:
        trial: the step.
        slicing: how its tensors are to be cut.
        deadline: in the time of `time.monotonic`; `TimeUp` is raised after it.
        is_whole: whether to take all samples and cut them as they are to be, not a few.
        is_even: whether slices have the same size.

    Attributes:
        tensors: inputs and targets of the few samples.
        slicing: how they are cut.
        normalises_batch: whether batch normalisation takes the statistics of the batch.
        counts_labels: whether a loss divides by how many labels are not ignored.
        reason: why the last way that was tried is not right; "" where it is.
        fails: whether the model failed on a slice.
        left_untried: whether there was no time for all other values of labels and masks.
        is_loss_inside: whether the model returns a scalar, its loss most likely; known once `joined` was tried.

    Raises:
        NotComputable: the step fails on them, or is not finite.
    """

    def __init__(
        self, trial: Trial, slicing: Slicing, deadline: float, *, is_whole: bool = False, is_even: bool = False
    ) -> None:
        self._trial, self._deadline = trial, deadline
        self.tensors, self.slicing, self._whole_slicing = trial.tensors, slicing, slicing
        self.reason, self.fails, self.left_untried, self.is_loss_inside = "", False, False, False
        pinned = self._pinned()
        try:
            if not is_whole:
                self.tensors, self.slicing = few_samples(trial.tensors, slicing, is_even=is_even)
            with rehearsal(pinned, is_double=trial.is_double):
                self._whole = self._step(self.tensors)
        except TimeUp:
            raise
        except Exception as error:  # the model is the user's: whatever it raises
            raise NotComputable(f"it does not run on {self.slicing.batch} samples alone ({_said(error)})") from error
        if not self._whole.is_finite:
            raise NotComputable(f"its loss or a gradient is not finite for {self.slicing.batch} samples")
        self.normalises_batch = pinned.normalises_batch
        self.counts_labels = any(label.is_mean for label in pinned.labels)
        self._compared = frozenset(pinned.compared)
        self._reads_class_weights = any(label.is_weighted for label in pinned.labels)

    def separate(self) -> Weights | None:
        """Weights with which the slices' own losses make the batch's: b_i / B (`mean`) or 1 (`sum`); None: neither."""
        if self._reads_class_weights:
            self.reason = "the loss divides by the weights of the classes that occur, other ones in every slice"
            return None
        weights = self._separate(self.tensors, self._whole)
        if weights is None or self._is_right_elsewhere(weights):
            return weights
        self.reason = f"their {weights} is the loss of some samples, not of others"
        return None

    def separate_when_padded(self, weights: Weights) -> bool:
        """Whether they do so too when some labels of a slice are ignored."""
        with rehearsal(self._pinned(), is_double=self._trial.is_double):
            tensors, labels = padded(self._trial, self.tensors, self.slicing, self._deadline)
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

    def separate_with_others(self, weights: Weights) -> bool:
        """Whether they do so too with other labels, masks and lengths, which the loss may count; as far as is known.

        Losses alone are computed: without the model where it is a target that is changed, and it is an input only where
        the model makes its loss itself, or hands on what counts.
        """
        until = time.monotonic() + SHARE_OF_OTHERS * (self._deadline - time.monotonic())
        num_inputs = self._trial.num_inputs
        with rehearsal(self._pinned(), is_double=self._trial.is_double), torch.no_grad():
            outputs = self._outputs(self.tensors)
            leaves = [leaf for leaf in pytree.tree_leaves(outputs[0]) if isinstance(leaf, Tensor)]
            hands_on = any(leaf.dim() == 0 or not leaf.is_floating_point() for leaf in leaves)
            for other in other_values(self.tensors, self.slicing, num_inputs, self._compared, with_inputs=hands_on):
                if time.monotonic() > until:
                    self.left_untried = True
                    break
                is_input = other.position < num_inputs
                try:
                    given = self._outputs(other.tensors) if is_input else outputs
                    is_right = self._is_loss(given, other.tensors, weights)
                except TimeUp:
                    raise
                except Exception:  # an index out of range, say: no such value is ever there
                    continue
                if not is_right:
                    what = f"input {other.position}" if is_input else f"target {other.position - num_inputs}"
                    self.reason = (
                        f"losses of slices make it with this batch, but not once some of {what} is {other.value:g}: it "
                        f"divides by how many count, it seems"
                    )
                    return False
        return True

    def joined(self) -> bool:
        """Whether one loss of the slices' joined outputs is the batch's."""
        self.reason = ""
        with self._caught(), rehearsal(self._pinned(), is_double=self._trial.is_double):
            with torch.no_grad():
                whole = pytree.tree_leaves(self._trial.output(self.tensors))
            self.is_loss_inside = self._trial.has_loss and _has_scalar(whole)
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
                self.reason = ""
                return True
            self.reason = joined.problem or "the loss of the slices' joined outputs is not that of the batch"
        return False

    def _with_loss(self, output: Any, joined: Joined) -> Stepped:
        """One loss of joined outputs; each slice goes on backward from its part of their gradient."""
        loss = self._trial.loss(output, self.tensors)
        parts = [part for slice_parts in joined.parts for part in slice_parts]
        seeds = iter(torch.autograd.grad(loss, [part.start for part in parts], allow_unused=True))
        total = Stepped(loss.detach(), ())
        for slice_parts in joined.parts:
            ends = [(part.end, seed) for part, seed in zip(slice_parts, seeds, strict=False) if seed is not None]
            if ends:
                own = Stepped(loss.new_zeros(()), self._trial.gradients(*zip(*ends, strict=True)))
                total = _added(total, own) if total.gradients else Stepped(total.loss, own.gradients)
        return total

    def _separate(
        self, tensors: Sequence[Tensor], whole: Stepped, kinds: Sequence[Weights] = ("mean", "sum")
    ) -> Weights | None:
        self.reason = ""
        slicing = self.slicing
        with self._caught(), rehearsal(self._pinned(), is_double=self._trial.is_double):
            sums: dict[Weights, Stepped] = {}
            for index, size in enumerate(slicing.sizes):
                step = self._step(slicing.cut(tensors, index))
                for kind in kinds:
                    part = _scaled(step, size / slicing.batch if kind == "mean" else 1.0)
                    sums[kind] = part if index == 0 else _added(sums[kind], part)
            for kind in kinds:
                if self._agree(whole, sums[kind]):
                    return kind
            self.reason = "neither their sum nor their mean over samples is the loss of the batch"
        return None

    def _outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What the model returns for all of the samples, then for each slice."""
        cut = [self.slicing.cut(tensors, index) for index in range(len(self.slicing.sizes))]
        return [self._trial.output(given) for given in (tensors, *cut)]

    def _is_loss(self, outputs: Sequence[Any], tensors: Sequence[Tensor], weights: Weights) -> bool:
        """Whether the weighted losses of the slices are that of the whole; so, too, where that is not finite."""
        whole = float(self._trial.loss(outputs[0], tensors))
        parts = [
            weight * float(self._trial.loss(output, self.slicing.cut(tensors, index)))
            for index, (output, weight) in enumerate(zip(outputs[1:], self.slicing.weights(weights), strict=True))
        ]
        rtol = 1e-6 if self._trial.is_double else 1e-3
        return not math.isfinite(whole) or abs(sum(parts) - whole) <= rtol * (abs(whole) + 1e-3)

    def _is_right_elsewhere(self, weights: Weights) -> bool:
        """Whether the losses of slices make that of the first samples too: where ops saturate, they hide what mixes."""
        if self.slicing.batch == self._whole_slicing.batch:
            return True
        tensors, slicing = few_samples(self._trial.tensors, self._whole_slicing, is_spread=False)
        if slicing != self.slicing:  # of the same size each, which the first are not, or ...
            return True
        try:
            with rehearsal(self._pinned(), is_double=self._trial.is_double), torch.no_grad():
                return self._is_loss(self._outputs(tensors), tensors, weights)
        except TimeUp:
            raise
        except Exception:  # ... whatever the model does not take
            return True

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

    def _pinned(self) -> Pinned:
        return Pinned(is_double=self._trial.is_double, deadline=self._deadline)

    def _caught(self) -> _Caught:
        return _Caught(self)


class _Caught:
    """While active, what the user's model raises on a slice becomes the reason why a way is not right."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, TimeUp):
            return False
        self._ways.reason, self._ways.fails = f"the model does not run on a slice ({_said(error)})", True
        return True


def _has_scalar(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves)


def _of_output(output: Any) -> Stepped:
    """What inference computes, as a step without a loss."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return Stepped(torch.zeros(()), tuple(leaf.double() for leaf in leaves if not leaf.is_complex()))


def _scaled(step: Stepped, weight: float) -> Stepped:
    return Stepped(weight * step.loss, tuple(weight * gradient for gradient in step.gradients))


def _added(one: Stepped, other: Stepped) -> Stepped:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return Stepped(one.loss + other.loss, tuple(first + second for first, second in pairs))


def _said(error: BaseException) -> str:
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {message[:200]}"
