"""`cache_by_module`: the memory of keys and values that a model of `transformers` keeps while it generates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlplace.errors import InvalidValue


def cache_by_module(model: nn.Module, num_tokens: int, batch: int) -> dict[str, int]:
    """Bytes of keys and values that each attention layer keeps for `num_tokens` tokens of `batch` sequences.

    Args:
        model: of `transformers`, whose config says how many heads there are and how wide they are.
        num_tokens: of the prompt and of what is generated.
        batch: sequences.

    Raises:
        InvalidValue: it is no model that generates text with a cache.
    """
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and getattr(module, "is_decoder", True)
    ]
    inner = [path for path in layers if not any(other.startswith(f"{path}.") for other in layers)]
    config: Any = getattr(model, "config", None)
    if config is None or not inner:
        raise InvalidValue(
            "cache_tokens",
            num_tokens,
            "0: only models of `transformers` that generate text have a cache of a known size",
            where="device map",
        )
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = (
        getattr(config, "head_dim", None)
        or getattr(config, "d_kv", None)
        or config.hidden_size // config.num_attention_heads
    )
    window = getattr(config, "sliding_window", None)
    kept = num_tokens if not window else min(num_tokens, window)
    element = next((tensor.element_size() for tensor in model.parameters()), torch.float32.itemsize)
    return dict.fromkeys(inner, 2 * batch * heads * width * kept * element)
