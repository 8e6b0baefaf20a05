"""A stranger's run that was left amid its search, damaged in every way: it goes on, or one line says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from asking import asked
from damaged import damaged, damaged_tree, mutation, share
from hypothesis import given
from hypothesis import strategies as st
from micrographs import fork_join
from safetensors.numpy import load, save

from rlplace.graphs.formats import save_graph
from rlplace.runs.folder import RunFolder
from rlplace.training.resume.journal import mark_finished

PROGRESS, RECORDS = "progress.safetensors", "records"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one graph: one has come to its end, the other has not."""
    root = tmp_path_factory.mktemp("resumed")
    save_graph(fork_join(2, 3, 100), root / "graph.json")
    options = ("--host", "2xK80", "--evaluations", "20", "--method", "random", "--quiet")
    code, said = asked("train", str(root / "graph.json"), *options, "--run", str(root / "finished"))
    assert code == 0, said
    shutil.copytree(root / "finished", root / "left")
    mark_finished(RunFolder.open(root / "left"), is_finished=False)
    return root


def goes_on_or_says_why(run: Path, name: str, content: bytes) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    (run / name).write_bytes(content)
    try:
        code, said = asked("train", "--resume", str(run), "--quiet")
        assert code in (0, 2), said
        assert code == 0 or "rlplace: error: " in said
        assert len(said) < 20_000
    finally:
        for kept, whole in before.items():
            (run / kept).write_bytes(whole)


def test_what_is_damaged_goes_on(folder: Path) -> None:
    for run in ("finished", "left"):
        assert asked("train", "--resume", str(folder / run), "--quiet")[0] == 0
    mark_finished(RunFolder.open(folder / "left"), is_finished=False)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["finished", "left"])
@share(30)
@given(data=st.data())
def test_its_request(data: st.DataObject, run: str, folder: Path) -> None:
    path = folder / run / "config.json"
    goes_on_or_says_why(folder / run, path.name, data.draw(mutation(path.read_bytes())))


@st.composite
def damaged_progress(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes, records or arrays of a progress file, damaged."""
    if draw(st.booleans()):
        return damaged(draw, content)
    arrays = load(content)
    names = sorted(arrays.keys() - {RECORDS})
    if names and draw(st.booleans()):
        name = draw(st.sampled_from(names))
        array = arrays[name].copy()
        kind = draw(st.sampled_from(["drop", "huge", "short", "float"]))
        if kind == "drop":
            del arrays[name]
        elif kind == "float":
            arrays[name] = np.full(array.shape, np.nan)
        else:
            arrays[name] = array[:-1] if kind == "short" else np.full(array.shape, 2**31 - 1, dtype=np.int64)
    else:
        records = damaged_tree(draw, json.loads(arrays[RECORDS].tobytes()))
        arrays[RECORDS] = np.frombuffer(json.dumps(records).encode(), dtype=np.uint8)
    return bytes(save(arrays))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["finished", "left"])
@share(30)
@given(data=st.data())
def test_its_progress(data: st.DataObject, run: str, folder: Path) -> None:
    path = folder / run / PROGRESS
    goes_on_or_says_why(folder / run, path.name, data.draw(damaged_progress(path.read_bytes())))
