"""Small nets, batches and losses that are judged for micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.graphs.capturing.capture import as_call, as_targets
from rlplace.graphs.micro_batching.loss_verdict import judge_loss
from rlplace.graphs.micro_batching.slices import plan_slices
from rlplace.graphs.program import LossVerdict

BATCH, CLASSES = 8, 4


def judge(
    model: nn.Module, inputs: Any, loss_fn: Any, targets: Any = None, count: int = 2, **asked: Any
) -> LossVerdict:
    args, kwargs = as_call(inputs)
    given = (model, args, kwargs, loss_fn, as_targets(targets))
    return judge_loss(*given, plan_slices(*given, count), **asked)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, 5)), generator=torch.Generator().manual_seed(0))


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape or (BATCH,), generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))


class Labelled(nn.Module):
    """Computes its loss itself, as models of Hugging Face do."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net(), loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": self.loss(logits, labels), "logits": logits}


class ByHand(nn.Module):
    """Normalises over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def contrastive(embedded: Tensor) -> Tensor:
    logits = embedded @ embedded.t()
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def mean_loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss
