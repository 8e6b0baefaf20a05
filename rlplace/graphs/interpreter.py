"""Runs a captured graph op by op on one device: the plainest meaning of a `Program`, which the runner must match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState, updater
from rlplace.graphs.program import Call, Program, Ref, Update, map_refs


@dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        result: the loss of a training step, or the model's output.
        gradients: by parameter name.
        state: parameters and buffers after the step, by dotted name.
        input_gradients: of a module's step, by position among the input tensors.
    """

    result: Any
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    input_gradients: dict[int, torch.Tensor] = field(default_factory=dict)


def run_graph(
    graph: OpGraph,
    given: Mapping[int, torch.Tensor] | None = None,
    run: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    *,
    is_updating: bool = True,
) -> StepResult:
    """One step of `graph` from the parameters, buffers and inputs that it was captured with, all left as they are.

    A value is dropped after its last reader, so that a step takes no more memory than its live tensors.

    Args:
        graph: with its program.
        given: values of some source ops, by op, in place of those of the capture.
        run: runs a call with its arguments, and gives its results; by default its target does.
        is_updating: whether the optimizer's updates run; the gradients are the same without.

    Raises:
        InvalidValue: the graph has no program (it was loaded from a file).
    """
    program, given = require_program(graph), given or {}
    values: dict[int, Any] = {}
    gradients: dict[str, torch.Tensor] = {}
    shown = defaultdict(list)  # the views of each tensor, which go when it goes
    for view_id, view in enumerate(program.views, start=program.num_tensors):
        shown[view.base].append(view_id)
    last = dict(zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True))
    results = (*program.result_refs, *program.gradients.values(), *program.input_gradients.values())
    kept = {program.base(ref) for ref in results} | {int(graph.output_offsets[op]) for op in program.sources}
    ends = defaultdict(list)
    for tensor, op in last.items():
        if tensor not in kept:
            ends[op].append(tensor)

    def read(ref: Ref) -> Any:
        if ref.id not in values:
            view = program.views[ref.id - program.num_tensors]
            values[ref.id] = view.target(*map_refs(read, view.args), **map_refs(read, view.kwargs))
        return values[ref.id]

    with torch.no_grad():
        for op in range(graph.num_ops):
            if op in program.sources:
                values[int(graph.output_offsets[op])] = given.get(op, program.sources[op].value).clone()
                continue
            call = program.calls[op]
            if isinstance(call, Update):
                name = program.sources[int(graph.tensor_op[call.parameter.id])].key
                gradients[name] = read(call.gradient).clone()
                if is_updating:
                    assert program.optimizer is not None
                    parameter = read(call.parameter)
                    updater([UpdateState(program.optimizer, parameter)], [parameter])(gradients[name])
                continue
            args, kwargs = map_refs(read, call.args), map_refs(read, call.kwargs)
            output = call.target(*args, **kwargs) if run is None else run(call, args, kwargs)
            outputs = output if call.returns_tuple else (output,)
            values |= {tensor: value for tensor, value in zip(call.outputs, outputs, strict=False) if tensor >= 0}
            del args, kwargs, output, outputs
            for tensor in ends[op]:
                for each in (tensor, *shown[tensor]):
                    values.pop(each, None)
        left = {name: gradient for name, gradient in program.gradients.items() if name not in gradients}
        gradients |= {name: read(gradient).clone() for name, gradient in left.items()}  # those that no update takes
        inputs = {position: read(ref).clone() for position, ref in program.input_gradients.items()}
    state = {
        source.key: values[int(graph.output_offsets[op])]
        for op, source in program.sources.items()
        if source.kind in ("parameter", "buffer")
    }
    return StepResult(program.returned(read), gradients, state, inputs)


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
