"""The loss of workloads that are too large to compute is judged on their small twins."""

from __future__ import annotations

import pytest
import torch

from rlplace.errors import CaptureError, InvalidValue
from rlplace.runs.judge import judge_workload
from rlplace.workloads import parse_workload


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
