"""`measuring_alone`: one search at a time measures on a machine: two would slow each other down and believe it."""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlplace.errors import FileProblem, RunnerError
from rlplace.files import cache_folder
from rlplace.measure.hosts.host import Host
from rlplace.runs.lock import give_free, take_file

LOOK_EVERY_S = 0.2
"""How often it is looked whether the other has ended."""
MOST_LETTERS = 160
"""Of a command that people are told."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux when it starts."""

_HELD: set[tuple[Path, int, int]] = set()
"""Locks that this process holds, with its number and the thread's: a fork of it holds none."""


@contextmanager
def measuring_alone(
    host: Host,
    *,
    say: Callable[[str], None],
    run: Path | None = None,
    is_waiting: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """While active, no other process or thread measures on this machine; within itself it may be used again.

    The lock is the kernel's, on a file in the user's cache folder: it ends with its process however that ends, and
    holds between containers that share that folder, whatever numbers their processes have. Where no such file can be
    made, that is said, and measuring goes on without.

    Args:
        host: that is going to be measured; a simulated one needs no lock.
        say: told whom it waits for.
        run: the run folder, for others that wait.
        is_waiting: wait until the other has ended, instead of giving up.
        sleep: waits for so many seconds.

    Raises:
        RunnerError: another process measures here, and nobody wants to wait.
    """
    if host.is_simulated:
        yield
        return
    path, owner = _lock_file(say), os.getpid()
    if path is None or (path, owner, threading.get_ident()) in _HELD:
        yield
        return
    held = _take(path, _words(run), say, is_waiting, sleep)  # a second descriptor of one process has to wait, too
    mine = path, owner, threading.get_ident()
    _HELD.add(mine)
    try:
        yield
    finally:
        _HELD.discard(mine)
        give_free(path, held, owner)


def _take(path: Path, words: str, say: Callable[[str], None], is_waiting: bool, sleep: Callable[[float], None]) -> int:
    """The descriptor of the lock, once it can be had."""
    told = ""
    while isinstance(held := take_file(path, words), str):
        what = f"another search measures on this machine: {held}"
        if not is_waiting:
            raise RunnerError(f"{what}. Try again when it has ended, or leave `--no-wait` out.")
        if held != told:
            say(f"waiting: {what} (`--no-wait` gives up instead)")
            told = held
        sleep(LOOK_EVERY_S)
    return held


def _lock_file(say: Callable[[str], None]) -> Path | None:
    """One for each machine, also where several share a home folder; None where none can be made."""
    machine = hashlib.sha256(machine_id().encode()).hexdigest()[:16]
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"measuring-{machine}.lock"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
    except (FileProblem, OSError) as error:
        say(f"warning: nothing keeps other searches from measuring at the same time: {error}")
        return None
    return path


def machine_id() -> str:
    """What names this machine: since when its kernel runs, which its containers have in common; else its name."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()


def _words(run: Path | None) -> str:
    """Who we are, for whoever waits: `process 4242 (rlplace train nmt) on box since 18:40:12, run folder runs/nmt`."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    command = shlex.join([program, *sys.argv[1:]])
    command = command if len(command) <= MOST_LETTERS else command[: MOST_LETTERS - 3] + "..."
    folder = "" if run is None else f", run folder {run.absolute()}"
    return f"process {os.getpid()} ({command}) on {socket.gethostname()} since {time.strftime('%H:%M:%S')}{folder}"
