"""What is built of a workload that was named, registered, counted or brought by an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.cli.main import main
from rlplace.errors import InvalidValue, UnknownName
from rlplace.files import read_json
from rlplace.graphs import capture
from rlplace.workloads import (
    CATALOG,
    Family,
    InceptionV3,
    Parts,
    WorkloadConfig,
    build,
    describe_workloads,
    parse_workload,
    register_workload,
)
from rlplace.workloads.catalog import COUNTS_PATH, op_counts

TINY_NMT = "nmt@layers=1,units=4,batch=2,steps=3,vocab=7"


def test_weights_scale_the_losses():
    one, two = "nmt@layers=1,units=4,batch=2,steps=3,vocab=7", "rnnlm@layers=1,units=4,batch=2,steps=3,vocab=7"
    workload = build(parse_workload(f"multi:{one}*2,{two}*0.25,{one}"))
    assert [name for name, _ in workload.model.named_children()] == ["nmt", "rnnlm", "nmt_2"]
    outputs = workload.model(**workload.inputs)
    first, second, third = (outputs[name].loss for name in ("nmt", "rnnlm", "nmt_2"))
    torch.testing.assert_close(workload.loss_fn(outputs), 2 * first + 0.25 * second + third)
    tokens = [workload.inputs[f"nmt.{index}"] for index in range(3)]
    assert torch.equal(workload.model.nmt(*tokens).loss, first)


@pytest.mark.parametrize("text", [TINY_NMT, "inception_v3@image_size=107,classes=3"])
def test_build(text):
    workload = build(parse_workload(text))
    assert (workload.name, workload.optimizer) == (text, "adam")
    loss = workload.loss_fn(workload.model(*workload.inputs))
    assert loss.shape == ()
    assert loss.isfinite()


def test_same_seed_same_weights_and_inputs_and_the_global_state_is_left_alone():
    def tensors(seed):
        workload = build(parse_workload(TINY_NMT), seed=seed)
        return [*workload.model.parameters(), *workload.inputs]

    assert all(torch.equal(a, b) for a, b in zip(tensors(3), tensors(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(tensors(3), tensors(4), strict=True))
    before = torch.get_rng_state()
    build(parse_workload(TINY_NMT), seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["nmt", "inception_v3"])
def test_paper_size_is_built_without_memory(name):
    before = torch.get_rng_state()
    with FakeTensorMode():
        workload = build(parse_workload(name), default_size="paper")
    assert all(isinstance(parameter.data, FakeTensor) for parameter in workload.model.parameters())
    assert all(isinstance(tensor, FakeTensor) for tensor in workload.inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_face_offers_the_models():
    import rlplace.workloads

    assert rlplace.workloads.InceptionV3 is InceptionV3
    assert all(hasattr(rlplace.workloads, name) for name in rlplace.workloads.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = rlplace.workloads.nothing


def test_a_text_can_be_built_at_once() -> None:
    tiny = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"
    first, second = build(tiny), build(parse_workload(tiny))
    assert first.name == second.name == tiny
    with pytest.raises(UnknownName, match="nmtt"):
        build("nmtt")


@dataclass(frozen=True, slots=True)
class MLPConfig(WorkloadConfig):
    NAME: ClassVar[str] = "mlp"

    layers: int = 2
    width: int = 8

    @classmethod
    def paper(cls) -> Self:
        return cls(layers=20)


def build_mlp(config: MLPConfig) -> Parts:
    layers = [nn.Linear(config.width, config.width) for _ in range(config.layers)]
    return Parts(nn.Sequential(*layers), (torch.randn(3, config.width),), lambda y: y.square().mean())


@pytest.fixture
def mlp() -> Iterator[None]:
    register_workload(MLPConfig, build_mlp)
    yield
    CATALOG.unregister("mlp")


@pytest.mark.usefixtures("mlp")
def test_a_registered_workload_is_named_sized_and_built_like_ours() -> None:
    assert len(build("mlp@paper").model) == 20  # type: ignore[arg-type]
    work = build("mlp@layers=3,width=5", seed=4)
    assert work.inputs[0].shape == (3, 5)  # type: ignore[index]
    assert torch.equal(work.inputs[0], build("mlp@layers=3,width=5", seed=4).inputs[0])  # type: ignore[index]
    assert [str(part) for part in parse_workload("multi:mlp@layers=3*2,nmt").parts] == ["mlp@layers=3*2", "nmt"]
    assert CATALOG["mlp"].config is MLPConfig
    with pytest.raises(UnknownName, match="did you mean 'layers'"):
        parse_workload("mlp@layer=3")
    with pytest.raises(UnknownName, match="did you mean 'mlp'"):
        parse_workload("mlpp")
    with pytest.raises(InvalidValue, match="workload mlp: layers is 0"):
        parse_workload("mlp@layers=0")


@pytest.mark.usefixtures("mlp")
def test_a_registered_workload_is_listed_uncounted(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [row for row in describe_workloads() if row["name"] == "mlp"]
    assert row == {
        "name": "mlp",
        "small": {"layers": 2, "width": 8},
        "paper": {"layers": 20, "width": 8},
        "counts": {},
        "extra": None,
        "is_installed": True,
        "problem": None,
    }
    assert main(["workloads"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mlp")]
    assert lines == [
        ["mlp", "small", "not", "counted", "layers=2,width=8"],
        ["mlp", "paper", "not", "counted", "layers=20,width=8"],
    ]


def test_it_is_gone_once_it_is_unregistered() -> None:
    register_workload(MLPConfig, build_mlp)
    CATALOG.unregister("mlp")
    assert "mlp" not in CATALOG
    with pytest.raises(UnknownName, match="unknown workload 'mlp'"):
        parse_workload("mlp")


class NoPaper(WorkloadConfig):
    NAME: ClassVar[str] = "no-paper"


@dataclass(frozen=True, slots=True)
class Nameless(WorkloadConfig):
    @classmethod
    def paper(cls) -> Self:
        return cls()


@dataclass(frozen=True, slots=True)
class Multi(Nameless):
    NAME: ClassVar[str] = "multi"


@dataclass(frozen=True, slots=True)
class NMT(Nameless):
    NAME: ClassVar[str] = "nmt"


@dataclass(frozen=True, slots=True)
class NoDefault(Nameless):
    NAME: ClassVar[str] = "no-default"

    layers: int


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (NoPaper, "expected a dataclass that is a WorkloadConfig with `paper`"),
        (int, "expected a dataclass that is a WorkloadConfig with `paper`"),
        (Nameless, "'Nameless': NAME is None"),
        (Multi, "NAME is 'multi', expected the name of the workload, which is not 'multi'"),
        (NMT, "workload: name is 'nmt', expected a name that is not taken"),
        (NoDefault, "layers is 'without a default'"),
    ],
)
def test_options_that_cannot_be_registered(config: type[WorkloadConfig], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        register_workload(config, build_mlp)
    assert "no-default" not in CATALOG


def test_a_builder_that_returns_something_else_is_named() -> None:
    with pytest.raises(InvalidValue, match="what built workload mlp: the value is 'int', expected Parts"):
        Family(MLPConfig, lambda config: 3).build(MLPConfig())  # type: ignore[arg-type, return-value]


BESIDE = """
from dataclasses import dataclass
from typing import ClassVar, Self
from rlplace.workloads import Family, WorkloadConfig

