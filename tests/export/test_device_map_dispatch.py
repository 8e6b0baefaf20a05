"""Device maps as Hugging Face runs them: all of them, over devices that are not there, and with weights on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_dispatch import dispatched, run_devices
from split_models import Block, Borrowing, Meeting, OwnScale, Stack, Tied, features, words
from torch import nn

from rlplace.export.device_map import Projection, device_map
from rlplace.graphs import OpGraph, capture
from rlplace.graphs.grouping.module_classes import ModuleClasses

accelerate = pytest.importorskip("accelerate")
PLACES = (1, 2, 3)


def random_projection(graph: OpGraph, seed: int) -> Projection:
    """Each class on one of three devices."""
    classes = ModuleClasses(graph)
    where = np.random.default_rng(seed).integers(0, len(PLACES), classes.num_classes).astype(np.int32)
    return Projection(classes, where, where[classes.op_class], 0.0)


def alternating(graph: OpGraph) -> Projection:
    """Classes on one of two devices in turn."""
    classes = ModuleClasses(graph)
    where = (np.arange(classes.num_classes) % 2).astype(np.int32)
    return Projection(classes, where, where[classes.op_class], 0.0)


def small(name: str) -> Callable[[], nn.Module]:
    """A model of `transformers` without tied weights, which fake tensors do not know by their memory."""
    import transformers as hf

    sizes: dict[str, Any] = {"vocab_size": 32, "use_cache": False, "tie_word_embeddings": False}
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    configs: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_positions=8, n_embd=8, n_layer=3, n_head=2, **sizes, **tokens)
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, **sizes, **tokens
            )
        ),
        "bert": lambda: hf.BertForSequenceClassification(
            hf.BertConfig(
                hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=32
            )
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=8,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=16,
                image_size=16,
                patch_size=8,
            )
        ),
    }
    return configs[name]


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.arange(12).reshape(2, 6)
    return {"input_ids": tokens, "labels": torch.tensor([0, 1]) if name == "bert" else tokens.clone()}


def assert_runs_as_said(make: Callable[[], nn.Module], inputs: Any, graph: OpGraph, seed: int) -> None:
    """Every module that has an entry returns its output on the device of its class."""
    projection = random_projection(graph, seed)
    entries = device_map(graph, projection, PLACES)
    main = next(iter(entries.values()))
    given = f"cpu:{main}" if set(entries.values()) == {main} else "cpu"  # a map of one device moves no inputs
    found = run_devices(make, inputs, lambda model: dispatched(model, entries, main), given)
    classes = projection.classes
    for path, device in found.items():
        if path in classes.entry_class:
            expected = PLACES[int(projection.class_device[classes.entry_class[path]])]
            assert device == f"cpu:{expected}", (path, entries)


@pytest.mark.parametrize("kind", [Stack, Meeting, Borrowing, OwnScale, Block])
def test_whatever_a_placement_of_classes_is_its_map_runs_so(kind: type[nn.Module]) -> None:
    graph = capture(kind(), features(), lambda output: output.mean(), "sgd")
    for seed in range(8):
        assert_runs_as_said(kind, features(), graph, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_models_of_transformers_run_as_their_map_says(name: str) -> None:
    pytest.importorskip("transformers")
    make, inputs = small(name), inputs_of(name)
    graph = capture(make(), inputs, lambda output: output.loss, "sgd")
    for seed in range(4):
        assert_runs_as_said(make, inputs, graph, seed)


def test_a_map_that_takes_a_block_apart_does_not_run() -> None:
    entries = {"first": 1, "drop": 1, "blocks.0.up": 1, "blocks.0.down": 2, "blocks.1": 1, "blocks.2": 1, "last": 1}
    with pytest.raises(RuntimeError, match="on the same device"):
        run_devices(Stack, features(), lambda model: dispatched(model, entries))


@pytest.mark.parametrize("kind", [Stack, Tied, Meeting])
def test_a_dispatched_model_returns_what_the_plain_one_does(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind()
    inputs = words() if kind is Tied else features()
    graph = capture(model, inputs, lambda output: output.mean(), "sgd")
    expected = model(inputs).detach()
    entries = device_map(graph, alternating(graph), ("cpu", "disk"))
    assert set(entries.values()) == {"cpu", "disk"}
    placed = accelerate.dispatch_model(model, entries, offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(placed(inputs), expected)


def test_a_models_own_tied_weights_are_dispatched_to_one_place(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    tokens = torch.arange(12).reshape(2, 6)
    graph = capture(model, {"input_ids": tokens, "labels": tokens.clone()}, lambda output: output.loss, "adam")
    expected = model(tokens).logits.detach()
    entries = device_map(graph, alternating(graph), ("disk", "cpu"))
    assert entries["transformer.wte"] == entries["lm_head"]
    with torch.no_grad():
        assert torch.equal(accelerate.dispatch_model(model, entries, offload_dir=tmp_path)(tokens).logits, expected)
