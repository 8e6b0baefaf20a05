"""`PlacedState`: parameters, buffers, gradients and optimizer state of a model, where the placement keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState
from rlplace.graphs.program import Update
from rlplace.measure.plan import Plan
from rlplace.measure.run.gradients_out import GradientsOut
from rlplace.measure.run.residents import Residents


class PlacedState:
    """What every graph of one placed model has in common.

    What the calling thread does with these tensors on a GPU is waited for by the next step.

    Args:
        graph: the first of them, with its program.
        plan: where it keeps what.
        residents: of that graph: makes the tensors.

    Attributes:
        parameters: by dotted name, in the order of the model; they show the memory that steps read and update.
        buffers: likewise.
        updates: optimizer state of each parameter that the captured optimizer updates, by dotted name.
        reached: names of parameters that the backward reaches.
        gradients: where steps leave gradients that are asked for.
    """

    def __init__(self, graph: OpGraph, plan: Plan, residents: Residents) -> None:
        program = require_program(graph)
        devices = plan.devices.tolist()
        ops = {source.key: op for op, source in program.sources.items() if source.kind in ("parameter", "buffer")}
        tensors = {name: residents.tensor(op, devices[op]) for name, op in ops.items()}
        model = program.origin.model
        self.parameters = {
            name: nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        self.buffers = {name: tensors[name] for name, _ in model.named_buffers()}
        self.devices = {name: devices[op] for name, op in ops.items()}
        updates = {
            program.sources[residents.updated(op)].key: residents.update_state(op, devices[op])
            for op, call in program.calls.items()
            if isinstance(call, Update)
        }
        self.updates: dict[str, UpdateState] = {name: updates[name] for name in self.parameters if name in updates}
        self.reached = tuple(name for name in self.parameters if name in program.gradients)
        self.gradients = GradientsOut()

    def share(self, graph: OpGraph, plan: Plan, residents: Residents) -> None:
        """Has the residents of another graph of the model hold these tensors; `plan` keeps them on the same devices."""
        program, devices = require_program(graph), plan.devices.tolist()
        for op, source in program.sources.items():
            if source.kind in ("parameter", "buffer"):
                residents.adopt(op, devices[op], self.tensor(source.key))
        for op, call in program.calls.items():
            if isinstance(call, Update):
                name = program.sources[residents.updated(op)].key
                residents.adopt(op, devices[op], self.updates[name])

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a parameter or buffer.

        Raises:
            UnknownName: there is none of that name.
        """
        if name in self.parameters:
            return self.parameters[name].detach()
        if name in self.buffers:
            return self.buffers[name]
        raise UnknownName("parameter", name, (*self.parameters, *self.buffers))

    @contextlib.contextmanager
    def grad_filled(self, loss_scale: float) -> Iterator[None]:
        """While active, a step adds gradients to `grad` of the parameters, as `loss.backward()` does.

        Parameters that no longer require a gradient get none. Where a step fails, `grad` that was None stays so.

        Args:
            loss_scale: gradients are those of the loss times this.
        """
        wanted = {name: self.parameters[name] for name in self.reached if self.parameters[name].requires_grad}
        with torch.no_grad():
            fresh = {name: torch.empty_like(each) for name, each in wanted.items() if each.grad is None}
        into = {name: fresh[name] if each.grad is None else each.grad for name, each in wanted.items()}
        with self.gradients.into(into, fresh, loss_scale=loss_scale):
            yield
        for name, gradient in fresh.items():
            wanted[name].grad = gradient

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers, by dotted name."""
        return {name: self.tensor(name).clone() for name in (*self.parameters, *self.buffers)}

    def write_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all parameters and buffers into tensors of the same names."""
        with torch.no_grad():
            for name in (*self.parameters, *self.buffers):
                tensors[name].copy_(self.tensor(name))

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; names that are left out stay.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype. Nothing is overwritten then.
        """
        for name, value in tensors.items():
            own = self.tensor(name)
            if value.shape != own.shape or value.dtype != own.dtype:
                expected = f"{own.dtype} {tuple(own.shape)}"
                raise InvalidValue(name, f"{value.dtype} {tuple(value.shape)}", expected, where="state")
        with torch.no_grad():
            for name, value in tensors.items():
                self.tensor(name).copy_(value)
