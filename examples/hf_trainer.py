"""A small language model under Hugging Face's `Trainer`, its forward and backward placed.

    python examples/hf_trainer.py

The model comes from a config, with random weights. `Trainer` takes the placed module for the model that it is made of:
data, optimizer, schedule, clipping and logs are its own.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

import rlplace
from rlplace.export import to_module

VOCAB, LENGTH, BATCH = 16, 12, 8


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Tokens that count up from anywhere, which are their own labels."""
    texts = (torch.arange(first, first + LENGTH) % VOCAB for first in range(count))
    return [{"input_ids": text, "labels": text.clone()} for text in texts]


def small_model() -> GPT2LMHeadModel:
    """Two layers of GPT-2."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,  # a cache of keys and values is no tensor, and cannot be part of a graph
        )
    )
    model.loss_type = "ForCausalLM"
    return model


def train(budget_s: float = 5.0, num_steps: int = 60) -> list[float]:
    """Losses that `Trainer` logged."""
    model = small_model()
    batch = default_data_collator(sentences(BATCH))
    graph = rlplace.capture(model, batch, lambda output: output.loss)
    problem = rlplace.Problem.profile(graph, rlplace.Host.detect())
    placed = to_module(model, graph, rlplace.train(problem, budget_s=budget_s).placement)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model=placed, args=options, train_dataset=sentences(64), eval_dataset=sentences(12))
        trainer.train()
        held_out = trainer.evaluate()["eval_loss"]
    model.load_state_dict(placed.state_dict())  # the trained weights, to save, to share or to generate with
    print(f"held-out loss {held_out:.3f}, {placed.num_graphs} graphs")
    placed.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
