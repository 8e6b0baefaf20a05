"""`Cluster`: a Ray cluster as the rest of rlplace sees it: nodes, and cores that simulated work is spread over.

Also how this process connects: to the cluster at an address, to one that runs here already, or to a new one here.
`reach` is the cluster that `--cluster` names, or none.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import re
import signal
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlplace.errors import InvalidValue, MissingExtra, RunnerError
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
        num_cpus: CPUs that Ray may use.
        num_gpus: GPUs that Ray may use.
        is_here: whether this process is connected through it.
    """

    id: str
    name: str
    num_cpus: float
    num_gpus: float
    is_here: bool


class Cluster(AbstractContextManager["Cluster"]):
    """A Ray cluster that this process is connected to; a context manager that leaves it in the end.

    Ray schedules, transports and retries. Its workers import a function's modules from their own installation: the
    same versions of rlplace and of the user's modules must be there; the current folder is importable as it is here.

    Args:
        ray: the module.
        address: of the cluster.
        is_own: whether the connection was made here, and ends with `close`.
    """

    def __init__(self, ray: Any, address: str, *, is_own: bool) -> None:
        self.ray, self.address, self._is_own = ray, address, is_own

    @classmethod
    def connect(cls, address: str, *, say: Callable[[str], None] = lambda line: None) -> Cluster:
        """Joins a cluster, or starts one on this machine.

        Args:
            address: `HOST:PORT`, or `auto`: `RAY_ADDRESS`, else the cluster that this user started here with `ray
                start`, else a cluster of this machine alone that is started now.
            say: told which cluster was joined or started.

        Raises:
            MissingExtra: Ray is not installed (extra `cluster`).
            InvalidValue: no address, nothing listens there, or this process is connected to another cluster.
            RunnerError: Ray could not join or start it.
        """
        ray = load_ray()
        is_own = not ray.is_initialized()
        joined = _init(ray, address_of(address)) if is_own else None
        current = str(ray.get_runtime_context().gcs_address)
        if is_own:
            say(f"joined {joined}" if joined else f"started a Ray cluster on this machine ({current})")
        elif address != AUTO and address.rpartition(":")[2] != current.rpartition(":")[2]:
            raise InvalidValue("cluster", address, f"{current}, which this process is connected to, or auto")
        cluster = cls(ray, current, is_own=is_own)
        names = sorted(node.name for node in cluster.nodes)
        size = f"{counted(len(names), 'node')}, {counted(cluster.num_workers, 'core')}"
        say(f"cluster of {size}: {', '.join(names)}")
        return cluster

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
        Leaving the iterator early cancels running tasks.

        Args:
            function: of one item; its data is sent with it (`functools.partial`), once for each worker.
            items: to be done; each is sent alone.
            on_wait: called some times a second while nothing has come.
            backup_least_s: that an item takes before it is run a second time.

        Raises:
            RunnerError: the cluster has no CPUs, or a worker ended again and again on an item.
            Exception: the error that `function` raised, with a note that names the item.
        """

        def rlplace_item(item: Item) -> Result:  # the function travels inside of it, whatever kind of callable it is
            return function(item)

        task = self.ray.remote(rlplace_item).options(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")
        queue, running = iter(enumerate(items)), dict[Any, _Started]()
        sent: dict[int, Item] = {}
        longest_s, is_drained = 0.0, False
        try:
            while True:
                count = self.num_workers
                if not count and (running or not is_drained):
                    raise RunnerError("the Ray cluster has no CPU: start a node with `ray start --address=ADDRESS`")
                free = count - len(running)
                room = max(free + count * AHEAD, 0)
                sent |= (fresh := dict(itertools.islice(queue, room)))
                begun, is_drained = list(fresh), is_drained or len(fresh) < room
                if is_drained and longest_s:
                    limit_s = max(backup_least_s, BACKUP_FACTOR * longest_s)
                    begun += _late(running.values(), limit_s)[: max(free, 0)]
                running |= {task.remote(sent[index]): _Started(index, time.monotonic()) for index in begun}
                if not running:
                    return
                ended, _ = self.ray.wait(list(running), num_returns=1, timeout=LOOKS_EVERY_S)
                if not ended:
                    on_wait()
                for ref in ended:  # one at most
                    started = running.pop(ref)
                    result: Result = self._result(ref, started.index)
                    longest_s = max(longest_s, time.monotonic() - started.begin_s)
                    del sent[started.index]
                    self._cancel([ref for ref, other in running.items() if other.index == started.index], running)
                    yield started.index, result
        finally:
            self._cancel(list(running), running)

    def close(self) -> None:
        """Leaves the cluster, and ends it if it was started by `connect`; once is enough."""
        if self._is_own and self.ray.is_initialized():
            self.ray.shutdown()

    def __exit__(self, *error: object) -> None:
        self.close()

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
            with suppress(Exception):  # its result is not needed any more
                self.ray.cancel(ref, force=True)


@dataclass(frozen=True)
class _Started:
    """A task that runs, or waits for a CPU: its item and when it was started, on `time.monotonic`."""

    index: int
    begin_s: float


def _late(running: Iterable[_Started], limit_s: float) -> list[int]:
    """Items that were started once, so long ago; the longest ago first."""
    before_s, started = time.monotonic() - limit_s, sorted(running, key=lambda one: (one.begin_s, one.index))
    counts = Counter(one.index for one in started)
    return [one.index for one in started if counts[one.index] == 1 and one.begin_s < before_s]


AUTO, OFF = "auto", "off"
"""Words of `--cluster`: this machine's own cluster, or one that it starts; and none."""
EXTRA = "cluster"
REACHED_WITHIN_S = 5.0
"""Seconds for a cluster to take a connection."""
OBJECT_STORE_BYTES = 200_000_000
"""Of a cluster that is started here; objects that do not fit go to disk."""
OLDEST_RAY = (2, 52)
"""The first version of Ray whose clusters can ask for a secret."""
_MOST_BYTES = 1000
"""Of the file in which Ray notes an address."""