@dataclass(frozen=True, slots=True)
class SmallConfig(WorkloadConfig):
    NAME: ClassVar[str] = "brought"
    width: int = 3

    @classmethod
    def paper(cls) -> Self:
        return cls(width=30)

FAMILY = Family(SmallConfig, "brought_networks:build")
"""


@pytest.mark.slow
def test_an_installed_package_brings_a_workload_and_a_broken_one_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "brought_workload.py").write_text(BESIDE, encoding="utf-8")
    info = tmp_path / "brought-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 2.0\n", encoding="utf-8")
    points = "[rlplace.workloads]\nbrought = brought_workload:FAMILY\nbent = brought_workload:NO_SUCH\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    code = (
        "import sys; from rlplace.workloads import describe_workloads, parse_workload;"
        "import json; config = parse_workload('brought@width=7').config('small');"
        "rows = {row['name']: row for row in describe_workloads()};"
        "print(json.dumps([config.width, rows['brought'], rows['bent'], 'torch' in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600, env=environment
    )
    width, brought, bent, has_torch = json.loads(done.stdout)
    assert width == 7
    assert brought["paper"] == {"width": 30}
    assert brought["problem"] is None
    assert "workload 'bent' of brought 2.0" in bent["problem"]
    assert bent["is_installed"] is False
    assert not has_torch


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_small_counts_are_true(name: str) -> None:
    with FakeTensorMode():
        workload = build(parse_workload(f"{name}@small"))
    graph = capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)
    counted = {"num_ops": graph.num_ops, "num_edges": graph.num_edges}
    assert op_counts()[name]["small"] == counted, f"run python scripts/count_workloads.py {name}"


def test_every_workload_is_counted_and_no_other() -> None:
    assert read_json(COUNTS_PATH)["workloads"].keys() == CATALOG.keys()
    for sizes in op_counts().values():
        assert 0 < sizes["small"]["num_ops"] <= sizes["paper"]["num_ops"]


def test_rows_hold_options_counts_and_what_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row["name"]: row for row in describe_workloads()}
    assert rows.keys() == CATALOG.keys()
    assert rows["nmt"]["paper"]["units"] == 1024
    assert (rows["nmt"]["extra"], rows["nmt"]["is_installed"]) == (None, True)
    monkeypatch.setattr("rlplace.workloads.catalog.find_spec", lambda name: None)
    missing = {row["name"]: row["extra"] for row in describe_workloads() if not row["is_installed"]}
    assert missing == dict.fromkeys(
        ["bert", "clip", "gpt2", "llama", "mixtral", "resnet50", "t5", "vit", "whisper"], "zoo"
    )


def test_the_list_shows_options_that_can_be_given_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["workloads"]) == 0
    for line in capsys.readouterr().err.splitlines()[:-1]:
        name, size, *_, options = line.split()
        kind = CATALOG[name].config
        assert parse_workload(f"{name}@{options}").config() == (kind.small() if size == "small" else kind.paper())
    assert main(["workloads", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workloads"]) == len(CATALOG)
    monkeypatch.setattr("rlplace.workloads.catalog.find_spec", lambda name: None)
    assert main(["workloads"]) == 0
    assert "pip install 'rlplace[zoo]'" in capsys.readouterr().out
