"""`rank_programs`: a plan as one program for each rank, that is, for each device: what it does, in order.

A program is the plan's sequence, filtered: the ops of a rank, and the transfers that it sends or receives. A transfer
is received at its own place in the sequence, and waited for before its first reader. If a send never waits for its
receive (a hand-over between threads, shared memory), a tensor is sent as soon as it is made: at the transfer's own
place, behind other ops, it would come late. Copies that its op was the last to read are freed before.

If sends wait for receives, as NCCL's do, that would deadlock. Both ends then stand at the transfer's own place: the
earliest unfinished item can always go on, as all ranks involved have it next, and what it needs is earlier. Both ranks
of a pair also have their transfers in the same order.

A relay (`transfer_sources`) sends a tensor that it received at the transfer's own place, and waits for it there.

`gang_signals` finds where a gang and its members wait for each other, `update_runs` the updates that one call does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan, transfer_sources

Kind = Literal["op", "updates", "send", "receive", "wait", "free"]
Run = tuple[int, ...]
"""Update ops in plan order, of parameters of one dtype."""


class Instruction(NamedTuple):
    """One entry of a program.

    Attributes:
        kind: `op`: runs an op. `updates`: does a run of updates. `send`: hands a tensor to another rank. `receive`:
            takes memory for a tensor of another rank, which is on its way from then on. `wait`: until a received tensor
            is there, before its first reader or where it is sent on; until a sent tensor is not needed any more, before
            it is overwritten.
            `free`: gives memory back.
        item: of the plan: the op (of a run, the last one), or N + k for transfer k; of `free`, the item before it.
        tensors: that it makes, sends, receives, waits for or frees.
    """

    kind: Kind
    item: int
    tensors: tuple[int, ...]


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


@dataclass(frozen=True)
class Slots:
    """Memory for copies in flight, assigned before the step runs.

    A slot is used again only by a send that always runs after the `free` of the copy in it: of a copy that the same
    rank had, or of which the rank has heard. A rank hears of all that another rank did, or had heard of, before that
    sent a tensor which it has waited for. So no send waits.

    Attributes:
        of: by transfer: its slot; -1 for a hand-over, and for a message between ranks that share no memory.
        num_bytes: by slot.
    """

    of: tuple[int, ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """The programs of a plan; `rank_programs` makes them.

    Attributes:
        graph: N ops.
        plan: K transfers.
        sources: by transfer: the rank that sends it.
        sent_at: by transfer: the place in the plan's sequence behind which it is sent.
        is_handover: by transfer: the tensor itself goes over, no copy.
        has_slot: by transfer: its ends share a memory, through which a copy can go.
        signals: by which a gang and its members take turns.
        update_runs: by rank: updates that one call does, where the last of them stands.
        merged: the instructions of all ranks in the plan's sequence, each with its rank.
    """

    graph: OpGraph
    plan: Plan
    sources: tuple[int, ...]
    sent_at: tuple[int, ...]
    is_handover: tuple[bool, ...]
    has_slot: tuple[bool, ...]
    signals: GangSignals
    update_runs: tuple[tuple[Run, ...], ...]
    merged: tuple[tuple[int, Instruction], ...]

    @cached_property
    def programs(self) -> tuple[tuple[Instruction, ...], ...]:
        """What each rank does, in order."""
        own = grouped(self.merged)
        return tuple(tuple(own.get(rank, ())) for rank in range(len(self.update_runs)))

    @cached_property
    def slots(self) -> Slots:
        """Where copies are while they are in flight and read."""
        graph, plan, n = self.graph, self.plan, self.graph.num_ops
        destinations, ranks = plan.transfer_destination.tolist(), range(len(self.programs))
        # vector clocks: by rank, how many instructions of each rank have run before its next one, whatever the times
        known = [[0] * len(ranks) for _ in ranks]
        told: dict[int, list[int]] = {}  # by transfer on its way: what its sender knew
        of = [-1] * plan.num_transfers
        num_bytes: list[int] = []
        num_uses: list[int] = []  # by slot: what was heard of an earlier use is out of date
        filled: dict[tuple[int, int], int] = {}  # (rank, tensor) -> slot that it reads
        # by rank that freed and rank that has not heard of it yet: (clock, slot, its use)
        freed = [[deque[tuple[int, int, int]]() for _ in ranks] for _ in ranks]
        empty: list[list[tuple[int, int, int]]] = [[] for _ in ranks]  # as each has heard, by size: (bytes, slot, use)
        for rank, (kind, item, tensors) in self.merged:
            known[rank][rank] += 1
            k = item - n
            if kind == "wait" and destinations[k] == rank:
                known[rank] = list(map(max, known[rank], told.pop(k)))
            elif kind == "free":
                gone = [filled.pop((rank, tensor)) for tensor in tensors if (rank, tensor) in filled]
                for unheard in freed[rank]:
                    unheard.extend((known[rank][rank], slot, num_uses[slot]) for slot in gone)
            elif kind == "send":
                told[k] = list(known[rank])
                if not self.has_slot[k]:
                    continue
                for clock, from_each in zip(known[rank], freed, strict=True):
                    while from_each[rank] and from_each[rank][0][0] <= clock:
                        _, slot, use = from_each[rank].popleft()
                        insort(empty[rank], (num_bytes[slot], slot, use))
                needed, own = int(graph.tensor_bytes[tensors[0]]), empty[rank]
                while own:  # the smallest that is large enough, or else the largest
                    _, slot, use = own.pop(min(bisect_left(own, (needed,)), len(own) - 1))
                    if use == num_uses[slot]:
                        break
                else:
                    slot = len(num_bytes)
                    num_bytes.append(0)
                    num_uses.append(0)
                num_bytes[slot] = max(num_bytes[slot], needed)
                num_uses[slot] += 1
                of[k] = filled[destinations[k], tensors[0]] = slot
        return Slots(tuple(of), tuple(num_bytes))

    def slots_beside(self, rank: int, host: Host) -> Slots:
        """`slots` as the ranks on the machine of `rank` have them: of a size for their own copies alone."""
        num_bytes, sizes = [0] * len(self.slots.num_bytes), self.graph.tensor_bytes[self.plan.transfer_tensor].tolist()
        for slot, source, size in zip(self.slots.of, self.sources, sizes, strict=True):
            if slot >= 0 and host.devices[source].machine == host.devices[rank].machine:
                num_bytes[slot] = max(num_bytes[slot], size)
        return Slots(self.slots.of, tuple(num_bytes))

    def items(self, rank: int) -> list[int]:
        """Items of the plan that a rank runs, sources and the transfers to it among them, in order."""
        places = (*self.plan.devices.tolist(), *self.plan.transfer_destination.tolist())
        return [item for item in self.plan.sequence.tolist() if places[item] == rank]

    def allocations(self, rank: int) -> list[tuple[int, int]]:
        """(item, tensor): where a tensor starts to take memory on a rank; the tensor of a hand-over takes none."""
        made = (each for each in self.programs[rank] if each.kind in ("op", "updates", "receive"))
        return [(item, tensor) for _, item, tensors in made for tensor in tensors if not self._is_handed(item)]

    def releases(self, rank: int) -> list[tuple[int, int]]:
        """(item, tensor): the item after whose end a tensor is freed on a rank."""
        handed = {tensor for kind, item, (tensor, *_) in self._received(rank) if self._is_handed(item)}
        freed = (each for each in self.programs[rank] if each.kind == "free")
        return [(item, tensor) for _, item, tensors in freed for tensor in tensors if tensor not in handed]

    def rows(self, rank: int, host: Host) -> list[dict[str, Any]]:
        """The program of a rank for people and tools: one row an instruction.

        A row has its `kind`, the names of the `ops` that it runs or whose tensors it is about, these `tensors`, their
        `bytes`, and of a transfer the `peer` (the other device) and the `slot` (None for a hand-over, and
        where processes have no memory in common).
        """
        graph, plan, n = self.graph, self.plan, self.graph.num_ops
        runs = {ops[-1]: ops for ops in self.update_runs[rank]}
        rows = []
        for kind, item, tensors in self.programs[rank]:
            is_run = kind in ("op", "updates")
            ops = runs.get(item, (item,)) if is_run else graph.tensor_op[list(tensors)].tolist()
            peer, slot = "", None
            if kind in ("send", "receive", "wait"):
                ends = self.sources[item - n], int(plan.transfer_destination[item - n])
                peer = host.devices[ends[rank == ends[0]]].name
                slot = self.slots.of[item - n] if self.has_slot[item - n] else None
            rows.append(
                {
                    "kind": kind,
                    "ops": [graph.names[op] for op in ops],
                    "tensors": list(tensors),
                    "bytes": int(graph.tensor_bytes[list(tensors)].sum()),
                    "peer": peer,
                    "slot": slot,
                }
            )
        return rows

    def _received(self, rank: int) -> list[Instruction]:
        return [each for each in self.programs[rank] if each.kind == "receive"]

    def _is_handed(self, item: int) -> bool:
        return item >= self.graph.num_ops and self.is_handover[item - self.graph.num_ops]


def rank_programs(
    graph: OpGraph,
    host: Host,
    plan: Plan,
    *,
    kept: Collection[int] = (),
    second: Collection[int] = (),
    sends_wait: bool = False,
) -> RankPrograms:
    """The programs of all ranks.

    Args:
        graph: N ops; its program is not needed.
        host: the host that `plan` was made for; each device is a rank.
        plan: K transfers.
        kept: tensors that stay after the step on the rank that makes them, besides those that the graph returns.
        second: items of the second part of a step in two parts, the last ones of the plan's sequence. Copies that are
            on their way are waited for in the part that they were received in.
        sends_wait: whether a send returns only when its receive was posted.
    """
    n, producers, is_source = graph.num_ops, graph.tensor_op.tolist(), graph.is_source.tolist()
    sequence, tensors = plan.sequence.tolist(), plan.transfer_tensor.tolist()
    devices = plan.devices.tolist()
    ends = list(zip(transfer_sources(graph, host, plan).tolist(), plan.transfer_destination.tolist(), strict=True))
    senders = {(source, tensor) for (source, _), tensor in zip(ends, tensors, strict=True)}
    is_copy = {(host.device_index[r.source], host.device_index[r.destination]): bool(r.links) for r in host.routes}
    is_handover = tuple(not is_copy[pair] for pair in ends)
    has_slot = tuple(is_copy[pair] and bool(not host.is_wired or host.shares_memory[pair]) for pair in ends)
    signals = gang_signals(graph, host, plan, is_handover, second)
    at = {item: place for place, item in enumerate(sequence)}
    # the second part begins with the first of its items that is no source: its sources are given then
    turn = next((at[item] for item in sequence if item in second and (item >= n or not is_source[item])), 0)
    makers = [producers[tensor] for tensor in tensors]
    made_at = [max(0 if is_source[op] else at[op], turn if op in second else 0) for op in makers]
    is_own = [source == devices[op] for (source, _), op in zip(ends, makers, strict=True)]
    sent_at = [made_at[k] if is_own[k] and not sends_wait else at[n + k] for k in range(len(tensors))]
    sources = tuple(source for source, _ in ends)
    result = RankPrograms(graph, plan, sources, tuple(sent_at), is_handover, has_slot, signals, (), ())
    runs = tuple(update_runs(graph, result.items(d), signals.waits, signals.sets) for d in range(host.num_devices))
    of_run = {ops[-1]: ops for each in runs for ops in each}  # by its last update
    last_of_run = {op: ops[-1] for ops in of_run.values() for op in ops}
    reads, makes = _lists(graph.input_offsets, graph.input_tensors), _lists(graph.output_offsets)
    mutated = grouped(zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True))
    outgoing = grouped((tensor, k) for k, tensor in enumerate(tensors))
    sends = grouped(zip(sent_at, range(len(tensors)), strict=True))

    # each tensor on each rank is freed after the last item that touches it; an update counts where its run stands
    touched = [(ends[k][0], t, sent_at[k]) for k, t in enumerate(tensors)]
    touched += [(ends[k][1], t, at[n + k]) for k, t in enumerate(tensors)]
    for op in (op for op in range(n) if not is_source[op]):
        place = at[last_of_run.get(op, op)]
        touched += [(devices[op], t, place) for t in (*reads[op], *makes[op])]
    last: dict[tuple[int, int], int] = {}  # (rank, tensor) -> place
    for rank, tensor, place in touched:
        last[rank, tensor] = max(place, last.get((rank, tensor), 0))
    stays = {*graph.output_tensors.tolist(), *kept}
    dying = grouped(
        ((place, rank == devices[producers[tensor]] or (rank, tensor) in senders), (rank, tensor))
        for (rank, tensor), place in last.items()
        if rank != devices[producers[tensor]] or not (is_source[producers[tensor]] or tensor in stays)
    )

    merged: list[tuple[int, Instruction]] = []
    arriving: list[dict[int, int]] = [{} for _ in host.devices]  # by rank: tensor -> transfer that nothing waited for
    told: set[int] = set()  # transfers whose end their sender has waited for

    def add(rank: int, kind: Kind, transfers: Iterable[int]) -> None:
        merged.extend((rank, Instruction(kind, n + k, (tensors[k],))) for k in transfers)

    def free(item: int, *, are_sent: bool) -> None:
        for rank, gone in sorted(grouped(dying.get((at[item], are_sent), ())).items()):
            merged.append((rank, Instruction("free", item, tuple(sorted(gone)))))

    for place, item in enumerate(sequence):
        if turn and place == turn:
            for rank, pending in enumerate(arriving):
                add(rank, "wait", pending.values())
                pending.clear()
        if item >= n:
            rank = ends[item - n][1]
            add(rank, "receive", [item - n])
            arriving[rank][tensors[item - n]] = item - n
        elif not is_source[item] and last_of_run.get(item, item) == item:
            rank, ops = devices[item], of_run.get(item, (item,))
            add(rank, "wait", [arriving[rank].pop(t) for op in ops for t in reads[op] if t in arriving[rank]])
            changed = dict.fromkeys(k for op in ops for t in mutated.get(op, ()) for k in outgoing.get(t, ()))
            add(rank, "wait", [k for k in changed if is_own[k] and k not in told])
            told.update(changed)
            made = tuple(t for op in ops for t in makes[op])
            merged.append((rank, Instruction("updates" if item in of_run else "op", item, made)))
        free(item, are_sent=False)  # before the sends: who hears of them may use the slots again
        for k in sends.get(place, ()):
            rank = ends[k][0]
            add(rank, "wait", [arriving[rank].pop(tensors[k])] if tensors[k] in arriving[rank] else [])
            add(rank, "send", [k])
        free(item, are_sent=True)
    return replace(result, update_runs=runs, merged=tuple(merged))


def _lists(offsets: NDArray[np.integer], values: NDArray[np.integer] | None = None) -> list[list[int]]:
    """The parts of an array between offsets; without one, the indices between them."""
    bounds, entries = offsets.tolist(), range(int(offsets[-1])) if values is None else values.tolist()
    return [list(entries[a:b]) for a, b in pairwise(bounds)]


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second ones of pairs by the first, in order."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)


def gang_signals(
    graph: OpGraph, host: Host, plan: Plan, is_handover: Sequence[bool], second: Collection[int]
) -> GangSignals:
    """The signals by which gangs and their members take turns.

    A gang is busy when any member is: in plan order, its items wait for theirs and theirs for its.

    Args:
        graph: N ops.
        host: with its gangs.
        plan: made for both.
        is_handover: by transfer: it keeps no device busy.
        second: items of the second part of a step in two parts, the last ones of the plan's sequence.
    """
    n, is_source, indices = graph.num_ops, graph.is_source.tolist(), host.device_index
    cores = [[indices[name] for name in device.members] or [d] for d, device in enumerate(host.devices)]
    sets: dict[int, list[int]] = defaultdict(list)
    waits: dict[int, list[int]] = defaultdict(list)
    last: dict[int, tuple[int, int]] = {}  # core -> (device, item)
    count, is_first = 0, True
    for item in plan.sequence.tolist():
        if is_source[item] if item < n else is_handover[item - n]:
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


def update_runs(graph: OpGraph, items: Sequence[int], waits: Collection[int], sets: Collection[int]) -> tuple[Run, ...]:
    """Every update among `items`, in runs as long as may be.

    Nothing lies between the updates of a run, so that doing all of them where the last one stands keeps the plan: no
    tensor is made meanwhile, and only later ops of the same device wait for an update. PyTorch's fused kernels
    take each parameter by itself, so a run equals its updates one by one, to the bit.

    Args:
        graph: of the plan.
        items: one device's, in plan order.
        waits: items that begin with a signal of a gang: they begin a run.
        sets: items that end with one: they end a run.
    """
    parameters = dict(zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True))
    runs: list[list[int]] = []
    open_dtype = ""  # of the run that the next update may join
    for item in items:
        if item < graph.num_ops and graph.is_source[item]:  # nothing is done for it
            continue
        if item >= graph.num_ops or not graph.targets[item].startswith("update."):
            open_dtype = ""
            continue
        dtype = graph.tensor_dtypes[parameters[item]]
        # a gradient of another layout is copied for the kernel: one at a time, as its workspace says
        is_alone = bool(graph.workspace_bytes[item])
        if is_alone or item in waits or dtype != open_dtype:
            runs.append([])
        runs[-1].append(item)
        open_dtype = "" if is_alone or item in sets else dtype
    return tuple(map(tuple, runs))
