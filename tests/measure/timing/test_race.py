"""Races between timers that tell fixed times on a fixed clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from rlplace.errors import InvalidValue
from rlplace.measure.timing.race import RaceProtocol, race

PROTOCOL = RaceProtocol(warmup=1, min_rounds=3, max_rounds=10, margin=0.05, hopeless=2.0)


class Machine:
    """Time passes only while a timer runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def timer(self, name: str, times_s: float | Iterable[float]) -> Callable[[], float]:
        times = iter(times_s) if not isinstance(times_s, float) else None

        def run() -> float:
            seconds = next(times) if times is not None else float(times_s)  # type: ignore[arg-type]
            self.now_s += seconds
            self.order.append(name)
            return seconds

        return run


def failing(after: int, error: Exception) -> Callable[[], float]:
    calls = 0

    def run() -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return 1.0

    return run


def test_equal_contenders_run_every_round_beside_the_reference() -> None:
    machine = Machine()
    contenders = [machine.timer(name, 1.0) for name in "ab"]
    lanes = race(contenders, machine.timer("reference", 4.0), PROTOCOL, clock=machine.clock)
    assert [lane.samples_s for lane in lanes] == [[1.0] * 10] * 2
    assert [lane.references_s for lane in lanes] == [[4.0] * 10] * 2
    assert lanes[0].ratios == [0.25] * 10
    assert not any(lane.dropped or lane.error for lane in lanes)
    assert [machine.order.count(name) for name in ("a", "b", "reference")] == [11, 11, 11]
    rounds = [machine.order[3 + 3 * k : 6 + 3 * k] for k in range(10)]
    assert all(round_[0] == "reference" and set(round_[1:]) == {"a", "b"} for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) == 2, "the order changes from round to round"


def test_a_clearly_slower_contender_leaves_after_the_least_rounds_and_a_hopeless_one_after_the_first() -> None:
    machine = Machine()
    contenders = [machine.timer("fast", 1.0), machine.timer("slow", 1.2), machine.timer("hopeless", 2.1)]
    lanes = race(contenders, None, PROTOCOL, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [10, 3, 1]
    assert [lane.dropped for lane in lanes] == [False, True, True]


def test_within_the_margin_nobody_leaves() -> None:
    machine = Machine()
    lanes = race([machine.timer("a", 1.0), machine.timer("b", 1.04)], None, PROTOCOL, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [10, 10]


def test_spread_keeps_a_contender_in() -> None:
    machine = Machine()
    noisy = machine.timer("noisy", [1.0] + [0.8, 1.8] * 5)
    lanes = race([machine.timer("steady", 1.0), noisy], None, PROTOCOL, clock=machine.clock)
    assert not lanes[1].dropped


def test_a_drift_of_the_machine_cancels_in_the_ratios() -> None:
    """Everything takes three times as long from the fifth round on, and the ratio stays."""
    machine = Machine()
    drift = [1.0] * 5 + [3.0] * 6
    reference = machine.timer("reference", [2.0 * factor for factor in drift])
    contender = machine.timer("a", [1.0 * factor for factor in drift])
    lanes = race([contender], reference, PROTOCOL, clock=machine.clock)
    assert lanes[0].ratios == [0.5] * 10


def test_a_clock_that_sees_no_step_makes_no_ratio_of_nothing() -> None:
    (lane,) = race([lambda: 0.0], lambda: 0.0, PROTOCOL)
    assert lane.samples_s == lane.references_s == [1e-9] * 10
    assert lane.ratios == [1.0] * 10


@pytest.mark.parametrize("after", [0, 1, 4])
def test_who_raises_stops_and_the_race_goes_on(after: int) -> None:
    machine, error = Machine(), ValueError("boom")
    lanes = race([failing(after, error), machine.timer("a", 1.0)], None, PROTOCOL, clock=machine.clock)
    assert lanes[0].error is error
    assert len(lanes[0].samples_s) == max(after - 1, 0)
    assert lanes[1].error is None
    assert len(lanes[1].samples_s) == 10


@pytest.mark.parametrize("after", [0, 3])
def test_what_is_fatal_ends_the_race_for_all(after: int) -> None:
    machine, error = Machine(), ValueError("boom")
    contenders = [failing(after, error), machine.timer("a", 1.0)]
    with pytest.raises(ValueError, match="boom"):
        race(contenders, None, PROTOCOL, is_fatal=lambda each: each is error)
    assert len(race([failing(0, error)], None, PROTOCOL, is_fatal=lambda each: False)) == 1


def test_when_all_have_failed_it_ends() -> None:
    machine = Machine()
    lanes = race([failing(0, ValueError())] * 2, machine.timer("reference", 1.0), PROTOCOL, clock=machine.clock)
    assert all(lane.error is not None and not lane.samples_s for lane in lanes)
    assert machine.order == ["reference"]


def test_a_failing_reference_and_an_interrupt_are_not_swallowed() -> None:
    with pytest.raises(ValueError, match="boom"):
        race([lambda: 1.0], failing(3, ValueError("boom")), PROTOCOL)

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race([interrupted], None, PROTOCOL)


def test_the_deadline_ends_it_after_a_round_but_everyone_has_run_once() -> None:
    machine = Machine()
    contenders = [machine.timer(name, 1.0) for name in "abc"]
    lanes = race(contenders, None, PROTOCOL, deadline_s=8.5, clock=machine.clock)
    # warm-up until 3 s, rounds until 6 s and 9 s
    assert [len(lane.samples_s) for lane in lanes] == [2, 2, 2]
    lanes = race(contenders, None, PROTOCOL, deadline_s=0.0, clock=machine.clock)
    assert [len(lane.samples_s) for lane in lanes] == [1, 1, 1]


def test_a_race_of_nobody_is_no_error() -> None:
    assert race([], None, PROTOCOL) == []


def test_one_seed_gives_one_order() -> None:
    def order(seed: int) -> list[str]:
        machine = Machine()
        protocol = RaceProtocol(warmup=0, min_rounds=1, max_rounds=6, seed=seed)
        race([machine.timer(name, 1.0) for name in "abcd"], None, protocol, clock=machine.clock)
        return machine.order

    assert order(3) == order(3)
    assert order(3) != order(4)


@pytest.mark.parametrize("rounds", [{"warmup": -1}, {"min_rounds": 0}, {"min_rounds": 4, "max_rounds": 3}])
def test_protocols_without_sense_are_refused(rounds: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="min_rounds <= max_rounds"):
        RaceProtocol(**rounds)  # type: ignore[arg-type]
