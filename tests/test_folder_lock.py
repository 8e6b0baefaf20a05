"""`FolderLock`: held by one process, ended by its death, and gone when it is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.errors import FileProblem
from rlplace.locks import LOCK_FILE, FolderLock

HOLDER = """
import os
import sys
import time
from pathlib import Path
from rlplace.locks import FolderLock

lock = FolderLock(Path(sys.argv[1]))
if len(sys.argv) > 2:
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # it has let go of the lock then
        time.sleep(600)
else:
    print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_process_is_refused_and_told_which_one_has_it(
    holder: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileProblem, match=f"process {holder.pid} on"):
        FolderLock(tmp_path)
    for flags in ([], ["--overwrite"]):
        assert main(["train", "nmt", "--host", "4xV100-pcie", "--run", str(tmp_path), *flags]) == 2
        said = capsys.readouterr().err
        assert f"a run that is still going on writes into this folder (process {holder.pid} on" in said
        assert "capturing" not in said


def test_the_lock_of_a_killed_process_holds_nobody_up(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    assert os.listdir(tmp_path) == [LOCK_FILE]
    FolderLock.check(tmp_path)
    FolderLock(tmp_path).release()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_nor_does_a_fork_of_it_that_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "forks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(FileProblem, match=f"process {process.pid} on"):
                FolderLock.check(tmp_path)
            process.kill()
            process.wait()
            FolderLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_that_ends_takes_its_lock_file_with_it(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.communicate("")
    assert holder.returncode == 0
    assert os.listdir(tmp_path) == []


def test_it_is_given_up_once_and_by_whoever_forgets_it(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.release()
    second = FolderLock(tmp_path)
    first.release()
    with pytest.raises(FileProblem):
        FolderLock(tmp_path)
    del second
    FolderLock(tmp_path).release()


def test_a_lock_file_that_was_removed_while_it_was_waited_for_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def take(descriptor: int) -> bool:
        taken.append(descriptor)
        if len(taken) == 1:
            (tmp_path / LOCK_FILE).unlink()  # as its owner does on giving it up
        return True

    monkeypatch.setattr("rlplace.locks._take", take)
    lock = FolderLock(tmp_path)
    assert len(taken) == 2
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
