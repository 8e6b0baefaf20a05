"""`reach`: the cluster that `--cluster` names, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlplace.cluster.cluster import Cluster
from rlplace.cluster.connection import OFF


@contextmanager
def reach(word: str, *, say: Callable[[str], None] = lambda line: None) -> Iterator[Cluster | None]:
    """The cluster that `--cluster WORD` stands for, left in the end; None where it is `off`.

    Args:
        word: `off`, `auto` or an address.
        say: told what was joined.

    Raises:
        UserError, RunnerError: as `Cluster.connect`.
    """
    if word == OFF:
        yield None
        return
    with Cluster.connect(word, say=say) as cluster:
        yield cluster
