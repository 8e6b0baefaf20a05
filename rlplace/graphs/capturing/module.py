"""`capture_module`: forward and backward of a model whose loss is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.backward_ends import AsModule
from rlplace.graphs.capturing.lower import lower
from rlplace.graphs.capturing.micro.outputs import fake_output, tensors_in
from rlplace.graphs.capturing.trace import trace_step
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import BACKWARD, OpGraph
from rlplace.graphs.program import Origin

aten = torch.ops.aten


@dataclass(frozen=True)
class CapturedModule:
    """A forward with its backward.

    Attributes:
        graph: with its program, whose targets are gradients of outputs, whose result are the outputs.
        with_gradient: positions among the output tensors of those that have one, in the order of the targets.
    """

    graph: OpGraph
    with_gradient: tuple[int, ...]


def capture_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_backward: bool,
    differentiated: tuple[int, ...] = (),
    frozen: tuple[str, ...] = (),
) -> CapturedModule:
    """A forward and its backward; where no output has a gradient, the forward alone.

    Args:
        model: in the mode that it is to run in.
        args: positional arguments.
        kwargs: keyword arguments.
        has_backward: whether there is to be one.
        differentiated: positions among the input tensors of those whose gradients are wanted.
        frozen: attributes that `forward` may change as Python does.

    Raises:
        CaptureError: the model cannot be captured, writes to its inputs, or reads in its backward what its forward
            has changed since.
    """
    seeds: dict[int, torch.Tensor] = {}
    if has_backward:
        outputs = tensors_in(fake_output(model, args, kwargs, is_training=True, differentiated=differentiated))
        seeds = {k: torch.empty_like(output.detach()) for k, output in enumerate(outputs) if output.requires_grad}
    part = AsModule(tuple(seeds), differentiated) if seeds else None
    given = tuple(seeds.values())
    trace = trace_step(model, args, kwargs, None, given, is_training=part is not None, part=part, frozen=frozen)
    for norm in trace.module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if norm.args[7] is True:  # it takes running statistics in vain, and the forward has changed them
            norm.args = (*norm.args[:3], None, None, *norm.args[5:])
    origin = Origin(model, args, kwargs, None, given, autocast=trace.autocast)
    graph = lower(trace, None, origin, is_training=part is not None)
    _check_writes(graph)
    return CapturedModule(graph, tuple(seeds))


def _check_writes(graph: OpGraph) -> None:
    sources = require_program(graph).sources
    for op, tensor in zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True):
        source = sources[int(graph.tensor_op[tensor])]
        name = graph.names[int(graph.tensor_op[tensor])]
        if source.kind == "input":
            raise CaptureError(
                f"`forward` writes to {name}, expected inputs that stay as they are: a placed module cannot tell "
                f"autograd of the change. Clone the input first (`x = x.clone()`).",
                op=graph.names[op],
            )
        readers = graph.edge_op[graph.input_tensors == tensor]
        late = [reader for reader in readers.tolist() if graph.phases[reader] == BACKWARD]
        if late:
            raise CaptureError(
                f"the backward (op {graph.names[late[0]]}) reads {name} as it was before `forward` changed it, which a "
                f"placed module does not keep; read a copy in `forward` (`{source.key}.clone()`).",
                op=graph.names[late[0]],
            )
