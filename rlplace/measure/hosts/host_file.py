"""Host files: `load_host`, `save_host`, and `host_from_dict` for the same facts inside another file.

A host file is JSON or YAML and holds the fields of `Host`, named as in `rlplace.measure.hosts.host`. Two short forms
spare repetition and are written out on loading: a device with a `count` stands for that many (`cuda` becomes `cuda:0`,
`cuda:1`, ...), and a `topology`, a list of `Wiring`s, gives links and routes to the pairs of devices for which `routes`
names none.

Two more fields are optional, so that the output of `rlplace hosts HOST --json` is a host file: `schema`, which is 1,
and `fingerprint`, which if it is there must be that of the host. Remove it when you edit devices or routes.

`parse_yaml`: the object of a YAML text: plain data, no larger than it looks, every key of a mapping once.

`Wiring`: the compact form of links and routes in a host file.
"""

from __future__ import annotations

import difflib
import fnmatch
import gc
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import chain, permutations
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from rlplace.errors import FileProblem, InvalidValue, UnknownName, check_known, refuse_if
from rlplace.files import parse_json, read_plain, write_text_atomic
from rlplace.measure.hosts.host import LEAST_RATE, Delay, Device, Host, Link, Route
from rlplace.records import FirstSchema, Number, Whole, described, make_record, of_checked, read_record, record

ENDINGS = (".json", ".yaml", ".yml")

SCHEMA = 1
"""Of host files, and of the dict of `host_to_dict`."""

_LARGEST_BYTES = {".json": 64 << 20, ".yaml": 1 << 20, ".yml": 1 << 20}
"""YAML is read a hundred times as slowly as JSON."""
_MOST_DEVICES = 1024


def load_host(path: str | os.PathLike[str]) -> Host:
    """The host that a JSON or YAML file describes; loading runs no code.

    Raises:
        FileProblem: The file is missing, unreadable, or neither JSON nor YAML.
        InvalidValue: A value of the wrong type or range, a missing field or route.
        UnknownName: A field, device or link that does not exist.
    """
    path = Path(path)
    _check_ending(path)
    hint = "" if os.path.exists(path) else _nearby(path)  # which is False of a name that no file can have
    data = read_plain(
        path, largest_bytes=_LARGEST_BYTES[path.suffix], holds="a host file", hint=hint, follows_links=True
    )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileProblem(path, f"cannot be read: {error}.") from error
    return host_from_dict((parse_json if path.suffix == ".json" else parse_yaml)(text, path), str(path))


def save_host(host: Host, path: str | os.PathLike[str]) -> None:
    """Write `host` to a JSON or YAML file, atomically, such that `load_host` gives an equal one back.

    Raises:
        FileProblem: The file cannot be written, or its name has another ending.
    """
    path = Path(path)
    _check_ending(path)
    text = json.dumps(host.to_dict(), indent=2)
    if path.suffix != ".json":
        text = yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True, width=120)
    write_text_atomic(path, text.rstrip("\n") + "\n")


def host_to_dict(host: Host) -> dict[str, object]:
    """`host` as a host file holds it, with its schema and fingerprint."""
    return {"schema": SCHEMA, "fingerprint": host.fingerprint, **host.to_dict()}


@record(frozen=True)
class Wiring:
    """Links of one kind, and the pairs of devices that they connect.

    Either `pairs`: a wire of its own for each pair, one link a direction, called `nvlink:cuda:0>cuda:1`. Or `ports`: a
    switch, or a host's memory, that every port reaches by one link up and one link down (`pcie:cuda:0:up`); a transfer
    holds the link up of its source's port and the link down of its destination's.
    """

    name: str
    """The kind of links, e.g. `nvlink`; sources are cited under it."""
    bandwidth_bytes_per_s: Annotated[Number, Field(ge=LEAST_RATE)]
    latency_s: Delay = 0.0
    pairs: tuple[tuple[str, ...], ...] = ()
    """Pairs of device names."""
    ports: tuple[str, ...] = ()
    """Devices; `cuda:*` is a port for each match, `cuda:0+cuda:1` is one port that two devices share."""
    root: str = ""
    """The device, if any, that owns the memory behind the ports: it needs no port of its own."""

    def __post_init__(self) -> None:
        refuse_if(not self.name or ":" in self.name, "name", self.name, "a name without a colon")
        refuse_if(bool(self.pairs) == bool(self.ports), "pairs", self.pairs, "either pairs or ports, and not both")
        refuse_if(self.root and not self.ports, "root", self.root, "nothing, since there are no ports")
        for pair in self.pairs:
            refuse_if(len(pair) != 2 or pair[0] == pair[1], "pairs", pair, "pairs of two different devices")


