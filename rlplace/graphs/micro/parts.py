"""`Parts`: one capture for each size of a slice, and the source ops that the micro-batches are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.lower import LoweredStep, lower_step
from rlplace.graphs.capturing.trace import AsSlice, Trace, trace_step
from rlplace.graphs.micro.assembly import Assembly, RefMap
from rlplace.graphs.micro.slices import cut_words
from rlplace.graphs.program import Cut, Origin, Ref, Source, SourceKind


class Parts:
    """The step of a micro-batch, captured once for each size.

    Args:
        origin: what is captured; its `micro` says how it is cut.
        assembly: takes the source ops.

    Attributes:
        steps: by size.
    """

    def __init__(self, origin: Origin, assembly: Assembly) -> None:
        assert origin.micro is not None
        self.origin, self.micro, self._assembly = origin, origin.micro, assembly
        self._leaves, self._spec = pytree.tree_flatten((origin.args, origin.kwargs))
        inputs = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._tensors, self._num_inputs = [*inputs, *origin.targets], len(inputs)
        self.steps: dict[int, LoweredStep] = {}
        self._shared: list[Ref] = []  # parameters and buffers
        self._given: list[list[Ref]] = []  # by position of an input or target, for each micro-batch
        self._constants: dict[tuple[Any, ...], Ref] = {}

    def tensors(self, index: int) -> list[torch.Tensor]:
        """Inputs and targets of micro-batch `index`: parts of those that are cut, laid out as a copy of them is."""
        slicing = self.micro.slicing
        return [
            whole if dim is None else _dense(Cut(dim, slicing.starts[index], slicing.sizes[index]).of(whole))
            for whole, dim in zip(self._tensors, slicing.dims, strict=True)
        ]

    def call(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the model for micro-batch `index`."""
        given = iter(self.tensors(index))
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def capture(self, index: int, part: AsSlice, seeds: tuple[torch.Tensor, ...] = ()) -> None:
        """Captures the step for the size of micro-batch `index`.

        Args:
            index: of the micro-batch.
            part: what is captured.
            seeds: gradients of outputs, where the loss is joined.

        Raises:
            CaptureError: the model cannot be captured, or on a slice alone; or the step changes what all micro-batches
                share, other than running statistics of batch norm.
        """
        step = lower_step(self._trace(index, part, seeds))
        built = step.ops.built
        if built.mutations:
            changed = built.names[built.tensor_op[built.mutations[0][1]]]
            raise CaptureError(
                f"cannot cut the step into {self.micro.slicing.num_micro_batches} micro-batches: `forward` changes "
                f"{changed!r}, and every micro-batch would change it again; only running statistics of batch norm may "
                f"change. Capture it with micro_batches=1."
            )
        self._check_statistics(step)
        self.steps[self.micro.slicing.sizes[index]] = step

    def _trace(self, index: int, part: AsSlice, seeds: tuple[torch.Tensor, ...]) -> Trace:
        """The step of micro-batch `index`; says so where it fails and that of the whole batch does not."""
        origin, (args, kwargs) = self.origin, self.call(index)
        has_loss = part.weight is not None
        try:
            return trace_step(
                origin.model,
                args,
                kwargs,
                origin.loss_fn if has_loss else None,
                tuple(self.tensors(index)[self._num_inputs :]) if has_loss else seeds,
                is_training=has_loss or bool(seeds),
                part=part,
                frozen=origin.frozen,
            )
        except CaptureError as error:
            whole = (origin.args, origin.kwargs, origin.loss_fn, origin.targets)
            is_training = origin.loss_fn is not None
            trace_step(origin.model, *whole, is_training=is_training, frozen=origin.frozen)  # raises what fails in both
            cut = cut_words(origin.args, origin.kwargs, origin.targets, self.micro.slicing)
            raise CaptureError(
                f"cannot cut the step into {self.micro.slicing.num_micro_batches} micro-batches: a slice of the batch "
                f"fails, the whole batch runs ({cut}). `batch_dims` (--batch-dims) says which dimension of every "
                f"tensor is the batch. Of the slice: {str(error).partition(' Hint: ')[0]}",
                op=error.op,
                source=error.source,
            ) from error

    def _check_statistics(self, step: LoweredStep) -> None:
        """Refuses a step that reads running statistics of a batch norm which updates them."""
        trace, built = step.trace, step.ops.built
        first = len(trace.trainable) + len(trace.fixed)
        read = {tensor for reads in built.reads for tensor in reads}
        for tensor, name in enumerate(trace.buffers, start=first):
            if tensor in read and name.rpartition(".")[0] in trace.norms:
                raise CaptureError(
                    f"cannot cut the step into {self.micro.slicing.num_micro_batches} micro-batches: it reads "
                    f"{name!r}, which batch norm updates, so that every micro-batch would wait for the one before. "
                    f"Capture it with micro_batches=1."
                )

    def add_sources(self, *, has_own_loss: bool) -> None:
        """Adds parameters, buffers, inputs and targets to the graph: each once, or once a micro-batch where it is cut.

        Args:
            has_own_loss: whether each micro-batch has; else targets belong to the whole batch.
        """
        first = next(iter(self.steps.values()))
        state = len(first.trace.trainable) + len(first.trace.fixed) + len(first.trace.buffers)
        built, slicing = first.ops.built, self.micro.slicing
        self._shared = [
            self._assembly.add_source(
                first.ops.sources[op],
                built.names[op],
                module=built.modules[op],
                gradient_bytes=built.gradient_bytes[op],
            )
            for op in range(state)
        ]
        parts = [self.tensors(index) for index in range(slicing.num_micro_batches)]
        for position, (whole, dim) in enumerate(zip(self._tensors, slicing.dims, strict=True)):
            kind: SourceKind = "input" if position < self._num_inputs else "target"
            key = str(position if kind == "input" else position - self._num_inputs)
            if dim is None or (kind == "target" and not has_own_loss):
                ref = self._assembly.add_source(Source(kind, key, whole.detach()), f"{kind}_{key}")
                self._given.append([ref] * slicing.num_micro_batches)
                continue
            cuts = [Cut(dim, start, size) for start, size in zip(slicing.starts, slicing.sizes, strict=True)]
            self._given.append(
                [
                    self._assembly.add_source(
                        Source(kind, key, parts[index][position].detach(), cut), f"{kind}_{key}", micro_batch=index
                    )
                    for index, cut in enumerate(cuts)
                ]
            )

    @property
    def state(self) -> dict[str, Ref]:
        """Parameters and buffers of the graph, by dotted name."""
        trace = next(iter(self.steps.values())).trace
        return dict(zip((*trace.trainable, *trace.fixed, *trace.buffers), self._shared, strict=True))

    @property
    def targets(self) -> list[Ref]:
        """Targets of the whole batch, where micro-batches have no loss of their own."""
        return [refs[0] for refs in self._given[self._num_inputs :]]

    def step(self, index: int) -> LoweredStep:
        """The step of micro-batch `index`."""
        return self.steps[self.micro.slicing.sizes[index]]

    def refs(self, index: int, *, has_own_loss: bool, seeds: Sequence[Ref] = ()) -> RefMap:
        """What stands for the placeholders and constants of micro-batch `index`."""
        given = self._given if has_own_loss else self._given[: self._num_inputs]
        placeholders = [*self._shared, *(refs[index] for refs in given), *seeds]
        return {**dict(enumerate(placeholders)), **self.constants(self.step(index))}

    def constants(self, step: LoweredStep) -> RefMap:
        """What stands for the constants of a captured step: one for all that read the same memory."""
        found = {}
        built = step.ops.built
        for op, source in step.ops.sources.items():
            if source.kind == "constant":
                key = memory(source.value)
                if key not in self._constants:
                    added = self._assembly.add_source(source, built.names[op], module=built.modules[op])
                    self._constants[key] = added
                found[step.ops.tensor_of(op)] = self._constants[key]
        return found


def running_ops(step: LoweredStep) -> list[int]:
    """The ops of a slice that run."""
    return [op for op in range(len(step.ops.built.names)) if op not in step.ops.sources]


def _dense(part: torch.Tensor) -> torch.Tensor:
    """The part itself where a copy of it is laid out alike, else contiguous."""
    return part if torch.empty_like(part).stride() == part.stride() else part.contiguous()
