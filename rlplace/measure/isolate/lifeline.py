"""`end_with`: this process ends when its parent has ended, in any way.

A worker runs this file before it imports anything else, also of rlplace: importing PyTorch takes seconds, and modules
imported before it would change its settings. So this file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading

_F_SETSIG = 10  # Linux: the signal that is sent in place of SIGIO


def end_with(alive: int) -> None:
    """Has this process end when the other end of the pipe `alive` is closed, from now on.

    A signal of the kernel does it, also while native code hangs; where there is none, a thread.

    Args:
        alive: descriptor of the end for reading; only the process that started this one has the other end.
    """
    with contextlib.suppress(OSError):
        signal.signal(signal.SIGIO, signal.SIG_DFL)  # which ends a process, but not one that is stopped: SIGKILL does
        fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(alive, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        os.read(alive, 1)
        os._exit(1)

    threading.Thread(target=wait, name="rlplace lifeline", daemon=True).start()
