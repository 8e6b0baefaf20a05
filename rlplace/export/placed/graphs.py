"""`PlacedGraph`: one captured graph with its plan, bound to the workers of a host and to the state of a model.

Captures a model again as it was captured before: for other shapes, or for its forward alone.

`host_of`: the host of this machine that a placement is for.

`carried_plan`: the plan of one graph of a model for another: other shapes, evaluation, the loss elsewhere.

An op is known by its role: phase, module, target, micro-batch, and which of several alike it is in the order of the
graph. An op with a twin in the planned graph goes where the twin is, in its place in the order. One without goes with
its module, or with its inputs.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import CaptureError, FingerprintMismatch, InvalidValue, RunnerError
from rlplace.export.placed.model_state import PlacedState
from rlplace.export.placed.step_arguments import FollowedState, Index, InputCutter
from rlplace.graphs import OpGraph, capture
from rlplace.graphs.capturing.capture import capture_step, checked
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Update, closed, opened
from rlplace.measure import Host, Placement, Plan, detect_host, resolve_host
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.detect import MOST_PARTS
from rlplace.measure.placement import check_is_placement
from rlplace.measure.timing.threads import intra_op_threads, usable_cores

Call = tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]
"""Positional arguments, keyword arguments and targets."""


class PlacedGraph:
    """A graph that runs as planned.

    Args:
        graph: with its program.
        host: of this machine.
        plan: the plan to run.
        crew: the threads or processes of the host.
        state: of the model; made from this graph where it is the first.
        seed: of random ops.

    Attributes:
        graph: the same.
        plan: the same.
        state: its common part with other graphs of the model.
    """

    def __init__(
        self, graph: OpGraph, host: Host, plan: Plan, crew: Crew, state: PlacedState | None = None, *, seed: int = 0
    ) -> None:
        self.graph, self.plan, self._devices = graph, plan, plan.devices.tolist()
        self._crew, self._held = crew, frozenset(crew.held(host))
        self._residents = Residents(graph, host, seed=seed, heap=crew.heap, devices=self._held)
        self.state = PlacedState(graph, plan, self._residents, self._held) if state is None else state
        self._step = PlacedStep(graph, host, plan, self._residents, crew, seed=seed, gradients=self.state.gradients)
        self._is_updating = any(isinstance(call, Update) for call in require_program(graph).calls.values())
        self.follow_state()
        self._read = FollowedState(graph, plan, self._residents, held=self._held)
        self._inputs = InputCutter(graph, {op for op, device in enumerate(self._devices) if device in self._held})
        written = graph.tensor_op[graph.mutation_tensor]
        self._written = {op: position for op, position in self._inputs.positions.items() if op in written}

    @property
    def call(self) -> Call:
        """The call that was captured."""
        origin = require_program(self.graph).origin
        return origin.args, origin.kwargs, origin.targets

    def check(self, again: Callable[[], OpGraph], free: Collection[str]) -> None:
        """Takes over constants that have changed, and checks that the step would not be another one today.

        Args:
            again: captures it as it is now.
            free: names of Python state that may change.

        Raises:
            InvalidValue: a constant was changed that the capture read as a number, or Python state that it read.
        """
        if self._read.follow(again, free):  # copies run before the step does: `run` settles them
            self._step.load()

    # a team of threads that copies inputs would wait for its next work on the cores of the devices, for milliseconds
    @intra_op_threads(1)
    def run(self, tensors: Sequence[torch.Tensor], number: int) -> Any:
        """The results of the step, as copies; its writes to inputs go to these tensors.

        Args:
            tensors: inputs, then targets, of the captured shapes and dtypes.
            number: of the step: random ops draw by it.

        Raises:
            InvalidValue: another shape or dtype.
            RunnerError: an op failed.
        """
        with self._residents.settled():  # and so is what was done with parameters and gradients since the last step
            is_updating = self._is_updating and self.state.gradients.asked.into is None
            self.state.follow(self._apart, is_updating=is_updating)
            for op, tensor in self._inputs.by_op(tensors):
                self._residents.set_tensor(op, self._devices[op], tensor.detach())
        self._crew.follow(self.state.spec, self.state.gradients.asked)
        try:
            self._step.run(number)
        except RunnerError:  # a part may be updated; of a GPU that is lost nothing can be read
            with contextlib.suppress(RuntimeError):
                self.state.updated(is_updating=is_updating)
            raise
        self.state.updated(is_updating=is_updating)
        with torch.no_grad():
            for op, position in self._written.items():
                tensors[position].copy_(self._residents.tensor(op, self._devices[op]))
            return closed(pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, opened(self._step.result)))

    @property
    def reads(self) -> tuple[tuple[Index, ...], ...]:
        """Of each tensor of a call, the parts that this process reads."""
        return self._inputs.parts

    def follow_state(self) -> None:
        """Runs with the tensors that parameters of the state have now."""
        self._apart = self.state.share(self.graph, self.plan, self._residents)
        self._step.load()


@dataclass(frozen=True, slots=True)
class Flags:
    """Settings of a model that a capture depends on.

    Attributes:
        modes: whether each module, by dotted name, is training.
        trained: whether each parameter, by dotted name, requires a gradient.
    """

    modes: dict[str, bool]
    trained: dict[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> Flags:
        """How the model is set now."""
        return cls(
            modes={name: module.training for name, module in model.named_modules()},
            trained={name: each.requires_grad for name, each in model.named_parameters()},
        )

    def _set(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.training = self.modes[name]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained[name])

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """While active, the model is set so."""
        before = Flags.of(model)
        try:
            self._set(model)
            yield
        finally:
            before._set(model)


def captured_again(graph: OpGraph, call: Call, flags: Flags) -> OpGraph:
    """The step of `graph` for other inputs and targets.

    Args:
        graph: with its program.
        call: alike but for shapes.
        flags: of the model, as they were.

    Raises:
        CaptureError: the model cannot be captured for these.
        InvalidValue: the batch cannot be cut so.
    """
    program = require_program(graph)
    origin, (args, kwargs, targets) = program.origin, call
    with flags.on(origin.model), as_cast(origin.model, origin.autocast):
        if origin.micro is None:
            again = replace(origin, args=args, kwargs=kwargs, targets=targets, autocast=None)
            return checked(capture_step(again, program.optimizer))
        slicing = origin.micro.slicing
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        lengths = (tensor.shape[dim] for tensor, dim in zip(tensors, slicing.dims, strict=True) if dim is not None)
        return capture(
            origin.model,
            {**kwargs} if kwargs and not args else args,
            origin.loss_fn,
            program.optimizer,
            targets=targets or None,
            micro_batches=min([slicing.num_micro_batches, *lengths]),
            batch_dims=slicing.dims,
            loss=origin.micro.verdict,
            frozen=origin.frozen,
            split=origin.split,
            check=origin.is_checked,
        )


def captured_evaluation(graph: OpGraph, call: Call) -> OpGraph:
    """The forward alone of the model of `graph`, all of its modules evaluating.

    Args:
        graph: with its program.
        call: its targets are not used.

    Raises:
        CaptureError: the model cannot be captured in evaluation mode.
    """
    origin, (args, kwargs, _) = require_program(graph).origin, call
    now = Flags.of(model := origin.model)
    with replace(now, modes=dict.fromkeys(now.modes, False)).on(model), as_cast(model, origin.autocast):
        evaluated = replace(origin, args=args, kwargs=kwargs, loss_fn=None, targets=(), autocast=None, micro=None)
        try:
            return checked(capture_step(evaluated, None))
        except CaptureError:
            if origin.split is None:
                raise
        return checked(capture_step(replace(evaluated, split=None), None))  # nothing of it can be split in evaluation


def as_cast(model: nn.Module, autocast: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Autocast as it was around a capture, also where it was off."""
    kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
    return torch.autocast(kind, dtype=autocast, enabled=autocast is not None)


