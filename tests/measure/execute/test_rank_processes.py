"""Steps over shared memory: equal to the bit to those of threads, and a failure is named and wakes every rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from faulty_ops import switched_graph
from naive_plan import naive_plan, random_devices
from placed_steps import HOST, NUM_STEPS, alternating, run_placed, single
from rank_threads import rank_residents, rank_threads
from small_models import Dropouts, mean_square, random, step_graph
from torch import Tensor, nn

from rlplace.errors import InvalidValue, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS
from rlplace.measure.execute import device_threads
from rlplace.measure.execute.device_threads import Asked, Crew
from rlplace.measure.execute.launch_code import StepCode
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.rank_processes import RankCrew
from rlplace.measure.execute.shared_memory import Arena, SharedChannel
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def run_ranks(graph: OpGraph, host: Host, plan: Plan, crew: RankCrew, *, is_traced: bool = False) -> PlacedStep:
    """A step with residents of its own, as they were at capture."""
    residents = rank_residents(graph, host, crew)
    residents.reset()
    return PlacedStep(graph, host, plan, residents, crew, is_traced=is_traced)


def losses(step: PlacedStep) -> list[Tensor]:
    found = []
    for number in range(NUM_STEPS):
        step.run(number)
        found.append(step.result.clone().reshape(()))
    return found


@pytest.mark.parametrize("name", ["linear", "batch_norm_train", "channels_last", "tied", "lstm", "attention"])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_losses_are_those_of_threads_to_the_bit(name: str, num_devices: int) -> None:
    """The loss of a later step tells of the parameters, moments, counters and buffers of all ranks before it."""
    graph = step_graph(name, "adamw")
    host, generator = core_host(num_devices), np.random.default_rng(num_devices)
    crew = Crew(host.devices)
    with rank_threads(graph, host) as ranks:
        for _ in range(3):
            plan = naive_plan(graph, random_devices(graph, num_devices, generator), generator)
            expected, _ = run_placed(graph, host, plan, crew)
            assert losses(run_ranks(graph, host, plan, ranks)) == expected.losses
    crew.stop()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_random_ops_draw_by_seed_op_and_step(num_parts: int) -> None:
    cut = {"micro_batches": num_parts, "loss": "accumulated"} if num_parts > 1 else {}
    graph = capture(Dropouts(0.5), random(12, 4), mean_square, "adam", **cut)
    plan = naive_plan(graph, alternating(graph, 2))
    crew = Crew(HOST.devices)
    expected, _ = run_placed(graph, HOST, plan, crew)
    crew.stop()
    with rank_threads(graph, HOST) as ranks:
        assert losses(run_ranks(graph, HOST, plan, ranks)) == expected.losses


def test_plans_of_any_size_share_signals_and_slots() -> None:
    """In turn: a large plan, one without a transfer, the large one again."""
    graph = capture(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), random(4, 8, dtype=torch.float32))
    few, many = single(graph), naive_plan(graph, alternating(graph, 2))
    with rank_threads(graph, HOST) as ranks:
        steps = [run_ranks(graph, HOST, plan, ranks) for plan in (many, few)]
        for _ in range(3):
            for step in steps:
                step.run()
            assert torch.equal(steps[0].result, steps[1].result)
        steps[0].unload()
        steps[1].run()


def test_a_traced_step_tells_when_items_of_every_rank_ran() -> None:
    graph = step_graph("linear")
    plan = naive_plan(graph, alternating(graph, 2))
    with rank_threads(graph, HOST) as ranks:
        step = run_ranks(graph, HOST, plan, ranks, is_traced=True)
        step.run(0)
        seconds = step.run(1)
        timeline = step.timeline()
    runs = ~graph.is_source
    assert ((timeline.op_end_s > 0) == runs).all()
    assert (timeline.op_end_s >= timeline.op_start_s).all()
    assert 0 < timeline.op_end_s.max() <= seconds
    assert (timeline.transfer_end_s >= timeline.transfer_start_s).all()
    offsets, readers = graph.readers
    for k, tensor in enumerate(plan.transfer_tensor):
        maker = graph.tensor_op[tensor]
        assert timeline.transfer_start_s[k] >= timeline.op_end_s[maker], "its producer makes the copy"
        there = readers[offsets[tensor] : offsets[tensor + 1]]
        there = there[plan.devices[there] == timeline.transfer_destination[k]]
        assert (timeline.op_end_s[there] >= timeline.transfer_end_s[k]).all()


@pytest.mark.parametrize("devices", [[0, 0, 0, 0], [0, 1, 2, 0], [0, 1, 0, 2], [1, 0, 2, 1]])
def test_a_failing_op_is_named_and_wakes_every_rank(devices: list[int], switch: dict[str, Any]) -> None:
    graph, host, op = switched_graph(), core_host(3), "op 'switched' (rlplace_tests_faults.switched.default)"
    with rank_threads(graph, host) as ranks:
        step = run_ranks(graph, host, naive_plan(graph, np.array(devices, dtype=np.int32)), ranks)
        other = run_ranks(graph, host, naive_plan(graph, np.array([1, 0, 1, 0], dtype=np.int32)), ranks)
        for _ in range(2):
            switch["fails"] = ValueError("boom")
            with pytest.raises(RunnerError) as failed:
                step.run(deadline_s=60)
            assert str(failed.value) == f"{op} on cpu:{devices[2]}: ValueError: boom"
            assert failed.value.op == "switched"
            switch["fails"] = None
            for runs in (other, step):
                runs.run()
                assert runs.result.tolist() == [3.0] * 3


def test_a_step_that_cannot_be_loaded_is_loaded_nowhere() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    with rank_threads(graph, HOST) as ranks:
        step = run_ranks(graph, HOST, naive_plan(graph, alternating(graph, 2)), ranks)
        ranks._arena.limit_bytes = 1
        with pytest.raises(RunnerError, match="copies in flight take"):
            step.run()
        assert not step.is_loaded
        ranks._arena.limit_bytes = 1 << 20
        step.run()


def test_a_stuck_rank_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_threads, "GRACE_S", 0.05)
    graph = switched_graph()
    plan = naive_plan(graph, np.array([0, 0, 1, 0], dtype=np.int32))
    stuck = threading.Event()
    with rank_threads(graph, HOST) as ranks:
        step = run_ranks(graph, HOST, plan, ranks)
        step.run()
        monkeypatch.setattr(torch.Tensor, "clone", lambda self: stuck.wait(60) and self * 1)
        with pytest.raises(TimeoutError, match="did not end its part"):
            step.run(deadline_s=0.2)
        with pytest.raises(RunnerError, match="still busy"):
            step.run()
        stuck.set()


def test_residents_are_kept_apart_and_dropped_everywhere() -> None:
    graph = step_graph("linear")
    with rank_threads(graph, HOST) as ranks:
        residents = rank_residents(graph, HOST, ranks)
        step = PlacedStep(graph, HOST, naive_plan(graph, alternating(graph, 2)), residents, ranks)
        step.load()
        assert residents.made == step.needs
        assert {home for _, home in residents.made} == {"cpu:0", "cpu:1"}
        residents.keep_only(())
        assert residents.made == frozenset()


def test_ranks_are_told_once_what_they_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again when an option, a tensor for gradients or the scale of the loss is another."""
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4), mean_square, "adam")
    spec, told = OPTIMIZERS["adam"], []
    with rank_threads(graph, HOST) as ranks:
        ask = ranks.ask
        monkeypatch.setattr(ranks, "ask", lambda *message: told.append(message[0]) or ask(*message))
        gradient = ranks.heap.home(torch.zeros(2, 4))
        other = ranks.heap.home(torch.zeros(2, 4))
        for asked in (Asked(), Asked({"weight": gradient}, frozenset()), Asked({"weight": gradient}, {"weight"})):
            told.clear()
            for _ in range(2):
                ranks.follow(spec, asked)
            assert told == ["follow"]
        for changed in (
            (replace(spec, lr=0.5), asked),
            (spec, asked),
            (spec, Asked({"weight": other}, {"weight"})),
            (spec, Asked({"weight": other}, {"weight"}, 2.0)),
        ):
            told.clear()
            ranks.follow(*changed)
            assert told == ["follow"]


