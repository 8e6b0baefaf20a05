"""Costs and links from traced steps, from ops one by one and from copies: what is done with the figures."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import plain_gpus
import pytest
import torch
from core_hosts import core_host, process_host
from faulty_ops import switched_graph
from numpy.typing import NDArray
from placed_steps import HOST
from small_models import CASES, mean_square, random, step_graph
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace import cuda
from rlplace.errors import InvalidValue, RunnerError
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.rank_programs import rank_programs
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.shared_memory import SharedChannel
from rlplace.measure.hosts.detect import gpu_host
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Timeline, single_device_plan
from rlplace.measure.profiling import profile
from rlplace.measure.profiling import profile as isolated
from rlplace.measure.profiling import profile as links
from rlplace.measure.profiling.profile import (
    GPU_SIZES_BYTES,
    LEAST,
    MOST,
    SIZES_BYTES,
    Layout,
    isolated_s,
    layouts,
    line,
    maker,
    profile_costs,
    profile_links,
    share_by_signature,
)
from rlplace.measure.timing.race import Watch


def test_an_op_has_the_median_of_its_steps_and_equal_ops_the_mean_of_theirs() -> None:
    samples_s = np.array([[1.0, 2.0, 9.0, 5.0], [2.0, 2.0, 6.0, 5.0], [9.0, 2.0, 6.0, 1.0]])
    shared = share_by_signature(("a", "a", "a", "b"), samples_s)
    # medians 2, 2, 6 and 5
    assert shared.tolist() == [10 / 3, 10 / 3, 10 / 3, 5.0]
    assert shared.sum() == pytest.approx(np.median(samples_s, axis=0).sum())


def test_profiled_costs_of_a_training_step() -> None:
    case = CASES["lstm_cell"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    told: list[str] = []
    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    costs = profile_costs(graph, core_host(2, has_gang=True), num_steps=3, warmup=1, on_progress=told.append)
    assert costs.source == "profiled"
    assert costs.op_time_s.shape == (graph.num_ops, 3)
    assert np.all(costs.op_time_s[graph.is_source] == 0)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    assert np.array_equal(costs.op_time_s[:, 0], costs.op_time_s[:, 1]), "devices of one kind share figures"
    assert len(told) == 2, "one run for each kind"
    assert "cpu:0 (cpu-core)" in told[0]
    for signature in set(graph.signatures):
        alike = [op for op in range(graph.num_ops) if graph.signatures[op] == signature]
        assert len(set(costs.op_time_s[alike, 0].tolist())) == 1
    assert all(torch.equal(value, state[name]) for name, value in case.model.state_dict().items())


@pytest.mark.parametrize(("most_s", "steps"), [(0.0, 2), (float("inf"), 7)])
def test_where_the_time_is_over_one_step_after_the_first_is_traced(most_s: float, steps: int) -> None:
    begun: list[int] = []

    class Counting(Watch):
        def begin(self, contender: int, *, is_made: bool = True) -> None:
            begun.append(contender)

    graph = capture(nn.Linear(4, 4), torch.ones(2, 4), lambda y: y.sum(), "sgd")
    costs = profile_costs(graph, core_host(2), num_steps=4, warmup=3, most_s=most_s, watch=Counting())
    assert begun == [0] * steps
    assert np.all(costs.op_time_s[~graph.is_source] > 0)


def test_an_op_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input, then two ops: 1.0..1.5 and 2.0..4.0 s; what lies between them is the second's."""
    graph = capture(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.ones(3))
    none = np.zeros(0)
    timeline = Timeline(
        np.zeros(3, dtype=np.int32),
        np.array([0.0, 1.0, 2.0]),
        np.array([0.0, 1.5, 4.0]),
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        "measured",
    )

    class Step:
        launch_s = (0.0,)

        def __init__(self, *_: object, **__: object) -> None: ...
        def unload(self) -> None: ...
        def run(self, number: int) -> None: ...
        def timeline(self) -> Timeline:
            return timeline

    monkeypatch.setattr(profile, "PlacedStep", Step)
    assert profile_costs(graph, core_host(1), num_steps=2).op_time_s[:, 0].tolist() == [0.0, 0.5, 2.5]
    assert timeline.op_start_s.tolist() == [0.0, 1.0, 2.0]


