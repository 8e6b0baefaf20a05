"""`GraphsByShape`: the graphs of one placed model, captured as inputs of new shapes come and placed as the first is.

`PlacedGraph`: one captured graph with its plan, bound to the threads of a host and to the state of a model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from rlplace.export.placed.arguments import Arguments, InputCutter
from rlplace.export.placed.carried import carried_plan
from rlplace.export.placed.held import HeldConstants
from rlplace.export.placed.recapture import captured_again, captured_evaluation, flags_of
from rlplace.export.placed.state import PlacedState
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.workers import Crew
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan

_log = logging.getLogger(__name__)

OtherShapes = Literal["capture", "eager", "refuse"]
"""What a placed step does with inputs of other shapes than captured."""


class GraphsByShape:
    """A graph for all inputs of the same shapes, one of the step and one of evaluation; all have one state.

    Args:
        graph: of the step, with its program.
        host: of this machine.
        plan: of `graph`; the others are placed as it is, op by op.
        crew: the threads of the host.
        arguments: what the step is called with.
        seed: of random ops.
        other_shapes: what is done with inputs of other shapes.

    Attributes:
        first: `graph` with its plan.
        flags: of the model, as they were at the start; what is captured later has the same.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        crew: Crew,
        arguments: Arguments,
        *,
        seed: int,
        other_shapes: OtherShapes,
    ) -> None:
        self._host, self._crew, self._arguments = host, crew, arguments
        self._seed, self._other_shapes = seed, other_shapes
        self.first = PlacedGraph(graph, host, plan, crew, seed=seed)
        self.flags = flags_of(require_program(graph).origin.model)
        self._graphs = {_key(arguments.captured, is_evaluation=False): self.first}

    def __len__(self) -> int:
        return len(self._graphs)

    def of_step(self, tensors: list[torch.Tensor]) -> PlacedGraph | None:
        """The graph of the step for these inputs and targets; None where they are to be run eagerly.

        Raises:
            CaptureError: the model cannot be captured for these shapes.
        """
        key = _key(tensors, is_evaluation=False)
        if key not in self._graphs:
            if self._other_shapes == "eager":
                return None
            if self._other_shapes == "refuse":
                return self.first  # it says what it expects
            self._add(key, captured_again(self.first.graph, self._arguments.call(tensors), self.flags), "inputs")
        return self._graphs[key]

    def of_evaluation(self, tensors: list[torch.Tensor]) -> PlacedGraph:
        """The graph of the model's output for these inputs, all modules in evaluation mode.

        Raises:
            CaptureError: the model cannot be captured so.
        """
        key = _key(tensors, is_evaluation=True)
        if key not in self._graphs:
            self._add(key, captured_evaluation(self.first.graph, self._arguments.call(tensors)), "evaluation")
        return self._graphs[key]

    def follow_state(self) -> None:
        """Takes over parameters whose `data` was replaced, as `vector_to_parameters` and swaps of averages do.

        Raises:
            InvalidValue: one was given another shape, layout, dtype or device.
        """

        def rebind() -> None:
            for placed in self._graphs.values():
                placed.follow_state()

        self.first.state.follow(rebind)

    def _add(self, key: tuple[object, ...], graph: OpGraph, what: str) -> None:
        plan = carried_plan(self.first.graph, self.first.plan, graph)
        self._graphs[key] = PlacedGraph(graph, self._host, plan, self._crew, self.first.state, seed=self._seed)
        _log.info("captured %s of shapes %s: %d graphs share this placement", what, key[1:], len(self))


def _key(tensors: list[torch.Tensor], *, is_evaluation: bool) -> tuple[object, ...]:
    """What inputs that one graph takes have in common."""
    return is_evaluation, *(tuple(tensor.shape) for tensor in tensors)


class PlacedGraph:
    """A graph that runs as planned.

    Args:
        graph: with its program.
        host: of this machine.
        plan: what runs.
        crew: the threads of the host.
        state: of the model; made from this graph where it is the first.
        seed: of random ops.

    Attributes:
        graph: the same.
        plan: the same.
        state: what it has in common with other graphs of the model.
    """

    def __init__(
        self, graph: OpGraph, host: Host, plan: Plan, crew: Crew, state: PlacedState | None = None, *, seed: int = 0
    ) -> None:
        self.graph, self.plan = graph, plan
        self._residents = Residents(graph, host, seed=seed)
        if state is None:
            state = PlacedState(graph, plan, self._residents)
        else:
            state.share(graph, plan, self._residents)
        self.state = state
        self._step = PlacedStep(graph, host, plan, self._residents, crew, seed=seed, gradients=state.gradients)
        self._step.load()
        self._constants = HeldConstants(graph, plan, self._residents)
        self._inputs = InputCutter(graph)
        written = set(graph.tensor_op[graph.mutation_tensor].tolist())
        self._written = {op: position for op, position in self._inputs.positions.items() if op in written}

    def run(self, tensors: Sequence[torch.Tensor], number: int) -> Any:
        """What the step returns, as copies; what it writes to its inputs is written to these tensors.

        Args:
            tensors: inputs, then targets, of the captured shapes and dtypes.
            number: of the step: random ops draw by it.

        Raises:
            InvalidValue: another shape or dtype; or a constant was changed that the capture read as a number.
            RunnerError: an op failed.
        """
        with self._residents.settled():  # and so is what was done with parameters and gradients since the last step
            if self._constants.follow():
                self._step.load()
            for op, tensor in self._inputs.by_op(tensors):
                self._residents.set_tensor(op, self._device(op), tensor.detach())
        self._step.run(number)
        with torch.no_grad():
            for op, position in self._written.items():
                tensors[position].copy_(self._residents.tensor(op, self._device(op)))
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), self._step.result)

    def follow_state(self) -> None:
        """Runs with the tensors that parameters of the state have now."""
        self.state.share(self.graph, self.plan, self._residents)
        self._step.load()

    def _device(self, op: int) -> int:
        return int(self.plan.devices[op])
