"""Interleaved racing: every contender in turn with a reference, the clearly slower ones dropped early.

`Suspensions`: whether this process was stopped for a while (Ctrl-Z, `docker pause`, a batch system).

`idle_share`: the idle share of this machine, which tells how far a measured time can be trusted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rlplace.errors import refuse_if
from rlplace.measure.timing.threads import await_quiet_teams

Timer = Callable[[], float]
"""Runs one step and returns its seconds; raises the error."""

WARM_S = 0.05
"""A step that is shorter is timed right after another one of its own."""

SHORTEST_S = 1e-9
"""The least time of a step: a clock too coarse to see one must not make ratios of nothing."""

MOST_TRIES = 5
"""Of a step amid which this process was suspended: an op that keeps others from looking is no suspension."""

REFERENCE = -1
"""A watch is told this in place of a contender's index."""


class Watch:
    """Is told of every step: `begin` with the contender's index or `REFERENCE`, then `end`, unless the step raised.

    Work that takes longer than a step (compiling a contender for the race, tracing) begins with `is_made` False. This
    class does nothing with it.
    """

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        """A step of `contender` begins."""

    def end(self) -> None:
        """It has ended."""


def watched(timer: Timer, contender: int, watch: Watch, suspensions: Suspensions) -> Timer:
    """The timer, whose every step is told to `watch`; a step amid which this process was suspended is run again."""

    def timed() -> float:
        for _ in range(MOST_TRIES):
            suspensions.look()
            before_s = suspensions.seconds
            watch.begin(contender)
            seconds = timer()
            suspensions.look()
            if suspensions.seconds == before_s:
                break
        watch.end()
        return seconds

    return timed


def as_in_a_loop(timer: Timer, *, has_team: bool) -> Timer:
    """The timer of a step as it is in a loop of such steps, whatever ran before it.

    After a pause or the steps of others, caches and threads are cold: steps of 10 ms took up to a fifth longer, by
    other shares with a team of threads than with a thread on each device. So a short step runs once before it is timed.

    Args:
        timer: of one step.
        has_team: whether it has a team of OpenMP threads, which then go to sleep before anything else is timed.
    """

    def timed() -> float:
        seconds = timer()
        if seconds < WARM_S:
            seconds = timer()
        if has_team:
            await_quiet_teams()
        return seconds

    return timed


@dataclass(frozen=True)
class RaceProtocol:
    """How many steps are timed, and when a contender is dropped."""

    warmup: int = 2
    """Untimed steps of each contender before the first round."""
    min_rounds: int = 3
    """Rounds before anyone is dropped."""
    max_rounds: int = 15
    """Rounds that those never dropped are timed for."""
    margin: float = 0.03
    """A contender is dropped when its lower quartile is this much above the leader's upper quartile."""
    hopeless: float = 1.5
    """After one round, a contender this many times slower than the leader is dropped at once."""
    seed: int = 0
    """Of the order within a round."""
    num_traced: int = field(default=0, repr=False)
    """Traced steps of each contender that is a plan, after its timed rounds, in the same visit. The key of a
    measurement is without it: the timed steps are the same."""
    is_beside_reference: bool = field(default=True, repr=False)
    """Whether a step of the reference is timed in each round."""

    @property
    def is_dropping(self) -> bool:
        """Whether anyone can be dropped: then some have fewer rounds than others."""
        return self.min_rounds < self.max_rounds or self.hopeless < float("inf")

    def __post_init__(self) -> None:
        refuse_if(
            self.warmup < 0 or self.min_rounds < 1 or self.max_rounds < self.min_rounds,
            "rounds",
            (self.warmup, self.min_rounds, self.max_rounds),
            "0 <= warmup, 1 <= min_rounds <= max_rounds",
            where="race",
        )
        refuse_if(self.num_traced < 0, "num_traced", self.num_traced, "0 or more", where="race")


@dataclass
class Lane:
    """One contender's timed steps.

    Attributes:
        samples_s: its steps.
        references_s: the reference's step of the same round, one for each sample.
        error: the error that stopped it, or None.
        dropped: whether it left before the last round for being slower.
    """

    samples_s: list[float] = field(default_factory=list)
    references_s: list[float] = field(default_factory=list)
    error: Exception | None = None
    dropped: bool = False

    @property
    def ratios(self) -> list[float]:
        """Sample over reference, round by round: in which a drift of the machine cancels."""
        return [s / r for s, r in zip(self.samples_s, self.references_s, strict=True)]


