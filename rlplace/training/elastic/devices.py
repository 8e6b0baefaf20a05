"""`DeviceMatch`: which device of a new host stands for which of the old one, and which of its links for which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from rlplace.measure.hosts.host import Device, Host

GONE = -1
"""Where a device is that nothing stands for."""


@dataclass(frozen=True, eq=False)
class DeviceMatch:
    """Devices of two hosts, in pairs.

    Attributes:
        old: the host that a placement was made for.
        new: the one that it is to go to.
        to: for each old device the index of its new one, or `GONE`.
    """

    old: Host
    new: Host
    to: tuple[int, ...]

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the old devices that nothing stands for."""
        return tuple(device.name for device, index in zip(self.old.devices, self.to, strict=True) if index == GONE)

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the new devices that stand for none."""
        return tuple(device.name for index, device in enumerate(self.new.devices) if index not in self.to)

    @property
    def renamed(self) -> dict[str, str]:
        """Old names to new ones, of all pairs."""
        pairs = zip(self.old.devices, self.to, strict=True)
        return {device.name: self.new.devices[index].name for device, index in pairs if index != GONE}

    @property
    def same_links(self) -> dict[str, str]:
        """Old links to new ones, where one is in the other's place: joins devices that stand for each other."""
        return {old: new for new, found in self._links.items() if len(found.same) == 1 for old in found.same}

    @property
    def links(self) -> dict[str, tuple[str, ...]]:
        """For each new link the old ones that tell what it is like, by name; none where no old one does.

        The link at the same place of the route between the pair that stands for the new one's ends, if kinds are the
        same; else all those of routes between devices of these kinds.
        """
        return {name: tuple(found.same or found.alike) for name, found in self._links.items()}

    @cached_property
    def _links(self) -> dict[str, _OldLinks]:
        back = {new: old for old, new in self.renamed.items()}
        kinds = {device.name: device.kind for device in self.new.devices}
        old_kinds = {device.name: device.kind for device in self.old.devices}
        routes = {(route.source, route.destination): route.links for route in self.old.routes}
        alike: dict[object, dict[str, None]] = {}
        for route in self.old.routes:
            for place, link in enumerate(route.links):
                key = (old_kinds[route.source], old_kinds[route.destination], len(route.links), place)
                alike.setdefault(key, {})[link] = None
        found = {link.name: _OldLinks() for link in self.new.links}
        for route in self.new.routes:
            ends = (back.get(route.source, ""), back.get(route.destination, ""))
            own_kinds = [kinds[route.source], kinds[route.destination]]
            before = routes.get(ends, ()) if [old_kinds.get(end) for end in ends] == own_kinds else ()
            for place, link in enumerate(route.links):
                if len(before) == len(route.links):
                    found[link].same[before[place]] = None
                found[link].alike.update(alike.get((*own_kinds, len(route.links), place), {}))
        return found


@dataclass(frozen=True)
class _OldLinks:
    """Names of old links that tell what a new one is like, in order."""

    same: dict[str, None] = field(default_factory=dict)
    alike: dict[str, None] = field(default_factory=dict)


def match_devices(old: Host, new: Host) -> DeviceMatch:
    """Pairs of devices: those of one name and kind first, then of one kind, then of one name, then in their order.

    A gang, which has members, stands for gangs only.
    """
    to, taken = [GONE] * old.num_devices, set[int]()

    def pair(are_alike: Callable[[Device, Device], bool]) -> None:
        for place, device in enumerate(old.devices):
            if to[place] != GONE:
                continue
            for index, other in enumerate(new.devices):
                if index not in taken and bool(device.members) == bool(other.members) and are_alike(device, other):
                    to[place] = index
                    taken.add(index)
                    break

    pair(lambda one, other: one.name == other.name and one.kind == other.kind)
    pair(lambda one, other: one.kind == other.kind)
    pair(lambda one, other: one.name == other.name)
    pair(lambda one, other: True)
    return DeviceMatch(old, new, tuple(to))