def load_ray() -> Any:
    """The module `ray`, with its usage reports switched off.

    Raises:
        MissingExtra: it is not installed.
        RunnerError: it is, but cannot be imported, or is too old.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without GPUs do not change what is seen
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "ray":
            raise MissingExtra("ray", EXTRA) from error
        raise RunnerError(
            f"Ray is installed but cannot be imported ({error}): install it anew, `rlplace[{EXTRA}]`."
        ) from error
    version = str(getattr(ray, "__version__", "without a version"))
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_RAY:
        raise RunnerError(
            f"Ray {version} is installed, expected {'.'.join(map(str, OLDEST_RAY))} or later, whose clusters ask for "
            f"a secret: install `rlplace[{EXTRA}]` anew."
        )
    return ray


def check_cluster(word: str) -> None:
    """Whether `--cluster WORD` is usable, so that a mistake is refused before anything is captured.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidValue: a word of another form, or nothing listens at the address.
    """
    if word != OFF:
        load_ray()
        address_of(word)


def address_of(word: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address that `--cluster WORD` stands for; None where a cluster is to be started here.

    `auto` is `RAY_ADDRESS`, or else the cluster that this user last started on this machine with `ray start`, if it
    still runs. Ray notes that one in a file, which counts if it is the user's own, no link, and writable to no others.
    An address is tried: Ray would take minutes to say that nothing listens.

    Args:
        word: `auto` or an address.
        environ: environment variables.

    Raises:
        InvalidValue: a word of another form, or nothing listens there.
    """
    if word != AUTO:
        return _reached(word, "cluster")
    named = environ.get("RAY_ADDRESS", "")
    if named not in ("", AUTO, "local"):
        return _reached(named, "RAY_ADDRESS")
    noted = None if named == "local" else _last_started(environ)
    return noted if noted is not None and _listens(noted) else None


def _init(ray: Any, address: str | None) -> str | None:
    """Connects this process to the cluster at an address; None starts one on this machine."""
    options: dict[str, Any] = {"address": address}
    if address is None:
        from rlplace.measure.timing.threads import usable_cores

        os.environ["RAY_AUTH_MODE"] = "token"  # what Ray does by itself depends on its version
        ray._raylet.Config.initialize("")  # Ray has read its environment when it was imported
        options = {
            "address": "local",
            "num_cpus": len(usable_cores()),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if address is None:
            raise RunnerError(f"no Ray cluster could be started on this machine: {why}") from error
        raise RunnerError(
            f"the Ray cluster at {address} could not be joined: {why}. This machine must be one of its nodes "
            f"(`ray start --address={address}`), with the same versions of Ray and Python."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray changes it
    return address


def _reached(address: str, field: str) -> str:
    """The address, once a connection to it succeeds."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise InvalidValue(
            field,
            address,
            "HOST:PORT, as `ray start --head` prints it, or auto",
            hint="Ray Client (`ray://`) is not supported." if address.startswith("ray://") else "",
        )
    if not _listens(address):
        raise InvalidValue(
            field,
            address,
            "the address of a Ray cluster that runs",
            hint="Start one with `ray start --head` on one machine; the others join with `ray start --address=...`.",
        )
    return address


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=REACHED_WITHIN_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _last_started(environ: Mapping[str, str]) -> str | None:
    """The address that Ray notes for the cluster last started here; None where there is none, or it is a stranger's."""
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    path = Path(folder) / "ray" / "ray_current_cluster"
    try:
        # All users can write to the folder: the file that was checked is the one that is read, no link and no pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            noted = file.read(_MOST_BYTES).decode().strip() if _is_own(os.fstat(descriptor)) else ""
    except (OSError, UnicodeDecodeError):
        return None
    return noted or None


def _is_own(facts: os.stat_result) -> bool:
    """Whether a file is a regular one of this user's, with one name, not writable outside the user's group."""
    others = stat.S_IWOTH | (0 if facts.st_gid == os.getgid() else stat.S_IWGRP)
    is_sole = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    return is_sole and facts.st_uid == os.getuid() and not facts.st_mode & others


@contextmanager
def reach(word: str, *, say: Callable[[str], None] = lambda line: None) -> Iterator[Cluster | None]:
    """The cluster that `--cluster WORD` stands for, left in the end; None where it is `off`.

    Args:
        word: `off`, `auto` or an address.
        say: told which cluster was joined.

    Raises:
        UserError, RunnerError: as `Cluster.connect`.
    """
    with nullcontext() if word == OFF else Cluster.connect(word, say=say) as cluster:
        yield cluster
