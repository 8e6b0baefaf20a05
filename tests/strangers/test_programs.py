"""Programs that `rlplace export` writes import no module that lies beside them in a stranger's run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.export import dtensor, torchrun
from rlplace.export.pipeline import _TEMPLATE
from rlplace.session.step_script import script

MARK = "import os\nos.write(2, b'RAN ' + __name__.encode())\nos._exit(9)\n"
PIPELINE = _TEMPLATE.format_map(
    dict.fromkeys(re.findall(r"(?<!{){(\w+)", _TEMPLATE), "1")
    | {
        "stages": "",
        "schedule": "ScheduleGPipe",
        "optimizer": "SGD",
        "options": "lr=1",
        "reduce": "mean",
    }
)
TORCHRUN = torchrun._TEMPLATE.format_map(
    dict.fromkeys(re.findall(r"(?<!{){(\w+)", torchrun._TEMPLATE), "1") | {"cut": ""}
)
DTENSOR = dtensor._TEMPLATE.format_map(
    dict.fromkeys(re.findall(r"(?<!{){(\w+)", dtensor._TEMPLATE), "1")
    | {"styles": "", "optimizer": "SGD", "options": "lr=1"}
)
PROGRAMS = {
    "step.py": script("mine:make", default_size="small", seed=0),
    "pipeline.py": PIPELINE,
    "torchrun.py": TORCHRUN,
    "dtensor.py": DTENSOR,
}


@pytest.mark.slow
@pytest.mark.parametrize("is_safe", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_beside_a_program_is_imported(name: str, is_safe: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for module in ("__future__", "rlplace", "torch", "pathlib", "argparse", "os", "re", "numpy", "safetensors"):
        (run / f"{module}.py").write_text(MARK)
    (run / name).write_text(PROGRAMS[name])
    path = os.environ.get("PYTHONPATH", "")
    command = [sys.executable, *["-P"] * is_safe, str(run / name), *["--help"] * (name != "step.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert "RAN" not in done.stderr
    if name != "step.py":
        assert done.returncode == 0, done.stderr
    else:  # it came as far as its placement, which is not there
        assert "placement.json" in done.stderr
        assert done.returncode == 1


@pytest.mark.parametrize("text", [PIPELINE, TORCHRUN, DTENSOR])
def test_the_command_that_a_program_names_imports_nothing_of_the_current_folder(text: str, tmp_path: Path) -> None:
    for module in ("torch", "numpy", "argparse", "re"):
        (tmp_path / f"{module}.py").write_text(MARK)
    (command,) = re.findall(r"^ {4}(.*torchrun) --nproc-per-node", text, re.MULTILINE)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        f"{command} --help",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RAN" not in done.stderr
    assert "--nproc-per-node" in done.stdout
