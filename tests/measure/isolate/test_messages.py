"""The board: what one process writes another reads, at any moment.

How long a contender may take, from what is known of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from rlplace.measure.isolate import messages as module
from rlplace.measure.isolate.messages import IDLE, Board, TimeLimits
from rlplace.measure.timing.race import RaceProtocol


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Board, Board]]:
    """What the worker writes, and what the other side sees; every look at the clock is a second later."""
    ticks = iter(range(1, 100))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))
    reader = Board.new()
    writer = Board.on(reader.file)
    yield writer, reader
    reader.close()


def test_who_is_at_work_and_since_when(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    assert (reader.contender, reader.is_at_work) == (IDLE, False)
    writer.begin(4)
    assert (reader.contender, reader.is_at_work, reader.is_made, reader.begin_s) == (4, True, True, 1.0)
    writer.end()
    assert (reader.contender, reader.is_at_work) == (4, False), "who was last may have broken what breaks now"
    writer.begin(5, is_made=False)
    assert not reader.is_made
    reader.reset()
    assert reader.contender == IDLE


def test_first_steps_are_told_from_later_ones(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    assert (reader.first_s, reader.best_s) == (0.0, 0.0)
    writer.begin(0, is_made=False)
    writer.end()
    assert (reader.first_s, reader.best_s) == (0.0, 0.0), "making a contender is no step"
    for _ in range(2):
        writer.begin(0)
        writer.end()
    assert (reader.first_s, reader.best_s) == (1.0, 1.0)
    writer.reset()
    writer.begin(0)
    _ = module.time.monotonic()
    writer.end()
    assert (reader.first_s, reader.best_s) == (2.0, 1.0), "the first of another race loads again"


def test_a_new_worker_knows_how_long_steps_took(pair: tuple[Board, Board]) -> None:
    writer, reader = pair
    for _ in range(2):
        writer.begin(0)
        writer.end()
    fresh = Board.new()
    fresh.carry(reader)
    assert (fresh.first_s, fresh.best_s, fresh.contender) == (1.0, 1.0, IDLE)
    fresh.close()


LIMITS = TimeLimits(longest_s=100.0, least_s=1.0, num_best=10.0, num_first=2.0)


@pytest.mark.parametrize(
    ("hopeless", "best_s", "first_s", "limit_s"),
    [
        (1.5, 0.0, 0.0, 100.0),
        (1.5, 0.0, 3.0, 100.0),
        (1.5, 0.5, 3.0, 11.0),
        (1.5, 0.001, 0.01, 1.0),
        (1.5, 50.0, 3.0, 100.0),
        (20.0, 0.5, 3.0, 26.0),
        (math.inf, 0.5, 3.0, 100.0),
    ],
    ids=["nothing known", "no step known", "several steps and loading", "never less", "never more", "patient", "all"],
)
def test_a_limit(hopeless: float, best_s: float, first_s: float, limit_s: float) -> None:
    assert LIMITS.limit_s(RaceProtocol(hopeless=hopeless), best_s, first_s) == limit_s
