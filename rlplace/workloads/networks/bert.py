"""`build`: the model of `bert` with its inputs and its loss."""

from __future__ import annotations

import torch

from rlplace.workloads.configs.bert import BertConfig
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: BertConfig) -> Parts:
    """The model with tokens, masked-token labels, (B, tokens), and next-sentence labels, (B,)."""
    hf = transformers()
    model = hf.BertForPreTraining(
        hf.BertConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=4 * config.width,
            max_position_embeddings=config.tokens,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
        )
    )
    inputs = {
        "input_ids": tokens(config.vocab, config.batch, config.tokens),
        "labels": tokens(config.vocab, config.batch, config.tokens),
        "next_sentence_label": torch.randint(2, (config.batch,)),
    }
    return Parts(model, inputs, loss_of, loss="separate")
