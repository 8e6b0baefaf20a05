"""Keys and values that generation keeps, against their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.export.device_map.format import cache_by_module

hf = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip


def test_a_layer_keeps_its_heads_of_keys_and_values() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2))
    found = cache_by_module(model, num_tokens=10, batch=3)
    assert found == dict.fromkeys([f"model.layers.{layer}.self_attn" for layer in (0, 1)], 2 * 3 * 2 * 4 * 10 * 4)
    half = cache_by_module(model.to(torch.bfloat16), num_tokens=10, batch=3)
    assert list(half.values()) == [size // 2 for size in found.values()]


def test_it_is_what_transformers_keeps() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    kept = model(torch.zeros(3, 10, dtype=torch.int64), use_cache=True).past_key_values
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in kept.layers]
    assert list(cache_by_module(model, num_tokens=10, batch=3).values()) == sizes


def test_a_window_bounds_it_and_encoders_have_none() -> None:
    model = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4))
    assert set(cache_by_module(model, num_tokens=10, batch=1).values()) == {2 * 2 * 4 * 4 * 4}
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
    paths = cache_by_module(hf.T5ForConditionalGeneration(hf.T5Config(**sizes)), 10, 1)
    assert paths
    assert all(path.startswith("decoder.") for path in paths)


def test_other_models_have_none_that_is_known() -> None:
    with pytest.raises(InvalidValue, match="only models of `transformers` that generate text"):
        cache_by_module(nn.Linear(2, 2), 10, 1)
