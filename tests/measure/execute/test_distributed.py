"""Steps over `torch.distributed`: with gloo between threads that stand for processes, equal to the bit to threads."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host, process_host
from faulty_ops import faulty_graph
from machine_hosts import core_machines
from naive_plan import naive_plan, random_devices
from placed_steps import NUM_STEPS, run_placed
from rank_threads import rank_residents, rank_threads
from small_models import step_graph
from torch import Tensor

from rlplace.errors import RunnerError
from rlplace.graphs import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.distributed import DistributedChannel, Wires, connect, store_in
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew
from rlplace.measure.execute.shared_memory import SharedChannel
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan, transfer_sources


def gloo(host: Host) -> partial[Wires]:
    """Makes the wires of a rank."""
    store = torch.distributed.HashStore()
    return partial(lambda rank: connect(host, rank, store))


def on_machines(host: Host) -> Host:
    """The host with its first device on one machine, all others on another: these are told by messages what to do."""
    devices = (replace(device, machine="b" if k else "a") for k, device in enumerate(host.devices))
    return replace(host, devices=tuple(devices))


def run_on_ranks(
    graph: OpGraph, host: Host, plan: Plan, ranks: RankCrew, *, is_traced: bool = False
) -> tuple[PlacedStep, list[Tensor]]:
    """A step from the parameters of the capture on, and the losses of some runs of it."""
    residents = rank_residents(graph, host, ranks)
    residents.reset()
    step, losses = PlacedStep(graph, host, plan, residents, ranks, is_traced=is_traced), []
    for number in range(NUM_STEPS):
        step.run(number)
        losses.append(step.result.clone().reshape(()))
    return step, losses


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "channels_last", "tied", "lstm", "attention"])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("has_machines", [False, True])
def test_losses_are_those_of_threads_to_the_bit(name: str, num_devices: int, has_machines: bool) -> None:
    torch.manual_seed(0)
    graph = step_graph(name, "adamw")
    host, generator = core_host(num_devices), np.random.default_rng(num_devices)
    crew = Crew(host.devices)
    apart = on_machines(host) if has_machines else host
    with rank_threads(graph, apart, wires=gloo(host)) as ranks:
        for _ in range(3):
            plan = naive_plan(graph, random_devices(graph, num_devices, generator), generator)
            expected, _ = run_placed(graph, host, plan, crew)
            step, losses = run_on_ranks(graph, apart, plan, ranks)
            step.unload()
            assert losses == expected.losses
    crew.stop()


def mixed_host() -> Host:
    """Two machines of two devices each, which share a memory."""
    host = process_host(4)
    devices = (replace(each, machine="ab"[k // 2], memory_pool="ab"[k // 2]) for k, each in enumerate(host.devices))
    return replace(host, devices=tuple(devices))


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "tied", "attention"])
def test_ranks_that_share_a_memory_use_it_and_others_send_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by way; losses are those of threads to the bit."""
    torch.manual_seed(0)
    graph = step_graph(name, "adamw")
    host, generator, counts = mixed_host(), np.random.default_rng(0), Counter[type]()
    for way in (SharedChannel, DistributedChannel):

        def send(channel: Any, tensor: Tensor, way: Any = way, plainly: Any = way.send) -> None:
            counts[way] += 1
            plainly(channel, tensor)

        monkeypatch.setattr(way, "send", send)
    crew, store, num_relayed = Crew(host.devices), torch.distributed.HashStore(), 0
    pairs: set[tuple[int, int]] = set()

    def wires(rank: int) -> Wires:
        made = connect(host, rank, store, is_sparse=True)
        pairs.update(made)
        return made

    with rank_threads(graph, host, wires=wires) as ranks:
        for _ in range(3):
            plan = naive_plan(graph, random_devices(graph, 4, generator), generator)
            expected, _ = run_placed(graph, core_host(4), plan, crew)
            counts.clear()
            step, losses = run_on_ranks(graph, host, plan, ranks)
            step.unload()
            assert losses == expected.losses
            sources = transfer_sources(graph, host, plan)
            num_relayed += int((sources != plan.devices[graph.tensor_op[plan.transfer_tensor]]).sum())
            is_near = sources // 2 == plan.transfer_destination // 2
            assert counts[SharedChannel] == NUM_STEPS * is_near.sum()
            assert counts[DistributedChannel] == NUM_STEPS * (~is_near).sum()
    assert pairs == {pair for pair in permutations(range(4), 2) if pair[0] // 2 != pair[1] // 2}
    assert num_relayed > 0
    crew.stop()


@pytest.mark.parametrize("name", ["lstm", "tied", "attention"])
def test_traced_steps_with_relays_that_only_send_messages_equal_those_of_threads_to_the_bit(name: str) -> None:
    """Two machines of two ranks, none of which share a memory."""
    torch.manual_seed(0)
    graph = step_graph(name, "adamw")
    host, generator = core_machines("aabb"), np.random.default_rng(0)
    host = replace(host, devices=tuple(replace(device, memory_pool="") for device in host.devices))
    crew, num_relayed = Crew(host.devices), 0
    with rank_threads(graph, host, wires=gloo(host)) as ranks:
        for is_traced in (False, True, False, False, True):
            plan = naive_plan(graph, random_devices(graph, 4, generator), generator)
            expected, _ = run_placed(graph, core_host(4), plan, crew)
            step, losses = run_on_ranks(graph, host, plan, ranks, is_traced=is_traced)
            assert losses == expected.losses
            sources = transfer_sources(graph, host, plan)
            num_relayed += int((sources != plan.devices[graph.tensor_op[plan.transfer_tensor]]).sum())
            if is_traced:
                timeline = step.timeline()
                assert timeline.transfer_source.tolist() == sources.tolist()
                assert (timeline.memory_bytes >= 0).all()
            step.unload()
    assert num_relayed > 2
    crew.stop()


def test_a_rank_on_another_machine_tells_its_error() -> None:
    graph, host = faulty_graph(("raise",)), core_host(2)
    plan = naive_plan(graph, np.array([0, 1, 1], dtype=np.int32))
    with rank_threads(graph, on_machines(host), wires=gloo(host)) as ranks:
        step = PlacedStep(graph, on_machines(host), plan, rank_residents(graph, on_machines(host), ranks), ranks)
        with pytest.raises(RunnerError, match=r"op 'faulty' \(.*\) on cpu:1: ValueError: boom") as raised:
            step.run()
        assert raised.value.op == "faulty"


def test_a_store_that_ends_late_writes_into_no_other_file(tmp_path: Path) -> None:
    """Its end opens its path again, when the descriptor that it was made of may be that of another file."""
    file = os.memfd_create("rlplace")
    store = store_in(file, 1)
    store.set("name", "value")
    other = tmp_path / "other"
    other.write_text("of the user")
    os.dup2(another := os.open(other, os.O_RDWR), file)
    assert store.get("name") == b"value"
    del store
    assert other.read_text() == "of the user"
    for each in (file, another):
        os.close(each)
