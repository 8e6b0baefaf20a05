"""`Cluster`: a Ray cluster as the rest of rlplace sees it: nodes, and cores that simulated work is spread over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from rlplace.cluster.connection import Connection, connect
from rlplace.errors import RunnerError
from rlplace.say import counted

Item = TypeVar("Item")
Result = TypeVar("Result")

LOOKS_EVERY_S = 0.5
"""How often it is looked for items that take too long."""
AHEAD = 1
"""Items for each worker that wait besides the one at work: a worker whose item ends goes on with one of them. One that
is sent only then may be sent to a node that is busy, and wait there until Ray looks for another."""
RETRIES = 3
"""Times that Ray runs an item again whose worker or node was lost."""
BACKUP_FACTOR = 3.0
"""An item that takes so many times as long as the longest one before it is started again elsewhere."""
BACKUP_LEAST_S = 10.0
"""And at least so long."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    Attributes:
        id: Ray's, hexadecimal.
        name: of the machine.
        num_cpus: that Ray may use.
        num_gpus: likewise.
        is_here: whether this process is connected through it.
    """

    id: str
    name: str
    num_cpus: float
    num_gpus: float
    is_here: bool


class Cluster:
    """A Ray cluster that this process is connected to; a context manager that leaves it in the end.

    Ray schedules, transports and retries. Its workers import what a function needs from their own installation: the
    same versions of rlplace and of the user's modules must be there; the current folder is importable as it is here.

    Args:
        connection: to it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ray = connection.ray

    @classmethod
    def connect(cls, address: str, *, say: Callable[[str], None] = lambda line: None) -> Cluster:
        """Joins a cluster.

        Args:
            address: `HOST:PORT`, or `auto`: `RAY_ADDRESS`, else what this user started here with `ray start`, else a
                cluster of this machine alone that is started now.
            say: told what was joined.

        Raises:
            MissingExtra: Ray is not installed (extra `cluster`).
            InvalidValue: no address, or nobody listens there.
            RunnerError: Ray could not join or start it.
        """
        cluster = cls(connect(address, say=say))
        names = sorted(node.name for node in cluster.nodes)
        cores = counted(cluster.num_workers, "core")
        say(f"cluster of {counted(len(names), 'node')}, {cores}: {', '.join(names)}")
        return cluster

    @property
    def address(self) -> str:
        """Where it is."""
        return self._connection.address

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that are alive now, that of this process first."""
        here = self.ray.get_runtime_context().get_node_id()
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
                node["NodeID"] == here,
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return tuple(sorted(found, key=lambda node: (not node.is_here, node.name, node.id)))

    @property
    def num_workers(self) -> int:
        """Items of `map` that run at once: one for each CPU of every node."""
        return int(sum(node.num_cpus for node in self.nodes))

    def map(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        on_wait: Callable[[], None] = lambda: None,
        backup_least_s: float = BACKUP_LEAST_S,
    ) -> Iterator[tuple[int, Result]]:
        """Index and result of every item, as they end.

        Each item is a Ray task with one CPU, which Ray runs again where its worker or node was lost. Once no item is
        left to be started, one that takes far longer than the longest before it is run a second time elsewhere, and the
        first answer counts (backup tasks, Dean and Ghemawat 2004, OSDI): a worker that stands still costs its own item
        some time and the others nothing. So `function` must give the same for the same item, and change nothing else.
        Leaving the iterator early cancels what runs.

        Args:
            function: of one item; what it needs is sent with it (`functools.partial`), once for each worker.
            items: to be done; each is sent alone.
            on_wait: called some times a second while nothing has come.
            backup_least_s: that an item takes before it is run a second time.

        Raises:
            RunnerError: the cluster has no CPUs, or a worker ended again and again on an item.
            Exception: what `function` raised, with a note that says the item.
        """
        task = self.ray.remote(_task(function)).options(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")
        queue, running = iter(enumerate(items)), dict[Any, _Started]()
        sent: dict[int, Item] = {}
        longest_s, is_drained = 0.0, False

        def start(index: int) -> None:
            running[task.remote(sent[index])] = _Started(index, time.monotonic())

        try:
            while True:
                count = self._count() if not is_drained or running else 0
                free = count - len(running)
                room = free + count * AHEAD
                while room > 0 and not is_drained:
                    if (following := next(queue, None)) is None:
                        is_drained = True
                        break
                    sent[following[0]] = following[1]
                    start(following[0])
                    room -= 1
                if not running:
                    return
                if is_drained and longest_s:
                    limit_s = max(backup_least_s, BACKUP_FACTOR * longest_s)
                    for index in _late(running.values(), limit_s)[: max(free, 0)]:
                        start(index)
                ended, _ = self.ray.wait(list(running), num_returns=1, timeout=LOOKS_EVERY_S)
                if not ended:
                    on_wait()
                for ref in ended:
                    if ref not in running:  # cancelled a moment ago: its item was done by another
                        continue
                    begun = running.pop(ref)
                    result: Result = self._result(ref, begun.index)
                    longest_s = max(longest_s, time.monotonic() - begun.begin_s)
                    del sent[begun.index]
                    self._cancel([ref for ref, other in running.items() if other.index == begun.index], running)
                    yield begun.index, result
        finally:
            self._cancel(list(running), running)

    def close(self) -> None:
        """Leaves the cluster, and ends it if it was started by `connect`; once is enough."""
        self._connection.leave()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self) -> int:
        """Items that can be at work, of which there must be some."""
        count = self.num_workers
        if not count:
            raise RunnerError("no node of the Ray cluster has a CPU: start one with `ray start --address=ADDRESS`")
        return count

    def _result(self, ref: Any, index: int) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref)
        except errors.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception) or isinstance(cause, errors.RayError):
                raise RunnerError(f"item {index} failed on the cluster: {error}") from error
            cause.add_note(f"It happened on the cluster, in item {index}.")
            raise cause from error
        except errors.RayError as error:
            raise RunnerError(f"item {index} could not be done on the cluster: {error}") from error

    def _cancel(self, refs: Iterable[Any], running: dict[Any, _Started]) -> None:
        for ref in refs:
            running.pop(ref, None)
            with contextlib.suppress(Exception):  # whatever became of it, nobody waits for it
                self.ray.cancel(ref, force=True)


@dataclass(frozen=True)
class _Started:
    """A task that runs, or waits for a CPU: its item and when it was started, on `time.monotonic`."""

    index: int
    begin_s: float


def _late(running: Iterable[_Started], limit_s: float) -> list[int]:
    """Items that were started once, so long ago; the longest ago first."""
    begun: dict[int, list[float]] = {}
    for started in running:
        begun.setdefault(started.index, []).append(started.begin_s)
    before_s = time.monotonic() - limit_s
    late = [(times[0], index) for index, times in begun.items() if len(times) == 1 and times[0] < before_s]
    return [index for _, index in sorted(late)]


def _task(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """What a worker runs: the function travels inside of it, whatever kind of callable it is."""

    def rlplace_item(item: Item) -> Result:
        return function(item)

    return rlplace_item