@record(frozen=True)
class DeviceEntry(Device):
    """A device as a host file has it."""

    count: Annotated[Whole, Field(ge=1, le=_MOST_DEVICES)] | None = None
    """It stands for so many devices, `NAME:0`, `NAME:1`, ...; without it, for itself."""

    def devices(self) -> list[Device]:
        """The devices that it stands for."""
        facts = {each.name: getattr(self, each.name) for each in fields(Device)}
        names = [self.name] if self.count is None else [f"{self.name}:{copy}" for copy in range(self.count)]
        return [Device(**facts | {"name": name}) for name in names]


@record(frozen=True)
class HostFile(Host):
    """A host as a host file has it: some fields in a short form, and some that no host has."""

    devices: Annotated[tuple[DeviceEntry, ...], Field(min_length=1)]
    topology: tuple[Wiring, ...] = ()
    schema: FirstSchema = 1
    fingerprint: str | None = None  # type: ignore[assignment]  # what the file says, not what it is

    def __post_init__(self) -> None:
        """Not the checks of `Host`: it is made of this, spelled out."""
        if (count := sum(entry.count or 1 for entry in self.devices)) > _MOST_DEVICES:
            raise InvalidValue("devices", count, f"at most {_MOST_DEVICES}")


def host_from_dict(data: object, where: str) -> Host:
    """The host that plain data (of `Host.to_dict`, `host_to_dict`, or a host file) describes.

    Args:
        data: A mapping of the fields of `Host`, short forms allowed.
        where: The file that `data` comes from, named in every error.

    Raises:
        InvalidValue: A value of the wrong type or range, a missing field or route, another schema, or a fingerprint
            that is not the host's.
        UnknownName: A field, device or link that does not exist.
    """
    if not isinstance(data, Mapping):
        raise InvalidValue("host", described(data), "a mapping of fields", where=where)
    file = read_record(HostFile, data, where)
    devices = tuple(device for entry in file.devices for device in entry.devices())
    is_collected = gc.isenabled()
    gc.disable()  # of a thousand devices there are a million routes, none of which is garbage
    try:
        links, laid = lay_routes(file.topology, [device.name for device in devices], where)
        given = {(route.source, route.destination) for route in file.routes}
        routes = (*file.routes, *(each for each in laid if not given or (each.source, each.destination) not in given))
        spelled_out = {"devices": devices, "links": (*file.links, *links), "routes": routes}
        host = make_record(Host, where, **{each.name: getattr(file, each.name) for each in fields(Host)} | spelled_out)
    finally:
        if is_collected:
            gc.enable()
    refuse_if(
        file.fingerprint is not None and file.fingerprint != host.fingerprint,
        "fingerprint",
        file.fingerprint,
        repr(host.fingerprint) if file.fingerprint else "",
        where=where,
        hint="The file was edited since it was written: remove the fingerprint.",
    )
    return host


def _check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise FileProblem(path, f"a host file's name ends in {', '.join(ENDINGS)}.")


def _nearby(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in ENDINGS]
    except OSError:
        return f"There is no folder {str(path.parent)!r} either."
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""


MOST_VALUES = 1_000_000
"""Values that a text may stand for: one that is named and repeated, level by level, counts wherever it is."""


