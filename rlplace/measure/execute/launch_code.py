"""`StepCode`: from a plan to straight-line Python, one function a device, which the runner's threads execute.

`Expressions` writes the ATen calls and views of one device, `gang_signals` finds
where a gang and its members wait for each other, and `update_runs` the updates that one fused call does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.graphs import OpGraph, Program
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Call, Ref, Update, refs_in
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan


class StepCode:
    """Generated code of one plan.

    In the code, `t5` is tensor 5, `v7` view 7, `f3` the call of op 3, `u3` the updater of the run that op 3 ends, `c2`
    constant 2, `k4` channel 4 by its methods (`k4_send`, `k4_wait`, `k4_take`, `k4_done`, `k4_copied`, and where a GPU
    copies, `k4_arrived` before the first read), `s6` signal 6 (`s6_set`, `s6_wait`), `O` the results, `a8` takes
    gradient 8 out, `S` keeps the values of the first part of a step in two parts for the second part; in traced code
    `clock`, `B` and `E` record when each item began and ended, and `hold` holds a GPU back.

    Args:
        graph: with its program.
        host: the host that `plan` was made for.
        plan: the plan to run.
        is_traced: record the times of every op and transfer.
        traced: items whose times are recorded then; None for all.
        hold_every: if above 0, GPUs are held back before the first op and then after every so many of a device.
        hands_out: gradients that no update takes are handed to `a...` as soon as they are made.
        second: items of the second part of a step in two parts, the last ones of the plan's sequence; gradients are
            then results of the second part.

    Attributes:
        sources: by device: a module that defines `run(step)`, and `second(step)` for a step in two parts.
        line_items: by device: for each line of its source, the item that it belongs to, -1 for none.
        constants: the names `c...` and their values.
        items: by device: items of the plan's sequence (op i, or N + k), in program order.
        allocations: by device: (item, tensor) where a tensor starts to take memory on the device ...
        releases: ... and the item after whose end it is freed.
        acknowledged: transfers whose original is overwritten later in the step.
        is_handover: by transfer: the tensor itself goes over, no copy.
        update_runs: by device: updates that one call does, where the last of them stands.
        signals: by which a gang and its members take turns.
        results: of `O`: the results of the step, then, of a step in two parts, the gradients; and whether the second
            part makes each.

    Raises:
        InvalidValue: the graph has no program.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        *,
        is_traced: bool = False,
        traced: Collection[int] | None = None,
        hold_every: int = 0,
        hands_out: bool = False,
        second: Collection[int] | None = None,
    ) -> None:
        self._graph, self._host, self._plan, self._is_traced = graph, host, plan, is_traced
        self._traced = None if traced is None else frozenset(traced)
        self._hold_every = hold_every
        self._program: Program = require_program(graph)
        self.constants = Constants()
        sent = plan.transfer_tensor.tolist()
        self._outgoing = _grouped(zip(sent, range(len(sent)), strict=True))  # tensor -> transfers
        self._mutated = _grouped(zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True))
        updated = set(graph.mutation_tensor.tolist())
        self.acknowledged = frozenset(k for k, tensor in enumerate(sent) if tensor in updated)
        is_copy = {(r.source, r.destination): bool(r.links) for r in host.routes}
        sources, destinations = plan.devices[graph.tensor_op[plan.transfer_tensor]], plan.transfer_destination
        ends = [(host.devices[a], host.devices[b]) for a, b in zip(sources, destinations, strict=True)]
        self.is_handover = tuple(not is_copy[source.name, destination.name] for source, destination in ends)
        # by transfer: a copy that goes on once it was taken
        self._is_late = tuple("cuda" in (source.backend, destination.backend) for source, destination in ends)
        self._is_split, self._second = second is not None, frozenset(second or ())
        self.signals = gang_signals(graph, host, plan, self.is_handover, self._second)
        gradients = [*self._program.gradients.values(), *self._program.input_gradients.values()]
        of_second = [(ref, True) for ref in gradients] if self._is_split else []
        self.results = [*((ref, False) for ref in self._program.result_refs), *of_second]
        out = gradients if hands_out and self._program.optimizer is None else []
        makers = graph.tensor_op[[self._program.base(ref) for ref in out]].tolist()
        self._handed = _grouped(zip(makers, enumerate(out), strict=True))  # op -> gradients that it makes
        offsets, inputs = graph.input_offsets.tolist(), graph.input_tensors.tolist()
        self._reads = [inputs[offsets[op] : offsets[op + 1]] for op in range(graph.num_ops)]

        self.items: list[list[int]] = [[] for _ in host.devices]
        places = (*plan.devices.tolist(), *plan.transfer_destination.tolist())
        for item in plan.sequence.tolist():
            self.items[places[item]].append(item)
        self.update_runs = [
            update_runs(graph, self._program, each, self.signals.waits, self.signals.sets) for each in self.items
        ]
        self._runs = {updates[-1]: updates for each in self.update_runs for updates in each}  # by its last update
        self._last_of_run = {op: updates[-1] for updates in self._runs.values() for op in updates}
        parts = map(self._device_source, range(host.num_devices), self.items)
        self.sources, self.line_items, self.allocations, self.releases = zip(*parts, strict=True)

    def item_words(self, device: int, line: int) -> tuple[str, str]:
        """The op that a line of a device's code belongs to: its name, and all in words; empty where it is of none."""
        graph, n, items = self._graph, self._graph.num_ops, self.line_items[device]
        item = items[line - 1] if 0 < line <= len(items) else -1
        if item < 0:
            return "", ""
        op = item if item < n else int(graph.tensor_op[int(self._plan.transfer_tensor[item - n])])
        what, place = "op" if item < n else "the transfer of op", self._host.devices[device].name
        return graph.names[op], f"{what} {graph.names[op]!r} ({graph.targets[op]}) on {place}"

    def _device_source(
        self, device: int, items: list[int]
    ) -> tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        n, graph, program = self._graph.num_ops, self._graph, self._program
        copied: set[int] = set()
        last_uses = self._last_uses(device, items).items()
        dying = _grouped((self._last_of_run.get(item, item), tensor) for tensor, item in last_uses)
        lines: list[str] = []
        owners: list[int] = []  # the item of each line
        words = Expressions(program, device, self.constants)
        allocations: list[tuple[int, int]] = []
        releases: list[tuple[int, int]] = []
        received = {int(self._plan.transfer_tensor[item - n]): item - n for item in items if item >= n}
        resident = {int(graph.output_offsets[op]) for op in items if op < n and op in program.sources}
        # what the last step returned is let go of; of a step in two parts, who runs it took that out
        own = [index for index, (ref, _) in enumerate(self.results) if self._makes(ref, device)]
        lines += [f"{''.join(f'O[{index}] = ' for index in own)}None"] if own and not self._is_split else []
        lines += self._source_lines(items, words, is_second=False)
        owners += [-1] * len(lines)
        is_first, made = self._is_split, set[int]()
        on_the_way: dict[int, int] = {}  # tensor -> transfer that nothing has waited for
        is_held = self._hold_every > 0 and self._host.devices[device].backend == "cuda"
        for num_run, item in enumerate([each for each in items if each not in program.sources]):
            if is_first and item in self._second:
                is_first = False
                lines += self._turn(device, items, made, words, on_the_way)
                owners += [-1] * (len(lines) - len(owners))
            if is_held and num_run % self._hold_every == 0:
                lines.append("hold()")
            produced: tuple[int, ...] = ()
            lines += [f"s{signal}_wait()" for signal in self.signals.waits.get(item, ())]
            if item >= n:
                transfer = item - n
                tensor = int(self._plan.transfer_tensor[transfer])
                body = [f"t{tensor} = k{transfer}_take()"]
                lines.append(f"k{transfer}_wait()")
                if not self.is_handover[transfer]:
                    body += [f"k{transfer}_done()"] * (transfer in self.acknowledged)
                    produced = (tensor,)
                if self._is_late[transfer]:
                    on_the_way[tensor] = transfer
            else:
                read = dict.fromkeys(t for t in self._reads[item] if t in on_the_way)
                lines += [f"k{on_the_way.pop(t)}_arrived()" for t in read]
                body, produced = self._op_lines(item, program.calls[item], words)
                copies = (k for tensor in self._mutated[item] for k in self._outgoing[tensor] if k not in copied)
                lines += [f"k{k}_copied()" for k in copies]
                copied.update(k for tensor in self._mutated[item] for k in self._outgoing[tensor])  # told once a step
            lines += self._timed(item, body) if self._is_traced else body
            lines += [f"s{signal}_set()" for signal in self.signals.sets.get(item, ())]
            allocations += [(item, tensor) for tensor in produced]
            made.update(produced if item < n else (tensor,))
            lines += self._handed_out(item, words)
            lines += [f"k{k}_send(t{tensor})" for tensor in produced if item < n for k in self._outgoing[tensor]]
            for tensor in dying.get(item, ()):
                gone = words.forget(tensor)
                transfer = received.get(tensor, -1)
                if transfer in self.acknowledged and self.is_handover[transfer]:
                    lines.append(f"k{transfer}_done()")
                if tensor not in resident:
                    gone.append(f"t{tensor}")
                    if not (transfer >= 0 and self.is_handover[transfer]):
                        releases.append((item, tensor))
                if gone:
                    lines.append(f"del {', '.join(gone)}")
            owners += [item] * (len(lines) - len(owners))
        if is_first:
            lines += self._turn(device, items, made, words, on_the_way)
        lines += self._result_lines(device, words, is_second=self._is_split)
        indented = (line if line.startswith("def ") else f"    {line}" for line in lines)
        source = "\n".join(["def run(step):", *indented, "    return None", ""])
        owners = [-1, *owners, *[-1] * (len(lines) - len(owners) + 1)]
        return source, tuple(owners), tuple(allocations), tuple(releases)

    def _makes(self, ref: Ref, device: int) -> bool:
        return int(self._plan.devices[self._graph.tensor_op[self._program.base(ref)]]) == device

    def _source_lines(self, items: list[int], words: Expressions, *, is_second: bool) -> list[str]:
        """Sends source tensors to where they are read; the second part has the gradients of outputs, as targets."""
        lines: list[str] = []
        for op in items:
            source = self._program.sources.get(op) if op < self._graph.num_ops else None
            if source is not None and (self._is_split and source.kind == "target") == is_second:
                tensor = int(self._graph.output_offsets[op])
                lines += [f"k{k}_send(t{tensor})" for k in self._outgoing[tensor]]
                lines += self._handed_out(op, words)
        return lines

    def _turn(
        self, device: int, items: list[int], made: set[int], words: Expressions, on_the_way: dict[int, int]
    ) -> list[str]:
        """Between the parts of a step: results of the first are handed out, and tensors that the second reads kept.

        Copies that are on the way for the second part are waited for in the first: its end is that of all it launched.
        """
        n, program = self._graph.num_ops, self._program
        needed = {program.base(ref) for ref, is_second in self.results if is_second}
        needed.update(t for op in items if op < n and op in self._second for t in self._reads[op])
        given = {
            int(self._graph.output_offsets[op])
            for op in items
            if op < n and op in program.sources and program.sources[op].kind == "input"
        }
        kept = ", ".join(f"t{tensor}" for tensor in sorted(needed & (made | given)))
        comma = "," if kept else ""
        lines = [f"k{transfer}_arrived()" for transfer in on_the_way.values()]
        on_the_way.clear()
        lines += self._result_lines(device, words, is_second=False)
        words.forget_all()
        lines += [f"S.append(({kept}{comma}))", "return None", "def second(step):", f"({kept}{comma}) = S.pop()"]
        return [*lines, *self._source_lines(items, words, is_second=True)]

    def _handed_out(self, item: int, words: Expressions) -> list[str]:
        """Hands out the gradients that an item makes."""
        own = self._handed.get(item, ())
        return [line for index, ref in own for line in (*words.views([ref]), f"a{index}({words.name(ref)})")]

    def _result_lines(self, device: int, words: Expressions, *, is_second: bool) -> list[str]:
        own = [(k, ref) for k, (ref, part) in enumerate(self.results) if part == is_second and self._makes(ref, device)]
        return [line for k, ref in own for line in (*words.views([ref]), f"O[{k}] = {words.name(ref)}")]

    def _timed(self, item: int, body: list[str]) -> list[str]:
        """The code of an item between its marks; a run of updates is marked as one, for its first and its last."""
        if item in self._last_of_run and item not in self._runs:
            return body
        whole = self._runs.get(item, (item,))
        if self._traced is not None and self._traced.isdisjoint(whole):
            return ["pass", *body, "pass"]  # every line stays where it is: `item_words` needs not know what is traced
        return marked(whole[0], item, body)

    def _last_uses(self, device: int, items: list[int]) -> dict[int, int]:
        """Tensor to the last item on the device that touches it; results are never dropped."""
        n, graph = self._graph.num_ops, self._graph
        last: dict[int, int] = {}
        for item in [each for each in items if each not in self._program.sources]:
            if item >= n:
                last[int(self._plan.transfer_tensor[item - n])] = item
            else:
                made = range(graph.output_offsets[item], graph.output_offsets[item + 1])
                last |= dict.fromkeys((*self._reads[item], *made), item)
        kept = {*graph.output_tensors.tolist(), *(self._program.base(ref) for ref, _ in self.results)}
        own = {tensor for tensor in kept if self._plan.devices[graph.tensor_op[tensor]] == device}
        return {tensor: item for tensor, item in last.items() if tensor not in own}

    def _op_lines(self, op: int, call: Call | Update, words: Expressions) -> tuple[list[str], tuple[int, ...]]:
        if not isinstance(call, Update):
            return words.call(op, call)
        lines = words.views([call.gradient])
        if op in self._runs:
            gradients = [self._program.calls[each].gradient for each in self._runs[op]]  # type: ignore[union-attr]
            lines.append(f"u{op}({', '.join(map(words.name, gradients))})")
        return lines, ()


