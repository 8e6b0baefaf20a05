"""`build`: the model of `whisper` with its inputs and its loss."""

from __future__ import annotations

import torch

from rlplace.workloads.configs.whisper import WhisperConfig
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: WhisperConfig) -> Parts:
    """The model with spectrograms, (B, mels, frames), and transcripts as labels, (B, tokens)."""
    hf = transformers()
    model = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=config.vocab,
            num_mel_bins=config.mels,
            d_model=config.width,
            encoder_layers=config.layers,
            encoder_attention_heads=config.heads,
            encoder_ffn_dim=4 * config.width,
            decoder_layers=config.layers,
            decoder_attention_heads=config.heads,
            decoder_ffn_dim=4 * config.width,
            max_source_positions=config.frames // 2,
            max_target_positions=config.tokens,
            dropout=config.dropout,
            attention_dropout=config.dropout,
            activation_dropout=config.dropout,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )
    inputs = {
        "input_features": torch.randn(config.batch, config.mels, config.frames),
        "labels": tokens(config.vocab, config.batch, config.tokens),
    }
    return Parts(model, inputs, loss_of, loss="separate")