Role = tuple[object, ...]


def carried_plan(graph: OpGraph, plan: Plan, other: OpGraph, *, last: Collection[int] = ()) -> Plan:
    """A plan for `other`, parameters and buffers where `plan` has them.

    Args:
        graph: of the same model as `other`, with its program.
        plan: of `graph`.
        other: with its program.
        last: ops of `other` that run after all others, and send their outputs after all others; none of the others
            reads from them.
    """
    devices, keys = _carried(graph, plan, other)
    sources = require_program(other).sources
    for tensor, op in zip(other.input_tensors.tolist(), other.edge_op.tolist(), strict=True):
        source = int(other.tensor_op[tensor])
        if source in last and source in sources:  # has no twin, and may be wherever it is read
            devices[source] = devices[op]
    return _planned(other, devices, keys, frozenset(last))


def _carried(graph: OpGraph, plan: Plan, other: OpGraph) -> tuple[list[int], list[float]]:
    """Devices of the ops of `other`, and numbers that order them."""
    position = {item: index for index, item in enumerate(plan.sequence.tolist())}
    planned = plan.devices.tolist()
    twins = {role: op for op, role in enumerate(_roles(graph))}
    last_alike = {role[:-1]: op for role, op in twins.items()}
    in_module: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    for phase, module, device in zip(graph.phases.tolist(), graph.modules, planned, strict=True):
        in_module[phase, module][device] += 1
    devices, keys = [0] * other.num_ops, [0.0] * other.num_ops
    offsets, inputs, producers = other.input_offsets.tolist(), other.input_tensors.tolist(), other.tensor_op.tolist()
    for op, role in enumerate(_roles(other)):
        read = [producers[tensor] for tensor in inputs[offsets[op] : offsets[op + 1]]]
        after = max((keys[each] for each in read), default=0.0)
        twin = twins.get(
            role, last_alike.get(role[:-1], last_alike.get((*role[:-2], 0)))
        )  # else where its first shard is
        if twin is not None:
            devices[op], keys[op] = planned[twin], max(float(position[twin]), after)
            continue
        near, keys[op] = devices[max(read, key=keys.__getitem__)] if read else 0, after
        found = in_module.get((int(other.phases[op]), other.modules[op]))
        devices[op] = near if found is None else found.most_common(1)[0][0]
    _keep_together(other, devices)
    return devices, keys


