"""`build`: the model of `mixtral` with its inputs and its loss."""

from __future__ import annotations

from rlplace.workloads.configs.mixtral import MixtralConfig
from rlplace.workloads.networks.experts import Experts
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: MixtralConfig) -> Parts:
    """The model with tokens, (B, tokens), which are their own labels, shifted by one inside."""

    hf = transformers()
    model = hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            intermediate_size=config.mlp,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            num_local_experts=config.experts,
            num_experts_per_tok=config.chosen,
            max_position_embeddings=config.tokens,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        )
    )
    for layer in model.model.layers:
        layer.mlp.experts = Experts(
            config.width, config.mlp, config.experts, config.capacity, std=model.config.initializer_range
        )
    text_BT = tokens(config.vocab, config.batch, config.tokens)
    return Parts(model, {"input_ids": text_BT, "labels": text_BT.clone()}, loss_of, loss="accumulated")
