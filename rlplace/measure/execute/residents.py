"""Tensors that stay on a device from step to step: parameters, buffers, inputs, constants and optimizer state.

`GradientsOut`: a step that leaves gradients to its caller, in place of updating parameters by them.
`limited_memory`: a process takes no more of each GPU than its host states.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.graphs import OpGraph
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.optimizers import Updater, UpdateState, updater
from rlplace.graphs.program import OptimizerSpec, Update
from rlplace.measure.execute.device_threads import Asked, Held, torch_device
from rlplace.measure.execute.shared_heap import Layout, SharedHeap
from rlplace.measure.hosts.host import Device, Host

CPU = "cpu"
"""The memory of every core."""
Resident = tuple[int, str]
"""The residents of one op in one memory: the op, and a GPU's device or `cpu`."""


class Residents:
    """Tensors of source ops and states of updates, each made where it is first asked for and there until `keep_only`.

    Cores share one memory, so plans over cores share one set; the user's own tensors are copied, never touched.
    Constants in the memory of the CPU, which no step writes, are the user's own: steps see their current values, unless
    tensors are in a heap. A dropped resident that is asked for again is as it was at capture: good enough to measure
    with, not to train with.

    Args:
        graph: with its program.
        host: its devices.
        seed: of values that the graph does not hold.
        is_apart: whether cores have no memory in common.
        ask: for the answers of other processes, which have the residents of their own devices.
        heap: memory for all of them, which other processes see; None for this process's own.
        devices: those whose tensors are asked for; all by default.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        *,
        seed: int = 0,
        is_apart: bool = False,
        ask: Callable[..., list[Any]] = lambda *_: [],
        heap: SharedHeap | None = None,
        devices: Collection[int] | None = None,
    ) -> None:
        self._graph, self._ask, self._heap = graph, ask, heap
        # cores share one memory, unless each has a process; parts of a GPU keep what is theirs apart
        self._homes = [device.name if is_apart or device.backend == "cuda" else CPU for device in host.devices]
        held = range(host.num_devices) if devices is None else devices
        self._places = {self._homes[index]: torch_device(host.devices[index]) for index in held}
        self._program = require_program(graph)
        self._seed = seed
        self._tensors: dict[Resident, torch.Tensor] = {}
        self._states: dict[Resident, UpdateState] = {}

    def tensor(self, op: int, device: int) -> torch.Tensor:
        """The tensor of source op `op` on `device`."""
        key = self.at(op, device)
        if key not in self._tensors:
            place = self._places[key[1]]
            with torch.inference_mode(False), cuda.settled(place):
                original = self._original(op)
                self._tensors[key] = original if self.is_own(op, device) else self.homed(original.to(place, copy=True))
        return self._tensors[key]

    def homed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor, or where there is a heap and it is not there: its copy in the heap."""
        return tensor if self._heap is None else self._heap.home(tensor)

    def new_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor with any values, laid out as another one, where `homed` would have it."""
        return torch.empty_like(tensor) if self._heap is None else self._heap.empty(Layout.of_copy(tensor))

    def is_homed(self, tensor: torch.Tensor) -> bool:
        """Whether that is the tensor itself."""
        return self._heap is None or self._heap.place(tensor) is not None

    def held(self, devices: Sequence[int], here: Collection[int]) -> Held:
        """What the heap has for ops on other devices than those that are `here`; without a heap, nothing.

        Args:
            devices: (N,) of a plan.
            here: devices of this process.
        """
        sources, calls = self._program.sources, self._program.calls
        ops = [op for op, device in enumerate(devices) if device not in here] if self._heap is not None else ()
        updates = {op: self.update_state(op, devices[op]) for op in ops if isinstance(calls.get(op), Update)}
        return {op: self.tensor(op, devices[op]) for op in ops if op in sources} | updates

    def set_options(self, spec: OptimizerSpec) -> None:
        """Sets the options of the updates to come."""
        for state in self._states.values():
            state.spec = spec

    def updater(self, ops: Sequence[int], device: int) -> Updater:
        """The function that does the updates `ops` on `device`: it takes their gradients."""
        parameters = [self.tensor(self.updated(op), device) for op in ops]
        return updater([self.update_state(op, device) for op in ops], parameters)

    def updated(self, op: int) -> int:
        """The source op of the parameter that update `op` is of."""
        call = self._program.calls[op]
        assert isinstance(call, Update)
        return int(self._graph.tensor_op[call.parameter.id])

    def update_state(self, op: int, device: int) -> UpdateState:
        """The state of update `op` on `device`."""
        key = self.at(op, device)
        if key not in self._states:
            assert self._program.optimizer is not None
            parameter = self.tensor(self.updated(op), device)
            with torch.inference_mode(False), cuda.settled(self._places[key[1]]):
                self._states[key] = state = UpdateState(self._program.optimizer, parameter)
                state.hold([self.homed(tensor) for tensor in state.tensors])
        return self._states[key]

    def adopt(self, op: int, device: int, value: torch.Tensor | UpdateState) -> None:
        """Has the tensor of source op `op`, or the state of update `op`, in common with its maker."""
        if isinstance(value, UpdateState):
            self._states[self.at(op, device)] = value
        else:
            self._tensors[self.at(op, device)] = value

    def is_own(self, op: int, device: int) -> bool:
        """Whether source op `op` has on `device` the tensor of the user, and no copy of it."""
        source = self._program.sources[op]
        is_near = self.place(device).type == source.value.device.type == "cpu"
        return is_near and source.kind == "constant" and not isinstance(source.value, FakeTensor) and self._heap is None

    def place(self, device: int) -> torch.device:
        """Where the tensors of `device` are."""
        return self._places[self._homes[device]]

    @property
    def made(self) -> frozenset[Resident]:
        """The residents that are there: source ops by their tensors, updates by their states."""
        return frozenset((*self._tensors, *self._states)).union(*self._ask("made"))

    def home(self, device: int) -> str:
        """The memory of `device`: cores have one together."""
        return self._homes[device]

    def at(self, op: int, device: int) -> Resident:
        """The resident that `tensor` or `updater` of `op` keeps for `device`."""
        return op, self._homes[device]

    def keep_only(self, needed: Collection[Resident]) -> bool:
        """Lets go of all that is not among `needed`; whether any of it was on a GPU.

        Its memory is free once no loaded plan holds it either.
        """
        self._ask("keep_only", frozenset(needed))
        dropped = {*self._tensors, *self._states}.difference(needed)
        for each in dropped:
            self._tensors.pop(each, None)
            self._states.pop(each, None)
        return any(home != CPU for _, home in dropped)

    def reset(self) -> None:
        """Residents that steps change are as at capture, and optimizers before their first step."""
        changed = set(self._graph.tensor_op[self._graph.mutation_tensor].tolist())
        self._ask("reset")
        own = {home for _, home in (*self._tensors, *self._states)}
        for home in own:  # a process that has one GPU touches no other
            with torch.no_grad(), cuda.settled(self._places[home]):
                for (op, where), tensor in self._tensors.items():
                    if op in changed and where == home:
                        tensor.copy_(self._original(op))
                for (_, where), state in self._states.items():
                    if where == home:
                        state.reset()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Launches of the calling thread on the host's GPUs while active run afterwards."""
        with contextlib.ExitStack() as places:
            for place in self._places.values():
                places.enter_context(cuda.settled(place))
            yield

    def set_tensor(self, op: int, device: int, value: torch.Tensor) -> None:
        """Overwrites the value of source op `op` on `device`, in place; the caller waits for it (`settled`).

        Raises:
            InvalidValue: another shape or dtype than captured.
        """
        resident = self.tensor(op, device)
        if value.shape != resident.shape or value.dtype != resident.dtype:
            cast = f"Cast it: `.to({resident.dtype})`."
            raise InvalidValue(
                self._graph.names[op],
                f"{value.dtype} {tuple(value.shape)}",
                f"{resident.dtype} {tuple(resident.shape)}",
                where="step input",
                hint=cast
                if value.dtype != resident.dtype
                else "A placed step takes the shapes that it was captured with.",
            )
        with torch.no_grad():
            resident.copy_(value)

    def _original(self, op: int) -> torch.Tensor:
        value = self._program.sources[op].value
        if not isinstance(value, FakeTensor):
            return value
        generator = torch.Generator().manual_seed(self._seed + op)
        if value.dtype.is_floating_point:
            return (torch.randn(tuple(value.shape), generator=generator) * 0.02).to(value.dtype)
        return torch.zeros(tuple(value.shape), dtype=value.dtype)


