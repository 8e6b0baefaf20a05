"""`PlacedState`: parameters, buffers, gradients and optimizer state of a model, where the placement keeps them.

`read_step`: a file of a placed step.

`CapturedOptimizer`: the optimizer in a captured step, its options settable, and as an optimizer of PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rlplace.errors import FileProblem, InvalidValue, check_known, refuse_if
from rlplace.export.placed.sharded_state import Parts, SplitParameter, Stored, other_shards, part_tensor
from rlplace.export.placed.step_arguments import layout
from rlplace.files import parse_json
from rlplace.graphs import OpGraph, OptimizerSpec
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import UpdateState, torch_optimizer
from rlplace.graphs.program import Program, Shard, Source, Update
from rlplace.measure import Plan
from rlplace.measure.execute.residents import GradientsOut, Residents
from rlplace.measure.execute.shared_heap import Layout

_OUT = "Leave gradients out (`step.backward`) to an optimizer of your own"
_NOT_AS_CAPTURED = (
    (
        "requires_grad",
        True,
        "False, as captured",
        "Capture the model while it requires one; with gradients out, it may change at any time.",
    ),
    ("requires_grad", False, "True, as captured", f"{_OUT}, or capture the model with this parameter frozen."),
    ("hooks", "set", "none", f"{_OUT}, or register hooks with the model before it is captured."),
)
"""Changes of a parameter that a step cannot follow: property, actual value, expected value, and the way out."""

Entry = tuple[str, str, str, Any]
"""Of a checkpoint: what stands before a name, the name that users have, what stands behind it, and the value."""


class PlacedState:
    """The common part of all graphs of one placed model.

    Each tensor has up to three names. Users call a parameter by its dotted name. A shard of it has a key of its own,
    `up.weight[0]`, by which steps read and update it. Where all shards are in this process, users see the whole
    parameter (`split`); where other ranks have some of them, they see those of this rank, each by its key.

    The next step of the same thread waits for the thread's own work with these tensors on a GPU.

    Args:
        graph: the first of them, with its program.
        plan: where it keeps its tensors.
        residents: of that graph: makes the tensors.
        held: the devices whose tensors this process has: the others have no part in what follows.

    Attributes:
        parameters: as users see them, in the order of the model; they show the memory that steps read and update, those
            that are split once they are shown (`show`).
        buffers: likewise.
        settled: launches of the calling thread on the GPUs while active run afterwards.
        split: parameters that are split into shards, by dotted name.
        reached: names of parameters that the backward reaches.
        gradients: where steps leave gradients that are asked for.
        spec: options of the next update; None where no optimizer was captured.
    """

    def __init__(self, graph: OpGraph, plan: Plan, residents: Residents, held: Collection[int]) -> None:
        program = require_program(graph)
        self.settled, self._residents, self._held = residents.settled, residents, held
        self.spec, self.gradients = program.optimizer, GradientsOut()
        # The tensors that steps use, by key, and the states of their updates, as far as this process has them.
        devices = plan.devices.tolist()
        ops = {source.key: op for op, source in program.sources.items() if source.kind in ("parameter", "buffer")}
        tensors = {key: residents.tensor(op, devices[op]) for key, op in ops.items() if devices[op] in held}
        self._elsewhere = ops.keys() - tensors.keys()
        self._updates: dict[str, UpdateState] = {
            program.sources[residents.updated(op)].key: residents.update_state(op, devices[op])
            for op, call in program.calls.items()
            if isinstance(call, Update) and devices[op] in held
        }
        # A parameter whose shards are all here is one that is split; of another one, this is a rank that has some.
        model = self._model = program.origin.model
        shards: dict[str, dict[int, Shard]] = defaultdict(dict)
        for shard in (source.shard for source in program.sources.values() if source.shard is not None):
            shards[shard.name][shard.index] = shard
        self.split: dict[str, SplitParameter] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._keys: dict[str, list[str]] = {}  # by the name that users have, those that steps have
        self._of_rank: dict[str, tuple[Layout, list[Shard]]] = {}  # by dotted name, what it is a part of
        for name, own in model.named_parameters():
            every = [shards[name][index] for index in sorted(shards[name])]
            here = [shard for shard in every if shard.key in tensors]
            keys = [shard.key for shard in here] if every else [name] if name in tensors else []
            if every and here == every:
                states = [self._updates[key] for key in keys if key in self._updates]
                self.split[name] = SplitParameter(own, every, [tensors[key] for key in keys], states)
                self.parameters[name], self._keys[name] = self.split[name].parameter, keys
                continue
            for key in keys:
                self.parameters[key] = nn.Parameter(tensors[key], requires_grad=own.requires_grad)
                self._keys[key] = [key]
            if every:
                self._of_rank[name] = Layout.of_copy(own.detach()), here
        self._shard_of = {shard.key: shard for each in shards.values() for shard in each.values()}
        self.buffers = {name: tensors[name] for name, _ in model.named_buffers() if name in tensors}
        self._by_name: dict[str, torch.Tensor] = {**self.parameters, **self.buffers}
        whole = {name: tensor for name, tensor in self._by_name.items() if name not in self.split}
        self._memory = {key: tensor for key, tensor in tensors.items() if key in self._shard_of} | whole
        self._tied = _tied_names(model)
        self.reached = self._reached_by(program)
        # What users may change between steps, as it is now.
        self._is_trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        self._layouts = {name: layout(parameter) for name, parameter in self.parameters.items()}
        self._layouts |= {name: (*each.layout, each.value.parts[0].device) for name, each in self.split.items()}
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
            if source.key in self._memory and self._shard_of.get(source.key) == source.shard:
                residents.adopt(op, devices[op], self._memory[source.key].detach())
            elif source.name in self._by_name:
                apart.append((residents.tensor(op, devices[op]), source))
            else:
                raise other_shards(source.name)
        moved = {source.key for _, source in apart}
        if wrong := moved & program.gradients.keys():
            raise other_shards(min(wrong))
        for op, call in program.calls.items():
            if isinstance(call, Update) and devices[op] in self._held:
                key = program.sources[residents.updated(op)].key
                if key in moved:
                    raise other_shards(key)
                residents.adopt(op, devices[op], self.begun(key))
        return sorted(apart, key=lambda each: each[1].name)

    def begun(self, key: str) -> UpdateState:
        """The state of updates of a parameter: a new one where no graph has updated it so far, as in eager.

        Raises:
            InvalidValue: it is a shard, whose parameter as a whole has no such state.
        """
        if key not in self._updates:
            if self.spec is None or key not in self.parameters:
                raise other_shards(key)
            self._updates[key] = state = UpdateState(self.spec, self.tensor(key))
            state.hold([self._residents.homed(tensor) for tensor in state.tensors])
        return self._updates[key]

    @torch.no_grad()
    def follow(self, apart: list[tuple[torch.Tensor, Source]], *, is_updating: bool) -> None:
        """Shards, and tensors that `share` returned, are as the parameters that users have seen."""
        for each in self.split.values():
            each.cut(has_state=is_updating)
        for name, pairs in itertools.groupby(apart, key=lambda each: each[1].name):
            split = self.split.get(name)
            whole = self.tensor(name) if split is None or split.is_shown else split.value.copy()
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
        if now == before:
            return False
        for name, parameter in self.parameters.items():
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
        self._bound = self._addresses()
        return True

    def _reached_by(self, program: Program) -> tuple[str, ...]:
        return tuple(name for name, keys in self._keys.items() if not program.gradients.keys().isdisjoint(keys))

    def set_spec(self, spec: OptimizerSpec) -> None:
        """Sets the options of updates."""
        self.spec = spec
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
            wants = parameter.requires_grad
            if wants == self._is_trained[name] and not has_hooks(parameter):  # at every step: the usual case first
                continue
            updated = is_updating and not self._updates.keys().isdisjoint(self._keys[name])
            wrong = (wants and not self._is_trained[name], updated and not wants, updated and has_hooks(parameter))
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
            fresh = {key: self._residents.new_like(self._memory[key]) for name in apart for key in self._keys[name]}
        held = {name: each.grad for name, each in wanted.items() if each.grad is not None and name not in apart}
        with self.gradients.into({**held, **fresh}, fresh, loss_scale=loss_scale):
            yield
        with torch.no_grad():
            for name, parameter in apart.items():
                gradients = [fresh[key] for key in self._keys[name]]
                is_split = name in self.split
                _accumulate(parameter, self.split[name].stored(gradients).copy() if is_split else gradients[0])

    def shown(self, *, as_copies: bool = False) -> dict[str, Any]:
        """The tensors of the model's own `state_dict`: every name of a tied tensor, and no buffer that it skips; and
        shards of parameters that are split over ranks.

        With `as_copies`, copies; those of parameters that are split are in the memory of the CPU.
        """
        if not as_copies:
            self.show()

        def given(name: str) -> torch.Tensor:
            return self._stored(name).copy("cpu" if name in self.split else None) if as_copies else self.tensor(name)

        own = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        first, found = {id(value): name for name, value in own.items()}, dict[str, Any]()
        for name, value in self._model.state_dict(keep_vars=True).items():
            if id(value) not in first:
                found[name] = value.clone() if as_copies and isinstance(value, torch.Tensor) else value
            elif first[id(value)] in self._by_name:
                found[name] = given(first[id(value)])
        return found | {shard.key: given(shard.key) for _, shards in self._of_rank.values() for shard in shards}

    def stored(self) -> dict[str, Stored]:
        """All tensors of the model and its optimizer, by their names in a file."""
        found = {f"model.{name}": self._stored(name) for name in self._by_name}
        for name in self.parameters:
            split, state = self.split.get(name), self._updates.get(self._keys[name][0])
            if state is not None:
                moments = split.moments if split is not None else [Stored((each,)) for each in state.tensors]
                names = _STATES[state.spec.name]
                found |= {f"optimizer.{key}.{name}": each for key, each in zip(names, moments, strict=True)}
        return found

    def _stored(self, name: str) -> Stored:
        """A parameter or buffer, by the name that users have, or by that of the model where a rank has some shards."""
        if name in self.split:
            return self.split[name].value
        if name not in self._of_rank:
            return Stored((self.tensor(name),))
        whole, shards = self._of_rank[name]
        return Stored([self.tensor(shard.key) for shard in shards], whole, shards)

    def gathered(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """Entries of a checkpoint, with shards of this rank together under the name of their parameter."""
        found, parts = dict[str, Any](), dict[str, tuple[Layout, Parts]]()
        for before, name, behind, value in entries:
            shard = self._shard_of.get(name)
            key = f"{before}{name if shard is None else shard.name}{behind}"
            if shard is not None and isinstance(value, torch.Tensor) and value.dim():
                parts.setdefault(key, (self._of_rank[shard.name][0], []))[1].append((shard, value))
            else:  # a count of steps, an option: alike for all shards
                found[key] = value
        found |= {key: part_tensor(each, whole.shape) for key, (whole, each) in parts.items()}
        return found | {name: found[own] for name, own in self._tied.items() if own in found}

    def loaded(self, loaded: Mapping[str, Any], entry: Entry) -> Any:
        """What a checkpoint gave in the place of an entry; that of a shard has been loaded into its memory."""
        before, name, behind, own = entry
        shard = self._shard_of.get(name)
        value = loaded[f"{before}{name if shard is None else shard.name}{behind}"]
        if shard is None or not isinstance(own, torch.Tensor):
            return value
        return own if own.dim() else own.copy_(value)

    def write_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all parameters and buffers into tensors of the same names.

        Raises:
            UnknownName: there is none of a name.
            InvalidValue: one has another shape. Nothing is written then.
        """
        names = [name for name in self._by_name if name not in self._shard_of]
        held = {name: self._stored(name) for name in (*names, *self._of_rank)}
        for name, each in held.items():
            check_known(
                "parameter or buffer of the model",
                name,
                tensors,
                hint="Copy to the model that was captured, or to one of its class and sizes.",
            )
            if tensors[name].shape != each.kind[1]:
                raise InvalidValue(
                    f"shape of {name}",
                    tuple(tensors[name].shape),
                    f"{each.kind[1]}, as that of the step",
                    where="copy_to",
                )
        for name, each in held.items():
            each.read_into(tensors[name])

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; the others do not change.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype. Nothing is overwritten then.
        """
        named = {self._tied.get(name, name): value for name, value in tensors.items()}
        stored = {name: self._stored(name) for name in named if name not in self._elsewhere}
        for name, each in stored.items():
            (dtype, shape), value = each.kind, named[name]
            if value.shape != shape or value.dtype != dtype:
                raise InvalidValue(name, f"{value.dtype} {tuple(value.shape)}", f"{dtype} {shape}", where="state")
        for name, each in stored.items():
            each.write(named[name])

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
_STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "step"),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
}
"""PyTorch's names of what `UpdateState` lists."""
_ALIKE = ("foreach", "fused", "capturable", "differentiable")
"""Options that leave the result of an update as it is."""


