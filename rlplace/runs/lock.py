"""`FolderLock`: one process at a time writes into a run folder."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from pathlib import Path

from rlplace.errors import FileProblem

if sys.platform != "win32":
    import fcntl

LOCK_FILE = ".rlplace.lock"
"""Hidden, inside the folder. The lock on it is the kernel's and ends with its process, so a file that a killed run left
behind holds nobody up. Windows has no such locks, and none is taken there."""

_MOST_BYTES = 200


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
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _take(descriptor):
                raise _in_use(folder, descriptor)
            if _is_at(path, descriptor):
                break
            os.close(descriptor)  # its last owner removed the file between our opening and our locking it
        if sys.platform != "win32":
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._release = weakref.finalize(self, _give_free, path, descriptor, os.getpid())

    @staticmethod
    def check(folder: Path) -> None:
        """Whether the lock of `folder` is free now; leaves nothing behind.

        Raises:
            FileProblem: a run that is still going on holds it.
        """
        try:
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
        except OSError:
            return  # no lock file, or one that cannot be had: making the folder says why
        if not _take(descriptor, is_shared=True):
            raise _in_use(folder, descriptor)
        os.close(descriptor)

    def release(self) -> None:
        """Gives the folder free and removes the lock file; does nothing the second time."""
        self._release()


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


def _in_use(folder: Path, descriptor: int) -> FileProblem:
    holder = os.read(descriptor, _MOST_BYTES).decode("utf-8", errors="replace") or "another process"
    os.close(descriptor)
    return FileProblem(folder, f"a run that is still going on writes into this folder ({holder}): name another.")


def _give_free(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork: the lock is its parent's
        return
    if sys.platform != "win32":
        path.unlink(missing_ok=True)  # while it is still held, so that nobody's new lock file is removed
    os.close(descriptor)
