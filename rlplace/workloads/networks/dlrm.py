"""`DLRM`: the deep learning recommendation model of Naumov et al. 2019 (arXiv:1906.00091, section 2).

Continuous features go through a bottom MLP, categorical ones through embedding tables; the dot products of all pairs
of the resulting vectors, with the bottom MLP's output, go through a top MLP to the probability of a click.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlplace.workloads.catalog import Parts, loss_of
from rlplace.workloads.configs import DLRMConfig


class DLRMOutput(NamedTuple):
    """The result of a forward pass."""

    logits: Tensor
    """(B,)."""
    loss: Tensor | None
    """Scalar, where labels were given."""


class DLRM(nn.Module):
    """Bottom MLP, embedding tables, interaction and top MLP for `config`."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        hidden, width = config.hidden, config.width
        self.tables = nn.ModuleList(Table(rows, width) for rows in config.rows)
        self.bottom = mlp(config.dense, hidden, hidden // 2, hidden // 8, width)
        self.bottom.append(nn.ReLU())
        self.interaction = Interaction(config.tables + 1)
        self.top = mlp(self.interaction.num_pairs + width, hidden, hidden // 2, 1)
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, dense_BD: Tensor, rows_TBL: Tensor, clicks_B: Tensor | None = None) -> DLRMOutput:
        """The logit of a click, and with labels the mean binary cross-entropy.

        Args:
            dense_BD: (B, dense) float features.
            rows_TBL: (tables, B, lookups) int64 rows of every table.
            clicks_B: (B,) float, 0 or 1.
        """
        dense_BW = self.bottom(dense_BD)
        sparse = [table(rows_BL) for table, rows_BL in zip(self.tables, rows_TBL.unbind(0))]
        pairs_BP = self.interaction(torch.stack([dense_BW, *sparse], dim=1))
        logits_B = self.top(torch.cat((dense_BW, pairs_BP), dim=1)).squeeze(1)
        return DLRMOutput(logits_B, None if clicks_B is None else self.loss(logits_B, clicks_B))


class Table(nn.Embedding):
    """Rows of one categorical feature; a sample's are added."""

    def forward(self, rows_BL: Tensor) -> Tensor:
        """(B, lookups) int64 to (B, width)."""
        return super().forward(rows_BL).sum(dim=1)


class Interaction(nn.Module):
    """Dot products of all pairs of different vectors."""

    below: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        first, second = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.num_pairs = num_vectors * (num_vectors - 1) // 2
        """Pairs of vectors, P."""
        self.register_buffer("below", first * num_vectors + second, persistent=False)

    def forward(self, vectors_BVW: Tensor) -> Tensor:
        """(B, vectors, W) to (B, P), by rows of the triangle below the diagonal."""
        products_BVV = torch.bmm(vectors_BVW, vectors_BVW.transpose(1, 2))
        return products_BVV.flatten(1).index_select(1, self.below)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers from the first width to the last, ReLU between them."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build(config: DLRMConfig) -> Parts:
    """The model with features, (B, dense), rows to look up, (tables, B, lookups), and labels, (B,), 0 or 1."""
    dense_BD = torch.rand(config.batch, config.dense)
    rows_TBL = torch.stack([torch.randint(rows, (config.batch, config.lookups)) for rows in config.rows])
    clicks_B = torch.randint(2, (config.batch,)).float()
    return Parts(DLRM(config), (dense_BD, rows_TBL, clicks_B), loss_of, (0, 1, 0), "separate")
