"""Host files: round trips, the short forms, and errors that name file, field and value."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import FileProblem, InvalidValue, RlplaceError, UnknownName
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.host_file import host_from_dict, load_host, save_host
from rlplace.measure.hosts.resolve import resolve_host

CORES = Host(
    "two cores and their gang",
    (
        Device("cpu:0", "cpu-core", "cpu", 8 << 30, memory_pool="ram", dispatcher="gil", cores=(0,)),
        Device("cpu:1", "cpu-core", "cpu", 8 << 30, memory_pool="ram", dispatcher="gil", cores=(1,)),
        Device("cpu:0-1", "cpu-gang", "cpu", 8 << 30, memory_pool="ram", cores=(0, 1), members=("cpu:0", "cpu:1")),
    ),
    (Link("copy", 8e9, 1.25e-5),),
    (
        Route("cpu:0", "cpu:1", ("copy",), blocks_destination=True),
        Route("cpu:1", "cpu:0", ("copy",), blocks_destination=True),
        *(Route(*pair, ()) for pair in (("cpu:0", "cpu:0-1"), ("cpu:0-1", "cpu:0"))),
        *(Route(*pair, ()) for pair in (("cpu:1", "cpu:0-1"), ("cpu:0-1", "cpu:1"))),
    ),
    dispatch_s=2.8e-6,
    dispatch_order="request",
    run_ahead=1,
    corun_slowdown=((0.0, 0.3, 0.0), (0.3, 0.0, 0.0), (0.0, 0.0, 0.0)),
    sources={"dispatch_s": "measured"},
)


COMPACT: dict[str, object] = {
    "name": "compact",
    "devices": [
        {"name": "cpu", "kind": "host", "backend": "simulated", "memory_bytes": 1 << 40},
        {"name": "cuda", "count": 3, "kind": "gpu", "backend": "simulated", "memory_bytes": 1 << 34,
         "peak_flops_per_s": {"float32": 1e13}, "memory_bandwidth_bytes_per_s": 9e11},
    ],
    "topology": [
        {"name": "nvlink", "pairs": [["cuda:0", "cuda:1"]], "bandwidth_bytes_per_s": 5e10, "latency_s": 2e-6},
        {"name": "pcie", "ports": ["cuda:0+cuda:1", "cuda:2"], "root": "cpu", "bandwidth_bytes_per_s": 1e10},
    ],
    "dispatch_s": 5e-6,
    "sources": {"dispatch_s": "argued"},
}  # fmt: skip


def plain(host: Host) -> Any:
    return json.loads(json.dumps(host.to_dict()))


def write(folder: Path, text: str, name: str = "host.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("ending", [".json", ".yaml", ".yml"])
def test_comes_back_equal(tmp_path: Path, ending: str) -> None:
    for host in (CORES, resolve_host("8xV100-dgx1"), resolve_host("cpu+4xA100")):
        path = tmp_path / f"host{ending}"
        save_host(host, path)
        assert load_host(path) == host
        assert load_host(path).fingerprint == host.fingerprint
    assert [entry.name for entry in tmp_path.iterdir()] == [f"host{ending}"]


def test_comes_back_equal_from_a_dict() -> None:
    compact = host_from_dict(COMPACT, "compact.yaml")
    assert host_from_dict(CORES.to_dict(), "result.json") == CORES
    assert host_from_dict(compact.to_dict(), "result.json") == compact


def test_a_count_stands_for_that_many_devices(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: h\ndevices: [{name: cuda, count: 2, kind: gpu, backend: simulated, memory_bytes: 16e9}]\n"
        "topology: [{name: pcie, ports: ['cuda:*'], bandwidth_bytes_per_s: 1e10, latency_s: 5e-6}]\n",
    )
    host = load_host(path)
    assert [(device.name, device.memory_bytes) for device in host.devices] == [
        ("cuda:0", 16 * 10**9),
        ("cuda:1", 16 * 10**9),
    ]
    assert host.links == (
        Link("pcie:cuda:0:up", 1e10, 5e-6),
        Link("pcie:cuda:1:down", 1e10, 5e-6),
        Link("pcie:cuda:1:up", 1e10, 5e-6),
        Link("pcie:cuda:0:down", 1e10, 5e-6),
    )
    assert host.routes == (
        Route("cuda:0", "cuda:1", ("pcie:cuda:0:up", "pcie:cuda:1:down")),
        Route("cuda:1", "cuda:0", ("pcie:cuda:1:up", "pcie:cuda:0:down")),
    )


GONE = object()

WRONG: list[tuple[str, object, type[RlplaceError], str]] = [
    ("device", [], UnknownName, "unknown field of host file in h.yaml 'device': did you mean 'devices'"),
    ("devices.0.memroy_bytes", 1, UnknownName, "field of devices[0] in h.yaml 'memroy_bytes': did you mean 'memory_by"),
    ("devices", GONE, InvalidValue, "h.yaml: devices is missing"),
    ("devices", None, InvalidValue, "h.yaml: devices is empty, expected a list"),
    ("devices.1.memory_bytes", GONE, InvalidValue, "h.yaml: devices[1].memory_bytes is missing"),
    ("devices.1.memory_bytes", "8 GB", InvalidValue, "devices[1].memory_bytes is '8 GB', expected a whole number"),
    ("devices.1.memory_bytes", 0, InvalidValue, "h.yaml: devices[1].memory_bytes is 0, expected more than 0"),
    ("devices.1.memory_bytes", 1.5, InvalidValue, "memory_bytes is 1.5, expected a whole number"),
    ("devices.1.memory_bytes", True, InvalidValue, "memory_bytes is True, expected a whole number"),
    ("devices.1.memory_bytes", 10**400, InvalidValue, "memory_bytes is a number of more than 63 bits"),
    ("devices.0.backend", "cdua", UnknownName, "unknown devices[0].backend in h.yaml 'cdua': did you mean 'cuda'"),
    ("devices.0.count", 0, InvalidValue, "h.yaml: devices[0].count is 0, expected at least 1"),
    ("devices.0.cores", ["0"], InvalidValue, "h.yaml: devices[0].cores[0] is '0', expected a whole number"),
    ("devices.2.members", ["cpu:7"], UnknownName, "unknown device in devices[2].members of h.yaml 'cpu:7'"),
    ("devices.0.peak_flops_per_s", {"float32": "x"}, InvalidValue, "devices[0].peak_flops_per_s.float32 is 'x'"),
    ("devices.0.peak_flops_per_s", {"float23": 1.0}, UnknownName, "'float23': did you mean 'float32'"),
    ("devices.0.peak_flops_per_s", {32: 1.0}, UnknownName, "unknown dtype of devices[0] in h.yaml '32'"),
    (
        "links.0.bandwidth_bytes_per_s",
        -1,
        InvalidValue,
        "h.yaml: links[0].bandwidth_bytes_per_s is -1, expected at least 1e-30",
    ),
    (
        "links.0.bandwidth_bytes_per_s",
        float("inf"),
        InvalidValue,
        "links[0].bandwidth_bytes_per_s is inf, expected a fi",
    ),
    ("links.0.latency_s", None, InvalidValue, "h.yaml: links[0].latency_s is empty, expected a number"),
    ("routes.5", GONE, InvalidValue, "h.yaml: routes is \"nothing from 'cpu:0-1' to 'cpu:1'\", expected a route for"),
    ("routes.0.source", "cpu:7", UnknownName, "unknown device in routes[0].source of h.yaml 'cpu:7': did you mean"),
    ("routes.0.links", ["coyp"], UnknownName, "unknown link in routes[0].links of h.yaml 'coyp': did you mean 'copy'"),
    ("routes.0.blocks_source", "yes", InvalidValue, "routes[0].blocks_source is 'yes', expected true or false"),
    ("routes", {}, InvalidValue, "h.yaml: routes is a mapping of 0 fields, expected a list"),
    ("run_ahead", 0, InvalidValue, "h.yaml: run_ahead is 0, expected at least 1"),
    ("dispatch_s", float("nan"), InvalidValue, "h.yaml: dispatch_s is nan, expected a finite number"),
    ("dispatch_order", "first", UnknownName, "unknown dispatch_order in h.yaml 'first'"),
    ("corun_slowdown", [[0.0]], InvalidValue, "h.yaml: corun_slowdown is ((0.0,),), expected 3 rows of 3 numbers"),
    ("sources", ["x"], InvalidValue, "h.yaml: sources is a list of 1 values, expected a mapping"),
]


@pytest.mark.parametrize(("path", "value", "kind", "message"), WRONG)
def test_errors_name_file_field_and_value(path: str, value: object, kind: type[RlplaceError], message: str) -> None:
    document = plain(CORES)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    parent = document
    for key in parents:
        parent = parent[key]
    if value is GONE:
        del parent[last]
    else:
        parent[last] = value
    with pytest.raises(kind, match=re.escape(message)):
        host_from_dict(document, "h.yaml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("host.yaml", "name: [", "not valid YAML"),
        ("host.yaml", "name: a\nname: b", "the key 'name' is given twice"),
        ("host.yaml", "name: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("host.yaml", "name: !!timestamp x", "not valid YAML"),
        ("host.yaml", "a: 1\n---\nb: 2", "not valid YAML"),
        ("host.yaml", "[" * 5000, "nested too deeply"),
        ("host.json", "{", "not valid JSON"),
        ("host.json", '{"name": "a", "name": "b"}', "the key 'name' is given twice"),
        ("host.json", "[" * 100_000, "nested too deeply"),
        ("host.txt", "name: a", "ends in .json, .yaml, .yml"),
    ],
)
def test_files_that_are_no_host_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(FileProblem, match=message):
        load_host(write(tmp_path, text, name))


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("binary.yaml", "folder.yaml"):
        with pytest.raises(FileProblem, match=r"cannot be read|not valid YAML|not a regular file"):
            load_host(tmp_path / name)
    with pytest.raises(FileProblem, match=r"no such file. Did you mean 'binary.yaml'"):
        load_host(tmp_path / "binry.yaml")
    with pytest.raises(FileProblem, match="no folder"):
        load_host(tmp_path / "nowhere" / "host.yaml")
    with pytest.raises(FileProblem, match="cannot be written"):
        save_host(CORES, tmp_path / "nowhere" / "host.yaml")
    with pytest.raises(FileProblem, match=r"ends in .json"):
        save_host(CORES, tmp_path / "host.toml")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.mkdir()
    with pytest.raises(FileProblem):
        save_host(CORES, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["host.yaml"]


@pytest.mark.parametrize("document", [None, 3, "text", [], [1, 2]])
def test_documents_that_are_no_mapping(document: object) -> None:
    with pytest.raises(InvalidValue, match=r"h.yaml: host is .* expected a mapping"):
        host_from_dict(document, "h.yaml")


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400), st.just("cpu:0")
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=6
)


def places(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path of every value inside `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_hosts_load_or_raise_our_errors(data: st.DataObject) -> None:
    document = copy.deepcopy(data.draw(st.sampled_from((COMPACT, plain(CORES)))))
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(places(document)))
        parent: Any = document
        for key in parents:
            parent = parent[key]
        action = data.draw(st.sampled_from(("replace", "remove", "add")))
        if action == "replace":
            parent[last] = copy.deepcopy(data.draw(VALUES))
        elif action == "add" and isinstance(parent, dict):
            parent[data.draw(SCALARS)] = copy.deepcopy(data.draw(VALUES))
        else:
            del parent[last]
        if not places(document):
            break
    with contextlib.suppress(RlplaceError):
        host = host_from_dict(document, "h.yaml")
        assert host_from_dict(host.to_dict(), "h.yaml") == host


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_load_or_raise_our_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = (
        (Path(__file__).parents[3] / "rlplace/measure/hosts/presets/cpu+4xA100.yaml").read_text().split("sources:")[0]
    )
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.text(max_size=4) | st.sampled_from(("!!int ''", "*gpu", "&a [*a]", "\t", "- ", "? ", "<<: 1"))
        )
        text = text[:start] + piece + text[start + data.draw(st.integers(0, 12)) :]
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with contextlib.suppress(RlplaceError):
        load_host(path)


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("topology", 0, "bandwidth_bytes_per_s"), 1e-300, r"bandwidth_bytes_per_s is 1e-300, expected at least 1e-30"),
        (("topology", 0, "latency_s"), 1e300, r"latency_s is 1e\+300, expected at most 1e"),
        (("devices", 1, "memory_bandwidth_bytes_per_s"), 1e-300, r"memory_bandwidth_bytes_per_s is 1e-300"),
        (("devices", 1, "peak_flops_per_s"), {"float32": 1e-300}, r"peak_flops_per_s.float32 is 1e-300"),
        (("devices", 0, "context_bytes"), 1 << 41, r"context_bytes is 2199023255552, expected at most memory_bytes"),
    ],
)
def test_figures_that_no_step_can_be_simulated_with_are_refused(
    where: tuple[str, int, str], value: object, told: str
) -> None:
    data: Any = copy.deepcopy(COMPACT)
    table, index, field = where
    data[table][index][field] = value
    with pytest.raises(InvalidValue, match=told):
        host_from_dict(data, "odd.yaml")


def test_a_slowdown_with_which_no_step_ends_is_refused() -> None:
    data = {
        "name": "two",
        "devices": [{"name": "d", "count": 2, "kind": "gpu", "backend": "simulated", "memory_bytes": 1}],
    }
    data |= {"topology": [{"name": "net", "ports": ["d:*"], "bandwidth_bytes_per_s": 1e9}]}
    for value, is_good in ((1e9, True), (1e300, False)):
        with (
            contextlib.nullcontext()
            if is_good
            else pytest.raises(InvalidValue, match=r"corun_slowdown\[1\]\[0\] is 1e\+300")
        ):
            host_from_dict(data | {"corun_slowdown": [[0.0, 1.0], [value, 0.0]]}, "odd.yaml")


@pytest.mark.slow
def test_a_host_of_a_thousand_devices_has_all_its_routes() -> None:
    facts = {"name": "gpu", "count": 1024, "kind": "gpu", "backend": "simulated", "memory_bytes": 1 << 34}
    wiring = {"name": "net", "ports": ["gpu:*"], "bandwidth_bytes_per_s": 1e10}
    host = host_from_dict({"name": "large", "devices": [facts], "topology": [wiring]}, "large.yaml")
    assert (len(host.devices), len(host.routes), len(host.links)) == (1024, 1024 * 1023, 2 * 1024)
    assert host.routes[-1] == Route("gpu:1023", "gpu:1022", ("net:gpu:1023:up", "net:gpu:1022:down"))
    with pytest.raises(InvalidValue, match="at most 1024"):
        host_from_dict({"name": "larger", "devices": [facts | {"count": 1}, facts]}, "larger.yaml")


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
