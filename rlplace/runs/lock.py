"""Locks of the kernel's on files, which end with their process; `FolderLock`: one process at a time writes into a run
folder."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import weakref
from pathlib import Path

from rlplace.errors import FileProblem
from rlplace.process import close_own, keep_from_children

if sys.platform != "win32":
    import fcntl

LOCK_FILE = ".rlplace.lock"
"""Hidden, inside the folder. The lock on it is the kernel's and ends with its process, so a file that a killed run left
behind holds nobody up. Windows has no such locks, and none is taken there."""

_MOST_BYTES = 1000
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""A stranger's folder could lead to any file of ours, which taking the lock would overwrite."""


class FolderLock:
    """The right to write into a folder, until `release` or the end of the process.

    Args:
        folder: an existing one.

    Raises:
        FileProblem: a run that is still going on holds it.
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
        """Whether the lock of `folder` is free now; leaves nothing behind.

        Raises:
            FileProblem: a run that is still going on holds it.
        """
        try:
            descriptor = _open(folder / LOCK_FILE, os.O_RDWR)
        except OSError:
            return  # no lock file, or one that cannot be had: making the folder says why
        is_free = _take(descriptor, is_shared=True)
        holder = "" if is_free else _holder(descriptor)
        os.close(descriptor)
        if not is_free:
            raise _in_use(folder, holder)

    def release(self) -> None:
        """Gives the folder free and removes the lock file; does nothing the second time."""
        self._release()


def take_file(path: Path, words: str) -> int | str:
    """The descriptor of a lock file that is ours until `give_free`, or the words of the process that holds it.

    A lock file that has a second name (a hard link) may be any file of the user's: it is not written, a new file
    takes its place.

    Args:
        path: of the file, in a folder that is there.
        words: who we are, for whoever waits.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
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
        os.pwrite(descriptor, words.encode()[:_MOST_BYTES], 0)
    return keep_from_children(descriptor)


def give_free(path: Path, descriptor: int, owner: int) -> None:
    """Ends a lock that the process `owner` took, and removes its file."""
    if os.getpid() != owner:  # a fork: the lock is its parent's
        return
    if sys.platform != "win32":
        path.unlink(missing_ok=True)  # while it is still held, so that nobody's new lock file is removed
    close_own(descriptor)


def _open(path: Path, flags: int) -> int:
    """The descriptor of a regular file; no link is followed."""
    descriptor = os.open(path, flags | _NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "the lock is not a regular file")
    return descriptor


def _take(descriptor: int, *, is_shared: bool = False) -> bool:
    """Whether nobody else holds the lock; it is ours then."""
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
    """What the process that holds the lock wrote into its file, on one line; it may not have come to it yet."""
    text = os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "another process"


def _in_use(folder: Path, holder: str) -> FileProblem:
    return FileProblem(folder, f"a run that is still going on writes into this folder ({holder}): name another.")
