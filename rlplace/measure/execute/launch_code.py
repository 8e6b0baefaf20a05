"""`StepCode`: from a plan to straight-line Python, one function a device, which the runner's threads execute.

The lines are those of the rank's program (`rank_programs`), in its order. `Expressions` writes the ATen calls and views
of one device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlplace.graphs import OpGraph, Program
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.program import Call, Ref, refs_in
from rlplace.measure.execute.rank_programs import Instruction, grouped, rank_programs
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan


class StepCode:
    """Generated code of one plan.

    In the code, `t5` is tensor 5, `v7` view 7, `f3` the call of op 3, `u3` the updater of the run that op 3 ends, `c2`
    constant 2, `k4` channel 4 by its methods (`k4_send`, `k4_wait`, `k4_take`, `k4_done`, `k4_copied`, where a GPU
    copies `k4_arrived` before the first read, and where it sends to another process `k4_made` behind the producer),
    `s6` signal 6 (`s6_set`, `s6_wait`), `O` the results, `a8` takes gradient 8 out, `S` keeps the values of the first
    part of a step in two parts for the second part; in traced code `clock`, `B` and `E` record when each item began and
    ended, and `hold` holds a GPU back.

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
        has_slots: copies between devices that share a memory go through slots: their producer makes them, and they are
            read there.
        is_wired: all others go as messages.
        sends_wait: a send may wait for its receive: both stand at the transfer's own place.
        devices: those whose code is wanted; all by default.

    Attributes:
        ranks: the program of each device.
        sources: by device: a module that defines `run(step)`, and `second(step)` for a step in two parts.
        line_items: by device: for each line of its source, the item that it belongs to, -1 for none.
        constants: the names `c...` and their values.
        items: by device: items of the plan's sequence (op i, or N + k), in program order.
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
        has_slots: bool = False,
        is_wired: bool = False,
        sends_wait: bool = False,
        devices: Collection[int] | None = None,
    ) -> None:
        self._is_wired = is_wired
        self._graph, self._host, self._plan, self._is_traced = graph, host, plan, is_traced
        self._traced = None if traced is None else frozenset(traced)
        self._hold_every = hold_every
        self._program: Program = require_program(graph)
        self.constants = Constants()
        self._is_split, self._second = second is not None, frozenset(second or ())
        gradients = [*self._program.gradients.values(), *self._program.input_gradients.values()]
        of_second = [(ref, True) for ref in gradients] if self._is_split else []
        self.results = [*((ref, False) for ref in self._program.result_refs), *of_second]
        out = gradients if hands_out and self._program.optimizer is None else []
        makers = graph.tensor_op[[self._program.base(ref) for ref in out]].tolist()
        self._handed = grouped(zip(makers, enumerate(out), strict=True))  # op -> gradients that it makes
        kept = [self._program.base(ref) for ref, _ in self.results]
        self.ranks = ranks = rank_programs(graph, host, plan, kept=kept, second=self._second, sends_wait=sends_wait)
        self._has_slot = [has_slots and each for each in ranks.has_slot]  # by transfer
        self.signals, self.is_handover, self.update_runs = ranks.signals, ranks.is_handover, ranks.update_runs
        sent, updated = plan.transfer_tensor.tolist(), set(graph.mutation_tensor.tolist())
        # by slots: when a send returns, its copy has been made; of a message, the sender knows by itself
        is_silent = has_slots or is_wired
        self.acknowledged = frozenset(k for k, tensor in enumerate(sent) if tensor in updated and not is_silent)
        sources = ranks.sources
        backends = [device.backend for device in host.devices]
        ends = zip(sources, plan.transfer_destination.tolist(), self._has_slot, strict=True)
        # by transfer: a copy that goes on once it was taken
        self._is_late = [(is_wired and not slot) or "cuda" in (backends[a], backends[b]) for a, b, slot in ends]
        # transfers of tensors whose making, or arrival at a relay, a GPU marks, as they are sent later
        marked = {k for k, source in enumerate(sources) if sends_wait and backends[source] == "cuda"}
        makers = plan.devices[graph.tensor_op[plan.transfer_tensor]].tolist()
        self._sent_on = frozenset(k for k in marked if sources[k] != makers[k])
        self._marked = grouped((sent[k], k) for k in sorted(marked - self._sent_on))
        offsets, inputs = graph.input_offsets.tolist(), graph.input_tensors.tolist()
        self._reads = [inputs[offsets[op] : offsets[op + 1]] for op in range(graph.num_ops)]
        self._runs = {updates[-1]: updates for each in self.update_runs for updates in each}  # by its last update
        self._received = [dict[int, int]() for _ in host.devices]  # by device: transfer of each tensor that it receives
        for k, (tensor, device) in enumerate(zip(sent, plan.transfer_destination.tolist(), strict=True)):
            self._received[device][tensor] = k
        self.items = [ranks.items(device) for device in range(host.num_devices)]
        wanted = range(host.num_devices) if devices is None else devices
        made = (self._device_source(d) if d in wanted else ("", ()) for d in range(host.num_devices))
        self.sources, self.line_items = zip(*made, strict=True)

    def item_words(self, device: int, line: int) -> tuple[str, str]:
        """The op that a line of a device's code belongs to: its name, and all in words; empty where it is of none."""
        graph, n, items = self._graph, self._graph.num_ops, self.line_items[device]
        item = items[line - 1] if 0 < line <= len(items) else -1
        if item < 0:
            return "", ""
        op = item if item < n else int(graph.tensor_op[int(self._plan.transfer_tensor[item - n])])
        what, place = "op" if item < n else WAITING, self._host.devices[device].name
        words = f"{what} {graph.names[op]!r} ({graph.targets[op]}) on {place}"
        if item >= n:
            source, to = self.ranks.sources[item - n], int(self._plan.transfer_destination[item - n])
            peer = self._host.devices[to if device == source else source].name
            words += f" ({'to' if device == source else 'from'} {peer})"
        return graph.names[op], words

    def _device_source(self, device: int) -> tuple[str, tuple[int, ...]]:
        words = Expressions(self._program, device, self.constants)
        # what the last step returned is let go of; of a step in two parts, who runs it took that out
        own = [index for index, (ref, _) in enumerate(self.results) if self._makes(ref, device)]
        lines = [f"{''.join(f'O[{index}] = ' for index in own)}None"] if own and not self._is_split else []
        handed = (op for op in self.items[device] if op in self._handed and op in self._program.sources)
        lines += [line for op in handed for line in self._handed_out(op, words)]
        lines += self._given_lines(device, is_second=False)
        owners = [-1] * len(lines)  # the item of each line
        is_first, made = self._is_split, set[int]()
        is_held = self._hold_every > 0 and self._host.devices[device].backend == "cuda"
        num_run = 0
        waits: list[str] = []  # of the next op
        for instruction in self.ranks.programs[device]:
            kind, item, tensors = instruction
            if is_first and item in self._second:
                is_first = False
                lines += [*waits, *self._turn(device, made, words)]
                owners += [-1] * (len(lines) - len(owners))
                waits = []
            if kind == "wait" and self._has_slot[item - self._graph.num_ops]:
                lines += self._taken_lines(device, item - self._graph.num_ops)
                owners += [item] * (len(lines) - len(owners))
                continue
            if kind == "wait":
                waits += self._wait_lines(device, item - self._graph.num_ops)
                continue
            if kind in ("op", "updates", "receive"):
                lines += ["hold()"] * (is_held and num_run % self._hold_every == 0)
                num_run += 1
                made.update(tensors)
                first = self._runs[item][0] if kind == "updates" else item
                lines += [*(f"s{signal}_wait()" for signal in self.signals.waits.get(first, ())), *waits]
                waits = []
            if kind == "send":  # of a relay
                lines += waits
                waits = []
            lines += self._lines(device, instruction, words)
            owners += [item] * (len(lines) - len(owners))
        lines += [*waits, *(self._turn(device, made, words) if is_first else [])]
        lines += self._result_lines(device, words, is_second=self._is_split)
        indented = (line if line.startswith("def ") else f"    {line}" for line in lines)
        source = "\n".join(["def run(step):", *indented, "    return None", ""])
        return source, (-1, *owners, *[-1] * (len(lines) - len(owners) + 1))

    def _lines(self, device: int, instruction: Instruction, words: Expressions) -> list[str]:
        """The code of one instruction of a device's program, but for waits."""
        kind, item, tensors = instruction
        k = item - self._graph.num_ops  # of a transfer
        if kind == "send":
            body = [*[f"k{k}_made()"] * (k in self._sent_on), f"k{k}_send(t{tensors[0]})"]
            return self._timed((item,), item, body) if self._has_slot[k] else body
        if kind == "free":
            return [line for tensor in tensors for line in self._free_lines(device, tensor, words)]
        before: list[str] = []
        if kind == "receive" and self._has_slot[k]:  # its producer does all of it
            return []
        if kind == "receive":
            before = [f"k{k}_wait()"] * (not self._is_wired)
            is_told = k in self.acknowledged and not self.is_handover[k]
            body = [f"t{tensors[0]} = k{k}_take()", *[f"k{k}_done()"] * is_told]
        elif kind == "updates":
            gradients = [self._program.calls[op].gradient for op in self._runs[item]]  # type: ignore[union-attr]
            body = [*words.views(gradients), f"u{item}({', '.join(map(words.name, gradients))})"]
        else:
            body = words.call(item, self._program.calls[item])  # type: ignore[arg-type]
        body = self._timed(self._runs[item] if kind == "updates" else (item,), item, body)
        after = [f"s{signal}_set()" for signal in self.signals.sets.get(item, ())]
        after += self._made_lines(tensors if kind != "receive" else ())
        return [*before, *body, *after, *(self._handed_out(item, words) if kind == "op" else [])]

    def _timed(self, whole: Sequence[int], item: int, body: list[str]) -> list[str]:
        """The lines that do some items, the last of them `item`; in traced code with marks where they are traced."""
        if not self._is_traced:
            return body
        is_timed = self._traced is None or not self._traced.isdisjoint(whole)
        if item >= self._graph.num_ops and self._is_late[item - self._graph.num_ops]:
            is_timed = False  # a GPU's copy is timed by its channel
        # without marks every line stays where it is: `item_words` needs not know what is traced
        return marked(whole[0], item, body) if is_timed else ["pass", *body, "pass"]

    def _made_lines(self, tensors: Iterable[int]) -> list[str]:
        """Marks behind the making of tensors that are sent later."""
        return [f"k{k}_made()" for tensor in tensors for k in self._marked.get(tensor, ())]

    def _given_lines(self, device: int, *, is_second: bool) -> list[str]:
        """The same for tensors of sources, where the part begins that they are given for."""
        sources = (op for op in self.items[device] if op in self._program.sources and (op in self._second) == is_second)
        return self._made_lines(int(self._graph.output_offsets[op]) for op in sources)

    def _taken_lines(self, device: int, transfer: int) -> list[str]:
        """The code of a wait for a copy in a slot; that its original may be overwritten needs no waiting."""
        is_here = int(self._plan.transfer_destination[transfer]) == device
        tensor = int(self._plan.transfer_tensor[transfer])
        return [f"k{transfer}_wait()", f"t{tensor} = k{transfer}_take()"] if is_here else []

    def _wait_lines(self, device: int, transfer: int) -> list[str]:
        """The code of a wait: for a copy that arrives after it was taken, or until an original here has been copied."""
        if int(self._plan.transfer_destination[transfer]) != device:
            return [f"k{transfer}_copied()"]
        return [f"k{transfer}_arrived()"] if self._is_late[transfer] else []

    def _free_lines(self, device: int, tensor: int, words: Expressions) -> list[str]:
        transfer = self._received[device].get(tensor, -1)
        is_told = transfer in self.acknowledged and self.is_handover[transfer]
        gone = [*words.forget(tensor), f"t{tensor}"]
        return [*[f"k{transfer}_done()"] * is_told, f"del {', '.join(gone)}"]

    def _makes(self, ref: Ref, device: int) -> bool:
        return int(self._plan.devices[self._graph.tensor_op[self._program.base(ref)]]) == device

    def _turn(self, device: int, made: set[int], words: Expressions) -> list[str]:
        """Between the parts of a step: results of the first are handed out, and tensors that the second reads kept."""
        n, program, items = self._graph.num_ops, self._program, self.items[device]
        needed = {program.base(ref) for ref, is_second in self.results if is_second}
        needed.update(t for op in items if op < n and op in self._second for t in self._reads[op])
        given = {
            int(self._graph.output_offsets[op])
            for op in items
            if op < n and (source := program.sources.get(op)) and (source.kind == "input" or source.shard is not None)
        }
        names = {tensor: f"t{tensor}" for tensor in sorted(needed & (made | given))}
        # other first parts use them meanwhile
        slots = {tensor for tensor, k in self._received[device].items() if self._has_slot[k]}
        values = [f"{name}.clone()" if tensor in slots else name for tensor, name in names.items()]
        lines = self._result_lines(device, words, is_second=False)
        words.forget_all()
        kept, taken = ("".join(f"{each}, " for each in some).rstrip() for some in (values, names.values()))
        lines += [f"S.append(({kept}))", "return None", "def second(step):", f"({taken}) = S.pop()"]
        return [*lines, *self._given_lines(device, is_second=True)]

    def _handed_out(self, item: int, words: Expressions) -> list[str]:
        """Hands out the gradients that an item makes."""
        own = self._handed.get(item, ())
        return [line for index, ref in own for line in (*words.views([ref]), f"a{index}({words.name(ref)})")]

    def _result_lines(self, device: int, words: Expressions, *, is_second: bool) -> list[str]:
        own = [(k, ref) for k, (ref, part) in enumerate(self.results) if part == is_second and self._makes(ref, device)]
        return [line for k, ref in own for line in (*words.views([ref]), f"O[{k}] = {words.name(ref)}")]


WAITING = "the transfer of op"
"""How words begin for a line that hands a tensor over, or waits for one."""


def marked(first: int, last: int, body: Sequence[str]) -> list[str]:
    """Lines between a mark of the clock for the beginning of item `first` and one for the end of item `last`."""
    return [f"B[{first}] = clock()", *body, f"E[{last}] = clock()"]


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

    def call(self, op: int, call: Call) -> list[str]:
        """Lines that run `op`, views that it needs among them."""
        lines = self.views(refs_in((call.args, call.kwargs)))
        given = self._arguments(call.args, call.kwargs)
        if call.takes_device and call.kwargs.get("device") is not None:
            given["device"] = f"device=D{self._device}"
        expression = f"f{op}({', '.join((*(['step'] if call.is_random else []), *given.values()))})"
        if call.returns_tuple:
            names = [f"t{tensor}" if tensor >= 0 else "_" for tensor in call.outputs]
            comma = "," if len(names) == 1 else ""
            return [*lines, f"{', '.join(names)}{comma} = {expression}"]
        target = f"t{call.outputs[0]} = " if call.outputs and call.outputs[0] >= 0 else ""
        return [*lines, f"{target}{expression}"]

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
