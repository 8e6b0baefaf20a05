"""`capture_micro_batches`: the graph of a step that is cut along its batch.

Running statistics of batch norm, updated by those of every micro-batch in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.lower import LoweredStep
from rlplace.graphs.capturing.trace import AsSlice, Output
from rlplace.graphs.micro.assembly import Assembly, RefMap
from rlplace.graphs.micro.gradients import Gradients
from rlplace.graphs.micro.joining import Joined
from rlplace.graphs.micro.norms import normalises_batch
from rlplace.graphs.micro.parts import Parts, running_ops
from rlplace.graphs.opgraph import FORWARD, UPDATE, OpGraph
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


MOST_NORMS = 8
"""How many neighbouring norms keep their statistics together: fewer and larger tensors are sent, and few norms are far
from the stage of a pipeline that they belong to."""

Found = Sequence[tuple[str, Ref, Ref]]
"""Of one micro-batch: path of the norm, mean and unbiased variance of every call, in order."""


@dataclass(frozen=True)
class _Norms:
    """Norms that are updated together.

    Attributes:
        paths: of their modules.
        momentum: theirs; None for averages over all batches so far.
        num_calls: how often each runs in a forward.
    """

    paths: tuple[str, ...]
    momentum: float | None
    num_calls: int


def add_running_statistics(
    assembly: Assembly, model: nn.Module, buffers: Mapping[str, Ref], found: Sequence[Found]
) -> None:
    """Adds what batch norms do to their buffers: running statistics move towards those of each call, in order.

    Each micro-batch joins the statistics of neighbouring norms; what updates the buffers from them lives there.

    Args:
        assembly: takes the ops.
        model: has the norms.
        buffers: by dotted name.
        found: by micro-batch.
    """
    for norms in _together(model, buffers, assembly, found[0]):
        _Update(assembly, buffers, norms).add(found)


def _together(model: nn.Module, buffers: Mapping[str, Ref], assembly: Assembly, found: Found) -> list[_Norms]:
    calls: dict[str, int] = {}
    for path, _, _ in found:
        calls[path] = calls.get(path, 0) + 1
    groups: list[_Norms] = []
    kinds: list[object] = []
    for path, num_calls in calls.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, _BatchNorm)
        kind = norm.momentum, num_calls, assembly.ops.value(buffers[_named(path, "running_mean")]).dtype
        is_like = bool(groups) and kinds[-1] == kind and norm.momentum is not None
        if is_like and len(groups[-1].paths) < MOST_NORMS:
            groups[-1] = _Norms((*groups[-1].paths, path), norm.momentum, num_calls)
        else:
            groups.append(_Norms((path,), norm.momentum, num_calls))
            kinds.append(kind)
    return groups


class _Update:
    """The update of some norms' buffers; all its ops live with them."""

    def __init__(self, assembly: Assembly, buffers: Mapping[str, Ref], norms: _Norms) -> None:
        self._assembly, self._buffers, self._norms = assembly, buffers, norms
        self._own: list[int] = []
        self._num_seen = 0

    def add(self, found: Sequence[Found]) -> None:
        places = [
            self._buffers[_named(path, name)] for name in ("running_mean", "running_var") for path in self._norms.paths
        ]
        running = self._call(aten.cat.default, places, 0)
        for index, statistics in enumerate(found):
            for values in self._flat(index, statistics):
                running = self._moved(running, values)
        start = 0
        stores = []
        for place in places:
            end = start + self._assembly.ops.value(place).shape[0]
            stores.append((place, self._assembly.view(aten.slice.Tensor, running, 0, start, end)))
            start = end
        num_batches = len(found) * self._norms.num_calls
        for path in self._norms.paths:
            count = self._count(path)
            if count is not None:
                stores.append((count, self._call(aten.add.Tensor, count, num_batches)))
        for place, value in stores:
            name = self._assembly.ops.built.names[self._assembly.ops.built.tensor_op[place.id]]
            self._assembly.store(place, value, name=f"store_{name}", together=self._own)

    def _flat(self, index: int, statistics: Found) -> list[Ref]:
        """The means and variances of all norms as one tensor, for each call in a micro-batch."""
        calls: dict[str, list[tuple[Ref, Ref]]] = {path: [] for path in self._norms.paths}
        for path, mean, variance in statistics:
            if path in calls:
                calls[path].append((mean, variance))
        return [
            self._assembly.call(
                aten.cat.default,
                [each[number][column] for column in (0, 1) for each in calls.values()],
                0,
                name="statistics",
                module=self._norms.paths[-1],
                phase=UPDATE,
                micro_batch=index,
            )
            for number in range(self._norms.num_calls)
        ]

    def _moved(self, running: Ref, values: Ref) -> Ref:
        """Running statistics after one more call: moved by the momentum; without one, to the average of all so far."""
        if self._norms.momentum is not None:
            return self._call(aten.lerp.Scalar, running, values, self._norms.momentum)
        (path,) = self._norms.paths
        count = self._count(path)
        self._num_seen += 1
        assert count is not None
        seen = self._call(aten.add.Tensor, count, self._num_seen)
        seen = self._call(aten._to_copy.default, seen, dtype=self._assembly.ops.value(running).dtype)
        return self._call(aten.lerp.Tensor, running, values, self._call(aten.reciprocal.default, seen))

    def _count(self, path: str) -> Ref | None:
        return self._buffers.get(_named(path, "num_batches_tracked"))

    def _call(self, target: torch._ops.OpOverload, *args: object, dtype: torch.dtype | None = None) -> Ref:
        options = {} if dtype is None else {"dtype": dtype}
        module = self._norms.paths[-1]
        made = self._assembly.call(target, *args, name=f"move_{module}", module=module, phase=UPDATE, **options)  # type: ignore[arg-type]
        self._own.append(self._assembly.ops.producer(made))
        return made


def _named(path: str, buffer: str) -> str:
    return f"{path}.{buffer}" if path else buffer
