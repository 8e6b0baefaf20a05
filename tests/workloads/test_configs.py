"""What a user may write for a workload, its options, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.workloads import CATALOG, InceptionV3Config, NMTConfig, WeightedPart, WorkloadSpec, build, parse_workload

TINY_NMT = "nmt@layers=1,units=4,batch=2,steps=3,vocab=7"


@pytest.mark.slow
def test_parsing_imports_no_torch():
    code = (
        "import sys; from rlplace.workloads import parse_workload; parse_workload('nmt@paper').config();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nmt", WorkloadSpec("nmt")),
        ("nmt@small", WorkloadSpec("nmt", (), "small")),
        ("inception_v3@paper", WorkloadSpec("inception_v3", (), "paper")),
        ("nmt@layers=4,units=512", WorkloadSpec("nmt", (("layers", 4), ("units", 512)))),
        ("nmt@small,batch=4", WorkloadSpec("nmt", (("batch", 4),), "small")),
        ("nmt@bidirectional=True", WorkloadSpec("nmt", (("bidirectional", True),))),
        ("inception_v3@dropout=0.2", WorkloadSpec("inception_v3", (("dropout", 0.2),))),
        ("inception_v3@image_size=75", WorkloadSpec("inception_v3", (("image_size", 75),))),
        (" nmt @ small , batch = 4 ", WorkloadSpec("nmt", (("batch", 4),), "small")),
        ("package.module:function", WorkloadSpec("package.module:function")),
    ],
)
def test_parse(text, expected):
    assert parse_workload(text) == expected


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("nmtt", "nmt"),
        ("inception", "inception_v3"),
        ("nmt@smal", "small"),
        ("nmt@layer=2", "layers"),
        ("inception_v3@small,image=149", "image_size"),
    ],
)
def test_unknown_name_offers_the_nearest(text, nearest):
    with pytest.raises(UnknownName) as caught:
        parse_workload(text)
    assert nearest in caught.value.known
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmt@", "a size"),
        ("nmt@batch", "key=value"),
        ("nmt@batch=4,small", "size comes first"),
        ("nmt@batch=4,,steps=2", "key=value"),
        ("nmt@batch=4,batch=5", "twice"),
        ("nmt@batch=four", "an integer"),
        ("nmt@batch=4.0", "an integer"),
        ("nmt@batch=", "an integer"),
        ("nmt@batch=0", "at least 1"),
        ("nmt@bidirectional=1", "true or false"),
        ("inception_v3@dropout=much", "a number"),
        ("inception_v3@dropout=nan", "at least 0 and below 1"),
        ("inception_v3@batch=1,image_size=75", "at least 107"),
        ("inception_v3@small,image_size=75", "at least 107"),
        ("module:function@small", "no size and no options"),
        ("my-module:function", "package.module:function"),
        ("module:", "package.module:function"),
        (":function", "package.module:function"),
        ("multi", "multi:NAME"),
        ("multi:", "multi:NAME"),
        ("multi:nmt,,rnnlm", "multi:NAME"),
        ("multi:layers=2,nmt", "multi:NAME"),
        ("multi:nmt*x", "a number as the weight of 'nmt'"),
        ("multi:nmt*", "a number as the weight of 'nmt'"),
        ("multi:nmt*0", "a positive number"),
        ("multi:nmt*-1", "a positive number"),
        ("multi:nmt*nan", "a positive number"),
        ("multi:nmt*inf", "a positive number"),
        ("multi:nmt@layers=0,rnnlm", "at least 1"),
        ("multi:nmt,package.module:function", "a named workload"),
        ("multi:multi:nmt", "a named workload"),
    ],
)
def test_invalid_value_says_what_was_expected(text, message):
    with pytest.raises(InvalidValue, match=message):
        parse_workload(text)


def test_function_spec_takes_no_options():
    with pytest.raises(InvalidValue, match="none"):
        WorkloadSpec("module:function", (("batch", 4),))
    with pytest.raises(UnknownName):
        WorkloadSpec("module:function").config()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("multi:nmt", [("nmt", 1.0)]),
        ("multi:nmt*2,rnnlm", [("nmt", 2.0), ("rnnlm", 1.0)]),
        ("multi:nmt@small*2,rnnlm@paper", [("nmt@small", 2.0), ("rnnlm@paper", 1.0)]),
        ("multi:nmt@layers=4,units=8*0.5,nmt", [("nmt@layers=4,units=8", 0.5), ("nmt", 1.0)]),
        ("multi:nmt@small,units=8,rnnlm@steps=5,batch=1", [("nmt@small,units=8", 1.0), ("rnnlm@steps=5,batch=1", 1.0)]),
        ("multi: nmt @ small , units = 8 * 3 , rnnlm", [("nmt@small,units=8", 3.0), ("rnnlm", 1.0)]),
    ],
)
def test_an_option_belongs_to_the_part_before_it(text, parts):
    spec = parse_workload(text)
    assert [(str(part.spec), part.weight) for part in spec.parts] == parts
    assert parse_workload(str(spec)) == spec


@pytest.mark.parametrize("text", ["multi:nmtt,rnnlm", "multi:nmt@smal,rnnlm", "multi:nmt@small,layer=2"])
def test_parts_are_checked_like_workloads(text):
    with pytest.raises(UnknownName):
        parse_workload(text)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_weights_parse_back(weight):
    spec = WorkloadSpec("multi", parts=(WeightedPart(WorkloadSpec("nmt"), weight),))
    assert parse_workload(str(spec)) == spec


@given(st.text(alphabet="multi:nmtr@,=*small2.json ", max_size=40))
def test_any_text_parses_and_back_or_is_refused(text):
    try:
        spec = parse_workload(text)
    except (UnknownName, InvalidValue, FileProblem):
        return
    assert parse_workload(str(spec)) == spec


@pytest.mark.parametrize("name", ["graph.json", "graph.onnx", "graph.graphml", "a_model", "nmt.json"])
def test_a_file_is_a_workload(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for text in (name, f"./{name}", str(tmp_path / name)):
        spec = parse_workload(text)
        assert spec.is_file
        assert not spec.is_function
        assert str(spec) == text
        assert spec.path.samefile(tmp_path / name)
        assert parse_workload(str(spec)) == spec
        with pytest.raises(UnknownName):
            spec.config()
        with pytest.raises(InvalidValue, match="simulated, not measured"):
            build(spec)


def test_a_name_is_no_file_even_where_one_lies(tmp_path, monkeypatch):
    (tmp_path / "nmt").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert not parse_workload("nmt").is_file


@pytest.mark.parametrize("text", ["missing.json", "missing.onnx", "a/b.graphml", "nmt@small.xml"])
def test_a_missing_file_is_said(text):
    with pytest.raises(FileProblem, match="no such graph file"):
        parse_workload(text)


@pytest.mark.parametrize("text", ["multi:g.json", "multi:nmt,g.onnx*2", "multi:a.b:f,nmt", "multi:multi:nmt"])
def test_parts_are_named_workloads(text):
    with pytest.raises(InvalidValue, match="Functions, graph files and other multis cannot be parts"):
        parse_workload(text)


def test_options_come_from_the_size_which_decides_whether_others_fit():
    assert parse_workload("nmt").config() == NMTConfig.small()
    assert parse_workload("nmt").config("paper") == NMTConfig.paper()
    assert parse_workload("nmt@small").config("paper") == NMTConfig.small()
    assert parse_workload("inception_v3@batch=8").config("paper") == InceptionV3Config(batch=8, image_size=299)
    spec = parse_workload("inception_v3@image_size=75")
    assert spec.config("paper") == InceptionV3Config(batch=32, image_size=75)
    with pytest.raises(InvalidValue, match="at least 107"):
        spec.config("small")
    with pytest.raises(UnknownName, match="small"):
        spec.config("smal")


@given(
    size=st.sampled_from([None, "small", "paper"]),
    options=st.fixed_dictionaries(
        {}, optional={"layers": st.integers(1, 9), "batch": st.integers(1, 10**9), "bidirectional": st.booleans()}
    ),
)
def test_text_of_a_spec_parses_back(size, options):
    spec = WorkloadSpec("nmt", tuple(options.items()), size)
    assert parse_workload(str(spec)) == spec


def test_float_option_parses_back():
    spec = WorkloadSpec("inception_v3", (("dropout", 1e-05),))
    assert parse_workload(str(spec)) == spec


@pytest.mark.parametrize("name", ["rnnlm", "rnnlm@small", "rnnlm@layers=1", "multi:rnnlm", "mine:make", "a.b:c"])
def test_a_file_that_is_called_like_a_name_does_not_stand_for_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}")
    assert not parse_workload(name).is_file
    assert parse_workload(f"./{name}").is_file


@pytest.mark.parametrize("name", ["rnnlm@small.json", "graph", "rnnlm.v2", "x:y.json", "of@small"])
def test_a_file_of_another_name_is_a_graph_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}")
    assert parse_workload(name).is_file


def test_default_is_small_and_paper_sizes_are_those_published():
    for kind in [family.config for family in CATALOG.values()]:
        assert kind() == kind.small()
    assert InceptionV3Config.paper() == InceptionV3Config(batch=32, image_size=299, classes=1000, dropout=0.0)
    assert NMTConfig.paper() == NMTConfig(layers=2, units=1024, batch=64, steps=50, vocab=32000)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (InceptionV3Config, "batch", 0),
        (InceptionV3Config, "batch", "4"),
        (InceptionV3Config, "batch", True),
        (InceptionV3Config, "batch", 4.0),
        (InceptionV3Config, "image_size", 74),
        (InceptionV3Config, "classes", 1),
        (InceptionV3Config, "dropout", 1.0),
        (InceptionV3Config, "dropout", -0.1),
        (InceptionV3Config, "dropout", math.nan),
        (NMTConfig, "layers", 0),
        (NMTConfig, "units", -1),
        (NMTConfig, "batch", 0),
        (NMTConfig, "steps", 0),
        (NMTConfig, "vocab", 1),
        (NMTConfig, "bidirectional", 1),
    ],
)
def test_bad_value_is_named(kind, field, value):
    with pytest.raises(InvalidValue, match=field) as caught:
        kind(**{field: value})
    assert (caught.value.field, caught.value.actual) == (field, value) or value is math.nan


def test_one_small_image_cannot_be_normalised():
    with pytest.raises(InvalidValue, match="batch=2"):
        InceptionV3Config(batch=1, image_size=106)
    InceptionV3Config(batch=1, image_size=107)
    InceptionV3Config(batch=2, image_size=75)


# Worked by hand with floor((n - kernel) / stride) + 1 down the stem and the first reduction.
@pytest.mark.parametrize(("image_size", "expected"), [(75, 3), (107, 5), (149, 7), (299, 17)])
def test_feature_map(image_size, expected):
    assert InceptionV3Config(batch=2, image_size=image_size).feature_map == expected


@pytest.mark.parametrize("name", CATALOG)
def test_every_option_is_checked(name):
    """Integers and shares out of range, and values of another type, are refused by name."""
    kind = CATALOG[name].config
    assert name == kind.NAME
    for field in dataclasses.fields(kind):
        bad = {int: [0, -1, 2.5, True, "2"], float: [-0.1, 1.0, math.inf, "much"], bool: [1, "yes"]}
        for value in bad[type(field.default)]:
            with pytest.raises(InvalidValue, match=field.name):
                kind(**{field.name: value})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("bert@heads=5", "heads"),
        ("gpt2@heads=5", "heads"),
        ("t5@heads=5", "heads"),
        ("vit@heads=5", "heads"),
        ("vit@patch_size=15", "patch_size"),
        ("clip@patch_size=15", "patch_size"),
        ("clip@text_heads=3", "text_heads"),
        ("llama@heads=8,kv_heads=3", "kv_heads"),
        ("llama@width=12,heads=4,kv_heads=4", "heads"),
        ("mixtral@experts=2,chosen=3", "chosen"),
        ("mixtral@width=12,heads=4", "heads"),
        ("whisper@frames=7", "frames"),
        ("whisper@width=9,heads=3", "width"),
        ("resnet50@image_size=32", "image_size"),
    ],
)
def test_options_that_cannot_be_had_together(text, field):
    with pytest.raises(InvalidValue) as caught:
        parse_workload(text)
    assert caught.value.field == field
