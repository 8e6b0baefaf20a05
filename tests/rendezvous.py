"""A machine of ranks with finite slots: does it run these programs? Its sends wait for their receives, or do not."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.graphs.opgraph import OpGraph
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

    If sends wait, a transfer happens when both its ranks have it next and its slot is empty. Else a send waits for its
    slot alone, and a receive for its send.

    Args:
        made: of a plan.
        programs: in place of its own.
        slots: by transfer, in place of its own.
        sends_wait: whether a send waits for its receive.

    Raises:
        Rejected: they cannot end, or some step of them is wrong.
    """
    programs = made.programs if programs is None else programs
    machine = _Machine(made, programs, made.slots.of if slots is None else slots, sends_wait=sends_wait)
    while any(machine.advance(rank) for rank in range(len(programs))):
        pass
    machine.check_end()


class _Machine:
    def __init__(self, made: RankPrograms, programs: Programs, slots: Sequence[int], *, sends_wait: bool) -> None:
        self.graph: OpGraph = made.graph
        self.plan: Plan = made.plan
        self.programs, self.slots, self.sends_wait = programs, slots, sends_wait
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
        self.destinations = plan.transfer_destination.tolist()

    def home(self, tensor: int) -> int:
        return int(self.plan.devices[self.graph.tensor_op[tensor]])

    def ends(self, item: int) -> tuple[int, int]:
        k = item - self.graph.num_ops
        return self.home(int(self.plan.transfer_tensor[k])), self.destinations[k]

    def next(self, rank: int) -> Instruction | None:
        program = self.programs[rank]
        return program[self.at[rank]] if self.at[rank] < len(program) else None

    def advance(self, rank: int) -> bool:
        """Runs a rank until it has to wait; whether it did anything."""
        begin = self.at[rank]
        while (now := self.next(rank)) is not None:
            if now.kind in ("send", "receive"):
                if not self.transfer(rank, now):
                    break
                continue  # both have moved on
            if now.kind == "wait" and rank == self.ends(now.item)[0] and self.is_under_way(now):
                break  # the original may not be overwritten yet
            getattr(self, now.kind)(rank, now)
            self.at[rank] += 1
        return self.at[rank] > begin

    def transfer(self, rank: int, now: Instruction) -> bool:
        source, destination = self.ends(now.item)
        other = destination if now.kind == "send" else source
        if rank != (source if now.kind == "send" else destination):
            raise Rejected(f"{now} is in the program of rank {rank}")
        (tensor,), k = now.tensors, now.item - self.graph.num_ops
        if now.kind == "send" and tensor not in self.held[source]:
            raise Rejected(f"{now}: the tensor is not there")
        if not self.sends_wait:
            if (now.kind == "send" and not self.fills(k)) or (now.kind == "receive" and k not in self.sent):
                return False
            self.sent.add(k)
            if now.kind == "receive":
                self.receive(k, tensor, destination)
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
        if not self.fills(k):
            return False
        self.receive(k, tensor, destination)
        self.at[rank] += 1
        self.at[other] += 1
        return True

    def fills(self, transfer: int) -> bool:
        """Whether its slot is empty; it is full from now on."""
        slot = self.slots[transfer]
        return slot < 0 or self.in_slot.setdefault(slot, transfer) == transfer

    def receive(self, transfer: int, tensor: int, destination: int) -> None:
        if tensor in self.held[destination]:
            raise Rejected(f"tensor {tensor} is already on rank {destination}")
        self.held[destination].add(tensor)
        self.posted[destination].add(transfer)

    def is_under_way(self, now: Instruction) -> bool:
        """Whether a transfer was sent and not received yet."""
        k = now.item - self.graph.num_ops
        return k in self.sent and k not in self.posted[self.destinations[k]]

    def wait(self, rank: int, now: Instruction) -> None:
        source, destination = self.ends(now.item)
        k = now.item - self.graph.num_ops
        if k not in self.posted[destination]:
            raise Rejected(f"rank {rank} waits for transfer {k}, which was not posted")
        if rank == destination:
            self.arrived[rank].add(now.tensors[0])
        if rank == source:
            self.told.add(k)

    def op(self, rank: int, now: Instruction) -> None:
        graph, plan = self.graph, self.plan
        for op in self.runs.get(now.item, (now.item,)):
            for tensor in graph.input_tensors[graph.input_offsets[op] : graph.input_offsets[op + 1]].tolist():
                is_there = self.home(tensor) == rank or tensor in self.arrived[rank]
                if tensor not in self.held[rank] or not is_there:
                    raise Rejected(f"op {op} on rank {rank} reads tensor {tensor}, which is not there")
            for tensor in graph.mutation_tensor[graph.mutation_op == op].tolist():
                for k, sent in enumerate(plan.transfer_tensor.tolist()):
                    if sent == tensor and k not in self.told:
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
