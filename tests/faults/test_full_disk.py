"""A disk that is full, and one that became read-only: what was kept stays, what cannot be kept is said, runs go on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_problems import fork_problem
from stored import PLAN, REFERENCE, SESSION, outcome_of, plan_of, row_of

from rlplace.cli.main import main
from rlplace.errors import FileProblem
from rlplace.files import read_json, write_json_atomic
from rlplace.graphs import save_graph
from rlplace.measure.measurement import MeasurementKey
from rlplace.session.folder import RunFolder
from rlplace.store import MeasurementStore, StoreLog

SIZE = 8 << 20


def mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)):
        pytest.skip("only root may mount a file system, and not in every container")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, spare: int = 0) -> None:
    """Leaves so many bytes."""
    with (disk / "ballast").open("wb") as file:
        free = os.statvfs(disk)
        file.write(bytes(max(free.f_bavail * free.f_frsize - spare, 0)))


def test_a_file_of_a_run_is_the_old_one_or_the_new_one(disk: Path) -> None:
    run = RunFolder.create(disk / "run")
    run.write_json("config.json", {"old": True})
    fill(disk, spare=8192)
    with pytest.raises(FileProblem, match=r"config\.json: cannot be written: No space left"):
        run.write_json("config.json", {"new": "x" * 100_000})
    run.close()
    assert read_json(disk / "run" / "config.json") == {"old": True}
    assert [path.name for path in (disk / "run").iterdir()] == ["config.json"]


def keyed(number: int) -> tuple[object, object]:
    plan = plan_of(*range(number, number + 300))
    key = MeasurementKey("ab" * 8, "cd" * 8, plan.fingerprint, "race", "versions")
    return plan, outcome_of(plan, key=key)


def test_a_store_on_a_full_disk_keeps_what_it_has_and_takes_the_rest_later(disk: Path, tmp_path: Path) -> None:
    said: list[str] = []
    log = StoreLog(
        [MeasurementStore.open(disk / "m.db"), MeasurementStore.open(tmp_path / "m.db")], SESSION, said.append
    )
    log.keep(PLAN, outcome_of(), REFERENCE, is_whole=True)
    fill(disk)
    for number in range(60):
        plan, outcome = keyed(number)
        log.keep(plan, outcome, REFERENCE, is_whole=True)  # type: ignore[arg-type]
    assert len(said) == 1
    assert "m.db: the disk" in said[0]
    with MeasurementStore.read(disk / "m.db") as store:
        assert store.count() >= 1
        assert len(list(store.measurements())) == store.count()
    with MeasurementStore.read(tmp_path / "m.db") as store:
        assert store.count() == 61
    (disk / "ballast").unlink()
    log.close()
    with MeasurementStore.read(disk / "m.db") as store:
        assert store.count() == 61
    assert len(said) == 1


def test_a_disk_that_became_read_only_can_be_read_from(disk: Path) -> None:
    with MeasurementStore.open(disk / "m.db") as store:
        store.add(SESSION, PLAN, row_of())
    write_json_atomic(disk / "a.json", {"a": 1})
    if not mount("-o", "remount,ro", str(disk)):
        pytest.skip("it cannot be made read-only")
    with MeasurementStore.read(disk / "m.db") as store:
        assert store.count() == 1
    with pytest.raises(FileProblem, match="writable"), MeasurementStore.open(disk / "m.db") as store:
        store.add(SESSION, PLAN, row_of())
    with pytest.raises(FileProblem, match="Read-only file system"):
        write_json_atomic(disk / "a.json", {"a": 2})
    with pytest.raises(FileProblem, match=r"Read-only file system|cannot be written"):
        RunFolder.create(disk / "run")
    assert read_json(disk / "a.json") == {"a": 1}


def test_a_run_that_cannot_be_started_leaves_nothing_and_starts_later_with_the_same_command(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_graph(fork_problem(seed=0).graph, tmp_path / "fork.json")
    words = [
        "train",
        str(tmp_path / "fork.json"),
        "--host",
        "2xK80",
        "--evaluations",
        "16",
        "--quiet",
        "--run",
        str(disk / "run"),
    ]
    for spare in (0, 4096, 16384, 32768, 65536):
        fill(disk, spare)
        assert main(words) == 1, spare
        said = capsys.readouterr().err
        assert said.startswith(f"rlplace: failed: {disk / 'run'}")
        assert said.count("\n") == 1
        (disk / "ballast").unlink()
        if "To go on: " in said:
            command = said.partition("To go on: rlplace ")[2].strip()
            assert main(shlex.split(command)) == 0, spare
            assert main([*words, "--overwrite"]) == 0
        else:
            assert main(words) == 0, spare
        capsys.readouterr()
        shutil.rmtree(disk / "run")
