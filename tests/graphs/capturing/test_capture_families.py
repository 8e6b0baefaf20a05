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
VALUES, SPECTRUM = "depends on the values of tensors", r"`self.config.mask_time_prob` \(0.05\): 0 or False"
REFUSED: dict[str, dict[str, str]] = {
    "causal": dict.fromkeys(("jetmoe", "xlm", "xmod"), VALUES),
    "masked": dict.fromkeys(("flaubert", "ibert", "longformer", "xlm", "xmod"), VALUES),
    "speech": dict.fromkeys(
        ("data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2", "wavlm"), SPECTRUM
    ),
}
"""Why each is refused."""
MOST_LEFT_OUT = {"causal": 33, "masked": 4, "speech": 6}
"""How many families have sizes that have to fit one another in ways of their own, or are of several parts."""


def mean_of_logits(output: Any) -> Tensor:
    return output.logits.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_families_are_captured_as_eager_or_refused_with_a_reason(kind: str) -> None:
    from transformers.models.auto import modeling_auto

    refused, left_out, wrong = {}, set(), {}
    for family, names in getattr(modeling_auto, KINDS[kind]).items():
        torch.manual_seed(0)
        ids = torch.randint(3, 60, (2, 8))
        inputs = {"input_values": torch.randn(2, 6400)} if kind == "speech" else {"input_ids": ids, "labels": ids}
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
            graph = capture(model, inputs, loss_of)
            if graph.program.draws:  # compared with equal draws when it was captured
                continue
            step = run_graph(graph)
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
    assert wrong == {}
    assert len(left_out) <= MOST_LEFT_OUT[kind], sorted(left_out)
    assert {family for family, why in refused.items() if not re.search(REFUSED[kind].get(family, "$^"), why)} == set()
    assert REFUSED[kind].keys() - refused.keys() - left_out == set()
