"""`Evoformer`: AlphaFold's MSA and pair tracks (Jumper et al. 2021).

Algorithms are those of the supplement. Left out are templates, the extra MSA stack, the structure module and dropout;
the losses are the masked MSA's and the distogram's, with their weights in the full model's loss (equation 7).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from rlplace.workloads.catalog import Parts, loss_of
from rlplace.workloads.configs import AMINO_ACIDS, DISTANCE_BINS, EvoformerConfig

IGNORED = -100
"""Label of positions that are not masked."""
MASKED_SHARE = 0.15
"""Share of the alignment that is masked and predicted (supplement, section 1.2.7)."""
MSA_WEIGHT, DISTOGRAM_WEIGHT = 2.0, 0.3
MAX_OFFSET = 32
"""Offsets in the sequence are told apart up to this (algorithm 4)."""
WIDENING = 4
"""How much wider transitions are inside (algorithms 9 and 15)."""


class EvoformerOutput(NamedTuple):
    """The result of a forward pass."""

    msa_logits: Tensor
    """(S, R, amino acids)."""
    distance_logits: Tensor
    """(R, R, bins)."""
    loss: Tensor | None
    """Scalar, where labels were given."""


class Evoformer(nn.Module):
    """Embedding, blocks and two heads for `config`. Shapes: S sequences, R residues, M and P the tracks' widths."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.msa_head = nn.Linear(config.msa_width, AMINO_ACIDS)
        self.distance_head = nn.Linear(config.pair_width, DISTANCE_BINS)
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def forward(
        self, msa_SR: Tensor, labels_SR: Tensor | None = None, distances_RR: Tensor | None = None
    ) -> EvoformerOutput:
        """Logits of both heads, and with labels their weighted loss.

        Args:
            msa_SR: (S, R) int64 amino acids, the protein's own sequence first.
            labels_SR: (S, R) int64 amino acids behind the mask, `IGNORED` elsewhere.
            distances_RR: (R, R) int64 bins of the residues' distances.
        """
        msa_SRM, pair_RRP = self.embedding(msa_SR)
        for block in self.blocks:
            msa_SRM, pair_RRP = block(msa_SRM, pair_RRP)
        msa_logits = self.msa_head(msa_SRM)
        halves_RRB = self.distance_head(pair_RRP)
        distance_logits = halves_RRB + halves_RRB.transpose(0, 1)
        if labels_SR is None or distances_RR is None:
            return EvoformerOutput(msa_logits, distance_logits, None)
        msa_loss = self.loss(msa_logits.flatten(0, 1), labels_SR.flatten())
        distance_loss = self.loss(distance_logits.flatten(0, 1), distances_RR.flatten())
        return EvoformerOutput(msa_logits, distance_logits, MSA_WEIGHT * msa_loss + DISTOGRAM_WEIGHT * distance_loss)


class Embedding(nn.Module):
    """First MSA and pair representations (algorithms 3 and 4)."""

    offsets: Tensor

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.msa = nn.Embedding(AMINO_ACIDS, config.msa_width)
        self.target = nn.Embedding(AMINO_ACIDS, config.msa_width)
        self.left = nn.Embedding(AMINO_ACIDS, config.pair_width)
        self.right = nn.Embedding(AMINO_ACIDS, config.pair_width)
        self.position = nn.Embedding(2 * MAX_OFFSET + 1, config.pair_width)
        residues = torch.arange(config.residues)
        offsets_RR = (residues[:, None] - residues).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        self.register_buffer("offsets", offsets_RR, persistent=False)

    def forward(self, msa_SR: Tensor) -> tuple[Tensor, Tensor]:
        """The MSA track, (S, R, M), and the pair track, (R, R, P)."""
        own_R = msa_SR[0]
        pair_RRP = self.left(own_R)[:, None] + self.right(own_R) + self.position(self.offsets)
        return self.msa(msa_SR) + self.target(own_R), pair_RRP


