"""The time of a transfer: what the simulator's kernels and the list schedulers add up."""

from __future__ import annotations

from rlplace.jit import Floats, inlined


@inlined
def transfer_seconds(latency_s: Floats, s_per_byte: Floats, route: int | tuple[int, int], num_bytes: float) -> float:
    """Seconds that `num_bytes` are on their way.

    A transfer holds every link of its route for the latency of the route and the time of its bytes on the slowest link
    (docs/step-time-model.md, rule 2). `Problem.transfer_latency_s` and `Problem.transfer_s_per_byte` are the figures.

    Args:
        latency_s: of every route, (D * D,) or (D, D) float64.
        s_per_byte: of every route, alike.
        route: index of a route: `source * D + destination`, or both of them.
        num_bytes: of the tensor.
    """
    return float(latency_s[route] + num_bytes * s_per_byte[route])
