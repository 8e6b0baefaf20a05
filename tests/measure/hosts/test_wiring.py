"""Short forms of links and routes: wires between pairs, ports of a switch, and what is refused."""

from __future__ import annotations

import pytest

from rlplace.errors import InvalidValue, RlplaceError
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import host_from_dict


def topology(*wirings: dict[str, object], **facts: object) -> Host:
    devices = [{"name": name, "kind": "gpu", "backend": "simulated", "memory_bytes": 1} for name in "abc"]
    return host_from_dict({"name": "h", "devices": devices, "topology": list(wirings), **facts}, "h.yaml")


def links_of(host: Host) -> dict[str, tuple[str, ...]]:
    return {f"{route.source}{route.destination}": route.links for route in host.routes}


def test_the_first_wiring_of_a_pair_counts_and_a_shared_port_is_one() -> None:
    host = topology(
        {"name": "wire", "pairs": [["a", "b"]], "bandwidth_bytes_per_s": 2},
        {"name": "bus", "ports": ["a+b", "c"], "bandwidth_bytes_per_s": 1},
    )
    assert links_of(host) == {
        "ab": ("wire:a>b",),
        "ba": ("wire:b>a",),
        "ac": ("bus:a+b:up", "bus:c:down"),
        "bc": ("bus:a+b:up", "bus:c:down"),
        "ca": ("bus:c:up", "bus:a+b:down"),
        "cb": ("bus:c:up", "bus:a+b:down"),
    }


def test_a_root_needs_no_port_and_given_routes_win() -> None:
    host = topology(
        {"name": "bus", "ports": ["a", "b"], "root": "c", "bandwidth_bytes_per_s": 1},
        links=[{"name": "own", "bandwidth_bytes_per_s": 5}],
        routes=[{"source": "a", "destination": "b", "links": ["own"]}],
    )
    assert links_of(host)["ab"] == ("own",)
    assert links_of(host)["ba"] == ("bus:b:up", "bus:a:down")
    assert links_of(host)["ac"] == ("bus:a:up",)
    assert links_of(host)["ca"] == ("bus:a:down",)


@pytest.mark.parametrize(
    ("wiring", "message"),
    [
        ({"name": "w", "bandwidth_bytes_per_s": 1}, r"topology\[0\].pairs .* either pairs or ports"),
        ({"name": "w", "pairs": [["a", "a"]], "bandwidth_bytes_per_s": 1}, "pairs of two different devices"),
        ({"name": "w", "pairs": [["a", "d"]], "bandwidth_bytes_per_s": 1}, r"topology\[0\].pairs\[0\] of h.yaml 'd'"),
        ({"name": "w", "ports": ["a", "a+b"], "bandwidth_bytes_per_s": 1}, "'a' at one port only"),
        ({"name": "w", "ports": ["x*"], "bandwidth_bytes_per_s": 1}, r"topology\[0\].ports\[0\] of h.yaml 'x\*'"),
        ({"name": "w", "ports": ["a", "b"], "root": "a", "bandwidth_bytes_per_s": 1}, "at no port"),
        ({"name": "w", "pairs": [["a", "b"]], "root": "c", "bandwidth_bytes_per_s": 1}, "root is 'c'"),
        ({"name": "w:1", "pairs": [["a", "b"]], "bandwidth_bytes_per_s": 1}, "without a colon"),
        ({"name": "w", "ports": ["a", "b", "c"], "bandwidth_bytes_per_s": -1}, "bandwidth_bytes_per_s is -1"),
        ({"name": "w", "pairs": [["a", "b"]], "bandwidth_bytes_per_s": 1}, "nothing from 'a' to 'c'"),
    ],
)
def test_refuses_impossible_topologies(wiring: dict[str, object], message: str) -> None:
    with pytest.raises(RlplaceError, match=message):
        topology(wiring)


def test_refuses_two_wirings_of_one_name() -> None:
    wiring: dict[str, object] = {"name": "w", "pairs": [["a", "b"]], "bandwidth_bytes_per_s": 1}
    with pytest.raises(InvalidValue, match=r"h.yaml: topology\[1\].name is 'w'"):
        topology(wiring, wiring)