def _roles(graph: OpGraph) -> Iterator[Role]:
    """The role of each op in the model; its last part tells ops of equal roles apart."""
    sources = require_program(graph).sources
    phases, micro_batches, shards = graph.phases.tolist(), graph.micro_batch.tolist(), graph.shard.tolist()
    seen: Counter[Role] = Counter()
    for op in range(graph.num_ops):
        kind: Role = (phases[op], graph.modules[op], graph.targets[op], micro_batches[op], shards[op])
        if op in sources and sources[op].kind != "constant":
            kind = (sources[op].kind, sources[op].name, micro_batches[op], shards[op])
        yield (*kind, seen[kind])
        seen[kind] += 1


def _keep_together(graph: OpGraph, devices: list[int]) -> None:
    """Ops that live together go where the state among them is, which the model has in one place only."""
    members: dict[int, list[int]] = defaultdict(list)
    for op, together in enumerate(graph.colocation.tolist()):
        if together >= 0:
            members[together].append(op)
    for ops in members.values():
        state = [devices[op] for op in ops if graph.targets[op] in ("parameter", "buffer")]
        home = state[0] if state else Counter(devices[op] for op in ops).most_common(1)[0][0]
        for op in ops:
            if graph.targets[op] not in ("parameter", "buffer"):
                devices[op] = home


