"""`to_step`: a model that runs as a placement says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace import cuda
from rlplace.errors import FingerprintMismatch, UnknownName
from rlplace.export.arguments import Arguments, InputCutter
from rlplace.graphs.capturing.micro.verdict import LossVerdict
from rlplace.graphs.capturing.micro.ways import Weights
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.detect import detect_host
from rlplace.measure.hosts.gpus import MOST_PARTS
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement, check_plan
from rlplace.measure.plan import Plan
from rlplace.measure.run.placed_step import PlacedStep
from rlplace.measure.run.residents import Residents
from rlplace.measure.run.threads import keep_freed_memory, usable_cores
from rlplace.measure.run.workers import Crew


class PlacedModel:
    """A captured step that runs as placed: a training step that updates its own parameters, or an inference.

    Parameters, buffers and optimizer state live where they were placed; `state_dict` brings them back. It runs the
    plan that was measured: the same devices, orders and transfers.

    Args:
        graph: captured from the model.
        host: of this machine.
        plan: what runs.
        seed: of random ops: each draws from (seed, op, step), the same numbers on all devices of one kind.
        op_order: in which the plan was searched, one of `OP_ORDERS`; None where that is not known.
        step_time_s: of the plan, as it was measured or simulated; None where that is not known.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        *,
        seed: int = 0,
        op_order: str | None = None,
        step_time_s: float | None = None,
    ) -> None:
        self._op_order, self._step_time_s = op_order, step_time_s
        keep_freed_memory()
        self._program = require_program(graph)
        self._graph, self._plan = graph, check_plan(graph, host.num_devices, plan)
        self._residents = Residents(graph, host, seed=seed)
        self._crew = Crew(host.devices)
        self._step = PlacedStep(graph, host, plan, self._residents, self._crew, seed=seed)
        self._step.load()
        sources = self._program.sources.items()
        self._inputs = InputCutter(graph)
        self._state = {source.key: op for op, source in sources if source.kind in ("parameter", "buffer")}
        self._arguments = Arguments(self._program.origin)
        self.num_steps = 0

    def __call__(self, *args: Any, targets: Any = None, **kwargs: Any) -> Any:
        """Runs one step: the loss of a training step, or the model's output.

        Args:
            args: inputs as they were captured: the same structure, shapes and dtypes, and the same values of what is
                no tensor.
            targets: labels of this batch, where the step was captured with targets.
            kwargs: inputs, likewise.

        Raises:
            InvalidValue: inputs or targets of another structure, shape or dtype, or another value of what is no tensor.
            RunnerError: an op failed.
        """
        tensors = self._arguments.tensors(args, kwargs, targets)
        for op, tensor in self._inputs.by_op(tensors):
            self._residents.set_tensor(op, int(self._plan.devices[op]), tensor)
        self._step.run(self.num_steps)
        self.num_steps += 1
        with self._residents.settled():
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), self._step.result)

    @property
    def num_micro_batches(self) -> int:
        """Slices that a step cuts its batch into; 1 where it is whole."""
        return self._graph.num_micro_batches

    @property
    def op_order(self) -> str | None:
        """The order of ops that was chosen, one of `OP_ORDERS`; None where that is not known."""
        return self._op_order

    @property
    def step_time_s(self) -> float | None:
        """Seconds of a step when the plan was found, measured, or simulated; None where that is not known."""
        return self._step_time_s

    @property
    def verdict(self) -> LossVerdict | None:
        """How micro-batches make the loss of their batch; None where the batch is whole."""
        micro = self._program.origin.micro
        if micro is None:
            return None
        is_sum = micro.loss == "separate" and all(weight == 1 for weight in micro.weights)
        weights: Weights = "sum" if is_sum else "mean"
        return LossVerdict(micro.loss, weights, micro.is_checked, micro.why, micro.has_own_statistics)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers, by dotted name."""
        with self._residents.settled():
            return {name: self._resident(name).detach().clone() for name in self._state}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrites parameters and buffers, by dotted name; names that are left out stay.

        Raises:
            UnknownName: no parameter or buffer has that name.
            InvalidValue: another shape or dtype.
        """
        for name, value in state.items():
            if name not in self._state:
                raise UnknownName("parameter", name, self._state)
            op = self._state[name]
            self._residents.set_tensor(op, int(self._plan.devices[op]), value.detach())

    def copy_to(self, model: nn.Module) -> None:
        """Writes parameters and buffers back into `model`."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad(), self._residents.settled():
            for name in self._state:
                named[name].copy_(self._resident(name))

    def close(self) -> None:
        """Ends its threads."""
        self._crew.stop()

    def _resident(self, name: str) -> torch.Tensor:
        op = self._state[name]
        return self._residents.tensor(op, int(self._plan.devices[op]))


def to_step(
    model: nn.Module, graph: OpGraph, placement: Placement, *, host: Host | None = None, seed: int = 0
) -> PlacedModel:
    """`model` as a callable that runs as placed, starting from its parameters as they are now.

    Args:
        model: the one that `graph` was captured from.
        graph: with its program.
        placement: made for `graph` and for a host of this machine.
        host: that host; by default the one that the placement was made for, whatever word of this machine named it.
        seed: of random ops.

    Raises:
        FingerprintMismatch: the placement was made for another graph or host.
    """
    host = matching_host(placement) if host is None else host
    placement.require(graph, host)
    placed = PlacedModel(graph, host, placement.plan, seed=seed)
    placed.load_state_dict({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return placed


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
    """Hosts of this machine with so many devices that a word names: its GPUs, any `cores:...`, with a gang or not."""
    num_gpus = cuda.num_gpus()
    for with_cpu in (False, True):
        num_parts, rest = divmod(num_devices - with_cpu, max(num_gpus, 1))
        if num_gpus and not rest and 1 <= num_parts <= MOST_PARTS:
            yield detect_host("cuda", num_parts=num_parts, with_cpu=with_cpu)
    for num_single, gangs in ((num_devices, False), (num_devices - 1, True)):  # a gang is one device more
        for cores_per_device in range(1, len(usable_cores()) // max(num_single, 1) + 1):
            if num_single > 0:
                yield detect_host("cores", num_single, cores_per_device, gangs=gangs)