class Block(nn.Module):
    """One block of both tracks (algorithm 6)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        msa, pair, head = config.msa_width, config.pair_width, config.head_width
        self.row_attention = GatedAttention(msa, config.heads, head, bias_width=pair)
        self.column_attention = GatedAttention(msa, config.heads, head)
        self.msa_transition = transition(msa)
        self.outer_product_mean = OuterProductMean(msa, head, pair)
        self.outgoing = TriangleMultiplication(pair, is_outgoing=True)
        self.incoming = TriangleMultiplication(pair, is_outgoing=False)
        self.starting_attention = GatedAttention(pair, config.pair_heads, head, bias_width=pair)
        self.ending_attention = GatedAttention(pair, config.pair_heads, head, bias_width=pair)
        self.pair_transition = transition(pair)

    def forward(self, msa_SRM: Tensor, pair_RRP: Tensor) -> tuple[Tensor, Tensor]:
        """Both tracks, updated."""
        msa_SRM = msa_SRM + self.row_attention(msa_SRM, pair_RRP)
        msa_SRM = msa_SRM + self.column_attention(msa_SRM.transpose(0, 1)).transpose(0, 1)
        msa_SRM = msa_SRM + self.msa_transition(msa_SRM)
        pair_RRP = pair_RRP + self.outer_product_mean(msa_SRM)
        pair_RRP = pair_RRP + self.outgoing(pair_RRP)
        pair_RRP = pair_RRP + self.incoming(pair_RRP)
        pair_RRP = pair_RRP + self.starting_attention(pair_RRP, pair_RRP)
        turned_RRP = pair_RRP.transpose(0, 1)
        pair_RRP = pair_RRP + self.ending_attention(turned_RRP, turned_RRP).transpose(0, 1)
        return msa_SRM, pair_RRP + self.pair_transition(pair_RRP)


class GatedAttention(nn.Module):
    """Gated self-attention along the second axis, for every index of the first on its own.

    With the MSA and a bias from pairs it is algorithm 7, with the MSA transposed algorithm 8, with pairs and their own
    bias algorithm 13, and with pairs transposed algorithm 14.
    """

    def __init__(self, width: int, heads: int, head_width: int, bias_width: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Linear(width, heads * head_width, bias=False)
        self.keys = nn.Linear(width, heads * head_width, bias=False)
        self.values = nn.Linear(width, heads * head_width, bias=False)
        self.gate = nn.Linear(width, heads * head_width)
        self.out = nn.Linear(heads * head_width, width)
        layers = [] if bias_width is None else [nn.LayerNorm(bias_width), nn.Linear(bias_width, heads, bias=False)]
        self.bias = nn.Sequential(*layers) if layers else None

    def forward(self, x_ALC: Tensor, pair_LLP: Tensor | None = None) -> Tensor:
        """(A, L, C) to the same; the bias comes from (L, L, P)."""
        x_ALC = self.norm(x_ALC)
        shape = (*x_ALC.shape[:2], self.heads, self.head_width)  # (A, L, H, D)
        layers = (self.queries, self.keys, self.values)
        queries, keys, values = (layer(x_ALC).view(shape).transpose(1, 2) for layer in layers)  # (A, H, L, D)
        scores_AHLL = torch.matmul(queries * self.head_width**-0.5, keys.transpose(2, 3))
        if self.bias is not None:
            scores_AHLL = scores_AHLL + self.bias(pair_LLP).permute(2, 0, 1)
        attended_AHLD = torch.matmul(torch.softmax(scores_AHLL, dim=3), values)
        joined = attended_AHLD.transpose(1, 2).flatten(2)  # (A, L, H * D)
        return cast(Tensor, self.out(torch.sigmoid(self.gate(x_ALC)) * joined))


class OuterProductMean(nn.Module):
    """From the MSA track to the pair track (algorithm 10)."""

    def __init__(self, msa_width: int, inner: int, pair_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(msa_width)
        self.left = nn.Linear(msa_width, inner)
        self.right = nn.Linear(msa_width, inner)
        self.out = nn.Linear(inner * inner, pair_width)

    def forward(self, msa_SRM: Tensor) -> Tensor:
        """(S, R, M) to (R, R, P)."""
        x_SRM = self.norm(msa_SRM)
        outer_RRIJ = torch.einsum("sai,sbj->abij", self.left(x_SRM), self.right(x_SRM)) / msa_SRM.shape[0]
        return cast(Tensor, self.out(outer_RRIJ.flatten(2)))


class TriangleMultiplication(nn.Module):
    """Updates every pair from the two other edges of all triangles it is in (algorithms 11 and 12)."""

    def __init__(self, width: int, *, is_outgoing: bool) -> None:
        super().__init__()
        self.equation = "ikp,jkp->ijp" if is_outgoing else "kip,kjp->ijp"
        self.norm = nn.LayerNorm(width)
        self.left, self.left_gate = nn.Linear(width, width), nn.Linear(width, width)
        self.right, self.right_gate = nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.out_norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)

    def forward(self, pair_RRP: Tensor) -> Tensor:
        """(R, R, P) to the same."""
        x_RRP = self.norm(pair_RRP)
        left_RRP = torch.sigmoid(self.left_gate(x_RRP)) * self.left(x_RRP)
        right_RRP = torch.sigmoid(self.right_gate(x_RRP)) * self.right(x_RRP)
        product_RRP = self.out_norm(torch.einsum(self.equation, left_RRP, right_RRP))
        return cast(Tensor, torch.sigmoid(self.gate(x_RRP)) * self.out(product_RRP))


def transition(width: int) -> nn.Sequential:
    """The feed-forward layers of either track (algorithms 9 and 15)."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, WIDENING * width), nn.ReLU(), nn.Linear(WIDENING * width, width)
    )


def build(config: EvoformerConfig) -> Parts:
    """The model with a masked MSA and its labels, (sequences, residues), and distance bins, (residues, residues)."""
    whole_SR = torch.randint(AMINO_ACIDS - 1, (config.sequences, config.residues))
    masked_SR = torch.rand(whole_SR.shape) < MASKED_SHARE
    masked_SR[0, 0] = True  # there is always something to predict
    msa_SR = torch.where(masked_SR, AMINO_ACIDS - 1, whole_SR)
    labels_SR = torch.where(masked_SR, whole_SR, IGNORED)
    distances_RR = torch.randint(DISTANCE_BINS, (config.residues, config.residues))
    return Parts(Evoformer(config), (msa_SR, labels_SR, distances_RR), loss_of, (None, None, None))
