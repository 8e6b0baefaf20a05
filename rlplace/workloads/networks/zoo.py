"""Workloads built from configs of `transformers`, as the rows of `ZOO` say.

Weights are random or fake; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from rlplace.errors import MissingExtra
from rlplace.workloads.catalog import Parts, loss_of
from rlplace.workloads.configs import ZOO, Draw, WorkloadConfig


def transformers() -> ModuleType:
    """The package `transformers`: models come from its configs with random weights, nothing is downloaded.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise MissingExtra("transformers", "zoo") from None


@contextmanager
def fake_weights_fit() -> Iterator[None]:
    """While active, questions about the values of fake tensors are answered with no.

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


def build(config: WorkloadConfig) -> Parts:
    """The model of `config`, its inputs and its loss.

    Raises:
        MissingExtra: `transformers` is not installed.
    """
    hf, row = transformers(), ZOO[config.NAME]
    with fake_weights_fit():
        model = getattr(hf, row.model)(getattr(hf, row.config)(**_resolved(config, row.arguments)))
    if config.NAME == "gpt2":
        model.loss_type = "ForCausalLM"  # what it falls back to, with a warning: its class name does not say so
    for layer in model.model.layers if config.NAME == "mixtral" else ():  # experts that can be placed one by one
        width, mlp, experts, capacity = (getattr(config, each) for each in ("width", "mlp", "experts", "capacity"))
        layer.mlp.experts = Experts(width, mlp, experts, capacity, std=model.config.initializer_range)
    inputs: dict[str, Tensor] = {}
    for name, draw in row.inputs.items():
        inputs[name] = _drawn(config, draw) if isinstance(draw, Draw) else inputs[draw].clone()
    if config.NAME != "clip":
        return Parts(model, inputs, loss_of, loss=row.loss)
    ends = torch.full((len(inputs["input_ids"]), 1), model.config.text_config.eos_token_id)
    inputs["input_ids"] = torch.cat((inputs["input_ids"], ends), dim=1)
    return Parts(Towers(model), inputs, contrastive_loss, loss=row.loss)


def _resolved(config: WorkloadConfig, given: Any) -> Any:
    """A row's expression, with the values of options: `width`, `4*width`, `width//heads`, `vocab-1`."""
    if isinstance(given, Mapping):
        return {key: _resolved(config, value) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return [_resolved(config, value) for value in given]
    if not isinstance(given, str):
        return given
    one, sign, other = re.findall(r"(\w+)(\*|//|-)?(\w*)", given)[0]
    left, right = (int(word) if word.isdecimal() else getattr(config, word, 1) for word in (one, other))
    return _SIGNS[sign](left, right) if sign else left


_SIGNS = {"*": operator.mul, "//": operator.floordiv, "-": operator.sub}


def _drawn(config: WorkloadConfig, draw: Draw) -> Tensor:
    shape = _resolved(config, draw.shape)
    return torch.randn(shape) if draw.high is None else torch.randint(_resolved(config, draw.high), shape)


class Embeddings(NamedTuple):
    """The result of a forward pass."""

    texts: Tensor
    """(B, shared_width) of length 1."""
    images: Tensor
    """(B, shared_width) of length 1."""
    log_scale: Tensor
    """Scalar, learned: the logarithm of the factor on similarities."""


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


def contrastive_loss(output: Embeddings) -> Tensor:
    """Mean cross-entropy of finding the image of every text and the text of every image (figure 3)."""

    logits_BB = torch.matmul(output.texts, output.images.t()) * output.log_scale.exp()
    pairs_B = torch.arange(logits_BB.shape[0], device=logits_BB.device)
    return (cross_entropy(logits_BB, pairs_B) + cross_entropy(logits_BB.t(), pairs_B)) / 2


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
        return cast(Tensor, self.down(silu(self.gate(x)) * self.up(x)))
