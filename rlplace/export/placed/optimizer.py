"""`CapturedOptimizer`: the optimizer in a captured step, its options settable, and as an optimizer of PyTorch."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any, Protocol

import torch

from rlplace.errors import InvalidValue, UnknownName
from rlplace.export.placed.state import PlacedState
from rlplace.graphs.optimizers import UpdateState, torch_optimizer
from rlplace.graphs.program import OptimizerSpec

OPTIONS: dict[str, tuple[str, ...]] = {
    "sgd": ("lr", "weight_decay"),
    "momentum": ("lr", "momentum", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
}
"""What may change between steps, by optimizer."""
_MOMENTS = {"momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}
"""What PyTorch calls the moments."""
_NOT_CAPTURED = ("amsgrad", "maximize", "nesterov", "dampening")


class CapturedOptimizer:
    """The optimizer that a step was captured with.

    Args:
        spec: as captured.
        state: of the model that it updates.

    Attributes:
        spec: the options of the next step, once `refresh` was called.
    """

    def __init__(self, spec: OptimizerSpec, state: PlacedState) -> None:
        self.spec, self._state = spec, state

    @property
    def options(self) -> tuple[str, ...]:
        """Names of what may change between steps."""
        return OPTIONS[self.spec.name]

    def option(self, name: str) -> Any:
        """The value of an option.

        Raises:
            UnknownName: the optimizer has no such option.
        """
        self._check_name(name)
        self.refresh()
        return getattr(self.spec, name)

    def set_option(self, name: str, value: object) -> None:
        """Sets an option of the steps to come.

        Raises:
            UnknownName: the optimizer has no such option.
            InvalidValue: the value is none for it.
        """
        self._check_name(name)
        self.refresh()
        self._set({name: value})
        if "as_torch" in vars(self):
            for group in self.as_torch.param_groups:
                group[name] = getattr(self.spec, name)

    @cached_property
    def as_torch(self) -> torch.optim.Optimizer:
        """PyTorch's optimizer over the placed parameters, in the order of the model; both have one state.

        Its `step()` updates by `grad`, which `backward` of the placed step fills.
        """
        made = torch_optimizer(self.spec, list(self._state.parameters.values()))
        made.register_load_state_dict_post_hook(self._loaded)
        self._show_state(made)
        return made

    def refresh(self) -> None:
        """The options of the next step are those of PyTorch's optimizer, which a scheduler may have changed.

        Raises:
            InvalidValue: it has several groups, or options that were not captured.
        """
        if "as_torch" not in vars(self):
            return
        if len(self.as_torch.param_groups) > 1:
            hint = "Use gradients out (`step.backward`) with an optimizer of your own for groups of parameters."
            count = len(self.as_torch.param_groups)
            raise InvalidValue("param_groups", f"{count} groups", "one, as captured", where="placed step", hint=hint)
        group = self.as_torch.param_groups[0]
        for name in _NOT_CAPTURED:
            if group.get(name):
                hint = "Use gradients out (`step.backward`) with an optimizer of your own."
                raise InvalidValue(name, group[name], "as captured, without it", where="placed step", hint=hint)
        self._set({name: group[name] for name in self.options})

    def note_step(self) -> None:
        """Tells schedulers that a step was made: they warn if they are stepped before the optimizer."""
        if "as_torch" in vars(self):
            self.as_torch._opt_called = True  # type: ignore[attr-defined]

    def _check_name(self, name: str) -> None:
        if name not in self.options:
            raise UnknownName(f"option of {self.spec.name}", name, self.options)

    def _set(self, options: dict[str, object]) -> None:
        spec = dataclasses.replace(self.spec, **{name: _checked(name, value) for name, value in options.items()})
        if spec != self.spec:
            self.spec = spec
            for state in self._state.updates.values():
                state.spec = spec

    def _show_state(self, made: torch.optim.Optimizer) -> None:
        """Makes the state of updates that of PyTorch's optimizer."""
        for name, state in self._state.updates.items():
            made.state[self._state.parameters[name]] = named_state(state)

    def _loaded(self, made: torch.optim.Optimizer) -> None:
        """Takes over what `load_state_dict` has put in the place of the state."""
        with torch.no_grad():
            for name, state in self._state.updates.items():
                found = made.state.get(self._state.parameters[name], {})
                loaded = {key: torch.as_tensor(value).clone() for key, value in found.items() if value is not None}
                state.reset()
                for key, own in named_state(state).items():
                    if key in loaded:
                        own.copy_(loaded[key])
        self._show_state(made)


def named_state(state: UpdateState) -> dict[str, torch.Tensor]:
    """The tensors of one parameter's state, by PyTorch's names for them."""
    named = dict(zip(_MOMENTS.get(state.spec.name, ()), state.moments, strict=True))
    return named if state.step is None else {"step": state.step, **named}


def _checked(name: str, value: Any) -> Any:
    """An option as `OptimizerSpec` holds it.

    Raises:
        InvalidValue: it is no number, or out of range.
    """
    if name == "betas":
        pair = tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(pair) == 2 and all(_is_number(each) and 0 <= each < 1 for each in pair):
            return float(pair[0]), float(pair[1])
        raise InvalidValue(name, value, "two numbers in [0, 1)", where="placed step")
    if not _is_number(value) or float(value) < 0:
        raise InvalidValue(name, value, "a finite number >= 0", where="placed step")
    return float(value)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return (is_scalar or (isinstance(value, (int, float)) and not isinstance(value, bool))) and math.isfinite(value)


class HasOptimizer(Protocol):
    """A step whose options can be set."""

    @property
    def captured_optimizer(self) -> CapturedOptimizer: ...


class Option:
    """An option of the captured optimizer as an attribute of a step, under the attribute's name.

    Raises:
        InvalidValue: the step was captured without an optimizer, or the value is none for the option.
        UnknownName: its optimizer has no such option.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, step: HasOptimizer | None, owner: type | None = None) -> Any:
        return self if step is None else step.captured_optimizer.option(self._name)

    def __set__(self, step: HasOptimizer, value: object) -> None:
        step.captured_optimizer.set_option(self._name, value)
