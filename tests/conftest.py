"""Settings of every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from rlplace.files import cache_folder

# The same examples on every run, however slow the machine: a change must not fail for an example that nobody has seen
# before. `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("fixed")

# A worker imports PyTorch, which takes seconds: tests of what is measured run in their own process, those of workers
# (tests/measure/isolate) ask for one.
os.environ["RLPLACE_IN_PROCESS"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _one_intra_op_thread() -> None:
    """Tests run beside others: two threads that wait for each other on a busy core take many times as long as one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither write into the store of whoever runs them nor wait for searches of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("rlplace.locks.lock_folders", lambda: iter([cache_folder()]))
        yield
