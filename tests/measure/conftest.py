"""Crews of workers, started once a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faulty_ops import SWITCH
from placed_steps import GANG_HOST, HOST

from rlplace.measure.execute.device_threads import Crew


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[str, Crew]]:
    made = {"plain": Crew(HOST.devices), "gang": Crew(GANG_HOST.devices)}
    yield made
    for crew in made.values():
        crew.stop()


@pytest.fixture
def switch() -> Iterator[dict[str, Any]]:
    """What `faulty_ops.switched` does, which is nothing again afterwards."""
    yield SWITCH
    SWITCH.update(fails=None, thread=None, stuck=None)


@pytest.fixture
def crew(crews: dict[str, Crew]) -> Crew:
    return crews["plain"]
