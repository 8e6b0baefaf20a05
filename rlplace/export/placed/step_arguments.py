"""What a call gives and what Python holds now, compared with the capture of a step.

`Arguments`: the arguments of a placed step. `InputCutter`: the part of each that an op reads.

`FollowedState`: what a captured step read of Python. Constants follow the user; the rest must stay as it is.
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, FunctionType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InvalidValue, UserError
from rlplace.graphs import OpGraph
from rlplace.graphs.capturing.capture import as_targets, has_numbers
from rlplace.graphs.capturing.constants import memory
from rlplace.graphs.capturing.trace import kept_traces
from rlplace.graphs.capturing.untouched import Change, Kept, ReadState, collection_of, modules_of_loss
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Origin
from rlplace.measure import Plan
from rlplace.measure.execute.residents import Residents
from rlplace.records import Described

_log = logging.getLogger(__name__)

OFTEN, MOST_APART = 64, 1024
"""State that changed without changing the graph is traced again at its next change; where this comes within so many
steps, after 1, 2, 4, ... steps, at last after the second number of them."""
MOST_SHOWN = 200
"""Characters of a call in a message."""


class Arguments:
    """The arguments of a captured step: their structure, and the values of those that are no tensors.

    Args:
        origin: of the capture.

    Attributes:
        captured: the tensors among the inputs, and the targets behind them.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin, self._call = origin, (origin.args, origin.kwargs)
        self._leaves, self._spec = pytree.tree_flatten(self._call)
        self.captured = [*(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)), *origin.targets]

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]:
        """The argument of `tensors`: args, kwargs and targets with these tensors, else as captured."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs, tuple(given)

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, *, has_targets: bool = True
    ) -> list[torch.Tensor]:
        """The tensors among the inputs, and the targets behind them, in the order of capture.

        Args:
            args: positional arguments of the model.
            kwargs: its keyword arguments, in any order.
            targets: further arguments of the loss.
            has_targets: whether targets are called for, where there were any.

        Raises:
            InvalidValue: another structure or number of them, another value of an argument that is no tensor, or a
                tensor without data.
        """
        if has_targets and "targets" in self._origin.kwargs:  # the model's own argument; capture takes no others then
            kwargs, targets = {**kwargs, "targets": targets}, None
        given = _in_order((args, kwargs), self._call)
        if pytree.tree_structure(given) != self._spec:
            given = _in_order(self._as_captured(*given), self._call)
        leaves, spec = pytree.tree_flatten(given)
        if spec != self._spec:
            more = len(self._origin.targets) and targets is None and len(given[0]) > len(self._origin.args)
            hint = (
                "Lists of numbers are no tensors: pass `torch.tensor(...)` of them."
                if has_numbers(given) and not has_numbers(self._call)
                else "Labels are given by name: `step(x, targets=y)`."
                if more
                else ""
            )
            raise InvalidValue(
                "inputs", _shown(given), f"{_shown(self._call)}, as captured", where="placed step", hint=hint
            )
        for position, (value, captured) in enumerate(zip(leaves, self._leaves, strict=True)):
            if not _agree(value, captured):
                paths, _ = pytree.tree_flatten_with_path(given)
                is_array = isinstance(value, np.ndarray)
                raise InvalidValue(
                    f"inputs{pytree.keystr(paths[position][0][1:])}",
                    _word(value),
                    "a tensor, as captured" if is_array else f"{_word(captured)!r}, as captured",
                    where="placed step",
                    hint="Pass `torch.from_numpy(...)` of it."
                    if is_array
                    else "Only tensors change from step to step: what is none is part of the captured graph. Capture "
                    "the model again with the other value.",
                )
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        found += self._checked_targets(targets) if has_targets else ()
        check_data(found, "placed step")
        return found

    def _as_captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call as it was captured: by position or by name, and without defaults; as given where none is."""
        try:
            signature = inspect.signature(self._origin.model.forward)
            given, captured = (signature.bind(*call[0], **call[1]).arguments for call in ((args, kwargs), self._call))
        except (TypeError, ValueError):  # it takes other arguments, or cannot tell which
            return args, kwargs
        kinds = {each.kind for each in signature.parameters.values()}
        only_one = {
            name: value for name, value in (given | captured).items() if not (name in given and name in captured)
        }
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} or not all(
            _agree(value, signature.parameters[name].default) for name, value in only_one.items()
        ):
            return args, kwargs
        values = {name: given.get(name, value) for name, value in captured.items()}
        by_position = list(values)[: len(self._origin.args)]
        named = {name: value for name, value in values.items() if name not in by_position}
        return tuple(values[name] for name in by_position), named

    def _checked_targets(self, targets: Any) -> tuple[torch.Tensor, ...]:
        names, count = self._origin.target_names, len(self._origin.targets)
        is_dict = isinstance(targets, Mapping)
        if count and targets is not None and (targets.keys() != {*names} if is_dict else names):
            expected = f"a dict of {', '.join(names)}" if names else "a tensor or a tuple of tensors"
            kind = "tensor" if isinstance(targets, torch.Tensor) else type(targets).__name__
            raise InvalidValue(
                "targets",
                Described(f"a dict of {', '.join(map(str, targets)) or 'nothing'}" if is_dict else f"a {kind}"),
                f"{expected}, as captured",
                where="placed step",
                hint="" if is_dict else "Without names, two targets could be taken for each other.",
            )
        given = as_targets({name: targets[name] for name in names} if is_dict and names else targets)
        if len(given) != count:
            raise InvalidValue(
                "targets",
                f"{len(given)} tensors" if given else None,
                f"{f'{count} tensors' if count else 'None'}, as captured",
                where="placed step",
                hint="Pass the labels of this batch: `step(*inputs, targets=...)`."
                if count
                else "Capture with `capture(..., targets=...)`, and let `loss_fn(output, *targets)` take them.",
            )
        return given


