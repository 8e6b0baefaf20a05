"""Happens-before by vector clocks (Mattern 1989), and accesses to memory held against it (FastTrack, Flanagan 2009).

Actors are host threads and streams. What a thread launches on a stream happens after all that the thread knows; what a
stream does after it waited for an event happens after all that was launched before the record. No time enters: accesses
that are in order here are so in every run of the same code, as long as its premises hold, which are checked as well:
one thread at a time uses a stream, and every wait for an event is ordered with every record of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[int, int]
"""Actor to how many of its events are known; those left out: none."""


@dataclass(frozen=True)
class Violation:
    """What is wrong.

    Attributes:
        kind: `race` two accesses without order · `freed` memory given away while in use · `wait` an event waited for
            without its record · `premise` of the proof · `place` a tensor of another device · `deadlock`.
        why: in words.
    """

    kind: str
    why: str


class Actor:
    """A host thread or a stream."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: Clock = {number: 0}

    def tick(self) -> int:
        """The number of its next event."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def learn(self, clock: Clock) -> None:
        mine = self.clock
        for actor, count in clock.items():
            if count > mine.get(actor, 0):
                mine[actor] = count

    def __repr__(self) -> str:
        return self.name


class StreamActor(Actor):
    """A stream, with the thread that used it last and all that it waited for."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self.user: tuple[int, int] = (number, 0)  # (thread, event of it) that used it last
        self.waits: list[tuple[int, int, Clock]] = []  # (thread, event of it, what the stream knew then)
        self.time = 0  # of the longest chain of ops up to here


@dataclass
class EventActor:
    """An event: what its last record covers."""

    name: str
    is_timed: bool = False
    clock: Clock = field(default_factory=dict)
    record: tuple[int, int] | None = None  # (thread, event of it)
    waits: list[tuple[int, int]] = field(default_factory=list)
    stream: StreamActor | None = None
    time: int = 0


class Memory:
    """Accesses to one block of memory."""

    def __init__(self, name: str, owner: StreamActor | None) -> None:
        self.name = name
        self.owner = owner  # the stream that it was allocated on, None for the host's
        self.write: tuple[int, int, str] | None = None
        self.reads: dict[int, tuple[int, str]] = {}
        self.used: dict[int, tuple[int, str]] = {}  # by actor: its last access
        self.kept: set[int] = set()  # streams that it is kept for


class Order:
    """All actors, and what was found wrong."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.actors: list[Actor] = []

    def host_thread(self, name: str) -> Actor:
        self.actors.append(Actor(len(self.actors), name))
        return self.actors[-1]

    def stream(self, name: str) -> StreamActor:
        made = StreamActor(len(self.actors), name)
        self.actors.append(made)
        return made

    def blame(self, kind: str, why: str) -> None:
        self.violations.append(Violation(kind, why))

    def forgive(self, *kinds: str) -> None:
        """Drops what was found wrong of these kinds."""
        self.violations = [violation for violation in self.violations if violation.kind not in kinds]

    def use(self, host: Actor, stream: StreamActor) -> None:
        """`host` launches something on `stream`."""
        user, count = stream.user
        if user not in (host.number, stream.number) and host.clock.get(user, 0) < count:
            self.blame("premise", f"{host} and {self.actors[user]} use {stream} at the same time")
        stream.user = (host.number, host.tick())
        stream.learn(host.clock)

    def launch(self, host: Actor, stream: StreamActor, reads: list[Memory], writes: list[Memory], what: str) -> None:
        """An op on `stream`."""
        self.use(host, stream)
        stream.tick()
        stream.time += 1
        self.access(stream, reads, writes, what)

    def access(self, actor: Actor, reads: list[Memory], writes: list[Memory], what: str) -> None:
        """What `actor` reads and writes at its latest event."""
        count = actor.clock[actor.number]
        for memory in reads:
            self._check(actor, memory, memory.write, what, "reads")
            memory.reads[actor.number] = memory.used[actor.number] = (count, what)
        for memory in writes:
            self._check(actor, memory, memory.write, what, "writes")
            for reader, (at, other) in memory.reads.items():
                self._check(actor, memory, (reader, at, other), what, "writes")
            memory.write = (actor.number, count, what)
            memory.used[actor.number] = (count, what)
            memory.reads = {}

    def _check(self, actor: Actor, memory: Memory, before: tuple[int, int, str] | None, what: str, how: str) -> None:
        if before is not None and actor.clock.get(before[0], 0) < before[1]:
            other = f"{before[2]} on {self.actors[before[0]]}"
            self.blame("race", f"{what} on {actor} {how} {memory.name}, in no order with {other}")

    def record(self, host: Actor, event: EventActor, stream: StreamActor) -> None:
        for thread, count in [*event.waits, *([event.record] if event.record else [])]:
            if host.clock.get(thread, 0) < count:
                self.blame("premise", f"{host} records {event.name} anew while {self.actors[thread]} may wait for it")
        self.use(host, stream)
        stream.tick()
        event.clock, event.stream, event.time, event.waits = dict(stream.clock), stream, stream.time, []
        event.record = (host.number, host.clock[host.number])

    def knows(self, host: Actor, event: EventActor) -> bool:
        """Whether the record of `event` is in order before `host`; tells if not."""
        if event.record is None or host.clock.get(event.record[0], 0) < event.record[1]:
            self.blame("wait", f"{host} waits for {event.name}, in no order with its record")
            return False
        return True

    def wait(self, host: Actor, stream: StreamActor, event: EventActor) -> None:
        self.use(host, stream)
        if self.knows(host, event):
            event.waits.append((host.number, host.clock[host.number]))
            stream.learn(event.clock)
            stream.time = max(stream.time, event.time)
            stream.waits.append((host.number, host.clock[host.number], dict(stream.clock)))

    def await_event(self, host: Actor, event: EventActor) -> None:
        host.tick()
        if self.knows(host, event):
            event.waits.append((host.number, host.clock[host.number]))
            host.learn(event.clock)

    def await_stream(self, host: Actor, stream: StreamActor) -> None:
        self.use(host, stream)
        host.learn(stream.clock)

    def has_seen(self, host: Actor, event: EventActor) -> bool:
        """Whether `host` knows that `event` has come to pass."""
        return event.stream is not None and all(host.clock.get(a, 0) >= n for a, n in event.clock.items())

    def knows_all(self, host: Actor, stream: StreamActor) -> bool:
        """Whether `host` knows that all is done that was launched on `stream`."""
        return host.clock.get(stream.number, 0) >= stream.clock[stream.number]

    def free(self, host: Actor, memory: Memory) -> None:
        """`host` drops the last reference: its owner may reuse the memory at once, after what both know."""
        if memory.owner is None:
            return
        known = [host.clock, self._known(host, memory.owner)]
        # what a stream that it is kept for has waited for by now is done when that stream is
        known += [self.actors[actor].clock for actor in memory.kept]
        for actor, (count, what) in memory.used.items():
            if actor == memory.owner.number or actor in memory.kept:
                continue
            if max(clock.get(actor, 0) for clock in known) < count:
                name = self.actors[actor].name
                self.blame("freed", f"{memory.name} of {memory.owner} is freed by {host}; {what} on {name} may use it")

    def _known(self, host: Actor, stream: StreamActor) -> Clock:
        """What `stream` had waited for at its last wait that `host` knows of."""
        for thread, count, clock in reversed(stream.waits):
            if host.clock.get(thread, 0) >= count:
                return clock
        return {}