class GradientsOut:
    """Where the gradients of a step go: to tensors, while `into` is active; else to updates, or nowhere.

    One is bound to the code of every step that shares its parameters.

    Attributes:
        asked: what the next step does with them.
    """

    def __init__(self) -> None:
        self.asked = Asked()

    @contextlib.contextmanager
    def into(
        self, tensors: Mapping[str, torch.Tensor], fresh: Collection[str], *, loss_scale: float = 1.0
    ) -> Iterator[None]:
        """While active, gradients are added to tensors, as `Asked` says, and no parameter is updated."""
        self.asked = Asked(tensors, frozenset(fresh), loss_scale)
        try:
            yield
        finally:
            self.asked = Asked()

    def instead_of(self, update: Updater, names: Sequence[str]) -> Updater:
        """`update` of parameters `names`, which leaves them as they are while gradients are asked for."""

        def update_or_take(*gradients: torch.Tensor) -> None:
            into, fresh, _ = self.asked
            if into is None:
                update(*gradients)
                return
            for name, gradient in zip(names, gradients, strict=True):
                if name in fresh:
                    into[name].copy_(gradient)
                elif name in into:
                    into[name].add_(gradient)

        return update_or_take

    def scaled(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        """The function that makes the gradient of the loss, times the scale of the loss."""

        def scaled_seed(*args: Any, **kwargs: Any) -> Any:
            made = seed(*args, **kwargs)
            scale = self.asked.loss_scale
            return made if scale == 1.0 else made.mul_(scale)

        return scaled_seed


def gpu_capacities(devices: Iterable[Device]) -> dict[torch.device, int]:
    """Bytes for tensors on each physical GPU: `memory_bytes` without `context_bytes`, summed over its parts."""
    capacities: dict[torch.device, int] = defaultdict(int)
    for device in devices:
        if device.backend == "cuda":
            index, _ = cuda.parse_name(device.local_name) or (0, 0)
            capacities[torch.device("cuda", index)] += max(device.memory_bytes - device.context_bytes, 0)
    return dict(capacities)


@contextlib.contextmanager
def limited_memory(devices: Iterable[Device]) -> Iterator[None]:
    """While active, allocations of this process beyond the memory of `devices` fail as out of memory.

    So a host file that says 8 GB is true on a GPU of 80 GB. Of cores nothing is limited.
    """
    capacities = gpu_capacities(devices)
    for place, num_bytes in capacities.items():
        cuda.limit_memory(place, num_bytes)
    if capacities:  # what PyTorch keeps from before could be used beyond the limit
        cuda.give_back_memory()
    try:
        yield
    finally:
        for place in capacities:
            try:
                cuda.limit_memory(place, cuda.UNLIMITED)
            except RuntimeError as error:  # of a lost GPU: nothing is allocated there any more
                if not cuda.is_sticky(error):
                    raise
