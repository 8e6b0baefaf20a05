"""`FollowedState`: what a captured step read of Python. Constants follow the user; the rest must stay as it is."""

from __future__ import annotations

import dis
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rlplace.errors import CaptureError, InvalidValue
from rlplace.export.placed.step_arguments import layout
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.trace import kept_traces
from rlplace.graphs.capturing.untouched import Change, Entry, ReadState, collection_of, modules_of_loss
from rlplace.graphs.interpreter import require_program
from rlplace.measure import Plan
from rlplace.measure.execute.residents import Residents
from rlplace.records import Described

_log = logging.getLogger(__name__)

OFTEN, MOST_APART = 64, 1024
"""State that changed without changing the graph is traced again at its next change; where this comes within so many
steps, after 1, 2, 4, ... steps, at last after the second number of them."""


@dataclass
class _Constant:
    """A constant of the graph.

    Attributes:
        device: that reads it.
        entries: where the user holds it.
        tensor: of the user, which the step reads, or has a copy of.
        address: of its memory as it was then.
    """

    device: int
    entries: list[Entry]
    tensor: torch.Tensor
    address: tuple[int, int]


class FollowedState:
    """What one graph read of Python: a teacher in the loss, weights of classes, tensors and numbers in attributes.

    Constants that stay in the memory of the CPU are the user's own tensors, so every step sees their current values. A
    copy on a GPU is renewed once its tensor was changed in place, and so is any constant that was given other memory
    (`tensor.data = ...`), or whose attribute, or entry of a list or a dict, was given another tensor that is laid out
    alike. Another collection or module in the place of one that held a constant is refused. After any other change the
    step is traced again, and refused if it would be another one.

    Args:
        graph: with its program.
        plan: where the constants are.
        residents: of the graph.
        held: the devices whose constants are followed; all by default.
        where: the kind of callable, for messages.
    """

    def __init__(
        self,
        graph: OpGraph,
        plan: Plan,
        residents: Residents,
        *,
        held: Collection[int] | None = None,
        where: str = "placed step",
    ) -> None:
        self._graph, self._residents, self._where = graph, residents, where
        program = require_program(graph)
        origin = program.origin
        self._read: ReadState | None = origin.read
        self._harmless = set[str]()
        self._number, self._last, self._apart = 0, -OFTEN, 1
        modules = (*origin.model.named_modules(), *modules_of_loss(origin.model, origin.loss_fn))
        self._kinds = {path: type(module) for path, module in modules}
        # Entries that hold a tensor, and tuples that do, by its memory; and entries that hold a collection or a module.
        entries, tuples = (defaultdict[object, list[Entry]](list) for _ in range(2))
        holders = defaultdict[int, list[Entry]](list)
        for entry in () if self._read is None else self._read.entries():
            for value in _with_items(entry.before):
                owner, _ = collection_of(value)
                holders[id(value if owner is None else owner)].append(entry)
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    (entries if value is entry.before else tuples)[memory(value)].append(entry)
        self._constants = {
            op: _Constant(int(plan.devices[op]), entries[memory(source.held)], source.held, _address(source.held))
            for op, source in program.sources.items()
            if source.held is not None and not isinstance(source.held, FakeTensor)
            if held is None or int(plan.devices[op]) in held
        }
        self._folded = [(each, entries[memory(each.tensor)]) for each in program.folded]
        # All that is around a constant, from the collection that holds it up to the model or the loss.
        tensors = [*(each.tensor for each in self._constants.values()), *(each.tensor for each in program.folded)]
        read = [memory(tensor) for tensor in tensors]
        left = [each for found in (entries, tuples) for one in read for each in found[one]]
        self._around = {(id(each.holder), each.key): each for one in read for each in tuples[one]}
        while left:
            for each in holders[id(left.pop().holder.owner)]:
                if (place := (id(each.holder), each.key)) not in self._around:
                    self._around[place] = each
                    left.append(each)

    def tensors(self, ops: Collection[int]) -> list[torch.Tensor]:
        """The constants among `ops`, as the user holds them."""
        return [each.tensor for op, each in self._constants.items() if op in ops]

    def follow(self, again: Callable[[], OpGraph], free: Collection[str] = ()) -> bool:
        """Takes over changes since the last time; whether the code of the step must be bound anew.

        Args:
            again: captures the step as it is now.
            free: names of entries that may change.

        Raises:
            InvalidValue: a tensor was changed that the capture read as a number; one, or its holder, was replaced by an
                object that the graph cannot take; or the step would be another one today.
        """
        self._number += 1
        is_same = self._read is None or self._read.is_same()
        for each in () if is_same else self._around.values():
            if each.now is not each.before:
                raise _replaced(each, "what was captured: it holds constants of the graph")
        for folded, entries in self._folded:
            if folded.tensor._version != folded.version or not (
                is_same or all(_are_equal(entry.now, folded.tensor) for entry in entries)
            ):
                raise InvalidValue(
                    folded.name,
                    "changed since the capture",
                    "the values that it had then",
                    where=self._where,
                    hint="The capture read them as numbers (`.item()`, `float(...)`): use the tensor itself in the "
                    "model or the loss, or capture again.",
                )
        now = {op: each.tensor if is_same else self._held_now(each) for op, each in self._constants.items()}
        if not is_same:
            self._compare(again, now, free)
        is_moved = False
        for op, constant in self._constants.items():
            tensor, address = now[op], _address(now[op])
            if tensor is constant.tensor and address == constant.address:
                continue
            if not self._residents.is_own(op, constant.device):
                self._residents.set_tensor(op, constant.device, tensor.detach())
            elif address[0] != constant.address[0]:
                self._residents.adopt(op, constant.device, tensor.detach())
                is_moved = True
            constant.tensor, constant.address = tensor, address
        return is_moved

    def _held_now(self, constant: _Constant) -> torch.Tensor:
        """The tensor that the user holds now in all entries of a constant."""
        now = constant.tensor
        for entry in constant.entries:
            if _shows(other := entry.now, now):
                continue
            if not isinstance(other, torch.Tensor) or layout(other) != layout(now):
                if self._is_cache(entry):
                    continue
                looks = f"{str(now.dtype).removeprefix('torch.')} {tuple(now.shape)}"
                raise _replaced(entry, f"a tensor of {looks}, as captured")
            if any(not _shows(another.now, other) for another in constant.entries):
                raise _replaced(entry, "the tensor that is in its other places, too")
            now = other
        return now

    def _is_cache(self, entry: Entry) -> bool:
        """Whether methods of its module set it: it may then be for inputs of another shape, as a mask made once is."""
        kind = self._kinds.get(entry.holder.name, object) if isinstance(entry.holder.owner, dict) else object
        functions = [each for base in kind.__mro__ for each in vars(base).items()]
        return any(
            step.opname == "STORE_ATTR" and step.argval == entry.key
            for name, each in functions
            if name != "__init__" and isinstance(each, FunctionType) and not each.__module__.startswith("torch.")
            for step in dis.get_instructions(each)
        )

    def _compare(
        self, again: Callable[[], OpGraph], constants: Mapping[int, torch.Tensor], free: Collection[str]
    ) -> None:
        """Traces the step anew where state other than constants has changed, and refuses it where it is another one."""
        assert self._read is not None
        changed, since = {each.name: each for each in self._read.differences(free)}, self._number - self._last
        if not changed:
            self._read.accept()
        elif not changed.keys() <= self._harmless or since >= self._apart:
            try:
                with kept_traces():  # as one that is tried: not compared with plain PyTorch again
                    graph = again()
            except CaptureError as error:
                raise self._refusal(changed) from error
            if not self._is_alike(graph, constants):
                raise self._refusal(changed)
            self._apart = min(2 * self._apart, MOST_APART) if since < OFTEN else 1
            self._read, self._last = require_program(graph).origin.read, self._number
            self._harmless |= changed.keys()
            _log.log(
                logging.WARNING if since < OFTEN else logging.INFO,
                "%s changed, which leaves the %s as it is. Its next value is looked at after %d steps: where it "
                "matters, pass it as a tensor",
                ", ".join(changed),
                self._where,
                self._apart,
            )

    def _is_alike(self, graph: OpGraph, constants: Mapping[int, torch.Tensor]) -> bool:
        """Whether another capture of the model computes the same, with the constants as they are now."""
        before, now = require_program(self._graph), require_program(graph)
        told = [
            repr((each.calls, each.views, each.result, each.gradients, each.input_gradients)) for each in (before, now)
        ]
        return (self._graph.fingerprint, told[0]) == (graph.fingerprint, told[1]) and all(
            _are_equal(now.sources[op].held, constants.get(op, source.held))
            for op, source in before.sources.items()
            if source.held is not None
        )

    def _refusal(self, changed: Mapping[str, Change]) -> InvalidValue:
        names = sorted(changed, key=lambda name: name in self._harmless)
        now, before = (
            each
            if isinstance(each, bool | int | float | str | tuple | None)
            else Described(f"{a} {type(each).__name__}")
            for a, each in (("another", changed[names[0]].value), ("a", changed[names[0]].before))
        )
        return InvalidValue(
            names[0],
            now,
            f"{before!r}, as captured",
            where=self._where,
            hint=f"With {' and '.join(names)} as now, the step is another one. Call `recapture()` to go on with that; "
            "what changes from step to step is passed as a tensor, among the inputs or targets.",
        )


def _with_items(value: object) -> Iterator[object]:
    """A value; of a tuple, what is in it, too."""
    yield value
    for item in value if isinstance(value, tuple) else ():
        yield from _with_items(item)


def _replaced(entry: Entry, expected: str) -> InvalidValue:
    hint = "Write new values in place (`copy_`, `load_state_dict`), or capture again."
    return InvalidValue(entry.name, "replaced since the capture", expected, where="placed step", hint=hint)


def _are_equal(found: object, tensor: torch.Tensor) -> bool:
    """Whether `found` is a tensor of the same layout and values."""
    if not isinstance(found, torch.Tensor) or layout(found) != layout(tensor):
        return False
    return isinstance(tensor, FakeTensor) or memory(found) == memory(tensor) or torch.equal(found, tensor)


def _shows(found: object, tensor: torch.Tensor) -> bool:
    """Whether `found` is the tensor, or a view of the same memory with the same layout."""
    return found is tensor or (isinstance(found, torch.Tensor) and memory(found) == memory(tensor))


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins, and the count of writes to it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