def race(
    contenders: Sequence[Timer],
    reference: Timer | None = None,
    protocol: RaceProtocol | None = None,
    *,
    deadline_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
    is_fatal: Callable[[Exception], bool] = lambda _: False,
) -> list[Lane]:
    """The lanes of all contenders, after rounds in which each runs once beside one step of the reference.

    The order changes from round to round, so that no contender always runs after the same neighbour. A contender that
    raises stops; the race goes on.

    Args:
        contenders: one timer each.
        reference: timed once a round; without one, ratios are to 1 s.
        protocol: how long and when to drop.
        deadline_s: on `clock`; the race ends after the round in which it passes.
        clock: seconds.
        is_fatal: whether an error ends the race for all, and is raised.
    """
    protocol = protocol or RaceProtocol()
    generator = np.random.default_rng(protocol.seed)
    lanes = [Lane() for _ in contenders]
    if reference is not None:
        for _ in range(protocol.warmup):
            reference()
    for timer, lane in zip(contenders, lanes, strict=True):
        for _ in range(protocol.warmup):
            _run(timer, lane, is_fatal)
            if lane.error is not None or clock() > deadline_s:
                break
    for done in range(protocol.max_rounds):
        running = [k for k, lane in enumerate(lanes) if lane.error is None and not lane.dropped]
        if not running or (clock() > deadline_s and done > 0):
            break
        reference_s = max(reference(), SHORTEST_S) if reference is not None else 1.0
        for k in generator.permutation(running):
            sample = _run(contenders[k], lanes[k], is_fatal)
            if sample is not None:
                lanes[k].samples_s.append(sample)
                lanes[k].references_s.append(reference_s)
        _drop(lanes, done + 1, protocol)
    return lanes


def _run(timer: Timer, lane: Lane, is_fatal: Callable[[Exception], bool]) -> float | None:
    try:
        return max(timer(), SHORTEST_S)
    except Exception as error:
        if is_fatal(error):
            raise
        lane.error = error
        return None


def _drop(lanes: list[Lane], rounds: int, protocol: RaceProtocol) -> None:
    running = [lane for lane in lanes if lane.error is None and not lane.dropped]
    if len(running) < 2:
        return
    leader = min(running, key=lambda lane: float(np.median(lane.ratios)))
    best = float(np.median(leader.ratios))
    high = float(np.percentile(leader.ratios, 75))
    for lane in running:
        if lane is leader:
            continue
        if float(np.median(lane.ratios)) > protocol.hopeless * best:
            lane.dropped = True
        elif rounds >= protocol.min_rounds:
            lane.dropped = float(np.percentile(lane.ratios, 25)) > high * (1 + protocol.margin)


LOOKS_EVERY_S = 0.1
"""Seconds between two looks of a waiting thread."""
GAP_S = 0.5
"""Looks that are further apart are a gap."""


def looks(within_s: float) -> Iterator[None]:
    """Items to wait with, until so many seconds are over; a suspension of this process does not count."""
    until_s, suspensions = time.monotonic() + within_s, Suspensions()
    while time.monotonic() <= until_s:
        yield
        until_s += suspensions.look()


class Suspensions:
    """Finds suspensions of this process, which no signal announces: clocks go on, and looks are far apart.

    A gap in which this process used its CPUs was none: a thread held the interpreter's lock.

    Attributes:
        seconds: of all that were found.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._looked_s, self._cpu_s = time.monotonic(), time.process_time()

    def look(self) -> float:
        """Seconds of the suspension since the last look; 0 where there was none."""
        with self._lock:
            now_s, cpu_s = time.monotonic(), time.process_time()
            gap_s, used_s = now_s - self._looked_s, cpu_s - self._cpu_s
            self._looked_s, self._cpu_s = now_s, cpu_s
            if gap_s <= GAP_S or used_s > gap_s / 2:
                return 0.0
            self.seconds += gap_s
            return gap_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, a thread looks, so that the caller may do anything else."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOKS_EVERY_S):
                self.look()

        self.look()
        thread = threading.Thread(target=watch, name="rlplace suspensions", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def idle_share(seconds: float = 0.5) -> float:
    """Idle share of this machine's CPU time over `seconds`: 1 on an idle machine; nan if unknown."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return float("nan")
    total = sum(after) - sum(before)
    return (after[3] + after[4] - before[3] - before[4]) / total if total else float("nan")


def _cpu_times() -> list[int]:
    with open("/proc/stat", encoding="ascii") as lines:
        return [int(value) for value in lines.readline().split()[1:9]]
