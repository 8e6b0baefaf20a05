"""Host files: `load_host`, `save_host`, and `host_from_dict` for the same facts inside another file.

A host file is JSON or YAML and holds the fields of `Host`, named as in `rlplace.measure.hosts.host`. Two short forms
spare repetition and are written out on loading: a device with a `count` stands for that many (`cuda` becomes `cuda:0`,
`cuda:1`, ...), and a `topology`, a list of `Wiring`s, gives links and routes to the pairs of devices for which `routes`
names none.

Two more fields are optional, so that what `rlplace hosts HOST --json` prints is a host file: `schema`, which is 1, and
`fingerprint`, which if it is there must be that of the host. Remove it when you edit devices or routes.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from rlplace.decode import decode_list, decode_record, described
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.files import parse_json, write_text_atomic
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.safe_yaml import parse_yaml
from rlplace.measure.hosts.wiring import Wiring, lay_routes

ENDINGS = (".json", ".yaml", ".yml")

SCHEMA = 1
"""Of host files, and of what `host_to_dict` gives."""

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
    try:
        if path.exists() and not path.is_file():
            raise FileProblem(path, "cannot be read: not a regular file, expected a host file.")
        size, largest_bytes = path.stat().st_size, _LARGEST_BYTES[path.suffix]
        if size > largest_bytes:
            raise FileProblem(path, f"{size} bytes, expected a host file of at most {largest_bytes}.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileProblem(path, f"no such file.{_nearby(path)}") from error
    except (OSError, ValueError) as error:
        raise FileProblem(path, f"cannot be read: {error}.") from error
    data = parse_json(text, path) if path.suffix == ".json" else parse_yaml(text, path)
    return host_from_dict(data, str(path))


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


def host_from_dict(data: object, where: str) -> Host:
    """The host that plain data (`Host.to_dict`, `host_to_dict`, or what a host file holds) describes.

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
    facts = dict(data)
    schema, fingerprint = facts.pop("schema", SCHEMA), facts.pop("fingerprint", None)
    if isinstance(schema, bool) or schema != SCHEMA:
        raise InvalidValue("schema", described(schema), str(SCHEMA), where=where)
    wirings = decode_list(Wiring, facts.pop("topology", []), where, "topology")
    links = decode_list(Link, facts.get("links", []), where, "links")
    routes = decode_list(Route, facts.get("routes", []), where, "routes")
    if "devices" in facts:
        devices = _read_devices(facts["devices"], where)
        names = [device.name for device in devices]
        laid_links, laid_routes = lay_routes(wirings, names, where)
        given = {(route.source, route.destination) for route in routes}
        links += laid_links
        routes += tuple(route for route in laid_routes if (route.source, route.destination) not in given)
        _check_names(devices, links, routes, where)
        facts |= {"devices": devices, "links": links, "routes": routes}
    host = decode_record(Host, facts, where)
    if fingerprint not in (None, host.fingerprint):
        hint = "The file was edited since it was written: remove the fingerprint."
        raise InvalidValue("fingerprint", described(fingerprint), repr(host.fingerprint), where=where, hint=hint)
    return host


def _read_devices(data: object, where: str) -> tuple[Device, ...]:
    if not isinstance(data, list | tuple):
        raise InvalidValue("devices", described(data), "a list", where=where)
    devices: list[Device] = []
    for index, entry in enumerate(data):
        at = f"devices[{index}]"
        if not isinstance(entry, Mapping) or "count" not in entry:
            devices.append(decode_record(Device, entry, where, at))
        else:
            count = entry["count"]
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_DEVICES:
                expected = f"a whole number from 1 to {_MOST_DEVICES}"
                raise InvalidValue(f"{at}.count", described(count), expected, where=where)
            device = decode_record(Device, {key: entry[key] for key in entry if key != "count"}, where, at)
            devices += [replace(device, name=f"{device.name}:{copy}") for copy in range(count)]
        if len(devices) > _MOST_DEVICES:
            raise InvalidValue("devices", f"{len(devices)} or more", f"at most {_MOST_DEVICES}", where=where)
    return tuple(devices)


def _check_names(devices: Sequence[Device], links: Sequence[Link], routes: Sequence[Route], where: str) -> None:
    device_names = {device.name for device in devices}
    link_names = {link.name for link in links}
    for index, device in enumerate(devices):
        for member in device.members:
            if member not in device_names:
                raise UnknownName(f"device in devices[{index}].members of {where}", member, device_names)
    for index, route in enumerate(routes):
        for field, end in (("source", route.source), ("destination", route.destination)):
            if end not in device_names:
                raise UnknownName(f"device in routes[{index}].{field} of {where}", end, device_names)
        for link in route.links:
            if link not in link_names:
                raise UnknownName(f"link in routes[{index}].links of {where}", link, link_names)


def _check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise FileProblem(path, f"a host file's name ends in {', '.join(ENDINGS)}.")


def _nearby(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in ENDINGS]
    except OSError:
        return f" There is no folder {str(path.parent)!r} either."
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
