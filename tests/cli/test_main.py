"""The command line: exit codes, messages, and what goes to stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlplace import __version__
from rlplace.cli.main import COMMANDS, MOVED, main
from rlplace.files import os_errors


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlplace.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd, check=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlplace {__version__}\n"


def test_it_is_a_module_that_python_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlplace", "--version"], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == f"rlplace {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "inception_v4"], ["unknown workload", "'inception_v3'"]),
        (["train", "mymodel"], ["unknown workload", "package.module:function"]),
        (["train", "nmt@unitz=5"], ["unitz", "units"]),
        (["train", "nmt@units=many"], ["units", "many"]),
        (["train", "nmt", "--host", "8xV100-dgx"], ["unknown host", "8xV100-dgx1"]),
        (["train", "nmt", "--host", "cores:999"], ["cores"]),
        (["train", "nmt", "--reward", "log_speed"], ["unknown reward", "log_speedup"]),
        (["train", "nmt", "--init", "start"], ["unknown init", "starts"]),
        (["train", "nmt", "--method", "portfoli"], ["unknown method", "portfolio"]),
        (["train", "nmt", "--learner", "poo"], ["unknown learner", "ppo"]),
        (["train", "nmt", "--budget", "5 minutes"], ["budget", "5 minutes"]),
        (["train", "nmt", "--track", "offlin"], ["unknown track", "offline"]),
        (["train", "no_such_module:f"], ["no_such_module"]),
        (["hosts", "4xV100"], ["unknown host", "4xV100-pcie"]),
        (["export", "no/such/run"], ["no such run folder"]),
        (["simulate", "nmt", "--placement", "no_such_file.json"], ["no_such_file.json", "no such file"]),
        (["measure", "nmt", "--host", "4xV100-pcie"], ["4xV100-pcie", "this machine"]),
        (["fidelity", "nmt", "--host", "4xV100-pcie"], ["4xV100-pcie", "this machine"]),
    ],
)
def test_a_mistake_is_one_clear_message_and_exit_code_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for word in words:
        assert word in said.err
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", MOVED)
def test_a_command_that_became_a_program_names_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "anything", "--json"]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    assert (Path(__file__).parents[2] / line.partition(" python ")[2].split()[0]).is_file()


def test_a_mistyped_option_exits_with_2() -> None:
    done = run("train", "nmt", "--bugdet", "5m")
    assert done.returncode == 2
    assert "--budget" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["hosts"], ["hosts", "4xV100-pcie"], ["workloads"]])
def test_json_is_one_object_on_stdout(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1


INTERRUPTED = """
import signal, sys, time, weakref
from rlplace.cli import main as cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it

class Thing: ...

def interrupted(_):
    signal.raise_signal(signal.SIGINT)

def command(**_):
    thing = Thing()
    watch = weakref.ref(thing, interrupted)
    del thing
    time.sleep(600)

cli.app.cli = command
sys.exit(cli.main(["hosts"]))
"""


def test_what_a_users_module_prints_is_not_before_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import torch",
        "def workload():",
        "    print('loading weights')",
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2)",
    )
    (tmp_path / "chatty_rlplace_model.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["graph", "chatty_rlplace_model:workload", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["schema"] == 1
    assert "loading weights" in said.err
    print("after it, stdout is everybody's again")
    assert "everybody's" in capsys.readouterr().out


def test_ctrl_c_where_it_cannot_be_raised_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rlplace: interrupted\n")


TERMINATED = """
import os, signal, sys, time
from rlplace.cli import main as cli

def command(**_):
    try:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(600)
    finally:
        print("kept what there was", flush=True)

cli.app.cli = command
code = cli.main(["hosts"])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
sys.exit(code)
"""


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "kept what there was\n", "rlplace: terminated\n")


FORKING = """    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return
    try:
"""
FORKED = TERMINATED.replace("    try:\n", FORKING)


def test_sigterm_ends_a_fork_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "-15\n")


def test_a_step_that_does_not_end_in_time_is_a_failure_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(**_: object) -> None:
        raise TimeoutError("device cpu:0 did not end its part within 120 s")

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=late))
    assert main(["hosts"]) == 1
    assert capsys.readouterr().err == "rlplace: failed: device cpu:0 did not end its part within 120 s\n"


def test_what_is_added_to_an_error_is_a_sentence_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(**_: object) -> None:
        error = TimeoutError("device cpu:0 did not end")
        error.add_note("To go on: rlplace train --resume x")
        raise error

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=late))
    assert main(["hosts"]) == 1
    said = "rlplace: failed: device cpu:0 did not end. To go on: rlplace train --resume x\n"
    assert capsys.readouterr().err == said


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("words", [["hosts"], ["hosts", "--json"], ["--version"], ["--help"], ["hosts", "--help"]])
def test_an_output_that_cannot_be_written_is_a_failure_in_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "rlplace.cli.main", *words]
    with FULL.open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
        assert done.stderr == "rlplace: failed: the output cannot be written: No space left on device.\n"
        assert done.returncode == 1
        assert subprocess.run(command, stdout=full, stderr=full, timeout=600, check=False).returncode == 1


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a file that is always full")
def test_a_mistake_is_said_as_such_also_where_the_output_is_full() -> None:
    command = [sys.executable, "-m", "rlplace.cli.main", "hosts", "4xV100"]
    with FULL.open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "unknown host" in done.stderr
    assert "failed" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EIO, 1), (errno.EACCES, 2)])
def test_a_full_disk_is_no_mistake_of_the_users(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(**_: object) -> None:
        with os_errors("placement.json", "written"):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=write))
    assert main(["hosts"]) == code
    kind = "failed" if code == 1 else "error"
    assert capsys.readouterr().err == f"rlplace: {kind}: placement.json: cannot be written: {os.strerror(number)}.\n"


@pytest.mark.parametrize("name", [None, "kernels"])
def test_a_disk_that_fails_anywhere_is_a_failure_in_one_line(
    name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=write))
    assert main(["hosts"]) == 1
    what = "the output cannot be written" if name is None else f"{name} cannot be used"
    assert capsys.readouterr().err == f"rlplace: failed: {what}: Read-only file system.\n"


def test_an_error_that_is_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "none")

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=fail))
    with pytest.raises(FileNotFoundError):
        main(["hosts"])


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7 TiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes.\nframe"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."),
    ],
)
def test_memory_that_does_not_suffice_is_said_in_a_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=lambda **_: refuse()))
    assert main(["hosts"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("rlplace: failed: this machine's memory does not suffice: ")
    assert "allocate 7" in said
    assert len(said.splitlines()) == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("rlplace.cli.main.app", SimpleNamespace(cli=fail))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["hosts"])
