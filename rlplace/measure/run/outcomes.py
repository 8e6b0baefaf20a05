"""What became of a contender, as a `Measurement`."""

from __future__ import annotations

import numpy as np

from rlplace import cuda
from rlplace.errors import DeviceLost
from rlplace.measure.measurement import Measurement, Status
from rlplace.measure.run.race import Lane


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
