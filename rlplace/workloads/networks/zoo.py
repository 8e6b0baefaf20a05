"""Workloads built from configs of `transformers`: each `build_*` returns a model, its inputs and its loss.

Weights are random or fake; nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from rlplace.errors import MissingExtra
from rlplace.workloads.configs import (
    BertConfig,
    ClipConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    ResNet50Config,
    T5Config,
    ViTConfig,
    WhisperConfig,
)
from rlplace.workloads.workload import Parts, loss_of

PACKAGE, EXTRA = "transformers", "zoo"


def transformers() -> ModuleType:
    """The package `transformers`: models come from its configs with random weights, nothing is downloaded.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise MissingExtra(PACKAGE, EXTRA) from None


def tokens(vocab: int, batch: int, length: int) -> Tensor:
    """(batch, length) int64 tokens below `vocab`."""
    return torch.randint(vocab, (batch, length))


@contextmanager
def fake_weights_fit() -> Iterator[None]:
    """While active, fake tensors answer no to what is asked of their values.

    `nn.init.trunc_normal_` draws again until no weight lies out of range; fake weights cannot say, and never do.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
                return False
            return func(*args, **(kwargs or {}))

    with Answers():  # type: ignore[no-untyped-call]
        yield


def build_bert(config: BertConfig) -> Parts:
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


class Embeddings(NamedTuple):
    """What a forward pass returns."""

    texts: Tensor
    """(B, shared_width) of length 1."""
    images: Tensor
    """(B, shared_width) of length 1."""
    log_scale: Tensor
    """Scalar, learned: the logarithm of what similarities are multiplied by."""


class Towers(nn.Module):
    """The towers of a `CLIPModel` and their projections; every pair of image and text is embedded on its own.

    Similarities are left to the loss: they are of all texts with all images of a batch, which may be cut before.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.text_model, self.vision_model = model.text_model, model.vision_model
        self.visual_projection, self.text_projection = model.visual_projection, model.text_projection
        self.logit_scale = model.logit_scale

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Embeddings:
        """Embeddings of texts, (B, tokens), and images, (B, 3, image_size, image_size)."""
        images = self.visual_projection(self.vision_model(pixel_values=pixel_values).pooler_output)
        texts = self.text_projection(self.text_model(input_ids=input_ids).pooler_output)
        images, texts = images / length(images), texts / length(texts)
        return Embeddings(texts, images, self.logit_scale)


def length(vectors_BW: Tensor) -> Tensor:
    """(B, 1)."""
    return vectors_BW.pow(2).sum(dim=-1, keepdim=True).pow(0.5)


def build_clip(config: ClipConfig) -> Parts:
    """The model with texts, (B, tokens), and images, (B, 3, image_size, image_size); pairs are their own labels."""
    hf = transformers()
    end = config.vocab - 1
    text = {
        "vocab_size": config.vocab,
        "hidden_size": config.text_width,
        "intermediate_size": 4 * config.text_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.text_heads,
        "max_position_embeddings": config.tokens,
        "projection_dim": config.shared_width,
        "pad_token_id": 0,
        "bos_token_id": end - 1,
        "eos_token_id": end,
    }
    vision = {
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "projection_dim": config.shared_width,
    }
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=config.shared_width))
    words_BT = tokens(end, config.batch, config.tokens - 1)
    inputs = {
        "input_ids": torch.cat((words_BT, torch.full((config.batch, 1), end)), dim=1),
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
    }
    return Parts(Towers(model), inputs, contrastive_loss, loss="joined")


def contrastive_loss(output: Embeddings) -> Tensor:
    """Mean cross-entropy of finding the image of every text and the text of every image (figure 3)."""

    logits_BB = torch.matmul(output.texts, output.images.t()) * output.log_scale.exp()
    pairs_B = torch.arange(logits_BB.shape[0], device=logits_BB.device)
    return (cross_entropy(logits_BB, pairs_B) + cross_entropy(logits_BB.t(), pairs_B)) / 2


def build_gpt2(config: GPT2Config) -> Parts:
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


def build_llama(config: LlamaConfig) -> Parts:
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


def build_mixtral(config: MixtralConfig) -> Parts:
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


class Experts(nn.Module):
    """Experts of one layer; tokens beyond an expert's room skip it.

    `transformers` keeps all experts of a layer in one tensor, which lives in one place, and sends each the tokens that
    chose it, whose number depends on the data. Here every expert can be placed on its own, and takes as many tokens as
    it has room for, those that value it most, as in GShard (Lepikhin et al. 2020, arXiv:2006.16668) and Switch (Fedus
    et al. 2021, arXiv:2101.03961, section 2.2).
    """

    def __init__(self, width: int, mlp: int, experts: int, capacity: int, std: float) -> None:
        """`capacity` in percent of an even share of the tokens; weights are drawn with deviation `std`."""
        super().__init__()
        self.capacity = capacity
        self.experts = nn.ModuleList(Expert(width, mlp) for _ in range(experts))
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def room(self, tokens: int, chosen: int) -> int:
        """Tokens that each expert takes, where each of `tokens` chooses `chosen` experts."""
        return min(tokens, -(-tokens * chosen * self.capacity // (100 * len(self.experts))))

    def forward(self, tokens_TW: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, W): for every token the weighted sum of its chosen experts.

        Args:
            tokens_TW: (T, W).
            chosen_TK: (T, K) int64 experts of every token.
            weights_TK: (T, K) their weights.
        """
        num_tokens, chosen = chosen_TK.shape
        weights_TE = weights_TK.new_zeros(num_tokens, len(self.experts)).scatter(1, chosen_TK, weights_TK)
        room = self.room(num_tokens, chosen)
        out_TW = torch.zeros_like(tokens_TW)
        for expert, weights_T in zip(self.experts, weights_TE.unbind(1)):
            weights_R, rows_R = weights_T.topk(room)
            out_RW = expert(tokens_TW.index_select(0, rows_R)) * weights_R[:, None]
            out_TW = out_TW.index_add(0, rows_R, out_RW)
        return out_TW


class Expert(nn.Module):
    """A gated feed-forward layer (SwiGLU)."""

    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp, bias=False)
        self.up = nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(R, W) to the same."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


def build_resnet50(config: ResNet50Config) -> Parts:
    """The model with images, (B, 3, image_size, image_size), and labels, (B,)."""
    hf = transformers()
    model = hf.ResNetForImageClassification(
        hf.ResNetConfig(
            embedding_size=config.width,
            hidden_sizes=[config.width * factor for factor in (4, 8, 16, 32)],
            num_labels=config.classes,
        )
    )
    inputs = {
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.classes, (config.batch,)),
    }
    return Parts(model, inputs, loss_of, loss="separate")


def build_t5(config: T5Config) -> Parts:
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


def build_vit(config: ViTConfig) -> Parts:
    """The model with images, (B, 3, image_size, image_size), and labels, (B,)."""
    hf = transformers()
    with fake_weights_fit():
        model = hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=4 * config.width,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=config.dropout,
                image_size=config.image_size,
                patch_size=config.patch_size,
                num_labels=config.classes,
            )
        )
    inputs = {
        "pixel_values": torch.randn(config.batch, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.classes, (config.batch,)),
    }
    return Parts(model, inputs, loss_of, loss="separate")


def build_whisper(config: WhisperConfig) -> Parts:
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
