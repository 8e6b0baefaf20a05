"""`PlacedGraph`: one captured graph with its plan, bound to the threads of a host and to the state of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.export.placed.arguments import InputCutter
from rlplace.export.placed.held import HeldConstants
from rlplace.export.placed.state import PlacedState
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.placed.placed_step import PlacedStep
from rlplace.measure.placed.residents import Residents
from rlplace.measure.placed.workers import Crew
from rlplace.measure.plan import Plan


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
