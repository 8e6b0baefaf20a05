"""Whether a worker is used: by default yes, by option or environment not, and with a warning where none can be started.

Placements are measured in a worker also from a notebook, and its own ops go there with their definition.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host, process_host
from main_scripts import MEASURES
from torch import nn

from rlplace.graphs import capture
from rlplace.measure import Costs, Problem, Simulator
from rlplace.measure.isolate import isolated_runner, worker
from rlplace.measure.isolate.fleet import Fleet
from rlplace.measure.isolate.isolated_runner import VARIABLE, is_isolated, make_runner, profile_isolated
from rlplace.measure.isolate.packing import Packed
from rlplace.measure.isolate.worker import CannotIsolate
from rlplace.measure.timing.host_runner import HostRunner


@pytest.mark.parametrize(
    ("asked", "value", "expected"),
    [(None, None, True), (None, "1", False), (None, "0", True), (True, "1", True), (False, None, False)],
)
def test_what_was_asked_comes_before_the_environment(
    asked: bool | None, value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert is_isolated(asked) is expected


def test_a_step_that_cannot_be_sent_is_measured_here_with_a_warning() -> None:
    graph = capture(nn.Linear(2, 2), torch.ones(1, 2))
    problem = Problem.grouped(graph, core_host(1), Costs(np.ones((graph.num_ops, 1)), "profiled"), 2)
    object.__setattr__(graph.program, "result", threading.Lock())
    with pytest.warns(RuntimeWarning, match="measured in this process, as no worker can be had"):
        runner = make_runner(problem, Simulator(problem), reference=None, seed=0, isolated=True)
    assert isinstance(runner, HostRunner)
    runner.close()


def test_where_no_process_can_be_started_it_is_measured_here_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    graph = capture(nn.Linear(2, 2), torch.ones(1, 2))
    problem = Problem.grouped(graph, core_host(1), Costs(np.ones((graph.num_ops, 1)), "profiled"), 2)
    with pytest.warns(RuntimeWarning, match="no worker can be had: it cannot be started: .*temporarily unavailable"):
        runner = make_runner(problem, Simulator(problem), reference=None, seed=0, isolated=True)
    assert isinstance(runner, HostRunner)
    runner.close()


KILLED = """
import os, time
if {link!r} and {link!r}[0]:
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


def test_where_devices_are_processes_nothing_runs_here_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed while it starts is named, after a second worker was tried."""
    started: list[Fleet] = []

    def start(*given: Any, **options: Any) -> Fleet:
        started.append(Fleet(*given, **options))
        return started[-1]

    monkeypatch.setattr(isolated_runner, "Fleet", start)
    monkeypatch.setattr(worker, "_CODE", KILLED)
    graph = capture(nn.Linear(2, 2), torch.ones(1, 2))
    problem = Problem.grouped(graph, process_host(2), Costs(np.ones((graph.num_ops, 2)), "profiled"), 2)
    words = r"\Athe worker of cpu:1 was ended from outside \(SIGKILL\) while it started\Z"
    with pytest.raises(CannotIsolate, match=words):
        make_runner(problem, Simulator(problem), reference=None, seed=0, isolated=True)
    assert len(started) == 2
    assert all(rank.has_ended for fleet in started for rank in fleet.ranks)
    monkeypatch.setattr(worker, "_CODE", "raise SystemExit(5)")
    with pytest.raises(CannotIsolate, match=r"\Athe worker ended \(exit code 5\) while it started\Z"):
        profile_isolated(graph, problem.host, isolated=True)
    assert len(started) == 3, "it would end again"


def test_a_worker_that_was_killed_once_while_it_started_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        def __init__(self, *_: object, **__: object) -> None:
            made.append(self)
            self.is_closed = False

        def await_ready(self) -> None:
            if len(made) == 1:
                error = CannotIsolate("killed")
                error.is_from_outside = True
                raise error

        def close(self) -> None:
            self.is_closed = True

    made: list[Started] = []
    monkeypatch.setattr(isolated_runner, "Fleet", Started)
    assert isolated_runner.ready(Packed(), core_host(1).devices) is made[1]  # type: ignore[comparison-overlap]
    assert [each.is_closed for each in made] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "-c", "stdin"])
def test_a_main_module_needs_no_guard_and_may_define_ops(how: str, tmp_path: Path) -> None:
    """The op of the main module runs in the worker, whose main module is another."""
    text = f'print("the main module runs", flush=True)\n{MEASURES}'
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    arguments = {"script": [str(script)], "-c": ["-c", text], "stdin": ["-"]}[how]
    path = os.pathsep.join([str(Path(np.__file__).parents[1]), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the main module runs", "ok "]


ORPHAN = """
import threading, time
import numpy as np
from faulty_ops import faulty_graph
from core_hosts import core_host
from rlplace.measure import Costs, Problem, RaceProtocol, Simulator
from rlplace.measure.isolate.isolated_runner import IsolatedRunner

graph = faulty_graph(("hang",))
problem = Problem.grouped(graph, core_host(2), Costs(np.ones((3, 2)), "profiled"), 3)
simulator = Simulator(problem)
runner = IsolatedRunner(problem, simulator)
worker = runner._process

def say_when_it_hangs():
    while not worker.board.is_at_work:
        time.sleep(0.01)
    print(worker.pid, flush=True)

threading.Thread(target=say_when_it_hangs).start()
runner.measure_plans([simulator.plan(np.array([0, 1, 0], dtype=np.int32))], protocol=RaceProtocol(0, 1, 1))
"""


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_asks_whatever_it_is_doing() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    while is_alive(worker):  # as long as the test may take
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_notebook_measures_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cells = [nbformat.v4.new_code_cell(part) for part in MEASURES.split("\n\n\n")]
    assert len(cells) > 2, "an op that one cell defines is run by another"
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.outputs]
    assert "".join(output.get("text", "") for output in outputs) == "ok \n"
