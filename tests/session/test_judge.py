"""The loss of workloads that are too large to compute is judged on their small twins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure import resolve_host
from rlplace.session import prepare as judge
from rlplace.session.prepare import Steps, judge_workload, judged, verdict_of
from rlplace.session.setup import CutOptions
from rlplace.workloads import parse_workload

MINE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

def summed():
    return net(), torch.randn(8, 6), lambda y, t: (y - t).square().sum(), "sgd", torch.randn(8, 4)

def padded():
    return net(), torch.randn(8, 6), nn.CrossEntropyLoss(), "adam", torch.randint(4, (8,))

def contrastive():
    return net(), torch.randn(8, 6), lambda y: nn.functional.cross_entropy(y @ y.t(), torch.arange(len(y))), "sgd"

class Centred(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)

def mixing():
    return Centred(6, 4), torch.randn(8, 6), lambda y: y.square().mean(), "sgd"

calls = 0

def once():
    global calls
    calls += 1
    if calls > 1:
        raise RuntimeError("only once")
    return summed()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a user's module, whose functions are not imported yet."""
    (tmp_path / "judged_functions.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield "judged_functions"
    sys.modules.pop("judged_functions", None)


def cut(name: str, host: str, count: int = 2, **asked: object) -> OpGraph:
    options = CutOptions(count, **asked)  # type: ignore[arg-type]
    return Steps(parse_workload(name), resolve_host(host), 0, options).graph(count)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("rnnlm@paper,batch=64", "separate"), ("multi:dlrm@paper*2,mixtral@paper", "accumulated"), ("clip", "joined")],
)
def test_a_twin_is_judged_for_a_workload_too_large(text: str, kind: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    verdict = judge_workload(parse_workload(text))
    assert (verdict.kind, verdict.is_checked) == (kind, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_asked_for_is_judged() -> None:
    assert judge_workload(parse_workload("mixtral@paper"), asked="accumulated").kind == "accumulated"
    with pytest.raises(CaptureError, match="Experts"):
        judge_workload(parse_workload("mixtral@paper"), asked="separate")
    with pytest.raises(InvalidValue, match="expected one with a batch to cut into 2"):
        judge_workload(parse_workload("evoformer"))
    with pytest.raises(InvalidValue, match="batch_dims"):
        judge_workload(parse_workload("dlrm@paper"), batch_dims=(0, 3, 0))


@pytest.mark.slow
def test_the_loss_of_inception_is_what_it_says() -> None:
    verdict = judge_workload(parse_workload("inception_v3"))
    assert (verdict.kind, verdict.is_checked, verdict.normalises_batch) == ("separate", True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "kind"), [("summed", "separate"), ("padded", "joined"), ("contrastive", "joined")]
)
@pytest.mark.parametrize("count", [2, 3])
def test_a_function_is_cut_on_a_preset_as_it_is_with_values(mine: str, function: str, kind: str, count: int) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    preset = cut(f"{mine}:{function}", "4xV100-pcie", count)
    verdict = verdict_of(preset)
    assert verdict is not None
    assert (verdict["kind"], verdict["is_checked"]) == (kind, True)
    assert torch.equal(torch.get_rng_state(), state)
    here = cut(f"{mine}:{function}", "cores", count)
    assert (preset.fingerprint, verdict) == (here.fingerprint, verdict_of(here))


def test_a_function_that_mixes_samples_is_refused_on_a_preset(mine: str) -> None:
    with pytest.raises(CaptureError, match=r"mixed by aten\.mean\.dim"):
        cut(f"{mine}:mixing", "4xV100-pcie")
    graph = cut(f"{mine}:mixing", "4xV100-pcie", loss="accumulated")
    assert [line for line in judged(graph) if "warning" in line] == []
    with pytest.raises(InvalidValue, match="expected 'joined'"):
        cut(f"{mine}:contrastive", "4xV100-pcie", loss="separate")


def test_a_function_that_cannot_be_called_again_is_unchecked_and_said(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = judged(cut(f"{mine}:once", "4xV100-pcie"))
    assert line.startswith("warning: 2 micro-batches, loss separate: unchecked: called once more, ")
    assert "RuntimeError: only once" in line
    monkeypatch.setattr(judge, "MOST_BYTES", 100)
    graph = cut(f"{mine}:summed", "4xV100-pcie")
    assert verdict_of(graph) == {
        "kind": "separate",
        "is_checked": False,
        "why": "unchecked: its parameters and inputs take 0 MB; a mean over samples is assumed",
    }
