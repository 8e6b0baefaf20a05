"""Settings of every test."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from rlplace.files import cache_folder
from rlplace.jit import _Cache

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


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker that needs a kernel which another one compiles waits for it, and reads it from the disk."""
    held: dict[str, int] = {}
    load, save = _Cache.load_overload, _Cache.save_overload

    def load_or_wait(cache: _Cache, *call: Any) -> Any:
        found, name = load(cache, *call), cache.index.name
        if found is None and name not in held:
            held[name] = os.open(tmp_path_factory.getbasetemp().parent / f"{name}.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(held[name], fcntl.LOCK_EX)
            found = load(cache, *call)
            if found is not None:
                os.close(held.pop(name))
        return found

    def save_and_let_go(cache: _Cache, *compiled: Any) -> None:
        save(cache, *compiled)
        if (file := held.pop(cache.index.name, None)) is not None:
            os.close(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Cache, "load_overload", load_or_wait)
        patch.setattr(_Cache, "save_overload", save_and_let_go)
        yield
