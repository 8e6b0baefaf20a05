"""Runs a captured graph op by op on one device: the plainest meaning of a `Program`, which the runner must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState, updater
from rlplace.graphs.program import Program, Ref, Update, map_refs


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        result: the loss of a training step, or the model's output.
        gradients: by parameter name.
        state: parameters and buffers after the step, by dotted name.
    """

    result: Any
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def run_graph(graph: OpGraph) -> StepResult:
    """One step of `graph` from the parameters, buffers and inputs that it was captured with, all left as they are.

    Raises:
        InvalidValue: the graph has no program (it was loaded from a file).
    """
    program = require_program(graph)
    values: dict[int, Any] = {}
    gradients: dict[str, torch.Tensor] = {}

    def read(ref: Ref) -> Any:
        if ref.id not in values:
            view = program.views[ref.id - program.num_tensors]
            values[ref.id] = view.target(*map_refs(read, view.args), **map_refs(read, view.kwargs))
        return values[ref.id]

    with torch.no_grad():
        for op in range(graph.num_ops):
            if op in program.sources:
                values[int(graph.output_offsets[op])] = program.sources[op].value.clone()
                continue
            call = program.calls[op]
            if isinstance(call, Update):
                name = program.sources[int(graph.tensor_op[call.parameter.id])].key
                gradients[name] = read(call.gradient).clone()
                assert program.optimizer is not None
                parameter = read(call.parameter)
                updater([UpdateState(program.optimizer, parameter)], [parameter])(gradients[name])
                continue
            output = call.target(*map_refs(read, call.args), **map_refs(read, call.kwargs))
            outputs = output if call.returns_tuple else (output,)
            values |= {tensor: value for tensor, value in zip(call.outputs, outputs, strict=False) if tensor >= 0}
        left = {name: gradient for name, gradient in program.gradients.items() if name not in gradients}
        gradients |= {name: read(gradient).clone() for name, gradient in left.items()}  # those that no update takes
    state = {
        source.key: values[int(graph.output_offsets[op])]
        for op, source in program.sources.items()
        if source.kind in ("parameter", "buffer")
    }
    return StepResult(program.returned(read), gradients, state)


def require_program(graph: OpGraph) -> Program:
    """The graph's program.

    Raises:
        InvalidValue: it has none.
    """
    if graph.program is None:
        raise InvalidValue(
            "program",
            None,
            "a captured program",
            where="graph",
            hint="A graph file alone can be simulated, not run: capture it again from the model.",
        )
    return graph.program
