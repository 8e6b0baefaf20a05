"""Costs from traced steps and links from real copies: what is done with the figures, not what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_hosts import core_host
from small_models import CASES, mean_square, random
from torch import nn

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.graphs import capture
from rlplace.measure.costs import profile
from rlplace.measure.costs.profile import (
    SIZES_BYTES,
    profile_costs,
    profile_links,
    share_by_signature,
    single_device_plan,
)
from rlplace.measure.hosts.gpus import gpu_host
from rlplace.measure.hosts.host import Device
from rlplace.measure.timeline import Timeline


def test_an_op_has_the_median_of_its_steps_and_equal_ops_the_mean_of_theirs() -> None:
    samples_s = np.array([[1.0, 2.0, 9.0, 5.0], [2.0, 2.0, 6.0, 5.0], [9.0, 2.0, 6.0, 1.0]])
    shared = share_by_signature(("a", "a", "a", "b"), samples_s)
    # medians 2, 2, 6 and 5
    assert shared.tolist() == [10 / 3, 10 / 3, 10 / 3, 5.0]
    assert shared.sum() == pytest.approx(np.median(samples_s, axis=0).sum())


def test_everything_on_one_device_in_order() -> None:
    graph = capture(nn.Linear(4, 2), torch.ones(3, 4))
    plan = single_device_plan(graph, 1)
    assert plan.devices.tolist() == [1] * 4
    assert plan.sequence.tolist() == [0, 1, 2, 3]
    assert plan.num_transfers == 0


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
        def __init__(self, *_: object, **__: object) -> None: ...
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


def test_a_line_through_the_sizes_gives_latency_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, str]] = []

    def transfer_s(size: int, source: Device, destination: Device, repeats: int) -> float:
        asked.append((size, source.name, destination.name))
        return 5e-6 + size / 2e9

    monkeypatch.setattr(profile, "_transfer_s", transfer_s)
    before = core_host(3)
    host = profile_links(before)
    assert [link.name for link in host.links] == [link.name for link in before.links]
    for link in host.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
        assert link.latency_s == pytest.approx(5e-6)
    assert asked == [(size, "cpu:0", "cpu:1") for size in SIZES_BYTES], "one pair of kinds is measured once"
    assert host.fingerprint == before.fingerprint
    assert host.routes == before.routes


def test_each_pair_of_gpus_has_its_own_figures_and_their_parts_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that several routes share must hold none of them up more than its own does."""
    asked: list[tuple[str, str]] = []
    rates = {("cuda:0/0", "cuda:0/1"): 9e9, ("cuda:0/0", "cuda:1/0"): 4e9, ("cuda:1/0", "cuda:1/1"): 8e9}

    def transfer_s(size: int, source: Device, destination: Device, repeats: int) -> float:
        asked.append((source.name, destination.name))
        rate = rates.get((source.name, destination.name), 1e9)  # 1e9: with the CPU
        return 1e4 / rate + size / rate

    monkeypatch.setattr(profile, "_transfer_s", transfer_s)
    monkeypatch.setattr(cuda, "num_gpus", lambda: 2)
    monkeypatch.setattr(cuda, "gpu", lambda _: cuda.Gpu("Some GPU", 8 << 30, 7 << 30))
    host = profile_links(gpu_host("lab", num_parts=2, with_cpu=True, cores=(0, 1), ram_bytes=1 << 30))
    assert set(asked) == {*rates, ("cuda:0/0", "cpu"), ("cuda:1/0", "cpu")}
    by_name = {link.name: link for link in host.links}

    def figures(source: str, destination: str) -> tuple[float, float]:
        (route,) = [route for route in host.routes if (route.source, route.destination) == (source, destination)]
        used = [by_name[name] for name in route.links]
        return max(link.latency_s for link in used), min(link.bandwidth_bytes_per_s for link in used)

    for pair, rate in (
        *((pair, rate) for one, rate in rates.items() for pair in (one, one[::-1])),
        (("cuda:0/1", "cuda:1/0"), 4e9),
        (("cpu", "cuda:1/1"), 1e9),
        (("cuda:0/0", "cpu"), 1e9),
    ):
        assert figures(*pair) == pytest.approx((1e4 / rate, rate)), pair


def test_hand_overs_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_transfer_s", lambda size, *_: size / 1e9)
    host = profile_links(core_host(2, has_gang=True))
    assert len(host.links) == 2
    assert [route.links for route in host.routes if "cpu:all" in (route.source, route.destination)] == [()] * 4


def test_real_copies_give_usable_figures() -> None:
    for link in profile_links(core_host(2), repeats=2).links:
        assert np.isfinite(link.bandwidth_bytes_per_s)
        assert link.bandwidth_bytes_per_s > 0
        assert link.latency_s >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_profiled_costs_on_a_gpu() -> None:
    graph = capture(nn.Linear(64, 64), random(8, 64, dtype=torch.float32), mean_square, "adam")
    from rlplace.measure.hosts.host import Host

    costs = profile_costs(graph, Host.detect(), num_steps=3, warmup=1)
    assert np.all(costs.op_time_s[~graph.is_source] > 0)
    assert np.all(np.isfinite(costs.op_time_s))
