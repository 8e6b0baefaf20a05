"""A stranger's run that was left amid its search, damaged in every way: it goes on, or one line says what is wrong."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import asked
from damaged import damaged, damaged_tree, share
from hypothesis import given
from hypothesis import strategies as st
from micrographs import fork_join
from run_files import change, forget
from safetensors.numpy import load, save

from rlplace.graphs.formats import save_graph
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.training.config import TrainConfig
from rlplace.training.train_and_resume import Job


def unfinish(run: Path) -> None:
    """Makes a run one that has not come to its end."""
    with Session.open(RunFolder(run)) as session:
        session.keep(has_ended=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one graph: one has come to its end, the other has not."""
    root = tmp_path_factory.mktemp("resumed")
    save_graph(fork_join(2, 3, 100), root / "graph.json")
    options = ("--host", "2xK80", "--evaluations", "20", "--method", "random", "--quiet")
    code, said = asked("train", str(root / "graph.json"), *options, "--run", str(root / "finished"))
    assert code == 0, said
    shutil.copytree(root / "finished", root / "left")
    unfinish(root / "left")
    return root


def goes_on_or_says_why(run: Path, name: str, content: bytes) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (run / name).write_bytes(content)
    try:
        code, said = asked("train", str(run.parent / "graph.json"), "--resume", str(run), "--quiet")
        assert code in (0, 2), said
        assert code == 0 or "rlplace: error: " in said
        assert len(said) < 20_000
    finally:
        for kept, whole in before.items():
            (run / kept).write_bytes(whole)


@pytest.mark.slow
def test_what_is_damaged_goes_on(folder: Path) -> None:
    for run in ("finished", "left"):
        assert asked("train", str(folder / "graph.json"), "--resume", str(folder / run), "--quiet")[0] == 0
    unfinish(folder / "left")


FACTS = ("request", "config", "problem", "host", "placement", "method/random", "table", "ending", "has_ended")


