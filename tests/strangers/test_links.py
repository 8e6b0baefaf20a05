"""Links, pipes and odd paths in a stranger's run folder lead nowhere, and overwrite nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import write_run

from rlplace.errors import FileProblem, UserError
from rlplace.locks import LOCK_FILE
from rlplace.measure import load_placement
from rlplace.measure.host_model import load_learned_host
from rlplace.measure.hosts.host_file import load_host
from rlplace.policy.base import load_checkpoint
from rlplace.session.folder import RUN_FILES, RunFolder
from rlplace.session.session import Session
from rlplace.store import MeasurementStore
from rlplace.training.tracking import make_tracker


@pytest.mark.parametrize("name", [*RUN_FILES, LOCK_FILE])
def test_a_link_in_a_run_folder_is_refused_wherever_it_leads(name: str, tmp_path: Path) -> None:
    run, secret = write_run(tmp_path / "run"), tmp_path / "secret.json"
    secret.write_text('{"password": 1}')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    with pytest.raises(FileProblem, match=f"{name}: a symbolic link"):
        RunFolder.open(run)
    if name != "session.db":
        (run / name).unlink()
        (run / name).symlink_to("../../nowhere")
        with pytest.raises(FileProblem, match=f"{name}: a symbolic link"):
            RunFolder.open(run)
    assert secret.read_text() == '{"password": 1}'


@pytest.mark.parametrize("name", ["session.db", "session.db-wal", "session.db-journal"])
def test_a_link_that_is_put_in_a_run_once_it_is_open_is_not_followed(name: str, tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path / "run"))
    (run.root / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text('{"password": 1}')
    (run.root / name).symlink_to(tmp_path / "secret")
    for use in (lambda: Session.read(run.root), lambda: Session.open(run)):
        with pytest.raises(FileProblem, match=f"{name}: a symbolic link"):
            use()


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path: Path) -> None:
    run, own = write_run(tmp_path / "run"), tmp_path / "own"
    own.write_text("mine")
    (run / LOCK_FILE).symlink_to(own)
    with pytest.raises(FileProblem, match="cannot be made a run folder"):
        RunFolder.create(run, overwrite=True)
    assert own.read_text() == "mine"


@pytest.mark.parametrize("take", [lambda run: RunFolder.create(run, overwrite=True), RunFolder.reopen])
def test_a_lock_that_is_a_hard_link_overwrites_nothing(take: Callable[[Path], RunFolder], tmp_path: Path) -> None:
    run, own = write_run(tmp_path / "run"), tmp_path / "own"
    own.write_text("mine")
    (run / LOCK_FILE).hardlink_to(own)
    folder = take(run)
    assert own.read_text() == "mine"
    assert (run / LOCK_FILE).stat().st_nlink == 1
    with pytest.raises(FileProblem, match="still going on"):
        take(run)
    folder.close()
    assert own.read_text() == "mine"


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    os.mkfifo(run / LOCK_FILE)
    with pytest.raises(FileProblem, match="not a regular file"):
        RunFolder.create(run, overwrite=True)


def test_a_link_as_what_was_learned_in_a_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "elsewhere.json").write_text("{}")
    (run / "host_model.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(FileProblem, match=r"host_model\.json: a symbolic link"):
        load_learned_host(run)


READERS: dict[str, Callable[[Path], object]] = {
    "placement.json": load_placement,
    "host.json": load_host,
    "host.yaml": load_host,
    "policy.safetensors": lambda path: load_checkpoint(path, "placer"),
    "host_model.json": load_learned_host,
    "measurements.db": MeasurementStore.read,
    "run": RunFolder.open,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_told_instead_of_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    if name.startswith("policy"):
        (tmp_path / "policy.json").write_text("{}")
    with pytest.raises(FileProblem, match=name):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "nowhere/../../x", "/proc/self/mem"])
def test_a_path_that_is_none_is_told(name: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        READERS[name](tmp_path / f"{path}{Path(name).suffix}")
    assert len(str(caught.value)) < 20_000


TRACKS = """
import sys
from pathlib import Path
from rlplace.training.tracking import make_tracker
run = Path(sys.argv[1])
tracker = make_tracker("offline", run, {})
tracker.log_files("config", [run / "config.json"])
tracker.finish()
"""


@pytest.mark.parametrize("name", ["wandb", "wandb/settings", ".wandb"])
def test_tracking_leads_nowhere_out_of_the_folder(name: str, tmp_path: Path) -> None:
    run, own = write_run(tmp_path / "run"), tmp_path / "own"
    own.mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(own)
    with pytest.raises(FileProblem, match=name):
        make_tracker("offline", run, {})
    assert not list(own.iterdir())


def test_tracking_follows_no_link_below_its_folder(tmp_path: Path) -> None:
    run, own = write_run(tmp_path / "run"), tmp_path / "own"
    own.mkdir()
    for name in ("data/artifacts", "cache/artifacts", "cache/wandb"):
        (run / "wandb" / name).parent.mkdir(parents=True, exist_ok=True)
        (run / "wandb" / name).symlink_to(own)
    subprocess.run([sys.executable, "-c", TRACKS, str(run)], cwd=tmp_path, check=True)
    assert not list(own.iterdir())
    assert list((run / "wandb").glob("files-*/data/artifacts/staging/*"))


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
def test_tracking_takes_no_server_from_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileProblem, match=f"{name}/settings: wandb may take its server from here"):
        make_tracker("online", write_run(tmp_path / "run"), {})