def _planned(graph: OpGraph, devices: list[int], keys: list[float], last: Collection[int]) -> Plan:
    """Ops by part and key, each transfer as soon as there is something to send; updates in place after all readers."""
    n, producers = graph.num_ops, graph.tensor_op.tolist()
    edges = list(zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True))
    needed = sorted({(tensor, devices[op]) for tensor, op in edges if devices[op] != devices[producers[tensor]]})
    transfers = {key: n + index for index, key in enumerate(needed)}
    before = {(producers[tensor], item) for (tensor, _), item in transfers.items()}
    before |= {(transfers.get((tensor, devices[op]), producers[tensor]), op) for tensor, op in edges}
    users: dict[int, list[int]] = defaultdict(list)
    for tensor, item in (*edges, *((tensor, item) for (tensor, _), item in transfers.items())):
        users[tensor].append(item)
    updates = set(zip(graph.mutation_tensor.tolist(), graph.mutation_op.tolist(), strict=True))
    for tensor, op in updates:  # two of one tensor (a parameter that `forward` writes) go in the order of the graph
        waited = (item for item in users[tensor] if (tensor, item) not in updates or item < op)
        before |= {(item, op) for item in waited if item != op}
    items: nx.DiGraph[int] = nx.DiGraph()
    items.add_nodes_from(range(n + len(needed)))
    items.add_edges_from(before)
    makers = [*range(n), *(producers[tensor] for tensor, _ in needed)]
    order = nx.lexicographical_topological_sort(items, key=lambda item: (makers[item] in last, keys[makers[item]]))
    return Plan(
        devices=np.array(devices, dtype=np.int32),
        transfer_tensor=np.array([tensor for tensor, _ in needed], dtype=np.int32),
        transfer_destination=np.array([device for _, device in needed], dtype=np.int32),
        sequence=np.array(list(order), dtype=np.int32),
    )


def check_arguments(model: nn.Module, graph: OpGraph, placement: Placement, where: str) -> None:
    """Checks the kinds of arguments of the function `where`.

    Raises:
        InvalidValue: an argument is not a model, graph or placement, or the arguments are in the wrong order.
    """
    for name, value, kind in (("model", model, nn.Module), ("graph", graph, OpGraph)):
        if not isinstance(value, kind):
            raise InvalidValue(
                name,
                f"of type {type(value).__name__}",
                f"of type {kind.__name__}",
                where=where,
                hint=f"Call `{where}(model, graph, placement)`, in this order; `rlplace.capture` makes the graph.",
            )
    check_is_placement(placement, where)


def host_of(model: nn.Module, graph: OpGraph, placement: Placement, host: Host | str | None, where: str) -> Host:
    """The host of this machine that the function `where` is to place on, once its arguments are checked.

    Raises:
        InvalidValue: an argument is not a model, graph or placement, or the arguments are in the wrong order.
        FingerprintMismatch: the placement was made for another graph or host.
    """
    check_arguments(model, graph, placement, where)
    found = matching_host(placement) if host is None else resolve_host(host)
    placement.require(graph, found)
    return found


def matching_host(placement: Placement) -> Host:
    """The host of this machine that the placement was made for.

    Raises:
        FingerprintMismatch: there is none.
    """
    for host in _hosts_here(len(placement.device_names)):
        if host.fingerprint == placement.host_fingerprint:
            return host
    raise FingerprintMismatch("host", placement.host_fingerprint, detect_host("auto").fingerprint)


def _hosts_here(num_devices: int) -> Iterator[Host]:
    """Hosts of this machine with so many devices that a word names: its GPUs, any `cores:...`, with a gang or not.

    Each also as processes, if it can be.
    """
    num_gpus = cuda.num_gpus()
    for with_cpu in (False, True):
        num_parts, rest = divmod(num_devices - with_cpu, max(num_gpus, 1))
        if num_gpus and not rest and 1 <= num_parts <= MOST_PARTS:
            yield detect_host("cuda", num_parts=num_parts, with_cpu=with_cpu)
    if num_gpus and num_gpus == num_devices:
        yield detect_host("cuda-procs")
    for num_single, gangs in ((num_devices, False), (num_devices - 1, True)):  # a gang is one device more
        for cores_per_device in range(1, len(usable_cores()) // num_single + 1) if num_single > 0 else ():
            yield detect_host("cores", num_single, cores_per_device, gangs=gangs)
            if not gangs:
                yield detect_host("procs", num_single, cores_per_device)
