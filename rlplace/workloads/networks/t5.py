"""`build`: the model of `t5` with its inputs and its loss."""

from __future__ import annotations

from rlplace.workloads.configs.t5 import T5Config
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: T5Config) -> Parts:
    """The model with source tokens, (B, tokens), and target tokens as labels, (B, target_tokens)."""

    hf = transformers()
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=config.vocab,
            d_model=config.width,
            d_kv=config.width // config.heads,
            d_ff=4 * config.width,
            num_layers=config.layers,
            num_heads=config.heads,
            dropout_rate=config.dropout,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )
    inputs = {
        "input_ids": tokens(config.vocab, config.batch, config.tokens),
        "labels": tokens(config.vocab, config.batch, config.target_tokens),
    }
    return Parts(model, inputs, loss_of, loss="separate")
