"""`Wiring`: the compact form of links and routes in a host file."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.hosts.host import Link, Route

_MOST_PAIRS = 4 << 20
"""Of devices, in all wirings together, each of which may connect all of them."""


@dataclass(frozen=True)
class Wiring:
    """Links of one kind, and the pairs of devices that they connect.

    Either `pairs`: a wire of its own for each pair, one link a direction, called `nvlink:cuda:0>cuda:1`. Or `ports`: a
    switch, or a host's memory, that every port reaches by one link up and one link down (`pcie:cuda:0:up`); a transfer
    holds the link up of its source's port and the link down of its destination's.
    """

    name: str
    """What the links are, e.g. `nvlink`; sources are cited under it."""
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    pairs: tuple[tuple[str, ...], ...] = ()
    """Pairs of device names."""
    ports: tuple[str, ...] = ()
    """Devices; `cuda:*` is a port for each match, `cuda:0+cuda:1` is one port that two devices share."""
    root: str = ""
    """The device, if any, that owns the memory behind the ports: it needs no port of its own."""

    def __post_init__(self) -> None:
        if not self.name or ":" in self.name:
            raise InvalidValue("name", self.name, "a name without a colon")
        if bool(self.pairs) == bool(self.ports):
            raise InvalidValue("pairs", self.pairs, "either pairs or ports, and not both")
        if self.root and not self.ports:
            raise InvalidValue("root", self.root, "nothing, since there are no ports")
        for pair in self.pairs:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise InvalidValue("pairs", pair, "pairs of two different devices")


def lay_routes(
    wirings: Sequence[Wiring], devices: Sequence[str], where: str
) -> tuple[tuple[Link, ...], tuple[Route, ...]]:
    """The links and routes that `wirings` give to `devices`; where two connect one pair, the first does.

    Example:
        >>> links, routes = lay_routes([Wiring("pcie", 1e10, ports=("a", "b"))], ["a", "b"], "example")
        >>> [(route.source, route.destination, route.links) for route in routes]
        [('a', 'b', ('pcie:a:up', 'pcie:b:down')), ('b', 'a', ('pcie:b:up', 'pcie:a:down'))]

    Raises:
        UnknownName: A device that is not one of `devices`.
        InvalidValue: Two wirings of one name, a device at two ports of one wiring, or more of them than can be laid.
    """
    if len(wirings) * len(devices) ** 2 > _MOST_PAIRS:
        expected = f"at most {_MOST_PAIRS // max(len(devices), 1) ** 2} for {len(devices)} devices"
        raise InvalidValue("topology", f"of {len(wirings)} entries", expected, where=where)
    known = dict.fromkeys(devices)
    names_before: set[str] = set()
    links: dict[str, Link] = {}
    routes: dict[tuple[str, str], Route] = {}
    for index, wiring in enumerate(wirings):
        at = f"topology[{index}]"
        if wiring.name in names_before:
            raise InvalidValue(f"{at}.name", wiring.name, "a name that no other entry has", where=where)
        names_before.add(wiring.name)
        for (source, destination), names in _routes_of(wiring, known, where, at).items():
            if (source, destination) in routes:
                continue
            routes[source, destination] = Route(source, destination, names)
            for name in names:
                links[name] = Link(name, wiring.bandwidth_bytes_per_s, wiring.latency_s)
    return tuple(links.values()), tuple(routes.values())


def _routes_of(wiring: Wiring, devices: Collection[str], where: str, at: str) -> dict[tuple[str, str], tuple[str, ...]]:
    wires: dict[tuple[str, str], tuple[str, ...]] = {}
    for number, (a, b) in enumerate(wiring.pairs):
        for name in (a, b):
            _check_device(name, devices, where, f"{at}.pairs[{number}]")
        wires[a, b] = (f"{wiring.name}:{a}>{b}",)
        wires[b, a] = (f"{wiring.name}:{b}>{a}",)
    port_of = _ports_of(wiring, devices, where, at)
    if wiring.root:
        _check_device(wiring.root, devices, where, f"{at}.root")
        if wiring.root in port_of:
            raise InvalidValue(f"{at}.root", wiring.root, "a device that is at no port", where=where)
    ends = [*port_of, *([wiring.root] if wiring.root else [])]
    for source in ends:
        for destination in ends:
            if source != destination:
                up = (f"{wiring.name}:{port_of[source]}:up",) if source in port_of else ()
                down = (f"{wiring.name}:{port_of[destination]}:down",) if destination in port_of else ()
                wires[source, destination] = up + down
    return wires


def _ports_of(wiring: Wiring, devices: Collection[str], where: str, at: str) -> dict[str, str]:
    """Device name to the port that it is at."""
    port_of: dict[str, str] = {}
    for number, port in enumerate(wiring.ports):
        field = f"{at}.ports[{number}]"
        if "*" in port:
            matches = fnmatch.filter(devices, port)
            if not matches:
                raise UnknownName(f"devices in {field} of {where}", port, devices)
            members = [(name, name) for name in matches]
        else:
            members = [(name, port) for name in port.split("+")]
        for name, label in members:
            _check_device(name, devices, where, field)
            if name in port_of:
                raise InvalidValue(field, port, f"{name!r} at one port only", where=where)
            port_of[name] = label
    return port_of


def _check_device(name: str, devices: Collection[str], where: str, field: str) -> None:
    if name not in devices:
        raise UnknownName(f"device in {field} of {where}", name, devices)
