"""Two machines that are namespaces: a command runs over both, and nothing is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "two_machines.py"
pytestmark = pytest.mark.slow


def over_two(*words: str) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--rate", "200mbit", "--cores", "0", "0", "--limit", "300", "--", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLPLACE_IN_PROCESS": "0"},  # other tests measure in this process
    ) as process:
        done = subprocess.CompletedProcess(words, 0, *process.communicate(timeout=400))
    done.returncode = process.returncode
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"rlplace-{process.pid}-" not in left, "what the script made is gone"
    return done


def test_the_doctor_looks_at_both() -> None:
    done = over_two("-m", "rlplace", "doctor", "--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "a: 1 rank, net-a 10.77.0.1, b: 1 rank, net-b 10.77.0.2" in found["machines"]["found"]
    assert {found[name]["verdict"] for name in ("versions", "reach", "link a to b", "link b to a")} == {"ok"}


def test_a_placement_is_measured_over_both() -> None:
    done = over_two("-m", "rlplace", "measure", "rnnlm@small", "--host", "nodes", "--store", "off", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "ok"
    assert found["step_time_s"] > 0


def test_what_fails_on_the_first_machine_ends_both() -> None:
    done = over_two("-m", "rlplace", "measure", "no-such-workload", "--host", "nodes")
    assert done.returncode != 0
    assert "unknown workload 'no-such-workload'" in done.stderr
