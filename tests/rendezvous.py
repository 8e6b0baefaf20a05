"""A machine of ranks: does it run these programs? Its sends wait for their receives, or do not.

Without waiting, it runs them in more than one order. First, destinations make the copies, as threads do. Then sources
copy into slots, as processes do (where a transfer has one), and each rank is once as late as it can be: what runs
before one of its instructions then is all that need not come after it. So a slot that may be filled while the copy in
it is still read is found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlplace.measure.execute.rank_programs import Instruction, RankPrograms
from rlplace.measure.problem import Plan

Programs = Sequence[Sequence[Instruction]]


class Rejected(Exception):
    """Programs that hang, mix up transfers, or touch what is not there."""


def check_programs(
    made: RankPrograms,
    programs: Programs | None = None,
    slots: Sequence[int] | None = None,
    *,
    sends_wait: bool = True,
) -> None:
    """Runs programs as far as they go.

    If sends wait, a transfer happens when both its ranks have it next. Else a send waits for nothing, so its slot must
    be empty. A wait for a tensor waits for its send, one until a tensor may be overwritten for the copy.

    Args:
        made: of a plan.
        programs: in place of its own.
        slots: by transfer, in place of its own.
        sends_wait: whether a send waits for its receive.

    Raises:
        Rejected: they cannot end, or some step of them is wrong.
    """
    programs = made.programs if programs is None else programs
    slots = made.slots.of if slots is None else slots
    ranks = range(len(programs))
    for late in [None] if sends_wait else [None, *ranks]:
        machine = _Machine(made, programs, slots, sends_wait=sends_wait, has_slots=late is not None)
        others = [rank for rank in ranks if rank != late]
        while any(machine.advance(rank) for rank in others) or (late is not None and machine.advance(late, most=1)):
            pass
        machine.check_end()


class _Machine:
    def __init__(
        self, made: RankPrograms, programs: Programs, slots: Sequence[int], *, sends_wait: bool, has_slots: bool
    ) -> None:
        self.made, self.graph = made, made.graph
        self.plan: Plan = made.plan
        self.programs, self.slots = programs, slots
        self.sends_wait, self.has_slots = sends_wait, has_slots
        graph, plan = self.graph, self.plan
        self.runs = {run[-1]: run for each in made.update_runs for run in each}
        self.at = [0] * len(programs)
        self.own = [
            {t for t in range(graph.num_tensors) if graph.is_source[graph.tensor_op[t]] and self.home(t) == rank}
            for rank in range(len(programs))
        ]
        self.held = [set(own) for own in self.own]
        self.arrived: list[set[int]] = [set() for _ in programs]  # tensors that may be read
        self.posted: list[set[int]] = [set() for _ in programs]  # transfers
        self.told: set[int] = set()  # transfers whose sender knows that they are over
        self.done: set[int] = set()  # ops
        self.sent: set[int] = set()  # transfers on their way, where sends do not wait
        self.in_slot: dict[int, int] = {}
        self.sources, self.destinations = made.sources, plan.transfer_destination.tolist()

    def has_slot(self, transfer: int) -> bool:
        return self.has_slots and self.made.has_slot[transfer]

    def home(self, tensor: int) -> int:
        return int(self.plan.devices[self.graph.tensor_op[tensor]])

    def ends(self, item: int) -> tuple[int, int]:
        k = item - self.graph.num_ops
        return self.sources[k], self.destinations[k]

    def is_here(self, tensor: int, rank: int) -> bool:
        """Whether a rank may read a tensor: it made it, or has waited for it."""
        return tensor in self.held[rank] and (self.home(tensor) == rank or tensor in self.arrived[rank])

    def next(self, rank: int) -> Instruction | None:
        program = self.programs[rank]
        return program[self.at[rank]] if self.at[rank] < len(program) else None

    def advance(self, rank: int, most: int = sys.maxsize) -> bool:
        """Runs so many instructions of a rank, until it has to wait; whether it did any."""
        begin = self.at[rank]
        while (now := self.next(rank)) is not None and self.at[rank] < begin + most:
            if now.kind in ("send", "receive"):
                if not self.transfer(rank, now):
                    break
                continue  # both have moved on
            if now.kind == "wait" and not self.sends_wait and not self.is_over(rank, now):
                break
            getattr(self, now.kind)(rank, now)
            self.at[rank] += 1
        return self.at[rank] > begin

    def transfer(self, rank: int, now: Instruction) -> bool:
        source, destination = self.ends(now.item)
        other = destination if now.kind == "send" else source
        if rank != (source if now.kind == "send" else destination):
            raise Rejected(f"{now} is in the program of rank {rank}")
        (tensor,), k = now.tensors, now.item - self.graph.num_ops
        if now.kind == "send" and not self.is_here(tensor, source):
            raise Rejected(f"{now}: the tensor is not there")
        if not self.sends_wait:
            if now.kind == "receive":
                self.receive(k, tensor, destination)
            elif self.has_slot(k) and self.in_slot.setdefault(self.slots[k], k) != k:
                raise Rejected(f"{now}: transfer {self.in_slot[self.slots[k]]} may still be read in its slot")
            else:
                self.sent.add(k)
            self.at[rank] += 1
            return True
        there = self.next(other)
        if (
            there is None
            or {now.kind, there.kind} != {"send", "receive"}
            or self.ends(there.item) != self.ends(now.item)
        ):
            return False
        if there.item != now.item:
            raise Rejected(f"rank {rank} has {now}, and rank {other} has {there}: the data would be mixed up")
        if not self.is_here(tensor, source):
            raise Rejected(f"{there}: the tensor is not there")
        self.receive(k, tensor, destination)
        self.at[rank] += 1
        self.at[other] += 1
        return True

    def receive(self, transfer: int, tensor: int, destination: int) -> None:
        if tensor in self.held[destination]:
            raise Rejected(f"tensor {tensor} is already on rank {destination}")
        self.held[destination].add(tensor)
        self.posted[destination].add(transfer)

    def is_over(self, rank: int, now: Instruction) -> bool:
        """Whether a wait may end: the tensor was sent, or its copy was made."""
        k, destination = now.item - self.graph.num_ops, self.ends(now.item)[1]
        return k in self.sent and (rank == destination or self.has_slot(k) or k in self.posted[destination])

    def wait(self, rank: int, now: Instruction) -> None:
        source, destination = self.ends(now.item)
        k = now.item - self.graph.num_ops
        if k not in self.posted[destination] and not (self.has_slot(k) and rank == source):
            raise Rejected(f"rank {rank} waits for transfer {k}, which was not posted")
        if rank == destination:
            self.arrived[rank].add(now.tensors[0])
        if rank == source:
            self.told.add(k)

    def op(self, rank: int, now: Instruction) -> None:
        graph, plan = self.graph, self.plan
        for op in self.runs.get(now.item, (now.item,)):
            for tensor in graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]].tolist():
                if not self.is_here(tensor, rank):
                    raise Rejected(f"op {op} on rank {rank} reads tensor {tensor}, which is not there")
            for tensor in graph.mutation_tensor[graph.mutation_op == op].tolist():
                for k, sent in enumerate(plan.transfer_tensor.tolist()):
                    if sent == tensor and self.sources[k] == rank and k not in self.told:
                        raise Rejected(f"op {op} overwrites tensor {tensor} before transfer {k} is over")
            if int(plan.devices[op]) != rank or op in self.done:
                raise Rejected(f"op {op} runs on rank {rank}, or twice")
            self.done.add(op)
        self.held[rank].update(now.tensors)

    updates = op

    def free(self, rank: int, now: Instruction) -> None:
        for tensor in now.tensors:
            if tensor not in self.held[rank] or tensor in self.own[rank]:
                raise Rejected(f"rank {rank} frees tensor {tensor}, which it does not hold")
            self.held[rank].remove(tensor)
            self.arrived[rank].discard(tensor)
            for slot, k in list(self.in_slot.items()):
                if self.destinations[k] == rank and self.plan.transfer_tensor[k] == tensor:
                    del self.in_slot[slot]

    def check_end(self) -> None:
        stuck = {rank: now for rank in range(len(self.programs)) if (now := self.next(rank)) is not None}
        if stuck:
            raise Rejected(f"ranks wait for each other: {stuck}")
        missing = set(range(self.graph.num_ops)) - self.done - set(self.graph.is_source.nonzero()[0].tolist())
        if missing:
            raise Rejected(f"ops {missing} do not run")
        for rank, held in enumerate(self.held):
            kept = {t for t in self.graph.output_tensors.tolist() if self.home(t) == rank}
            if held != self.own[rank] | kept:
                raise Rejected(f"rank {rank} still holds tensors {held - self.own[rank] - kept}")
