"""Links between machines: which ranks measure, and what becomes of the figures."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import pytest
import torch
from many_ranks import at_once, facts_of, nodes_of
from torch.distributed import HashStore

from rlplace.errors import RunnerError
from rlplace.measure.execute.distributed import Wire, connect
from rlplace.measure.hosts.detect import nodes_host
from rlplace.measure.profiling import machine_links, profile
from rlplace.measure.profiling.machine_links import Figures, measured_pairs
from rlplace.measure.profiling.profile import profile_links

LATENCY_S, BYTES_PER_S, BOTH_BYTES_PER_S = 1e-3, 1e8, 4e7


class Clock:
    """Its time passes by transfers alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_one_pair_stands_for_all_of_two_machines_or_of_one() -> None:
    first = nodes_of(facts_of(["a", "a", "b", "b", "b", "c"]))[0]
    assert measured_pairs(first) == [(0, 2), (0, 5), (2, 5), (0, 1), (2, 3)]


def test_figures_are_those_of_the_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(), list[list[int]]()

    def exchange(ends: object, sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        sizes = [each.numel() for each in (sent, received) if each is not None]
        if sizes == [24]:
            told.append(sent.view(torch.int64).tolist())  # type: ignore[union-attr]
        else:
            clock.now_s += LATENCY_S + sizes[0] / (BYTES_PER_S if len(sizes) == 1 else BOTH_BYTES_PER_S)

    monkeypatch.setattr(machine_links, "time", clock)
    monkeypatch.setattr(machine_links._Ends, "exchange", exchange)
    wire = Wire(None, torch.device("cpu"))  # type: ignore[arg-type]
    found = machine_links._measure(0, (0, 1), {(0, 1): wire, (1, 0): wire})
    assert set(found) == {(0, 1), (1, 0)}
    for figures in found.values():
        assert figures == pytest.approx(Figures(LATENCY_S, BYTES_PER_S, BOTH_BYTES_PER_S))
    assert told[-1][2] == 0, "the other one is told when all is over"


def test_a_slow_link_is_measured_without_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sizes = Clock(), set[int]()

    def exchange(ends: object, sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        size = next(each.numel() for each in (sent, received) if each is not None)
        sizes.add(size)
        clock.now_s += size / 1.25e6

    monkeypatch.setattr(machine_links, "time", clock)
    monkeypatch.setattr(machine_links._Ends, "exchange", exchange)
    wire = Wire(None, torch.device("cpu"))  # type: ignore[arg-type]
    figures = machine_links._measure(0, (0, 1), {(0, 1): wire, (1, 0): wire})[0, 1]
    assert figures.bandwidth_bytes_per_s == pytest.approx(1.25e6)
    assert max(sizes) == 256 << 10
    assert clock.now_s < 30.0


def test_two_ranks_measure_over_gloo() -> None:
    host, store = nodes_host(facts_of(["a", "b"])), HashStore()

    def rank(number: int) -> dict[tuple[int, int], Figures]:
        wires = connect(host, number, store, interface="lo")
        return machine_links._measure(number, (0, 1), wires)

    found, answered = at_once([lambda: rank(0), lambda: rank(1)])
    assert answered == {}
    for figures in found.values():
        assert 0 <= figures.latency_s < 1
        assert 0 < figures.both_bytes_per_s <= figures.bandwidth_bytes_per_s


def links_of(machines: Sequence[str], monkeypatch: pytest.MonkeyPatch, silent: Sequence[int] = ()) -> str:
    """What rank 0 answers, where some ranks connect and say nothing more."""
    nodes, own, answers = nodes_of(facts_of(machines)), threading.local(), io.StringIO()
    monkeypatch.setattr(machine_links, "pin_current_thread", lambda _: None)
    monkeypatch.setattr(machine_links, "join", lambda: own.nodes)
    held = []

    def rank(number: int) -> None:
        own.nodes = nodes[number]
        if number in silent:
            held.append(connect(nodes_host(own.nodes.facts), number, own.nodes.store, is_sparse=True))
            own.nodes.store.set(f"pair 0 1/{number}", "1")
        else:
            machine_links.main(answers, lambda *_: (1e-5, 3e9))

    at_once([partial(rank, number) for number in range(len(machines))])
    return answers.getvalue()


def test_ranks_of_one_machine_pass_tensors_through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(links_of(["a", "a", "b"], monkeypatch))
    assert [row[:2] for row in rows] == [["a", "b"], ["b", "a"], ["a", "a"]]
    assert rows[2][2:] == [1e-5, 3e9, 3e9]


def test_machines_between_which_nothing_passes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_links, "_LOST_AFTER", timedelta(seconds=1))
    with pytest.raises(RunnerError, match="tensors do not pass between 'a' and 'b'"):
        links_of(["a", "b"], monkeypatch, silent=[1])


def test_nobody_talks_to_a_machine_that_measures_with_a_third_one(monkeypatch: pytest.MonkeyPatch) -> None:
    came = threading.Event()

    def measure(rank: int, pair: tuple[int, int], _: object) -> dict[tuple[int, int], Figures]:
        if pair == (1, 2):
            came.set()
        if pair == (0, 2) and rank == 2:
            assert not came.wait(0.3), "rank 1 is done with rank 0, and waits for rank 2"
        return {}

    monkeypatch.setattr(machine_links, "_measure", measure)
    assert json.loads(links_of(["a", "b", "c"], monkeypatch)) == []
    assert came.is_set()


def test_links_have_the_figures_of_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    between = {
        ("a", "b"): Figures(1e-4, 100e6, 99e6),
        ("b", "a"): Figures(2e-4, 80e6, 30e6),
        ("a", "c"): Figures(3e-4, 200e6, 199e6),
        ("c", "a"): Figures(3e-4, 200e6, 199e6),
        ("b", "c"): Figures(5e-4, 10e6, 10e6),
        ("c", "b"): Figures(5e-4, 10e6, 10e6),
    }
    monkeypatch.setattr(profile, "join", lambda: None)
    monkeypatch.setattr(profile, "measured_links", lambda _, has_slots: between)
    host = nodes_host(facts_of(["a", "a", "b", "c"]))
    links = {link.name: (link.latency_s, link.bandwidth_bytes_per_s) for link in profile_links(host).links}
    assert links["a up"] == (1e-4, 200e6), "the best that any route showed"
    assert links["b up"] == (2e-4, 30e6), "both directions share what there is"
    for source in ("a/cpu:0", "a/cpu:1"):
        assert links[f"{source}->b/cpu:0"] == (1e-4, 100e6)
    before = {link.name: link for link in host.links}["a/cpu:0->a/cpu:1"]
    assert links[before.name] == (before.latency_s, before.bandwidth_bytes_per_s), "not measured: as the host has it"


def test_ranks_of_one_machine_are_measured_as_processes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(profile, "_measure", lambda *given, by_slots: asked.append(by_slots) or (1e-5, 1e9))
    host = profile_links(nodes_host(facts_of(["a", "a"])))
    assert asked == [True]
    assert {link.bandwidth_bytes_per_s for link in host.links} == {1e9}
