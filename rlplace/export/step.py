"""`to_step`: a model that runs as a placement says."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rlplace import cuda
from rlplace.errors import FingerprintMismatch, InvalidValue
from rlplace.export.placed.graphs_by_shape import OtherShapes
from rlplace.export.placed.placed_model import PlacedModel
from rlplace.graphs.capturing.portable import original_of
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.detect import MOST_PARTS, detect_host
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.measure.placement import Placement, check_is_placement
from rlplace.measure.timing.threads import usable_cores


def to_step(
    model: nn.Module,
    graph: OpGraph,
    placement: Placement,
    *,
    host: Host | str | None = None,
    seed: int = 0,
    other_shapes: OtherShapes = "capture",
) -> PlacedModel:
    """`model` as a callable that runs as placed, starting from its parameters as they are now.

    Args:
        model: the one that `graph` was captured from.
        graph: with its program.
        placement: made for `graph` and for a host of this machine.
        host: that host, or a word for it; by default the one that the placement was made for, whatever word of this
            machine named it.
        seed: of random ops.
        other_shapes: what is done with inputs of other shapes: `capture` them when they are first seen, placed alike;
            run them in `eager` mode; or `refuse`.

    Raises:
        InvalidValue: what is given is no model, graph or placement, or in another order.
        FingerprintMismatch: the placement was made for another graph or host.
    """
    check_arguments(model, graph, placement, "to_step")
    host = matching_host(placement) if host is None else resolve_host(host)
    placement.require(graph, host)
    placed = PlacedModel(graph, host, placement.plan, seed=seed, other_shapes=other_shapes)
    model = original_of(model)
    placed.load_state_dict({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return placed


def check_arguments(model: object, graph: object, placement: object, where: str) -> None:
    """Checks that a user gave `where` a model, a graph and a placement, in this order.

    Raises:
        InvalidValue: one of them is something else.
    """
    for name, value, kind in (("model", model, nn.Module), ("graph", graph, OpGraph)):
        if not isinstance(value, kind):
            hint = f"Call `{where}(model, graph, placement)`, in this order; `rlplace.capture` makes the graph."
            expected = f"of type {kind.__name__}"
            raise InvalidValue(name, f"of type {type(value).__name__}", expected, where=where, hint=hint)
    check_is_placement(placement, where)


def matching_host(placement: Placement) -> Host:
    """The host of this machine that the placement was made for.

    Raises:
        FingerprintMismatch: there is none.
    """
    for host in _hosts_here(len(placement.device_names)):
        if host.fingerprint == placement.host_fingerprint:
            return host
    raise FingerprintMismatch("host", placement.host_fingerprint, detect_host("auto").fingerprint)


def _hosts_here(num_devices: int) -> Iterator[Host]:
    """Hosts of this machine with so many devices that a word names: its GPUs, any `cores:...`, with a gang or not."""
    num_gpus = cuda.num_gpus()
    for with_cpu in (False, True):
        num_parts, rest = divmod(num_devices - with_cpu, max(num_gpus, 1))
        if num_gpus and not rest and 1 <= num_parts <= MOST_PARTS:
            yield detect_host("cuda", num_parts=num_parts, with_cpu=with_cpu)
    for num_single, gangs in ((num_devices, False), (num_devices - 1, True)):  # a gang is one device more
        for cores_per_device in range(1, len(usable_cores()) // max(num_single, 1) + 1):
            if num_single > 0:
                yield detect_host("cores", num_single, cores_per_device, gangs=gangs)
