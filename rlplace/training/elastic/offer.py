"""What a run that lost a device offers: to go on, or to place at once, on what is left of the host."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlplace.errors import DeviceLost, RlplaceError
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.outcomes import lost_of
from rlplace.measure.timing.threads import usable_cores
from rlplace.training.resume.config_file import Request, again_words


@contextmanager
def offering(request: Request, folder: Path) -> Iterator[None]:
    """While active, an error that comes of a lost device says so, and how the run goes on without it.

    Args:
        request: what the run is asked to do; a host that is simulated loses nothing.
        folder: of the run.

    Raises:
        DeviceLost: in the place of any error that was raised while a device was lost.
    """
    host = request.host
    try:
        yield
    except RlplaceError as error:
        lost = error if isinstance(error, DeviceLost) else None if host.is_simulated else lost_of(host, error)
        if lost is None:
            raise
        where = [str(folder), "--host", what_is_left(host, request.host_word), *(["--gangs"] if request.gangs else [])]
        own = request.own_workload
        train = shlex.join(["rlplace", "train", *own, "--resume", *where, *again_words(request.config)])
        place = shlex.join(["rlplace", "place", *where, *(["--workload", *own] if own else [])])
        offer = f"What was measured is kept: go on with `{train}`, or place at once, without measuring, with `{place}`."
        raise DeviceLost(lost.devices, lost.why, offer=offer) from error


def what_is_left(host: Host, host_word: str) -> str:
    """A HOST word for the devices of a host that are still there.

    As many devices of as many cores as before, or as many as there are cores for; of GPUs, whichever PyTorch sees.

    Args:
        host: some of whose devices are lost.
        host_word: what the user called it.
    """
    if any(device.backend == "cuda" for device in host.devices):
        return host_word if host_word.startswith(("auto", "cuda")) else "auto"
    singles = [device for device in host.devices if not device.members]
    width = max(min((len(device.cores) for device in singles), default=1), 1)
    count = min(len(singles), len(usable_cores()) // width)
    if not count:
        return "cores"
    return f"cores:{count}" + (f"x{width}" if width > 1 else "")
