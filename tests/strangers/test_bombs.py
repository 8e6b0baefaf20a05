"""Small files that stand for much, and large ones that hold nothing: refused without their memory or their time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import asked

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.files import MOST_JSON_VALUES, parse_json
from rlplace.graphs.formats import load_graph
from rlplace.graphs.formats.graphml import read_graphml
from rlplace.graphs.formats.networkx_graph import MOST_COMPARED, check_spelling
from rlplace.measure.host_model import Prior, load_learned_host
from rlplace.measure.hosts.host_file import Wiring, host_from_dict, lay_routes, load_host, parse_yaml
from rlplace.policy.schedule_network import load_network
from rlplace.training.config import TrainConfig
from rlplace.workloads import parse_kept_workload, parse_workload

pytestmark = pytest.mark.filterwarnings("ignore:.*(unknown cost|costs nothing|nothing reads):RuntimeWarning")

DEVICE = {"name": "gpu", "kind": "gpu", "backend": "simulated", "memory_bytes": 1 << 30}


def test_names_of_names_in_yaml_count_as_often_as_they_stand() -> None:
    lines = ["a0: &a0 [1, 2, 3]"] + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 9)]
    with pytest.raises(FileProblem, match="stands for too many values, expected at most 1,000,000"):
        parse_yaml("\n".join(lines), "host.yaml")
    assert parse_yaml("\n".join(lines[:4]), "host.yaml")


def test_merges_in_yaml_that_double_each_time_are_refused() -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}" for k in range(1, 40)]
    with pytest.raises(FileProblem, match="it merges too many fields"):
        parse_yaml("\n".join(lines), "host.yaml")
    assert parse_yaml("\n".join(lines[:5]), "host.yaml") == {f"a{k}": {"x": 1} for k in range(5)}


def test_long_texts_in_yaml_count_as_often_as_they_stand() -> None:
    for one in ("*a", "{*a : 1}"):
        lines = [f"a: &a {'x' * 60_000}", f"b: [{', '.join([one] * 2000)}]"]
        with pytest.raises(FileProblem, match="stands for too many values"):
            parse_yaml("\n".join(lines), "host.yaml")
        assert parse_yaml("\n".join([lines[0], f"b: [{one}]"]), "host.yaml")


def test_members_of_a_device_are_not_multiplied_without_end() -> None:
    with pytest.raises(InvalidValue, match="members is a list of 1025 values, expected at most 1,024 values"):
        host_from_dict({"name": "h", "devices": [DEVICE | {"count": 2, "members": ["gpu:0"] * 1025}]}, "host.json")


def test_names_of_wirings_are_not_compared_with_all_before() -> None:
    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    wirings = [Wiring(f"net{k}", 1e9, ports=("gpu",)) for k in range(300)]
    for wiring in wirings:
        object.__setattr__(wiring, "name", Name(wiring.name))
    assert lay_routes(wirings, ["gpu"], "host.json") == ((), ())
    assert Name.compared < 300
    with pytest.raises(InvalidValue, match="a name that no other entry has"):
        lay_routes([*wirings, wirings[7]], ["gpu"], "host.json")


@pytest.mark.parametrize("text", ["&a [*a]", "a: &a {b: *a}", "&a [[[*a]]]"])
def test_a_value_in_yaml_that_holds_itself_is_refused(text: str) -> None:
    with pytest.raises(FileProblem, match="a value that holds itself"):
        parse_yaml(text, "host.yaml")


@pytest.mark.parametrize(
    "number", [":".join(["1"] * 1000), "1:30", "1:30.5", "!!int '1:30'", "!!float '1:30.5'", "9" * 41, "0x" + "f" * 99]
)
def test_numbers_in_yaml_are_short_and_in_base_ten(number: str, tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(f"name: {number}")
    code, said = asked("hosts", str(path))
    assert code == 2
    assert "expected a number in base 10, of at most 40 characters" in " ".join(said.split())


def test_numbers_in_yaml_are_read_as_before() -> None:
    text = "a: 1e9\nb: 0x1F\nc: 1_000\nd: -1.5\ne: .inf\nf: '1:30'\ng: !!float 3\nh: cuda:0"
    values = (1e9, 31, 1000, -1.5, float("inf"), "1:30", 3.0, "cuda:0")
    assert parse_yaml(text, "host.yaml") == dict(zip("abcdefgh", values, strict=True))


def test_long_names_are_compared_with_none() -> None:
    """`difflib` takes quadratic time; here two names are near, or one letter's difference away from it."""
    near = "".join(chr(0x4E00 + k) for k in range(150))
    assert UnknownName("op", near, [near[1:]]).nearest == (near[1:],)
    far = near * 20
    assert UnknownName("op", far, [far[1:]]).nearest == ()
    assert UnknownName("op", "nmt", ["nmr", far]).nearest == ("nmr",)