@st.composite
def damaged_session(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes, records or arrays of a session, damaged."""
    kind = draw(st.sampled_from(["bytes", "record", "arrays"]))
    if kind == "bytes":
        return damaged(draw, content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.db"
        path.write_bytes(content)
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA journal_mode = DELETE")
            if kind == "record":
                name = draw(st.sampled_from(FACTS))
                (text,) = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
                changed = json.dumps(damaged_tree(draw, json.loads(text)))
                database.execute("UPDATE facts SET value = ? WHERE name = ?", (changed, name))
            else:
                name = draw(st.sampled_from(["problem", "method/random"]))
                (data,) = database.execute("SELECT value FROM arrays WHERE name = ?", (name,)).fetchone()
                changed_data = save(damaged_arrays(draw, load(data)))
                database.execute("UPDATE arrays SET value = ? WHERE name = ?", (changed_data, name))
        database.close()
        return path.read_bytes()


def damaged_arrays(draw: st.DrawFn, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    name = draw(st.sampled_from(sorted(arrays)))
    array = arrays.pop(name)
    kind = draw(st.sampled_from(["drop", "huge", "short", "float"]))
    if kind == "drop":
        return arrays
    if kind == "float":
        return arrays | {name: np.full(array.shape, np.nan)}
    return arrays | {name: array[:-1].copy() if kind == "short" else np.full(array.shape, 2**31 - 1, dtype=np.int64)}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["finished", "left"])
@share(60)
@given(data=st.data())
def test_its_session(data: st.DataObject, run: str, folder: Path) -> None:
    path = folder / run / "session.db"
    goes_on_or_says_why(folder / run, path.name, data.draw(damaged_session(path.read_bytes())))


REACHING = {"store": "/nowhere/else.db", "track": "online", "cluster": "10.0.0.1:6379", "isolated": False}
"""Options that reach out of a run folder."""
DEFAULT = {name: getattr(TrainConfig(), name) for name in REACHING}


@pytest.fixture
def left(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run that has not come to its end."""
    return Path(shutil.copytree(folder / "left", tmp_path / "left"))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The options of the runs that are gone on with, none of which does anything."""
    seen: list[TrainConfig] = []

    def noted(job: Job, *_: object, **__: object) -> dict[str, object]:
        seen.append(job.config)
        return {}

    monkeypatch.setattr("rlplace.training.train_and_resume.run_job", noted)
    monkeypatch.setattr(Job, "check", lambda _: None)
    return seen


def config_of(run: Path) -> dict[str, Any]:
    with Session.read(run) as session:
        found: dict[str, Any] = session.plain("config")
    return found


def claim(run: Path, **options: Any) -> None:
    """Writes these options into the run's session, as if it had been started with them."""
    change(run, "config", **options)


@pytest.mark.parametrize("host", [(), ("--host", "4xV100-pcie", "--overwrite")], ids=["resumed", "elsewhere"])
def test_what_reaches_out_of_the_folder_counts_only_if_it_is_named_again(
    host: tuple[str, ...], left: Path, folder: Path, requests: list[TrainConfig]
) -> None:
    words = ("train", str(folder / "graph.json"), "--resume", str(left), "--quiet", *host)
    claim(left, **REACHING)
    again = ["--in-process"]
    again += [word for name, value in REACHING.items() if name != "isolated" for word in (f"--{name}", str(value))]
    assert asked(*words) == (0, ""), "the folder is not asked"
    for name, value in DEFAULT.items():
        assert getattr(requests[-1], name) == value
    assert asked(*words, *again) == (0, ""), "named again"
    for name, value in REACHING.items():
        assert getattr(requests[-1], name) == value


def test_a_folder_connects_to_nobody(left: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        claim(left, cluster=address)
        assert asked("train", str(folder / "graph.json"), "--resume", str(left), "--quiet")[0] == 0
        head.setblocking(False)
        with pytest.raises(BlockingIOError):
            head.accept()


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--resume", "RUN"),
        ("train", "--resume", "RUN", "--host", "4xV100-pcie"),
        ("place", "RUN", "--host", "4xV100-pcie", "--out", "RUN/placed.json"),
    ],
)
def test_a_graph_file_is_opened_only_if_it_is_named_again(words: tuple[str, ...], left: Path, folder: Path) -> None:
    code, said = asked(*(word.replace("RUN", str(left)) for word in words), "--quiet")
    assert code == 2
    assert str(folder / "graph.json") in said
    assert "name it again" in said


@pytest.mark.parametrize(("option", "name"), [("init", "weights.safetensors"), ("priors", "priors.json")])
def test_a_file_to_begin_with_is_opened_only_if_it_is_named_again(
    option: str, name: str, left: Path, folder: Path, requests: list[TrainConfig]
) -> None:
    asked_for = config_of(left)
    group = "learn" if option == "init" else "search"
    claim(left, **{group: asked_for[group] | {option: name}})
    words = ("train", str(folder / "graph.json"), "--resume", str(left), "--quiet")
    for more in ((), (f"--{option}", f"other-{name}")):
        code, said = asked(*words, *more)
        assert code == 2
        assert name in said
    assert not requests
    assert asked(*words, f"--{option}", name)[0] == 0
    assert str(getattr(getattr(requests[-1], group), option)) == name


@pytest.mark.slow
def test_a_host_file_is_not_opened_again(folder: Path, tmp_path: Path) -> None:
    host, run = tmp_path / "two.json", tmp_path / "run"
    save_host(resolve_host("2xK80"), host)
    words = ("train", str(folder / "graph.json"), "--quiet")
    assert asked(*words, "--host", str(host), "--evaluations", "20", "--method", "random", "--run", str(run))[0] == 0
    unfinish(run)
    host.unlink()
    code, said = asked(*words, "--resume", str(run))
    assert code == 0, said
    forget(run, "host")
    unfinish(run)
    code, said = asked(*words, "--resume", str(run))
    assert code == 2
    assert "host file" in said