def check_data(tensors: Sequence[torch.Tensor], where: str) -> None:
    """Checks that the tensors of a call have data, and are in no transform.

    Args:
        tensors: inputs, then targets.
        where: the kind of callable.

    Raises:
        InvalidValue: one is on `meta`.
        UserError: the call is in a transform of `torch.func`, or one carries a tangent of forward-mode AD.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in (tensors if forward_ad._current_level >= 0 else ())
    ):
        raise UserError(
            f"a {where} runs what was captured, which `torch.func` (`jvp`, `vmap`, `grad`) and forward-mode AD cannot "
            "transform: call the model itself there"
        )
    for position, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise InvalidValue(
                f"device of tensor {position} of the call",
                Described("meta"),
                "one whose tensors have data",
                where=where,
            )


Index = EllipsisType | tuple[slice, ...]
"""What a tensor is indexed with for a part of it; for all of it, `...`."""


class InputCutter:
    """Gives every source op of inputs and targets its part of them: all, or the part of its micro-batch.

    Args:
        graph: with its program.
        ops: the ops that are given theirs; all by default.

    Attributes:
        positions: of each source op, which of the tensors it is of.
    """

    def __init__(self, graph: OpGraph, ops: Collection[int] | None = None) -> None:
        program = require_program(graph)
        self._whole = Arguments(program.origin).captured
        num_inputs = len(self._whole) - len(program.origin.targets)
        self._sources = [
            (op, source, int(source.key) + (num_inputs if source.kind == "target" else 0))
            for op, source in sorted(program.sources.items())
            if source.kind in ("input", "target") and (ops is None or op in ops)
        ]
        self.positions = {op: position for op, _, position in self._sources}

    @property
    def parts(self) -> tuple[tuple[Index, ...], ...]:
        """Of each tensor, inputs before targets, the parts that the ops are given."""
        found: list[dict[str, Index]] = [{} for _ in self._whole]
        for _, source, position in self._sources:
            cut = source.cut
            part = ... if cut is None else (slice(None),) * cut.dim + (slice(cut.start, cut.start + cut.size),)
            found[position][str(part)] = part
        return tuple(tuple(each.values()) for each in found)

    def by_op(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Source ops and their values, as views.

        Args:
            tensors: inputs, then targets, of the whole batch.

        Raises:
            InvalidValue: one that is to be cut has another shape or dtype than captured.
        """
        for op, source, position in self._sources:
            tensor, captured = tensors[position], self._whole[position]
            if source.cut is None:
                yield op, tensor
                continue
            if tensor.shape != captured.shape or tensor.dtype != captured.dtype:
                raise InvalidValue(
                    f"{source.kind}_{source.key}",
                    f"{tensor.dtype} {tuple(tensor.shape)}",
                    f"{captured.dtype} {tuple(captured.shape)}",
                    where="step input",
                    hint="A placed step takes the shapes that it was captured with, and cuts the batch itself.",
                )
            yield op, source.cut.of(tensor)


def _in_order(value: Any, captured: Any) -> Any:
    """`value` with its dicts in the order of `captured`, as far as they have the same keys."""
    if type(value) is not type(captured):
        return value
    if type(value) is dict:
        known = {key: _in_order(value[key], twin) for key, twin in captured.items() if key in value}
        return known | {key: item for key, item in value.items() if key not in known}
    if type(value) in (tuple, list) and len(value) == len(captured):
        return type(value)(_in_order(item, twin) for item, twin in zip(value, captured, strict=True))
    return value


def _word(value: object) -> Described:
    if isinstance(value, np.ndarray):
        return Described(f"a NumPy array ({value.dtype} {value.shape})")
    return Described("tensor" if isinstance(value, torch.Tensor) else repr(value))


def _shown(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Described:
    args, kwargs = pytree.tree_map(_word, call)
    shown = f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
    return Described(shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}...")


def _agree(value: object, captured: object) -> bool:
    if isinstance(captured, torch.Tensor):
        return isinstance(value, torch.Tensor)
    try:
        return value is captured or (type(value) is type(captured) and bool(value == captured))
    except (RuntimeError, TypeError, ValueError):  # it cannot be compared, or not to a truth
        return False


def layout(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
    """Type, shape, strides and device."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


@dataclass(frozen=True, eq=False)
class _Entry:
    """An entry of a module, an object, a collection, or of the variables that a function reads.

    Attributes:
        name: as of a `Change`.
        holder: what it is an entry of.
        key: of it there; its position in a list.
        before: its value when the state was read.
    """

    name: str
    holder: Kept
    key: Any
    before: object

    @property
    def now(self) -> object:
        """Its value now; None where it is gone."""
        now = self.holder.now
        if isinstance(now, dict):
            return now.get(self.key)
        return now[self.key] if self.key < len(now) else None


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
    entries: list[_Entry]
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
        entries, tuples = (defaultdict[object, list[_Entry]](list) for _ in range(2))
        holders = defaultdict[int, list[_Entry]](list)
        kept = () if self._read is None else self._read.kept.values()
        for entry in (_Entry(each.below(key), each, key, value) for each in kept for key, value in each.items):
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

    def _is_cache(self, entry: _Entry) -> bool:
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


def _replaced(entry: _Entry, expected: str) -> InvalidValue:
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
