"""Files of a stranger's run, damaged in every way: each command does its work, or says in one line what is wrong."""

from __future__ import annotations

import ast
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from asking import asked
from damaged import HOSTILE, mutation, share
from hypothesis import given
from hypothesis import strategies as st
from micrographs import fork_join
from run_files import change, write_run
from run_folders import placed_run

from rlplace.errors import InvalidValue
from rlplace.files import write_json_atomic
from rlplace.graphs.formats import save_graph
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.session.session import Session

REPORT, EXPORT = ["report", "RUN"], ["export", "RUN"]
PLACE = ["place", "RUN", "--host", "HOST", "--evaluations", "10", "--out", "OUT", "--overwrite", "--quiet"]
COMMANDS = {
    "request": (REPORT, EXPORT, ["export", "RUN", "--check"], PLACE),
    "config": (REPORT, PLACE),
    "problem": (REPORT, EXPORT, ["export", "RUN", "--format", "csv"], PLACE),
    "host": (REPORT, EXPORT, PLACE),
    "table": (REPORT,),
    "ending": (REPORT,),
    "method/learned": (REPORT,),
    "explanation": (["explain", "RUN"], ["explain", "RUN", "--json"], REPORT),
    "placement": (EXPORT, ["export", "RUN", "--format", "csv"], PLACE),
    "placement.json": (["simulate", "GRAPH", "--host", "HOST", "--placement", "RUN/placement.json"],),
}
"""Commands that read a record of a run's session, or a file of it that the user names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a file of each kind, its graph and its host."""
    root = tmp_path_factory.mktemp("strangers")
    graph, host = fork_join(2, 3, 100), resolve_host("2xK80")
    devices = (np.arange(graph.num_ops) % host.num_devices).astype(np.int32)
    run = placed_run(root / "run", "nmt@small", graph, host, devices)
    with Session.read(write_run(root / "other")) as other, Session.open(run) as session:
        names = ("table", "ending", "explanation", "method/learned")
        session.keep(**{name: json.dumps(other.plain(name)) for name in names})
    save_graph(graph, root / "graph.json")
    save_host(host, root / "host.json")
    return root


def commands(name: str, folder: Path) -> list[list[str]]:
    """The commands that read a file of the run."""
    words = {"RUN": folder / "run", "GRAPH": folder / "graph.json", "HOST": folder / "host.json", "OUT": folder / "out"}
    return [
        [str(words.get(word, word)).replace("RUN/", f"{folder}/run/") for word in command] for command in COMMANDS[name]
    ]


def test_the_files_that_are_damaged_are_read(folder: Path) -> None:
    for name in COMMANDS:
        for command in commands(name, folder):
            code, said = asked(*command)
            assert code == 0 or "--check" in command or command[0] == "place", said


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@share(60)
@given(data=st.data())
def test_a_damaged_file_is_read_all_the_same_or_told(data: st.DataObject, name: str, folder: Path) -> None:
    path = folder / "run" / (name if name.endswith(".json") else "session.db")
    before = path.read_bytes()
    if name.endswith(".json"):
        path.write_bytes(data.draw(mutation(before)))
    else:
        changed = data.draw(mutation(fact_of(path, name).encode())).decode("utf-8", "replace")
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE facts SET value = ? WHERE name = ?", (changed, name))
    try:
        for command in commands(name, folder):
            code, said = asked(*command)
            assert code in (0, 2), said
            assert code == 0 or said.startswith("rlplace: error: "), said
            assert "\x1b" not in said
            assert len(said) < 20_000
    finally:
        path.write_bytes(before)
        assert not [each.name for each in path.parent.iterdir() if each.name.startswith("session.db-")]


def fact_of(path: Path, name: str) -> str:
    """What a session holds under a name, as text. Its connection ends here: a draw may raise."""
    with closing(sqlite3.connect(path)) as database:
        (text,) = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return str(text)


@pytest.mark.parametrize("field", ["default_size", "seed", "batch_dims", "loss"])
def test_nothing_of_a_run_gets_into_its_program_unread(field: str, tmp_path: Path) -> None:
    """`step.py` is run by whoever exported it."""
    graph, host = fork_join(2, 1, 8), resolve_host("2xK80")
    run = placed_run(tmp_path / "run", "nmt@small", graph, host, np.zeros(graph.num_ops, dtype=np.int32)).root
    hostile = f'small{HOSTILE}"); raise SystemExit #'
    cut = {"count": 2, "batch_dims": [0], "loss": "separate", "is_exact": False}
    changes: dict[str, dict[str, object]] = {
        "default_size": {"default_size": hostile},
        "seed": {"workload_seed": hostile},
        "batch_dims": {"asked": cut | {"batch_dims": [hostile]}},
        "loss": {"asked": cut | {"loss": hostile}},
    }
    change(run, "request", **changes[field])
    code, said = asked("export", str(run))
    assert code == 2
    assert field in said
    assert not (run / "step.py").exists()
    change(run, "request", default_size="small", workload_seed=7, asked=cut)
    assert asked("export", str(run))[0] == 0
    calls = [node for node in ast.walk(ast.parse((run / "step.py").read_text())) if isinstance(node, ast.Raise)]
    assert not calls


@pytest.mark.parametrize("modules", [[], ["a"], ["a"] * 500])
def test_a_run_with_more_or_fewer_modules_than_ops_is_refused(modules: list[str], tmp_path: Path) -> None:
    graph, host = fork_join(2, 1, 8), resolve_host("2xK80")
    run = placed_run(tmp_path / "run", "nmt@small", graph, host, np.zeros(graph.num_ops, dtype=np.int32)).root
    change(run, "problem", modules=modules)
    code, said = asked("export", str(run), "--format", "csv")
    assert code == 2
    assert f"modules is {len(modules)}, expected {graph.num_ops}, one for each op" in said
    assert said.count("\n") == 1
    assert not (run / "placement.csv").exists()


def test_the_host_of_a_run_gets_into_its_program_as_a_short_text(tmp_path: Path) -> None:
    """The program prints it where it is run elsewhere."""
    graph, host = fork_join(2, 1, 8), resolve_host("2xK80")
    run = placed_run(tmp_path / "run", "nmt@small", graph, host, np.zeros(graph.num_ops, dtype=np.int32)).root
    change(run, "request", host=f"two\x1b]0;title\x07\u202e{'x' * 9000}")
    assert asked("export", str(run))[0] == 0
    texts = [
        node.value for node in ast.walk(ast.parse((run / "step.py").read_text())) if isinstance(node, ast.Constant)
    ]
    (said,) = [text for text in texts if isinstance(text, str) and "was found on two" in text]
    assert said.isprintable()
    assert len(said) < 1000
    (run / "step.py").unlink()
    for wrong in ({"a": 1}, 7, ["x"], None):
        change(run, "request", host=wrong)
        code, words = asked("export", str(run))
        assert code == 2
        assert "request: host is" in words
    assert not (run / "step.py").exists()


def test_a_name_that_a_terminal_would_act_on_is_no_name_of_a_host(tmp_path: Path) -> None:
    host = resolve_host("2xK80").to_dict()
    for name in ("\x1b]0;title\x07", "two\nlines", "\u202ebackwards", "a" * 5000):
        write_json_atomic(tmp_path / "host.json", host | {"name": name})
        code, said = asked("hosts", str(tmp_path / "host.json"))
        assert code == 2
        assert "host.json: name is" in said
        assert "\x1b" not in said
    with pytest.raises(InvalidValue, match="name is"):
        resolve_host(str(tmp_path / "host.json"))