def marked(first: int, last: int, body: Sequence[str]) -> list[str]:
    """Lines between a mark of the clock for the beginning of item `first` and one for the end of item `last`."""
    return [f"B[{first}] = clock()", *body, f"E[{last}] = clock()"]


def _grouped(pairs: Iterable[tuple[int, Any]]) -> dict[int, list[Any]]:
    """The second ones of pairs by the first, in order; none for others."""
    groups: dict[int, list[Any]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


class Constants:
    """Values that Python has no literal for, each under a name: `c0`, `c1` and so on.

    Attributes:
        values: by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[tuple[str, str], str] = {}

    def name(self, value: Any) -> str:
        """The name of `value`, the same for all that print alike."""
        key = (type(value).__name__, repr(value))
        if key not in self._names:
            self._names[key] = f"c{len(self.values)}"
            self.values[self._names[key]] = value
        return self._names[key]


class Expressions:
    """The expressions of one device's lines, in the names of `StepCode`.

    A view is defined where it is first needed and is there until its tensor is dropped.

    Args:
        program: of the graph.
        device: index of the device.
        constants: those of the step, shared by its devices.
    """

    def __init__(self, program: Program, device: int, constants: Constants) -> None:
        self._program, self._device, self._constants = program, device, constants
        self._views: dict[int, list[int]] = defaultdict(list)  # base tensor -> views alive on this device

    def call(self, op: int, call: Call) -> tuple[list[str], tuple[int, ...]]:
        """Lines that run `op`, views that it needs among them, and the tensors that it makes."""
        lines = self.views(refs_in((call.args, call.kwargs)))
        given = self._arguments(call.args, call.kwargs)
        if call.takes_device and call.kwargs.get("device") is not None:
            given["device"] = f"device=D{self._device}"
        expression = f"f{op}({', '.join((*(['step'] if call.is_random else []), *given.values()))})"
        produced = tuple(tensor for tensor in call.outputs if tensor >= 0)
        if call.returns_tuple:
            names = [f"t{tensor}" if tensor >= 0 else "_" for tensor in call.outputs]
            comma = "," if len(names) == 1 else ""
            return [*lines, f"{', '.join(names)}{comma} = {expression}"], produced
        target = f"t{call.outputs[0]} = " if produced else ""
        return [*lines, f"{target}{expression}"], produced

    def views(self, refs: Iterable[Ref]) -> list[str]:
        """Lines that define the views that `refs` need and that do not exist yet on this device."""
        lines: list[str] = []
        for ref in refs:
            index = ref.id - self._program.num_tensors
            if index < 0 or index in self._views[self._program.views[index].base]:
                continue
            view = self._program.views[index]
            lines += self.views(refs_in((view.args, view.kwargs)))
            lines.append(f"v{index} = g{index}({', '.join(self._arguments(view.args, view.kwargs).values())})")
            self._views[view.base].append(index)
        return lines

    def name(self, ref: Ref) -> str:
        """The name of a tensor or view."""
        return f"t{ref.id}" if ref.id < self._program.num_tensors else f"v{ref.id - self._program.num_tensors}"

    def forget(self, tensor: int) -> list[str]:
        """Names of the views of `tensor`, which are there no more."""
        return [f"v{view}" for view in self._views.pop(tensor, ())]

    def forget_all(self) -> None:
        """Where another function begins, no view is there."""
        self._views.clear()

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[int | str, str]:
        """How arguments are written, by place or name."""
        positional = {place: self._literal(value) for place, value in enumerate(args)}
        return positional | {key: f"{key}={self._literal(value)}" for key, value in kwargs.items()}

    def _literal(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self.name(value)
        is_finite = type(value) is float and math.isfinite(value)
        if is_finite or value is None or isinstance(value, (bool, str)) or type(value) is int:
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if type(value) is tuple:
            return f"({''.join(self._literal(item) + ', ' for item in value)})"
        return self._constants.name(value)


@dataclass(frozen=True)
class GangSignals:
    """Signals of one step, 0 up to `count`.

    Attributes:
        sets: by item: signals that it sets when it is done.
        waits: by item: signals that it waits for.
        count: how many there are.
    """

    sets: Mapping[int, Sequence[int]]
    waits: Mapping[int, Sequence[int]]
    count: int


def gang_signals(
    graph: OpGraph, host: Host, plan: Plan, is_handover: Sequence[bool], second: Collection[int]
) -> GangSignals:
    """The signals by which gangs and their members take turns.

    A gang is busy when any member is: in plan order, its items wait for theirs and theirs for its.

    Args:
        graph: with its program.
        host: with its gangs.
        plan: made for both.
        is_handover: by transfer: it keeps no device busy.
        second: items of the second part of a step in two parts, the last ones of the plan's sequence.
    """
    program, n, indices = require_program(graph), graph.num_ops, host.device_index
    cores = [[indices[name] for name in device.members] or [d] for d, device in enumerate(host.devices)]
    sets: dict[int, list[int]] = defaultdict(list)
    waits: dict[int, list[int]] = defaultdict(list)
    last: dict[int, tuple[int, int]] = {}  # core -> (device, item)
    count, is_first = 0, True
    for item in plan.sequence.tolist():
        if item in program.sources or (item >= n and is_handover[item - n]):
            continue
        if is_first and item in second:  # it begins when all devices are done with the first part
            is_first = False
            last.clear()
        device = int(plan.devices[item] if item < n else plan.transfer_destination[item - n])
        for other, earlier in sorted({last[core] for core in cores[device] if core in last}):
            if other != device:
                sets[earlier].append(count)
                waits[item].append(count)
                count += 1
        last.update(dict.fromkeys(cores[device], (device, item)))
    return GangSignals(dict(sets), dict(waits), count)


Run = tuple[int, ...]
"""Update ops in plan order, of parameters of one dtype."""


def update_runs(
    graph: OpGraph, program: Program, items: Sequence[int], waits: Collection[int], sets: Collection[int]
) -> tuple[Run, ...]:
    """Every update among `items`, in runs as long as may be.

    Nothing lies between the updates of a run, so that doing all of them where the last one stands keeps the plan: no
    tensor is made meanwhile, and only later ops of the same device wait for an update. PyTorch's fused kernels
    take each parameter by itself, so a run equals its updates one by one, to the bit.

    Args:
        graph: of the plan.
        program: of the graph.
        items: one device's, in plan order.
        waits: items that begin with a signal of a gang: they begin a run.
        sets: items that end with one: they end a run.
    """
    runs: list[list[int]] = []
    open_dtype = ""  # of the run that the next update may join
    for item in items:
        if item in program.sources:  # no code is made of it
            continue
        call = program.calls.get(item) if item < graph.num_ops else None
        if not isinstance(call, Update):
            open_dtype = ""
            continue
        dtype = graph.tensor_dtypes[call.parameter.id]
        # a gradient of another layout is copied for the kernel: one at a time, as its workspace says
        is_alone = bool(graph.workspace_bytes[item])
        if is_alone or item in waits or dtype != open_dtype:
            runs.append([])
        runs[-1].append(item)
        open_dtype = "" if is_alone or item in sets else dtype
    return tuple(map(tuple, runs))
