"""`PlacedModule`: forward and backward of a model that run as placed, by a graph for every kind of inputs.

`to_module` makes one of a placement: its loss is wherever the caller has it. `ModuleGraph` is forward and backward for
inputs of one kind, as a function that autograd knows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import InvalidValue, RunnerError, UserError, check_known
from rlplace.export.placed.graphs import Flags, carried_plan, host_of
from rlplace.export.placed.step_arguments import FollowedState, InputCutter, check_data, layout
from rlplace.graphs import BACKWARD, OpGraph
from rlplace.graphs.capturing.capture import CapturedModule, capture_module
from rlplace.graphs.capturing.portable import original_of
from rlplace.graphs.capturing.untouched import PythonState, ReadState
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Ref
from rlplace.measure import Host, Placement, Plan
from rlplace.measure.execute.device_threads import Crew, torch_device
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.two_part_step import Kept, TwoPartStep
from rlplace.measure.isolate.own_ranks import crew_of
from rlplace.measure.placement import check_plan
from rlplace.measure.timing.threads import intra_op_threads, keep_freed_memory

_log = logging.getLogger(__name__)

Slot = tuple[str, dict[str, Any], str]
"""Where a tensor is held: its dotted name, the dict of its module, and its key there."""


class PlacedModule(nn.Module):
    """The class that `to_module` adds to a copy of a model: its `forward` runs on the devices of the placement."""

    _placed: PlacedForward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the model; its backward also runs on the devices of the placement.

        Threads may share the module: one forward or backward runs at a time, and any number of forwards may wait for
        their backwards.

        Raises:
            CaptureError: the model cannot be captured for these inputs.
            InvalidValue: modules or their hooks were changed after the placement; a parameter has another dtype, shape
                or device; or an input has no data.
            RunnerError: an op failed.
            UserError: a call within a call (by an op of the module), or in a forked process.
        """
        with self._placed.crew.turn():
            return self._placed(self, args, kwargs)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs: one for every kind of inputs, each in training and in evaluation."""
        return len(self._placed.graphs)

    def recapture(self) -> None:
        """Takes over attributes and other Python state that have changed: all graphs are captured again when needed.

        The placement, parameters and buffers stay.
        """
        with self._placed.crew.turn(runs=False):
            self._placed.graphs.clear()

    def close(self) -> None:
        """Waits for a running call of another thread, and ends all threads and processes of the module."""
        self._placed.crew.stop()

    def __reduce__(self) -> Any:
        """Refuses to be copied or pickled: it has threads."""
        raise InvalidValue(
            "module",
            "a placed one",
            "a model to be copied or pickled",
            where="copy",
            hint="Take the original model (`AveragedModel(model)`, say), and load `state_dict()` of this one.",
        )


class PlacedForward:
    """Runs calls of a placed module, each by the graph of its kind.

    Args:
        module: the placed copy; its parameters and buffers are moved.
        graph: of a step of the original.
        plan: of `graph`.
        host: of this machine.
        seed: of random ops.

    Attributes:
        crew: the threads or processes of the host.
        graphs: by the common properties of calls of a kind.
        places: of parameters and buffers, by dotted name.
    """

    def __init__(self, module: nn.Module, graph: OpGraph, plan: Plan, host: Host, seed: int) -> None:
        keep_freed_memory()
        self._graph, self._plan, self._host, self._seed = graph, plan, host, seed
        origin = require_program(graph).origin
        self._model, self._frozen, self._split = origin.model, origin.frozen, origin.split
        self._is_checked = origin.is_checked
        self.places: dict[str, torch.device] = {}
        for op, source in require_program(graph).sources.items():
            if source.kind in ("parameter", "buffer"):  # a parameter that is split is whole where its first shard is
                name = source.key if source.shard is None else source.shard.name
                self.places.setdefault(name, torch_device(host.devices[int(plan.devices[op])]))
        self._modules = list(module.named_modules())
        self._read = ReadState(module, None, hooked=())
        parameters, buffers = _slots(module, "_parameters"), _slots(module, "_buffers")
        self._trained = [slots[0] for slots in parameters]
        self._first = [slots[0] for slots in (*parameters, *buffers)]
        self._tied = [(first, other) for first, *others in (*parameters, *buffers) for other in others]
        self.crew = crew_of(graph, host, seed=seed)
        for name, tensor in self._state().items():
            tensor.data = self._home(tensor.data.to(self.places[name]))
        self._layouts = {name: _shown(tensor) for name, tensor in self._state().items()}
        self.graphs: dict[object, ModuleGraph] = {}
        self._bound: list[object] = []
        self._number = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {name: kwargs[name] for name in sorted(kwargs)}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check_structure()
        state = self._state()
        check_data([*tensors, *state.values()] if forward_ad._current_level >= 0 else tensors, "placed module")
        is_trained = bytes(state[name].requires_grad for name, _, _ in self._trained)
        differentiated = tuple(k for k, each in enumerate(tensors) if each.requires_grad and torch.is_grad_enabled())
        has_backward = torch.is_grad_enabled() and bool(any(is_trained) or differentiated)
        modes = bytes(each.training for _, each in self._modules)
        place = next((place.type for place in self.places.values()), "cpu")
        autocast = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None
        kind = (has_backward, differentiated, is_trained, modes, spec, autocast), tuple(map(_kind, leaves))
        self._follow(state)

        def capture() -> CapturedModule:
            home = next((tensor.device for tensor in self._model.parameters()), torch.device("cpu"))
            with torch.inference_mode(False), Flags.of(module).on(self._model), _set_as(module, self._model):
                return capture_module(
                    self._model,
                    *pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(home), (args, kwargs)),
                    has_backward=has_backward,
                    differentiated=differentiated,
                    frozen=self._frozen,
                    split=self._split,
                    check=self._is_checked,
                    read=ReadState(module, None, self._frozen, hooked=self._model.named_parameters()),
                )

        if kind not in self.graphs:
            captured = capture()
            plan = carried_plan(self._graph, self._plan, captured.graph, last=backward_ops(captured.graph))
            self.graphs[kind] = ModuleGraph(captured, self._host, plan, self.crew, state, seed=self._seed)
            shown = (tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
            _log.info("captured %s: %d graphs share this placement", ", ".join(map(repr, shown)), len(self.graphs))
        self._number += 1
        return self.graphs[kind].run(tensors, state, self._number - 1, capture)

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the module has them now, by dotted name."""
        return {name: tensor for name, holder, key in self._first if (tensor := holder[key]) is not None}

    def _check_structure(self) -> None:
        """Refuses changes of modules, of the names of their tensors, and of hooks, which the graphs do not contain."""
        changes = () if self._read.is_same() else self._read.differences()
        for each in sorted(changes, key=lambda each: each.before is not None):  # what is new before what is gone
            path, *hooks = re.split(r"(?:^|\.)_(?:forward|backward)(?:_pre)?_hooks\b", each.name)
            if hooks and path:
                raise InvalidValue(
                    f"hooks of {path}",
                    "changed",
                    "as they were placed",
                    where="placed module",
                    hint="Register hooks with the model before it is captured, or with the placed module itself.",
                )
            if not hooks and any(isinstance(held, torch.Tensor | nn.Module) for held in (each.before, each.value)):
                raise InvalidValue(
                    each.name,
                    "new" if each.before is None else "gone" if each.value is None else "replaced",
                    "as it was placed",
                    where="placed module",
                    hint="Change the model, capture it again and place that: a placed module runs what was captured.",
                )
        self._read.accept()

    def _follow(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over parameters and buffers that were replaced (`load_state_dict(assign=True)`, `module.to`)."""
        for (_, first, first_key), (name, holder, key) in self._tied:
            if holder[key].data_ptr() != first[first_key].data_ptr():
                raise InvalidValue(
                    name,
                    "untied",
                    "tied, as it was placed",
                    where="placed module",
                    hint="Untie them in the model, capture it again and place that.",
                )
        now: list[object] = [(tensor.data_ptr(), layout(tensor)) for tensor in state.values()]
        if now == self._bound:
            return
        for name, tensor in state.items():
            check_known("parameter", name, self.places)
            stay = "Where parameters are is what the placement says: do not move the module."
            again = "Change the model, capture it again and place that; or take `torch.autocast`."
            for found, placed, hint in (
                (f"on {tensor.device}", f"on {self.places[name]}", stay),
                (_shown(tensor), self._layouts[name], again),
            ):
                if found != placed:
                    raise InvalidValue(name, found, f"{placed}, as placed", where="placed module", hint=hint)
            tensor.data = self._home(tensor.data)
        for graph in self.graphs.values():
            graph.adopt(state)
        self._bound = [(tensor.data_ptr(), layout(tensor)) for tensor in state.values()]

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where all devices of its kind see it."""
        return tensor if self.crew.heap is None else self.crew.heap.home(tensor)


@contextlib.contextmanager
def _set_as(copied: nn.Module, model: nn.Module) -> Iterator[None]:
    """While active, attributes of a model are those of its copy, with the model's own modules and tensors in them."""
    before, copies = PythonState(model.named_modules()), dict(copied.named_modules())
    pairs = [(path, copies[path], module) for path, module in model.named_modules()]
    own: dict[int, Any] = {id(one): other for _, one, other in pairs} | {
        id(each): theirs[key]
        for _, one, other in pairs
        for mine, theirs in ((one._parameters, other._parameters), (one._buffers, other._buffers))
        for key, each in mine.items()
        if each is not None and key in theirs
    }
    try:
        for path, one, other in pairs:
            now, was = _own_entries(vars(one)), _own_entries(vars(other))
            for key in was.keys() - now.keys():
                del vars(other)[key]
            vars(other).update(
                (key, _taken_over(f"{path}.{key}".strip("."), value, was.get(key), own))
                for key, value in now.items()
                if "_hooks" not in key and key not in ("_placed", "hf_device_map")
            )
        yield
    finally:
        before.restore()


def _taken_over(name: str, value: Any, was: Any, own: dict[int, Any]) -> Any:
    """An attribute of a copy for its model, where it was another; `own` is what the model has, by ids of the copy's."""
    (leaves, spec), (others, spec_before) = pytree.tree_flatten(value), pytree.tree_flatten(was)
    kinds = (torch.Tensor, weakref.ref)
    for one, other in zip(leaves, others if spec == spec_before else leaves, strict=True):
        if isinstance(one, (*kinds, nn.Module)) or not callable(one):  # of functions, some are bound to modules
            own.setdefault(id(one), other if isinstance(one, kinds) and isinstance(other, kinds) else one)
    try:
        return copy.deepcopy(value, own)
    except Exception as error:
        raise InvalidValue(
            name,
            f"a {type(value).__name__}",
            "what can be copied",
            where="placed module",
            hint="Set it in the model before that is captured, and place that.",
        ) from error


def _own_entries(holder: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are no registry."""
    return {key: value for key, value in holder.items() if key not in ("_parameters", "_buffers", "_modules")}


def _slots(module: nn.Module, kind: str) -> list[list[Slot]]:
    """Where the module's parameters or buffers are held; those of several names have several slots, the first first."""
    held: dict[int, list[Slot]] = {}
    for path, owner in module.named_modules():
        for key, tensor in (holder := getattr(owner, kind)).items():
            if tensor is not None:
                held.setdefault(id(tensor), []).append((f"{path}.{key}".lstrip("."), holder, key))
    return list(held.values())


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _kind(leaf: Any) -> object:
    """The common properties of leaves in calls of one kind."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    try:
        return type(leaf), leaf, hash(leaf)
    except TypeError:
        return repr(leaf)


def backward_ops(graph: OpGraph) -> frozenset[int]:
    """The ops of a module's second part: its backward, and the gradients of outputs that it is given."""
    given = {op for op, source in require_program(graph).sources.items() if source.kind == "target"}
    return frozenset(given | {op for op, phase in enumerate(graph.phases.tolist()) if phase == BACKWARD})


class ModuleGraph:
    """A captured forward and backward that run as planned.

    Args:
        captured: forward and backward.
        host: of this machine.
        plan: of the graph, the backward at the end.
        crew: the threads of the host.
        state: parameters and buffers by dotted name, where the plan keeps them.
        seed: of random ops.

    Attributes:
        with_gradient: the outputs that have a gradient.
    """

    def __init__(
        self,
        captured: CapturedModule,
        host: Host,
        plan: Plan,
        crew: Crew,
        state: Mapping[str, torch.Tensor],
        *,
        seed: int,
    ) -> None:
        graph = captured.graph
        self._program, self._plan, self._crew = require_program(graph), plan, crew
        self.with_gradient = captured.with_gradient
        self._residents = Residents(graph, host, seed=seed, heap=crew.heap)
        second = backward_ops(graph)
        late = {
            graph.num_ops + index
            for index, tensor in enumerate(plan.transfer_tensor.tolist())
            if graph.tensor_op[tensor] in second
        }
        self._step = TwoPartStep(graph, host, plan, self._residents, crew, seed=seed, second=second | late)
        sources, positions = self._program.sources, InputCutter(graph).positions
        self._inputs = {op: k for op, k in positions.items() if sources[op].kind == "input"}
        self._shards = {op: source.shard for op, source in sources.items() if source.shard is not None}
        self._seeds = {op: int(sources[op].key) for op in positions if sources[op].kind == "target"}
        read_late = {
            tensor
            for tensor, op in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True)
            if op in second
        }
        self._kept_inputs = [k for op, k in self._inputs.items() if int(graph.output_offsets[op]) in read_late]
        gradients = (*self._program.gradients.values(), *self._program.input_gradients.values())
        self._read = FollowedState(graph, plan, self._residents, where="placed module")
        self._late_sources = {int(graph.tensor_op[tensor]) for tensor in read_late}
        self._output_is_shared = self._shared(graph, self._program.result_refs, read_late)
        self._gradient_is_shared = self._shared(graph, gradients, set())
        behind = _seeds_behind(graph, self._seeds)
        self._behind = [behind[int(graph.tensor_op[self._program.base(ref)])] for ref in gradients]
        self.adopt(state)

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Runs with these parameters and buffers from now on."""
        for op, source in self._program.sources.items():
            if source.kind in ("parameter", "buffer") and source.shard is None:
                self._residents.adopt(op, int(self._plan.devices[op]), state[source.key].detach())
        self._step.load()

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        number: int,
        again: Callable[[], CapturedModule],
    ) -> Any:
        """The result of the model, with a gradient where the model's own output has one.

        Args:
            tensors: inputs.
            parameters: by dotted name: those whose tensors were adopted.
            number: of the step: random ops draw by it.
            again: captures it as it is now.

        Raises:
            InvalidValue: Python state was changed that the capture read.
            RunnerError: an op failed.
        """
        if self._read.follow(lambda: again().graph):
            self._step.load()
        shards = {
            op: shard.of(parameters[shard.name]).to(self._residents.place(int(self._plan.devices[op])))
            for op, shard in self._shards.items()
        }
        if self.with_gradient:
            of_key = {self._program.sources[op].key: tensor for op, tensor in shards.items()}
            wanted = [of_key.get(name, parameters.get(name)) for name in self._program.gradients]
            wanted += [tensors[position] for position in self._program.input_gradients]
            whole = [parameters[shard.name] for shard in self._shards.values()]
            outputs = _Forward.apply(self, tensors, number, shards, whole, *wanted)  # type: ignore[no-untyped-call]
        else:
            outputs, _ = self.forward(tensors, number, shards)
        values = iter(outputs)
        return self._program.returned(lambda _: next(values))

    @intra_op_threads(1)  # what is copied here must leave no team that waits on the cores of the devices
    def forward(
        self, tensors: Sequence[torch.Tensor], number: int, shards: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], Kept]:
        """Output tensors, which share no memory with anything else, and the tensors that `backward` needs."""
        given = self._placed({**{op: tensors[position] for op, position in self._inputs.items()}, **shards})
        outputs, kept = self._step.run_first(given, number)
        return self._apart(outputs, self._output_is_shared), kept

    @intra_op_threads(1)
    def backward(self, gradients: Sequence[torch.Tensor | None], kept: Kept, number: int) -> list[torch.Tensor | None]:
        """Gradients of parameters, then of inputs; those of all outputs, with a gradient or not, are given.

        Outputs that the loss does not use have None. So have parameters and inputs that only such outputs read:
        optimizers leave them alone, which with zeros they would not.
        """
        seeds = {op: gradients[self.with_gradient[index]] for op, index in self._seeds.items()}
        used = sum(1 << self._seeds[op] for op, seed in seeds.items() if seed is not None)
        with self._crew.turn():
            given = self._placed({op: self._zeros(op) if seed is None else seed for op, seed in seeds.items()})
            found = self._apart(self._step.run_second(given, kept, number), self._gradient_is_shared)
        return [
            None if behind and not behind & used else each for each, behind in zip(found, self._behind, strict=True)
        ]

    def _zeros(self, op: int) -> torch.Tensor:
        value = self._program.sources[op].value
        place = self._residents.place(int(self._plan.devices[op]))
        return torch.zeros(value.shape, dtype=value.dtype, device=place)

    def kept_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that the backward reads, and the constants."""
        return [*(tensors[position] for position in self._kept_inputs), *self._read.tensors(self._late_sources)]

    def _placed(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Each tensor on the device of its op and laid out as captured; the caller's own where it is so already."""
        placed = {op: tensor.detach() for op, tensor in given.items()}
        with self._residents.settled():  # and so is what was done with parameters and outputs since
            for op, own in placed.items():
                place, stride = (
                    self._residents.place(int(self._plan.devices[op])),
                    self._program.sources[op].value.stride(),
                )
                if own.stride() != stride or own.device != place or own.is_inference():
                    placed[op] = torch.empty_strided(own.shape, stride, dtype=own.dtype, device=place).copy_(own)
        return placed

    def _shared(self, graph: OpGraph, refs: Sequence[Ref], read_late: Collection[int]) -> list[bool]:
        """Whether an output shares memory with a tensor that stays, or with another output."""
        bases, sources = [self._program.base(ref) for ref in refs], self._program.sources
        times = Counter(bases)
        return [times[base] > 1 or base in read_late or int(graph.tensor_op[base]) in sources for base in bases]

    def _apart(self, tensors: Sequence[torch.Tensor], is_shared: Sequence[bool]) -> list[torch.Tensor]:
        """A tensor that may be returned; on GPUs, the next caller may launch on other streams than this one."""
        pairs = list(zip(tensors, is_shared, strict=True))
        with torch.no_grad(), self._residents.settled():
            apart = [tensor.clone() if shared else tensor for tensor, shared in pairs]
        for tensor, shared in pairs:
            if tensor.device.type == "cuda" and not shared:  # its memory is that of the thread that made it
                cuda.keep_for(tensor, cuda.current_stream(tensor.device))
        return apart


def _seeds_behind(graph: OpGraph, seeds: Mapping[int, int]) -> list[int]:
    """For every op, the gradients of outputs that it depends on: bit k for the k-th."""
    behind: list[int] = []
    for op in range(graph.num_ops):
        read = graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]]
        own = 1 << seeds[op] if op in seeds else 0
        behind.append(functools.reduce(operator.or_, (behind[each] for each in graph.tensor_op[read].tolist()), own))
    return behind


