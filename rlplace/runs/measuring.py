"""`measuring`: what surrounds measuring on this machine: nobody else does meanwhile, and what is measured is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlplace.locks import measuring_alone
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import versions_line
from rlplace.store.log import StoreLog, open_log


@contextmanager
def measuring(
    host: Host,
    store: str,
    *,
    workload: str,
    say: Callable[[str], None],
    run: Path | None = None,
    is_waiting: bool = True,
) -> Iterator[StoreLog | None]:
    """While active, no other process measures on this machine, and the log that is given keeps what is measured.

    Args:
        host: that is measured; on a simulated one nothing is held and nothing kept.
        store: `auto`, `off` or a file.
        workload: its name, for the store.
        say: told whom it waits for, and what cannot be kept.
        run: a run folder that is there, which gets a store of its own.
        is_waiting: wait for another search that measures here, instead of giving up.

    Raises:
        FileProblem: a store was named that cannot be opened.
        RunnerError: another search measures here, and nobody wants to wait.
    """
    with measuring_alone(host, say=say, run=run, is_waiting=is_waiting):
        log = open_log(store, host, workload=workload, versions=versions_line(), say=say, run=run)
        try:
            yield log
        finally:
            if log is not None:
                log.close()
