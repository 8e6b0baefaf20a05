"""What stays on a device from step to step: parameters, buffers, inputs, constants and optimizer state."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rlplace.errors import InvalidValue
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import Updater, UpdateState
from rlplace.graphs.program import Update
from rlplace.measure.hosts.host import Device, Host


def torch_device(device: Device) -> torch.device:
    """The PyTorch device behind a `Device`; every CPU core is `cpu`."""
    return torch.device(device.name if device.backend == "cuda" else "cpu")


class Residents:
    """Tensors of source ops and states of updates, each made where it is first asked for.

    Cores share one memory, so plans over cores share one set; the user's own tensors are copied, never touched.
    """

    def __init__(self, graph: OpGraph, host: Host, *, seed: int = 0) -> None:
        self._graph = graph
        self._host = host
        self._program = require_program(graph)
        self._seed = seed
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._states: dict[tuple[int, str], UpdateState] = {}

    def tensor(self, op: int, device: int) -> torch.Tensor:
        """The tensor of source op `op` on `device`."""
        place = torch_device(self._host.devices[device])
        key = (op, str(place))
        if key not in self._tensors:
            self._tensors[key] = self._original(op).to(place, copy=True)
            _settle(place)
        return self._tensors[key]

    def updater(self, op: int, device: int) -> Updater:
        """The function that update op `op` runs on `device`: it takes the gradient."""
        call = self._program.calls[op]
        assert isinstance(call, Update)
        assert self._program.optimizer is not None
        parameter = self.tensor(int(self._graph.tensor_op[call.parameter.id]), device)
        key = (op, str(parameter.device))
        if key not in self._states:
            self._states[key] = UpdateState(self._program.optimizer, parameter)
            _settle(parameter.device)
        return self._states[key].updater(parameter)

    def reset(self) -> None:
        """What steps change is as it was at capture, and optimizers before their first step."""
        changed = set(self._graph.tensor_op[self._graph.mutation_tensor].tolist())
        with torch.no_grad():
            for (op, _), tensor in self._tensors.items():
                if op in changed:
                    tensor.copy_(self._original(op))
        for state in self._states.values():
            state.reset()
        for device in self._host.devices:
            _settle(torch_device(device))

    def set_tensor(self, op: int, device: int, value: torch.Tensor) -> None:
        """Overwrites the value of source op `op` on `device`, in place.

        Raises:
            InvalidValue: another shape or dtype than captured.
        """
        resident = self.tensor(op, device)
        if value.shape != resident.shape or value.dtype != resident.dtype:
            raise InvalidValue(
                self._graph.names[op],
                f"{value.dtype} {tuple(value.shape)}",
                f"{resident.dtype} {tuple(resident.shape)}",
                where="step input",
                hint="A placed step takes the shapes that it was captured with.",
            )
        with torch.no_grad():
            resident.copy_(value)
        _settle(resident.device)

    def _original(self, op: int) -> torch.Tensor:
        value = self._program.sources[op].value
        if not isinstance(value, FakeTensor):
            return value
        generator = torch.Generator().manual_seed(self._seed + op)
        if value.dtype.is_floating_point:
            return (torch.randn(tuple(value.shape), generator=generator) * 0.02).to(value.dtype)
        return torch.zeros(tuple(value.shape), dtype=value.dtype)


def _settle(place: torch.device) -> None:
    """Waits for what the calling thread launched there: the streams of a placed step would not."""
    if place.type == "cuda":
        torch.cuda.current_stream(place).synchronize()