def test_devices_that_multiply_are_counted(tmp_path: Path) -> None:
    host = {"name": "many", "devices": [DEVICE | {"name": f"d{k}", "count": 1000} for k in range(50)]}
    with pytest.raises(InvalidValue, match="devices is 50000, expected at most 1024"):
        host_from_dict(host, "host.json")
    topology = [{"name": f"t{k}", "ports": ["gpu:*"], "bandwidth_bytes_per_s": 1e9} for k in range(1000)]
    host = {"name": "wired", "devices": [DEVICE | {"count": 1000}], "topology": topology}
    with pytest.raises(InvalidValue, match="topology is 'of 1000 entries', expected at most 4 for 1000 devices"):
        host_from_dict(host, "host.json")
    (tmp_path / "host.yaml").write_text(f"name: {'x' * (1 << 20)}")
    with pytest.raises(FileProblem, match="bytes of a host file, expected at most 1048576"):
        load_host(tmp_path / "host.yaml")


@pytest.mark.parametrize("cores", [[0] * 3000, [0, 0], [-1], list(range(5000))])
def test_cores_that_are_none_or_too_many_are_refused(cores: list[int]) -> None:
    with pytest.raises(InvalidValue, match=r"devices.0..cores"):
        host_from_dict({"name": "h", "devices": [DEVICE | {"backend": "cpu", "cores": cores}]}, "host.json")


def test_a_route_over_too_many_links_is_refused() -> None:
    links = [{"name": f"link{k}", "bandwidth_bytes_per_s": 1e9} for k in range(65)]
    ends = {"source": "a", "destination": "b"}, {"source": "b", "destination": "a"}
    routes = [end | {"links": [link["name"] for link in links]} for end in ends]
    host = {"name": "h", "devices": [DEVICE | {"name": name} for name in "ab"], "links": links, "routes": routes}
    with pytest.raises(InvalidValue, match=r"routes.0..links is a list of 65 values, expected at most 64"):
        host_from_dict(host, "host.json")


