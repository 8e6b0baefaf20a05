"""Programs of ranks by hand and random ones, all mutants of which are rejected; and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from core_hosts import core_host, process_host
from machine_hosts import core_machines
from micrographs import op_graph
from naive_plan import naive_plan, random_devices
from random_problems import plain_host, problem_of, random_graph
from rendezvous import Rejected, check_programs
from small_models import step_graph
from torch import nn

from rlplace.graphs import Grouping, capture
from rlplace.measure import Costs, Problem, Simulator
from rlplace.measure.execute.rank_programs import Instruction, RankPrograms, rank_programs
from rlplace.measure.hosts.host import Host

HOSTS = {count: core_host(count) for count in (2, 3, 4)}
MIXED = process_host(4)
MIXED = replace(MIXED, devices=tuple(replace(each, memory_pool="aabb"[k]) for k, each in enumerate(MIXED.devices)))
"""Two memories of two ranks."""
MACHINES = tuple(core_machines(machines) for machines in ("abb", "aabb", "abab", "aabbb"))
NUM_PLANS, NUM_MUTATED = 1000, 200


def random_programs(
    seed: int, *, sends_wait: bool = True, has_machines: bool = False, host: Host | None = None
) -> RankPrograms:
    """Of a random graph, in a random order, on two to four ranks; or on three to five of two machines."""
    generator = np.random.default_rng(seed)
    graph = random_graph(generator, int(generator.integers(4, 40)))
    host = host or (MACHINES[seed % len(MACHINES)] if has_machines else HOSTS[2 + seed % 3])
    devices = random_devices(graph, host.num_devices, generator)
    changed = list(zip(graph.mutation_op.tolist(), graph.tensor_op[graph.mutation_tensor].tolist(), strict=True))
    for _ in changed:  # what an op changes is where the op is
        for pair in changed:
            devices[list(pair)] = devices[list(pair)].min()
    return rank_programs(graph, host, naive_plan(graph, devices, generator), sends_wait=sends_wait)


def linear_programs(*, sends_wait: bool) -> RankPrograms:
    """0 weight, 1 bias, 2 input, 3 addmm, 4 relu, 5 sum, 6 ones, 7 threshold_backward, 8 mm, 9 sum, 10, 11 updates."""
    graph = capture(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(5, 2), torch.sum, "adam")
    plan = naive_plan(graph, np.array([0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0], dtype=np.int32))
    return rank_programs(graph, HOSTS[2], plan, sends_wait=sends_wait)


def test_a_small_step_by_hand() -> None:
    """Transfers 12 to 17 carry weight, bias, input (read by the backward), addmm, relu and ones."""
    programs = linear_programs(sends_wait=False)
    assert programs.programs[0] == (
        ("send", 12, (0,)),
        ("send", 13, (1,)),
        ("receive", 14, (2,)),
        ("receive", 15, (3,)),
        ("wait", 15, (3,)),
        ("op", 4, (4,)),
        ("free", 4, (3,)),
        ("send", 16, (4,)),
        ("receive", 17, (6,)),
        ("wait", 17, (6,)),
        ("op", 7, (7,)),
        ("free", 7, (6,)),
        ("free", 7, (4,)),
        ("wait", 14, (2,)),
        ("op", 8, (8,)),
        ("free", 8, (2,)),
        ("op", 9, (9,)),
        ("free", 9, (7,)),
        ("wait", 12, (0,)),
        ("wait", 13, (1,)),
        ("updates", 11, ()),
        ("free", 11, (8, 9)),
    )
    # rank 1 sends addmm where it has freed the weight, and rank 0 relu where it has freed addmm; the scalar ones goes
    # where the bias was, which is nearer in size than relu
    assert programs.slots.of == (0, 1, 2, 0, 0, 1)
    assert programs.slots.num_bytes == (60, 12, 40)
    check_programs(programs, sends_wait=False)


@pytest.mark.parametrize("sends_wait", [False, True])
def test_a_tensor_is_sent_when_it_is_made_unless_the_send_would_wait(sends_wait: bool) -> None:
    """The input, tensor 2, is planned to go after weight and bias were received."""
    kinds = [each[:2] for each in linear_programs(sends_wait=sends_wait).programs[1]]
    sent = kinds.index(("send", 14))
    assert sent == (2 if sends_wait else 0)
    del kinds[sent]
    assert kinds == [
        *(("receive", 12), ("receive", 13), ("wait", 12), ("wait", 13), ("op", 3)),
        *(("free", 3), ("send", 15), ("free", 15 if sends_wait else 3)),
        *(("receive", 16), ("wait", 16), ("op", 5), ("free", 5), ("op", 6), ("send", 17)),
        ("free", 17 if sends_wait else 6),
    ]


def relayed(made: RankPrograms) -> list[int]:
    """Transfers that a relay sends."""
    homes = made.plan.devices[made.graph.tensor_op[made.plan.transfer_tensor]].tolist()
    return [k for k, (source, home) in enumerate(zip(made.sources, homes, strict=True)) if source != home]


def test_a_relay_waits_for_a_tensor_sends_it_on_and_frees_it_after_both_uses() -> None:
    """Op 0 on rank 0 makes what ops 1 and 2 on ranks 2 and 3 of the other machine read: transfers 3 and 4."""
    graph = op_graph([[], [0], [0]])
    for sends_wait in (False, True):
        plan = naive_plan(graph, np.array([0, 2, 3], dtype=np.int32))
        made = rank_programs(graph, core_machines("aabb"), plan, sends_wait=sends_wait)
        assert made.sources == (0, 2)
        assert made.programs == (
            (("op", 0, (0,)), ("send", 3, (0,)), ("free", 3 if sends_wait else 0, (0,))),
            (),
            (("receive", 3, (0,)), ("wait", 3, (0,)), ("send", 4, (0,)), ("op", 1, (1,)), ("free", 1, (0, 1))),
            (("receive", 4, (0,)), ("wait", 4, (0,)), ("op", 2, (2,)), ("free", 2, (0,)), ("free", 2, (2,))),
        )
        check_programs(made, sends_wait=sends_wait)
    sent = {row["kind"]: row["peer"] for row in made.rows(2, core_machines("aabb"))}
    assert (sent["receive"], sent["send"]) == ("cpu:0", "cpu:3")


def test_a_machine_has_room_for_its_own_copies_alone() -> None:
    """Op 0 on rank 0 is read on rank 1 of its machine, op 2 on rank 2 on rank 3 of the other."""
    graph, host = op_graph([[], [0], [], [2]], [100, 1, 8, 1]), core_machines("aabb")
    made = rank_programs(graph, host, naive_plan(graph, np.arange(4, dtype=np.int32)))
    assert made.slots.num_bytes == (100, 8)
    found = [made.slots_beside(rank, host) for rank in range(4)]
    assert [each.num_bytes for each in found] == [(100, 0), (100, 0), (0, 8), (0, 8)]
    assert {each.of for each in found} == {made.slots.of}


@pytest.mark.parametrize("has_machines", [False, True])
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(100, NUM_PLANS, 100))])
def test_random_plans_run_and_every_rank_keeps_the_order_of_the_plan(first: int, has_machines: bool) -> None:
    num_relayed = 0
    for seed in range(first, first + 100):
        made = random_programs(seed, sends_wait=False, has_machines=has_machines)
        check_programs(made, sends_wait=False)
        made = random_programs(seed, has_machines=has_machines)
        check_programs(made)
        num_relayed += len(relayed(made))
        check_programs(made, sends_wait=False)
        plan, n = made.plan, made.graph.num_ops
        places = (*plan.devices.tolist(), *plan.transfer_destination.tolist())
        for rank in range(len(made.programs)):
            planned = [
                item
                for item in plan.sequence.tolist()
                if places[item] == rank and (item >= n or not made.graph.is_source[item])
            ]
            assert [each.item for each in made.programs[rank] if each.kind in ("op", "receive")] == planned
    assert (num_relayed > 100) == has_machines


def test_random_plans_run_where_only_some_ranks_share_a_memory() -> None:
    num_heard = 0
    for seed in range(300):
        made = random_programs(seed, sends_wait=False, host=MIXED)
        check_programs(made, sends_wait=False)
        plan = made.plan
        sources = plan.devices[made.graph.tensor_op[plan.transfer_tensor]]
        assert list(made.has_slot) == (sources // 2 == plan.transfer_destination // 2).tolist(), "of one machine"
        assert [slot >= 0 for slot in made.slots.of] == list(made.has_slot)
        num_heard += len(made.slots.num_bytes) < sum(made.has_slot)
    assert num_heard > 100, "slots are used again"


@pytest.mark.parametrize("name", ["linear", "tied", "batch_norm_train", "attention"])
def test_steps_with_updates_run(name: str) -> None:
    graph = step_graph(name)
    for seed in range(10):
        generator = np.random.default_rng(seed)
        host = HOSTS[2 + seed % 3] if seed % 2 else MIXED
        plan = naive_plan(graph, random_devices(graph, host.num_devices, generator), generator)
        for sends_wait in (False, True):
            check_programs(rank_programs(graph, host, plan, sends_wait=sends_wait), sends_wait=sends_wait)


Mutant = tuple[Sequence[Sequence[Instruction]], Sequence[int]] | None
"""Programs and slots; None where a plan has no place for the fault."""


def send_behind_its_producer(made: RankPrograms) -> Mutant:
    """A send that goes before another transfer between the same ranks, which the other rank has first."""
    for rank, program in enumerate(made.programs):
        for place, now in enumerate(program):
            if now.kind != "send":
                continue
            (tensor,) = now.tensors
            begin = max(
                (k for k, each in enumerate(program[:place]) if tensor in each.tensors and each.kind == "op"),
                default=-1,
            )
            to = made.plan.transfer_destination[now.item - made.graph.num_ops]
            met = {each.item for each in made.programs[to] if each.kind in ("send", "receive")}
            if any(each.item in met for each in program[begin + 1 : place] if each.kind in ("send", "receive")):
                moved = [*program[: begin + 1], now, *program[begin + 1 : place], *program[place + 1 :]]
                return [moved if k == rank else list(each) for k, each in enumerate(made.programs)], made.slots.of
    return None


def swapped_pair(made: RankPrograms) -> Mutant:
    """Two receives from one rank change places; the sends do not."""
    source, n = made.sources, made.graph.num_ops
    for rank, program in enumerate(made.programs):
        received = [k for k, each in enumerate(program) if each.kind == "receive"]
        for a, b in ((a, b) for a in received for b in received if a < b):
            if source[program[a].item - n] == source[program[b].item - n]:
                mutant = [list(each) for each in made.programs]
                mutant[rank][a], mutant[rank][b] = program[b], program[a]
                return mutant, made.slots.of
    return None


def wait_before_post(made: RankPrograms) -> Mutant:
    """A wait for a tensor goes before its receive."""
    for rank, program in enumerate(made.programs):
        for place, now in enumerate(program):
            if now.kind == "receive":
                wait = next(k for k, each in enumerate(program) if each.kind == "wait" and each.item == now.item)
                mutant = [list(each) for each in made.programs]
                mutant[rank].insert(place, mutant[rank].pop(wait))
                return mutant, made.slots.of
    return None


def no_wait_before_the_first_reader(made: RankPrograms) -> Mutant:
    """A received tensor is read without a wait."""
    for rank, program in enumerate(made.programs):
        received = {each.item for each in program if each.kind == "receive"}
        for place, now in enumerate(program):
            if now.kind == "wait" and now.item in received:
                mutant = [list(each) for each in made.programs]
                del mutant[rank][place]
                return mutant, made.slots.of
    return None


def freed_before_it_is_sent(made: RankPrograms) -> Mutant:
    """A tensor that is freed behind its send is freed before it."""
    for rank, program in enumerate(made.programs):
        for place, (now, then) in enumerate(pairwise(program)):
            if now.kind == "send" and then.kind == "free" and now.tensors[0] in then.tensors:
                mutant = [list(each) for each in made.programs]
                mutant[rank][place : place + 2] = then, now
                return mutant, made.slots.of
    return None


def slot_reused_early(made: RankPrograms) -> Mutant:
    """A copy goes to a slot before the copy in it is freed, or after, but its rank has heard of nothing since then."""
    plan, n = made.plan, made.graph.num_ops
    at = {item: place for place, item in enumerate(plan.sequence.tolist())}
    freed = [{t: at[each.item] for each in p if each.kind == "free" for t in each.tensors} for p in made.programs]
    for rank, program in enumerate(made.programs):
        sent: list[Instruction] = []
        heard = -1  # when the latest was sent of what this rank has waited for
        for now in program:
            k = now.item - n
            if now.kind == "wait" and plan.transfer_destination[k] == rank:
                heard = max(heard, made.sent_at[k])
            if now.kind != "send" or not made.has_slot[k]:
                continue
            for before in sent:
                to = plan.transfer_destination[k]
                if plan.transfer_destination[before.item - n] == to and freed[to][before.tensors[0]] > heard:
                    slots = list(made.slots.of)
                    slots[k] = slots[before.item - n]
                    return made.programs, slots
            sent.append(now)
    return None


def sent_on_before_it_is_there(made: RankPrograms) -> Mutant:
    """A relay sends without a wait, which comes before the next reader."""
    n = made.graph.num_ops
    for k in relayed(made):
        program = list(made.programs[rank := made.sources[k]])
        send = next(place for place, each in enumerate(program) if each[:2] == ("send", n + k))
        if program[send - 1].kind == "wait":
            program[send - 1 : send + 1] = reversed(program[send - 1 : send + 1])
            return [program if rank == other else each for other, each in enumerate(made.programs)], made.slots.of
    return None


@pytest.mark.parametrize("has_machines", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mutate",
    [
        *(send_behind_its_producer, swapped_pair, wait_before_post, slot_reused_early, sent_on_before_it_is_there),
        *(no_wait_before_the_first_reader, freed_before_it_is_sent),
    ],
    ids=lambda each: each.__name__,
)
def test_every_mutant_is_rejected(mutate: Callable[[RankPrograms], Mutant], has_machines: bool) -> None:
    num_rejected = 0
    for seed in range(NUM_MUTATED):
        sends_wait = mutate is not slot_reused_early
        made = random_programs(seed, sends_wait=sends_wait, has_machines=has_machines)
        mutant = mutate(made)
        if mutant is not None:
            with pytest.raises(Rejected):
                check_programs(made, *mutant, sends_wait=sends_wait)
            num_rejected += 1
    share = 0.25 if has_machines else 0.5 * (mutate is not sent_on_before_it_is_there)
    assert num_rejected > NUM_MUTATED * share or not share


def test_slots_of_a_chain_are_used_again() -> None:
    """A tensor goes to the other rank and back, op by op: always in the slot that its sender has just freed."""
    graph = capture(nn.Sequential(*[nn.Tanh() for _ in range(8)]), torch.ones(3))
    plan = naive_plan(graph, np.arange(graph.num_ops, dtype=np.int32) % 2)
    made = rank_programs(graph, HOSTS[2], plan)
    assert made.plan.num_transfers == 8
    assert made.slots.of == (0,) * 8
    assert made.slots.num_bytes == (12,)


def test_a_slot_is_used_again_by_a_rank_that_heard_through_another_one_that_it_is_free() -> None:
    """Rank 1 frees tensors 0 and 1 and tells rank 2 by tensor 2, which tells rank 0 by tensor 3, before it sends 4."""
    devices = np.array([0, 0, 1, 2, 0, 1], dtype=np.int32)
    for inputs_of_3, slots in (([2], (0, 1, 1, 1, 0)), ([], (0, 1, 2, 2))):
        graph = op_graph([[], [], [0, 1], inputs_of_3, [3], [4]], [100, 10, 10, 10, 100, 1])
        made = rank_programs(graph, HOSTS[3], naive_plan(graph, devices))
        of = dict(zip(made.plan.transfer_tensor.tolist(), made.slots.of, strict=True))
        assert tuple(of[tensor] for tensor in (0, 1, 2, 3, 4) if tensor in of) == slots


def test_a_program_between_ranks_without_a_memory_in_common_has_no_slots() -> None:
    """Cores of one memory, then of two, print the same transfers."""
    together = linear_programs(sends_wait=True)
    host = process_host(2)
    apart = replace(host, devices=tuple(replace(device, memory_pool="") for device in host.devices))
    made = rank_programs(together.graph, apart, together.plan, sends_wait=True)
    slots = [[row["slot"] for row in each.rows(0, host) if row["kind"] == "send"] for each in (together, made)]
    assert slots == [[together.slots.of[0], together.slots.of[1], together.slots.of[4]], [None] * 3]
    assert made.slots.num_bytes == ()


def peaks_of_programs(problem: Problem, made: RankPrograms, is_posted: bool) -> tuple[int, ...]:
    """(D,) bytes: `made.allocations` and `made.releases` at the simulated times of their items.

    A copy that goes into a slot takes memory from its start. One that the destination is to receive takes it from when
    the receive is posted: when the op before it in the program of the destination has ended.
    """
    graph, plan, n = made.graph, made.plan, made.graph.num_ops
    times = Simulator(problem, threads=1).timeline(plan)
    start_s = np.concatenate([times.op_start_s, times.transfer_start_s])
    end_s = np.concatenate([times.op_end_s, times.transfer_end_s])
    found = []
    for rank, program in enumerate(made.programs):
        posted_s, now = {}, 0.0
        for kind, item, _ in program:
            if kind in ("op", "updates"):
                now = end_s[item]
            elif kind == "receive" and is_posted:
                posted_s[item] = now
        jobs = [op for op in range(n) if plan.devices[op] == rank and not graph.is_source[op]]
        changes = [(start_s[op], 1, int(problem.workspace_bytes[op, rank])) for op in jobs]
        changes += [(end_s[op], 0, -int(problem.workspace_bytes[op, rank])) for op in jobs]
        for item, tensor in made.allocations(rank):
            taken_s = min(start_s[item], posted_s.get(item, np.inf))
            changes.append((taken_s, 1, int(graph.tensor_bytes[tensor])))
        for item, tensor in made.releases(rank):
            is_own = plan.devices[graph.tensor_op[tensor]] == rank
            sends = np.flatnonzero((plan.transfer_tensor == tensor) & is_own)
            readers = graph.edge_op[graph.input_tensors == tensor]
            readers = readers[plan.devices[readers] == rank]  # one may end after a send that is later in the program
            freed_s = max([end_s[item], *end_s[readers], *times.transfer_end_s[sends]])
            changes.append((freed_s, 0, -int(graph.tensor_bytes[tensor])))
        here = plan.devices == rank
        held = int(graph.state_bytes[here].sum())
        held += int(graph.tensor_bytes[(here & graph.is_source)[graph.tensor_op]].sum())
        levels = np.cumsum([num_bytes for *_, num_bytes in sorted(changes)])
        found.append(held + int(levels.max(initial=0)))
    return tuple(found)


def random_steps(seed: int, host: Host, sends_wait: bool) -> tuple[Problem, RankPrograms]:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(6, 60)))
    problem = problem_of(graph, host, rng.integers(1, 9, (graph.num_ops, host.num_devices)) / 2, source="given")
    devices = random_devices(graph, host.num_devices, rng)
    changed = list(zip(graph.mutation_op.tolist(), graph.tensor_op[graph.mutation_tensor].tolist(), strict=True))
    for _ in changed:  # what an op changes is where the op is
        for pair in changed:
            devices[list(pair)] = devices[list(pair)].min()
    plan = Simulator(problem, threads=1).plan(devices)
    return problem, rank_programs(graph, host, plan, sends_wait=sends_wait)


def processes(num_devices: int, *, blocks_source: bool, **facts: object) -> Host:
    host = plain_host(num_devices, 200.0, 0.25, **facts).as_processes("processes")
    return replace(host, routes=tuple(replace(route, blocks_source=blocks_source) for route in host.routes))


@pytest.mark.parametrize("dispatch_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("is_posted", [False, True])
def test_simulated_peaks_are_those_of_the_programs(is_posted: bool, dispatch_s: float) -> None:
    """Over slots, which sources write, and over receives that destinations post ahead."""
    num_ahead = 0
    for seed in range(150):
        host = processes(2 + seed % 3, blocks_source=not is_posted, dispatch_s=dispatch_s, run_ahead=1 + 8 * (seed % 2))
        problem, made = random_steps(seed, host, is_posted)
        found = Simulator(problem, threads=1).retime(made.plan).peak_bytes
        assert found == peaks_of_programs(problem, made, is_posted), seed
        num_ahead += is_posted and found != peaks_of_programs(problem, made, False)
    assert num_ahead >= 5 * is_posted, "it makes a difference when a receive is posted"


def test_a_receive_is_posted_before_its_tensor_is_made() -> None:
    """Device 1 is done with op 1 at 1 s, and waits for the 100 bytes that device 0 has made after 5 s.

    Its op 1 takes another 300 bytes, which op 2 frees, if that comes first.
    """
    graph = op_graph([[], [], [1], [0, 2]], [100, 300, 10, 1])
    costs = Costs(np.array([[5.0, 5.0], [1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]), "given")
    peaks = {}
    for is_ahead in (False, True):
        host = replace(processes(2, blocks_source=False), processes=is_ahead)
        problem = Problem(graph, host, costs, Grouping(np.arange(4)))
        simulator = Simulator(problem, threads=1)
        plan = simulator.plan(np.array([0, 1, 1, 1], dtype=np.int32))
        # the transfer stands where op 0 might have ended, had it been as fast as planned
        plan = replace(plan, sequence=np.array([0, 1, 4, 2, 3], dtype=np.int32))
        peaks[is_ahead] = simulator.retime(plan).peak_bytes
    assert peaks == {False: (100, 310), True: (100, 410)}
