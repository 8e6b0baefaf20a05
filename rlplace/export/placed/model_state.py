"""`PlacedState`: parameters, buffers, gradients and optimizer state of a model, where the placement keeps them.

`read_step`: a file of a placed step.

`CapturedOptimizer`: the optimizer in a captured step, its options settable, and as an optimizer of PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rlplace.errors import FileProblem, InvalidValue, check_known, refuse_if
from rlplace.export.placed.rank_shards import RankShards
from rlplace.export.placed.split_state import Stored, other_shards, split_parameters
from rlplace.export.placed.step_arguments import layout
from rlplace.files import parse_json
from rlplace.graphs import OpGraph, OptimizerSpec
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import UpdateState, torch_optimizer
from rlplace.graphs.program import Program, Source, Update
from rlplace.measure import Plan
from rlplace.measure.execute.residents import GradientsOut, Residents

_OUT = "Leave gradients out (`step.backward`) to an optimizer of your own"
_NOT_AS_CAPTURED = (
    (
        "requires_grad",
        True,
        "False, as captured",
        "Capture the model while it requires one; with gradients out, it may change at any time.",
    ),
    (
        "requires_grad",
        False,
        "True, as captured",
        f"{_OUT}, or capture the model with this parameter frozen.",
    ),
    ("hooks", "set", "none", f"{_OUT}, or register hooks with the model before it is captured."),
)
"""Changes of a parameter that a step cannot follow: property, actual value, expected value, and the way out."""


class PlacedState:
    """The common part of all graphs of one placed model.

    The next step of the same thread waits for the thread's own work with these tensors on a GPU.

    Args:
        graph: the first of them, with its program.
        plan: where it keeps its tensors.
        residents: of that graph: makes the tensors.
        held: the devices whose tensors this process has: the others have no part in what follows.

    Attributes:
        parameters: by dotted name, in the order of the model; they show the memory that steps read and update, those
            that are split once they are shown (`show`).
        buffers: likewise.
        settled: launches of the calling thread on the GPUs while active run afterwards.
        split: parameters that are split into shards, by dotted name.
        reached: names of parameters that the backward reaches.
        gradients: where steps leave gradients that are asked for.
    """

    def __init__(self, graph: OpGraph, plan: Plan, residents: Residents, held: Collection[int]) -> None:
        program = require_program(graph)
        self.settled, self._residents, self._held = residents.settled, residents, held
        devices = plan.devices.tolist()
        ops = {source.key: op for op, source in program.sources.items() if source.kind in ("parameter", "buffer")}
        tensors = {name: residents.tensor(op, devices[op]) for name, op in ops.items() if devices[op] in held}
        self._elsewhere = ops.keys() - tensors.keys()
        model = self._model = program.origin.model
        self._updates: dict[str, UpdateState] = {
            program.sources[residents.updated(op)].key: residents.update_state(op, devices[op])
            for op, call in program.calls.items()
            if isinstance(call, Update) and devices[op] in held
        }
        self.split = split_parameters(program, tensors, self._updates)
        shards = [source.shard for source in program.sources.values() if source.shard is not None]
        apart = {shard.key: shard for shard in shards if shard.key in tensors and shard.name not in self.split}
        own = dict(model.named_parameters())
        self._of_rank = RankShards(apart, {name: each.shape for name, each in own.items()})
        self._partial = {shard.name for shard in shards} - self.split.keys()
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in own.items():
            keys = [key for key, shard in apart.items() if shard.name == name]
            if name in self.split:
                self.parameters[name] = self.split[name].whole
            for key in (each for each in (name, *keys) if each in tensors):
                self.parameters[key] = nn.Parameter(tensors[key], requires_grad=parameter.requires_grad)
        self.buffers = {name: tensors[name] for name, _ in model.named_buffers() if name in tensors}
        self._by_name: dict[str, torch.Tensor] = {**self.parameters, **self.buffers}
        self._keys = {name: [shard.key for shard in each.shards] for name, each in self.split.items()}
        self._parts = {
            shard.key: (shard, part)
            for each in self.split.values()
            for shard, part in zip(each.shards, each.parts, strict=True)
        }
        self._tied = _tied_names(model)
        self.reached = self._reached_by(program)
        self.gradients = GradientsOut()
        self._is_trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        self._layouts = {name: layout(parameter) for name, parameter in self.parameters.items()}
        self._layouts |= {name: (*each.layout, each.parts[0].device) for name, each in self.split.items()}
        self._bound = self._addresses()

    def share(self, graph: OpGraph, plan: Plan, residents: Residents) -> list[tuple[torch.Tensor, Source]]:
        """Has the residents of another graph of the model hold these tensors; `plan` keeps them on the same devices.

        Returns:
            Tensors of its own that the graph has for parameters, as it splits them otherwise, or not at all: `follow`
            gives them their values.

        Raises:
            InvalidValue: the graph updates such a parameter, or has its gradient.
        """
        program, devices, apart = require_program(graph), plan.devices.tolist(), list[tuple[torch.Tensor, Source]]()
        for op, source in program.sources.items():
            if source.kind not in ("parameter", "buffer") or devices[op] not in self._held:
                continue
            shard, part = self._parts.get(source.key, (self._of_rank.shards.get(source.key), None))
            name = source.name
            if shard == source.shard and part is None and name not in self.split and source.key in self._by_name:
                residents.adopt(op, devices[op], self.tensor(source.key))
            elif part is not None and shard == source.shard:
                residents.adopt(op, devices[op], part)
            elif name in self._partial or name not in self._by_name:
                raise other_shards(name)
            else:
                apart.append((residents.tensor(op, devices[op]), source))
        moved = {source.key for _, source in apart}
        if wrong := moved & program.gradients.keys():
            raise other_shards(min(wrong))
        for op, call in program.calls.items():
            if isinstance(call, Update) and devices[op] in self._held:
                key = program.sources[residents.updated(op)].key
                if key in moved:
                    raise other_shards(key)
                residents.adopt(op, devices[op], self.begun(key, program.optimizer))
        return sorted(apart, key=lambda each: each[1].name)

    def begun(self, key: str, optimizer: OptimizerSpec | None) -> UpdateState:
        """The state of updates of a parameter: a new one where no graph has updated it so far, as in eager.

        Raises:
            InvalidValue: it is a shard, whose parameter as a whole has no such state.
        """
        spec = self.spec or optimizer
        if key not in self._updates:
            if key in self._parts or spec is None:
                raise other_shards(key)
            self._updates[key] = state = UpdateState(spec, self.tensor(key))
            state.hold([self._residents.homed(tensor) for tensor in state.tensors])
        return self._updates[key]

    @torch.no_grad()
    def follow(self, apart: list[tuple[torch.Tensor, Source]], *, is_updating: bool) -> None:
        """Shards, and tensors that `share` returned, are as the parameters that users have seen."""
        for each in self.split.values():
            each.cut(has_state=is_updating)
        for name, pairs in itertools.groupby(apart, key=lambda each: each[1].name):
            split = self.split.get(name)
            whole = self.tensor(name) if split is None or split.is_shown else self._stored(name).copy()
            for tensor, source in pairs:
                Stored((tensor,), shards=() if source.shard is None else (source.shard,)).write(whole)
            del whole  # before the next one is made

    @torch.no_grad()
    def updated(self, *, is_updating: bool) -> None:
        """Parameters that users have seen are as the shards, if a step was to update these."""
        for each in self.split.values() if is_updating else ():
            each.join()

    def show(self, *, has_state: bool = False) -> None:
        """Gives parameters that are split memory and their values, with `has_state` the state of their updates, too."""
        with torch.no_grad():
            for each in self.split.values():
                each.show(has_state=has_state)

    @property
    def updates(self) -> dict[str, UpdateState]:
        """Optimizer state of each parameter that the captured optimizer updates, by dotted name: what is shown."""
        states = (
            (name, self.split[name].state if name in self.split else self._updates.get(name))
            for name in self.parameters
        )
        return {name: state for name, state in states if state is not None}

    def is_moved(self) -> bool:
        """Whether parameters were given other memory (`parameter.data = ...`) since the last time it was asked.

        Raises:
            InvalidValue: one was given another shape, layout, dtype or device.
        """
        before, now = self._bound, self._addresses()
        for name, parameter in self.parameters.items() if now != before else ():
            if name in self.split and not self.split[name].is_shown:
                continue
            if (found := layout(parameter)) != self._layouts[name]:
                raise InvalidValue(
                    f"data of {name}",
                    _shown(found),
                    f"{_shown(self._layouts[name])}, as captured",
                    where="placed step",
                    hint="Overwrite it in place: `with torch.no_grad(): parameter.copy_(...)`.",
                )
            if name not in self.split and not self._residents.is_homed(parameter):
                parameter.data = self._residents.homed(parameter.data)
        self._bound = self._addresses() if now != before else now
        return now != before

    def _reached_by(self, program: Program) -> tuple[str, ...]:
        return tuple(
            name for name in self.parameters if not program.gradients.keys().isdisjoint(self._keys.get(name, [name]))
        )

    @property
    def spec(self) -> OptimizerSpec | None:
        """Options of the next update; None where no optimizer was captured."""
        return next((update.spec for update in self._updates.values()), None)

    def set_spec(self, spec: OptimizerSpec) -> None:
        """Sets the options of updates."""
        for state in (*self._updates.values(), *self.updates.values()):
            state.spec = spec

    def check_trained(self, *, is_updating: bool) -> None:
        """Checks that the graph has the gradients that parameters require now, and where it updates, no others.

        Args:
            is_updating: whether the captured optimizer is to update.

        Raises:
            InvalidValue: a parameter requires a gradient that it did not when the step was made. Where the step
                updates: or the other way round; or it has a hook, which an update passes by.
        """
        for name, parameter in self.parameters.items():
            updated = is_updating and not self._updates.keys().isdisjoint(self._keys.get(name, [name]))
            wants = parameter.requires_grad
            wrong = (
                wants and not self._is_trained[name],
                updated and not wants,
                updated and has_hooks(parameter),
            )
            if any(wrong):
                what, actual, expected, hint = _NOT_AS_CAPTURED[wrong.index(True)]
                raise InvalidValue(f"{what} of {name}", actual, expected, where="placed step", hint=hint)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a parameter or buffer.

        Raises:
            UnknownName: there is none of that name.
        """
        check_known("parameter", name, self._by_name)
        return self._by_name[name].detach()

    @contextlib.contextmanager
    def grad_filled(self, loss_scale: float, graph: OpGraph) -> Iterator[None]:
        """While active, a step adds gradients to `grad` of the parameters, as `loss.backward()` does.

        Parameters that no longer require a gradient get none. Hooks of the placed parameters run once the step is done.
        Where a step fails, `grad` that was None stays so.

        Args:
            loss_scale: gradients are those of the loss times this.
            graph: of the step: others may reach other parameters.
        """
        self.show()
        reached = self._reached_by(require_program(graph))
        wanted = {name: self.parameters[name] for name in reached if self.parameters[name].requires_grad}
        with torch.no_grad():
            apart = {
                name: each
                for name, each in wanted.items()
                if each.grad is None or has_hooks(each) or name in self.split or not self._residents.is_homed(each.grad)
            }
            parts = {key: self._parts[key][1] for name in apart for key in self._keys.get(name, ())}
            whole = {name: each for name, each in apart.items() if name not in self.split}
            fresh = {name: self._residents.new_like(each) for name, each in (*whole.items(), *parts.items())}
        held = {name: each.grad for name, each in wanted.items() if each.grad is not None and name not in apart}
        with self.gradients.into({**held, **fresh}, fresh, loss_scale=loss_scale):
            yield
        with torch.no_grad():
            for name, parameter in apart.items():
                gradient = fresh.get(name)
                if gradient is None:
                    gradients = [fresh[key] for key in self._keys[name]]
                    gradient = self.split[name].stored(gradients).copy()
                _accumulate(parameter, gradient)

    def shown(self, *, as_copies: bool = False) -> dict[str, Any]:
        """The tensors of the model's own `state_dict`: every name of a tied tensor, and no buffer that it skips; and
        shards of parameters that are split over ranks.

        With `as_copies`, copies; those of parameters that are split are in the memory of the CPU.
        """
        if not as_copies:
            self.show()
        first = {id(value): name for name, value in (*self._model.named_parameters(), *self._model.named_buffers())}
        gone = self._elsewhere | self._partial

        def given(key: str) -> torch.Tensor:
            return self._stored(key).copy("cpu" if key in self.split else None) if as_copies else self.tensor(key)

        found: dict[str, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if id(value) not in first:
                found[name] = value.clone() if as_copies and isinstance(value, torch.Tensor) else value
            elif first[id(value)] not in gone:
                found[name] = given(first[id(value)])
        return found | {key: given(key) for key in self._of_rank.shards}

    def stored(self) -> dict[str, Stored]:
        """All tensors of the model and its optimizer, by their names in a file."""
        found = {f"model.{name}": self._stored(name) for name in self._by_name}
        for name in self.parameters:
            split = self.split.get(name)
            own = (self._updates[name],) if name in self._updates else ()
            states = own if split is None else split.states
            shown = named_state(split.state) if split is not None and split.state is not None else {}
            for key in named_state(states[0]) if states else ():
                parts = [named_state(each)[key] for each in states]
                one = Stored(parts) if split is None else split.stored(parts, shown.get(key))
                found[f"optimizer.{key}.{name}"] = one
        return found

    def _stored(self, name: str) -> Stored:
        return self.split[name].tensors(has_state=False)[0] if name in self.split else Stored((self.tensor(name),))

    def under_names(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a checkpoint, with shards of this rank together under the name of their parameter."""
        found = self._of_rank.under_names(named)
        return found | {name: found[own] for name, own in self._tied.items() if own in found}

    def loaded(self, loaded: Mapping[str, Any], key: str, own: Any) -> Any:
        """What a checkpoint gave in the place of `own`; that of a shard has been loaded into its memory."""
        shard, name = self._of_rank.renamed(key)
        if shard is None or not isinstance(own, torch.Tensor):
            return loaded[name]
        return own if own.dim() else own.copy_(loaded[name])

    def write_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all parameters and buffers into tensors of the same names.

        Raises:
            UnknownName: there is none of a name.
            InvalidValue: one has another shape. Nothing is written then.
        """
        shards = self._of_rank.shards
        for key in self._by_name:
            name = shards[key].name if key in shards else key
            check_known(
                "parameter or buffer of the model",
                name,
                tensors,
                hint="Copy to the model that was captured, or to one of its class and sizes.",
            )
            shape = tuple(self._of_rank.shapes[name]) if key in shards else self._stored(name).kind[1]
            if tensors[name].shape != shape:
                raise InvalidValue(
                    f"shape of {name}",
                    tuple(tensors[name].shape),
                    f"{shape}, as that of the step",
                    where="copy_to",
                )
        with torch.no_grad():
            for key in self._by_name:
                if key in shards:
                    shards[key].copy(tensors[shards[key].name], self.tensor(key), is_joined=True)
                else:
                    self._stored(key).read_into(tensors[key])

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; the others do not change.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype. Nothing is overwritten then.
        """
        tensors = {self._tied.get(name, name): value for name, value in tensors.items()}
        tensors = self._of_rank.cut(tensors, self._partial)
        tensors = {name: value for name, value in tensors.items() if name not in self._elsewhere}
        stored = {name: self._stored(name) for name in tensors}
        for name, value in tensors.items():
            dtype, shape = stored[name].kind
            if value.shape != shape or value.dtype != dtype:
                raise InvalidValue(name, f"{value.dtype} {tuple(value.shape)}", f"{dtype} {shape}", where="state")
        for name, value in tensors.items():
            stored[name].write(value)

    def _addresses(self) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return [(each.data_ptr(), each.shape, each.stride()) for each in self.parameters.values()]


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers with several, by which each has its first."""
    first: dict[int, str] = {}
    every = (
        (name, first.setdefault(id(tensor), name))
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    )
    return {name: own for name, own in every if own != name}


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the parameter has hooks that see or change its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds a gradient to `grad` as autograd does, hooks included; it may be kept."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for post_hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        post_hook(parameter)


def _shown(found: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]) -> str:
    return "{} {} of strides {} on {}".format(*found)


OPTIONS: dict[str, tuple[str, ...]] = {
    "sgd": ("lr", "weight_decay"),
    "momentum": ("lr", "momentum", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
}
"""Options that may change between steps, by optimizer."""
_MOMENTS = {"momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}
"""PyTorch's names of the moments."""
_ALIKE = ("foreach", "fused", "capturable", "differentiable")
"""Options that leave the result of an update as it is."""


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
        """Names of options that may change between steps."""
        return OPTIONS[self.spec.name]

    def option(self, name: str) -> Any:
        """The value of an option.

        Raises:
            UnknownName: the optimizer has no such option.
        """
        check_known(f"option of {self.spec.name}", name, self.options)
        self.refresh()
        return getattr(self.spec, name)

    def set_option(self, name: str, value: object) -> None:
        """Sets an option of the steps to come.

        Raises:
            UnknownName: the optimizer has no such option.
            InvalidValue: the value is none for it.
        """
        self.option(name)  # as it is now, if there is such an option
        self._set({name: value})
        for group in self.as_torch.param_groups if "as_torch" in vars(self) else ():
            group[name] = getattr(self.spec, name)

    @cached_property
    def as_torch(self) -> torch.optim.Optimizer:
        """PyTorch's optimizer over the placed parameters, in the order of the model; both have one state.

        Its `step()` updates by `grad`, which `backward` of the placed step fills.
        """
        self._state.show(has_state=True)
        made = torch_optimizer(self.spec, list(self._state.parameters.values()))
        made.register_load_state_dict_post_hook(self._loaded)
        made.register_step_pre_hook(lambda *_: self._show_state(made))  # of parameters that a later graph updates, too
        self._show_state(made)
        return made

    def refresh(self) -> None:
        """The options of the next step are those of PyTorch's optimizer, which a scheduler may have changed.

        Raises:
            InvalidValue: it has several groups, or parameters or options that were not captured.
        """
        if "as_torch" not in vars(self):
            return
        (group, *others), out = self.as_torch.param_groups, f"{_OUT}."
        refuse_if(others, "param_groups", f"{1 + len(others)} groups", "one group", where="placed step", hint=out)
        refuse_if(
            list(map(id, group["params"])) != list(map(id, self._state.parameters.values())),
            "params",
            "other ones",
            "those captured",
            where="placed step",
            hint=out,
        )
        for name, captured in self.as_torch.defaults.items():
            actual = captured if name in (*self.options, *_ALIKE) else group.get(name, captured)
            hint = 'Capture with optimizer="momentum", or set cycle_momentum=False.' if name == "momentum" else out
            refuse_if(actual != captured, name, actual, f"{captured}, as captured", where="placed step", hint=hint)
        self._set({name: group[name] for name in self.options})

    def note_step(self) -> None:
        """Tells schedulers that a step was made: they warn if they are stepped before the optimizer."""
        if "as_torch" in vars(self):
            self.as_torch._opt_called = True  # type: ignore[attr-defined]

    def _set(self, options: dict[str, object]) -> None:
        spec = dataclasses.replace(self.spec, **{name: _checked(name, value) for name, value in options.items()})
        if spec != self.spec:
            self.spec = spec
            self._state.set_spec(spec)

    def _show_state(self, made: torch.optim.Optimizer) -> None:
        """Makes the state of updates that of PyTorch's optimizer."""
        for name, state in self._state.updates.items():
            made.state[self._state.parameters[name]] = named_state(state)

    def _loaded(self, made: torch.optim.Optimizer) -> None:
        """Takes over the state that `load_state_dict` has put in its place."""
        with torch.no_grad():
            for name, state in self._state.updates.items():
                found = made.state.get(self._state.parameters[name], {})
                loaded = {key: torch.as_tensor(value).clone() for key, value in found.items() if value is not None}
                state.reset()
                for key in named_state(state).keys() & loaded.keys():
                    named_state(state)[key].copy_(loaded[key])
        self._show_state(made)


def named_state(state: UpdateState) -> dict[str, torch.Tensor]:
    """The tensors of one parameter's state, by PyTorch's names for them."""
    named = dict(zip(_MOMENTS.get(state.spec.name, ()), state.moments, strict=True))
    return named if state.step is None else {"step": state.step, **named}


def optimizer_state(optimizer: torch.optim.Optimizer | None, placed: PlacedState) -> dict[str, Any]:
    """State and options for each parameter, with the names that `torch.distributed.checkpoint.state_dict` flattens to.

    An optimizer without a state makes that of its first step, as it is before it.

    Args:
        optimizer: its tensors are not copied; without one there is nothing.
        placed: the state whose parameters it is over.

    Raises:
        InvalidValue: it is over another one.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    names = {parameter: name for name, parameter in placed.parameters.items()}
    strange = any(parameter not in names for group in groups for parameter in group["params"])
    refuse_if(strange, "optimizer", "over other parameters", "over `step.parameters()`", where="checkpoint")
    if optimizer is not None and not optimizer.state:
        _begin(optimizer, {placed.parameters[name] for name in placed.reached})
    found: dict[str, Any] = {}
    for group, parameter, own in _each(optimizer):
        name = names[parameter]
        found |= {f"state.{name}.{key}": each for key, each in own.items()}
        found |= {f"param_groups.{name}.{key}": each for key, each in group.items() if key != "params"}
    return placed.under_names(found)


def set_options(optimizer: torch.optim.Optimizer | None, placed: PlacedState, loaded: Mapping[str, Any]) -> None:
    """Sets what is no tensor of what `optimizer_state` gave, after it was loaded."""
    names = {parameter: name for name, parameter in placed.parameters.items()}
    for group, parameter, own in _each(optimizer):
        name = names[parameter]
        for key in own:
            own[key] = placed.loaded(loaded, f"state.{name}.{key}", own[key])
        for key in group.keys() - {"params"}:
            group[key] = placed.loaded(loaded, f"param_groups.{name}.{key}", group[key])


def _each(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[dict[str, Any], nn.Parameter, dict[str, Any]]]:
    """Each parameter with its group and its state."""
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter, optimizer.state.get(parameter, {}) if optimizer is not None else {}


def _begin(optimizer: torch.optim.Optimizer, reached: Collection[nn.Parameter]) -> None:
    """Makes the state of a first step for parameters that get gradients, by a step of size 0."""
    groups = optimizer.param_groups
    before = [(each, each.grad) for group in groups for each in group["params"]]
    rates = [group["lr"] for group in groups]
    try:
        for parameter, _ in before:
            parameter.grad = torch.zeros_like(parameter) if parameter in reached else None
        for group in groups:
            group["lr"] = group["lr"] * 0.0
        optimizer.step()
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in before:
            parameter.grad = gradient
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0


def _checked(name: str, value: Any) -> Any:
    """An option as `OptimizerSpec` holds it.

    Raises:
        InvalidValue: it is no number, or out of range.
    """
    is_pair = name == "betas"
    values: tuple[Any, ...] = tuple(value) if is_pair and isinstance(value, (tuple, list)) else (value,)
    most, expected = (1.0, "two numbers in [0, 1)") if is_pair else (math.inf, "a finite number >= 0")
    if len(values) != 1 + is_pair or not all(_is_number(each) and 0 <= each < most for each in values):
        raise InvalidValue(name, value, expected, where="placed step")
    return (float(values[0]), float(values[1])) if is_pair else float(value)


def _is_number(value: Any) -> bool:
    is_scalar = value.numel() == 1 if isinstance(value, torch.Tensor) else type(value) in (int, float)
    return is_scalar and math.isfinite(value)


class Option:
    """An option of the captured optimizer as an attribute of a step, under the attribute's name.

    Raises:
        InvalidValue: the step was captured without an optimizer, or the value is none for the option.
        UnknownName: its optimizer has no such option.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, step: Any, owner: type | None = None) -> Any:
        return self if step is None else step.captured_optimizer.option(self._name)

    def __set__(self, step: Any, value: object) -> None:
        step.captured_optimizer.set_option(self._name, value)


SCHEMA = 2
"""Of a file of `PlacedModel.save`: one safetensors file, which runs no code when it is loaded.

Draws of steps of schema 1 were seeded by the numbers of their ops."""


def read_step(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a file of `PlacedModel.save` tells, and its tensors.

    Raises:
        FileProblem: it cannot be read, or is another file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = parse_json((file.metadata() or {}).get("rlplace", "{}"), path)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise FileProblem(
            path,
            f"cannot be read as a file of `step.save(path)` ({error}): a `state_dict` of `torch.save` is loaded by "
            f"`step.load_state_dict(torch.load(path))`.",
        ) from error
    except (OSError, ValueError) as error:
        raise FileProblem(path, f"cannot be read: {error}.") from error
    older = {"num_evaluations": 0, "optimizer": None}  # files that lack both
    told = {**older, **(told if isinstance(told, dict) else {})}
    counts = told.get("num_steps"), told["num_evaluations"]
    is_whole = all(isinstance(count, int) for count in counts) and isinstance(told["optimizer"], dict | None)
    if told.get("schema") not in (1, SCHEMA) or not is_whole:
        raise FileProblem(path, f"no state of a placed step of schema {SCHEMA}: `step.save(path)` writes one.")
    return told, tensors
