"""`capture_micro_batches`: the graph of a step that is cut along its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.backward_ends import AsSlice
from rlplace.graphs.capturing.lower import LoweredStep
from rlplace.graphs.capturing.micro.assembly import Assembly, RefMap
from rlplace.graphs.capturing.micro.gradients import Gradients
from rlplace.graphs.capturing.micro.joining import Joined
from rlplace.graphs.capturing.micro.norms import normalises_batch
from rlplace.graphs.capturing.micro.parts import Parts, running_ops
from rlplace.graphs.capturing.micro.running import add_running_statistics
from rlplace.graphs.capturing.trace import Output
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.graphs.program import OptimizerSpec, Origin, Ref

aten = torch.ops.aten


def capture_micro_batches(origin: Origin, optimizer: OptimizerSpec | None) -> OpGraph:
    """The graph of one step in K micro-batches, gradients summed and parameters updated once.

    Each size of a slice is captured once, a joined loss as well; the rest are copies.

    Args:
        origin: what is captured; its `micro` says how.
        optimizer: updates parameters; needs a loss.

    Raises:
        CaptureError: the model cannot be captured, or not in micro-batches: it changes a buffer, its outputs do not
            grow with the batch, or hooks change its gradients.
    """
    assert origin.micro is not None
    _check_hooks(origin.model, origin.micro.slicing.num_micro_batches)
    if normalises_batch(origin.model):
        origin = dataclasses.replace(origin, micro=dataclasses.replace(origin.micro, has_own_statistics=True))
    return _Capture(origin, optimizer).run()


class _Capture:
    def __init__(self, origin: Origin, optimizer: OptimizerSpec | None) -> None:
        assert origin.micro is not None
        self.micro, self.optimizer = origin.micro, optimizer
        self.slicing = self.micro.slicing
        self.assembly = Assembly()
        self.parts = Parts(origin, self.assembly)
        self.is_training = origin.loss_fn is not None
        self.has_own_loss = self.is_training and self.micro.loss != "joined"
        self.refs: list[RefMap] = []
        self.output_dims: tuple[int | None, ...] = ()

    def run(self) -> OpGraph:
        origin = self.parts.origin
        if self.has_own_loss:
            result, results = self._with_own_losses()
        else:
            result, results = self._joined()
        first = self.parts.step(0)
        statistics = []
        for index, refs in enumerate(self.refs):
            step = self.parts.step(index)
            found = [self.assembly.here(step.ops, ref, refs) for ref in step.statistics]
            statistics.append(list(zip(step.trace.norms, found[::2], found[1::2], strict=True)))
        add_running_statistics(self.assembly, origin.model, self.parts.state, statistics)
        gradients = self.gradients.finish(self.optimizer) if self.is_training else {}
        self.assembly.ops.check_apart()
        micro = dataclasses.replace(self.micro, output_dims=self.output_dims)
        origin = dataclasses.replace(origin, autocast=first.trace.autocast, micro=micro)
        return self.assembly.ops.graph(
            result, results, self.optimizer, origin, is_training=self.is_training, gradients=gradients
        )

    def _indices_of_sizes(self) -> list[int]:
        """One micro-batch of each size."""
        return [self.slicing.sizes.index(size) for size in dict.fromkeys(self.slicing.sizes)]

    def _with_own_losses(self) -> tuple[Any, list[Ref]]:
        for index in self._indices_of_sizes():
            self.parts.capture(index, AsSlice(weight=self.micro.weights[index]))
        self.parts.add_sources(has_own_loss=True)
        self.gradients = Gradients(self.assembly, self.parts)
        losses = []
        for index in range(self.slicing.num_micro_batches):
            step, refs = self.parts.step(index), self.parts.refs(index, has_own_loss=True)
            self.refs.append(refs)
            left_out = self.gradients.left_out(step)
            self.assembly.copy(
                step.ops, [op for op in running_ops(step) if op not in left_out], refs, micro_batch=index
            )
            self.gradients.add(index, refs)
            losses.append(self.assembly.here(step.ops, step.results[0], refs))
        loss = self._weighted(losses)
        return loss, [loss]

    def _weighted(self, losses: Sequence[Ref]) -> Ref:
        total: Ref | None = None
        for loss, weight in zip(losses, self.micro.weights, strict=True):
            term = loss
            if weight != 1.0:
                term = self.assembly.call(aten.mul.Tensor, loss, weight, name="weighted_loss", phase=FORWARD)
            if total is not None:
                term = self.assembly.call(aten.add.Tensor, total, term, name="sum_loss", phase=FORWARD)
            total = term
        assert total is not None
        return total

    def _joined(self) -> tuple[Any, list[Ref]]:
        joined = Joined(self.assembly, self.parts, is_training=self.is_training)
        self.output_dims = tuple(joined.dims)
        for index in self._indices_of_sizes():
            self.parts.capture(index, AsSlice(outputs=joined.differentiated), joined.seeds(index))
        self.parts.add_sources(has_own_loss=False)
        ahead: list[set[int]] = []
        for index in range(self.slicing.num_micro_batches):
            step, refs = self.parts.step(index), self.parts.refs(index, has_own_loss=False)
            self.refs.append(refs)
            chosen = [op for op in running_ops(step) if step.ops.built.phases[op] == FORWARD]
            ahead.append(set(chosen))
            self.assembly.copy(step.ops, chosen, refs, micro_batch=index)
        outputs = joined.join(self.refs)
        if not self.is_training:
            first: LoweredStep = self.parts.step(0)
            return pytree.tree_map_only(Output, lambda each: outputs[each.index], first.trace.result), outputs
        loss, seeds = joined.add_loss(outputs)
        self.gradients = Gradients(self.assembly, self.parts)
        for index, refs in enumerate(self.refs):
            step = self.parts.step(index)
            refs.update(joined.placeholders(step, seeds[index]))
            left_out = self.gradients.left_out(step) | ahead[index]
            self.assembly.copy(
                step.ops, [op for op in running_ops(step) if op not in left_out], refs, micro_batch=index
            )
            self.gradients.add(index, refs)
        return loss, [loss]


def _check_hooks(model: nn.Module, count: int) -> None:
    """Refuses hooks on parameters: they would see the gradients of micro-batches, not their sum."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter._backward_hooks:
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which would run once for each of {count} "
                f"micro-batches and see only theirs; capture with micro_batches=1, or change gradients in `forward`."
            )
