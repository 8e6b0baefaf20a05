"""`measuring_alone`: one process at a time measures on a machine; who waits knows for whom, and death ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from core_hosts import core_host
from random_problems import plain_host

from rlplace.cli.main import main
from rlplace.errors import RunnerError
from rlplace.locks import BOOT_ID, lock_folders, measuring_alone

HOLDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from core_hosts import core_host
from rlplace import locks
from rlplace.locks import measuring_alone

locks.lock_folders = lambda: iter([Path(sys.argv[2])])
with measuring_alone(core_host(), say=print, run=Path("runs/theirs")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlplace"


@pytest.fixture
def holder(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that measures here."""
    command = [sys.executable, "-c", HOLDER, str(Path(__file__).parent), str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_process_is_waited_for_and_named_once(holder: subprocess.Popen[str], cache: Path) -> None:
    said: list[str] = []
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            holder.kill()
            holder.wait()

    with measuring_alone(core_host(), say=said.append, sleep=sleep):
        assert len(list(cache.glob("measuring-*.lock"))) == 1
    assert len(waited) >= 3
    (line,) = said
    assert line.startswith(f"waiting: another search measures on this machine: process {holder.pid} (-c ")
    assert "runs/theirs" in line
    assert "since " in line
    assert list(cache.iterdir()) == []


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(cache: Path, tmp_path: Path) -> None:
    with measuring_alone(core_host(), say=print):
        (lock,) = cache.glob("measuring-*.lock")
    lock.symlink_to(tmp_path / "elsewhere")
    said: list[str] = []
    with measuring_alone(core_host(), say=said.append):
        assert not (tmp_path / "elsewhere").exists()
    assert "nothing keeps other searches from measuring at the same time" in said[0]


def test_who_does_not_want_to_wait_is_told_whom_for(
    holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with (
        pytest.raises(RunnerError, match=f"process {holder.pid} .*leave `--no-wait` out"),
        measuring_alone(core_host(), say=print, is_waiting=False),
    ):
        pass
    placed = str(tmp_path / "placement.json")
    for words in (
        ["train", "nmt", "--run", str(tmp_path / "run")],
        ["advise", "nmt"],
        ["place", "nmt", "--placement", placed],
    ):
        assert main([*words, "--host", "cores", "--no-wait"]) == 1
        assert f"process {holder.pid} " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_holder_with_our_number_is_another_process(holder: subprocess.Popen[str], cache: Path) -> None:
    """Containers number their processes from 1, and may share a folder."""
    (file,) = cache.glob("measuring-*.lock")
    file.write_text(f"process {os.getpid()} (rlplace train nmt) on their-container since 18:40:12")
    with (
        pytest.raises(RunnerError, match=f"process {os.getpid()} .* on their-container"),
        measuring_alone(core_host(), say=print, is_waiting=False),
    ):
        pass


def test_no_environment_variable_moves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(lock_folders())
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR", "USER", "LOGNAME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert list(lock_folders()) == before
    assert all(folder.is_absolute() and not folder.is_relative_to(tmp_path) for folder in before)


def test_a_user_without_a_home_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4_000_000_123)
    assert list(lock_folders()) == [Path("/tmp/rlplace-4000000123")]


@pytest.mark.parametrize("how", ["others write into it", "another user made it", "a link"])
def test_a_folder_where_another_user_could_hold_it_for_ever_is_not_used(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(mode=0o700)
    if how == "others write into it":
        first.chmod(0o777)
    elif how == "a link":
        first.rename(tmp_path / "third")
        first.symlink_to("third")
    elif os.geteuid() == 0:
        os.chown(first, 65534, 65534)
    else:
        pytest.skip("only root may give a folder away")
    monkeypatch.setattr("rlplace.locks.lock_folders", lambda: iter([first, second]))
    with measuring_alone(core_host(), say=pytest.fail):
        (lock,) = second.iterdir()
        assert lock.stat().st_mode & 0o777 == 0o600
        assert list(first.iterdir()) == []


@pytest.mark.skipif(not BOOT_ID.exists(), reason="only Linux says since when it runs")
def test_containers_of_a_machine_have_one_lock(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "another-container")
    with (
        pytest.raises(RunnerError, match=f"process {holder.pid} "),
        measuring_alone(core_host(), say=print, is_waiting=False),
    ):
        pass


def test_without_that_a_machine_is_known_by_its_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.locks.BOOT_ID", tmp_path / "none")
    names = set()
    for name in ("one", "two", "one"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        with measuring_alone(core_host(), say=pytest.fail):
            names |= {file.name for file in cache.iterdir()}
    assert len(names) == 2


def test_a_simulated_host_waits_for_nobody(holder: subprocess.Popen[str]) -> None:
    with measuring_alone(plain_host(2), say=pytest.fail, is_waiting=False):
        pass


def test_within_itself_a_process_may_use_it_again(cache: Path) -> None:
    with measuring_alone(core_host(), say=pytest.fail, is_waiting=False):
        with measuring_alone(core_host(), say=pytest.fail, is_waiting=False):
            pass
        (file,) = cache.iterdir()
        assert file.read_text().startswith(f"process {os.getpid()} (")
    assert list(cache.iterdir()) == []


def test_another_thread_of_a_process_waits_too(cache: Path) -> None:
    with measuring_alone(core_host(), say=pytest.fail), ThreadPoolExecutor(1) as pool:

        def measure() -> None:
            with measuring_alone(core_host(), say=pytest.fail, is_waiting=False):
                pass

        with pytest.raises(RunnerError, match=f"process {os.getpid()} "):
            pool.submit(measure).result()


def test_an_error_gives_it_up(cache: Path) -> None:
    with pytest.raises(ValueError, match="mine"), measuring_alone(core_host(), say=pytest.fail):
        raise ValueError("mine")
    assert list(cache.iterdir()) == []


def test_without_a_place_for_the_lock_it_says_so_and_goes_on(cache: Path) -> None:
    cache.write_text("in the way")
    said: list[str] = []
    with measuring_alone(core_host(), say=said.append):
        pass
    assert len(said) == 1
    assert "nothing keeps other searches from measuring at the same time" in said[0]


def test_a_pipe_in_place_of_the_lock_is_said_and_measuring_goes_on(cache: Path) -> None:
    with measuring_alone(core_host(), say=print):
        (lock,) = cache.glob("measuring-*.lock")
    os.mkfifo(lock, 0o600)
    said: list[str] = []
    with measuring_alone(core_host(), say=said.append):
        assert lock.is_fifo()
    assert "nothing keeps other searches from measuring at the same time" in said[0]
