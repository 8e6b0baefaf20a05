"""The lanes of a timeline's picture: which there are, what is drawn in each, and how tall they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.timeline import Timeline

TOP_IN, BOTTOM_IN = 1.0, 0.62
"""Above the lanes, and below them."""
_DEVICE_IN, _DIRECTION_IN, _GAP_IN = 0.62, 0.27, 0.07
_MOST_LANES_IN, _MOST_DIRECTIONS = 16.0, 20


@dataclass
class Lane:
    """A row of the chart; ops or transfers by index, those of gangs apart; `bottom` and `height` in inches."""

    name: str
    is_device: bool
    items: list[int] = field(default_factory=list)
    gang_items: list[int] = field(default_factory=list)
    bottom: float = 0.0
    height: float = 0.0


def lanes_of(timeline: Timeline, graph: OpGraph, host: Host) -> list[Lane]:
    """A lane for each device that is no gang, in order, then one for each direction used.

    Where there are too many directions to read, one for each sender.
    """
    names = [device.name for device in host.devices]
    lanes = {index: Lane(device.name, True) for index, device in enumerate(host.devices) if not device.members}
    for op, device in enumerate(timeline.op_device.tolist()):
        if graph.is_source[op]:
            continue
        if device in lanes:
            lanes[device].items.append(op)
            continue
        for member in host.devices[device].members:
            lanes[host.device_index[member]].gang_items.append(op)
    directions: dict[tuple[int, int], list[int]] = defaultdict(list)
    for transfer in copies_of(timeline, host):
        source, destination = timeline.transfer_source[transfer], timeline.transfer_destination[transfer]
        directions[int(source), int(destination)].append(transfer)
    if len(directions) <= _MOST_DIRECTIONS:
        sent = [Lane(f"{names[a]} → {names[b]}", False, items) for (a, b), items in sorted(directions.items())]
        return [*lanes.values(), *sent]
    senders: dict[int, Lane] = {}
    for (source, _), items in sorted(directions.items()):
        senders.setdefault(source, Lane(f"{names[source]} → others", False)).items.extend(items)
    return [*lanes.values(), *senders.values()]


def copies_of(timeline: Timeline, host: Host) -> list[int]:
    """The transfers that use a link: a hand-over between a gang and its member copies nothing."""
    index = host.device_index
    wired = {(index[route.source], index[route.destination]) for route in host.routes if route.links}
    ends = zip(timeline.transfer_source.tolist(), timeline.transfer_destination.tolist(), strict=True)
    return [transfer for transfer, pair in enumerate(ends) if pair in wired]


def lay_out(lanes: Sequence[Lane]) -> float:
    """Stacks the lanes from the top, lower where there are many; returns their height in all, in inches."""
    for lane in lanes:
        lane.height = _DEVICE_IN if lane.is_device else _DIRECTION_IN
    total = sum(lane.height + _GAP_IN for lane in lanes) + _GAP_IN
    scale = min(1.0, _MOST_LANES_IN / total)
    top = total * scale - _GAP_IN * scale
    for lane in lanes:
        lane.height *= scale
        lane.bottom = top - lane.height
        top = lane.bottom - _GAP_IN * scale
    return total * scale


def tallest_in(host: Host) -> float:
    """Height in inches of the tallest chart of a timeline on this host: one with tensors sent over every route."""
    wired = {(route.source, route.destination) for route in host.routes if route.links}
    senders = {source for source, _ in wired}
    num_directions = len(wired) if len(wired) <= _MOST_DIRECTIONS else max(_MOST_DIRECTIONS, len(senders))
    lanes = [Lane(device.name, True) for device in host.devices if not device.members]
    return TOP_IN + lay_out([*lanes, *(Lane("", False) for _ in range(num_directions))]) + BOTTOM_IN
