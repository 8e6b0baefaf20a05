"""The outcome of a contender as a `Measurement`, and whether devices of the host are lost."""

from __future__ import annotations

import math
import re

import numpy as np

from rlplace import cuda
from rlplace.errors import DeviceLost
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.timing.race import Lane
from rlplace.measure.timing.threads import usable_cores


def status_of(error: BaseException) -> Status:
    """What an error makes of a measurement."""
    if cuda.is_out_of_memory(error):
        return "oom"
    if isinstance(error, DeviceLost) or cuda.is_gone(error):
        return "lost"
    return "timeout" if isinstance(error, TimeoutError) else "error"


def as_measurement(lane: Lane, *, has_reference: bool) -> Measurement:
    """The measurement of a lane: its median, or what stopped it.

    Args:
        lane: of a race that is over.
        has_reference: whether one was timed beside it.
    """
    if lane.error is not None:
        return Measurement(status_of(lane.error), float("inf"), tuple(lane.samples_s), why=str(lane.error))
    return Measurement(
        "ok",
        float(np.median(lane.samples_s)),
        tuple(lane.samples_s),
        reference_s=float(np.median(lane.references_s)) if has_reference else 0.0,
    )


_GPU = re.compile(r"\bcuda:[0-9]+(?:/[0-9]+)?")


def lost_of(host: Host, error: BaseException | None = None) -> DeviceLost | None:
    """What tells which devices of a host of this machine are not there any more; None where nothing is known to be.

    A core is lost once this process may not run on it: it was taken offline, or out of the process's affinity or
    control group. The kernel does not report it: a thread that was pinned there goes on elsewhere, and its times are
    wrong. That a GPU is lost is known by errors alone.

    Args:
        host: that is measured.
        error: what a step or a worker failed with.
    """
    usable = set(usable_cores())
    without = {device.name: sorted(set(device.cores) - usable) for device in host.devices}
    names = tuple(name for name, cores in without.items() if cores)
    if names:
        cores = sorted({core for missing in without.values() for core in missing})
        which = f"core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}"
        return DeviceLost(names, f"this process may not use {which} any more")
    if error is None or not cuda.is_gone(error):
        return None
    told = dict.fromkeys(name for name in _GPU.findall(_text(error)) if name in host.device_index)
    every = tuple(device.name for device in host.devices if device.backend == "cuda")
    return DeviceLost(tuple(told) or (every if len(every) == 1 else ()), str(error).rpartition(" lost: ")[2])


def all_lost(count: int, lost: DeviceLost) -> list[Measurement]:
    """Measurements of all that ran beside each other while a device was lost: their own times are unknown."""
    return [Measurement("lost", math.inf, why=str(lost))] * count


def error_of(host: Host, outcome: Measurement) -> DeviceLost:
    """The error that a measurement with the status `lost` tells of."""
    named, _, why = outcome.why.partition(" lost: ")
    devices = [word for word in named.replace(",", " ").split() if word in host.device_index]
    return DeviceLost(devices, why or outcome.why)


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {_text(error.__cause__)}"
