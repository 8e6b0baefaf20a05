"""`Joined`: the outputs of micro-batches as those of the whole batch, one loss of them, and its gradient cut again.

Which dimension of a model's outputs grows with the batch, found by running it on fake tensors of several batches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.lower import LoweredStep, lower_step
from rlplace.graphs.capturing.portable import portable
from rlplace.graphs.capturing.refusals import explained
from rlplace.graphs.capturing.trace import check_alone, fakes, trace_step
from rlplace.graphs.capturing.untouched import call_with, untouched
from rlplace.graphs.micro.assembly import Assembly, RefMap
from rlplace.graphs.micro.norms import statistics_handed_out
from rlplace.graphs.micro.parts import Parts, running_ops
from rlplace.graphs.opgraph import BACKWARD, FORWARD
from rlplace.graphs.program import Ref

aten = torch.ops.aten


class Joined:
    """Joins what the model returns for each micro-batch.

    Args:
        assembly: takes the ops.
        parts: the slices, not captured yet.
        is_training: whether there is a loss.

    Attributes:
        dims: for every output tensor the dimension that grows with the batch, or None.
        differentiated: positions of the output tensors that have a gradient.

    Raises:
        CaptureError: outputs do not grow with the batch, or none has a gradient.
    """

    def __init__(self, assembly: Assembly, parts: Parts, *, is_training: bool) -> None:
        self._assembly, self._parts = assembly, parts
        origin, slicing = parts.origin, parts.micro.slicing
        self._output = fake_output(origin.model, origin.args, origin.kwargs, is_training=is_training)
        self._whole = tensors_in(self._output)
        self._part = {
            size: tensors_in(fake_output(origin.model, *parts.call(slicing.sizes.index(size)), is_training=is_training))
            for size in dict.fromkeys(slicing.sizes)
        }
        sized = [batch_dims_of(self._whole, part, slicing.batch, size) for size, part in self._part.items()]
        self.dims = sized[0]
        self._loss: LoweredStep | None = None
        self.differentiated: tuple[int, ...] = ()
        if not is_training:
            return
        if not any(dim is not None for dim in self.dims):
            raise CaptureError(
                "the model returns nothing that grows with the batch (it computes its loss itself), so that the "
                "outputs of micro-batches cannot be joined; return what the loss is made of, and give it as `loss_fn`, "
                "or capture with loss='separate' if the loss is a mean or a sum over samples."
            )
        self._loss = self._captured_loss()

    def seeds(self, index: int) -> tuple[torch.Tensor, ...]:
        """Stand-ins for the gradients of the outputs of micro-batch `index`."""
        made = []
        for position in self.differentiated:
            like = self._part[self._parts.micro.slicing.sizes[index]][position].detach()
            made.append(torch.empty_like(like, memory_format=torch.contiguous_format))
        return tuple(made)

    def join(self, refs: Sequence[RefMap]) -> list[Ref]:
        """The outputs of the whole batch.

        Args:
            refs: of every micro-batch, whose forward is copied.

        Raises:
            CaptureError: an output that does not grow with the batch depends on it all the same.
        """
        steps = [self._parts.step(index) for index in range(len(refs))]
        outputs = []
        for position, dim in enumerate(self.dims):
            own = [self._assembly.here(step.ops, step.results[position], refs[k]) for k, step in enumerate(steps)]
            if dim is not None:
                outputs.append(self._assembly.call(aten.cat.default, own, dim, name="join", phase=FORWARD))
                continue
            if self._depends_on_batch(steps[0], position):
                raise CaptureError(
                    f"output {position} of the model, {tuple(self._whole[position].shape)}, depends on the batch and "
                    f"does not grow with it, so that the outputs of micro-batches cannot be joined; return one row for "
                    f"each sample, or capture with micro_batches=1."
                )
            outputs.append(own[0])
        return outputs

    def add_loss(self, outputs: Sequence[Ref]) -> tuple[Ref, list[list[Ref]]]:
        """The loss of the whole batch, and by micro-batch the gradients of its outputs, copied out of theirs."""
        assert self._loss is not None
        step, slicing = self._loss, self._parts.micro.slicing
        named = {_name(position): ref for position, ref in enumerate(outputs)}
        trace = step.trace
        state = [named[name] for name in (*trace.trainable, *trace.fixed, *trace.buffers)]
        refs = {**dict(enumerate([*state, *self._parts.targets])), **self._parts.constants(step)}
        self._assembly.copy(step.ops, running_ops(step), refs, micro_batch=-1)
        found = dict(zip(trace.trainable, step.gradients, strict=True))
        seeds: list[list[Ref]] = [[] for _ in slicing.sizes]
        for position in self.differentiated:
            gradient = found[_name(position)]
            assert gradient is not None
            whole, dim = self._assembly.here(step.ops, gradient, refs), self.dims[position]
            home = self._assembly.ops.producer(whole)
            for index, (start, size) in enumerate(zip(slicing.starts, slicing.sizes, strict=True)):
                target: torch._ops.OpOverload
                args: tuple[Any, ...] = (whole,)
                if dim is None:  # it does not depend on the batch: the first micro-batch has made it
                    target = aten.zeros_like.default if index else aten.clone.default
                else:
                    grown = self._whole[position].shape[dim] // slicing.batch
                    target = aten.slice_copy.Tensor
                    args = (whole, dim, start * grown, (start + size) * grown)
                seed = self._assembly.call(target, *args, name=f"slice_{index}", phase=BACKWARD)
                self._assembly.ops.built.colocated.append((home, self._assembly.ops.producer(seed)))
                seeds[index].append(seed)
        return self._assembly.here(step.ops, step.results[0], refs), seeds

    def placeholders(self, step: LoweredStep, seeds: Sequence[Ref]) -> RefMap:
        """What stands for the gradients of outputs that the step of a micro-batch was captured with."""
        num_values = len(step.trace.values)
        return dict(zip(range(num_values - len(seeds), num_values), seeds, strict=True))

    def _captured_loss(self) -> LoweredStep:
        origin = self._parts.origin
        outputs = _Outputs(self._output)
        trace = trace_step(outputs, (), {}, origin.loss_fn, origin.targets, is_training=True, frozen=origin.frozen)
        check_alone(trace.result)
        step = lower_step(trace)
        has_gradient = {
            name for name, gradient in zip(trace.trainable, step.gradients, strict=True) if gradient is not None
        }
        self.differentiated = tuple(k for k in range(len(self._whole)) if _name(k) in has_gradient)
        return step

    def _depends_on_batch(self, step: LoweredStep, position: int) -> bool:
        """Whether an output of a slice is computed from what is cut."""
        built, ops = step.ops.built, step.ops
        trace = step.trace
        state = len(trace.trainable) + len(trace.fixed) + len(trace.buffers)
        dims = self._parts.micro.slicing.dims[: len(trace.values) - state - trace.num_targets]
        touched = {state + k for k, dim in enumerate(dims) if dim is not None}
        for op, reads in enumerate(built.reads):
            if touched.intersection(reads):
                touched.update(ops.tensors_of(op))
        return ops.base(step.results[position]) in touched


class _Outputs(nn.Module):
    """Stands for a model that has run: its outputs are parameters where they have a gradient, buffers elsewhere."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._leaves, self._spec = pytree.tree_flatten(output)
        for position, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                self.register_parameter(_name(position), nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(_name(position), tensor.detach())

    def forward(self) -> Any:
        names = map(_name, itertools.count())
        leaves = [getattr(self, next(names)) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _name(position: int) -> str:
    return f"output_{position}"


def fake_output(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_training: bool,
    differentiated: Sequence[int] = (),
) -> Any:
    """What `model` returns, its tensors fake; in training they require gradients as real ones would.

    Args:
        model: in the mode that it is to run in.
        args: positional arguments.
        kwargs: keyword arguments.
        is_training: whether there are gradients.
        differentiated: positions of the input tensors that require one.

    Raises:
        CaptureError: the model cannot run on fake tensors; names the op and the user's line.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    twins = fakes([*state.values(), *tensors])
    own = dict(zip(state, twins, strict=False))
    given = iter(twins[len(state) :])
    for position in differentiated:
        twins[len(state) + position].requires_grad_(True)
    fake_args, fake_kwargs = pytree.tree_unflatten(
        [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    grad_mode = torch.enable_grad() if is_training else torch.no_grad()
    with untouched(model), explained(model), statistics_handed_out(model), portable(model), grad_mode, _mode_of(twins):
        if is_training:
            for name, parameter in model.named_parameters():
                own[name].requires_grad_(parameter.requires_grad)
        return call_with(model, own, fake_args, fake_kwargs)


@contextlib.contextmanager
def _mode_of(twins: Sequence[torch.Tensor]) -> Iterator[None]:
    """While active, tensors that are made are fake as `twins` are, and real ones may join them."""
    mode = next((twin.fake_mode for twin in twins if isinstance(twin, FakeTensor)), FakeTensorMode())
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors among the outputs of a model, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def batch_dims_of(
    whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], batch: int, size: int
) -> list[int | None]:
    """For each output, the dimension that grows with the batch; None for one of the same shape for every batch.

    Args:
        whole: outputs of the whole batch.
        part: outputs of a slice.
        batch: samples of the whole batch.
        size: samples of the slice, fewer.

    Raises:
        CaptureError: an output is another for a slice than in proportion to its samples.
    """
    dims: list[int | None] = []
    for position, (one, other) in enumerate(zip(whole, part, strict=False)):
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
        fits = len(differing) <= 1 and all(one.shape[dim] * size == other.shape[dim] * batch for dim in differing)
        if len(whole) != len(part) or one.dim() != other.dim() or not fits:
            raise CaptureError(
                f"output {position} of the model is {tuple(one.shape)} for {batch} samples and {tuple(other.shape)} "
                f"for {size}, expected one dimension that grows with the batch: the outputs of micro-batches cannot "
                f"be joined. Capture it with micro_batches=1."
            )
        dims.append(differing[0] if differing else None)
    return dims