class CapturedOptimizer:
    """The optimizer that a step was captured with.

    Args:
        state: of the model that it updates, with its options.
    """

    def __init__(self, state: PlacedState) -> None:
        self._state = state

    @property
    def spec(self) -> OptimizerSpec:
        """The options of the next step, once `refresh` was called."""
        assert self._state.spec is not None
        return self._state.spec

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
    return dict(zip(_STATES[state.spec.name], state.tensors, strict=True))


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
    return placed.gathered(entry for entry, _ in _entries(optimizer, placed))


def set_options(optimizer: torch.optim.Optimizer | None, placed: PlacedState, loaded: Mapping[str, Any]) -> None:
    """Sets what is no tensor of what `optimizer_state` gave, after it was loaded."""
    for entry, holder in _entries(optimizer, placed):
        holder[entry[2].removeprefix(".")] = placed.loaded(loaded, entry)


def _entries(optimizer: torch.optim.Optimizer | None, placed: PlacedState) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """The state and options of each parameter as entries of a checkpoint, with the dicts that hold them."""
    names = {parameter: name for name, parameter in placed.parameters.items()}
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for before, holder in (("state.", state), ("param_groups.", group)):
                for key in [key for key in holder if key != "params"]:
                    yield (before, names[parameter], f".{key}", holder[key]), holder


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
    """An option as `OptimizerSpec` holds it."""
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
