"""A worker does not outlive the process that started it, also not while it imports PyTorch, or hangs in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.measure.isolate.worker import LIFELINE

WITHIN_S = 300.0
IS_LINUX = sys.platform == "linux"
CHILD = """
import runpy, sys
runpy.run_path(sys.argv[1])["end_with"](int(sys.argv[2]))
print("begun", flush=True)
{then}
"""
PARENT = """
import os, sys, time
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.worker import WorkerProcess
sys.path.insert(0, sys.argv[1])
packed = Packed()
packed.add(None)
worker = WorkerProcess(packed).pid
child = os.fork()  # as a data loader of the user's program does
if child == 0:
    time.sleep(600)
print(worker, child, flush=True)
sys.stdin.read()
"""
SLOW_TORCH = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
time.sleep(600)
"""


def await_(is_so: Callable[[], bool]) -> None:
    """Waits for what must come, on a machine that may be busy."""
    until_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize("then", ["import time; time.sleep(600)", "import ctypes; ctypes.PyDLL(None).sleep(600)"])
def test_a_process_ends_with_the_other_end_of_its_pipe(then: str) -> None:
    if "PyDLL" in then and not IS_LINUX:
        pytest.skip("a thread that needs the interpreter cannot end native code that holds it")
    alive, lifeline = os.pipe()
    command = [sys.executable, "-c", CHILD.format(then=then), LIFELINE, str(alive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[alive]) as child:
        os.close(alive)
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        assert child.poll() is None
        os.close(lifeline)
        assert child.wait(WITHIN_S) in (1, -signal.SIGKILL)


@pytest.mark.skipif(not IS_LINUX, reason="a thread that is stopped ends nothing")
def test_a_process_that_is_stopped_ends_too() -> None:
    alive, lifeline = os.pipe()
    command = [sys.executable, "-c", CHILD.format(then="import time; time.sleep(600)"), LIFELINE, str(alive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[alive]) as child:
        os.close(alive)
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        child.send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) is not None
        os.close(lifeline)
        assert child.wait(WITHIN_S) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(not IS_LINUX, reason="processes are looked at in /proc")
def test_a_worker_that_still_imports_ends_with_who_started_it_and_not_with_its_forks(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker, child = map(int, parent.stdout.readline().split())
        try:
            await_((tmp_path / "begun").exists)
            assert not is_gone(worker)
            parent.kill()
            parent.wait()
            await_(lambda: is_gone(worker))
        finally:
            os.kill(child, signal.SIGKILL)
