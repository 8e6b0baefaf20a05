"""Families of `transformers` by their automatic classes, each with its own default configuration made tiny."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "dim", "dim_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "dim_ff", "hidden_dim", "d_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads", "rotary_dim"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "num_conv_pos_embeddings"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size", "entity_vocab_size", "q_lora_rank"), 16),
    **dict.fromkeys(("lru_width", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "first_k_dense_replace"), 1),
    "num_conv_pos_embedding_groups": 4,
}
"""What sizes become, where a default is larger; what else a family needs is in `OTHERS`."""

FOUR_LAYERS = {"num_hidden_layers": 4}  # one of full attention among those of linear attention
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "lfm3"), FOUR_LAYERS),
    **{family: {"head_dim": 8} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # the other needs long sequences, and is eagerly this one
    "esm": {"vocab_size": 64, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": None},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}


def tiny_config(kind: Any) -> Any:
    """A configuration of a class, with defaults for all that is no size."""
    import transformers

    default = kind()
    given: dict[str, Any] = {}
    for name, size in SIZES.items():
        was = getattr(default, name, None)
        if isinstance(was, int) and was > size:
            given[name] = size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        was = getattr(default, name, None)
        if isinstance(was, int) and was >= SIZES["vocab_size"]:
            given[name] = 2
    if "qk_rope_head_dim" in given:  # of latent attention, whose heads are all its own
        given = {**given, "num_key_value_heads": 4, "head_dim": None}
    if isinstance(width := getattr(default, "conv_dim", None), (tuple, list)):
        given["conv_dim"] = (16,) * len(width)
    for name, sub in getattr(kind, "sub_configs", {}).items():
        if sub is not transformers.AutoConfig:
            given[name] = tiny_config(sub)
        elif (was := getattr(default, name)) is not None:
            given[name] = tiny_config(type(was))
    given |= OTHERS.get(kind.model_type, {})
    return kind(**{name: value for name, value in given.items() if value is not None})


MOST_PARAMETERS = 3_000_000


def tiny_model(family: str, name: str) -> nn.Module:
    """A model of a family in train mode, with random weights and without dropout, which eager draws by itself.

    Raises:
        ValueError: it is not tiny.
    """
    import transformers

    config = tiny_config(transformers.CONFIG_MAPPING[family])
    with torch.device("meta"):
        size = sum(each.numel() for each in getattr(transformers, name)(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    model: nn.Module = getattr(transformers, name)(config).train()
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and "layer" not in key and isinstance(value, float):
                setattr(module, key, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
