"""`PlacedState`: parameters, buffers, gradients and optimizer state of a model, where the placement keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import UpdateState
from rlplace.graphs.program import Update
from rlplace.measure.execute.residents import GradientsOut, Residents
from rlplace.measure.plan import Plan


class PlacedState:
    """What every graph of one placed model has in common.

    What the calling thread does with these tensors on a GPU is waited for by the next step of the same thread.

    Args:
        graph: the first of them, with its program.
        plan: where it keeps what.
        residents: of that graph: makes the tensors.

    Attributes:
        parameters: by dotted name, in the order of the model; they show the memory that steps read and update.
        buffers: likewise.
        settled: what the calling thread launches on the GPUs while active is done afterwards.
        updates: optimizer state of each parameter that the captured optimizer updates, by dotted name.
        reached: names of parameters that the backward reaches.
        gradients: where steps leave gradients that are asked for.
    """

    def __init__(self, graph: OpGraph, plan: Plan, residents: Residents) -> None:
        program = require_program(graph)
        self.settled = residents.settled
        devices = plan.devices.tolist()
        ops = {source.key: op for op, source in program.sources.items() if source.kind in ("parameter", "buffer")}
        tensors = {name: residents.tensor(op, devices[op]) for name, op in ops.items()}
        model = self._model = program.origin.model
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
        self._tied = _tied_names(model)
        self.updates: dict[str, UpdateState] = {name: updates[name] for name in self.parameters if name in updates}
        self.reached = tuple(name for name in self.parameters if name in program.gradients)
        self.gradients = GradientsOut()
        self._is_trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        self._layouts = {name: _layout(parameter) for name, parameter in self.parameters.items()}
        self._bound = self._addresses()

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

    def follow(self, rebind: Callable[[], None]) -> None:
        """Calls `rebind` if parameters were given other memory (`parameter.data = ...`) since the last time.

        Raises:
            InvalidValue: one was given another shape, layout, dtype or device.
        """
        now = self._addresses()
        if now == self._bound:
            return
        for name, parameter in self.parameters.items():
            if (found := _layout(parameter)) != self._layouts[name]:
                raise InvalidValue(
                    f"data of {name}",
                    _shown(found),
                    f"{_shown(self._layouts[name])}, as captured",
                    where="placed step",
                    hint="Overwrite it in place: `with torch.no_grad(): parameter.copy_(...)`.",
                )
        rebind()
        self._bound = now

    def check_trained(self, *, is_updating: bool) -> None:
        """Checks that the graph has the gradients that parameters require now, and where it updates, no others.

        Args:
            is_updating: whether the captured optimizer is to update.

        Raises:
            InvalidValue: a parameter requires a gradient that it did not when the step was made. Where the step
                updates: or the other way round; or it has a hook, which an update passes by.
        """
        gradients_out = "Leave gradients out (`step.backward`) to an optimizer of your own"
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and not self._is_trained[name]:
                hint = (
                    "Capture the model while it requires one; with gradients out, freeze it and let it go as you like."
                )
                raise InvalidValue(
                    f"requires_grad of {name}", True, "False, as captured", where="placed step", hint=hint
                )
            if not is_updating or name not in self.updates:
                continue
            if not parameter.requires_grad:
                hint = f"{gradients_out}, or capture the model with this parameter frozen."
                raise InvalidValue(
                    f"requires_grad of {name}", False, "True, as captured", where="placed step", hint=hint
                )
            if has_hooks(parameter):
                hint = f"{gradients_out}, or register hooks with the model before it is captured."
                raise InvalidValue(f"hooks of {name}", "set", "none", where="placed step", hint=hint)

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

        Parameters that no longer require a gradient get none. Hooks of the placed parameters run once the step is done.
        Where a step fails, `grad` that was None stays so.

        Args:
            loss_scale: gradients are those of the loss times this.
        """
        wanted = {name: self.parameters[name] for name in self.reached if self.parameters[name].requires_grad}
        with torch.no_grad():
            apart = {name: each for name, each in wanted.items() if each.grad is None or has_hooks(each)}
            fresh = {name: torch.empty_like(each) for name, each in apart.items()}
        held = {name: each.grad for name, each in wanted.items() if each.grad is not None}
        into = {**held, **fresh}
        with self.gradients.into(into, fresh, loss_scale=loss_scale):
            yield
        with torch.no_grad():
            for name, gradient in fresh.items():
                _accumulate(wanted[name], gradient)

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of what the model's own `state_dict` has: every name of a tied tensor, and no buffer that it skips."""
        first = {id(value): name for name, value in (*self._model.named_parameters(), *self._model.named_buffers())}
        own = self._model.state_dict(keep_vars=True)
        return {
            name: self.tensor(first[id(value)]).clone() if id(value) in first else value for name, value in own.items()
        }

    def write_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all parameters and buffers into tensors of the same names.

        Raises:
            UnknownName: there is none of a name.
            InvalidValue: one has another shape. Nothing is written then.
        """
        for name in (*self.parameters, *self.buffers):
            if name not in tensors:
                hint = "Copy to the model that was captured, or to one of its class and sizes."
                raise UnknownName("parameter or buffer of the model", name, tensors, hint=hint)
            if tensors[name].shape != (own := self.tensor(name)).shape:
                expected = f"{tuple(own.shape)}, as that of the step"
                raise InvalidValue(f"shape of {name}", tuple(tensors[name].shape), expected, where="copy_to")
        with torch.no_grad():
            for name in (*self.parameters, *self.buffers):
                tensors[name].copy_(self.tensor(name))

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; names that are left out stay.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype. Nothing is overwritten then.
        """
        tensors = {self._tied.get(name, name): value for name, value in tensors.items()}
        for name, value in tensors.items():
            own = self.tensor(name)
            if value.shape != own.shape or value.dtype != own.dtype:
                expected = f"{own.dtype} {tuple(own.shape)}"
                raise InvalidValue(name, f"{value.dtype} {tuple(value.shape)}", expected, where="state")
        with torch.no_grad():
            for name, value in tensors.items():
                self.tensor(name).copy_(value)

    def _addresses(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return [(each.data_ptr(), each.shape, each.stride()) for each in self.parameters.values()]


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers with several, by which each has its first."""
    tied, first = {}, dict[int, str]()
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return tied


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody wants to see, or to change, the gradients of a parameter."""
    return bool(parameter._backward_hooks) or bool(_post_accumulate_hooks(parameter))


def _post_accumulate_hooks(parameter: nn.Parameter) -> Mapping[int, Callable[[torch.Tensor], None]]:
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds a gradient to `grad` as autograd does, hooks included; it may be kept."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for post_hook in _post_accumulate_hooks(parameter).values():
        post_hook(parameter)


def _layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _shown(layout: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]) -> str:
    dtype, shape, stride, device = layout
    return f"{dtype} {shape} of strides {stride} on {device}"
