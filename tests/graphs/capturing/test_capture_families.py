"""Families of `transformers` with their defaults: captured as eager, or refused for a known reason."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from tiny_families import tiny_model
from torch import Tensor

from rlplace.errors import CaptureError
from rlplace.graphs import capture, run_graph

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
}
SPECTRUM, VALUES = r"mask_time_prob` \(0.05\)", "depends on the values of tensors"
REFUSED: dict[str, dict[str, str]] = {"causal": {}, "masked": {}, "speech": {}}
LEFT_OUT: dict[str, set[str]] = {"causal": set(), "masked": set(), "speech": set()}


def mean_of_logits(output: Any) -> Tensor:
    return output.logits.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_families_are_captured_as_eager_or_refused_with_a_reason(kind: str) -> None:
    from transformers.models.auto import modeling_auto

    refused, left_out, wrong = {}, set(), {}
    for family, names in getattr(modeling_auto, KINDS[kind]).items():
        torch.manual_seed(0)
        ids = torch.randint(3, 60, (2, 8))
        inputs = {"input_values": torch.randn(2, 3200)} if kind == "speech" else {"input_ids": ids, "labels": ids}
        loss_of = mean_of_logits if kind == "speech" else lambda output: output.loss
        try:
            model = tiny_model(family, names[0] if isinstance(names, tuple) else names)
            eager = copy.deepcopy(model)
            expected = loss_of(eager(**copy.deepcopy(inputs)))
            expected.backward()
        except Exception:  # of its configuration, whose sizes have to fit one another
            left_out.add(family)
            continue
        try:
            step = run_graph(capture(model, inputs, loss_of))
        except CaptureError as error:
            refused[family] = str(error)
            continue
        try:
            torch.testing.assert_close(step.result, expected.detach(), rtol=1e-5, atol=1e-5)
            gradients = {name: each.grad for name, each in eager.named_parameters() if each.grad is not None}
            assert step.gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            wrong[family] = str(error)
    print(kind, "REFUSED", {k: v[:500] for k, v in refused.items()}, "LEFT", sorted(left_out))
    assert wrong == {}
    assert left_out == LEFT_OUT[kind]
    assert refused.keys() == REFUSED[kind].keys()
    for family, why in refused.items():
        assert re.search(REFUSED[kind][family], why), f"{family}: {why}"
