"""What `import rlplace` tells OpenMP, each in a process of its own: OpenMP reads it once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlplace.process_settings import SPIN_COUNT

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def environment_after(statements: str, **given: str) -> list[str | None]:
    environ = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    code = f"{statements}\nimport os\nprint(','.join(os.environ.get(name, '') for name in {NAMES}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=600
    )
    return [value or None for value in done.stdout.strip().split(",")]


def test_threads_of_a_gang_leave_their_cores_soon_after_an_op() -> None:
    assert environment_after("import rlplace") == [str(SPIN_COUNT), None]


@pytest.mark.parametrize(
    "given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}], ids=lambda given: next(iter(given))
)
def test_what_the_user_chose_stays(given: dict[str, str]) -> None:
    assert environment_after("import rlplace", **given) == [given.get(name) for name in NAMES]


@pytest.mark.slow
def test_nothing_is_said_once_torch_has_read_it() -> None:
    assert environment_after("import torch, rlplace") == [None, None]