class _Forward(torch.autograd.Function):
    """Runs the forward, and has autograd run the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: ModuleGraph,
        tensors: Sequence[torch.Tensor],
        number: int,
        shards: Mapping[int, torch.Tensor],
        whole: Sequence[torch.Tensor],
        *wanted: Any,
    ) -> Any:
        outputs, ctx.kept = graph.forward(tensors, number, shards)
        ctx.graph, ctx.number = graph, number
        ctx.read = [*graph.kept_inputs(tensors), *wanted, *whole]
        ctx.versions = _versions(ctx.read)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for k, one in enumerate(outputs) if k not in graph.with_gradient))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # by `create_graph`
            raise UserError(
                "the backward of a placed module has no graph of its own, so `create_graph=True` is refused: gradients "
                "of gradients (a gradient penalty, a Hessian) need the model itself. Keep the model that needs them "
                "unplaced, and place the others"
            )
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RunnerError(
                "backward through a placed module a second time, whose tensors are freed by the first: sum the losses, "
                "and call backward once (`retain_graph` keeps nothing here)"
            )
        if _versions(ctx.read) != ctx.versions:
            raise RunnerError(
                "a parameter or an input of a placed module was modified in place between forward and backward; step "
                "the optimizer after `backward`, and clone an input before it is written to"
            )
        return None, None, None, None, None, *ctx.graph.backward(gradients, kept, ctx.number)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def to_module(
    model: nn.Module, graph: OpGraph, placement: Placement, *, host: Host | str | None = None, seed: int = 0
) -> PlacedModule:
    """Returns a copy of `model` that runs on the devices of the placement. It trains, evaluates, saves and loads like
    the original.

    Its class derives from the class of `model`. It has the same modules, parameters and buffers with the same names, on
    the devices of the placement. Forward and backward are captured at the first call with inputs of a kind (structure,
    shapes, mode, tensors that require a gradient). Each op runs on the device that the placement gives the matching op.
    The caller computes the loss, and calls the optimizer.

    Args:
        model: the model that `graph` was captured from; it does not change.
        graph: of a step of the model (training or inference), with its program.
        placement: made for `graph` and for a host of this machine.
        host: that host, or a HOST word for it; by default the host of this machine that the placement was made for.
        seed: of random ops: each draws from (seed, call, place).

    Raises:
        InvalidValue: an argument is not a model, graph or placement, or the arguments are in the wrong order.
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: `graph` was captured from another model.
    """
    host = host_of(model, graph, placement, host, "to_module")
    model = original_of(model)
    if require_program(graph).origin.model is not model:
        raise InvalidValue("model", type(model).__name__, "the model that the graph was captured from", where="module")
    check_plan(graph, host.num_devices, placement.plan)
    with torch.inference_mode(False):
        placed = copy.deepcopy(model, {id(constant): constant for constant in _constants(model)})
    placed._forward_hooks.clear()  # they are in the graph
    placed._forward_pre_hooks.clear()
    placed.__class__ = _placed_class(type(model))
    vars(placed)["_placed"] = runs = PlacedForward(placed, graph, placement.plan, host, seed)
    if len({*runs.places.values()}) > 1:
        vars(placed)["hf_device_map"] = hf_device_map(runs.places)
    return cast("PlacedModule", placed)


def _constants(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in plain attributes of modules, and in lists there: the captured model and its copy share them."""
    for module in model.modules():
        leaves = pytree.tree_leaves(_own_entries(vars(module)))
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter))


def hf_device_map(places: Mapping[str, torch.device]) -> dict[str, int | str]:
    """Where parameters and buffers are, as Hugging Face writes it: who reads it leaves a model where it is.

    >>> hf_device_map({"up.weight": torch.device("cuda", 1), "down.weight": torch.device("cpu")})
    {'up.weight': 1, 'down.weight': 'cpu'}
    """
    return {name: place.type if place.index is None else place.index for name, place in places.items()}


def _placed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that derives from `kind`; its `forward` runs as placed and has the signature that `kind`'s has.

    Hugging Face's `Trainer` drops the columns of a batch that the signature does not name.
    """

    @functools.wraps(kind.forward)
    def forward(self: PlacedModule, *args: Any, **kwargs: Any) -> Any:
        return PlacedModule.forward(self, *args, **kwargs)

    return type(f"Placed{kind.__name__}", (PlacedModule, kind), {"forward": forward})