def test_a_busy_rank_is_refused_before_any_other_is_sent_a_message() -> None:
    """Else the others would answer what nobody waits for."""
    graph, host = capture(nn.Linear(4, 2), torch.ones(3, 4)), core_host(3)
    with rank_threads(graph, host) as ranks:
        first, second = ranks.workers[1:]
        sent: list[bytes] = []
        first.ask, ask = lambda packed: sent.append(packed) or ask(packed), first.ask
        second.is_busy = True
        with pytest.raises(RunnerError, match="cpu:2 is still busy"):
            ranks.ask("made")
        assert sent == []
        second.is_busy = False
        assert ranks.ask("made") == [frozenset(), frozenset()]


def test_gangs_are_refused() -> None:
    graph, host = capture(nn.Linear(4, 2), torch.ones(3, 4)), core_host(2, has_gang=True)
    plan = naive_plan(graph, np.arange(graph.num_ops, dtype=np.int32) % 3)
    with rank_threads(graph, host) as ranks, pytest.raises(InvalidValue, match="Gangs need threads"):
        PlacedStep(graph, host, plan, rank_residents(graph, host, ranks), ranks).load()


def test_code_waits_for_a_copy_where_it_is_first_read_and_frees_it_before_it_sends() -> None:
    """Three copies in turn in one slot: each is freed before the next one is sent."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.neg().abs().sin().cos()

    graph = capture(Chain(), torch.ones(4))  # input, neg, abs, sin, cos
    code = StepCode(graph, HOST, naive_plan(graph, np.array([0, 0, 1, 0, 1], dtype=np.int32)), has_slots=True)
    first, second = ([line.strip() for line in source.splitlines()[1:-1]] for source in code.sources)
    assert code.ranks.slots.of == (0, 0, 0)
    assert first.index("k0_send(t1)") < first.index("t2 = k1_take()") < first.index("k2_send(t3)")
    lines = ["k0_wait()", "t1 = k0_take()", "t2 = f2(t1)", "del t1", "k1_send(t2)", "del t2", "k2_wait()"]
    assert [line for line in second if line in lines] == lines


def test_a_copy_is_laid_out_as_threads_lay_it_out() -> None:
    """Transposed, expanded, and without elements."""
    arena = Arena.new(1)
    arena.make_room(1, 4096)
    for tensor in (torch.randn(3, 4).T, torch.randn(3, 1).expand(3, 4), torch.empty(0, 3), torch.tensor(2.0)):
        one, other = (SharedChannel(arena, 0, arena.slots(4096), 0) for _ in range(2))
        one.send(tensor)
        other.wait_ready()
        taken = other.take()
        assert torch.equal(taken, tensor)
        assert taken.stride() == tensor.clone().stride()
    arena.close()
