"""`HeldConstants`: what a graph holds of tensors that the user keeps, and may change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rlplace.errors import InvalidValue
from rlplace.graphs.capturing.untouched import modules_of_loss
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.residents import Residents
from rlplace.measure.plan import Plan


@dataclass
class _Slot:
    """An attribute of a module that holds a constant."""

    holder: dict[str, Any]
    key: str


@dataclass
class _Held:
    """A constant of the graph, and the tensor of the user that it shows."""

    op: int
    device: int
    tensor: torch.Tensor
    slot: _Slot | None
    address: int
    version: int


class HeldConstants:
    """The constants of one graph: a teacher in the loss, weights of classes, tensors in plain attributes.

    Where they stay in the memory of the CPU they are the user's own tensors, so every step sees what they hold now. A
    copy on a GPU is renewed once its tensor was changed in place, and so is any constant that was given other memory
    (`tensor.data = ...`), or whose attribute was given another tensor that is laid out alike.

    Args:
        graph: with its program.
        plan: where the constants are.
        residents: of the graph.
        model: whose attributes are followed, where it is a copy of the one that was captured.
    """

    def __init__(self, graph: OpGraph, plan: Plan, residents: Residents, model: nn.Module | None = None) -> None:
        program = require_program(graph)
        self._residents = residents
        origin = program.origin
        slots = {id(each.holder[each.key]): each for each in _slots(origin.model, origin.loss_fn, model)}
        self._folded = [(each, slots.get(id(each.tensor))) for each in program.folded]
        self._all = [
            _Held(op, int(plan.devices[op]), source.held, slots.get(id(source.held)), *_state(source.held))
            for op, source in program.sources.items()
            if source.held is not None and not isinstance(source.held, FakeTensor)
        ]

    def tensors(self, ops: set[int]) -> list[torch.Tensor]:
        """The constants among `ops`, as the user holds them."""
        return [each.tensor for each in self._all if each.op in ops]

    def follow(self) -> bool:
        """Takes over what was changed since the last time; whether the code of the step must be bound anew.

        Raises:
            InvalidValue: a tensor was changed that the capture read as a number.
        """
        for folded, slot in self._folded:
            found = None if slot is None else slot.holder.get(slot.key)
            is_other = slot is not None and found is not folded.tensor and not _agree(found, folded.tensor)
            if folded.tensor._version != folded.version or is_other:
                raise InvalidValue(
                    folded.name,
                    "changed since the capture",
                    "the values that it had then",
                    where="placed step",
                    hint="The capture read them as numbers (`.item()`, `float(...)`): use the tensor itself in the "
                    "model or the loss, or capture again.",
                )
        is_moved = False
        for each in self._all:
            now = each.tensor
            if each.slot is not None:
                found = each.slot.holder.get(each.slot.key)
                if found is not now and isinstance(found, torch.Tensor) and _layout(found) == _layout(now):
                    now = found  # of another layout, it is for inputs of another shape: a mask that was made once
            address, version = _state(now)
            if now is each.tensor and address == each.address and version == each.version:
                continue
            if self._residents.is_own(each.op, each.device):
                if address != each.address:
                    self._residents.adopt(each.op, each.device, now.detach())
                    is_moved = True
            else:
                self._residents.set_tensor(each.op, each.device, now.detach())
            each.tensor, each.address, each.version = now, address, version
        return is_moved


def _slots(model: nn.Module, loss_fn: Any, copied: nn.Module | None) -> Iterator[_Slot]:
    """Attributes of modules that hold tensors; those of a copy in the place of the model's own."""
    copies = None if copied is None else dict(copied.named_modules())
    for path, module in model.named_modules():
        followed = module if copies is None else copies.get(path, module)
        yield from _filled(vars(module), followed.__dict__)
    for _, module in modules_of_loss(model, loss_fn):
        for holder in (module._parameters, module._buffers, module.__dict__):
            yield from _filled(holder, holder)


def _filled(own: Mapping[str, Any], followed: dict[str, Any]) -> Iterator[_Slot]:
    for key, value in own.items():
        if isinstance(value, torch.Tensor) and followed.get(key) is value:
            yield _Slot(followed, key)


def _agree(found: object, tensor: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and _layout(found) == _layout(tensor) and torch.equal(found, tensor)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
