"""The page about clusters: every command that it shows runs, on two nodes that its own commands start here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import ended, processes_of

from rlplace.cluster.cluster import BACKUP_FACTOR, BACKUP_LEAST_S, RETRIES
from rlplace.cluster.cluster_evaluator import MOST_LOST, Staleness

pytest.importorskip("ray", reason="the extra `cluster` is not installed")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
ALONE, HEAD, OTHER, USE, REAL = (
    [line.removeprefix("$ ") for line in block.splitlines()]
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
)
"""The commands of each of the page's terminals."""
SMALL = {
    "rnnlm@small": "rnnlm@small,layers=1,units=8,steps=2,vocab=20,batch=4",
    "--evaluations 500": "--evaluations 60",
    "--seeds 8": "--seeds 3",
    "--budget 5m": "--budget 2s",
}
"""What is said shorter here."""
NODE = (
    *("--num-cpus", "1", "--object-store-memory", "100000000"),
    *("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"),
)
"""Two nodes on one machine share its ports and memory."""


class Terminal:
    """Runs commands as a shell would, with the variables that it was told to export."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        facts = {"HOME": str(folder), "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._env = {**os.environ, **facts}
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            self._env.pop(name, None)

    def words(self, command: str) -> list[str]:
        """The words of a command, small, and at the port of this test."""
        for said, small in SMALL.items():
            command = command.replace(said, small)
        words = shlex.split(command.replace("10.0.0.1:6379", self.address).replace("6379", str(self._port)))
        if words[:2] == ["ray", "start"]:
            words += NODE
            if "--head" in words:
                words += ["--include-dashboard", "false", "--temp-dir", str(self._folder / "ray")]
        return words

    @property
    def address(self) -> str:
        """Of the head."""
        return f"127.0.0.1:{self._port}"

    def export(self, command: str) -> bool:
        """Whether the command sets variables, which it then does."""
        words = shlex.split(command)
        if words[0] == "export":
            self._env |= dict(word.split("=", 1) for word in words[1:])
        return words[0] == "export"

    def run(self, command: str) -> str:
        """What a command prints."""
        if self.export(command):
            return ""
        done = subprocess.run(
            self.words(command),
            cwd=self._folder,
            env=self._env | {"RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def stay(self, commands: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Runs all commands; the last one goes on."""
        for command in commands[:-1]:
            self.run(command)
        with open(log, "wb") as told:
            return subprocess.Popen(
                self.words(commands[-1]),
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )


def wait_for(word: str, log: Path) -> None:
    deadline_s = time.monotonic() + 60.0
    while word not in log.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline_s, log.read_text(encoding="utf-8")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    """A terminal beside two nodes, which Ctrl-C ends."""
    with tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True) as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for number, commands in enumerate((HEAD, OTHER)):
                log = folder / f"node{number}.log"
                nodes.append(Terminal(folder, port).stay(commands, log))
                wait_for("Ray runtime started", log)
            yield Terminal(folder, port)
        finally:
            for node in reversed(nodes):
                node.send_signal(signal.SIGINT)
                try:
                    node.wait(timeout=60)
                except subprocess.TimeoutExpired:  # Ray itself hangs now and then where the machine is busy
                    os.killpg(node.pid, signal.SIGKILL)
                    node.wait()
            assert ended(name), processes_of(name)


@pytest.mark.slow
def test_every_command_runs_on_two_nodes(terminal: Terminal) -> None:
    said = {command: terminal.run(command) for command in (USE[0], *ALONE, *USE[1:], *REAL)}
    assert said["ray status"].count(" 1 node_") == 2
    used = [text for command, text in said.items() if "--cluster" in command]
    assert len(used) == 4
    assert all("cluster of 2 nodes, 2 cores" in text for text in used)


def test_its_figures_are_those_of_the_code() -> None:
    words, staleness = " ".join(PAGE.split()), Staleness()
    assert f"done again elsewhere, up to {RETRIES} times" in words
    assert f"takes {BACKUP_FACTOR:g} times as long as the longest before it, and {BACKUP_LEAST_S:g} s at least" in words
    assert (staleness.enough, staleness.grace) == (0.5, 0.5)
    assert f"No result is older than {staleness.bound} batch" in words
    late = f"takes {staleness.slow_factor:g} times as long as the longest so far"
    assert f"{late}, and {staleness.slow_least_s:g} s at least" in words
    assert f"that {MOST_LOST} workers were lost with" in words


@pytest.mark.slow
def test_its_commands_are_known() -> None:
    assert [command.split()[0] for command in ALONE] == ["rlplace"]
    assert [commands[-1].split()[:2] for commands in (HEAD, OTHER)] == [["ray", "start"]] * 2
    assert all(commands[0].startswith("export RAY_AUTH_MODE=token") for commands in (HEAD, OTHER, USE))
