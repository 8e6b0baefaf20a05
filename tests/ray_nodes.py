"""Ray nodes of one core each on this machine, for tests: started, reached, and gone afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FIRST_PRIORITY = {"RAY_worker_niceness": "0"}
"""Ray's workers would wait for whatever else runs on this machine: their niceness is 15 by default."""


@contextmanager
def ray_nodes(count: int = 2) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of `count` nodes; every process of it has ended afterwards."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in FIRST_PRIORITY.items():
            patch.setenv(name, value)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(count - 1):
            nodes.add_node(num_cpus=1)
    session = Path(nodes.head_node.get_session_dir_path()).name
    try:
        yield nodes
    finally:
        nodes.shutdown()
        assert ended(session), f"still running: {processes_of(session)}"


def ended(word: str, within_s: float = 60.0) -> bool:
    """Whether no process has `word` in its command line any more, soon."""
    deadline_s = time.monotonic() + within_s
    while processes_of(word):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def processes_of(word: str) -> dict[int, str]:
    """Command lines, by process, that have `word` in them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if word in line:
            found[int(folder.name)] = line
    return found