def parse_yaml(text: str, path: str | os.PathLike[str]) -> object:
    """The object of the YAML text of the file `path`; reading runs no code.

    Raises:
        FileProblem: it is not YAML, a key is given twice, it is nested too deeply, holds itself, or means too much.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
        num_values = _num_values(data, {})
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise FileProblem(path, f"not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise FileProblem(path, "nested too deeply for a host file.") from error
    if num_values > MOST_VALUES:
        raise FileProblem(path, f"YAML that stands for too many values, expected at most {MOST_VALUES:,}.")
    return data


_LONGEST_NUMBER = 40
"""Characters."""


class _Loader(yaml.SafeLoader):
    """Safe YAML, with repeated keys refused and `1e9` a number (YAML 1.1, PyYAML's dialect, takes it for text)."""

    num_merged = 0
    """Fields of all mappings, merged ones included, as often as they are looked at."""

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A number; one in base 60 (`1:30:00`) or of many digits would take time that is quadratic in its length."""
        if not isinstance(node, yaml.ScalarNode) or ":" in node.value or len(node.value) > _LONGEST_NUMBER:
            raise yaml.MarkedYAMLError(
                problem=f"expected a number in base 10, of at most {_LONGEST_NUMBER} characters",
                problem_mark=node.start_mark,
            )
        is_whole = node.tag.endswith(":int")
        number: float = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        return number

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Puts the fields of the mapping that `<<` names in its place; mappings that name one another may double each
        time."""
        super().flatten_mapping(node)
        self.num_merged += len(node.value)
        if self.num_merged > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem="it merges too many fields", problem_mark=node.start_mark)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


_LETTERS = 100
"""Of a text, that count as a value."""


def _num_values(data: object, known: dict[int, int | None]) -> int:
    """How many values there are if each is counted wherever it stands; of long texts, their parts."""
    if not isinstance(data, Mapping | list | tuple | set):
        return 1 + len(data) // _LETTERS if isinstance(data, str | bytes) else 1
    if id(data) not in known:
        known[id(data)] = None
        children = chain(data, data.values()) if isinstance(data, Mapping) else data
        known[id(data)] = 1 + sum(_num_values(child, known) for child in children)
    count = known[id(data)]
    if count is None:
        raise ValueError("a value that holds itself")
    return count


_MOST_PAIRS = 4 << 20
"""Of devices, in all wirings together, each of which may connect all of them."""


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
    refuse_if(
        len(wirings) * len(devices) ** 2 > _MOST_PAIRS,
        "topology",
        f"of {len(wirings)} entries",
        f"at most {_MOST_PAIRS // max(len(devices), 1) ** 2} for {len(devices)} devices",
        where=where,
    )
    links: dict[str, Link] = {}
    routes: dict[tuple[str, str], Route] = {}
    seen: set[str] = set()
    for index, wiring in enumerate(wirings):
        at = f"topology[{index}]"
        refuse_if(
            wiring.name in seen,
            f"{at}.name",
            wiring.name,
            "a name that no other entry has",
            where=where,
        )
        seen.add(wiring.name)
        wires = _routes_of(wiring, dict.fromkeys(devices), where, at)
        new = {pair: names for pair, names in wires.items() if pair not in routes} if routes else wires
        for pair, names in new.items():
            ends = {"source": pair[0], "destination": pair[1]}
            routes[pair] = of_checked(
                Route, {**ends, "links": names, "blocks_source": False, "blocks_destination": False}
            )
        for name in dict.fromkeys(chain.from_iterable(new.values())):
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
        refuse_if(wiring.root in port_of, f"{at}.root", wiring.root, "a device that is at no port", where=where)
    ends = [*port_of, *([wiring.root] if wiring.root else [])]
    up = {name: (f"{wiring.name}:{port_of[name]}:up",) if name in port_of else () for name in ends}
    down = {name: (f"{wiring.name}:{port_of[name]}:down",) if name in port_of else () for name in ends}
    for source, destination in permutations(ends, 2):
        wires[source, destination] = up[source] + down[destination]
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
            refuse_if(name in port_of, field, port, f"{name!r} at one port only", where=where)
            port_of[name] = label
    return port_of


def _check_device(name: str, devices: Collection[str], where: str, field: str) -> None:
    check_known(f"device in {field} of {where}", name, devices)