def test_json_of_many_values_or_keys_is_refused_at_once() -> None:
    with pytest.raises(FileProblem, match="too many values, expected at most 4,000,000"):
        parse_json("[" + "[]," * (MOST_JSON_VALUES // 2) + "[]]", "a.json")
    keys = [f'"{key}": 0' for key in range(300_000)]
    with pytest.raises(FileProblem, match="the key '299999' is given twice"):
        parse_json("{" + ", ".join([*keys, keys[-1]]) + "}", "a.json")


@pytest.mark.parametrize(
    ("text", "is_good"), [(r'"\ud83d\ude00"', True), (r'"\ud800"', False), (r'{"\udc00": 1}', False)]
)
def test_half_a_character_in_json_is_refused(text: str, is_good: bool) -> None:
    if is_good:
        assert parse_json(text, "a.json") == "\U0001f600"
        return
    with pytest.raises(FileProblem, match="a text in it is no Unicode"):
        parse_json(text, "a.json")


def test_what_a_message_repeats_of_a_file_is_cut() -> None:
    for change in ({"x" * 10**6: 1}, {"name": "x" * 10**6}, {"devices": [DEVICE | {"name": "y" * 900}] * 1000}):
        host = {"name": "h", "devices": [DEVICE]} | change
        with pytest.raises((InvalidValue, UnknownName)) as caught:
            host_from_dict(host, "host.json")
        assert len(str(caught.value)) < 2000


def test_functions_of_functions_in_onnx_count_as_often_as_they_are_called(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node, opsets = onnx.helper.make_node, [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("d", 1)]

    def model(depth: int, calls: int, first: str, weight: int = 0, home: str = "d", called: str = "d") -> Path:
        functions = []
        for k in range(depth):
            name, domain = (f"f{k - 1}", called) if k else (first, "" if first == "Relu" else called)
            names = ["x", *(f"t{i}" for i in range(calls - 1)), "y"]
            nodes = [node(name, [a], [b], domain=domain) for a, b in pairwise(names)]
            nodes[0].doc_string = "x" * (0 if k else weight)
            functions.append(onnx.helper.make_function(home, f"f{k}", ["x"], ["y"], nodes, opsets))
        ends = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("a", "b")]
        graph = onnx.helper.make_graph([node(f"f{depth - 1}", ["a"], ["b"], domain=called)], "g", ends[:1], ends[1:])
        made = onnx.helper.make_model(graph, functions=functions, opset_imports=opsets)
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        return tmp_path / "m.onnx"

    assert load_graph(model(3, 4, "Relu")).num_ops == 65
    for made, words in (
        (lambda: model(6, 8, "Relu"), "too many nodes once its functions are called, expected at most 100,000"),
        (lambda: model(6, 8, "Relu", home="", called="ai.onnx"), "too many nodes once"),
        (lambda: model(5, 8, "Relu", 1 << 17), "too large once its functions are called"),
        (lambda: model(3, 2, "f2"), "in a circle"),
    ):
        code, said = asked("graph", str(made()))
        assert code == 2
        assert words in said


def test_nodes_in_onnx_run_only_where_their_results_are_known_to_be_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    ran: list[str] = []
    monkeypatch.setattr("onnx.reference.ReferenceEvaluator", lambda node, **_: ran.append(node.op_type))

    def load(op_type: str, dtype: int, inputs: list[object]) -> list[str]:
        ran.clear()
        helper = onnx.helper
        arrays = [np.asarray(each, dtype=helper.tensor_dtype_to_np_dtype(dtype)) for each in inputs]
        names = [f"i{k}" for k in range(len(arrays))]
        held = [onnx.numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True)]
        nodes = [helper.make_node(op_type, names, ["r"]), helper.make_node("Add", ["a", "r"], ["b"])]
        a, b, r = (helper.make_tensor_value_info(name, dtype, [4]) for name in "abr")
        graph = helper.make_graph(nodes, "g", [a], [b], initializer=held, value_info=[r])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        with contextlib.suppress(InvalidValue, FileProblem):
            load_graph(tmp_path / "m.onnx")
        return ran

    wide = [np.zeros(shape) for shape in ((1000, 1, 1), (1, 1000, 1), (1, 1, 0))]
    assert load("Range", onnx.TensorProto.INT64, [0, 4, 1]) == ["Range"]
    assert load("Range", onnx.TensorProto.FLOAT16, [0, 65504, 2.6e-4]) == []  # onnx itself infers nothing
    assert load("Range", onnx.TensorProto.INT64, [-(1 << 62), (1 << 62) + 5, 1 << 33]) == []
    assert load("Max", onnx.TensorProto.FLOAT, wide) == []  # nothing, by way of a million


@pytest.mark.filterwarnings("ignore:.*that nothing reads:RuntimeWarning")
def test_defaults_in_graphml_are_not_multiplied_by_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "g.graphml"
    keys = [f'<key id="k{k}" for="node" attr.name="a{k}"><default>1</default></key>' for k in range(300)]
    keys.append('<key id="f" for="node" attr.name="flops" attr.type="long"><default>7</default></key>')
    nodes = [f'<node id="n{k}"/>' for k in range(300)]
    path.write_text(f"<graphml>{''.join(keys)}<graph>{''.join(nodes)}</graph></graphml>")
    assert sum(len(row) for _, row in read_graphml(path).nodes(data=True)) == 300 + 300
    assert load_graph(path).flops.tolist() == [7.0] * 300


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<graph>" + "".join(f'<node id="{k}"/>' for k in range(200)) + "</graph>", "too many values"),
        ("<graph " + " ".join(f'a{k}=""' for k in range(1100)) + "/>", "too many values"),
        ("<a>" * 200 + "</a>" * 200, "nested 100 deep"),
    ],
)
def test_xml_of_many_values_is_refused(
    content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.graphs.formats.graphml.MOST_GRAPH_VALUES", 1000)
    (tmp_path / "g.graphml").write_text(f"<graphml>{content}</graphml>")
    code, said = asked("graph", str(tmp_path / "g.graphml"))
    assert code == 2
    assert words in said


def test_names_that_nobody_reads_are_compared_up_to_a_number() -> None:
    names = [f"name of {k}" for k in range(MOST_COMPARED)]
    for count, is_refused in ((10, True), (len(names), False)):
        row = dict.fromkeys([*names[:count], "flps"], 1)
        with pytest.raises(InvalidValue, match="flps") if is_refused else nullcontext():
            check_spelling([("n", row)], [], "g.json")


def test_weights_of_many_empty_tensors_are_refused_unparsed(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (tmp_path / "w.json").write_text('{"schema": 1, "kind": "schedule"}')
    for count, words in ((70_000, "a header of"), (2, "")):
        head = json.dumps({f"{'x' * 9000 if count == 2 else ''}{k}": tensor for k in range(count)}).encode()
        (tmp_path / "w.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        with pytest.raises((FileProblem, InvalidValue)) as caught:
            load_network(tmp_path / "w.safetensors")
        assert words in str(caught.value)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("field", "words"),
    [(f"forward_compute_time={' ' * 60_000}[", "line 1: fields is"), (f"x={'1' * 70_000}", "70022 characters")],
)
def test_long_lines_of_a_profile_are_refused_at_once(field: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text(f"node1 -- layer_0 -- {field}")
    code, said = asked("graph", str(tmp_path / "g.txt"))
    assert code == 2
    assert words in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("workload", "is_built"),
    [
        ("gpt2@paper,layers=48,width=1600,heads=25", True),
        ("whisper@paper,layers=32,width=1280,heads=20", True),
        ("multi:nmt*2,gpt2@layers=2", True),
        ("gpt2@layers=1,width=4096,heads=1,batch=1,tokens=2,vocab=2147483648", False),
        ("gpt2@layers=10000,width=64", False),
        ("gpt2@width=7680,batch=80", False),
        ("gpt2@width=768,heads=768", False),
        ("vit@image_size=112,patch_size=1,batch=64", False),
        (f"multi:{','.join(['rnnlm@paper'] * 20)}", False),
    ],
)
def test_a_run_folder_does_not_name_a_workload_of_any_size(workload: str, is_built: bool) -> None:
    spec = parse_workload(workload)
    with nullcontext() if is_built else pytest.raises(InvalidValue, match="named again"):
        assert parse_kept_workload(workload, None, where="config.json", command="named again") == spec
    assert parse_kept_workload("nmt", workload, where="config.json", command="") == spec


def test_a_host_model_of_any_number_of_factors_is_refused(tmp_path: Path) -> None:
    factor = {"kind": "device", "name": "d", "log_mean": 0.0, "log_deviation": 1.0, "prior_deviation": 1.0}
    head = {"schema": 1, "host": "h", "host_fingerprint": "0", "cost_source": "estimated", "lines": []}
    model = head | {"prior": dataclasses.asdict(Prior()), "factors": [factor], "equations": []}
    path = tmp_path / "host_model.json"
    path.write_text(json.dumps(model))
    assert len(load_learned_host(path).factors) == 1
    equation = {"target": 0.0, "slopes": [1.0]}
    for change, words in (
        ({"factors": [factor] * 5001}, "factors is a list of 5001"),
        ({"equations": [equation] * 20_001}, "equations is a list of 20001"),
    ):
        path.write_text(json.dumps(model | change))
        with pytest.raises(InvalidValue, match=words):
            load_learned_host(path)


@pytest.mark.parametrize(
    "change",
    [
        {"budget_s": 1e9},
        {"total_s": 1e9},
        {"evaluations": 10**12},
        {"num_groups": 10**12},
        {"search": {"table_rounds": 10**6}},
        {"search": {"num_calibrated": 10**6}},
        {"agent": {"pool": 10**9}},
        {"agent": {"draws": 10**9}},
        {"agent": {"evaluations": 10**12}},
        *({"learn": {name: 10**6}} for name in ("num_samples", "num_measured", "screened")),
        *({"learn": {policy: {"hidden": 4096, "num_layers": 16}}} for policy in ("placer", "gnn", "improver")),
        *({"learn": {policy: {"hidden": 400_000}}} for policy in ("placer", "gnn", "improver", "seq2seq", "schedule")),
        {"learn": {"placer": {"num_layers": 10**6}}},
        {"learn": {"gnn": {"num_rounds": 10**6}}},
        {"learn": {"seq2seq": {"attention": 400_000}}},
        {"learn": {"ppo": {"n_epochs": 10**9}}},
        {"learn": {"clone": {"num_steps": 10**9}}},
    ],
    ids=str,
)
def test_options_of_a_run_have_largest_values(change: dict[str, Any]) -> None:
    def changed(config: Any, by: dict[str, Any]) -> Any:
        values = {k: changed(getattr(config, k), v) if isinstance(v, dict) else v for k, v in by.items()}
        return dataclasses.replace(config, **values)

    with pytest.raises(InvalidValue, match="at most"):
        changed(TrainConfig(), change)


LIMITED = """
import contextlib, io, sys
import rlplace.export.formats, rlplace.graphs.formats.onnx_file, rlplace.policy, rlplace.report.html, rlplace.store
from rlplace.cli.main import main
from rlplace.measure.isolate.memory_watch import limit_data

limit_data(512 << 20)
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(line.split())
    print(code, said.getvalue().replace("\\n", " "), flush=True)
"""
GIANT = 1 << 36


@pytest.mark.slow
def test_sparse_files_of_gigabytes_are_refused_unread(tmp_path: Path) -> None:
    def giant(name: str, begin: bytes = b"") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(GIANT)
        return path

    tensors = json.dumps({"w": {"dtype": "F32", "shape": [1 << 33], "data_offsets": [0, 1 << 35]}}).encode()
    weights = giant("policy.safetensors", len(tensors).to_bytes(8, "little") + tensors)
    (tmp_path / "policy.json").write_text('{"schema": 1, "kind": "placer"}')
    lines = {
        f"report {giant('a/session.db').parent}": "session.db: ",
        f"explain {giant('b/session.db').parent}": "session.db: ",
        f"export {giant('c/session.db').parent}": "session.db: ",
        f"place {giant('d/session.db').parent} --host 2xK80": "session.db: ",
        f"measurements list --store {giant('m.db')}": "m.db: ",
        f"hosts {giant('h.json')}": "h.json: ",
        f"hosts {giant('h.yaml')}": "h.yaml: ",
        f"graph {giant('g.json')}": "g.json: ",
        f"graph {giant('g.graphml')}": "g.graphml: ",
        f"graph {giant('g.onnx')}": "g.onnx: ",
        f"graph {giant('g.txt', b'node1 -- Input -- ')}": "g.txt: ",
        f"simulate nmt --host 2xK80 --placement {giant('p.json')}": "p.json: ",
        f"train nmt --host 2xK80 --policy placer --init {weights} --run {tmp_path / 'r'}": "policy.safetensors: ",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(lines)
    for answer, (line, words) in zip(answers, lines.items(), strict=True):
        assert answer.startswith("2 "), answer
        assert " error: " in answer, answer
        assert words in answer, line
