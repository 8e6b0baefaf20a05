"""`build`: the model of `llama` with its inputs and its loss."""

from __future__ import annotations

from rlplace.workloads.configs.llama import LlamaConfig
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: LlamaConfig) -> Parts:
    """The model with tokens, (B, tokens), which are their own labels, shifted by one inside."""

    hf = transformers()
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            intermediate_size=config.mlp,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.tokens,
            bos_token_id=0,
            eos_token_id=1,
            use_cache=False,
        )
    )
    text_BT = tokens(config.vocab, config.batch, config.tokens)
    return Parts(model, {"input_ids": text_BT, "labels": text_BT.clone()}, loss_of, loss="separate")
