"""`build`: the model of `gpt2` with its inputs and its loss."""

from __future__ import annotations

from rlplace.workloads.configs.gpt2 import GPT2Config
from rlplace.workloads.networks.zoo import tokens, transformers
from rlplace.workloads.workload import Parts, loss_of


def build(config: GPT2Config) -> Parts:
    """The model with tokens, (B, tokens), which are their own labels, shifted by one inside."""

    hf = transformers()
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.tokens,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning: its class name does not say so
    text_BT = tokens(config.vocab, config.batch, config.tokens)
    return Parts(model, {"input_ids": text_BT, "labels": text_BT.clone()}, loss_of, loss="separate")
