"""What a device map calls the devices of a host."""

from __future__ import annotations

import dataclasses

import pytest

from rlplace.errors import InvalidValue
from rlplace.export.device_map import map_places
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.hosts.resolve import resolve_host


def host_of(*names: str) -> Host:
    one = Device("name", "any", "simulated", 1 << 30)
    return Host("made", (dataclasses.replace(one, name=names[0]),)) if len(names) == 1 else _wired(one, names)


def _wired(one: Device, names: tuple[str, ...]) -> Host:
    from rlplace.measure.hosts.host import Route

    routes = tuple(Route(a, b, ()) for a in names for b in names if a != b)
    return Host("made", tuple(dataclasses.replace(one, name=name) for name in names), routes=routes)


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (("cuda:0", "cuda:1"), (0, 1)),
        (("cuda:2", "cuda:5", "cpu"), (2, 5, "cpu")),
        (("cuda:0/0", "cuda:0/1", "cuda:1/0"), (0, 0, 1)),
        (("cpu:0", "cpu:1", "cpu:0-1"), ("cpu", "cpu", "cpu")),
        (("large", "small", "cpu"), (0, 1, "cpu")),
        (("node0/cuda:1",), (1,)),
    ],
)
def test_devices_by_name(names: tuple[str, ...], places: tuple[int | str, ...]) -> None:
    assert map_places(host_of(*names)) == places


def test_two_machines_are_refused() -> None:
    with pytest.raises(InvalidValue, match="these devices are in 2 machines"):
        map_places(resolve_host("2x8xA100-ib"))
