"""Whether this machine has the devices of a host that is to run something."""

from __future__ import annotations

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.run.threads import usable_cores

HINT = (
    "Use a host of this machine (`auto`, `cores`, `cuda`); to simulate this one, set `backend: simulated` on its "
    "devices."
)


def check_present(host: Host) -> None:
    """Refuses a host that is not simulated and has a device that this machine lacks, before anything is run on it.

    Raises:
        InvalidValue: a GPU that PyTorch does not see, one that is there both whole and in parts, or a core that this
            process may not use.
    """
    if host.is_simulated:
        return
    names = {device.name for device in host.devices if device.backend == "cuda"}
    for device in host.devices:
        where = f"host {host.name!r}"
        if device.backend == "cuda":
            _check_gpu(device, names, where)
        if missing := sorted(set(device.cores) - set(usable_cores())):
            raise InvalidValue(
                f"cores of device {device.name!r}",
                missing,
                f"cores that this process may use ({', '.join(map(str, usable_cores()))})",
                where=where,
                hint=HINT,
            )


def check_runs_here(host: Host, *, where: str = "measure", instead: str = "simulate instead") -> None:
    """Refuses a host that is not of this machine, before anything is run on it.

    Args:
        host: every device of it has to be here.
        where: what is to be run, for messages.
        instead: what a simulated host is good for, for messages.

    Raises:
        InvalidValue: it is simulated, or has a device that this machine lacks.
    """
    if host.is_simulated:
        raise InvalidValue(
            "host",
            host.name,
            "a host of this machine (`auto`, `cores`, `cuda`)",
            where=where,
            hint=f"A simulated host has no devices to run on: {instead}.",
        )
    check_present(host)


def _check_gpu(device: Device, names: set[str], where: str) -> None:
    from rlplace import cuda

    count, parsed = cuda.num_gpus(), cuda.parse_name(device.name)
    if parsed is None or parsed[0] >= count:
        seen = ", ".join(f"cuda:{index}" for index in range(count)) or "PyTorch sees none here"
        raise InvalidValue("device", device.name, f"a CUDA device of this machine ({seen})", where=where, hint=HINT)
    whole = f"cuda:{parsed[0]}"
    if device.name != whole and whole in names:
        hint = "Both would count the same memory: name its parts alone (`cuda/2`)."
        raise InvalidValue(
            "device", device.name, f"no part of {whole!r}, which is a device too", where=where, hint=hint
        )
