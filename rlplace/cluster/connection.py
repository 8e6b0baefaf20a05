"""How this process comes to a Ray cluster: the one at an address, one that runs here already, or a new one here."""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.errors import InvalidValue, MissingExtra, RunnerError

AUTO, OFF = "auto", "off"
"""Words of `--cluster`: this machine's own cluster, or one that it starts; and none."""
EXTRA = "cluster"
REACHED_WITHIN_S = 5.0
"""Seconds for a cluster to take a connection."""
OBJECT_STORE_BYTES = 200_000_000
"""Of a cluster that is started here; what does not fit goes to disk."""
OLDEST_RAY = (2, 52)
"""The first version of Ray whose clusters can ask for a secret."""
_MOST_BYTES = 1000
"""Of the file in which Ray notes an address."""
_ADDRESS = "HOST:PORT, as `ray start --head` prints it, or auto"


@dataclass(frozen=True)
class Connection:
    """This process's connection to a Ray cluster.

    Attributes:
        ray: the module.
        address: of the cluster.
        is_started: whether the cluster was started for this connection, and ends with it.
        is_own: whether this connection was made here; if not, whoever made it ends it.
    """

    ray: Any
    address: str
    is_started: bool
    is_own: bool

    def leave(self) -> None:
        """Ends what was made here: the connection, and the cluster if it was started for it."""
        if self.is_own and self.ray.is_initialized():
            self.ray.shutdown()


def load_ray() -> Any:
    """The module `ray`, which reports nobody's usage.

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
        broken = f"Ray is installed but cannot be imported ({error}): install it anew, `rlplace[{EXTRA}]`."
        raise RunnerError(broken) from error
    found = re.match(r"(\d+)\.(\d+)", str(getattr(ray, "__version__", "")))
    if found is None or tuple(map(int, found.groups())) < OLDEST_RAY:
        least = ".".join(map(str, OLDEST_RAY))
        raise RunnerError(
            f"Ray {getattr(ray, '__version__', 'without a version')} is installed, expected {least} or later, whose "
            f"clusters ask for a secret: install `rlplace[{EXTRA}]` anew."
        )
    return ray


def check_cluster(word: str) -> None:
    """Whether `--cluster WORD` can be had, so that a mistake is refused before anything is captured.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidValue: a word of another form, or nobody listens at the address.
    """
    if word != OFF:
        load_ray()
        address_of(word)


def address_of(word: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address that `--cluster WORD` stands for; None where a cluster is to be started here.

    `auto` is `RAY_ADDRESS`, or else the cluster that this user last started on this machine with `ray start`, if it
    still runs. Ray notes that one in a file, which counts if it is the user's own, no link, and writable to no others.
    An address is tried: Ray would take minutes to say that nobody is there.

    Args:
        word: `auto` or an address.
        environ: environment variables.

    Raises:
        InvalidValue: a word of another form, or nobody listens there.
    """
    if word != AUTO:
        return _reached(word, "cluster")
    named = environ.get("RAY_ADDRESS", "")
    if named not in ("", AUTO, "local"):
        return _reached(named, "RAY_ADDRESS")
    noted = None if named == "local" else _last_started(environ)
    return noted if noted is not None and _listens(noted) else None


def connect(word: str, *, say: Callable[[str], None]) -> Connection:
    """Joins the cluster that `--cluster WORD` stands for, or starts one on this machine.

    Args:
        word: `auto` or an address.
        say: told what was joined or started.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidValue: a word of another form, nobody listens there, or this process is connected to another cluster.
        RunnerError: Ray could not join or start it.
    """
    ray = load_ray()
    if ray.is_initialized():
        current = str(ray.get_runtime_context().gcs_address)
        if word != AUTO and _port(word) != _port(current):
            raise InvalidValue("cluster", word, f"{current}, which this process is connected to, or auto")
        return Connection(ray, current, is_started=False, is_own=False)
    address = address_of(word)
    options: dict[str, Any] = {"address": address}
    if address is None:
        from rlplace.measure.run.threads import usable_cores

        os.environ["RAY_AUTH_MODE"] = "token"  # what Ray does by itself depends on its version
        ray._raylet.Config.initialize("")  # Ray has read its environment when it was imported
        options = {
            "address": "local",
            "num_cpus": len(usable_cores()),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        with _own_signals():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        raise RunnerError(_refusal(address, error)) from error
    connection = Connection(ray, str(ray.get_runtime_context().gcs_address), is_started=address is None, is_own=True)
    say(f"started a Ray cluster on this machine ({connection.address})" if address is None else f"joined {address}")
    return connection


def _refusal(address: str | None, error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    if address is None:
        return f"no Ray cluster could be started on this machine: {said}"
    return (
        f"the Ray cluster at {address} could not be joined: {said}. This machine must be one of its nodes "
        f"(`ray start --address={address}`), with the same versions of Ray and Python."
    )


def _reached(address: str, field: str) -> str:
    """The address, once somebody takes a connection there."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        hint = "Ray Client (`ray://`) is not supported." if address.startswith("ray://") else ""
        raise InvalidValue(field, address, _ADDRESS, hint=hint)
    if not _listens(address):
        hint = "Start one with `ray start --head` on one machine, and join the others with `ray start --address=...`."
        raise InvalidValue(field, address, "the address of a Ray cluster that runs", hint=hint)
    return address


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=REACHED_WITHIN_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _last_started(environ: Mapping[str, str]) -> str | None:
    """The address that Ray notes for the cluster last started here; None where there is none, or it is a stranger's."""
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or tempfile.gettempdir()
    path = Path(folder) / "ray" / "ray_current_cluster"
    try:
        # The folder is everybody's: what is read is what was checked, and nothing that a link or a pipe leads to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not _is_own(os.fstat(descriptor)):
            return None
        try:
            return file.read(_MOST_BYTES).decode().strip() or None
        except (OSError, UnicodeDecodeError):
            return None


def _is_own(facts: os.stat_result) -> bool:
    """Whether a file is a regular one of this user's, with one name, and nobody outside the user's group writes it."""
    others = stat.S_IWOTH | (0 if facts.st_gid == os.getgid() else stat.S_IWGRP)
    is_sole = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
    return is_sole and facts.st_uid == os.getuid() and not facts.st_mode & others


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps what this process does on SIGTERM, which Ray would change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
