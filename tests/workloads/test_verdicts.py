"""Every named workload says what is cut of it and how micro-batches make its loss; computed, it is so."""

from __future__ import annotations

import re

import pytest
from tiny_workloads import TEXTS, TINY

from rlplace.errors import CaptureError, InvalidValue
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.micro_batching.loss_verdict import judge_loss
from rlplace.graphs.micro_batching.slices import plan_slices
from rlplace.graphs.program import LossVerdict, Slicing
from rlplace.workloads import Workload, build, parse_workload

KINDS = {**dict.fromkeys(TINY, "separate"), "clip": "joined", "mixtral": "accumulated", "multi": "separate"}
NORMALISED = {"inception_v3", "resnet50"}
OTHERS = [name for name in TEXTS if name not in ("evoformer", "inception_v3")]
"""All but what has no batch and what takes long in float64."""


def built(name: str) -> Workload:
    return build(parse_workload(re.sub(r"batch=\d+", "batch=5", TEXTS[name])))


def slicing_of(workload: Workload, count: int) -> Slicing:
    args, kwargs = as_call(workload.inputs)
    return plan_slices(workload.model, args, kwargs, workload.loss_fn, (), count, workload.batch_dims)


def judged(workload: Workload, count: int, asked: str) -> LossVerdict:
    args, kwargs = as_call(workload.inputs)
    slicing = slicing_of(workload, count)
    return judge_loss(workload.model, args, kwargs, workload.loss_fn, (), slicing, asked=asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_loss_is_what_the_workload_says(name: str) -> None:
    workload = built(name)
    verdict = judged(workload, 3, workload.loss)
    assert (verdict.kind, verdict.weights, verdict.is_checked) == (KINDS[name], "mean", True)
    assert verdict.normalises_batch == (name in NORMALISED)


def test_a_workload_without_a_batch_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"expected one with a batch to cut into 2 for Evoformer.*K = 1"):
        slicing_of(build(parse_workload(TEXTS["evoformer"])), 2)


def test_experts_route_over_the_whole_batch() -> None:
    with pytest.raises(CaptureError, match=r"aten\.topk\.default in model\.layers\.0\.mlp\.experts \(Experts\)"):
        judged(build(parse_workload("mixtral@capacity=60,batch=4,width=16,mlp=8,vocab=19,layers=1")), 2, "auto")


def test_images_and_texts_are_compared_over_the_whole_batch() -> None:
    assert judged(built("clip"), 2, "auto").kind == "joined"
    with pytest.raises(InvalidValue, match="loss is 'separate', expected 'joined'"):
        judged(built("clip"), 2, "separate")


@pytest.mark.parametrize("name", TEXTS)
def test_tensors_are_cut_where_their_batch_is(name: str) -> None:
    """Another batch makes other shapes, and where."""
    if name == "evoformer":
        return
    texts = [re.sub(r"batch=\d+", f"batch={batch}", TEXTS[name]) for batch in (7, 9)]
    first, second = (build(parse_workload(text)) for text in texts)
    values = [work.inputs.values() if isinstance(work.inputs, dict) else work.inputs for work in (first, second)]
    expected = []
    for one, other in zip(*values, strict=True):
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        expected += differing
    assert slicing_of(first, 3) == Slicing(tuple(expected), (3, 2, 2))


def test_time_first_workloads_are_cut_along_the_batch_where_it_is_as_long_as_the_time() -> None:
    for name in ("nmt", "rnnlm"):
        workload = build(parse_workload(re.sub(r"batch=\d+", "batch=3", TEXTS[name])))
        assert set(slicing_of(workload, 3).dims) == {1}
    assert slicing_of(build(parse_workload(re.sub(r"batch=\d+", "batch=3", TEXTS["dlrm"]))), 3).dims == (0, 1, 0)


def test_several_workloads_with_batches_of_different_size_are_refused() -> None:
    workload = build(parse_workload(f"multi:clip@{TINY['clip']},rnnlm@{TINY['rnnlm']}"))
    with pytest.raises(InvalidValue, match=r"clip\.input_ids of 3.*rnnlm\.0 of 2.*expected tensors of the same batch"):
        slicing_of(workload, 2)