def test_a_graph_file_alone_cannot_be_profiled() -> None:
    from micrographs import op_graph

    with pytest.raises(InvalidValue, match="capture it again"):
        profile_costs(op_graph([[], [0]]), core_host(1))


def tiny(host: Host, *names: str) -> Host:
    """Devices of those names have next to no memory."""
    devices = tuple(
        dataclasses.replace(each, memory_bytes=100, memory_pool="") if each.name in names else each
        for each in host.devices
    )
    return dataclasses.replace(host, devices=devices)


@pytest.fixture
def told() -> list[str]:
    return []


def training(name: str = "lstm_cell") -> OpGraph:
    return step_graph(name)


def check_isolated(graph: OpGraph, costs: Costs, device: int) -> None:
    runs = ~graph.is_source
    assert np.all(costs.op_time_s[graph.is_source, device] == 0)
    assert np.all(np.isfinite(costs.op_time_s[runs, device]))
    assert np.all(costs.op_time_s[runs, device] > 0)
    by_signature: dict[str, set[float]] = defaultdict(set)
    for op in np.flatnonzero(runs):
        by_signature[graph.signatures[op]].add(float(costs.op_time_s[op, device]))
    assert all(len(figures) == 1 for figures in by_signature.values())


def test_where_the_step_does_not_fit_ops_are_timed_one_by_one(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()
    monkeypatch.setattr(profile, "_trace_device", None)
    costs = profile_costs(graph, tiny(core_host(2), "cpu:0", "cpu:1"), on_progress=told.append)
    assert costs.source == "profiled"
    assert len(told) == 1
    assert "one by one on cpu:0 (cpu-core): the whole step needs" in told[0]
    check_isolated(graph, costs, 0)
    assert np.array_equal(costs.op_time_s[:, 0], costs.op_time_s[:, 1])


def test_the_device_of_a_kind_that_holds_the_step_is_traced(told: list[str]) -> None:
    graph = training("linear")
    profile_costs(graph, tiny(core_host(2), "cpu:0"), num_steps=1, warmup=1, on_progress=told.append)
    assert len(told) == 1
    assert "ops on cpu:1 (cpu-core)" in told[0]


def test_running_out_of_memory_half_way_is_too_small_as_well(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()

    def original(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Residents, "_original", original)
    costs = profile_costs(graph, core_host(1), on_progress=told.append)
    assert len(told) == 2
    assert "ran out of its memory" in told[1]
    check_isolated(graph, costs, 0)


def test_another_failure_of_the_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(*_: object) -> torch.Tensor:
        raise ValueError("boom")

    monkeypatch.setattr(Residents, "_original", original)
    with pytest.raises(RunnerError, match="ValueError: boom"):
        profile_costs(training(), core_host(1))


def test_figures_of_ops_alone_are_scaled_by_what_a_traced_device_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, every op takes 2 s, in a step on the gang 3 s: so it does on a core, which is too small for the step."""
    graph = training("linear")
    asked: list[int] = []

    def alone(graph: OpGraph, host: Host, device: int, *rest: Any) -> NDArray[np.float64]:
        asked.append(device)
        return np.full(len(rest[1]), 2.0)

    def traced(graph: OpGraph, host: Host, device: int, *_: object, **__: object) -> NDArray[np.float64]:
        return np.where(graph.is_source, 0.0, 3.0)[None]

    monkeypatch.setattr(profile, "isolated_s", alone)
    monkeypatch.setattr(profile, "_trace_device", traced)
    host = tiny(core_host(2, has_gang=True), "cpu:0", "cpu:1")
    op_time_s = profile_costs(graph, host).op_time_s[~graph.is_source]
    assert np.all(op_time_s == 3.0)
    assert asked == [0, 2]
    monkeypatch.setattr(profile, "MOST_RATIO", 1.25)
    op_time_s = profile_costs(graph, host).op_time_s[~graph.is_source]
    assert np.all(op_time_s == [2.5, 2.5, 3.0]), "a ratio beyond all reason is a disturbed measurement"


def test_launches_run_ahead_of_a_traced_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held back from the second warm step on, at the start and after every so many ops; residents are given back."""
    calls = plain_gpus.install(monkeypatch)
    monkeypatch.setattr(profile, "HOLD_EVERY", 5)
    graph = training()
    costs = profile_costs(graph, plain_gpus.gpu_host(1, 1 << 30), num_steps=4, warmup=3)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    # a run of updates is one call
    program = rank_programs(graph, plain_gpus.gpu_host(1, 1 << 30), single_device_plan(graph, 0)).programs[0]
    num_held = -(-sum(kind in ("op", "updates") for kind, _, _ in program) // 5)
    assert len(calls.held_back) == (1 + 4) * num_held
    assert len(set(calls.held_back)) == 1
    assert 0 < calls.held_back[0] <= 1.5e8
    assert calls.num_given_back == 2, "before the limit holds, and after the residents are gone"
    assert [num_bytes for _, num_bytes in calls.limits] == [1 << 30, cuda.UNLIMITED]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_profiled_costs_on_a_gpu() -> None:
    graph = capture(nn.Linear(64, 64), random(8, 64, dtype=torch.float32), mean_square, "adam")
    costs = profile_costs(graph, Host.detect(), num_steps=3, warmup=1)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    assert np.all(np.isfinite(costs.op_time_s))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "ENOUGH_S", 0.0)


def runs(graph: OpGraph) -> list[int]:
    return np.flatnonzero(~graph.is_source).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_op_of_every_model_runs_alone(name: str, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, views, random ops, custom layouts: none has to be estimated."""
    case = CASES[name]()
    graph = capture(case.model, case.inputs, case.loss_fn, "momentum", targets=case.targets)
    known, state = layouts(graph), torch.get_rng_state()
    failed: list[BaseException] = []
    monkeypatch.setattr(cuda, "is_lost", lambda error: failed.append(error) is None and False)
    seconds = isolated_s(graph, HOST, 1, crew, runs(graph), known)
    assert seconds.shape == (len(runs(graph)),)
    assert np.all(np.isfinite(seconds))
    assert np.all(seconds > 0)
    assert failed == []
    assert torch.equal(state, torch.get_rng_state())


def test_the_tensors_of_one_op_are_gone_before_the_next(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["transformer_layer"]()
    graph = capture(case.model, case.inputs, case.loss_fn, "adam")
    make, seconds = Layout.make, isolated._seconds
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tracked(layout: Layout, place: torch.device, generator: torch.Generator) -> Tensor:
        tensor = make(layout, place, generator)
        alive.append(weakref.ref(tensor))
        return tensor

    def timed(*arguments: object) -> float:
        nonlocal most
        assert [each() for each in alive] == [None] * len(alive)
        alive.clear()
        found = seconds(*arguments)  # type: ignore[arg-type]
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(Layout, "make", tracked)
    monkeypatch.setattr(isolated, "_seconds", timed)
    isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))
    assert 1 < most < 20


def test_an_op_that_fails_is_estimated_by_its_bytes(
    switch: dict[str, Any], crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, switch["fails"] = switched_graph(300), torch.OutOfMemoryError("too big alone")
    monkeypatch.setattr(isolated.timeit, "repeat", lambda run, *, number, repeat: [2e-6])
    mul, failed, add = isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))
    assert mul == add == 2e-6
    rates = 2e-6 / graph.bytes_moved[[1, 3]]
    assert failed == pytest.approx(max(graph.bytes_moved[2] * np.median(rates), 2e-6))
    assert isolated_s(graph, HOST, 0, crew, [], {}).shape == (0,)


def test_when_all_fail_or_the_device_is_lost_it_is_an_error(switch: dict[str, Any], crew: Crew) -> None:
    graph, switch["fails"] = switched_graph(300), torch.OutOfMemoryError("too big alone")
    with pytest.raises(RunnerError, match="no op runs alone on cpu:0: OutOfMemoryError: too big alone"):
        isolated_s(graph, HOST, 0, crew, [2], layouts(graph))
    switch["fails"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RunnerError, match="illegal memory access"):
        isolated_s(graph, HOST, 0, crew, runs(graph), layouts(graph))


def test_on_a_gpu_launches_get_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, calls = switched_graph(300), plain_gpus.install(monkeypatch)
    monkeypatch.setattr(isolated, "torch_device", lambda device: torch.device("cpu"))
    host = plain_gpus.gpu_host(1, 1 << 30)
    crew = Crew(host.devices)
    seconds = isolated_s(graph, host, 0, crew, runs(graph), layouts(graph))
    crew.stop()
    assert np.all(seconds > 0)
    assert len(calls.held_back) == 3
    assert all(0 < cycles <= 1.5e8 for cycles in calls.held_back)


CPU = torch.device("cpu")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    "name", ["lstm_cell", "channels_last", "transposed_gradient", "split", "strided_input", "writes"]
)
def test_layouts_are_those_of_the_graph_and_of_its_sources(name: str) -> None:
    graph = step_graph(name)
    known = layouts(graph)
    for tensor in range(graph.num_tensors):
        if tensor not in known:
            continue
        assert known[tensor].shape == graph.tensor_shapes[tensor]
        assert str(known[tensor].dtype).removeprefix("torch.") == graph.tensor_dtypes[tensor]
    for op, source in require_program(graph).sources.items():
        assert known[int(graph.output_offsets[op])].strides == source.value.stride()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4),
        torch.ones(6, 9)[1::2, 2:6],
        torch.ones(3, 1).expand(3, 5),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=str,
)
def test_a_made_tensor_lies_like_the_one_that_it_stands_for(value: Tensor) -> None:
    made = Layout(tuple(value.shape), value.stride(), value.dtype).make(CPU, generator())
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    real = torch.view_as_real(made) if made.is_complex() else made
    assert torch.all((real >= LEAST - 1e-3) & (real <= MOST + 1e-3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_zero_a_valid_index_everywhere(dtype: torch.dtype) -> None:
    assert not torch.any(Layout((3,), (1,), dtype).make(CPU, generator()))


def test_models_of_fake_tensors_and_without_a_program() -> None:
    with FakeTensorMode():
        model, inputs = nn.Embedding(5, 4), torch.zeros(3, dtype=torch.int64)
    graph = capture(model, inputs)
    known = layouts(graph)
    assert known[int(graph.output_tensors[0])] == Layout((3, 4), (4, 1), torch.float32)
    from micrographs import op_graph

    with pytest.raises(InvalidValue, match="capture it again"):
        layouts(op_graph([[]]))


def test_one_value_is_made_once_and_without_anyones_generator() -> None:
    from rlplace.graphs.program import Ref

    torch.manual_seed(7)
    before = torch.get_rng_state()
    make = maker({0: Layout((2,), (1,), torch.float32), 1: Layout((2,), (1,), torch.float32)}, CPU)
    assert make(Ref(0)) is make(Ref(0))
    assert make(Ref(0)) is not make(Ref(1))
    assert torch.equal(before, torch.get_rng_state())


class Wires:
    """Transfers between two devices take `latency_s`, and a second for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bandwidth: dict[tuple[str, str], float] | float) -> None:
        self.bandwidth, self.latency_s = bandwidth, 5e-6
        self.asked: list[tuple[str, str, int]] = []
        self.by_slots: set[bool] = set()
        monkeypatch.setattr(links, "_round_s", self.round_s)

    def one_way_s(self, size: int, source: str, destination: str) -> float:
        rate = self.bandwidth if isinstance(self.bandwidth, float) else self.bandwidth[source, destination]
        return self.latency_s + size / rate

    def round_s(
        self, size: int, answer_size: int, source: Device, destination: Device, repeats: int, *, by_slots: bool = False
    ) -> float:
        self.by_slots.add(by_slots)
        self.asked.append((source.name, destination.name, size))
        there = self.one_way_s(size, source.name, destination.name)
        return there + self.one_way_s(answer_size, destination.name, source.name)


def test_a_line_through_the_sizes_gives_latency_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    wires = Wires(monkeypatch, 2e9)
    before = core_host(3)
    host = profile_links(before)
    assert [link.name for link in host.links] == [link.name for link in before.links]
    for link in host.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
        assert link.latency_s == pytest.approx(5e-6)
    assert wires.asked == [("cpu:0", "cpu:1", size) for size in SIZES_BYTES], "one pair of kinds is measured once"
    assert wires.by_slots == {False}
    assert host.fingerprint == before.fingerprint
    assert host.routes == before.routes


def test_hand_overs_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    Wires(monkeypatch, 1e9)
    host = profile_links(core_host(2, has_gang=True))
    assert len(host.links) == 2
    assert [route.links for route in host.routes if "cpu:all" in (route.source, route.destination)] == [()] * 4


def test_real_copies_give_usable_figures() -> None:
    for link in profile_links(core_host(2), repeats=2).links:
        assert np.isfinite(link.bandwidth_bytes_per_s)
        assert 1e6 <= link.bandwidth_bytes_per_s <= 2e12
        assert link.latency_s >= 0


def test_tensors_between_processes_go_through_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent by the threads of both devices, in turn, from the source's own memory into the slot of its way."""
    sent: list[tuple[str, int]] = []
    taken: list[bool] = []
    send, take = SharedChannel.send, SharedChannel.take

    def watched_send(self: SharedChannel, tensor: torch.Tensor) -> None:
        sent.append((threading.current_thread().name, tensor.numel()))
        send(self, tensor)

    def watched_take(self: SharedChannel) -> torch.Tensor:
        found = take(self)
        taken.append(bool((found == 1).all()))
        return found

    monkeypatch.setattr(SharedChannel, "send", watched_send)
    monkeypatch.setattr(SharedChannel, "take", watched_take)
    before = process_host(2)
    host = profile_links(before, repeats=2)
    assert sent == [(f"rlplace cpu:{k % 2}", size) for size in SIZES_BYTES for k in range(2 * (2 + 3))]
    assert len(taken) == len(sent)
    assert all(taken)
    assert host.fingerprint == before.fingerprint
    for link in host.links:
        assert 1e6 <= link.bandwidth_bytes_per_s <= 2e12
    sent.clear()
    profile_links(core_host(2), repeats=2)
    assert not sent, "threads pass them without slots"


NVLINK = {("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")}


def gpus(*, has_own_links: bool) -> Host:
    """Three GPUs on one switch; with links of their own, one for each ordered pair."""
    host = plain_gpus.gpu_host(3, 1 << 30)
    shared = tuple(Link(f"{device.name} {way}", 1.0) for device in host.devices for way in ("up", "down"))
    routes = tuple(
        Route(
            each.source,
            each.destination,
            (f"{each.source} up", f"{each.destination} down", *(each.links if has_own_links else ())),
        )
        for each in host.routes
    )
    return dataclasses.replace(host, links=(*shared, *(host.links if has_own_links else ())), routes=routes)


def planned(host: Host) -> dict[tuple[str, str], float]:
    """Bandwidth of each pair, as plans see it."""
    of = {link.name: link.bandwidth_bytes_per_s for link in host.links}
    return {(route.source, route.destination): min(of[name] for name in route.links) for route in host.routes}


def test_every_ordered_pair_of_gpus_is_measured_with_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up is faster than down for the last one."""
    names = ("cuda:0", "cuda:1", "cuda:2")
    bandwidth = {
        (one, other): 200e9 if (one, other) in NVLINK else 8e9 if other == "cuda:2" else 12e9
        for one in names
        for other in names
        if one != other
    }
    wires = Wires(monkeypatch, bandwidth)
    host = profile_links(gpus(has_own_links=True))
    assert wires.asked == [(*pair, size) for pair in planned(host) for size in GPU_SIZES_BYTES]
    assert max(GPU_SIZES_BYTES) == 64 << 20
    assert planned(host) == pytest.approx(bandwidth)
    shared = profile_links(gpus(has_own_links=False))
    found = {link.name: link.bandwidth_bytes_per_s for link in shared.links}
    assert found["cuda:0 up"] == pytest.approx(200e9), "the best that any route over it showed"
    assert found["cuda:2 down"] == pytest.approx(8e9)
    assert found["cuda:2 up"] == pytest.approx(12e9)
    assert all(planned(shared)[pair] >= rate * 0.999 for pair, rate in bandwidth.items())


def test_parts_of_the_same_gpus_share_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    host = plain_gpus.gpu_host(4, 1 << 30)
    parts = dict(zip((device.name for device in host.devices), ("cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1")))
    host = dataclasses.replace(
        host,
        devices=tuple(dataclasses.replace(each, name=parts[each.name]) for each in host.devices),
        routes=tuple(
            dataclasses.replace(each, source=parts[each.source], destination=parts[each.destination])
            for each in host.routes
        ),
    )
    wires = Wires(monkeypatch, 1e10)
    profile_links(host)
    pairs = list(dict.fromkeys((one, other) for one, other, _ in wires.asked))
    assert pairs == [
        ("cuda:0/0", "cuda:0/1"),
        ("cuda:0/0", "cuda:1/0"),
        ("cuda:1/0", "cuda:0/0"),
        ("cuda:1/0", "cuda:1/1"),
    ]


def test_one_disturbed_size_does_not_bend_the_line() -> None:
    seconds = [10e-6 + size / 1e10 for size in GPU_SIZES_BYTES]
    seconds[2] *= 20
    latency_s, bandwidth = line(GPU_SIZES_BYTES, seconds)
    assert bandwidth == pytest.approx(1e10, rel=0.2)
    assert latency_s == pytest.approx(10e-6, rel=0.2)


@pytest.mark.parametrize(
    ("seconds", "bandwidth"),
    [
        ([1e-3, 1e-3, 1e-3, 1e-3], (64 << 20) / 1e-3),  # no slope: the largest size over its whole time
        ([4e-3, 3e-3, 2e-3, 1e-3], (64 << 20) / 1e-3),
        ([0.0, 0.0, 0.0, 0.0], 2e12),
        ([0.0, 1e3, 1e4, 1e5], 1e6),
    ],
)
def test_what_is_no_bandwidth_of_a_machine_falls_back(seconds: list[float], bandwidth: float) -> None:
    latency_s, found = line(GPU_SIZES_BYTES, seconds)
    assert found == pytest.approx(bandwidth)
    assert 0.0 <= latency_s <= seconds[0]


def test_each_pair_of_gpus_has_its_own_figures_and_their_parts_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with the CPU and parts of GPUs: no route is held up by a link that others share with it."""
    one, other = 4e9, 2e9
    rates: dict[tuple[str, str], float] = {}
    names = ("cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1", "cpu")
    for source in names:
        for destination in names:
            ends = {source.split("/")[0], destination.split("/")[0]}
            rate = 1e9 if "cpu" in ends else 9e9 if len(ends) == 1 else one if source < destination else other
            rates[source, destination] = rate
    wires = Wires(monkeypatch, rates)
    monkeypatch.setattr(cuda, "num_gpus", lambda: 2)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))
    host = profile_links(gpu_host("lab", num_parts=2, with_cpu=True, cores=(0, 1), ram_bytes=1 << 30))
    pairs = {(source, destination) for source, destination, _ in wires.asked}
    assert len(pairs) == 8, "both GPUs in themselves, both ways between them, both ways between each and the CPU"
    by_name = {link.name: link for link in host.links}
    for route in host.routes:
        used = [by_name[name] for name in route.links]
        assert min(link.bandwidth_bytes_per_s for link in used) == pytest.approx(rates[route.source, route.destination])
        assert max(link.latency_s for link in used) == pytest.approx(5e-6, rel=0.2)  # half of two small ones each
