"""File locks of the kernel, which end with their process.

`FolderLock`: one process at a time writes into a run folder. `measuring_alone`: one search at a time measures on a
machine, since two would slow each other down.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rlplace.errors import FileProblem, RunnerError
from rlplace.files import NO_LINK, open_regular
from rlplace.process_settings import close_own, keep_from_children

if sys.platform != "win32":
    import fcntl
    import pwd

LOCK_FILE = ".rlplace.lock"
"""Hidden, inside the folder. The kernel's lock on it ends with its process, so a file that a killed run left behind
blocks no other run. Windows has no such locks, and none is taken there."""

_MOST_BYTES = 1000


class FolderLock:
    """The right to write into a folder, until `release` or the end of the process.

    Args:
        folder: an existing one.

    Raises:
        FileProblem: another run that is still going on holds it.
        OSError: the lock file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        held = take_file(path, f"process {os.getpid()} on {socket.gethostname()}")
        if isinstance(held, str):
            raise _in_use(folder, held)
        self._release = weakref.finalize(self, give_free, path, held, os.getpid())

    @staticmethod
    def check(folder: Path) -> None:
        """Checks that the lock of `folder` is free now; leaves nothing behind.

        Raises:
            FileProblem: another run that is still going on holds it.
        """
        try:
            descriptor = open_regular(folder / LOCK_FILE, os.O_RDWR | NO_LINK)
        except OSError:
            return  # no lock file, or one that cannot be opened: making the folder says why
        holder = "" if _take(descriptor, is_shared=True) else _holder(descriptor)
        os.close(descriptor)
        if holder:
            raise _in_use(folder, holder)

    def release(self) -> None:
        """Releases the folder and removes the lock file; does nothing the second time."""
        self._release()


def take_file(path: Path, words: str) -> int | str:
    """The descriptor of a lock file that is ours until `give_free`, or the words of the process that holds it.

    A lock file that has a second name (a hard link) may be any file of the user's: it is not written, a new file
    takes its place.

    Args:
        path: of the file, in an existing folder.
        words: names this process to others that wait.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | NO_LINK)
        if not _take(descriptor):
            holder = _holder(descriptor)
            os.close(descriptor)
            return holder
        if _is_at(path, descriptor):
            if sys.platform == "win32" or os.fstat(descriptor).st_nlink <= 1:
                break
            path.unlink()  # while the lock is held, as in `give_free`
        os.close(descriptor)  # else its last owner removed the file between our opening and our locking it
    if sys.platform != "win32":
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(descriptor, words.encode()[:_MOST_BYTES], 0)
    return keep_from_children(descriptor)


def give_free(path: Path, descriptor: int, owner: int) -> None:
    """Ends a lock that the process `owner` took, and removes its file."""
    if os.getpid() != owner:  # a fork: the lock is its parent's
        return
    if sys.platform != "win32":
        path.unlink(missing_ok=True)  # while it is still held, so that another process's new file is not removed
    close_own(descriptor)


def _take(descriptor: int, *, is_shared: bool = False) -> bool:
    """Takes the lock, unless another process holds it; whether it is ours."""
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: better a run without one than none
            return True
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """The words of the process that holds the lock, on one line; it may not have written them yet."""
    text = os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "another process"


def _in_use(folder: Path, holder: str) -> FileProblem:
    return FileProblem(folder, f"a run that is still going on writes into this folder ({holder}): name another.")


LOOK_EVERY_S = 0.2
"""Pause between two looks whether the other process has ended."""
MOST_LETTERS = 160
"""Of a command, in messages."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux when it starts."""

_HELD: set[tuple[Path, int, int]] = set()
"""Locks that this process holds, with its number and the thread's: a fork of it holds none."""


class Measurable(Protocol):
    """A host."""

    @property
    def is_simulated(self) -> bool: ...


@contextmanager
def measuring_alone(
    host: Measurable,
    *,
    say: Callable[[str], None],
    run: Path | None = None,
    is_waiting: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """While active, no other process or thread measures on this machine; it may be used again within itself.

    The lock is on a file in one of `lock_folders`. It ends with its process however that ends, and holds between
    containers that share that folder. Where no such file can be made, `say` is told, and measuring goes on without.

    Args:
        host: the host that will be measured; a simulated one needs no lock.
        say: told for which process it waits.
        run: the run folder, told to others that wait.
        is_waiting: wait until the other process has ended, instead of an error.
        sleep: waits for so many seconds.

    Raises:
        RunnerError: another process measures here, and `is_waiting` is False.
    """
    path = None if host.is_simulated or sys.platform == "win32" else _lock_file(say)
    owner, thread = os.getpid(), threading.get_ident()
    if path is None or (path, owner, thread) in _HELD:
        yield
        return
    told, words = "", _words(run)
    while isinstance(held := take_file(path, words), str):  # another thread of this process has to wait, too
        what = f"another search measures on this machine: {held}"
        if not is_waiting:
            raise RunnerError(f"{what}. Try again when it has ended, or leave `--no-wait` out.")
        if held != told:
            say(f"waiting: {what} (`--no-wait` gives up instead)")
            told = held
        sleep(LOOK_EVERY_S)
    _HELD.add((path, owner, thread))
    try:
        yield
    finally:
        _HELD.discard((path, owner, thread))
        give_free(path, held, owner)


def lock_folders() -> Iterator[Path]:
    """Where the lock may be: under the home folder that the system has for this user, else in `/tmp`.

    No environment variable moves it: searches with another `HOME` or `XDG_CACHE_HOME` slow each other down just so.
    """
    with suppress(KeyError):  # a container may run under a number that is no user's
        yield Path("/", pwd.getpwuid(os.geteuid()).pw_dir, ".cache", "rlplace")
    yield Path("/tmp", f"rlplace-{os.geteuid()}")


def _lock_file(say: Callable[[str], None]) -> Path | None:
    """One for each machine, also where several share a home folder; None where none can be made."""
    name, why = f"measuring-{hashlib.sha256(machine_id().encode()).hexdigest()[:16]}.lock", ""
    for folder in lock_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # a lock of another user's would never end; the owner of the folder around it could replace it anyway
            found, owners = folder.lstat(), (os.geteuid(), folder.parent.stat().st_uid)
            is_shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in owners
            if is_shared or not stat.S_ISDIR(found.st_mode):
                raise PermissionError(errno.EPERM, "expected a folder that this user alone writes into", str(folder))
            os.close(open_regular(folder / name, os.O_RDWR | os.O_CREAT | NO_LINK))
        except OSError as error:
            why = str(error)
        else:
            return folder / name
    say(f"warning: nothing keeps other searches from measuring at the same time: {why}")
    return None


def machine_id() -> str:
    """An identifier of this machine: of its running kernel, which its containers share; else its name."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()


def _words(run: Path | None) -> str:
    """This process, as others are told: `process 4242 (rlplace train nmt) on box since 18:40:12, run folder runs/x`."""
    command = shlex.join([Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python", *sys.argv[1:]])
    command = command if len(command) <= MOST_LETTERS else command[: MOST_LETTERS - 3] + "..."
    folder = "" if run is None else f", run folder {run.absolute()}"
    return f"process {os.getpid()} ({command}) on {socket.gethostname()} since {time.strftime('%H:%M:%S')}{folder}"
